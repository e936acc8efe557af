"""What files say of weights, and when they say nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from kvd.connectors.identity import UnknownWeights
from kvd.connectors.vllm import weights
from kvd.connectors.vllm.weights import (
    PIECE_BYTES,
    PIECES,
    Adapters,
    process_began_ns,
    stamp_of,
    weight_files,
)

LATER = time.time_ns() + 10**15
"""No file of these tests has changed since."""

LARGE = 4 << 20


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(os.urandom(LARGE))
    return path


def digest(path, since_ns=LATER, **how):
    return weight_files(path, since_ns=since_ns, **how).digest


def rewrite(file, data, at=0):
    """Other bytes in place, and no word of it in the times of before."""
    told = file.stat()
    with file.open("r+b") as target:
        target.seek(at)
        target.write(data)
    os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))


def test_a_copy_has_the_same_digest_wherever_and_whenever_it_was_made(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    assert digest(tmp_path / "copy") == digest(model)


def test_a_single_bit_anywhere_is_seen(model):
    before = digest(model)
    for at in (0, LARGE // 3, LARGE - 1):
        rewrite(model / "model.safetensors", b"\x00\x01\x02"[:1], at)
        after = digest(model)
        assert after != before or at == 0
        before = after


@pytest.mark.parametrize("name", ["model-2.safetensors", "code.py", "sub/adapter.bin", "vocab.bin"])
def test_a_file_more_is_other_weights(model, name):
    before = digest(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(b"x")
    assert digest(model) != before


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "LICENSE", ".cache", "vocab.txt"])
def test_what_no_kv_depends_on_does_not_count(model, name):
    before = digest(model)
    (model / name).write_bytes(b"x")
    assert digest(model) == before


def test_a_name_is_part_of_it(model):
    before = digest(model)
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert digest(model) != before


# ---- large files ---------------------------------------------------------------------------------


def test_of_large_files_the_time_of_the_change_counts(model):
    file = model / "model.safetensors"
    before = weight_files(model, since_ns=LATER, full_bytes=0)
    assert before.by == "pieces and times"
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    assert digest(model, full_bytes=0) != before.digest


def test_of_large_files_both_ends_and_pieces_between_are_read(model):
    file = model / "model.safetensors"
    last = LARGE - PIECE_BYTES
    seen = {digest(model, full_bytes=0)}
    for k in range(PIECES):
        rewrite(file, os.urandom(16), last * k // (PIECES - 1) + 100)
        seen.add(digest(model, full_bytes=0))
    assert len(seen) == PIECES + 1


def test_a_large_file_costs_no_time(model):
    file = model / "model.safetensors"
    os.truncate(file, 300 << 30)
    began_s = time.perf_counter()
    found = weight_files(model, since_ns=LATER)
    assert time.perf_counter() - began_s < 1
    assert found.by == "pieces and times"


def hub(tmp_path, name, data):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "c1"
    blobs.mkdir(exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    (blobs / name).write_bytes(data)
    (snapshot / "model.safetensors").symlink_to(blobs / name)
    return snapshot


def test_the_hub_says_what_a_blob_holds_without_its_being_read(tmp_path):
    snapshot = hub(tmp_path, "ab" * 32, b"x")
    found = weight_files(snapshot, since_ns=0, full_bytes=0)
    assert found.by == "content"
    os.utime(tmp_path / "blobs" / ("ab" * 32), (1, 1))
    assert digest(snapshot, since_ns=0, full_bytes=0) == found.digest


def test_a_copy_of_a_blob_is_known_to_be_one(tmp_path):
    data = b"weights" * 100
    name = subprocess.run(
        [sys.executable, "-c", "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read())"
         ".hexdigest())"], input=data, capture_output=True, check=True,
    ).stdout.decode().strip()  # fmt: skip
    snapshot = hub(tmp_path, name, data)
    copied = tmp_path / "copied"
    shutil.copytree(snapshot, copied)
    assert digest(copied) == digest(snapshot, since_ns=0)


def test_a_directory_that_is_called_blobs_is_not_believed_about_other_names(tmp_path):
    snapshot = hub(tmp_path, "weights-of-mine", b"x")
    before = digest(snapshot)
    began_ns = now_ns()
    rewrite(tmp_path / "blobs" / "weights-of-mine", b"y")
    assert digest(snapshot) != before
    with pytest.raises(UnknownWeights, match="since this engine began"):
        weight_files(snapshot, since_ns=began_ns)


# ---- nobody knows --------------------------------------------------------------------------------


def now_ns():
    """A moment that files written before are older than, by the clock that stamps them."""
    time.sleep(0.02)
    moment = time.time_ns()
    time.sleep(0.02)
    return moment


def replaced(model):
    (model / "model.safetensors").write_bytes(b"other")


def rewritten(model):
    rewrite(model / "model.safetensors", b"other")


def moved_here(model):
    other = model.with_name("other")
    shutil.copytree(model, other)
    time.sleep(0.02)
    model.rename(model.with_name("old"))
    other.rename(model)


@pytest.mark.parametrize("change", [replaced, rewritten, moved_here])
def test_files_that_have_changed_since_the_engine_began_say_nothing(model, change):
    began_ns = now_ns()
    weight_files(model, since_ns=began_ns)
    change(model)
    with pytest.raises(UnknownWeights, match="since this engine began"):
        weight_files(model, since_ns=began_ns)


def test_a_link_that_leads_elsewhere_since_says_nothing(model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    link = tmp_path / "current"
    link.symlink_to(tmp_path)
    began_ns = now_ns()
    weight_files(link / "model", since_ns=began_ns)
    link.unlink()
    link.symlink_to(other.parent)
    with pytest.raises(UnknownWeights, match="current"):
        weight_files(link / "model", since_ns=began_ns)


def test_what_cannot_be_read_says_so(tmp_path, model):
    with pytest.raises(UnknownWeights, match="cannot be read"):
        weight_files(tmp_path / "nowhere", since_ns=LATER)
    (model / "gone.bin").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnknownWeights, match="cannot be read"):
        weight_files(model, since_ns=LATER)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownWeights, match="no files"):
        weight_files(tmp_path / "empty", since_ns=LATER)
    (model / "gone.bin").unlink()
    (model / "loop").symlink_to(model)
    with pytest.raises(UnknownWeights, match="too deep"):
        weight_files(model, since_ns=LATER)


def test_a_process_knows_when_it_began(tmp_path):
    before_ns = time.time_ns()
    code = "from kvd.connectors.vllm.weights import process_began_ns; print(process_began_ns())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert before_ns - 50_000_000 < int(told.stdout) < time.time_ns()
    assert process_began_ns() < before_ns


# ---- adapters ------------------------------------------------------------------------------------


@pytest.fixture
def adapters():
    made = []

    def make(**how):
        made.append(Adapters(**{"since_ns": LATER, "rules": "r", **how}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def lora(path, name="ad", number=1, *, inplace=False, is_3d=False):
    return SimpleNamespace(
        lora_name=name,
        lora_int_id=number,
        lora_path=str(path),
        load_inplace=inplace,
        is_3d_lora_weight=is_3d,
    )


def known_as(adapters, adapter, within_s=5.0):
    """Its name; None: nobody knows these weights."""
    return answer_of(adapters.ask(adapter), within_s)


def answer_of(question, within_s=5.0):
    end_s = time.monotonic() + within_s
    try:
        while (name := question.poll()) is None:
            assert time.monotonic() < end_s
            time.sleep(0.001)
    except UnknownWeights:
        return None
    return name


def test_an_adapter_is_known_by_its_files_and_not_by_its_name(model, tmp_path, adapters):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    known = known_as(adapters(), lora(model))
    assert known.startswith("ad-")
    assert known_as(adapters(), lora(other, number=7)) == known
    rewrite(other / "model.safetensors", b"other")
    assert known_as(adapters(), lora(other)) != known
    assert known_as(adapters(), lora(model, is_3d=True)) != known
    assert known_as(adapters(rules="s"), lora(model)) != known


def test_a_number_that_had_two_paths_is_known_by_neither(model, tmp_path, adapters):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    mine = adapters()
    assert known_as(mine, lora(model))
    assert known_as(mine, lora(other)) is None
    assert "adapter 1" in mine.flaws.pop("ad")
    assert known_as(mine, lora(model)) is None, "it may have been loaded from the other one"
    assert known_as(mine, lora(other, number=2)) is None, "requests of both names were of number 1"
    assert known_as(mine, lora(other, "another", number=3))


def test_what_is_loaded_in_place_is_not_known_then_or_later(model, adapters):
    mine = adapters()
    assert known_as(mine, lora(model))
    assert known_as(mine, lora(model, inplace=True)) is None
    assert known_as(mine, lora(model)) is None
    assert known_as(mine, lora(model, number=2)) is None, "vLLM's own cache has what 1 computed"
    assert known_as(mine, lora(model, "new", number=3)), "another number is loaded from the files"


def test_numbers_that_share_name_and_path_are_known_while_all_have_the_same_weights(
    model, tmp_path, adapters
):
    mine, told = adapters(), []
    mine.on_other_weights = told.append
    found = {known_as(mine, lora(model, number=number)) for number in (1, 2)}
    assert len(found) == 1
    assert known_as(mine, lora(model, "apart", number=3))
    stamp = stamp_of(str(model))
    mine.read_by_workers({1: stamp, 2: stamp, 3: stamp})
    assert known_as(mine, lora(model, number=4)) in found
    # Who reads other files for one of them says it of all: see ``ReadAdapters``.
    mine.read_by_workers({1: "", 2: ""})
    assert told == [1, 2]
    assert known_as(mine, lora(model, number=4)) is None
    assert known_as(mine, lora(model, number=5)) is None
    assert known_as(mine, lora(model, "apart", number=3))


def test_what_is_loaded_under_a_number_that_has_other_weights_is_told_once(
    model, tmp_path, adapters
):
    mine, told = adapters(), []
    mine.on_other_weights = told.append
    for number in (1, 2, 3):
        mine.loads(lora(model, f"ad-{number}", number))
        assert known_as(mine, lora(model, f"ad-{number}", number)), "it had no weights before"
    mine.loads(lora(model, "ad-1", number=1))
    assert told == [], "it has the weights that it had"

    mine.loads(lora(tmp_path / "other", "ad-1", number=1, inplace=True))
    assert known_as(mine, lora(model, "ad-2", number=2, inplace=True)) is None
    assert known_as(mine, lora(tmp_path / "other", "ad-3", number=3)) is None
    assert told == [1, 2, 3]
    for number in (1, 2, 3):
        mine.loads(lora(model, f"ad-{number}", number, inplace=True))
        assert known_as(mine, lora(model, f"ad-{number}", number)) is None
    assert told == [1, 2, 3], "nothing of them is shared any more"


def test_a_number_that_had_two_names_is_known_by_neither_and_spoils_both(model, adapters):
    """vLLM's own cache has its KV under both."""
    mine, told = adapters(), []
    mine.on_other_weights = told.append
    assert known_as(mine, lora(model, "one", 1))
    assert known_as(mine, lora(model, "other", 2))
    assert known_as(mine, lora(model, "other", 1)) is None
    assert sorted(told) == [1, 2]
    assert known_as(mine, lora(model, "one", 3)) is None
    assert known_as(mine, lora(model, "other", 4)) is None
    assert known_as(mine, lora(model, "apart", 5))


