"""A transfer process that nobody has told yet what it is: it is born, and loads meanwhile.

It needs as long to load as a daemon does, and nothing of the configuration. So ``kvd serve`` starts
it before anything else; what it maps comes with its first order, descriptors and all. What lives
here must import next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Final

_WORKER: Final = "kvd.transfer.worker"


class WorkerChild:
    """One child that waits for its first order on ``socket``; ``end`` it if nobody takes it.

    Attributes:
        process: to be reaped.
        pidfd: becomes readable when it is a zombie; of whoever takes it.
        socket: ours of the pair, not blocking.
    """

    def __init__(self) -> None:
        """Start it.

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
                    [sys.executable, "-P", "-m", _WORKER, str(theirs.fileno()), str(os.getpid())],
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
