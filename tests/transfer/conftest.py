"""Two transports facing each other over memfd regions, each with an ear for its reports."""

from __future__ import annotations

import asyncio
import mmap
import os
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio

from kvd.core.effects import Copy, DropAgent, LoadAgent, Post
from kvd.core.inputs import (
    AgentDropped,
    AgentFailed,
    AgentLoaded,
    Copied,
    CopyFailed,
    PostDone,
    PostFailed,
    Unposted,
)
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.transfer.orders import RegionPlan
from kvd.transfer.process import TransferProcess
from kvd.types import Pages, pack_ids
from tests.support.hearing import HeardReports
from tests.transfer.loopback import Loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from kvd.transfer.orders import Ready

DEADLINE_S = 20.0
HUGE = 2 * 2**20
PAGES = 25

PAGE_FIRST = Geometry(PAGES, HUGE // 2, (PieceRow(0, HUGE // 2, HUGE // 2),), ())
LAYER_FIRST = Geometry(
    PAGES,
    2 * (4096 + 12288),
    (
        PieceRow(0, 4096, 4096),
        PieceRow(PAGES * 4096, 12288, 12288),
        PieceRow(PAGES * 16384, 4096, 4096),
        PieceRow(PAGES * 20480, 12288, 12288),
    ),
    (),
)
SAVED = 9
"""Pages of the areas that nobody registers."""
SHAPES = {
    "kv": PAGE_FIRST,
    "layered": LAYER_FIRST,
    "kv.saved": Geometry(SAVED, HUGE // 2, (PieceRow(0, HUGE // 2, HUGE // 2),), ()),
    "layered.saved": Geometry(
        SAVED,
        2 * (4096 + 12288),
        (
            PieceRow(0, 4096, 4096),
            PieceRow(SAVED * 4096, 12288, 12288),
            PieceRow(SAVED * 16384, 4096, 4096),
            PieceRow(SAVED * 20480, 12288, 12288),
        ),
        (),
    ),
}
TCP = {"UCX_TLS": "tcp"}


class Memory:
    """A region of its own memfd, seen as bytes."""

    def __init__(self, name: str, shape: Geometry) -> None:
        size = -(-shape.total_bytes // HUGE) * HUGE
        self.name, self.shape = name, shape
        self.fd = os.memfd_create(name)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.bytes = np.frombuffer(self.map, np.uint8)

    def paint(self, seed: int) -> None:
        """Fill it so that no two pages of any two regions look alike."""
        words = self.bytes.view(np.uint32)
        words[:] = np.arange(words.size, dtype=np.uint32) * 2654435761 + seed * 40503

    def piece(self, row: PieceRow, page: int) -> slice:
        start = row.offset_bytes + page * row.stride_bytes
        return slice(start, start + row.piece_bytes)

    def close(self) -> None:
        """Give the descriptor back; the bytes stay for who still looks at them."""
        os.close(self.fd)


class Node(HeardReports):
    """A transport, its regions, and everything it has reported."""

    def __init__(
        self, name: str, transport: TransferProcess | Loopback, memories: dict[str, Memory]
    ) -> None:
        super().__init__(DEADLINE_S)
        self.name = name
        self.transport = transport
        self.memories = memories
        self.ready: Ready | None = None

    async def start(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            self.ready = await self.transport.start(self._hear, self._gone)

    async def hears(self, kind, **fields):
        """The first report of this kind with these fields, once it has come."""
        return (await self.until(lambda: self.heard(kind, **fields)))[0]

    async def load(self, peer, generation=1):
        """Load ``peer`` and expect that it works."""
        self.transport.order(LoadAgent(peer.name, generation, peer.ready.metadata))
        await self.until(
            lambda: (
                self.heard(AgentLoaded, incarnation=peer.name, generation=generation)
                or self.heard(AgentFailed, incarnation=peer.name, generation=generation)
            )
        )
        assert not self.heard(AgentFailed, incarnation=peer.name, generation=generation)

    async def drop(self, peer, generation=1):
        """Drop ``peer`` and return the report."""
        self.transport.order(DropAgent(peer.name, generation))
        return await self.hears(AgentDropped, incarnation=peer.name, generation=generation)

    def post(self, post, peer, source, destination, **other):
        """Order a post; page ids as integers."""
        fields = {"generation": 1, "component": "kv"} | other
        self.transport.order(
            Post(
                post=post,
                incarnation=peer.name,
                source=Pages(pack_ids(source)),
                destination=Pages(pack_ids(destination)),
                **fields,
            )
        )

    def copy(self, ticket, source_region, source, destination_region, destination):
        """Order a copy between two regions; page ids as integers."""
        self.transport.order(
            Copy(
                ticket,
                source_region,
                Pages(pack_ids(source)),
                destination_region,
                Pages(pack_ids(destination)),
            )
        )

    async def copied(self, ticket):
        """How a copy ended."""
        return (
            await self.until(
                lambda: self.heard(Copied, ticket=ticket) or self.heard(CopyFailed, ticket=ticket)
            )
        )[0]

    async def outcome(self, post):
        """How a post ended."""
        return (
            await self.until(
                lambda: (
                    self.heard(PostDone, post=post)
                    or self.heard(PostFailed, post=post)
                    or self.heard(Unposted, post=post)
                )
            )
        )[0]


class Rig:
    """Makes nodes of one kind and stops them all in the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.nodes: list[Node] = []
        self.made = 0

    async def node(
        self,
        name: str,
        environment: dict[str, str] | None = None,
        shapes: Mapping[str, Geometry] = MappingProxyType(SHAPES),
    ) -> Node:
        memories = {region: Memory(region, shape) for region, shape in shapes.items()}
        self.made += 1
        for seed, memory in enumerate(memories.values()):
            memory.paint(self.made * 10 + seed)
        regions = [
            RegionPlan(
                name, memory.fd, memory.shape, is_registered=not name.endswith((".saved", "buffer"))
            )
            for name, memory in memories.items()
        ]
        unique = f"{name}-{os.getpid()}-{id(self)}-{self.made}"
        transport = (
            Loopback(unique, regions)
            if self.kind == "loopback"
            else TransferProcess(unique, regions, environment=environment or {})
        )
        node = Node(name, transport, memories)
        self.nodes.append(node)
        await node.start()
        return node

    async def pair(self, environment: dict[str, str] | None = None) -> tuple[Node, Node]:
        """A sender that has loaded a receiver."""
        sender, receiver = await asyncio.gather(
            self.node("sender", environment), self.node("receiver", environment)
        )
        await sender.load(receiver)
        return sender, receiver

    async def end(self) -> None:
        for node in self.nodes:
            await node.transport.stop()
            for memory in node.memories.values():
                memory.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["loopback", "nixl"])
async def pair(request) -> AsyncIterator[tuple[Node, Node]]:
    """A sender and a receiver that outlive the tests of a module: no test may end them."""
    rig = Rig(request.param)
    yield await rig.pair()
    await rig.end()


@pytest_asyncio.fixture(loop_scope="module", params=["loopback", "nixl"])
async def rig(request) -> AsyncIterator[Rig]:
    """Makes nodes that the test may end."""
    made = Rig(request.param)
    yield made
    await made.end()


@pytest_asyncio.fixture(loop_scope="function")
async def real() -> AsyncIterator[Rig]:
    """Makes nodes with a real transfer process."""
    made = Rig("nixl")
    yield made
    await made.end()


@pytest.fixture
def tcp() -> dict[str, str]:
    """Settings that make bytes on one host travel as they do between hosts."""
    return TCP
