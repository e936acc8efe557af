"""Posts of the prefill side: which pages of a part go out now, and which are still under way.

``plan_part`` says which pages a part will send at all, ``push_part`` which of them go now.

A page is posted once, when it is whole and lies beyond ``decode_prefix_len``; the last page goes
when the engine has finished, whole or not, and with it the windows and the state. Work is per call,
not per page: one ``advance`` makes at most one post per route, and the transfer process cuts it as
the hardware likes. Where we have equal copies of what is sent, it is one for each copy: they cut
the pages among them, and an empty share has no post.

    tokens   0 ... decode_prefix_len ... posted ... cursor ... prompt_tokens
             | the decode side has it | posted | written | not yet computed |

One of several sources posts its share of that, ``[start_tokens, end_tokens)``, and nothing else.

Posts to one peer take turns in its link. So what is slow is the link, and every part with posts in
it is judged by all that has moved to the peer. Two kinds of parts are judged by themselves: one of
which every post still waits for its event takes no turns, and one that did not move while all
others had their turns twice has missed its own.

Invariant: decode_prefix_len <= start_tokens <= posted <= end_tokens <= prompt_tokens, and posted
never shrinks (I5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.handoff.parts import PeerFlow
from kvd.core.handoff.payload import UnitRange, pieces_of
from kvd.core.handoff.payload_route import routes_of
from kvd.core.handoff.protocol import Prefill
from kvd.core.handoff.sources import span_of
from kvd.core.layout.seal import UNSEALED
from kvd.core.layout.shards import page_share
from kvd.core.leases.lease_events import tell_written
from kvd.core.leases.written import say_advanced
from kvd.core.peers.peer import Agent
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Pages, amount
from kvd.wire.peer import MAX_ROUTES, Integrity

if TYPE_CHECKING:
    from kvd.core.handoff.parts import Flow, SendingEngine, SendPart
    from kvd.core.handoff.payload import Payload
    from kvd.core.layout.shards import ShardCopy
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.wire.peer import Offer


TURN_BYTES = 16 * 2**20
"""Of a post, at most, before the next one's turn: a handle of the transfer process."""

TURNS_AHEAD = 4
"""Handles that are in flight at a time."""