def test_one_too_many_spoils_its_name_and_path_too(model, adapters, monkeypatch):
    monkeypatch.setattr(weights, "MAX_ADAPTERS", 2)
    mine, told = adapters(), []
    mine.on_other_weights = told.append
    assert known_as(mine, lora(model, "one", 1))
    assert known_as(mine, lora(model, "other", 2))
    for _ in range(2):
        assert known_as(mine, lora(model, "one", 3)) is None
    assert told == [1]
    assert known_as(mine, lora(model, "third", 3)) is None
    assert known_as(mine, lora(model, "other", 2))


def test_an_adapter_of_an_engine_that_does_not_say_what_it_loads_is_not_known(model, adapters):
    mine = adapters(by_path=True)
    mine.hears_of_loads = False
    assert known_as(mine, lora(model)) is None
    assert "does not say" in mine.flaws["ad"]


def test_an_adapter_whose_files_change_is_not_known_any_more(model, adapters):
    mine = adapters(since_ns=now_ns())
    assert known_as(mine, lora(model))
    rewritten(model)
    assert known_as(mine, lora(model)) is None
    assert "since this engine began" in mine.flaws["ad"]
    assert known_as(mine, lora(model, number=2)) is None


def test_one_that_came_after_the_engine_is_known_by_its_path_alone_if_its_user_says_so(
    model, adapters
):
    early = time.time_ns() - 10**12
    assert known_as(adapters(since_ns=early), lora(model)) is None
    by_path = adapters(since_ns=early, by_path=True)
    assert known_as(by_path, lora(model))
    assert known_as(by_path, lora(f"{model}2", number=2)) != known_as(by_path, lora(model))


