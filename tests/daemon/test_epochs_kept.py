"""The epochs of a daemon in the one after it: the file, and daemons that are stopped and killed."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

import pytest

import kvd.client
from kvd.client import KvdError
from kvd.core.effects import KeptFlush
from kvd.daemon.epochs_file import EpochsFile, KeptEpochs, KeptFlushes, WrittenAt
from kvd.daemon.socket_activation import UnfitConfig
from tests.daemon.kv import PAGE, SHAPE, tokens_of
from tests.support.daemons import Daemon, two_daemons

# ---- the file ----------------------------------------------------------------------------------


def test_what_is_written_is_read_and_a_half_of_it_never_is(tmp_path):
    file = EpochsFile(tmp_path / "below" / "n.epochs")
    assert file.read() is None
    file.write({})
    assert file.read() == KeptEpochs({})
    # Of a daemon that was killed in the middle of it.
    (tmp_path / "below" / "n.epochs.new").write_text('{"epochs":{"m')
    file.write({"m": 2**53 - 1, "": 1, "ü#": 2})
    assert file.read() == KeptEpochs({"m": 2**53 - 1, "": 1, "ü#": 2})
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert {one.name for one in file.path.parent.iterdir()} == {"n.epochs", "n.epochs.lock"}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", '{"epochs":[]}', '{"epochs":{"m":-1}}', '{"epochs":{"m":9007199254740992}}',
        '{"epochs":{"m":"7"}}', '{"epochs":{},"format":2}', '{"epochs":{},"more":1}', "\xff",
    ],
)  # fmt: skip
def test_a_damaged_one_is_not_guessed_at(tmp_path, text):
    path = tmp_path / "n.epochs"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UnfitConfig, match=r"n\.epochs, which says the epochs.*kvd epoch"):
        EpochsFile(path).read()


def test_one_that_others_can_write_and_a_link_are_not_believed(tmp_path):
    file = EpochsFile(tmp_path / "n.epochs")
    file.write({"m": 1})
    file.path.chmod(0o620)
    with pytest.raises(UnfitConfig, match="others can write it"):
        file.read()
    file.path.rename(tmp_path / "other")
    file.path.symlink_to(tmp_path / "other")
    with pytest.raises(UnfitConfig, match="cannot be read"):
        file.read()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "n.epochs")
    with pytest.raises(UnfitConfig, match=r"n\.epochs, which says .* is no file.*kvd epoch"):
        EpochsFile(tmp_path / "n.epochs").read()


def written_at(calendar_s: float, host: str = "a", host_s: float = 0.0) -> WrittenAt:
    return WrittenAt(calendar_s, host, host_s)


@pytest.mark.parametrize(
    ("now", "passed_s"),
    [
        (written_at(1000.0, host_s=60.0), 10.0),
        (written_at(400.0, host_s=60.0), 10.0),  # the calendar was set back
        (written_at(9e9, host_s=60.0), 10.0),  # and far ahead
        (written_at(1030.0, "b", 5.0), 30.0),  # the host was started again
        (written_at(400.0, "b", 5.0), 0.0),
    ],
)
def test_how_long_ago_a_flush_was_is_told_by_no_clock_that_somebody_sets(now, passed_s):
    flush = KeptFlush(namespace="m", stamp="3f", ago_s=7.0)
    kept = KeptEpochs({}, flushed=KeptFlushes((flush,), written_at(1000.0, host_s=50.0)))
    assert [flush.ago_s for flush in kept.flushes(now)] == [7.0 + passed_s]


def test_what_was_flushed_is_kept_beside_the_epochs_and_only_where_there_is_any(tmp_path):
    file = EpochsFile(tmp_path / "n.epochs")
    flushes = (KeptFlush(None, "3f", 1.5), KeptFlush("m#a", "9c", 0.0))
    file.write({"m": 1}, flushes)
    found = file.read()
    assert found.epochs == {"m": 1}
    again = found.flushes(WrittenAt.now())
    assert [(flush.namespace, flush.stamp) for flush in again] == [(None, "3f"), ("m#a", "9c")]
    assert 1.5 <= again[0].ago_s < 60
    file.write({"m": 1})
    assert json.loads(file.path.read_text()) == {"epochs": {"m": 1}, "format": 1}


# ---- real daemons ------------------------------------------------------------------------------


def again(daemon: Daemon, *, killed: bool) -> None:
    daemon.kill() if killed else daemon.stop()
    daemon.start()
    daemon.wait_ready()


@pytest.fixture(params=["anon", "shm"])
def daemon(request, tmp_path):
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/dev/shm") as memory:
        own = {"pool.directory": memory} if request.param == "shm" else {}
        one = Daemon("n", tmp_path, {**SHAPE, "pool.backing": request.param, **own})
        one.start()
        one.wait_ready()
        yield one
        one.stop()


@pytest.mark.parametrize("killed", [False, True])
def test_a_daemon_begins_in_the_epoch_that_the_one_before_has_answered(daemon, killed):
    tokens = tokens_of(3 * PAGE, seed=5)
    with kvd.client.connect_sync(daemon.client, name="e") as node:
        for namespace in ("m#a", "x"):
            lease = node.lease(tokens, namespace=namespace)
            lease.commit()
            if namespace == "m#a":
                kept = lease
        assert node.new_epoch("m", 7).epoch == 7
        assert node.new_epoch("empty").epoch == 1
        kept.release(())
    again(daemon, killed=killed)
    with kvd.client.connect_sync(daemon.client, name="e") as node:
        assert node.snapshot().epochs == {"empty": 1, "m": 7}
        assert node.match(tokens, namespace="m#a").tokens == 0
        with pytest.raises(KvdError) as caught:
            node.new_epoch("m", 6)
        assert caught.value.numbers == {"epoch": 6, "now": 7}
        assert node.new_epoch("m").epoch == 8


def test_what_cannot_be_written_is_refused_with_the_file_and_the_reason(daemon):
    with kvd.client.connect_sync(daemon.client, name="e") as node:
        path = daemon.directory / "n.epochs"
        blocked = daemon.directory / "n.epochs.new"
        blocked.mkdir()  # which no file can take the place of
        with pytest.raises(KvdError) as caught:
            node.new_epoch("m", 3)
        assert caught.value.code == "aborted"
        assert "n.epochs" in str(caught.value)
        assert json.loads(path.read_text())["epochs"] == {}
        # It counts until the daemon ends.
        assert node.snapshot().epochs == {"m": 3}
        blocked.rmdir()
        assert node.new_epoch("m", 3).epoch == 3
        assert json.loads(path.read_text())["epochs"] == {"m": 3}


def test_two_daemons_of_one_name_do_not_keep_their_epochs_in_one_file(tmp_path):
    shared = {**SHAPE, "cache.epochs_directory": str(tmp_path / "lib")}
    for home in ("x", "y"):
        (tmp_path / home).mkdir()
    first, second = (Daemon("n", tmp_path / home, shared) for home in ("x", "y"))
    first.start()
    try:
        first.wait_ready()
        with kvd.client.connect_sync(first.client, name="e") as node:
            assert node.new_epoch("m", 7).epoch == 7
        second.start()
        assert second._process.wait(30) == 78
        assert f"n.epochs.lock is locked by pid {first.pid}" in second.quoted_log()
        # The one after it is not kept out, however the first one ends.
        again(first, killed=True)
        assert first.snapshot().epochs == {"m": 7}
    finally:
        first.stop()
    second.start()
    try:
        second.wait_ready()
        assert second.snapshot().epochs == {"m": 7}
    finally:
        second.stop()


def test_where_nothing_can_be_written_any_more_a_daemon_begins_in_the_epochs_that_it_can_read(
    daemon,
):
    lock = daemon.directory / "n.epochs.lock"
    with kvd.client.connect_sync(daemon.client, name="e") as node:
        node.new_epoch("m", 3)
    lock.unlink()
    lock.mkdir()  # which nobody can open as a file
    again(daemon, killed=True)
    with kvd.client.connect_sync(daemon.client, name="e") as node:
        assert node.snapshot().epochs == {"m": 3}
        with pytest.raises(KvdError, match=r"n\.epochs could|n\.epochs: "):
            node.new_epoch("m", 4)
        lock.rmdir()
        assert node.new_epoch("m", 4).epoch == 4


def test_a_daemon_with_a_damaged_file_does_not_start(tmp_path):
    one = Daemon("n", tmp_path, SHAPE)
    (one.directory / "n.epochs").write_text("{")
    one.start()
    one._process.wait(30)
    assert one._process.returncode == 78
    assert "n.epochs, which says the epochs of namespaces, is damaged" in one.quoted_log()


def test_a_peer_pulls_what_its_entry_names(tmp_path):
    tokens = tokens_of(3 * PAGE, seed=6)
    with (
        two_daemons(tmp_path, {**SHAPE, "peers.allow": "p,d:llama"}) as pair,
        kvd.client.connect_sync(pair.prefill.client, name="p") as p,
        kvd.client.connect_sync(pair.decode.client, name="d") as d,
    ):
        for namespace in ("llama#1", "qwen"):
            p.lease(tokens, namespace=namespace).release(())
        pulled = d.receive(tokens, source="p", namespace="llama#1")
        pulled.done()
        assert pulled.n_tokens == 3 * PAGE
        pulled.lease.release()
        with pytest.raises(KvdError) as caught:
            d.receive(tokens, source="p", namespace="qwen").done()
        assert caught.value.code == "not-supported"
        assert "d:qwen" in str(caught.value)
