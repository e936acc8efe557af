"""Random models cut in random ways among several prefill nodes, for a decode node cut in another.

Stages and ranks on nodes of their own, equal nodes that share the pages, copies on one node, more
ranks than heads, and nodes that have nothing of what is kept. Chunks and posts come in any order.
At the end each head of each layer must be in its place in each shard, sent once, and every engine
must have been told of the same end.

A failure names its seed. ``KVD_SEEDS=first:last`` runs others:

    KVD_SEEDS=100:1000 python -m pytest -q tests/property/test_several_sources.py
"""

from __future__ import annotations

import random

import msgspec
import pytest

from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.shards import Shard, tp_shards
from kvd.wire import client
from kvd.wire.peer import Integrity
from tests.core.world import tokens
from tests.property.cells import CellWorld, check, fill, sharded
from tests.support.seeds import seed_range

FIRST, LAST = seed_range("0:48")
A_TEST = 12
PAGE = 16

Shards = tuple[Shard, ...]


class Cut:
    """A model, what the decode node keeps of it, and what each source has."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.layers, self.heads = rng.randint(1, 3), rng.choice((1, 2, 4))
        self.decode = self._decode()
        self.sources: list[Shards] = []
        for stage in self._stages():
            nodes = rng.choice([n for n in (1, 2) if self.heads % n == 0])
            for part in range(nodes):
                self.sources += self._equals(stage, nodes, part)

    def _size(self, *sizes: int) -> int:
        fits = [one for one in sizes if not (self.heads % one and one % self.heads)]
        return self.rng.choice(fits)

    def _decode(self) -> Shards:
        rng, size = self.rng, self._size(1, 2, 4, 8)
        first = rng.randrange(size)
        ranks = rng.choice(((0, size), (first, rng.randint(first + 1, size))))
        first = rng.randrange(self.layers)
        stage = rng.choice(((0, self.layers), (first, rng.randint(first + 1, self.layers))))
        return tp_shards(self.heads, size, ranks, stage) * rng.choice((1, 1, 2))

    def _stages(self) -> list[tuple[int, int]]:
        cuts = sorted(self.rng.sample(range(1, self.layers), self.rng.randint(0, self.layers - 1)))
        return list(zip([0, *cuts], [*cuts, self.layers], strict=True))

    def _equals(self, stage: tuple[int, int], nodes: int, part: int) -> list[Shards]:
        """One or two nodes with the same part, each with ranks and copies as it likes."""
        found = []
        for _ in range(self.rng.choice((1, 1, 2))):
            ranks = self._size(*(nodes * one for one in (1, 2, 4))) // nodes
            mine = (part * ranks, (part + 1) * ranks)
            shards = tp_shards(self.heads, nodes * ranks, mine, stage)
            found.append(shards * self.rng.choice((1, 1, 2)))
        return found


def world_of(cut: Cut) -> CellWorld:
    model = cut.layers, cut.heads
    names = tuple(f"p{number}" for number in range(len(cut.sources)))
    integrity = cut.rng.choice((Integrity.FULL, Integrity.FULL, Integrity.SAMPLED, Integrity.OFF))
    world = CellWorld(
        sources=names, spec=sharded(*model, cut.decode), integrity=integrity, sum_ahead_bytes=1
    )
    for name, shards in zip(names, cut.sources, strict=True):
        side = world.sides[name]
        side.config = msgspec.structs.replace(side.config, spec=sharded(*model, shards))
        world.restart(side)
        side.attach()
    world.pass_time(1)
    return world


def hand_over(cut: Cut, world: CellWorld, room: int) -> None:
    """One prompt from all sources, which the engines compute each at its own pace."""
    rng, d = cut.rng, world.d
    toks = tokens((1000 * room, rng.choice((5, 16, 40, 100))))
    n_tokens = len(toks) // 4
    sources = [side for name, side in world.sides.items() if name != "d"]
    names = [side.name for side in sources]
    rng.shuffle(names)
    world.hold_posts = rng.random() < 0.7
    leases = {side.name: side.lease(toks) for side in sources}
    reply = d.call(client.ReceiveRequest, toks, room=room, source=tuple(names))
    assert isinstance(reply, client.Receiving), reply
    sends: dict[str, int] = {}
    for side in rng.sample(sources, len(sources)):
        fill(side, leases[side.name].pages, toks)
        sending = side.call(client.SendRequest, toks, room=room, lease=leases[side.name].lease)
        assert isinstance(sending, client.Sending), sending
        sends[side.name] = sending.send
    left = dict.fromkeys(sends, 0)
    calls: dict[str, int] = {}
    while left or any(side.flights for side in sources):
        flights = [(side, one) for side in sources for one in side.flights.values()]
        if flights and (not left or rng.random() < 0.6):
            side, flight = rng.choice(flights)
            side.land(flight, rng.choice((None, 1)))
            world.run()
            continue
        name = rng.choice(list(left))
        left[name] = min(n_tokens, left[name] + rng.choice((7, 16, 40, 100)))
        side, send = world.sides[name], sends[name]
        if left[name] == n_tokens:
            del left[name]
            side.call(client.Finish, send=send, aux=name.encode())
            calls[name] = side.calls
        else:
            side.call(client.Advance, send=send, upto_tokens=left[name])
    agree(cut, world, leases, calls, toks)


def agree(
    cut: Cut,
    world: CellWorld,
    leases: dict[str, client.Leased],
    calls: dict[str, int],
    toks: bytes,
) -> None:
    """What came of it: on the decode node, and for every engine."""
    d = world.d
    got = d.take()[-1]
    assert isinstance(got, client.Received), got
    check(d, got.pages, toks)
    assert got.aux.decode() in calls, "the aux is that of one of them"
    finished = [world.sides[name].answer(call) for name, call in calls.items()]
    assert all(isinstance(one, client.Finished) and one.failure is None for one in finished)
    n_pages = -(-len(toks) // 4 // PAGE)
    kept_bytes = n_pages * snapshot(d.node).pools[0].page_bytes
    assert sum(one.sent_bytes for one in finished if isinstance(one, client.Finished)) == kept_bytes
    d.call(client.ReleaseLease, lease=got.lease)
    for name, lease in leases.items():
        world.sides[name].call(client.ReleaseLease, lease=lease.lease)


@pytest.mark.parametrize("first", range(FIRST, LAST, A_TEST))
def test_what_several_nodes_send_together_is_the_prompt(first: int) -> None:
    for seed in range(first, min(first + A_TEST, LAST)):
        try:
            cut = Cut(random.Random(f"several sources {seed}"))
            world = world_of(cut)
            for room in (1, 2):
                hand_over(cut, world, room)
        except BaseException as error:
            error.add_note(
                f"seed {seed}: {cut.layers} layers of {cut.heads} heads, {cut.sources} to "
                f"{cut.decode}; KVD_SEEDS={seed}:{seed + 1} python -m pytest -q {__file__}"
            )
            raise
