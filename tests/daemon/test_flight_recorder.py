"""The flight recorder beside real daemons: what it saves replays, and it does them no harm."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

import kvd.client
from kvd.client.admin import AdminClient
from kvd.daemon.beats import TICK_S
from kvd.errors import KvdError
from kvd.recorder import recording, replay
from kvd.wire import admin, events
from tests.daemon.conftest import until
from tests.daemon.kv import SHAPE, tokens_of, write
from tests.support.daemons import one_daemon

RECORDED = {**SHAPE, "recorder.enabled": "true"}
LOOK_S = 20.0
"""The recorder process runs when nobody else does: on a busy machine it takes its time."""


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvd", *words], capture_output=True, text=True, check=False
    )


def replayed(path: Path):
    """The events of a recording, and what came of replaying it."""
    saved = recording.read(path)
    told = []
    outcome = replay.replay(saved, replay.begin(saved), told.append, is_checking=True)
    assert (outcome.bugs, outcome.broken, outcome.strayed) == ((), (), "")
    return told, outcome


def recorder_of(daemon) -> admin.Snapshot:
    return daemon.snapshot().recorder


def told_of(daemon) -> list[events.Event]:
    """The events about recordings, oldest first."""
    page = daemon.ask(admin.ListEvents(1, 0), admin.EventPage)
    about = (events.RecordingStarted, events.RecordingEnded, events.RecordingSaved)
    return [event for event in page.events if isinstance(event, about)]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def handoffs(engines, count: int) -> None:
    """Whole handoffs from one daemon to the other."""
    for number in range(count):
        tokens, room = tokens_of(100 + number % 3, seed=number % 5), engines.room()
        lease = await engines.p.lease(tokens)
        write(engines.p, lease, tokens)
        receive = await engines.d.receive(room, tokens, "p")
        send = await engines.p.send(room, tokens, lease=lease)
        await send.finish(b"aux")
        await receive.done()
        await receive.lease.release()
        await lease.release()


async def leases(client: str, count: int, n_tokens: int = 50) -> None:
    """Leases of prompts, committed and released."""
    async with kvd.client.connect(client, name="engine") as node:
        for number in range(count):
            lease = await node.lease(tokens_of(n_tokens, seed=number))
            await lease.release(())


async def test_what_is_recorded_under_load_replays_to_the_live_state_of_both_daemons(
    engines, tmp_path
):
    load = asyncio.ensure_future(handoffs(engines, 30))
    done = []
    for daemon in (engines.pair.prefill, engines.pair.decode):
        out = tmp_path / daemon.name
        words = ("record", "--connect", daemon.admin, "--out", str(out), "--format", "json")
        said = await asyncio.to_thread(cli, *words, "--hash-objects", "100000")
        assert said.returncode == 0, said.stderr
        done.append((out, json.loads(said.stdout)))
    await load

    for out, said in done:
        told, outcome = replayed(out)
        assert len(said["state_hash"]) == 64
        assert outcome.state_hash == said["state_hash"] == outcome.recorded_hash
        assert (outcome.steps, outcome.last_event) == (said["steps"], said["last_event"])
        assert outcome.inputs == said["inputs"]
        assert [event.seq for event in told] == list(range(told[0].seq, said["last_event"] + 1))


async def test_replaying_says_that_the_state_is_equal_or_ends_with_1(engines, tmp_path):
    await handoffs(engines, 2)
    out, changed, notes = tmp_path / "one", tmp_path / "two", tmp_path / "notes.json"
    cli("record", "--connect", engines.pair.decode.admin, "--out", str(out))

    said = cli("replay", str(out), "--check", "--json", str(notes))

    assert said.returncode == 0, said.stderr
    assert "equal to the live node's" in said.stdout
    assert json.loads(notes.read_text())["is_equal"] is True
    saved = recording.read(out)
    header = msgspec.structs.replace(saved.header, state_hash="0" * 64)
    recording.write(changed, header, saved.base, [saved.records])
    said = cli("replay", str(changed))
    assert said.returncode == 1
    assert "ended in another state than the live node, which was 0000" in said.stderr


def test_the_recorder_process_holds_nothing_of_the_daemon_but_its_socket_and_memory(pair):
    pid = pair.prefill.recorder_pid()

    held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]

    kinds = sorted(path.partition(":")[0] for path in held if not path.endswith(("/log", "/null")))
    assert kinds[-1] == "socket"
    assert set(kinds[:-1]) <= {"/memfd"}
    assert len([path for path in held if path.startswith("socket")]) == 1


async def test_a_killed_daemon_leaves_a_recording_that_ends_with_what_a_subscriber_saw(tmp_path):
    with one_daemon(tmp_path, RECORDED, name="k") as daemon:
        recorder = daemon.recorder_pid()
        load = asyncio.ensure_future(leases(daemon.client, 100_000))
        seen = []
        with AdminClient(daemon.admin) as subscriber:
            while len(seen) < 600:
                after = seen[-1].seq if seen else 0
                page = await asyncio.to_thread(subscriber.request, admin.ListEvents(1, after, 1.0))
                seen += page.events
        os.kill(recorder, signal.SIGTERM)  # as the whole group would get it
        await asyncio.sleep(2 * TICK_S)  # what is not in the ring yet is younger than a tick
        daemon.kill()
        with pytest.raises(KvdError):
            await load
        until(lambda: not is_alive(recorder), LOOK_S)

        (file,) = (daemon.directory / "recordings").iterdir()
        told, outcome = replayed(file)

    first = told[0].seq
    assert outcome.last_event >= seen[-1].seq
    assert told[: seen[-1].seq - first + 1] == seen[first - 1 :]
    assert outcome.marks >= 1
    assert "-crash-" in file.name


async def test_a_dead_recorder_costs_the_daemon_nothing_and_another_one_takes_over(tmp_path):
    with one_daemon(tmp_path, RECORDED, name="r") as daemon:
        first = daemon.recorder_pid()
        load = asyncio.ensure_future(leases(daemon.client, 200))
        os.kill(first, signal.SIGKILL)
        await load
        until(lambda: len(told_of(daemon)) >= 3, LOOK_S)
        _, ended, again = told_of(daemon)[:3]
        await leases(daemon.client, 20)
        second = daemon.recorder_pid()
        said = cli("record", "--connect", daemon.admin, "--out", str(tmp_path / "one"))
        told, outcome = replayed(tmp_path / "one")
        findings = daemon.ask(admin.Audit(1), admin.Report).refused

        assert ended.why == f"the recorder process {first} ended with SIGKILL"
        assert isinstance(again, events.RecordingStarted)
        assert said.returncode == 0, said.stderr
        assert outcome.is_equal
        assert told[0].seq == again.seq
        assert findings == ()
        daemon.stop()
        assert not is_alive(second)
        assert not (daemon.directory / "recordings").exists() or not list(
            (daemon.directory / "recordings").iterdir()
        )


async def test_a_recorder_that_does_not_keep_up_is_given_up_and_the_daemon_goes_on(tmp_path):
    settings = {**RECORDED, "recorder.max_bytes": str(2**20)}
    with one_daemon(tmp_path, settings, name="s") as daemon:
        recorder = daemon.recorder_pid()
        os.kill(recorder, signal.SIGSTOP)
        await leases(daemon.client, 150, n_tokens=2000)

        until(lambda: recorder_of(daemon).why)

        state = recorder_of(daemon)
        assert state.why.startswith("the recorder process fell behind: 1 MiB of inputs wait")
        assert state.state == "ended"
        until(lambda: not is_alive(recorder))
        await leases(daemon.client, 5)
        assert daemon.ask(admin.Audit(1), admin.Report).refused == ()


async def test_nothing_is_recorded_where_it_is_turned_off_and_the_daemon_says_so(tmp_path):
    with one_daemon(tmp_path, SHAPE, name="o") as daemon:
        said = cli("record", "--connect", daemon.admin)

        assert recorder_of(daemon).state == "off"
        assert said.returncode == 1
        assert "nothing is recorded: recorder.enabled is false" in said.stderr


def test_a_daemon_that_had_to_be_killed_has_left_no_process_that_still_writes(
    tmp_path, monkeypatch
):
    """The recorder goes on for a while: the directory can be removed only when it has ended."""
    with one_daemon(tmp_path, RECORDED) as daemon:
        pid = daemon.recorder_pid()
        for stopped in (daemon.pid, pid):
            os.kill(stopped, signal.SIGSTOP)
        goes_on = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
        goes_on.start()
        with monkeypatch.context() as patched:
            patched.setattr(subprocess.Popen, "wait", _is_late_once(subprocess.Popen.wait))
            daemon.stop()

        assert not is_alive(pid) or zombie(pid)
        goes_on.join()


def _is_late_once(wait):
    """As a daemon is that does not end in its time."""
    late = [0.1]

    def waited(self, timeout=None):
        return wait(self, timeout=late.pop() if late else timeout)

    return waited


def zombie(pid: int) -> bool:
    """Whether it has ended, and nobody has asked how."""
    return ") Z " in Path(f"/proc/{pid}/stat").read_text("ascii")
