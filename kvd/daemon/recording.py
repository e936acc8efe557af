"""The daemon's side of the flight recorder: it notes every input, and keeps the recorder process.

Inputs are written to the ring before they are stepped, in the frames that they came in, so a
daemon that is killed loses none of them. Each at once, not many together: what was just received is
in the processor's cache, and its memory is free for the next as soon as it was stepped. Following,
stepping and saving is the recorder process's. Whatever becomes of that process, the daemon goes on:
it says that the recording has ended, and begins anew with a fresh copy of the node as soon as that
is small enough to be made between two ticks.

    OFF --begin--> RECORDING --it died, fell behind, strayed--> ENDED --pause, begin--> RECORDING
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Final

from kvd import __version__
from kvd.core.inputs import FromClient, FromPeer, Input, RecorderSaid, RecorderSaved, Tick
from kvd.core.recorded import RECORDING
from kvd.core.replay.freeze import TooManyObjects, Unfreezable, freeze
from kvd.recorder import orders, ring
from kvd.recorder.input_records import (
    headed_message,
    headed_request,
    mark_of,
    record_of,
    record_of_mark,
)
from kvd.recorder.orders import DEAF_TO
from kvd.wire.snapshot import RecorderState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvd.config.schema import RecorderSection
    from kvd.daemon.reactor import Reactor
    from kvd.recorder.ring import RecordRing

    OnSaved = Callable[[orders.SavedFile | orders.NotSaved], None]

MARK_EVERY_S: Final = 1.0
"""A mark costs 20 us; a replay that strays is found within as much."""

BASE_OBJECTS: Final = 2000
"""The largest node that is copied to begin with: some 20 ms, in which the loop stands still."""

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""Before a recording that ended begins anew; doubles while it does not last."""

STEADY_S: Final = 60.0
"""A recording that lasted so long may begin anew after the first pause."""

GOODBYE_S: Final = 1.0
"""A recorder process that has not ended by then is killed: it has nothing that anyone wants."""

BUG_EVERY_S: Final = 60.0
"""A bug that every input meets is saved once in this time."""


