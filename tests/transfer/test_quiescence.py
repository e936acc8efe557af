"""The rule of ``inflow`` on plain sockets; their far ends are in another process, as a writer's."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvd.core.effects import Doubt, Exempt, Quiesce
from kvd.core.inputs import Awaiting, Quiet
from kvd.transfer import quiescence, streams
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.quiescence import Quiescence

PATIENCE_S = 5.0

FAR = """
import os, socket, sys
held = socket.socket(fileno=int(sys.argv[1]))
for line in sys.stdin:
    if line == "send\\n":
        held.sendall(b"x" * 1000)
    else:
        break
    print("done", flush=True)
"""


class Far:
    """The far end of one connection, in a process of its own."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        host = "127.0.0.1" if family is socket.AF_INET else "::1"
        with socket.create_server((host, 0), family=family) as server:
            theirs = socket.create_connection(server.getsockname()[:2])
            self.ours, _ = server.accept()
        self.stream = streams._address(theirs.getsockname())
        self.stream += ">" + streams._address(theirs.getpeername())
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAR, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        theirs.close()

    def send(self) -> None:
        """A thousand bytes; they are here when this returns."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("send\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def die(self) -> None:
        """Killed: its system ends the connection."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        with self.process:
            self.process.kill()
        self.ours.close()


@pytest.fixture
def asleep():
    """The number of a thread that sleeps, as NIXL's does when nothing comes."""
    over, begun = threading.Event(), []
    thread = threading.Thread(target=lambda: (begun.append(threading.get_native_id()), over.wait()))
    thread.start()
    while not begun or not quiescence._sleeps(begun[0]):
        pass
    yield begun[0]
    over.set()
    thread.join()


LONG = 2_000_000
"""So many rounds of a hash take a second: what a test does meanwhile takes some milliseconds."""


@pytest.fixture
def computing():
    """The number of a thread that computes, as NIXL's does while it stores what it has read."""
    over, begun = threading.Event(), []

    def compute() -> None:
        begun.append(threading.get_native_id())
        while not over.is_set():
            # Without the lock of the interpreter: it does not sleep to get that.
            hashlib.pbkdf2_hmac("sha256", b"", b"", LONG)

    thread = threading.Thread(target=compute)
    thread.start()
    while not begun or quiescence._sleeps(begun[0]):
        pass
    yield begun[0]
    over.set()
    thread.join()


def has_computed(thread, longer_ns):
    """When it has, for so much longer than until now."""
    end_ns = quiescence._cpu_ns(thread) + longer_ns
    while quiescence._cpu_ns(thread) < end_ns:
        time.sleep(0.001)


class Asked:
    """A question that was looked at once."""

    def __init__(self, thread, doubt=Doubt.SENT, outgoing=set):
        self.said = []
        self.inflow = Quiescence(thread, outgoing, self.said.append)
        self.inflow.ask(Quiesce(1, doubt))
        self.look()

    def look(self):
        self.inflow._next_s = 0.0
        self.inflow.step()
        return self.is_quiet

    def until_quiet(self):
        limit_s = time.monotonic() + PATIENCE_S
        while not self.look() and time.monotonic() < limit_s:
            pass
        return self.is_quiet

    @property
    def is_quiet(self):
        return Quiet(UNSTAMPED, 1) in self.said


@pytest.fixture
def far():
    made = Far()
    yield made
    made.end()


def test_an_end_of_stream_counts_when_all_before_it_was_read(far, asleep):
    asked = Asked(asleep)
    far.send()
    before = asked.look()
    far.die()
    unread = asked.look()
    while far.ours.recv(100):
        pass

    assert asked.said[0] == Awaiting(UNSTAMPED, (1,), (far.stream,))
    assert not before
    assert not unread
    assert asked.until_quiet()


def test_a_socket_that_was_closed_here_is_over(far, asleep):
    asked = Asked(asleep)
    assert not asked.is_quiet

    far.ours.close()

    assert asked.until_quiet()


def test_a_reset_ends_a_connection(far, asleep):
    asked = Asked(asleep)
    far.ours.send(b"unread")  # a process that dies with something unread resets
    far.die()

    assert asked.until_quiet()
    assert far.ours.fileno() >= 0


def test_what_has_only_arrived_is_waited_for_without_its_end(far, asleep):
    far.send()
    asked = Asked(asleep, Doubt.ARRIVED)
    before = asked.is_quiet
    far.ours.recv(1000)

    assert not before
    assert asked.until_quiet()
    assert asked.said == [Quiet(UNSTAMPED, 1)]


