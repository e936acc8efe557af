"""What cache.mode allows of a request, decided in one place before any verb sees it.

``off`` takes away the tree: nothing is inserted, so nothing is ever matched. ``prefill-only`` takes
away the bytes too: leases count tokens, and whatever would write, insert, match, send, receive,
check or copy KV is refused rather than done with nothing.
"""

from __future__ import annotations

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


def allowed(request: client.Request, settings: Settings) -> client.Request | Refusal:
    """The request as the mode has it, or why it is not served."""
    match settings.cache_mode:
        case CacheMode.RADIX:
            return request
        case CacheMode.OFF:
            return _uncached(request)
        case CacheMode.PREFILL_ONLY:
            return request if isinstance(request, COUNTS) else _refused(request, settings)


def _uncached(request: client.Request) -> client.Request:
    if isinstance(request, client.OpenLease | client.Receive):
        return msgspec.structs.replace(request, cache=False)
    return request


def _refused(request: client.Request, settings: Settings) -> Refusal:
    verb = type(request).__struct_config__.tag
    spec = settings.spec
    return Refusal(
        Code.NOT_SUPPORTED,
        f"{verb} needs KV, and pool {spec.name} of {settings.name} has none: cache.mode is "
        '"prefill-only" there, which counts tokens and takes no byte; set cache.mode = "radix"',
        side=settings.name,
    )
