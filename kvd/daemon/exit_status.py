"""How a daemon that could not come up ends: the sentence, and the exit status that says what helps.

78 (EX_CONFIG) is for what another start cannot make better: the service manager is told not to try
(``RestartPreventExitStatus=78``). 1 is for what may be otherwise in a moment.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvd.config import pool_spec
from kvd.daemon.lock import AlreadyRunning
from kvd.daemon.seqpacket import AddressInUse
from kvd.daemon.socket_activation import UnfitConfig
from kvd.pools.arena import NotReserved
from kvd.pools.build import reserved_bytes
from kvd.transfer.transport import TransportDown

if TYPE_CHECKING:
    from kvd.config import Config

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