def test_what_has_been_read_is_stored_by_a_thread_that_sleeps_or_has_computed_for_long(computing):
    """Nothing stands in a socket; the thread may be in the middle of a copy all the same."""
    asked = Asked(computing)
    at_once = asked.is_quiet
    has_computed(computing, quiescence._STORED_AFTER_NS)

    assert not at_once
    assert asked.until_quiet()


def test_what_the_thread_computed_before_it_had_read_the_last_says_nothing(far, computing):
    far.send()
    asked = Asked(computing, Doubt.ARRIVED)
    has_computed(computing, 2 * quiescence._STORED_AFTER_NS)
    far.ours.recv(1000)
    as_it_was_read = asked.look()
    has_computed(computing, quiescence._STORED_AFTER_NS)

    assert not as_it_was_read
    assert asked.until_quiet()


def test_a_connection_that_came_later_is_not_waited_for(asleep):
    asked = Asked(asleep)
    assert asked.is_quiet
    later = Far()

    again = Asked(asleep, outgoing=lambda: {os.readlink(f"/proc/self/fd/{later.ours.fileno()}")})
    later.end()

    assert again.is_quiet, "nor one of a sending agent of our own"


def test_a_connection_of_this_process_with_itself_is_not_waited_for(asleep):
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            asked = Asked(asleep)

    assert asked.is_quiet


def test_a_connection_is_exempt_while_it_stands_and_only_for_the_ticket(far, asleep):
    asked = Asked(asleep)
    asked.inflow.exempt(Exempt((2,), (far.stream,)))
    other = asked.look()
    asked.inflow.exempt(Exempt((1,), (far.stream,)))

    assert not other
    assert asked.until_quiet()


def test_a_claim_of_a_name_that_has_ended_here_exempts_nothing(far, asleep):
    """The name is of a newer connection then: this one is read to its end."""
    asked = Asked(asleep)
    far.send()
    far.die()
    while streams.marks()[os.readlink(f"/proc/self/fd/{far.ours.fileno()}")].is_established:
        pass
    asked.inflow.exempt(Exempt((1,), (far.stream,)))
    unread = asked.look()
    while far.ours.recv(100):
        pass

    assert not unread
    assert asked.until_quiet()


def test_the_kernel_is_to_ask_whether_the_far_end_lives(far, asleep):
    before = far.ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    Asked(asleep)

    assert not before
    assert far.ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    limit_ms = far.ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == 1000 * streams.SILENT_S


def test_where_rdma_is_open_nothing_is_ever_quiet(monkeypatch, asleep):
    monkeypatch.setattr(quiescence, "rdma_devices", lambda: ("/dev/infiniband/uverbs0",))
    asked = Asked(asleep)

    assert not asked.look()
    assert asked.said == [Awaiting(UNSTAMPED, (1,), ("rdma (/dev/infiniband/uverbs0)",))]


def test_rdma_devices_are_seen_among_the_open_files(monkeypatch):
    monkeypatch.setattr(
        streams, "descriptors", lambda: [(3, "/dev/infiniband/uverbs0"), (4, "/dev/null")]
    )

    assert streams.rdma_devices() == ("/dev/infiniband/uverbs0",)


def test_tickets_that_wait_for_the_same_are_told_together(far, asleep):
    said = []
    waiting = Quiescence(asleep, set, said.append)
    for ticket in (1, 2, 3):
        waiting.ask(Quiesce(ticket, Doubt.SENT))
    waiting.step()

    assert said == [Awaiting(UNSTAMPED, (1, 2, 3), (far.stream,))]


def test_a_long_wait_is_looked_at_less_often(far, asleep):
    asked = Asked(asleep)
    short_s = asked.inflow.patience_s
    asked.inflow._since_s -= 100.0
    asked.look()

    assert short_s <= quiescence.SHORTEST_TICK_S * 2
    assert quiescence.LONGEST_TICK_S / 2 < asked.inflow.patience_s <= quiescence.LONGEST_TICK_S


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_both_ends_name_a_stream_alike_where_ipv4_comes_in_ipv6(asleep):
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        theirs = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        ours, _ = server.accept()
        with theirs, ours:
            told = f"127.0.0.1:{theirs.getsockname()[1]}>127.0.0.1:{ours.getsockname()[1]}"
            seen = streams.marks()[os.readlink(f"/proc/self/fd/{ours.fileno()}")].stream

    assert seen == told
