"""Says which blocks are cached here, once each: as they come and go, and all of them when asked.

    joined        the tree has new pages           ─┐ told now, or a little later: parents first,
    look again    somebody has missed something    ─┘ and no more between ticks than settings say
    dropped       evicted, flushed, broken          ─ told now, of what was told before

A node's blocks are told when those before it have been, and its children then. So whatever comes
while all are told anew needs no order of its own: what hangs below a node that waits, waits with
it. ``told`` has the names of what consumers know, and nothing else; so every ``BlocksStored`` is of
blocks that are not in it, every ``BlocksRemoved`` of blocks that are.

The pages of a lease that are not committed are in no node, so nobody hears of what is still being
computed or received. Pages that have no tokens of their own are passed over, with all behind them:
those that an engine gave keys or extra keys (``wire.page_address``), and those that the audit hides
from prompts, which have such words too.

What must not live here: numbers of batches, how they are encoded.

Invariant: with nothing pending, ``told`` has the name of each page of the tree that has tokens, is
of a namespace that is told of, and of an epoch that is not over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.cache.namespaces import base_of
from kvd.core.cache.radix import subtree
from kvd.core.effects import BlocksCleared, BlocksRemoved, BlocksStored
from kvd.core.kv_events.block_names import (
    NAME_BYTES,
    NO_BLOCK,
    last_name,
    names_along,
)
from kvd.core.kv_events.tier_announcer import TierAnnouncer
from kvd.core.kv_events.told_namespace import told_namespace
from kvd.types import ID_BYTES, Tokens
from kvd.wire.snapshot import KvEventState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inputs import KvEventsSaid
    from kvd.core.kv_events.told_namespace import ToldNamespace
    from kvd.core.leases.epochs import Epochs
    from kvd.core.outbox import Outbox
    from kvd.core.settings import KvEventSettings

MOST_NAMESPACES: Final = 4096
"""Of which is remembered what a router calls them."""

_NAMES_PER_ID: Final = NAME_BYTES // ID_BYTES


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockAnnouncer:
    """What consumers were told, and what they still have to hear. The tree tells it (``watch``)."""

    __slots__ = (
        "_bases",
        "_epochs",
        "_left",
        "_medium",
        "_most",
        "_namespaces",
        "_out",
        "_page_bytes",
        "_pending",
        "_published",
        "_tree",
        "in_tiers",
        "snapshots",
        "told",
        "told_blocks",
    )

    def __init__(
        self, settings: KvEventSettings, tree: RadixTree, epochs: Epochs, out: Outbox
    ) -> None:
        self.told: dict[int, bytes] = {}
        """By node id, the names of those of its first pages that were told."""
        self.told_blocks = 0
        """How many names that are."""
        self.snapshots = 0
        """How often all were told anew."""
        self._published = KvEventState()
        self._pending: list[RadixNode] = []
        """Nodes of which it is not known that all was told: the last one goes first."""
        self._most = settings.most_tokens
        self._left = self._most
        """Tokens that may still be told before the next tick."""
        self._medium = settings.medium
        self._bases = settings.bases
        self._namespaces: dict[str, ToldNamespace] = {}
        self._tree = tree
        self._epochs = epochs
        self._out = out
        self.in_tiers = TierAnnouncer(tree.match_page_tokens * ID_BYTES, out)
        """Of what lies below the pool."""
        self._page_bytes = tree.match_page_tokens * ID_BYTES
        tree.watch_with(self)

    @property
    def is_pending(self) -> bool:
        """Whether a tick has something to tell."""
        return bool(self._pending) or self._left < self._most or self.in_tiers.is_pending

    @property
    def is_telling_all(self) -> bool:
        """Whether somebody who comes now has missed what was told since all were to forget."""
        return bool(self._pending) or self.in_tiers.is_pending

    @property
    def state(self) -> KvEventState:
        """As the snapshot shows it."""
        return msgspec.structs.replace(
            self._published,
            blocks=self.told_blocks,
            stored_blocks=self.in_tiers.told_blocks,
            snapshots=self.snapshots,
        )

    def said(self, got: KvEventsSaid) -> None:
        """The shell says what became of what is told."""
        self._published = got.state

    # ---- told by the tree --------------------------------------------------------------------

    def joined(self, leaf: RadixNode) -> None:
        """It is new, with its pages."""
        parent = leaf.parent
        assert parent is not None
        if self._left <= 0:
            self._pending.append(leaf)
        # What waits for its parent is told with it.
        elif parent.parent is None or self._is_all_told(parent):
            self._tell_path(leaf)

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """``upper`` is the new upper half of ``lower``."""
        names = self.told.pop(lower.id, b"")
        at = len(upper.pages) * _NAMES_PER_ID
        for node, part in ((upper, names[:at]), (lower, names[at:])):
            if part:
                self.told[node.id] = part
        # In its own name: the lower half may be gone before its turn comes.
        if self._pending and not self._is_all_told(upper):
            self._pending.append(upper)

    def dropped(self, nodes: Iterable[RadixNode]) -> None:
        """They have left the tree."""
        self._remove(nodes)

    def hidden(self, node: RadixNode) -> None:
        """No prompt finds it, nor what is below, from now on."""
        self._remove(subtree(node))

    def flushed(self, keys: Collection[str] | None) -> None:
        """These were flushed: what a lock keeps of them is still found, if their epoch is not over.

        None: all of them.
        """
        roots = self._tree.roots
        for key in self._epochs.over(roots if keys is None else keys):
            if key in roots:
                self._remove(subtree(roots[key]))

    # ---- told by the tiers -------------------------------------------------------------------

    def lie_in_tier(
        self, key: str, tokens: Tokens, keys: Sequence[bytes], before_key: bytes
    ) -> None:
        """Objects lie in a tier of this node alone: as ``TierAnnouncer.note``."""
        namespace = self._namespace_of(key)
        pages = len(tokens) // self._page_bytes
        if namespace is not None and keys and self._end_of_tokens(tokens, 0, pages) == pages:
            self.in_tiers.note(namespace, tokens, keys, before_key)

    # ---- all of it ---------------------------------------------------------------------------

    def tell_all(self) -> None:
        """Consumers forget what they know, and are told of everything from tick to tick."""
        self.snapshots += 1
        self.told, self.told_blocks = {}, 0
        self._out.effects.append(BlocksCleared())
        roots = self._tree.roots.values()
        self._pending = [child for root in roots for child in root.children.values()]
        self.in_tiers.tell_all()

    def tick(self) -> None:
        """Tell what waits, as far as one tick goes."""
        self._left = self._most
        pending = self._pending
        while pending and self._left > 0:
            self._tell_path(pending.pop())
        if self._left > 0:
            self.in_tiers.tick(self._left)

    # ---- how it is told ----------------------------------------------------------------------

    def _is_all_told(self, node: RadixNode) -> bool:
        return len(self.told.get(node.id, b"")) == len(node.pages) * _NAMES_PER_ID

    def _tell_path(self, node: RadixNode) -> None:
        """Tell what lacks up to the end of ``node``; the children of what was told are next."""
        path = self._path(node)
        root = path[-1].parent if path else None
        namespace = self._namespace_of(root.key.decode()) if root is not None else None
        if namespace is None:
            return
        before = NO_BLOCK
        for step in reversed(path):
            if not self._is_all_told(step):
                if not self._tell(step, before, namespace):
                    if self._left <= 0:
                        self._pending.append(node)
                    return
                # Of each of them: one that was split off while it waited has others than ``node``.
                self._pending.extend(step.children.values())
            before = last_name(self.told[step.id])

    def _path(self, node: RadixNode) -> list[RadixNode]:
        """From ``node`` up to below the root; empty where it has left the tree."""
        path = []
        while node.parent is not None:
            if node.parent.children.get(node.key) is not node:
                return []
            path.append(node)
            node = node.parent
        return path if self._tree.roots.get(node.key.decode()) is node else []

    def _namespace_of(self, key: str) -> ToldNamespace | None:
        """What a namespace of the tree is to a router; None: nothing of it is told."""
        # No request means it any more.
        if self._epochs.over((key,)):
            return None
        known = self._namespaces.get(key)
        if known is None:
            if self._bases and not base_of(key).startswith(self._bases):
                return None
            if len(self._namespaces) >= MOST_NAMESPACES:
                self._namespaces.clear()
            known = self._namespaces[key] = told_namespace(key)
        return known

    def _tell(self, node: RadixNode, before: int, namespace: ToldNamespace) -> bool:
        """Tell of the pages that follow those that were told; whether all of them are now."""
        known, page_bytes = self.told.get(node.id, b""), self._page_bytes
        first, n_pages = len(known) // NAME_BYTES, len(node.pages) // ID_BYTES
        # At least one page, however long: it would wait for ever.
        room = max(1, self._left * ID_BYTES // page_bytes) if self._left > 0 else 0
        last = self._end_of_tokens(node.edge, first, min(n_pages, first + room))
        if last <= first:
            return False
        if known:
            before = last_name(known)
        whole = first == 0 and last == n_pages
        edge = node.edge
        tokens = edge if whole else Tokens(edge[first * page_bytes : last * page_bytes])
        names = names_along(before or namespace.root, tokens, page_bytes)
        self.told[node.id] = known + names
        self.told_blocks += last - first
        self._left -= len(tokens) // ID_BYTES
        if last == first + room:
            self._left = 0  # what is left is less than a page
        self._out.effects.append(
            BlocksStored(
                medium=self._medium,
                before=before,
                names=names,
                tokens=tokens,
                lora_name=namespace.lora_name,
                salt=namespace.salt,
            )
        )
        return last == n_pages

    def _end_of_tokens(self, edge: Tokens, first: int, last: int) -> int:
        """How far the pages ``[first, last)`` are of token ids: the others have a sign bit."""
        size = self._page_bytes
        start, end = first * size, last * size
        # The last byte of the first two words of each page has it.
        signs = [edge[start + ID_BYTES - 1 : end : size]]
        if size > ID_BYTES:
            signs.append(edge[start + 2 * ID_BYTES - 1 : end : size])
        for each in signs:
            if not each.isascii():
                place = next(at for at, byte in enumerate(each) if byte >> 7)
                last = min(last, first + place)
        return last

    def _remove(self, nodes: Iterable[RadixNode]) -> None:
        told = self.told
        names = b"".join([told.pop(node.id, b"") for node in nodes]) if told else b""
        if names:
            self.told_blocks -= len(names) // NAME_BYTES
            self._out.effects.append(BlocksRemoved(self._medium, names))


def announcer_of(
    settings: KvEventSettings | None, tree: RadixTree, epochs: Epochs, out: Outbox
) -> BlockAnnouncer | None:
    """Who tells routers; None: nobody does."""
    return BlockAnnouncer(settings, tree, epochs, out) if settings is not None else None
