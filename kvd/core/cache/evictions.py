"""What has left the tree lately, so that whoever misses it can be told why, and for whose sake.

Two things are kept. A **filter** of one-byte marks: ten minutes of a busy node, of which only
whether something left is known. And a **record** of the last ``MOST_LEFT`` nodes with both sides:
who had written what left, and who needed its pages. Who misses what is in the record is *hurt* by
that eviction. Where the same prefix is evicted and asked for again, and again, each time soon, the
two sides thrash: there is not enough memory for both, and each pays for what the other computes.

What must not live here: which node goes first (``eviction``), what is said of it in words.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr
from xxhash import xxh3_64_intdigest

from kvd.core.cache.left_prefix import EvictionRound, LeftPrefix, MissedPrefix, Thrashing
from kvd.types import ID_BYTES, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.cache.radix_node import RadixNode


SLOTS = 2**16
"""64 KiB: ten minutes of a node that evicts a hundred nodes a second."""

NEW = "new"
EVICTED = "evicted"
BESIDE = "beside"
"""The tokens are cached, but a component beside the first has nothing there to go on from."""

_PLACE = SLOTS - 1
_TAG_SHIFT = 56

MOST_LEFT: Final = 1024
"""Nodes of which both sides are known after they have left."""

MOST_MISSED: Final = 128
"""Requests that were hurt, the last ones."""

KEPT_PAGE_BYTES: Final = 256 * ID_BYTES
"""Of the page ids of one node: the first of them, so that the record stays below some MB."""

SOON_S: Final = 60.0
"""What is asked for again within this after it was evicted went too early."""

THRASH_ROUNDS: Final = 2
"""So often in a row the same prefix must have gone too early."""

MOST_THRASHING: Final = 64
"""Pairs of sessions."""


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
    only the first node is ever found.
    """

    __slots__ = (
        "_is_single",
        "_marks",
        "_rounds",
        "by_digest",
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
        self.by_digest: OrderedDict[int, LeftPrefix] = OrderedDict()
        """The record; what left last at the end."""
        self.in_tier: dict[int, str] = {}
        """By node id, the tier that has what leaves in this step; empty between steps."""
        self.missed: deque[MissedPrefix] = deque(maxlen=MOST_MISSED)
        self.n_left = 0
        self.n_hurt = 0
        self.n_soon = 0
        """Of these, those within ``SOON_S``."""
        self._rounds: OrderedDict[int, EvictionRound] = OrderedDict()
        """By digest, of those that were asked for again soon; what was asked for last at the end.
        """
        self.thrashing: OrderedDict[tuple[int, int], Thrashing] = OrderedDict()
        """By who needed the pages and who was hurt; what was seen last at the end."""

    # ---- what leaves -------------------------------------------------------------------------

    def left(self, nodes: Iterable[RadixNode], session: int, need: str, at_s: float) -> None:
        """These have left the tree for that session; they still know what was above them."""
        marks, hashed, record, tiers = self._marks, xxh3_64_intdigest, self.by_digest, self.in_tier
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
            pages = node.pages
            # By position: this is paid for every node that goes, as a part of a request.
            record[mark] = LeftPrefix(
                mark,
                node.id,
                0 if parent is root else parent.id,
                root.key,
                start,
                node.end_tokens,
                len(pages) // ID_BYTES,
                pages[:KEPT_PAGE_BYTES],  # type: ignore[arg-type]  # see RadixNode
                node.hits,
                node.writer,
                session,
                need,
                tiers.get(node.id, "") if tiers else "",
                at_s,
                node.touched_at,
            )
            record.move_to_end(mark)
            self.n_left += 1
        while len(record) > MOST_LEFT:
            record.popitem(last=False)
        if tiers:
            tiers.clear()

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

    def hurt(self, mark: int, anchor: RadixNode, session: int, at_s: float) -> Thrashing | None:
        """A request of that session misses what was evicted; a pair that begins to thrash by it."""
        left = self.by_digest.get(mark)
        above = anchor.id if anchor.parent is not None else 0
        if left is None or left.above != above:
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
        before = self._rounds.pop(left.digest, None)
        n = 1
        if before is not None:
            if before.node == left.node:
                n = before.n
            elif left.at_s - before.missed_s <= SOON_S:
                n = before.n + 1
        self._rounds[left.digest] = EvictionRound(n, left.node, at_s)
        if len(self._rounds) > MOST_LEFT:
            self._rounds.popitem(last=False)
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

    def rounds_of(self, node: RadixNode) -> int:
        """How often what begins as ``node`` does was evicted and soon asked for again."""
        parent = node.parent
        assert parent is not None
        root = parent
        while root.parent is not None:
            root = root.parent
        start = parent.end_tokens
        digest = xxh3_64_intdigest(
            node.key, xxh3_64_intdigest(root.key, start) if root.key else start
        )
        known = self._rounds.get(digest)
        return 0 if known is None else known.n

    def of_page(self, page: int) -> LeftPrefix | None:
        """What that page held when it last left the tree, as far as that is known."""
        wanted = page.to_bytes(ID_BYTES, "little")
        for left in reversed(self.by_digest.values()):
            at = left.pages.find(wanted)
            while at >= 0 and at % ID_BYTES:
                at = left.pages.find(wanted, at + 1)
            if at >= 0:
                return left
        return None
