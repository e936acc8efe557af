"""What a dead writer's system, or the network, still holds: nobody gets its pages before.

The path is a real one, and slow: the kernel paces the sockets of the sending process, and goes on
doing so when that process is dead. Late bytes are seen because the pages are painted over as soon
as they are said to be quiet.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import fcntl
import os
import signal
import socket
import termios

import numpy as np

from kvd.core.effects import Doubt, DropAgent, Exempt, Quiesce
from kvd.core.inputs import AgentDropped, AgentLoaded, Awaiting, Quiet
from kvd.transfer.orders import UNSTAMPED
from tests.transfer.conftest import PAGES

EVERYTHING = list(range(1, PAGES))
PACE = 500_000
"""Bytes a second."""
HELD = 400_000
"""Bytes that a socket may hold unsent; the kernel doubles it."""
_SO_MAX_PACING_RATE = 47
_PIDFD_GETFD = 438
_LIBC = ctypes.CDLL(None, use_errno=True)


async def test_bytes_that_a_dead_process_still_sends_land_before_quiet(real, tcp):
    sender, receiver = await real.pair(tcp)
    streams = sender.heard(AgentLoaded)[0].streams
    await _write_slowly(sender, receiver)
    # A process that dies with an answer unread sends a reset and no more: let it have none.
    _halt(receiver.transport.pid)
    await _until_all_is_read(sender)

    os.kill(sender.transport.pid, signal.SIGKILL)
    await sender.until(lambda: sender.exits)
    held = [_is_known(stream) for stream in streams]
    os.kill(receiver.transport.pid, signal.SIGCONT)
    receiver.transport.order(Quiesce(1, Doubt.SENT))
    await receiver.hears(Quiet)
    receiver.memories["kv"].bytes[:] = 0

    await _until(lambda: not any(map(_is_known, streams)))
    await _settled(receiver)
    assert any(held), "the writer had nothing left to send"
    assert not np.any(receiver.memories["kv"].bytes)
    # The receiver's answer may reset the connection before it is looked at: then none is awaited.
    assert [one.streams for one in receiver.heard(Awaiting)][:1] in ([], [streams])


async def test_a_destroyed_agent_leaves_nothing_behind_that_would_be_sent(real, tcp):
    """A plain close would have the kernel send the rest, and its pages would wait for that."""
    sender, receiver = await real.pair(tcp)
    streams = sender.heard(AgentLoaded)[0].streams
    await _write_slowly(sender, receiver)

    sender.transport.order(DropAgent(receiver.name, 1))
    dropped = await sender.hears(AgentDropped)

    assert dropped.unconfirmed_bytes > 0
    assert [stream for stream in streams if _is_known(stream)] == []
    receiver.transport.order(Quiesce(1, Doubt.SENT))
    await receiver.hears(Quiet)
    receiver.memories["kv"].bytes[:] = 0
    await _settled(receiver)
    assert not np.any(receiver.memories["kv"].bytes)


async def test_connections_of_living_writers_are_waited_for_until_they_are_exempt(real, tcp):
    dead, receiver = await real.pair(tcp)
    living = await real.node("living", tcp)
    await living.load(receiver)
    streams = living.heard(AgentLoaded)[0].streams
    gone = dead.heard(AgentLoaded)[0].streams

    await dead.transport.stop()
    receiver.transport.order(Quiesce(1, Doubt.SENT))
    await receiver.until(
        lambda: receiver.heard(Awaiting)[-1:] == [Awaiting(UNSTAMPED, (1,), streams)]
    )
    await _settled(receiver)
    is_patient = not receiver.heard(Quiet, lease=1)
    receiver.transport.order(Exempt((1,), (*gone, *streams)))
    await receiver.hears(Quiet, lease=1)

    assert is_patient
    living.post(1, receiver, EVERYTHING, EVERYTHING)
    await living.outcome(1)
    assert living.transport.pid
    streams_now = await _loaded_again(living, receiver)
    assert streams_now == streams, "what was said of the connections holds while they are used"


async def test_a_new_agent_is_not_waited_for_once_it_is_exempt(real, tcp):
    """The same peer: its old agent is destroyed, its new one was there when the end was heard."""
    sender, receiver = await real.pair(tcp)
    await _write_slowly(sender, receiver)
    sender.transport.order(DropAgent(receiver.name, 1))
    await sender.hears(AgentDropped)
    await sender.load(receiver, generation=2)
    new = sender.heard(AgentLoaded)[-1].streams

    receiver.transport.order(Quiesce(1, Doubt.SENT))
    await receiver.hears(Awaiting, leases=(1,))
    receiver.transport.order(Exempt((1,), new))
    await receiver.hears(Quiet)

    sender.post(2, receiver, EVERYTHING, EVERYTHING, generation=2)
    await sender.outcome(2)
    assert not set(new) & set(sender.heard(AgentLoaded)[0].streams)


async def _write_slowly(sender, receiver):
    """Post everything over a slow path, and return when the sockets are full."""
    with _Sockets(sender.transport.pid, sender.heard(AgentLoaded)[0].streams) as held:
        for one in held:
            one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, PACE)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD)
        sender.post(1, receiver, EVERYTHING, EVERYTHING)
        await _until(lambda: max(_queued(one, termios.TIOCOUTQ) for one in held) >= HELD)


async def _until_all_is_read(sender):
    with _Sockets(sender.transport.pid, sender.heard(AgentLoaded)[0].streams) as held:
        await _until(lambda: not any(_queued(one, termios.FIONREAD) for one in held))


async def _until(happened):
    """Wait for what the kernel does; there is nothing that would tell."""
    async with asyncio.timeout(10):
        while not happened():  # noqa: ASYNC110 - nothing sets an event
            await asyncio.sleep(0.001)


def _halt(pid):
    """Stop a child; on return every thread of it stands."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


