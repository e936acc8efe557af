"""A router in memory: what it knows of a node by KV events alone, held against the node's tree.

Each block is stored once, behind one that is known, and removed once. When the node has nothing to
tell any more, the router knows exactly the pages that a prompt of token ids can find there now;
while the node is telling, it knows none but these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import effects
from kvd.core.kv_events.announcer import told_namespace
from kvd.core.kv_events.block_names import NO_BLOCK, each_name, names_along
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
        self.stored = 0
        """So many, ever."""

    def hear(self, effect: effects.BlockEvent) -> None:
        """Take one event.

        Raises:
            Violated: it is stored twice, behind an unknown one, or removed and was not there.
        """
        match effect:
            case effects.BlocksStored():
                self._store(effect)
            case effects.BlocksRemoved():
                for name in each_name(effect.names):
                    require(self.blocks.pop(name, None) is not None, f"{self.name}: {name} removed")
            case effects.BlocksCleared():
                self.blocks.clear()

    def _store(self, effect: effects.BlocksStored) -> None:
        before = effect.before
        if before != NO_BLOCK and before not in self.blocks:
            raise Violated(f"{self.name}: stored behind {before}, which is not known")
        names = each_name(effect.names)
        size = len(effect.tokens) // len(names)
        for at, name in enumerate(names):
            require(name not in self.blocks, f"{self.name}: {name} stored twice")
            require(name >> 32 > 0, f"{self.name}: {name} has no upper half")
            self.blocks[name] = (before, effect.tokens[at * size : (at + 1) * size])
            before = name
        self.stored += len(names)

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
