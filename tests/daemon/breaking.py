"""A daemon that breaks its own node when it is told to: what a bug would do, in a real process.

Run as ``python -m tests.daemon.breaking FILE -- ... serve --set ...``. At SIGUSR1 it applies the
breakage that FILE names, see ``tests.core.breakage`` and ``breakage_beside``. Everything else is
the daemon as it is.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from kvd.cli.options import valid_config
from kvd.daemon.app import Daemon
from kvd.observe.log import configure
from tests.core.breakage import BREAKAGES, page_in_two_plain_leases
from tests.core.breakage_beside import BESIDE_BREAKAGES

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.observe.log import EventLog


async def serve(config: Config, log: EventLog, wish: Path) -> None:
    daemon = Daemon(config, log)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, daemon.stopped.set)
    ways = {name: one.apply for name, one in {**BREAKAGES, **BESIDE_BREAKAGES}.items()}
    ways[page_in_two_plain_leases.__name__] = page_in_two_plain_leases
    loop.add_signal_handler(signal.SIGUSR1, lambda: ways[wish.read_text()](daemon.node))
    try:
        await daemon.start()
        sys.stderr.write("breakable ready\n")
        sys.stderr.flush()
        await daemon.stopped.wait()
    finally:
        await daemon.stop()


def main(wish: str, *arguments: str) -> None:
    """``arguments`` are those of ``kvd serve`` after whatever starts it."""
    sets = [word for word in arguments if "=" in word]
    config = valid_config(None, tuple(sets))
    log = configure(form="json", level=config.log.level, node=config.node.name)
    uvloop.run(serve(config, log, Path(wish)))


if __name__ == "__main__":
    main(*sys.argv[1:])
