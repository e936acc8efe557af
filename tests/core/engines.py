"""What tests about handoffs share: a prefill engine with one prompt, and the pages by state."""

from __future__ import annotations

from typing import NamedTuple

from kvd.core.inspect.snapshot import snapshot
from kvd.wire import client
from kvd.wire.peer import Offer
from tests.core.world import Side, World, tokens

PROMPT = tokens((1, 100))
FULL = tokens((1, 96))


class Sender:
    """The prefill engine with one prompt: leased, opened, and written step by step."""

    def __init__(
        self,
        world: World,
        toks: bytes = PROMPT,
        room: int = 7,
        *,
        side: Side | None = None,
        **fields: object,
    ) -> None:
        self.world, self.toks = world, toks
        self.side = side or world.p
        self.lease = self.side.lease(toks)
        self.room = room
        reply = self.side.call(
            client.SendRequest, toks, room=room, lease=self.lease.lease, **fields
        )
        assert isinstance(reply, client.Sending), reply
        self.send = reply.send
        self.finish_call = 0

    def advance(self, upto: int) -> None:
        self.side.write(self.lease.pages, self.toks, end=upto)
        assert isinstance(self.promise(upto), client.Done)

    def promise(self, upto: int, after: bytes = b"") -> client.Reply | None:
        """It is written, or will be when the event comes."""
        return self.side.call(client.Advance, send=self.send, upto_tokens=upto, after=after)

    def finish(self, aux: bytes = b"aux", after: bytes = b"") -> client.Reply | None:
        if not after:
            self.side.write(self.lease.pages, self.toks)
        reply = self.side.call(client.Finish, send=self.send, aux=aux, after=after)
        self.finish_call = self.side.calls
        return reply


def begun(**more: object) -> tuple[World, Sender]:
    """Both sides of a handoff of 100 tokens, in 7 pages of 16."""
    world = World(**more)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    return world, sender


def cached(side: Side, toks: bytes) -> None:
    """These tokens are in the tree, with their content."""
    lease = side.lease(toks)
    side.write(lease.pages, toks)
    side.call(client.CommitAndRelease, lease=lease.lease)


class PageTotals(NamedTuple):
    """Pages of the first component by state; ``evictable`` ones are cached, too."""

    free: int
    held: int = 0
    cached: int = 0
    quarantined: int = 0
    evictable: int = 0


def totals(side: Side) -> PageTotals:
    """As the snapshot has them."""
    pool = snapshot(side.node).pools[0]
    return PageTotals(
        free=pool.free_pages,
        held=pool.held_pages,
        cached=pool.cached_pages,
        quarantined=pool.quarantined_pages,
        evictable=pool.evictable_pages,
    )


def offered(world: World) -> Offer:
    """The last Offer that the decode side sent."""
    (part,) = [
        one for one in world.d.node.decoder.open.parts.values() if one.unanswered is not None
    ]
    assert isinstance(part.unanswered, Offer)
    return part.unanswered