MAX_AHEAD_BYTES = 128 * 1024
"""Of sums that are said before the end, with one Progress: of 16,384 pages."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SumsAhead:
    """What Progress says of sums: by route, behind which unit and up to which; and these."""

    __slots__ = ("checksums", "summed")

    def __init__(self, summed: tuple[int, ...] = (), checksums: bytes = b"") -> None:
        self.summed = summed
        self.checksums = checksums


NOTHING_AHEAD = SumsAhead()

EVENT_BYTES = 64
"""Of the IPC handle of a CUDA event."""


def no_event(after: bytes, side: str) -> Refusal | None:
    """Why this cannot be the event that a post waits for; nothing is none, which is right."""
    if len(after) in {0, EVENT_BYTES}:
        return None
    return Refusal(
        Code.BAD_REQUEST,
        f"an event of {len(after)} bytes: the IPC handle of a CUDA event has {EVENT_BYTES}",
        side=side,
        numbers={"bytes": len(after)},
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class Posts:
    """The posts that are under way, by id."""

    def __init__(self, payload: Payload, leases: LeaseTable, peers: Peers, out: Outbox) -> None:
        self._payload = payload
        self.parts: dict[int, SendPart] = {}
        self.sent_bytes = 0
        self._routes: dict[int, int] = {}
        """Of each post under way: which route of its part it goes along."""
        self._moved: dict[int, int] = {}
        """Of each post under way, as last reported."""
        self._peer_flows: dict[str, PeerFlow] = {}
        """Of each incarnation that a post is under way to."""
        self._event_waits: set[int] = set()
        """The posts whose event has not come, as far as is known."""
        self._first: dict[int, int] = {}
        """Of each post under way: its first unit."""
        self._whole: dict[int, int] = {}
        """Of each post under way: its units before this one are whole over there."""
        self._behind: dict[int, int] = {}
        """Of each post that waits for events, or has: tokens that are written once they came."""
        self._leases = leases
        self._peers = peers
        self._out = out
        self._last = 0

    @property
    def is_moving(self) -> bool:
        """Whether bytes are on their way: those of a post that waits for its event are not."""
        return len(self.parts) > len(self._event_waits)

    def plan_part(self, part: SendPart, offer: Offer, peer: Peer) -> None:
        """What of the prompt is to be posted for an Offer, and along which routes."""
        part.generation = offer.generation
        part.prompt_tokens = offer.prompt_tokens
        part.decode_prefix_len = prefix = offer.decode_prefix_len
        part.share = offer.share
        part.split = peer.split
        part.start_tokens, part.end_tokens = span_of(
            offer.share, prefix, offer.prompt_tokens, self.page_tokens(part)
        )
        # What lies before is cached over there, or is of another source: it counts as posted.
        part.posted_tokens = part.start_tokens
        part.routes = routes_of(offer, peer.outgoing)
        part.seals = self._payload.seals(offer, part.routes, peer.split)
        part.total_bytes = self._payload.granted_bytes(offer.grants, part.routes, peer.split)
        # Windows and states go once, with the aux, from the authoritative source alone.
        part.posted_last = self._payload.is_streamed or not offer.share.is_authoritative

    def push_part(self, part: SendPart) -> None:
        """Post what has become whole, if there is an agent to post through.

        An agent of another generation than the Offer's is none: nobody would end a post to it, and
        what is outstanding keeps the part from ever being settled.
        """
        peer = self._peers.current(part.incarnation, part.generation)
        # Nothing is lost by waiting: when the agent is loaded every part is pushed again.
        if peer is None or peer.agent is not Agent.LOADED:
            return
        engine, offer = part.engine, part.offer
        if engine is None or offer is None:
            return
        # A page is posted once, so one that is not whole waits for the rest of its tokens.
        is_last = part.state is not Prefill.STREAMING
        upto = part.end_tokens
        if not is_last:
            size = self.page_tokens(part)
            upto = min(upto, part.cursor_tokens // size * size)
        for index, route in enumerate(part.routes):
            payload_part = self._payload.parts[route.grant]
            unit = self._payload.unit_tokens(payload_part, part.split)
            granted = payload_part.units(offer.grants[route.grant], unit)
            if payload_part.streams:
                # Both ends on page borders but for the prompt's own end, so no unit is posted twice
                # (I5).
                now = UnitRange(part.posted_tokens // unit, -(-upto // unit))
            elif is_last and not part.posted_last:
                now = granted
            else:
                continue
            if now.first < now.end:
                self._post_copies(part, engine, index, now, granted.first)
        # Moved on when every route has its post: all of them begin where the last push ended.
        if upto > part.posted_tokens:
            size = self.page_tokens(part)
            if self._payload.has_kv:
                part.posted_pages += -(-upto // size) - part.posted_tokens // size
            part.posted_tokens = upto
        # Never back to False: the last chunk goes once, whatever is pushed afterwards.
        part.posted_last = part.posted_last or is_last

    def page_tokens(self, part: SendPart) -> int:
        """The decode side's page size, which is what it can be given piece by piece."""
        return self._leases.page_size // pieces_of(part.split)

    def _post_copies(
        self, part: SendPart, engine: SendingEngine, index: int, units: UnitRange, base: int
    ) -> None:
        """Units of a route whose grant begins at ``base``: a share from each of our copies."""
        copies = part.routes[index].shard_route.copies
        for number, copy in enumerate(copies):
            own = UnitRange(*page_share(units.first, units.end, number, len(copies)))
            if own.first < own.end:
                self._post(part, engine, index, copy, own, base)

    def _post(
        self,
        part: SendPart,
        engine: SendingEngine,
        index: int,
        copy: ShardCopy,
        units: UnitRange,
        base: int,
    ) -> None:
        offer, route = part.offer, part.routes[index]
        assert offer is not None
        payload_part, grant = self._payload.parts[route.grant], offer.grants[route.grant]
        pieces = pieces_of(part.split, payload_part.place)
        self._last += 1
        # The stall clock runs only while something is under way: an engine may compute for minutes
        # between two chunks.
        if not part.outstanding:
            self._begin_window(part)
        self._peer_flows.setdefault(part.incarnation, PeerFlow()).posts += 1
        if part.after:
            self._event_waits.add(self._last)
        # Registered in the step that orders it: its report finds its part, and Settled waits for
        # it.
        part.outstanding.add(self._last)
        self.parts[self._last] = part
        self._routes[self._last] = index
        self._first[self._last] = self._whole[self._last] = units.first
        part.ordered_units[index] = units.end
        if part.after:
            self._behind[self._last] = part.cursor_tokens
        # Until the post is over no commit gives a page away that it reads.
        self._leases.holders.begin_read(engine.lease)
        is_unsealed = offer.integrity is Integrity.OFF
        first, end = (units.first - base) * ID_BYTES, (units.end - base) * ID_BYTES
        self._out.effects.append(
            effects.Post(
                post=self._last,
                incarnation=part.incarnation,
                generation=part.generation,
                component=grant.component,
                source=self._payload.source(payload_part, engine, units, pieces),
                destination=Pages(grant.pages[first:end]),
                seal=UNSEALED if is_unsealed else part.seals[index],
                first_page=0 if is_unsealed else units.first,
                split=pieces,
                peer_shard=route.shard_route.peer_shard,
                making=copy,
                after=part.after,
            )
        )

    def stalled(self, part: SendPart, mine: Settings) -> Refusal | None:
        """Why a part with posts under way is given up; None while it moves, or waits its turn.

        Begins the next window when one is over.
        """
        flow = part.flow
        window_s = self._out.at_s - flow.since_s
        if window_s < mine.stall_s:
            return None
        peer_flow = self._peer_flows[part.incarnation]
        takes_turns = not part.outstanding <= self._event_waits
        round_bytes = (flow.turn_posts + TURNS_AHEAD) * TURN_BYTES
        has_missed = peer_flow.moved_bytes - flow.turn_bytes > 2 * round_bytes
        is_one_of_many = takes_turns and not has_missed
        moved = peer_flow.moved_bytes - flow.peer_bytes if is_one_of_many else flow.moved_bytes
        floor = int(mine.min_bytes_per_s * window_s)
        if moved >= floor:
            self._begin_window(part)
            return None
        posts = peer_flow.posts if is_one_of_many else len(part.outstanding)
        event = " and at the event that the engine named" if part.after else ""
        return Refusal(
            Code.STALLED,
            f"room {part.room} to {part.peer}: {amount(moved)} moved in {window_s:.1f} s with "
            f"{posts} posts under way, the least is {amount(mine.min_bytes_per_s)} a second: "
            f"look at the network between the two{event}, or lower transfer.min_bytes_per_s",
            side=mine.name,
            numbers={"moved_bytes": moved, "floor_bytes": floor, "window_s": round(window_s, 3)},
        )

    def _begin_window(self, part: SendPart) -> None:
        peer_flow = self._peer_flows.get(part.incarnation) or PeerFlow()
        flow = part.flow
        flow.since_s, flow.moved_bytes = self._out.at_s, 0
        flow.peer_bytes = peer_flow.moved_bytes
        # Otherwise its last turn counts on: a new window is no turn.
        if not part.outstanding:
            _note_turn(flow, peer_flow)

    def forget_waiting(self, part: SendPart) -> None:
        """Those of the part whose event has not come are not to begin any more."""
        # Without an event they have begun already, and nothing calls back what has begun.
        waiting = sorted(part.outstanding & self._behind.keys())
        self._out.effects += [effects.Forget(post) for post in waiting]

    def note_written(self, post: int) -> None:
        """The post is done, so the events that it waited for have come: what they say is so."""
        behind, part = self._behind.get(post), self.parts.get(post)
        if behind is None or part is None or part.engine is None:
            return
        lease = part.engine.lease
        before = lease.written_tokens
        say_advanced(lease, behind)
        if lease.written_tokens > before:
            tell_written(self._out, lease)

    def note_moved(self, post: int, moved_bytes: int, pages: int = 0) -> SendPart | None:
        """A running post has moved so much; so many of its first pages are whole over there."""
        part = self.parts.get(post)
        if part is not None:
            # A post that failed ends with 0, and what was counted of it is not taken back.
            news_bytes = max(0, moved_bytes - self._moved.get(post, 0))
            part.flow.moved_bytes += news_bytes
            peer_flow = self._peer_flows[part.incarnation]
            peer_flow.moved_bytes += news_bytes
            # With its event it comes into the line, behind all others.
            if news_bytes or post in self._event_waits:
                _note_turn(part.flow, peer_flow)
            self._event_waits.discard(post)
            self._moved[post] = moved_bytes
            self._whole[post] = self._first[post] + pages
        return part

    def landed(self, part: SendPart) -> tuple[int, ...]:
        """Of each route: how many of its units from the first one on are whole over there.

        Nothing where nobody sums them, or Settled follows, which tells of all.
        """
        is_over = part.state is Prefill.FLUSHING and not part.outstanding
        if is_over or len(part.seals) > MAX_ROUTES:
            return ()
        upto = [part.ordered_units.get(at, seal.first) for at, seal in enumerate(part.seals)]
        # The posts of a route are beside one another: what lies behind the first that is not whole
        # does not count.
        if part.seals:
            for post in part.outstanding:
                route = self._routes[post]
                upto[route] = min(upto[route], self._whole[post])
        return tuple([unit - seal.first for unit, seal in zip(upto, part.seals, strict=True)])

    def sums_ahead(self, part: SendPart) -> SumsAhead:
        """As ``landed``, of those whose posts are over, what was not said before; it is said now.

        Nothing where the decode side does not ask for it before Settled.
        """
        offer = part.offer
        if offer is None or not offer.as_it_comes or len(part.seals) > MAX_ROUTES:
            return NOTHING_AHEAD
        if offer.integrity is Integrity.OFF:
            return NOTHING_AHEAD
        upto = [part.ordered_units.get(at, seal.first) for at, seal in enumerate(part.seals)]
        # Of each route the posts go on where the one before ends, and their numbers grow.
        open_posts: dict[int, int] = {}
        for post in part.outstanding:
            route = self._routes[post]
            if post < open_posts.get(route, post + 1):
                open_posts[route], upto[route] = post, self._first[post]
        sums, said = part.sums.by_post, part.sums.said_posts
        over = [
            (route, post)
            for route, post in sorted(sums)
            if said.get(route, 0) < post < open_posts.get(route, post + 1)
        ]
        checksums = b"".join([sums[one] for one in over])
        units = [unit - seal.first for unit, seal in zip(upto, part.seals, strict=True)]
        known = [part.sums.said_units.get(route, 0) for route in range(len(units))]
        # Of sampled pages, those of a whole post may be none that is summed: they count as well.
        if units == known or len(checksums) > MAX_AHEAD_BYTES:
            return NOTHING_AHEAD
        summed: list[int] = []
        for route, pair in enumerate(zip(known, units, strict=True)):
            summed += pair
            part.sums.said_units[route] = pair[1]
        for route, post in over:
            said[route] = post
        return SumsAhead(summed=tuple(summed), checksums=checksums)

    def live_bytes(self, part: SendPart) -> int:
        """What has left for the part, of posts that are under way too."""
        moved = self._moved
        return part.moved_bytes + sum(moved.get(post, 0) for post in part.outstanding)

    def end_post(self, post: int, moved_bytes: int, sums: bytes = b"") -> SendPart | None:
        """The post can write no more: it is done, or its agent is destroyed."""
        part = self.note_moved(post, moved_bytes)
        if part is None:
            return None
        # ``note_moved`` has made the entry that is deleted, even where nothing was reported before.
        del self.parts[post], self._moved[post], self._first[post], self._whole[post]
        self._behind.pop(post, None)
        index = self._routes.pop(post)
        part.outstanding.discard(post)
        flow = self._peer_flows[part.incarnation]
        flow.posts -= 1
        # With the last: a part whose window counts from it has a post under way.
        if not flow.posts:
            del self._peer_flows[part.incarnation]
        part.moved_bytes += moved_bytes
        # A post that failed or was cut has none; its part is given up and asks for no sums.
        if sums:
            part.sums.by_post[index, post] = sums
        self.sent_bytes += moved_bytes
        if part.engine is not None:
            # With the last reader go the pages that a commit has replaced meanwhile.
            self._leases.holders.end_read(part.engine.lease)
        return part

    def posts_through(self, incarnation: str, generation: int) -> list[int]:
        """The posts that went through this agent."""
        return [
            post
            for post, part in self.parts.items()
            if part.incarnation == incarnation and part.generation == generation
        ]


def _note_turn(flow: Flow, peer_flow: PeerFlow) -> None:
    flow.turn_bytes, flow.turn_posts = peer_flow.moved_bytes, peer_flow.posts
