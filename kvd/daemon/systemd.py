"""The conversation with systemd: what it is told, what it keeps for us, what it hands over.

The protocol is ``sd_notify``: datagrams of ``KEY=VALUE`` lines to the socket that the environment
names. Without one every verb here does nothing, so a daemon that nobody supervises is the same
daemon. The variables are taken out of the environment: what we start must not speak for us.

A descriptor in the store outlives this process and comes back to the next one, under its name. The
store never answers, so what it has kept is proven: the last descriptor stored is one end of a pipe,
and a manager that does not keep it closes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Final

from kvd.daemon.socket_activation import PassedDescriptors, UnfitConfig, descriptors_passed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

_VARIABLES: Final = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "FDSTORE",
)

SAY_EVERY_S: Final = 2.0
EXTEND_S: Final = 60.0
"""More time that is asked for each time slow work has got on; systemd counts it from then."""
PATIENCE_S: Final = 5.0
"""A manager that has not taken a message by then does not hear us."""
PROBE: Final = "kvd-probe"
_FIRST_FD: Final = 3


class Systemd:
    """One manager, or none. ``watchdog_s``: it wants to be fed so often; 0: it does not watch."""

    def __init__(
        self,
        address: str = "",
        *,
        watchdog_s: float = 0.0,
        passed: PassedDescriptors | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watchdog_s = watchdog_s
        self.is_ready = False
        """Whether it was told that we are, and not that we stop."""
        self.passed = PassedDescriptors({}) if passed is None else passed
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._clock = clock
        self._said = ""
        self._said_s = self._extended_s = float("-inf")

    @classmethod
    def of(cls, environ: MutableMapping[str, str], pid: int) -> Systemd:
        """Who supervises process ``pid`` by its environment, out of which all of it is taken."""
        # Taken out before anything is started: what we start must not speak for us, nor take what
        # we were handed.
        taken = {name: environ.pop(name, "") for name in _VARIABLES}
        usec = taken["WATCHDOG_USEC"]
        is_ours = taken["WATCHDOG_PID"] in {"", str(pid)}
        return cls(
            taken["NOTIFY_SOCKET"],
            watchdog_s=int(usec) / 1e6 if usec.isdecimal() and is_ours else 0.0,
            passed=descriptors_passed(taken, pid, _FIRST_FD),
        )

    @property
    def is_there(self) -> bool:
        """Whether anybody supervises us."""
        return bool(self._address)

    # ---- what it is told -----------------------------------------------------------------------

    def ready(self, status: str) -> None:
        """Everything is open: whoever depends on us may start."""
        self.is_ready = True
        self._say("READY=1", status)

    def say(self, status: str) -> None:
        """How it goes, in a line; sent if it changed, every ``SAY_EVERY_S`` at most."""
        if status != self._said and self._clock() - self._said_s >= SAY_EVERY_S:
            self._say(status=status)

    def advance(self, status: str) -> None:
        """Slow work has got on, so it gets more time; call it as often as you like."""
        now_s = self._clock()
        if now_s - self._extended_s >= SAY_EVERY_S:
            self._extended_s = now_s
            self._tell(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}")
        self.say(status)

    def begin(self, status: str) -> None:
        """Say at once what takes its time now, and ask for time for it."""
        self._said_s = self._extended_s = float("-inf")
        self.advance(status)

    def stopping(self, status: str) -> None:
        """We are on our way down."""
        self.is_ready = False
        self._say("STOPPING=1", status)

    def reloading(self) -> None:
        """The configuration is read again; ``ready`` says that this is over."""
        self._say(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", "reloading")

    def feed(self) -> None:
        """The watchdog may sleep on."""
        self._tell("WATCHDOG=1")

    # ---- what it keeps ---------------------------------------------------------------------------

    def store(self, descriptors: Mapping[str, int]) -> None:
        """Have it keep these, by name, until the unit is stopped; what it has already it keeps.

        Raises:
            UnfitConfig: nobody supervises us, or it keeps no descriptors, or fewer than these.
            TimeoutError: it does not answer.
        """
        if not self.is_there:
            raise UnfitConfig(
                'pool.backing = "fdstore" needs systemd, and NOTIFY_SOCKET is not set: start kvd '
                'as a service of Type=notify, or set pool.backing = "shm"'
            )
        for name, descriptor in descriptors.items():
            self._tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (descriptor,), PATIENCE_S)
        # Last of all that is stored: where the store is full this is what does not fit.
        with self._told_with_pipe(f"FDSTORE=1\nFDNAME={PROBE}\nFDPOLL=0") as ours:
            try:
                self.barrier()
                # Behind the barrier: by now the manager has handled it, and has closed it if it
                # does not keep it.
                is_kept = not _is_hung_up(ours, 0.0)
            finally:
                self.forget(PROBE)
        if not is_kept:
            raise UnfitConfig(
                f"systemd does not keep {len(descriptors)} descriptors for this service: set "
                f"FileDescriptorStoreMax={len(descriptors) + 1} or more and NotifyAccess=main "
                'in its unit, or pool.backing = "shm"'
            )

    def forget(self, name: str) -> None:
        """Have it close what it keeps under ``name``."""
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}", patience_s=PATIENCE_S)

    def barrier(self) -> None:
        """Return when it has handled all that it was told.

        Raises:
            TimeoutError: it has not in ``PATIENCE_S``.
        """
        if not self.is_there:
            return
        # It closes its end when it comes to this message, behind all that was sent before.
        with self._told_with_pipe("BARRIER=1") as ours:
            if not _is_hung_up(ours, PATIENCE_S):
                raise TimeoutError(f"systemd has not read its notify socket for {PATIENCE_S:g} s")

    def drop_unclaimed(self) -> tuple[str, ...]:
        """Close what it handed over and nobody took, so that it does not keep it; their names."""
        names = self.passed.close_rest()
        for name in names:
            # Closed here it would still be in the store, and come back with every start.
            self.forget(name)
        return names

    # ---- the wire --------------------------------------------------------------------------------

    def _say(self, head: str = "", status: str = "") -> None:
        self._said, self._said_s = status, self._clock()
        line = "STATUS=" + " ".join(status.split())
        self._tell(f"{head}\n{line}" if head else line, patience_s=PATIENCE_S if head else 0.0)

    @contextlib.contextmanager
    def _told_with_pipe(self, message: str) -> Iterator[int]:
        """Send it one end of a pipe; the other end hangs up when nobody keeps that any more."""
        ours, theirs = os.pipe()
        try:
            try:
                self._tell(message, (theirs,), PATIENCE_S)
            finally:
                # Ours is gone with the message: the other end hangs up when the manager has no copy
                # either.
                os.close(theirs)
            yield ours
        finally:
            os.close(ours)

    def _tell(
        self, message: str, descriptors: tuple[int, ...] = (), patience_s: float = 0.0
    ) -> None:
        """Send one datagram; a manager that is gone or full for ``patience_s`` misses it."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
        ):
            notify.settimeout(patience_s)
            notify.connect(self._address)  # or a full queue is not waited for
            socket.send_fds(notify, [message.encode()], descriptors)


def _is_hung_up(end: int, within_s: float) -> bool:
    """Whether nobody has the other end of a pipe any more."""
    poll = select.poll()
    poll.register(end, 0)
    return bool(poll.poll(within_s * 1000))
