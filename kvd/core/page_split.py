"""When two pools that differ in page size hold the same: one page there is several here.

Only what lies token by token can be cut into smaller pages: opaque bytes, windows and states must
be equal on both sides. Whether such a peer is accepted is decided elsewhere.
"""

from __future__ import annotations

import msgspec

from kvd.core.page_sizes import pages_in
from kvd.core.spec import Exchanged, Order, PoolSpec, Raw, Whole, exchanged


class PageSplit(msgspec.Struct, frozen=True):
    """How the pages of two nodes relate.

    ``parts`` is parallel to the components that both have, buffers left out: how many of the
    smaller page hold one of the larger; the larger is on the same side in all of them.
    """

    ours_tokens: int
    theirs_tokens: int
    parts: tuple[int, ...]


def read_fingerprint(theirs: str) -> tuple[Order, tuple[Exchanged, ...]] | None:
    """What a peer says of its pool; None when that is no fingerprint."""
    try:
        return msgspec.json.decode(theirs, type=tuple[Order, tuple[Exchanged, ...]])
    except (msgspec.DecodeError, RecursionError):
        return None


def page_split(ours: PoolSpec, theirs: str) -> PageSplit | None:
    """How our pages relate to those of a peer's fingerprint when nothing but page sizes differs.

    None when anything else differs, or one size is no whole multiple of the other. Equal sizes are
    a split into 1 part.
    """
    read = read_fingerprint(theirs)
    if read is None:
        return None
    order, others = read
    mine = exchanged(ours)
    if order is not ours.order or len(others) != len(mine):
        return None
    is_ours_larger = mine[0].page_size >= others[0].page_size
    parts: list[int] = []
    for one, other in zip(mine, others, strict=True):
        if msgspec.structs.replace(other, page_size=one.page_size) != one:
            return None
        large, small = one.page_size, other.page_size
        if not is_ours_larger:
            large, small = small, large
        part = pages_in(large, small)
        if part is None or (part > 1 and not _is_token_by_token(one)):
            return None
        parts.append(part)
    return PageSplit(mine[0].page_size, others[0].page_size, tuple(parts))


def _is_token_by_token(component: Exchanged) -> bool:
    return isinstance(component.extent, Whole) and not isinstance(component.layout, Raw)
