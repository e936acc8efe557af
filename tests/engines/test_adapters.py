"""Adapters whose files are replaced while requests of them are there: nothing wrong is cached.

vLLM drops an adapter that has no room, or that its user removes, and reads its files again when it
is used next. What it has read by then decides whose KV it computes. Tokens are compared with those
of an engine without kvd.
"""

from __future__ import annotations

import shutil
import threading

import pytest

from tests.engines.engine import TO_DECODE
from tests.engines.environment import PYTHON
from tests.engines.forks import PATIENT, WARM, engines_at, prompt
from tests.engines.test_unlike import pool_of
from tests.support.daemons import one_daemon, two_daemons

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
IN_CHUNKS = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 64}
WAYS = ("in place", "renamed", "linked")
STATES = {"waiting": 1, "chunks": 3, "decode": 20}
"""By when the files are replaced, behind how many steps."""
SMALL = prompt(20, 77)
"""Of which nothing is cached: with it vLLM reads an adapter."""


@pytest.fixture(scope="module")
def computed(forks, models):
    """What engines without kvd answer by one adapter or the other, of each of these prompts."""

    def ask(name, prompts):
        lora = ["mine", 1, str(models / name)]
        asks = [{"lora": lora, "ids": ids} for ids in prompts]
        found = forks.answers(models / "model", None, asks, **LORA)
        return [answer["tokens"] for answer in found]

    return ask


class Swapped:
    """An adapter for each way to replace its files, and a prompt for each."""

    def __init__(self, models, directory):
        self.by = str(models / "adapter-2")
        self.ids = {how: prompt(300, seed) for seed, how in enumerate(WAYS)}
        self.paths = {how: directory / how.replace(" ", "-") for how in WAYS}
        for path in self.paths.values():
            shutil.copytree(models / "adapter", path)

    def plays(self, when, **more):
        """Those in which the files of each are replaced: its request is the one that ``ran``.

        While it waits behind one of another adapter, or amid its chunks, or its answer.
        """
        for number, how in enumerate(WAYS, 2):
            path = str(self.paths[how])
            busy = ["ask", "busy", [5] * 40, ["busy", 1, self.by], {"max_tokens": 4}]
            yield [
                *([busy, ["steps", 1]] if when == "waiting" else []),
                ["ask", "ran", self.ids[how], ["mine", number, path], more],
                ["steps", STATES[when]],
                ["replace", how, path, self.by],
                *([] if when == "waiting" else [["remove", number]]),
            ]

    def ran(self, forks, model, daemon, when, more=None, **engine):
        """What each is answered so, and what the engine has logged."""
        asks = [WARM, *({"play": play} for play in self.plays(when, **(more or {})))]
        found, log = forks.run(model, daemon, asks, PATIENT, **engine)
        assert isinstance(found, list), log[-3000:]
        return [one["ran"]["tokens"] for one in found[1:]], log


@pytest.fixture
def swapped(models, tmp_path):
    return Swapped(models, tmp_path)


def of_first(models, prompts):
    """Asks of the first adapter, behind one with which it is read."""
    lora = ["mine", 1, str(models / "adapter")]
    return [{"lora": lora, "ids": ids} for ids in (SMALL, *prompts)]


@pytest.mark.parametrize("when", STATES)
def test_what_is_computed_by_other_files_is_found_by_nobody(
    forks, models, tmp_path, swapped, computed, when
):
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        more = {"max_tokens": 100}
        ran, _ = swapped.ran(forks, models / "model", daemon, when, more, **LORA | IN_CHUNKS)
        turns = [[*swapped.ids[how], *tokens] for how, tokens in zip(WAYS, ran, strict=True)]
        again = of_first(models, turns)
        answers = forks.answers(models / "model", daemon, again, PATIENT, **LORA)[1:]
    assert [answer["tokens"] for answer in answers] == computed("adapter", turns)
    if when == "decode":
        assert min(answer["cached"] for answer in answers) >= 256, "what is of its own is found"


