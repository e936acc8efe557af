"""A process that nobody has told yet what it is: it is born, and loads meanwhile.

The transfer process needs as long to load as a daemon does, and nothing of the configuration. So
``kvd serve`` starts it before anything else; what it maps comes with its first order, descriptors
and all. What lives here must import next to nothing.

The child's side of it is here too: how it ends with its parent, from before it loads, and how it
takes that first order. What is started is ``python -m kvd.transfer.child MODULE SOCKET PARENT``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from kvd.transfer.orders import Frames, OrderStream

MOST_DESCRIPTORS: Final = 253
"""With one message: the kernel's limit."""

OrderT = TypeVar("OrderT")
ReportT = TypeVar("ReportT")

ENTRY: Final = "kvd.transfer.child"
TRANSFER_WORKER: Final = "kvd.transfer.worker"


class WorkerChild:
    """One child that waits for its first order on ``socket``; ``end`` it if nobody takes it.

    Attributes:
        process: to be reaped.
        pidfd: becomes readable when it is a zombie; of whoever takes it.
        socket: ours of the pair, not blocking.
    """

    def __init__(self, module: str = TRANSFER_WORKER) -> None:
        """Start it; ``main`` of that module gets its end of the socket.

        Raises:
            OSError: this host has no process or descriptor left for it.
        """
        self.is_taken = False
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            ours.settimeout(0.0)
            self.socket = ours
            # Closed here once the child has it: the end of the stream must come with the child's
            # own end.
            with theirs:
                self.process = subprocess.Popen(
                    # Without the current directory on its path: what lies there is not for it to
                    # import.
                    [
                        *(sys.executable, "-P", "-m", ENTRY, module),
                        *(str(theirs.fileno()), str(os.getpid())),
                    ],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            undo.callback(self.process.wait)
            # Undone last first: killed, then waited for.
            undo.callback(self.process.kill)
            # While it cannot have been reaped: its number is still its own.
            self.pidfd = os.pidfd_open(self.process.pid)
            undo.pop_all()

    def take(self) -> WorkerChild:
        """Be whoever's calls this: it reaps the process, and closes both descriptors."""
        self.is_taken = True
        return self

    def end(self) -> None:
        """Kill and reap it, unless somebody has taken it."""
        if self.is_taken:
            return
        self.is_taken = True
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.process.wait()
        os.close(self.pidfd)
        self.socket.close()


_PR_SET_PDEATHSIG: Final = 1
_READ_BYTES: Final = 2**20


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end now if it already has."""
    import ctypes  # noqa: PLC0415 - the daemon imports this file before everything else

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the line above sends no signal any more.
    if os.getppid() != parent:
        os._exit(0)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the daemon, which
        signal.signal(name, signal.SIG_IGN)  # decides when this process ends


def first_orders(
    orders: socket.socket, frames: Frames, stream: OrderStream[OrderT, ReportT]
) -> tuple[list[OrderT], list[int]]:
    """Wait for the first order; it, what came with it in one read, and the descriptors."""
    received: list[int] = []
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, _READ_BYTES, MOST_DESCRIPTORS)
        received += descriptors
        if not data:
            os._exit(0)
        found = [stream.order_of(body) for body in frames.feed(data)]
        if found:
            return found, received


def main() -> None:
    """Be what the first argument names."""
    module, descriptor, parent = sys.argv[1:]
    # Before it loads, which takes a busy host seconds: until it reads its first order the
    # descriptors of that one, the daemon's lock among them, are in its socket, and stay as long as
    # it lives.
    die_with(int(parent))
    importlib.import_module(module).main(socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main()
