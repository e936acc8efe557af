"""Real engines of models that take images or sound: whose KV is taken, and whose is not.

Placeholders of unlike images are equal tokens, so what is compared is tokens with those of an
engine without kvd, and how many were cached. Images want torchvision, which ``make setup-vllm``
puts beside the environment (``torchvision``), since the one of PyPI does not load by itself there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engines.engine import TO_DECODE
from tests.engines.environment import PYTHON
from tests.engines.forks import HERE, PATIENT, WARM, Forks, engines_at, prompt, tokens_of
from tests.engines.media import token
from tests.support.daemons import one_daemon, two_daemons

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

POOL = {
    "pool.family": "raw",
    "pool.layers": "4",
    "pool.page_size": "32",
    "pool.page_bytes": "16384",  # 32 tokens, 2 heads, 2 x 32 elements of 4 bytes
    "pool.pages": "400",
}

TORCHVISION = Path(PYTHON).parent.parent / "torchvision"

HOW = {"skip_tokenizer_init": False, "max_model_len": 1024}

BEFORE, BEHIND = prompt(40, 1), prompt(45, 2)
IMAGE = [token("<image>")]
"""Of LLaVA: 64 tokens."""


def about(*marks):
    """A prompt with these: the first begins amid the second page."""
    return [*BEFORE, *marks, *BEHIND]


KINDS = {
    "llava": (IMAGE, {"image": [1]}, {"image": [2]}, 128),
    "qwen": (
        [token(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end")],
        {"image": [[1, 112, 112]]},
        {"image": [[2, 112, 112]]},
        96,
    ),
    "gemma": ([token("<boi>")], {"image": [1]}, {"image": [2]}, 96),
    "audio": (
        [token(f"<|{name}|>") for name in ("audio_bos", "AUDIO", "audio_eos")],
        {"audio": [[1, 1.5]]},
        {"audio": [[2, 1.5]]},
        96,
    ),
}
"""By model: what stands for it in a prompt, one, another one, how much of that is whole pages."""


@pytest.fixture(scope="module")
def media(able, tmp_path_factory):
    """A folder with a model of each kind."""
    if not TORCHVISION.is_dir():
        pytest.skip(f"no {TORCHVISION}: make setup-vllm puts it there")
    directory = tmp_path_factory.mktemp("media")
    command = [PYTHON, str(HERE / "media.py"), str(directory)]
    subprocess.run(command, check=True, env=Forks.environment(beside=[TORCHVISION]))
    return directory


@pytest.fixture(scope="module")
def forks(media, tmp_path_factory):
    made = Forks(tmp_path_factory.mktemp("forks"), beside=[TORCHVISION])
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(forks, media):
    """What LLaVA answers to a prompt and its images without kvd, found out once."""
    known = {}

    def of(*asks, **engine):
        lacks = [ask for ask in asks if (repr(ask), repr(engine)) not in known]
        if lacks:
            found = forks.answers(media / "llava", None, lacks, **HOW | engine)
            for ask, answer in zip(lacks, found, strict=True):
                known[repr(ask), repr(engine)] = answer["tokens"]
        return [known[repr(ask), repr(engine)] for ask in asks]

    return of


def shows(*images, ids=None, **more):
    """An ask of LLaVA's; ``ids``: left out, all images follow one another amid a text."""
    told = {"image": list(images)} | more
    return {"ids": ids or about(*IMAGE * len(images)), "media": [told]}


def found_by(forks, media, daemon, asks, options=(), **how):
    """What an engine answers."""
    options = PATIENT | dict(options)
    found, log = forks.run(media / "llava", daemon, [WARM, *asks], options, **HOW | how)
    assert isinstance(found, list), f"{found}\n{log[-3000:]}"
    assert "a bug in kvd's connector" not in log
    return found[1:]


