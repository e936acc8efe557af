"""A router in memory: what it knows of a node by KV events alone, held against the node's tree.

Each block is stored once, behind one that is known, and removed once. When the node has nothing to
tell any more, the router knows exactly the pages that a prompt of token ids can find there now;
while the node is telling, it knows none but these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import effects
from kvd.core.kv_events.block_names import NO_BLOCK, each_name, names_along
from kvd.core.kv_events.tier_announcer import STORAGE
from kvd.core.kv_events.told_namespace import told_namespace
from kvd.sim.violation import Violated, require
from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.node import NodeState

SIGN = 0x80
"""Of the last byte of a word that is no token id."""


class SimRouter:
    """What one router knows of one node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: dict[int, tuple[int, bytes]] = {}
        """By name, the one before it and its tokens."""
        self.in_tiers: dict[int, tuple[int, bytes]] = {}
        """The same of those that lie in storage."""
        self.stored = 0
        """So many, ever."""
        self.demoted = 0
        """Of these, in storage."""

    def hear(self, effect: effects.BlockEvent) -> None:
        """Take one event.

        Raises:
            Violated: it is stored twice, behind an unknown one, or removed and was not there.
        """
        match effect:
            case effects.BlocksStored():
                self._store(effect)
            case effects.BlocksRemoved():
                blocks = self._in(effect.medium)
                for name in each_name(effect.names):
                    require(blocks.pop(name, None) is not None, f"{self.name}: {name} removed")
            case effects.BlocksCleared():
                self.blocks.clear()
                self.in_tiers.clear()

    def _in(self, medium: str) -> dict[int, tuple[int, bytes]]:
        return self.in_tiers if medium == STORAGE else self.blocks

    def _store(self, effect: effects.BlocksStored) -> None:
        before, blocks = effect.before, self._in(effect.medium)
        if before != NO_BLOCK and before not in blocks:
            raise Violated(f"{self.name}: stored behind {before}, which is not known")
        names = each_name(effect.names)
        size = len(effect.tokens) // len(names)
        for at, name in enumerate(names):
            require(name not in blocks, f"{self.name}: {name} stored twice")
            require(name >> 32 > 0, f"{self.name}: {name} has no upper half")
            blocks[name] = (before, effect.tokens[at * size : (at + 1) * size])
            before = name
        self.stored += len(names)
        self.demoted += len(names) if effect.medium == STORAGE else 0

    def agree(self, node: NodeState) -> None:
        """Hold it against the node.

        Raises:
            Violated: it knows what nobody finds, or lacks what the node does not tell any more.
        """
        announcer = node.announcer
        assert announcer is not None
        there = dict(findable(node))
        false = self.blocks.keys() - there.keys()
        require(not false, f"{self.name}: {len(false)} blocks are known and not there")
        if not announcer.is_pending:
            lacks = there.keys() - self.blocks.keys()
            require(not lacks, f"{self.name}: {len(lacks)} blocks are there and not known")
        for name, block in self.blocks.items():
            require(block == there[name], f"{self.name}: {name} is another block")
        own = [tier.index.n_objects for tier in node.tiers.each if tier.writes is None]
        require(len(self.in_tiers) <= sum(own), f"{self.name}: more is known than lies in tiers")
        told = announcer.in_tiers.told_blocks
        require(told == len(self.in_tiers), f"{self.name}: told otherwise of tiers")
        require(announcer.told_blocks == len(self.blocks), f"{self.name}: told otherwise")


def findable(node: NodeState) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Each page of the tree that a prompt of token ids finds now, as a router has it."""
    tree = node.leases.tree
    size = tree.match_page_tokens * ID_BYTES
    over = set(node.epochs.over(tree.roots))
    for key, root in tree.roots.items():
        stack = [(child, NO_BLOCK) for child in root.children.values() if key not in over]
        while stack:
            edge, before = stack.pop()
            for start in range(0, len(edge.edge), size):
                page = edge.edge[start : start + size]
                if any(byte & SIGN for byte in page[ID_BYTES - 1 :: ID_BYTES]):
                    break
                seed = before if before != NO_BLOCK else told_namespace(key).root
                name = each_name(names_along(seed, page, size))[0]
                yield name, (before, page)
                before = name
            else:
                stack += [(child, before) for child in edge.children.values()]
