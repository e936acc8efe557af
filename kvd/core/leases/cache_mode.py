"""What cache.mode allows of a request, decided in one place before any verb sees it.

``off`` takes away the tree: nothing is inserted, so nothing is ever matched. ``prefill-only`` takes
away the bytes too: leases count tokens, and whatever would write, insert, match, send, receive,
check or copy KV is refused rather than done with nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.core.settings import CacheMode
from kvd.errors import Code, Refusal
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.settings import Settings

COUNTS: Final = (
    client.OpenLease,
    client.ExtendLease,
    client.ReleaseLease,
    client.GetSnapshot,
    client.CancelCall,
)
"""Requests that need no KV: only these are served where there is none."""


Gate = Callable[[client.Request], client.Request | Refusal]
"""The request as the mode has it, or why it is not served."""


def gate_of(settings: Settings) -> Gate | None:
    """What every request passes; None where the mode allows everything."""
    match settings.cache_mode:
        case CacheMode.RADIX:
            return None
        case CacheMode.OFF:
            return _uncached
        case CacheMode.PREFILL_ONLY:
            return Counting(settings).gate


def _uncached(request: client.Request) -> client.Request:
    if isinstance(request, client.OpenLease | client.Receive):
        return msgspec.structs.replace(request, cache=False)
    return request


class Counting:
    """The gate of a pool without KV: it counts tokens and does nothing else."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def gate(self, request: client.Request) -> client.Request | Refusal:
        """What needs no KV, or why the rest is refused."""
        return request if isinstance(request, COUNTS) else _refused(request, self._settings)


def _refused(request: client.Request, settings: Settings) -> Refusal:
    verb = type(request).__struct_config__.tag
    spec = settings.spec
    return Refusal(
        Code.NOT_SUPPORTED,
        f"{verb} needs KV, and pool {spec.name} of {settings.name} has none: cache.mode is "
        '"prefill-only" there, which counts tokens and takes no byte; set cache.mode = "radix"',
        side=settings.name,
    )
