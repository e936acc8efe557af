"""One daemon from start to exit status: signals in, and the manager told how it goes.

Status 78 (EX_CONFIG) is for what another start cannot make better: the service manager is told not
to try (``RestartPreventExitStatus=78``). 1 is for what may be otherwise in a moment.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

import uvloop

from kvd import __version__
from kvd.config import pool_spec
from kvd.daemon.heap import keep_freed_memory
from kvd.daemon.launch import launch
from kvd.daemon.listeners import AddressInUse
from kvd.daemon.lock import AlreadyRunning
from kvd.daemon.socket_activation import UnfitConfig
from kvd.observe.log import configure
from kvd.pools.arena import NotReserved
from kvd.pools.build import reserved_bytes
from kvd.transfer.process import TransportDown

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.daemon.app import Daemon
    from kvd.daemon.launch import Launch
    from kvd.daemon.reload import Read
    from kvd.daemon.systemd import Systemd
    from kvd.observe.log import EventLog
    from kvd.transfer.child import WorkerChild

CANNOT_SERVE: Final = (
    UnfitConfig,
    NotReserved,
    AlreadyRunning,
    AddressInUse,
    TransportDown,
    OSError,
)
"""What ``Daemon.start`` raises."""

FAILED: Final = 1
MISCONFIGURED: Final = 78


async def serve(
    config: Config, log: EventLog, systemd: Systemd, read: Read, launched: Launch
) -> int:
    """Run one daemon until a signal; returns the exit status."""
    from kvd.daemon import app  # noqa: PLC0415 - the transfer process comes up meanwhile

    daemon = app.Daemon(config, log, systemd, read, launched)
    loop = asyncio.get_running_loop()
    is_stale = asyncio.Event()
    if not os.isatty(0):  # on a terminal SIGHUP means that it is gone
        loop.add_signal_handler(signal.SIGHUP, _asked_to_reload, daemon, is_stale)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Before it starts: a start may take minutes, and must be stopped the same way.
        loop.add_signal_handler(number, _asked_to_stop, daemon, number)
    why = "stopping"
    try:
        await daemon.start()
        if daemon.pool.is_journaled:
            _print(f"kvd: the pool's memory was {daemon.pool.memory.reason}")
        for name in systemd.drop_unclaimed():
            _print(f"kvd: what systemd handed over as {name!r} is of no use here and was closed")
        # Only now: whoever is ordered after this unit connects at once.
        systemd.ready("serving")
        _print(f"kvd {__version__} {config.node.name} ready")
        # The configuration was changed while it came up from the old one.
        if is_stale.is_set():
            daemon.reloader.reload()
        await daemon.stopped.wait()
        if daemon.failure:
            why = _pool_lost(daemon.failure, config)
            return FAILED
    except CANNOT_SERVE as error:
        why = _cannot_serve(error)
        return exit_status(error, config)
    finally:
        # Before it is taken down: that takes a while, in which the manager must not think that it
        # hangs.
        systemd.stopping(why)
        await daemon.stop()
    return 0


def _cannot_serve(error: BaseException) -> str:
    """Say why, and give the words for the manager."""
    why = f"cannot serve: {error}"
    _print(f"kvd: {why}")
    return why


def _pool_lost(failure: str, config: Config) -> str:
    """Say why it ends, and give the words for the manager."""
    why = (
        f"ending: the pool on {config.pool.device} was memory of the transfer process, and is "
        f"gone with it ({failure}); the next start has a new one, to which engines come back"
    )
    _print(f"kvd: {why}")
    return why


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # in one piece, or a line of the log comes between
    sys.stderr.flush()


def _asked_to_reload(daemon: Daemon, is_stale: asyncio.Event) -> None:
    """Now, or as soon as it is up."""
    if daemon.is_up:
        daemon.reloader.reload()
    else:
        is_stale.set()


def _asked_to_stop(daemon: Daemon, number: signal.Signals) -> None:
    """The first signal drains and stops; a second one exits at once."""
    if daemon.is_stopping or daemon.stopped.is_set():
        os._exit(1)
    daemon.ask_to_stop(number.name)


def main(config: Config, read: Read, systemd: Systemd, child: WorkerChild | None) -> int:
    """Run the daemon of ``config`` in the foreground; returns the exit status.

    Args:
        config: it begins with.
        read: gives the configuration as it is by then, or what is wrong with it.
        systemd: who supervises it.
        child: its transfer process, which was started before the configuration was read.
    """
    keep_freed_memory()
    try:
        launched = launch(config, systemd, child)
    except CANNOT_SERVE as error:
        systemd.stopping(_cannot_serve(error))
        return exit_status(error, config)
    log = configure(form=config.log.format, level=config.log.level, node=config.node.name)
    try:
        return uvloop.run(serve(config, log, systemd, read, launched))
    finally:
        log.close()


def exit_status(error: BaseException, config: Config) -> int:
    """Of a daemon of ``config`` that ``error`` kept from serving."""
    match error:
        case UnfitConfig():
            return MISCONFIGURED
        case NotReserved() if _exceeds_host(config):
            return MISCONFIGURED
        case _:
            return FAILED


def _exceeds_host(config: Config) -> bool:
    """Whether the pool is larger than all memory of this host, however little of it is taken."""
    wanted = sum(reserved_bytes(pool_spec(config)).values())
    return wanted > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