def cached(answers):
    return [answer["cached"] for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_ones_are_found_by_another_engine_and_unlike_ones_are_not(
    forks, media, tmp_path, kind
):
    mark, one, other, whole = KINDS[kind]
    asks = [{"ids": about(*mark), "media": [told]} for told in (one, other, one)]
    alone = tokens_of(forks.answers(media / kind, None, asks, **HOW))
    # Of random weights Gemma answers alike whatever it is shown: of it what is cached is compared.
    assert kind == "gemma" or alone[0] != alone[1]
    with one_daemon(tmp_path, POOL) as daemon:
        for wanted in ([0, 32, whole], [whole] * 3):
            found, log = forks.run(media / kind, daemon, [WARM, *asks], PATIENT, **HOW)
            assert isinstance(found, list), f"{found}\n{log[-3000:]}"
            assert tokens_of(found[1:]) == alone, kind
            assert cached(found[1:]) == wanted
            assert "a bug in kvd's connector" not in log
        # All of the image was loaded: nobody has looked at it again.
        assert not found[-1]["encoded"]
        assert not daemon.snapshot().leases


def test_without_what_tells_images_apart_tokens_are_another_image_s(forks, media, alone, tmp_path):
    """The negative control of all that is compared here."""
    one, other = shows(1), shows(2)
    with one_daemon(tmp_path, POOL) as daemon:
        found_by(forks, media, daemon, [one], breaks="media")
        (wrong,) = found_by(forks, media, daemon, [other], breaks="media")
    assert wrong["cached"] == 128
    assert wrong["tokens"] != alone(other)[0]


def test_where_images_stand_and_in_which_order(forks, media, alone, tmp_path):
    """At the ends of pages, amid them, twice, and the other way round."""
    first, apart = prompt(32, 3), prompt(7, 4)
    at_ends = [*first, *IMAGE, *BEHIND]
    later = [*first, *apart, *IMAGE, *BEHIND]
    both = [*BEFORE, *IMAGE, *apart, *IMAGE, *BEHIND]
    kept = [shows(1, 2), shows(1, ids=at_ends), shows(1, ids=later), shows(1, 2, ids=both)]
    asks = [
        *(shows(2, 1), shows(1, 1), shows(2, ids=at_ends), shows(2, ids=later)),
        *(shows(1, 1, ids=both), shows(2, 2, ids=both)),
    ]
    # Of 40 tokens before, 64 of each image, 7 between.
    found_of = [32, 96, 32, 32, 96, 96]
    with one_daemon(tmp_path, POOL) as daemon:
        stored = found_by(forks, media, daemon, kept)
        assert tokens_of(stored) == alone(*kept)
        found = found_by(forks, media, daemon, asks)
        assert tokens_of(found) == alone(*asks)
        assert cached(found) == found_of
        again = found_by(forks, media, daemon, kept)
        assert tokens_of(again) == alone(*kept)
        assert cached(again) == [192, 128, 128, 192]


@pytest.mark.parametrize("cut", [True, False])
def test_a_step_may_end_amid_an_image(forks, media, alone, tmp_path, cut):
    """Where it may not, vLLM ends it before; either way another engine finds all of it."""
    asks = [shows(1, 2), shows(2, 1)]
    steps = {"max_num_batched_tokens": 80, "disable_chunked_mm_input": not cut}
    with one_daemon(tmp_path, POOL) as daemon:
        for wanted in ([0, 32], [192, 192]):
            found = found_by(forks, media, daemon, asks, **steps)
            assert tokens_of(found) == alone(*asks)
            assert cached(found) == wanted


def test_an_image_is_encoded_again_only_if_its_end_is_computed(forks, media, alone, tmp_path):
    with one_daemon(tmp_path, POOL) as daemon:
        ids = [*prompt(20, 5), *IMAGE, *prompt(20, 6)]  # its end lies in the last page
        asks = [shows(1), shows(1, ids=ids)]
        found_by(forks, media, daemon, asks)
        found = found_by(forks, media, daemon, asks)
        assert tokens_of(found) == alone(*asks)
        assert cached(found) == [128, 96]
        assert [len(answer["encoded"]) for answer in found] == [0, 0]
        # Loaded up to the middle of it.
        half = found_by(forks, media, daemon, [shows(1, ids=ids[:30] + ids[-3:])])
        assert tokens_of(half) == alone(shows(1, ids=ids[:30] + ids[-3:]))


def test_how_an_image_is_prepared_tells_it_apart(forks, media, alone, tmp_path):
    asks = [shows(1), shows(1, kwargs={"do_normalize": False})]
    with one_daemon(tmp_path, POOL) as daemon:
        for wanted in ([0, 32], [128, 128]):
            found = found_by(forks, media, daemon, asks)
            assert tokens_of(found) == alone(*asks)
            assert cached(found) == wanted
    assert len(set(map(tuple, alone(*asks)))) == 2


def test_how_a_models_files_say_that_images_are_prepared_tells_them_apart(forks, media, tmp_path):
    """Where its weights have a name too: vLLM's digest of an image is of its pixels alone."""
    model, ask = tmp_path / "llava", shows(1)
    shutil.copytree(media / "llava", model)
    file = model / "processor_config.json"
    told = json.loads(file.read_text())
    found, wanted = [], []
    with one_daemon(tmp_path, POOL) as daemon:
        for normalizes in (True, False):
            told["image_processor"]["do_normalize"] = normalizes
            file.write_text(json.dumps(told))
            for _ in range(2):
                asks = [WARM, ask]
                named = PATIENT | {"kvd.weights": "release-7"}
                found.append(forks.answers(model, daemon, asks, named, **HOW)[-1])
            wanted += tokens_of(forks.answers(model, None, [ask], **HOW)) * 2
    assert wanted[0] != wanted[2]
    assert tokens_of(found) == wanted
    assert cached(found) == [0, 128] * 2


def test_a_name_that_a_user_has_given_is_not_taken_for_a_content(forks, media, alone, tmp_path):
    """Two engines may have given it to unlike images: vLLM calls both by it."""
    one, other = (shows(seed, uuids={"image": ["first.png"]}) for seed in (1, 2))
    named = {"kvd.media": "uuid"}
    with one_daemon(tmp_path, POOL) as daemon:
        for ask, image in ((one, 1), (other, 2), (one, 1)):
            (found,) = found_by(forks, media, daemon, [ask])
            assert found["tokens"] == alone(shows(image))[0]
            assert found["cached"] == 0
        # Whoever says that a name is of one content has it found, and by no other name.
        third = shows(1, uuids={"image": ["third.png"]})
        for wanted in (0, 128):
            (found, further) = found_by(forks, media, daemon, [one, third], named)
            assert (found["cached"], further["cached"]) == (wanted, 128 if wanted else 32)
            assert tokens_of([found, further]) == alone(shows(1)) * 2


@pytest.mark.parametrize("kwargs", [{}, {"do_normalize": False}])
def test_numbers_that_each_engine_counts_anew_are_no_names(forks, media, alone, tmp_path, kwargs):
    """Without any cache of its own vLLM digests no image: each engine's first one has one name."""
    no_caches = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    with one_daemon(tmp_path, POOL) as daemon:
        for image in (1, 2):
            more = {"kwargs": kwargs} if kwargs else {}
            (found,) = found_by(forks, media, daemon, [shows(image, **more)], **no_caches)
            assert found["tokens"] == alone(shows(image, **more))[0]
            assert found["cached"] == 0
        # One of both is enough.
        for wanted in (0, 128):
            (found,) = found_by(forks, media, daemon, [shows(1)], enable_prefix_caching=False)
            assert (found["tokens"], found["cached"]) == (alone(shows(1))[0], wanted)


def test_what_is_handed_over_is_of_the_same_image(forks, media, alone, tmp_path):
    one, other = shows(1), shows(2)
    with two_daemons(tmp_path, POOL) as pair:
        ends = [(pair.prefill, HOW), (pair.decode, HOW)]
        with engines_at(forks, media / "llava", *ends) as (prefill, decode):
            told = prefill.ask(one["ids"], max_tokens=1, params=TO_DECODE, media=one["media"])
            params = told["params"]
            unlike = decode.ask(other["ids"], params=params, media=other["media"])
            assert unlike["tokens"] == alone(other)[0]
            assert unlike["cached"] == 0
            told = prefill.ask(one["ids"], max_tokens=1, params=TO_DECODE, media=one["media"])
            like = decode.ask(one["ids"], params=told["params"], media=one["media"])
            assert like["tokens"] == alone(one)[0]
            assert like["cached"] == len(about()) + 64 - 1


def test_images_that_come_encoded(forks, media, alone, tmp_path):
    asks = [{"ids": about(*IMAGE), "media": [{"encoded": [seed, 64, 128]}]} for seed in (1, 2)]
    engine = {"enable_mm_embeds": True}
    wanted = alone(*asks, **engine)
    assert wanted[0] != wanted[1]
    with one_daemon(tmp_path, POOL) as daemon:
        for n_found in ([0, 32], [128, 128]):
            found = found_by(forks, media, daemon, asks, **engine)
            assert tokens_of(found) == wanted
            assert cached(found) == n_found


def test_an_adapter_beside_images(forks, media, alone, tmp_path):
    lora = ["one", 1, str(media / "adapter")]
    asks = [shows(1) | {"lora": lora}, shows(2) | {"lora": lora}, shows(1)]
    engine = {"enable_lora": True, "max_lora_rank": 8}
    wanted = alone(*asks, **engine)
    assert len(set(map(tuple, wanted))) == 3
    with one_daemon(tmp_path, POOL) as daemon:
        for n_found in ([0, 32, 0], [128, 128, 128]):
            found = found_by(forks, media, daemon, asks, **engine)
            assert tokens_of(found) == wanted
            assert cached(found) == n_found


def test_a_prompt_of_embeddings_is_computed(forks, media, alone, tmp_path):
    asks = [{"ids": [], "media": [{"embeds": [seed, 100, 128]}]} for seed in (1, 2, 1)]
    engine = {"enable_prompt_embeds": True}
    wanted = alone(*asks, **engine)
    with one_daemon(tmp_path, POOL) as daemon:
        for _ in range(2):
            found = found_by(forks, media, daemon, asks, **engine)
            assert tokens_of(found) == wanted
            assert cached(found)[:2] == [0, 0]


def test_an_encoder_beside_a_decoder_is_refused(forks, media, tmp_path):
    with one_daemon(tmp_path, POOL) as daemon:
        found, _ = forks.run(media / "whisper", daemon, [WARM], **HOW | {"max_model_len": 400})
        assert "CrossAttentionSpec" in found["error"]
        assert "run it without kvd" in found["error"]
