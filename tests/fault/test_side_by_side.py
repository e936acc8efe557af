"""What the closest peer does when an engine dies or a message is malformed, measured for kvd.

Each test is a row of the table; ``python -m tests.fault.test_side_by_side`` prints it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from kvd.client.blocking import attach
from kvd.client.sync import connect_sync
from kvd.errors import Code
from kvd.wire import admin, client, events, peer
from kvd.wire.attach import Attach, AttachReply, Rejected
from kvd.wire.codec import (
    ADMIN_REPLIES,
    CLIENT_REPLIES,
    CLIENT_REQUESTS,
    PEER_MESSAGES,
)
from tests.fault.fuzz_target import SETTINGS
from tests.fault.fuzz_wire import Wire
from tests.support.daemons import Daemon, one_daemon

PROMPTS, LEASES, PROMPT_TOKENS = 20, 300, 128
"""As measured with the peer: 300 lookups of 20 prompts of 8 units each, then the client is gone."""
PAGES = PROMPTS * PROMPT_TOKENS // 16
ROUNDS = 20
LOST_ENGINE = f"""
import sys, time
from kvd.client.sync import connect_sync

node = connect_sync(sys.argv[1], name="lost-engine")
prompts = [[1000 * k + n for n in range({PROMPT_TOKENS})] for k in range({PROMPTS})]
for prompt in prompts:
    lease = node.lease(prompt)
    lease.commit()
    lease.release()