def test_a_request_that_has_found_it_before_its_files_are_replaced_computes_it(
    forks, models, tmp_path, swapped, computed
):
    """An adapter that vLLM has not read, or may drop, is loaded nothing for."""
    prompts = list(swapped.ids.values())
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        first = of_first(models, prompts)
        answers = forks.answers(models / "model", daemon, first, PATIENT, **LORA)[1:]
        tokens, log = swapped.ran(forks, models / "model", daemon, "waiting", **LORA)
    assert tokens == computed("adapter-2", prompts)
    assert tokens != [answer["tokens"] for answer in answers]
    assert "Recovered from KV load failure" not in log
    assert "since this engine began" not in log, "its name was known when it was asked"


def test_an_adapter_is_loaded_for_from_its_second_request_on(forks, models, tmp_path, computed):
    """Or from its first one, where its user has had it read, and the engine goes on by itself."""
    ids = prompt(300, 21)
    lora = ["mine", 1, str(models / "adapter")]
    ask = ["ask", "it", ids, lora]
    plays = (
        [ask],
        [["ask", "first", SMALL, lora], ["end"], ask],
        [["load", lora], ["settle"], ask],
    )
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found = [
            forks.answers(models / "model", daemon, [WARM, {"play": one}], PATIENT, **LORA)
            for one in ([ask], *plays)
        ]
    answers = [one[-1]["it"] for one in found]
    assert [one["cached"] for one in answers] == [0, 0, 288, 288]
    assert [one["tokens"] for one in answers] == computed("adapter", [ids]) * 4


def test_an_adapter_that_vllm_has_read_is_what_it_was_read_as(forks, models, tmp_path, computed):
    """Where its file is written over: vLLM maps that, and copies of it anew for each turn.

    Its requests wait behind one of another adapter, which takes its place meanwhile.
    """
    ids, path, by = prompt(300, 41), str(tmp_path / "mine"), str(models / "adapter-2")
    shutil.copytree(models / "adapter", path)
    mine, busy = ["mine", 1, path], ["busy", 2, by]
    play = [
        ["ask", "read", SMALL, mine],
        ["end"],
        ["ask", "busy", [5] * 40, busy, {"max_tokens": 8}],
        ["until", "runs", "busy"],
        ["ask", "ran", ids, mine],
        ["steps", 2],
        ["replace", "in place", path, by],
    ]
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        engine = LORA | {"max_cpu_loras": 2}
        found = forks.answers(models / "model", daemon, [WARM, {"play": play}], PATIENT, **engine)
        again = of_first(models, [ids])
        (answer,) = forks.answers(models / "model", daemon, again, PATIENT, **LORA)[1:]
    (own,) = computed("adapter", [ids])
    assert (answer["cached"], answer["tokens"]) == (288, own)
    assert found[-1]["ran"]["tokens"] == own


def test_what_vllm_computes_without_an_adapter_beside_one_is_not_cached(forks, models, tmp_path):
    """On a CPU it takes the last adapter for none; nothing else of such an engine is amiss."""
    first, ids, behind = (prompt(300, seed) for seed in (51, 52, 53))
    mine = ["mine", 1, str(models / "adapter")]
    play = [
        ["ask", "first", first, None],
        ["end"],
        ["ask", "busy", [5] * 40, mine, {"max_tokens": 8}],
        ["until", "runs", "busy"],
        ["ask", "beside", ids, None],
        ["end"],
        ["ask", "behind", [*ids, *behind], None],
    ]
    asks = [{"ids": one} for one in (first, ids, [*ids, *behind])]
    alone = forks.answers(models / "model", None, asks)
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        forks.answers(models / "model", daemon, [WARM, {"play": play}], PATIENT, **LORA)
        found = forks.answers(models / "model", daemon, [WARM, *asks], PATIENT)[1:]
    assert [one["tokens"] for one in found] == [one["tokens"] for one in alone]
    assert found[0]["cached"] == 288


# ---- between a load and the first step behind it -------------------------------------------------