@pytest.mark.parametrize("path", ["meta/adapter", "/nowhere"])
def test_an_adapter_that_is_no_directory_is_not_known(path, adapters):
    mine = adapters()
    assert known_as(mine, lora(path)) is None
    assert "no directory" in mine.flaws["ad"]


def test_an_adapter_that_takes_long_to_read_is_known_later_and_holds_nobody(
    model, adapters, monkeypatch
):
    read, may_go_on = weights.weight_files, threading.Event()

    def slowly(path, *, since_ns):
        assert may_go_on.wait(10)
        return read(path, since_ns=since_ns)

    monkeypatch.setattr(weights, "weight_files", slowly)
    mine = adapters()
    began_s = time.perf_counter()
    questions = [mine.ask(lora(model)) for _ in range(weights.MAX_QUESTIONS)]
    assert [question.poll() for question in questions] == [None] * len(questions)
    assert time.perf_counter() - began_s < 1, "it hangs, and nobody waits for it"
    # Behind a file system that hangs no more than that wait.
    with pytest.raises(UnknownWeights, match="not answered"):
        mine.ask(lora(model)).poll()
    mine.flaws.clear()
    may_go_on.set()
    (name,) = {answer_of(question) for question in questions}
    assert known_as(mine, lora(model)) == name
    assert not mine.flaws


def test_files_that_cannot_be_looked_at_are_nobodys(model, adapters, monkeypatch):
    monkeypatch.setattr(weights, "_listed", lambda path: (_ for _ in ()).throw(OSError("stale")))
    mine = adapters()
    assert known_as(mine, lora(model)) is None
    assert "stale" in mine.flaws["ad"]