class _Sockets:
    """Copies of another process's sockets, by their streams; closed before that process ends."""

    def __init__(self, pid, streams):
        self.pid, self.streams, self.open = pid, streams, []

    def __enter__(self):
        pidfd = os.pidfd_open(self.pid)
        for entry in os.listdir(f"/proc/{self.pid}/fd"):
            if os.readlink(f"/proc/{self.pid}/fd/{entry}").startswith("socket:["):
                copy = _LIBC.syscall(_PIDFD_GETFD, pidfd, int(entry), 0)
                assert copy >= 0, os.strerror(ctypes.get_errno())
                one = socket.socket(fileno=copy)
                try:
                    ends = (one.getsockname(), one.getpeername())
                    is_wanted = ">".join(f"{end[0]}:{end[1]}" for end in ends) in self.streams
                except (OSError, IndexError):
                    is_wanted = False
                if is_wanted:
                    self.open.append(one)
                else:
                    one.close()
        os.close(pidfd)
        assert len(self.open) == len(self.streams)
        return self.open

    def __exit__(self, *_):
        for one in self.open:
            one.close()


def _queued(one, which):
    """Bytes that wait in a socket, to be read or to be acknowledged."""
    size = array.array("i", [0])
    fcntl.ioctl(one, which, size)
    return size[0]


def _is_known(stream):
    """Whether the kernel still has the sender's end of it, whoever's it is."""
    near, _, far = stream.partition(">")
    with open("/proc/net/tcp", encoding="ascii") as lines:
        return any(line.split()[1:3] == [_hex(near), _hex(far)] for line in lines)


def _hex(address):
    host, _, port = address.rpartition(":")
    return f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{int(port):04X}"


async def _settled(receiver):
    """What has arrived at the receiver is where it belongs."""
    receiver.transport.order(Quiesce(99, Doubt.ARRIVED))
    await receiver.hears(Quiet, lease=99)


async def _loaded_again(sender, receiver):
    before = len(sender.heard(AgentLoaded))
    await sender.load(receiver)
    await sender.until(lambda: len(sender.heard(AgentLoaded)) > before)
    return sender.heard(AgentLoaded)[-1].streams