class Waiting:
    """A prompt of an adapter that lies in the pool, and a request for it that is loaded.

    It waits, since a request of another adapter is running, until something happens to its own.
    """

    def __init__(self, forks, models, directory):
        self.forks, self.model = forks, models / "model"
        self.path, self.by = str(directory / "mine"), str(models / "adapter-2")
        shutil.copytree(models / "adapter", self.path)
        self.ids = prompt(300, 31)
        self.mine, self.busy = ["mine", 1, self.path], ["busy", 2, self.by]
        self.replaced = ["replace", "renamed", self.path, self.by]

    def then(self, daemon, acts, state="waits", **engine):
        """What is answered behind that, and how often a load has waited so."""
        play = [
            ["ask", "read", SMALL, self.mine],
            ["end"],
            ["ask", "read too", SMALL, self.busy],
            ["end"],
            ["hold"],
            ["ask", "left", self.ids, self.mine, {"priority": 1}],
            ["until", "loading", "left"],
            ["ask", "busy", [5] * 40, self.busy, {"max_tokens": 40, "priority": 1}],
            ["until", "runs", "busy"],
            *([] if state == "loading" else [["release"], ["until", state, "left"]]),
            *acts,
            ["release"],
        ]
        engine = LORA | {"max_cpu_loras": 2} | engine
        asks = [WARM, {"ids": self.ids, "lora": self.mine}]
        self.forks.answers(self.model, daemon, asks, PATIENT, **LORA)
        found, log = self.forks.run(self.model, daemon, [WARM, {"play": play}], PATIENT, **engine)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        return found[-1]


@pytest.fixture
def waiting(forks, models, tmp_path):
    return Waiting(forks, models, tmp_path)


def acts_of(waiting, what):
    """What vLLM reads the adapter anew by, and who is answered behind it."""
    again = ["ask", "again", waiting.ids, waiting.mine]
    third = ["load", ["third", 3, waiting.by]]
    return {
        "removed": ([waiting.replaced, ["remove", 1]], "left"),
        "loaded in place": ([["load_in_place", ["mine", 1, waiting.by]]], "left"),
        "a third one": ([waiting.replaced, third], "left"),
        "aborted": ([waiting.replaced, ["abort", "left"], again, ["remove", 1]], "again"),
        "found": ([waiting.replaced, again, ["abort", "left"], ["remove", 1]], "again"),
        "removed before": ([waiting.replaced, ["remove", 1], again, ["abort", "left"]], "again"),
    }[what]


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapping"])
@pytest.mark.parametrize("state", ["loading", "waits"])
@pytest.mark.parametrize(
    "what", ["removed", "loaded in place", "a third one", "aborted", "found", "removed before"]
)
def test_what_was_loaded_before_it_is_read_anew_is_not_gone_on_from(
    waiting, computed, tmp_path, what, state, overlaps
):
    acts, name = acts_of(waiting, what)
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found = waiting.then(daemon, acts, state, overlaps=overlaps)
    assert found[name]["tokens"] == computed("adapter-2", [waiting.ids])[0]
    assert found[name]["cached"] == 0


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapping"])
@pytest.mark.parametrize("how", WAYS)
def test_what_was_loaded_is_gone_on_from_where_nothing_happens(
    waiting, computed, tmp_path, how, overlaps
):
    """Whatever lies at its path by now: vLLM has what it has read. The negative control."""
    again = ["ask", "again", waiting.ids, waiting.mine]
    replaced = ["replace", how, waiting.path, waiting.by]
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found = waiting.then(daemon, [replaced, again], overlaps=overlaps)
    (own,) = computed("adapter", [waiting.ids])
    assert [found[name]["tokens"] for name in ("left", "again")] == [own, own]
    assert [found[name]["cached"] for name in ("left", "again")] == [288, 288]


def test_one_that_has_left_is_found_by_nobody_and_vllm_computes_by_what_it_has(
    waiting, computed, tmp_path
):
    again = ["ask", "again", waiting.ids, waiting.mine]
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found = waiting.then(daemon, [waiting.replaced, again, ["abort", "left"]])
    assert found["again"]["tokens"] == computed("adapter", [waiting.ids])[0]