class FlightRecorder:
    """At most one recorder process at a time.

    Args:
        reactor: its inputs are recorded, from ``begin`` on.
        section: how far back, how much memory.
        directory: where the files go.
    """

    def __init__(self, reactor: Reactor, section: RecorderSection, directory: Path) -> None:
        self._reactor = reactor
        self._section = section
        self._directory = directory
        self._why = "" if section.enabled else "recorder.enabled is false"
        self._child: RecorderChild | None = None
        self._pause_s = FIRST_PAUSE_S
        self._again: asyncio.TimerHandle | None = None
        self._began_s = self._mark_s = self._bug_s = float("-inf")
        self._tickets = itertools.count(1)
        self._waiting: dict[int, OnSaved] = {}

    def begin(self) -> None:
        """Record from now on, if it is enabled and the node can be copied."""
        if not self._section.enabled:
            self._say(RecorderState("off", why=self._why))
            return
        node = self._reactor.node
        try:
            base = freeze(node, max_objects=BASE_OBJECTS)
            self._child = RecorderChild(self, base, self._section.max_bytes)
        except TooManyObjects:
            again = f"the node has more than {BASE_OBJECTS} objects, too many to copy meanwhile"
            self._end(f"{self._why or 'not begun'}; {again}")
            return
        except (Unfreezable, OSError) as error:
            self._end(f"it cannot begin: {error}")
            return
        self._began_s = self._reactor.clock()
        self._child.tell(
            orders.BeginRecording(
                node=node.settings.name,
                incarnation=node.settings.incarnation,
                kvd=__version__,
                keep_s=60 * self._section.minutes,
                directory=str(self._directory),
                at_s=node.out.at_s,
            )
        )
        # After the copy is made and in the same turn: no input lies between it and the first that
        # is kept.
        self._reactor.record_with(self._keep)
        self._say(RecorderState(RECORDING))

    async def stop(self, *, is_clean: bool) -> None:
        """End the recorder process; it saves what it has unless the end is a clean one."""
        if self._again is not None:
            self._again.cancel()
        self._reactor.record_no_more()
        child, self._child = self._child, None
        if child is None:
            return
        self._fail_all("the daemon ends")
        if is_clean:
            child.tell(orders.Goodbye())
            try:
                async with asyncio.timeout(GOODBYE_S):
                    await child.gone.wait()
            except TimeoutError:
                child.kill()
                await child.gone.wait()
        child.hang_up()

    def save(self, kind: str, why: str, state_hash: str, on_saved: OnSaved) -> None:
        """Save what was recorded until now; ``on_saved`` hears what came of it, maybe at once."""
        ticket = next(self._tickets)
        if self._child is None:
            on_saved(orders.NotSaved(ticket, f"nothing is recorded: {self._why}"))
            return
        self._waiting[ticket] = on_saved
        self._child.tell(
            orders.Save(
                ticket=ticket, kind=kind, why=why, upto=self._child.ring.end, state_hash=state_hash
            )
        )

    def bug(self, task: str, error: BaseException) -> None:
        """A step or an effect has raised: save what led to it, once in a while."""
        now_s = self._reactor.clock()
        if self._child is not None and now_s - self._bug_s >= BUG_EVERY_S:
            self._bug_s = now_s
            self.save("bug", f"a bug in {task}: {error!r}"[:500], "", lambda report: None)

    # ---- what the child says -----------------------------------------------------------------

    def heard(self, report: orders.Report) -> None:
        """The recorder process said something."""
        match report:
            case orders.Covered(seconds, inputs, n_bytes):
                state = RecorderState(
                    RECORDING, covered_s=seconds, inputs=inputs, record_bytes=n_bytes
                )
                self._say(state)
            case orders.SavedFile() | orders.NotSaved():
                on_saved = self._waiting.pop(report.ticket, None)
                if on_saved is not None:
                    on_saved(report)
                if isinstance(report, orders.SavedFile):
                    self._reactor.feed(
                        RecorderSaved(self._reactor.clock(), report.path, report.why)
                    )
            case orders.ShadowStrayed(why):
                self._end(f"a bug: {why}")

    def died(self, child: RecorderChild, why: str) -> None:
        """A recorder process is gone: a misfortune, unless it is one that was given up."""
        if child is self._child:
            self._end(why)

    # ---- taping ------------------------------------------------------------------------------

    def _keep(self, happened: Input, frame: bytes) -> None:
        """Write one input, before it is stepped, as it came: in ``frame``, if it came in one."""
        child = self._child
        if child is None:
            return
        if type(happened) is FromClient and frame:
            is_kept = child.ring.write(headed_request(happened, frame), happened.tokens)
        elif type(happened) is FromPeer and frame:
            is_kept = child.ring.write(headed_message(happened, frame))
        else:
            is_kept = self._keep_other(child.ring, happened)
        if not is_kept:
            self._end(
                f"the recorder process fell behind: {child.ring.size >> 20} MiB of inputs wait for "
                "it; give it processor time, or raise recorder.max_bytes"
            )

    def _keep_other(self, ring: RecordRing, happened: Input) -> bool:
        """An input that came in no frame; before a tick now and then a mark of the node."""
        try:
            record = record_of(happened)
        except (TypeError, ValueError, OverflowError) as error:
            self._end(f"an input cannot be recorded: {error}")
            return True
        if type(happened) is Tick and happened.at_s >= self._mark_s:
            self._mark_s = happened.at_s + MARK_EVERY_S
            mark = record_of_mark(mark_of(self._reactor.node), happened.at_s)
            if not ring.write(mark.headed()):
                return False
        return ring.write(record.headed(), record.tokens)

    def _end(self, why: str) -> None:
        """The recording is over; try again after a pause."""
        # Before it is told: what is fed from here on belongs to no recording.
        self._reactor.record_no_more()
        self._why = why
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.hang_up()
        self._fail_all(why)
        self._say(RecorderState("ended", why=why))
        # It had lasted: what ended it is not what ends it each time.
        if self._reactor.clock() - self._began_s >= STEADY_S:
            self._pause_s = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        self._again = loop.call_later(self._pause_s, self.begin)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _fail_all(self, why: str) -> None:
        # Taken off first: who hears that nothing was saved may ask once more.
        waiting, self._waiting = self._waiting, {}
        for ticket, on_saved in waiting.items():
            on_saved(orders.NotSaved(ticket, why))

    def _say(self, state: RecorderState) -> None:
        self._reactor.feed(RecorderSaid(self._reactor.clock(), state))


class RecorderChild:
    """One recorder process, its ring, and the socket to it."""

    def __init__(self, owner: FlightRecorder, base: bytes, max_bytes: int) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.gone = asyncio.Event()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0.0)
        self._socket = ours
        frozen = os.memfd_create("kvd-recorder-base", os.MFD_CLOEXEC)
        memory = ring.create(max_bytes // ring.FIRST * ring.FIRST)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            os.pwrite(frozen, base, 0)
            self.ring = ring.RecordRing(memory)
            descriptors = (theirs.fileno(), memory, frozen)
            # What is blocked here is blocked there from its first moment: it ignores them later.
            signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
            self._process = subprocess.Popen(
                orders.command(descriptors),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            os.close(memory)
            os.close(frozen)
        # By a descriptor: a number could be another process's when we kill it.
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._died)
        self._loop.add_reader(self._socket, self._readable)

    def tell(self, order: orders.Order) -> None:
        """Send an order; one that does not get through is as good as a dead process."""
        try:
            self._socket.send(orders.encode(order))
        except OSError:
            self.kill()

    def kill(self) -> None:
        """End it at once; ``gone`` is set when it is reaped."""
        if not self.gone.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def hang_up(self) -> None:
        """Hear nothing more of it; a process that is still there takes it as the daemon's end."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(orders.PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self._socket)  # the pidfd tells the rest
            return
        self._owner.heard(orders.REPORTS.decode(packet))

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = self._process.wait()
        os.close(self._pidfd)
        self.gone.set()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        self._owner.died(self, f"the recorder process {self._process.pid} ended with {how}")