held = [node.lease(prompts[k % {PROMPTS}]) for k in range({LEASES})]
print("held", flush=True)
sys.stdin.read()
"""


class Row(msgspec.Struct):
    """One line of the table."""

    what: str
    found: str


class DeadClient(msgspec.Struct):
    """What a killed engine left, for how long, and what was said of it meanwhile."""

    locked_pages: int
    owners: list[str]
    flushed: admin.Report
    released_ms: float
    causes: list[str]
    evicted: admin.Report


def kill_a_client(daemon: Daemon) -> DeadClient:
    """An engine holds 300 leases on 20 prompts and is killed."""
    engine = subprocess.Popen(
        [sys.executable, "-c", LOST_ENGINE, daemon.client],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    with engine:
        assert engine.stdout.readline() == b"held\n"
        held = daemon.snapshot()
        flushed = daemon.ask(admin.Flush(1), admin.Report)
        began_s = time.perf_counter()
        engine.kill()
        causes = releases(daemon, held.last_event, LEASES)
        released_ms = 1e3 * (time.perf_counter() - began_s)
    return DeadClient(
        locked_pages=held.pools[0].locked_pages,
        owners=sorted({f"{one.owner} (pid {one.pid})" for one in held.leases}),
        flushed=flushed,
        released_ms=released_ms,
        causes=sorted(set(causes)),
        evicted=daemon.ask(admin.Evict(1, PAGES), admin.Report),
    )


def releases(daemon: Daemon, after_seq: int, count: int) -> list[str]:
    """Why the next ``count`` leases were released; each question waits for the next event."""
    causes: list[str] = []
    while len(causes) < count:
        page = daemon.ask(admin.ListEvents(1, after_seq, 5.0), admin.EventPage)
        assert page.events, f"{len(causes)} of {count} leases were released, then nothing"
        after_seq = page.events[-1].seq
        causes += [one.cause for one in page.events if isinstance(one, events.LeaseReleased)]
    return causes


class Told(msgspec.Struct):
    """What the sender of a malformed request heard, and how soon."""

    call: int
    code: Code
    message: str
    median_us: float


MALFORMED = {
    "unknown operation": [msgspec.msgpack.encode(["no-such-verb", 7])],
    "wrong number of fields": [msgspec.msgpack.encode(["release", 7])],
    "wrong number of frames": [CLIENT_REQUESTS.encode(client.OpenLease(7))],
    "junk": [b"\xc1" * 64],
    "empty frame": [b""],
    "a field of another type": [msgspec.msgpack.encode(["release", 7, "one"])],
}


def send_malformed(daemon: Daemon) -> dict[str, Told]:
    """Each malformed request, asked again and again."""
    attachment = attach(daemon.client, Attach("confused"))
    wire = Wire(daemon.client, routing_id=attachment.attached.token)
    found = {}
    for name, frames in MALFORMED.items():
        took = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            wire.say(*frames)
            heard = wire.hear(5.0)
            took.append(1e6 * (time.perf_counter() - began_s))
        assert heard is not None, name
        answer = CLIENT_REPLIES.decode(heard[0])
        assert isinstance(answer, client.Failed), answer
        refusal = answer.refusal
        found[name] = Told(answer.call, refusal.code, refusal.message, statistics.median(took))
    wire.close()
    attachment.close()
    return found


def send_one_bad_frame_everywhere(daemon: Daemon) -> dict[str, str]:
    """One lone frame on every socket, with no session and no sense: what each of them said."""
    said = {}
    for name, endpoint, codec in (
        ("client", daemon.client, CLIENT_REPLIES),
        ("admin", daemon.admin, ADMIN_REPLIES),
        ("peers", daemon.peers, PEER_MESSAGES),
    ):
        wire = Wire(endpoint)
        wire.say(b"\x00")
        heard = wire.hear(5.0)
        assert heard is not None, name
        answer = codec.decode(heard[0])
        assert isinstance(answer, client.Failed | admin.AdminFailed | peer.Reject)
        said[name] = answer.refusal.code.value
        wire.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(5)
        raw.connect(daemon.attach)
        raw.send(b"\x00")
        answer = msgspec.msgpack.decode(raw.recv(2**20), type=AttachReply)
        assert isinstance(answer, Rejected)
        said["attach"] = answer.refusal.code.value
    with socket.create_connection(("127.0.0.1", daemon.http_port), 5) as link:
        link.sendall(b"\x00\r\n\r\n")
        said["http"] = link.recv(4096).split(b" ")[1].decode()
    return said


def still_serves(daemon: Daemon) -> bool:
    """Whether an engine, an operator and a probe are all answered as ever."""
    with connect_sync(daemon.client, name="after") as node:
        lease = node.lease([1, 2, 3])
        lease.release()
    ready = health(daemon, "readyz")
    return ready == 200 and daemon.ask(admin.Audit(1), admin.Report).refused == ()


def health(daemon: Daemon, page: str, within_s: float = 2.0) -> int | None:
    """The status of a health page; None if nobody answers in time."""
    url = f"http://127.0.0.1:{daemon.http_port}/{page}"
    try:
        with urllib.request.urlopen(url, timeout=within_s) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with contextlib.closing(error):
            return error.code
    except OSError:
        return None


def watch_health(daemon: Daemon) -> tuple[list[int | None], float]:
    """Statuses of ``readyz`` with the transfer process killed, then of ``livez`` with a stopped
    loop and after it goes on; and the seconds until it was ready again."""
    os.kill(daemon.transfer_pid(), signal.SIGKILL)
    began_s = time.monotonic()
    found: list[int | None] = []
    daemon.wait_for(lambda: health(daemon, "readyz") == 503, "says ready", 5.0)
    found.append(503)
    daemon.wait_for(lambda: health(daemon, "readyz") == 200, "is not ready again", 30.0)
    ready_s = time.monotonic() - began_s
    os.kill(daemon.pid, signal.SIGSTOP)
    found.append(health(daemon, "livez", within_s=0.5))
    os.kill(daemon.pid, signal.SIGCONT)
    found.append(health(daemon, "livez"))
    return found, ready_s


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with one_daemon(tmp_path_factory.mktemp("side"), SETTINGS) as one:
        yield one


def test_locks_of_a_dead_client_have_its_name_and_go_within_a_second(daemon):
    found = kill_a_client(daemon)

    assert found.locked_pages == PAGES
    assert len(found.owners) == 1
    assert found.owners[0].startswith("lost-engine")
    assert found.causes == ["client-gone"]
    assert found.released_ms < 1000
    assert found.evicted.changed == {"evicted_pages": PAGES}


def test_flush_says_what_is_locked_and_by_whom(daemon):
    found = kill_a_client(daemon)

    assert found.flushed.changed == {"freed_pages": 0, "locked_pages": PAGES}
    assert len(found.flushed.refused) == PROMPTS
    assert all("lost-engine" in line for line in found.flushed.refused)


def test_every_malformed_request_is_answered_with_a_code(daemon):
    found = send_malformed(daemon)

    assert {told.code for told in found.values()} == {Code.BAD_REQUEST}
    assert {name: told.call for name, told in found.items()} == {
        "unknown operation": 7,
        "wrong number of fields": 7,
        "wrong number of frames": 7,
        "junk": -1,
        "empty frame": -1,
        "a field of another type": 7,
    }
    assert all(told.median_us < 1e5 for told in found.values())


def test_one_bad_frame_on_each_socket_leaves_everything_alive(daemon):
    found = send_one_bad_frame_everywhere(daemon)

    assert found == {
        "client": "unknown-session",
        "admin": "bad-request",
        "peers": "bad-request",
        "attach": "bad-request",
        "http": "400",
    }
    assert still_serves(daemon)


def test_health_pages_tell_the_truth(daemon):
    found, _ = watch_health(daemon)

    assert found == [503, None, 200]
    assert still_serves(daemon)


def table(daemon: Daemon) -> list[Row]:
    dead = kill_a_client(daemon)
    rows = [
        Row(
            f"{LEASES} leases on {PROMPTS} prompts, killed",
            f"{dead.locked_pages} pages locked by {', '.join(dead.owners)}; all {LEASES} released "
            f"after {dead.released_ms:.0f} ms ({', '.join(dead.causes)}); then "
            f"{dead.evicted.changed['evicted_pages']} of {PAGES} can be evicted",
        ),
        Row(
            "flush meanwhile",
            f"{dead.flushed.changed}, and {len(dead.flushed.refused)} lines such as: "
            f"{dead.flushed.refused[0][:150]}",
        ),
    ]
    for name, told in send_malformed(daemon).items():
        where = f"call {told.call}" if told.call >= 0 else "call unknown"
        text = f"{told.code.value} ({where}) in {told.median_us:.0f} us: {told.message[:100]}"
        rows.append(Row(name, text))
    said = send_one_bad_frame_everywhere(daemon)
    rows.append(Row("one bad frame on each socket", f"{said}; serves on: {still_serves(daemon)}"))
    statuses, ready_s = watch_health(daemon)
    rows.append(
        Row(
            "health",
            f"transfer process killed: readyz {statuses[0]}, 200 again after {ready_s:.2f} s; "
            f"loop stopped: livez {statuses[1] or 'silent'}; going on: livez {statuses[2]}",
        )
    )
    return rows


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        one_daemon(Path(directory), SETTINGS) as daemon,
    ):
        for row in table(daemon):
            sys.stdout.write(f"{row.what:<36}  {row.found}\n")


if __name__ == "__main__":
    main()
