"""What has left the tree lately, so that whoever misses it can be told why, and for whose sake.

Two things are kept. A **filter** of one-byte marks: ten minutes of a busy node, of which only
whether something left is known. And a **record** of the last nodes with both sides:
who had written what left, and who needed its pages. Who misses what is in the record is *hurt* by
that eviction. Where the same prefix is evicted and asked for again, and again, each time soon, the
two sides thrash: there is not enough memory for both, and each pays for what the other computes.

What must not live here: which node goes first (``eviction``), what is said of it in words.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import nlargest
from struct import Struct
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr
from xxhash import xxh3_64_intdigest

from kvd.core.cache.flushed_before import FlushedBefore
from kvd.core.cache.left_prefix import (
    EvictionRound,
    LeftPrefix,
    MissedPrefix,
    QuotaReason,
    Thrashing,
)
from kvd.types import ID_BYTES, NO_PAGES, Pages, Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.core.cache.radix_node import RadixNode


SLOTS = 2**16
"""64 KiB: ten minutes of a node that evicts a hundred nodes a second."""

NEW = "new"
EVICTED = "evicted"
BESIDE = "beside"
"""The tokens are cached, but a component beside the first has nothing there to go on from."""

_PLACE = SLOTS - 1
_TAG_SHIFT = 56

MOST_LEFT: Final = 2048
"""Nodes at most of which both sides are known after they have left."""

_SLOT: Final = MOST_LEFT - 1

MOST_MISSED: Final = 128
"""Requests that were hurt, the last ones."""

MOST_WORDS: Final = 4096
"""Names of namespaces, reasons and tiers that are kept; beyond that the record begins anew."""

MOST_PAGE_LISTS: Final = 64
"""Evictions of which it is known which pages they freed."""

_ROW: Final = Struct("<QQQQQQIIIIIIIddIIi")
"""One row of the record, its fields in the order of ``LeftPrefix``."""

_NUMBER_BYTES: Final = 8
"""Of its first field."""

_MOST: Final = 2**32 - 1

SOON_S: Final = 60.0
"""What is asked for again within this after it was evicted went too early."""

THRASH_ROUNDS: Final = 2
"""So often in a row the same prefix must have gone too early."""

MOST_THRASHING: Final = 64
"""Pairs of sessions."""


MOST_FRESH: Final = 64
"""Facts that wait for the tick: nodes that have left stay in memory so long."""

FreshFact = tuple["Sequence[RadixNode]", Pages, str, int, int, int, float]
"""Nodes, their pages, and what for, or none and what was missed: a mark, and the node above it.
Whose session it is, and when it was, stand before and behind. What for and no nodes: a flush."""

NO_QUOTA: Final = QuotaReason("", 0, 0)
"""Of all that goes in its turn."""

FLUSH: Final = "flush"
OPERATOR: Final = "operator"
"""What pages are needed for where no lease needs them."""

OF_OPERATORS: Final = frozenset({FLUSH, OPERATOR})
"""Whoever has these done knows it, so nobody thrashes."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Evictions:
    """The filter and the record of one tree.

    The filter is a fixed table, by the low bits of a mark's hash, the newest in its place; the high
    byte is what is kept, 0 is none. A mark is of the first page of a node that was evicted or
    flushed: its namespace, where it begins, its tokens. Whole nodes leave, and the match of a
    prompt ends where the node began, so the first page that a lease misses is the one to look up.

    The filter may be wrong both ways, and is for the eye and for counters: a prompt with other
    tokens before an equal page has the same mark, one in 255 others has by chance, marks are
    overwritten, and a prompt that is cut anew inside of what has left has none. The record is
    asked only where the filter has a mark, and is right: the whole hash must be the same, and what
    was above the node that left must be where the match ends. So of a path that left as a whole
    only the first node is ever found. It is a fixed table of bytes too: to forget an object costs
    microseconds, because all that it refers to has left the caches of the processor by then. Now
    and then a newer row has the place of one that is not the oldest.

    A request that evicts, or misses, only appends to ``fresh``. The record is entered at the tick,
    in the same order, so what is asked of it is as old as that.
    """

    __slots__ = (
        "_flushes",
        "_is_single",
        "_marks",
        "_pages",
        "_rounds",
        "_rows",
        "_words",
        "by_quota",
        "flushed",
        "fresh",
        "in_tier",
        "missed",
        "n_hurt",
        "n_left",
        "n_soon",
        "thrashing",
    )

    def __init__(self, *, is_single: bool) -> None:
        self._is_single = is_single
        """Whether nothing is beside the first component."""
        self._marks = bytearray(SLOTS)
        self._rows = bytearray(_ROW.size * MOST_LEFT)
        """The record, by the low bits of the digest; the newest in its place, 0 is none."""
        self._words: dict[str | bytes, int] = {}
        """What a row names by a number, by the order in which it came."""
        self._pages: deque[tuple[int, Pages]] = deque(maxlen=MOST_PAGE_LISTS)
        """The number of the last row of an eviction, and the pages of all of its nodes."""
        self.in_tier: dict[int, str] = {}
        """By node id, the tier that has what left since the record was settled."""
        self.by_quota: dict[int, QuotaReason] = {}
        """The same of those that went out of their turn: why."""
        self.fresh: list[FreshFact] = []
        """What happened since then."""
        self._flushes: deque[str | None] = deque()
        """What was flushed since then; None: everything."""
        self.flushed = FlushedBefore()
        """Of rows."""
        self.missed: deque[MissedPrefix] = deque(maxlen=MOST_MISSED)
        self.n_left = 0
        self.n_hurt = 0
        self.n_soon = 0
        """Of these, those within ``SOON_S``."""
        self._rounds: list[EvictionRound | None] = [None] * MOST_LEFT
        """In the same way, what was asked for again soon."""
        self.thrashing: OrderedDict[tuple[int, int], Thrashing] = OrderedDict()
        """By who needed the pages and who was hurt; what was seen last at the end."""

    # ---- what leaves -------------------------------------------------------------------------

    def left(
        self, nodes: Sequence[RadixNode], pages: Pages, session: int, need: str, at_s: float
    ) -> None:
        """These have left the tree for that session; they still know what was above them.

        ``pages`` are those of all of them, in their order; where these are not told, none.
        """
        marks, hashed = self._marks, xxh3_64_intdigest
        for node in nodes:
            parent = node.parent
            # A root has no tokens of its own to be missed by.
            if parent is None:
                continue
            root = parent
            while root.parent is not None:
                root = root.parent
            start = parent.end_tokens
            mark = hashed(node.key, hashed(root.key, start) if root.key else start)
            marks[mark & _PLACE] = mark >> _TAG_SHIFT or 1
        if nodes:
            self.fresh.append((nodes, pages, need, session, 0, 0, at_s))

    def note_flush(self, namespace: str | None, at_s: float) -> None:
        """Of this one, or of all, nobody wants what is there, nor what has left before."""
        self._flushes.append(namespace)
        self.fresh.append(((), NO_PAGES, FLUSH, 0, 0, 0, at_s))

    # ---- what is missed ----------------------------------------------------------------------

    def why_missed(
        self, tokens: Tokens, root: RadixNode, anchor: RadixNode, page_tokens: int
    ) -> tuple[str, int]:
        """Why nothing of the prompt is found behind ``anchor``, and what ``hurt`` is told then."""
        start_tokens = anchor.end_tokens
        start = start_tokens * ID_BYTES
        page = tokens[start : start + page_tokens * ID_BYTES]
        named = xxh3_64_intdigest(root.key, start_tokens) if root.key else start_tokens
        mark = xxh3_64_intdigest(page, named)
        if self._marks[mark & _PLACE] == (mark >> _TAG_SHIFT or 1):
            return EVICTED, mark
        return NEW if self._is_single or page not in anchor.children else BESIDE, 0

    def hurt(self, mark: int, anchor: RadixNode, session: int, at_s: float) -> None:
        """A request of that session misses what the filter has a mark of."""
        above = anchor.id if anchor.parent is not None else 0
        self.fresh.append(((), NO_PAGES, "", session, mark, above, at_s))

    # ---- what is written down ----------------------------------------------------------------

    def settle(self) -> list[Thrashing]:
        """Enter what happened since the last time, in its order; the pairs that begin to thrash."""
        fresh, self.fresh = self.fresh, []
        began = []
        for nodes, pages, need, session, mark, above, at_s in fresh:
            if nodes:
                self._enter(nodes, pages, session, need, at_s)
            elif need:
                self.flushed.note(self._flushes.popleft(), self.n_left)
            else:
                found = self._hurt(mark, above, session, at_s)
                began += [found] if found is not None else []
        self.in_tier.clear()
        self.by_quota.clear()
        return began

    def _enter(
        self, nodes: Sequence[RadixNode], pages: Pages, session: int, need: str, at_s: float
    ) -> None:
        rows, tiers, words, quotas = self._rows, self.in_tier, self._words, self.by_quota
        if len(words) > MOST_WORDS:
            words.clear()
            rows[:] = bytes(len(rows))
        for node in nodes:
            parent = node.parent
            if parent is None:
                continue
            digest, root = _digest(node, parent)
            self.n_left += 1
            reason = quotas.get(node.id, NO_QUOTA) if quotas else NO_QUOTA
            _ROW.pack_into(
                rows,
                (digest & _SLOT) * _ROW.size,
                self.n_left,
                digest,
                node.id,
                0 if parent is root else parent.id,
                node.writer,
                session,
                words.setdefault(root.key, len(words)),
                parent.end_tokens,
                node.end_tokens,
                len(node.pages) // ID_BYTES,
                min(node.hits, _MOST),
                words.setdefault(need, len(words)),
                words.setdefault(tiers.get(node.id, ""), len(words)),
                at_s,
                node.touched_at,
                words.setdefault(reason.namespace, len(words)),
                reason.limit_pages,
                reason.beyond_pages,
            )
        if pages:
            self._pages.append((self.n_left, pages))

    def _hurt(self, mark: int, above: int, session: int, at_s: float) -> Thrashing | None:
        left = self._read(mark & _SLOT, list(self._words))
        if left is None or left.digest != mark or left.above != above:
            return None
        # What would not be there in any case is nobody's loss.
        if self.flushed.has(left.namespace.decode(), left.number):
            return None
        missed = MissedPrefix(left, session, at_s)
        self.missed.append(missed)
        self.n_hurt += 1
        if at_s - left.at_s > SOON_S:
            return None
        self.n_soon += 1
        return self._again(missed) if left.need not in OF_OPERATORS else None

    def _again(self, missed: MissedPrefix) -> Thrashing | None:
        left, at_s = missed.left, missed.at_s
        slot = left.digest & _SLOT
        before, n = self._rounds[slot], 1
        if before is not None and before.digest == left.digest:
            if before.node == left.node:
                n = before.n
            elif left.at_s - before.missed_s <= SOON_S:
                n = before.n + 1
        self._rounds[slot] = EvictionRound(digest=left.digest, n=n, node=left.node, missed_s=at_s)
        if n < THRASH_ROUNDS or (before is not None and before.node == left.node):
            return None
        pair = (left.session, missed.session)
        known = self.thrashing.pop(pair, None)
        is_new = known is None or at_s - known.last.at_s > SOON_S
        since_s, rounds = at_s, 0
        if known is not None and not is_new:
            since_s, rounds = known.since_s, known.rounds
        found = self.thrashing[pair] = Thrashing(
            session=left.session,
            hurt=missed.session,
            rounds=rounds + 1,
            since_s=since_s,
            last=missed,
        )
        if len(self.thrashing) > MOST_THRASHING:
            self.thrashing.popitem(last=False)
        return found if is_new else None

    # ---- what is asked for -------------------------------------------------------------------

    def thrashing_at(self, now_s: float) -> list[Thrashing]:
        """The pairs that do, what was seen last first."""
        found = reversed(self.thrashing.values())
        return [pair for pair in found if now_s - pair.last.at_s <= SOON_S]

    def last_left(self, most: int = MOST_LEFT) -> list[LeftPrefix]:
        """The last rows of the record, what left last first."""
        # Each snapshot asks for a few: only these are made, of all others the number is read.
        slots = nlargest(most, range(MOST_LEFT if self.n_left else 0), key=self._number_at)
        words = list(self._words)
        rows = [self._read(slot, words) for slot in slots]
        return [row for row in rows if row is not None]

    def _number_at(self, slot: int) -> int:
        """Of the row in that place; 0: there is none."""
        at = slot * _ROW.size
        return int.from_bytes(self._rows[at : at + _NUMBER_BYTES], "little")

    def _read(self, slot: int, words: list[str | bytes]) -> LeftPrefix | None:
        """The row in that place."""
        row = _ROW.unpack_from(self._rows, slot * _ROW.size)
        if not row[0]:
            return None
        number, digest, node, above, writer, session, namespace, start, end, pages, hits = row[:11]
        need, tier, at_s, touched_at, quota, limit_pages, beyond_pages = row[11:]
        return LeftPrefix(
            number=number,
            digest=digest,
            node=node,
            above=above,
            writer=writer,
            session=session,
            namespace=bytes(words[namespace]),
            start_tokens=start,
            end_tokens=end,
            n_pages=pages,
            hits=hits,
            need=str(words[need]),
            tier=str(words[tier]),
            at_s=at_s,
            touched_at=touched_at,
            quota=str(words[quota]),
            limit_pages=limit_pages,
            beyond_pages=beyond_pages,
        )

    def rounds_of(self, node: RadixNode) -> int:
        """How often what begins as ``node`` does was evicted and soon asked for again."""
        assert node.parent is not None
        digest, _ = _digest(node, node.parent)
        known = self._rounds[digest & _SLOT]
        return known.n if known is not None and known.digest == digest else 0

    def of_page(self, page: int) -> LeftPrefix | None:
        """What that page held when it last left the tree, as far as that is known."""
        wanted = page.to_bytes(ID_BYTES, "little")
        rows = {left.number: left for left in self.last_left()}
        for last, pages in reversed(self._pages):
            at = pages.find(wanted)
            while at >= 0 and at % ID_BYTES:
                at = pages.find(wanted, at + 1)
            if at >= 0:
                return _at(rows, last, len(pages) - at)
        return None


def _at(rows: dict[int, LeftPrefix], number: int, from_end: int) -> LeftPrefix | None:
    """The row whose pages are so many bytes before the end of those of its eviction."""
    while (left := rows.get(number)) is not None:
        from_end -= left.n_pages * ID_BYTES
        if from_end <= 0:
            return left
        number -= 1
    return None


def _digest(node: RadixNode, parent: RadixNode) -> tuple[int, RadixNode]:
    """The same as a mark's hash, and the root."""
    root = parent
    while root.parent is not None:
        root = root.parent
    start = parent.end_tokens
    return (
        xxh3_64_intdigest(node.key, xxh3_64_intdigest(root.key, start) if root.key else start),
        root,
    )