@pytest.mark.parametrize(
    "engine",
    [
        {"scheduling_policy": "priority"},
        {"max_loras": 2, "max_num_seqs": 1, "scheduling_policy": "priority"},
    ],
    ids=["priorities", "one at a time"],
)
def test_whoever_runs_first(waiting, computed, tmp_path, engine):
    """A request that came later, and has the lower number."""
    again = ["ask", "again", waiting.ids, waiting.mine, {"priority": 0}]
    acts = [waiting.replaced, ["remove", 1], again]
    state = "filled" if "max_num_seqs" in engine else "waits"
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found = waiting.then(daemon, acts, state, **engine)
    (wanted,) = computed("adapter-2", [waiting.ids])
    assert [found[name]["tokens"] for name in ("left", "again")] == [wanted, wanted]


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapping"])
@pytest.mark.parametrize("reset", [False, True], ids=["", "reset"])
def test_what_was_loaded_before_the_models_weights_change_is_not_gone_on_from(
    waiting, forks, tmp_path, reset, overlaps
):
    """VLLM resets nothing itself: a request is running."""
    acts = [["flip"], *([["reset"]] if reset else [])]
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found = waiting.then(daemon, acts, overlaps=overlaps)
    alone = [["flip"], ["ask", "left", waiting.ids, waiting.mine]]
    (wanted,) = forks.answers(waiting.model, None, [{"play": alone}], **LORA)
    assert found["left"]["tokens"] == wanted["left"]["tokens"]


def test_what_vllm_finds_of_another_number_is_not_cached_as_its_own(
    forks, models, tmp_path, computed
):
    """Its own cache goes by name and path, and one number had other weights under these."""
    ids = prompt(300, 12)
    path, other = (str(models / name) for name in ("adapter", "adapter-2"))
    play = [
        ["ask", "first", ids, ["mine", 1, path]],
        ["steps", 2],
        ["load_in_place", ["mine", 1, other]],
    ]
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        asks = [WARM, {"play": play}, {"lora": ["mine", 2, path], "ids": ids}]
        found = forks.answers(models / "model", daemon, asks, PATIENT, **LORA, **IN_CHUNKS)
        assert found[-1]["cached"] >= 256, "vLLM does find it"
        again = of_first(models, [ids])
        answers = forks.answers(models / "model", daemon, again, PATIENT, **LORA)[1:]
    assert [answer["tokens"] for answer in answers] == computed("adapter", [ids])


def test_another_node_is_sent_none_of_it(forks, models, tmp_path, swapped, computed):
    ids = prompt(200, 9)
    own, *wanted = computed("adapter", [ids, *swapped.ids.values()])
    engine = LORA | {"kv_cache_memory_bytes": 32 << 20}
    mine = ["mine", 1, str(models / "adapter")]
    with (
        two_daemons(tmp_path, pool_of(4)) as pair,
        engines_at(
            forks, models / "model", (pair.prefill, engine | IN_CHUNKS), (pair.decode, engine)
        ) as (p, d),
    ):
        d.ask(SMALL, lora=mine)
        told = p.ask(ids, lora=mine, max_tokens=1, params=TO_DECODE)["params"]
        answer = d.ask(ids, lora=mine, params=told)
        assert (answer["cached"], answer["tokens"]) == (199, own)
        for room, how, tokens in zip((77, 78, 79), WAYS, wanted, strict=True):
            # The decode engine is there while it is computed, and is sent what is.
            here = {"v": 1, "peer": "p", "room": str(room), "soon": True}
            opens = TO_DECODE | {"kvd": {"v": 1, "opens": str(room)}}
            plays = swapped.plays("chunks", max_tokens=1, params=opens)
            answers = []
            waits = threading.Thread(
                target=lambda ids=swapped.ids[how], here=here, answers=answers: answers.append(
                    d.ask(ids, lora=mine, params={"do_remote_prefill": True, "kvd": here})
                )
            )
            waits.start()
            p.ask([], play=dict(zip(WAYS, plays, strict=True))[how])
            waits.join()
            assert answers[0]["tokens"] == tokens
