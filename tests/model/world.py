"""Both sides, the link between them and the fabric: every step of the whole, and what is unsafe.

A world is three things: a decode side, a prefill side, and the set of messages in flight, each of
which may arrive next, later, never, or twice. Sides and messages are numbered as they appear, so a
world is one integer, ``flight | decode | prefill``, and every step of a side is worked out once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from typing_extensions import override

from tests.model import decode_side, prefill_side, prefill_steps
from tests.model.decode_side import DecodePart, DecodeSide, DecodeStep
from tests.model.naming import Names, Renaming, in_messages, in_sides
from tests.model.prefill_side import Call, PrefillPart, PrefillSide, PrefillStep
from tests.model.protocol import FAULTS, NOBODY, Cause, Kind, Message, Pages, Post, Rules, Side
from tests.model.verdict import is_over, reaches, violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")
BITS = 20
SIDE = (1 << BITS) - 1
PREFILL = SIDE
DECODE = SIDE << BITS
PAIR = DECODE | PREFILL


class Scope(NamedTuple):
    """How much is explored."""

    handoffs: int = 1
    posts: int = 2
    calls: int = 1
    """Times the engine opens the room."""
    faults: frozenset[Cause] = frozenset()
    budget: int = 0
    """Faults in all, of the kinds above."""

    @override
    def __str__(self) -> str:
        kinds = "any" if self.faults == FAULTS else "+".join(sorted(f.name for f in self.faults))
        return (
            f"{self.handoffs} handoffs of {self.posts} posts, {self.calls} sends, "
            f"{self.budget} faults{f' ({kinds})' if self.faults else ''}"
        )


class Edge(NamedTuple):
    """One step: why, in words, and the number of what is after it; ``sends`` is put in flight."""

    cause: Cause
    words: str
    after: int
    sends: int = 0


class SharedStep(NamedTuple):
    """A step that both sides take part in."""

    words: str
    decode: DecodeSide
    prefill: PrefillSide
    sends: tuple[Message, ...] = ()


def bits(flight: int) -> Iterator[int]:
    """The messages of a set, one bit each."""
    while flight:
        bit = flight & -flight
        flight ^= bit
        yield bit


class Numbering(Generic[T]):
    """Numbers for values in the order of their appearance."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


class Local(NamedTuple):
    """The edges of one side, or of one message arriving there."""

    free: list[Edge]
    faults: list[Edge]


class World:
    """The steps of the whole under one set of rules."""

    def __init__(self, scope: Scope, rules: Rules) -> None:
        self.scope = scope
        self.rules = rules
        self.decodes: Numbering[DecodeSide] = Numbering()
        self.prefills: Numbering[PrefillSide] = Numbering()
        self.messages: Numbering[Message] = Numbering()
        self._decode_edges: dict[int, Local] = {}
        self._prefill_edges: dict[int, Local] = {}
        self._shared_edges: dict[int, list[Edge]] = {}
        self._arrivals: dict[tuple[int, int], list[Edge]] = {}
        self._duplicates: dict[tuple[int, int], list[Edge]] = {}
        self._losses: dict[int, Edge] = {}
        self._spent: dict[int, int] = {}
        self._decode_spent: dict[int, int] = {}
        self._prefill_spent: dict[int, int] = {}
        self.names: Numbering[Names] = Numbering()
        self._pair_names: dict[int, int] = {}
        self._flight_names: dict[int, int] = {}
        self._renamings: dict[tuple[int, int], Renaming | None] = {}
        self._renamed: dict[int, int] = {}
        self._renames = bool(scope.faults & {Cause.DECODE_CRASH, Cause.PREFILL_CRASH, Cause.FENCE})
        """Whether any name is ever left behind."""
        self._to_decode = 0
        """The messages that go to the decode side."""

    def start(self) -> int:
        scope = self.scope
        decode = DecodeSide(parts=(DecodePart(),) * scope.handoffs)
        prefill = PrefillSide(
            parts=(PrefillPart(),) * scope.handoffs,
            calls=(Call(),) * scope.calls,
            posts_per_part=scope.posts,
            left=(NOBODY,) * scope.handoffs,
        )
        return self.pair(decode, prefill)

    def pair(self, decode: DecodeSide, prefill: PrefillSide) -> int:
        return self.decodes.number(decode) << BITS | self.prefills.number(prefill)

    def sides(self, world: int) -> tuple[DecodeSide, PrefillSide]:
        return self.decodes.values[world >> BITS & SIDE], self.prefills.values[world & SIDE]

    def flight(self, messages: Iterable[Message]) -> int:
        """The set of ``messages``, a bit for each."""
        flight = 0
        for message in messages:
            known = len(self.messages.values)
            bit = 1 << self.messages.number(message)
            flight |= bit
            if len(self.messages.values) != known:
                self._to_decode |= bit * (message.to is Side.DECODE)
                for spent in (self._spent, self._decode_spent, self._prefill_spent):
                    spent.clear()
        return flight

    # --- what the explorer asks -------------------------------------------------------------

    def sides_of(self, world: int) -> int:
        return world & PAIR

    def wrong(self, sides: int) -> str | None:
        return violation(*self.sides(sides), self.rules)

    def is_over(self, sides: int) -> bool:
        return is_over(*self.sides(sides))

    # --- steps ------------------------------------------------------------------------------

    def free_steps(self, world: int) -> list[tuple[Edge, int]]:
        """The steps that are no fault, each with the world after it."""
        decode, prefill, flight = world & DECODE, world & PREFILL, world >> 2 * BITS
        steps = [(e, e.after | prefill, flight) for e in self.decode_edges(decode).free]
        steps += [(e, decode | e.after, flight) for e in self.prefill_edges(prefill).free]
        steps += [(e, e.after, flight) for e in self.shared_edges(decode | prefill)]
        for bit in bits(flight):
            left = flight ^ bit
            if bit & self._to_decode:
                steps += [(e, e.after | prefill, left) for e in self.arrivals(bit, decode)]
            else:
                steps += [(e, decode | e.after, left) for e in self.arrivals(bit, prefill)]
        return self.joined(steps)

    def fault_steps(self, world: int) -> list[tuple[Edge, int]]:
        """The steps that are faults: crashes, a fence, a failing post, a loss, a duplicate."""
        decode, prefill, flight = world & DECODE, world & PREFILL, world >> 2 * BITS
        steps = [(e, e.after | prefill, flight) for e in self.decode_edges(decode).faults]
        steps += [(e, decode | e.after, flight) for e in self.prefill_edges(prefill).faults]
        for bit in bits(flight):
            if Cause.LOSS in self.scope.faults:
                steps.append((self.loss(bit), decode | prefill, flight ^ bit))
            if Cause.DUPLICATE in self.scope.faults:  # it arrives and stays in flight
                if bit & self._to_decode:
                    steps += [(e, e.after | prefill, flight) for e in self.duplicates(bit, decode)]
                else:
                    steps += [(e, decode | e.after, flight) for e in self.duplicates(bit, prefill)]
        return self.joined(steps)

    def joined(self, steps: list[tuple[Edge, int, int]]) -> list[tuple[Edge, int]]:
        """The worlds after ``steps``, with those messages that may still change something."""
        spent = self._spent
        worlds = []
        for edge, pair, flight in steps:
            if pair not in spent:
                spent[pair] = self.spent(pair)
            worlds.append((edge, ((flight | edge.sends) & ~spent[pair]) << 2 * BITS | pair))
        return worlds

    def canonical(self, world: int) -> int:
        """The same state with the lowest numbers for its incarnations and generations."""
        if not self._renames:
            return world
        pair, flight = world & PAIR, world >> 2 * BITS
        here, there = self._pair_names.get(pair), self._flight_names.get(flight)
        if here is None:
            here = self._pair_names[pair] = self.names.number(in_sides(*self.sides(pair)))
        if there is None:
            messages = self.messages_in(flight)
            there = self._flight_names[flight] = self.names.number(in_messages(messages))
        if (here, there) not in self._renamings:
            names = self.names.values[here].joined(self.names.values[there])
            self._renamings[here, there] = Renaming(names) if names.has_gaps() else None
        renaming = self._renamings[here, there]
        if renaming is None:
            return world
        found = self._renamed.get(world)
        if found is None:
            decode, prefill = self.sides(pair)
            pair = self.pair(renaming.decode(decode), renaming.prefill(prefill))
            flight = self.flight(map(renaming.message, self.messages_in(flight)))
            found = self._renamed[world] = flight << 2 * BITS | pair
        return found

    def messages_in(self, flight: int) -> list[Message]:
        return [self.messages.values[bit.bit_length() - 1] for bit in bits(flight)]

    def spent(self, pair: int) -> int:
        """The messages that can change nothing any more, on either side."""
        decode, prefill = pair & DECODE, pair & PREFILL
        here, there = self.sides(pair)
        if decode not in self._decode_spent:
            self._decode_spent[decode] = self.flight(
                m
                for m in self.messages.values
                if m.to is Side.DECODE and decode_side.is_spent(here, m, self.rules)
            )
        if prefill not in self._prefill_spent:
            self._prefill_spent[prefill] = self.flight(
                m
                for m in self.messages.values
                if m.to is Side.PREFILL and prefill_side.is_spent(there, m, self.rules)
            )
        return self._decode_spent[decode] | self._prefill_spent[prefill]

    # --- the steps of one side, worked out once ----------------------------------------------

    def decode_edges(self, decode: int) -> Local:
        """What the decode side may do by itself; ``after`` leaves room for the prefill side."""
        found = self._decode_edges.get(decode)
        if found is None:
            steps = decode_side.steps(self.decodes.values[decode >> BITS], self.rules)
            found = self._decode_edges[decode] = self.apart(
                [self.decode_edge(step) for step in steps], decode
            )
        return found

    def prefill_edges(self, prefill: int) -> Local:
        """What the prefill side may do by itself."""
        found = self._prefill_edges.get(prefill)
        if found is None:
            steps = prefill_steps.steps(self.prefills.values[prefill], self.rules)
            found = self._prefill_edges[prefill] = self.apart(
                [self.prefill_edge(step) for step in steps], prefill
            )
        return found

    def decode_edge(self, step: DecodeStep) -> Edge:
        after = self.decodes.number(step.after) << BITS
        return Edge(step.cause, step.words, after, self.flight(step.sends))

    def prefill_edge(self, step: PrefillStep) -> Edge:
        after = self.prefills.number(step.after)
        return Edge(step.cause, step.words, after, self.flight(step.sends))

    def apart(self, edges: list[Edge], before: int) -> Local:
        """The edges that do something and are in scope, faults apart."""
        moves = [edge for edge in edges if edge.after != before or edge.sends]
        return Local(
            [edge for edge in moves if edge.cause < Cause.LOSS],
            [edge for edge in moves if edge.cause in self.scope.faults],
        )

    def arrivals(self, bit: int, side: int) -> list[Edge]:
        """What the arrival of one message at its side may do; nothing arrives at a dead daemon."""
        found = self._arrivals.get((bit, side))
        if found is None:
            message = self.messages.values[bit.bit_length() - 1]
            found = []
            if message.to is Side.DECODE:
                decode = self.decodes.values[side >> BITS]
                if decode.is_up:
                    step = decode_side.deliver(decode, message, self.rules)
                    found = [self.decode_edge(step)]
            else:
                prefill = self.prefills.values[side]
                if prefill.is_up:
                    steps = prefill_side.deliver(prefill, message, self.rules)
                    found = [self.prefill_edge(step) for step in steps]
            self._arrivals[bit, side] = found
        return found

    def loss(self, bit: int) -> Edge:
        found = self._losses.get(bit)
        if found is None:
            message = self.messages.values[bit.bit_length() - 1]
            found = self._losses[bit] = Edge(Cause.LOSS, f"{message} is lost", NOBODY)
        return found

    def duplicates(self, bit: int, side: int) -> list[Edge]:
        """As ``arrivals``, of a message that is still in flight afterwards."""
        found = self._duplicates.get((bit, side))
        if found is None:
            found = self._duplicates[bit, side] = [
                edge._replace(cause=Cause.DUPLICATE, words=f"{edge.words}; a duplicate flies on")
                for edge in self.arrivals(bit, side)
            ]
        return found

    def shared_edges(self, pair: int) -> list[Edge]:
        """What both sides do together: greet, ping, land a post."""
        found = self._shared_edges.get(pair)
        if found is None:
            found = self._shared_edges[pair] = [
                Edge(
                    Cause.PROGRESS,
                    step.words,
                    self.pair(step.decode, step.prefill),
                    self.flight(step.sends),
                )
                for step in self.shared_steps(pair)
            ]
        return found

    # --- what needs both sides --------------------------------------------------------------

    def shared_steps(self, pair: int) -> Iterator[SharedStep]:
        decode, prefill = self.sides(pair)
        yield from self.greetings(decode, prefill)
        if decode.is_up and prefill.is_up:
            yield from self.pings(decode, prefill)
        for index, part in enumerate(prefill.parts):
            if Post.FLYING in part.posts and not part.is_orphan:
                yield self.landing(decode, prefill, index)
        yield from self.late(decode, prefill)

    def late(self, decode: DecodeSide, prefill: PrefillSide) -> Iterator[SharedStep]:
        """What a sender that is over had sent arrives, and then the decode side is quiet."""
        for index, part in enumerate(decode.parts):
            if prefill.left[index] != NOBODY:
                words = f"what was left of handoff {index} arrives, and the end behind it"
                arrived = prefill_side.left_behind(prefill, index, NOBODY)
                yield SharedStep(words, decode, arrived)
            if part.in_doubt and decode_side.is_quiet(decode, prefill.left[index], self.rules):
                words = f"decode is quiet for handoff {index}"
                after = decode_side.with_part(decode, index, decode_side.quiet(part))
                yield SharedStep(words, after, prefill)

    def greetings(self, decode: DecodeSide, prefill: PrefillSide) -> Iterator[SharedStep]:
        """Hello is repeated until the other side knows this incarnation and generation."""
        knows = (prefill.sees, prefill.sees_generation)
        news = (decode.incarnation, decode.generation)
        if decode.is_up and knows != news:
            hello = Message(Side.PREFILL, Kind.HELLO, NOBODY, news[0], NOBODY, news[1])
            yield SharedStep("decode says Hello", decode, prefill, (hello,))
        if prefill.is_up and decode.sees != prefill.incarnation:
            hello = Message(Side.DECODE, Kind.HELLO, NOBODY, prefill.incarnation, NOBODY, 0)
            yield SharedStep("prefill says Hello", decode, prefill, (hello,))

    def pings(self, decode: DecodeSide, prefill: PrefillSide) -> Iterator[SharedStep]:
        """A Ping with news arrives. One that is late says less, so none is kept in flight."""
        here, there = decode.incarnation, prefill.incarnation
        if (decode.sees, prefill.sees) != (there, here):
            return
        floor = decode_side.floor(decode)
        if floor > prefill.peer_floor:
            ping = Message(Side.PREFILL, Kind.PING, NOBODY, here, there, floor)
            for step in prefill_side.deliver(prefill, ping, self.rules):
                yield SharedStep(step.words, decode, step.after)
        floor = prefill_side.floor(prefill)
        if floor > decode.peer_floor:
            ping = Message(Side.DECODE, Kind.PING, NOBODY, there, here, floor)
            pinged = decode_side.deliver(decode, ping, self.rules)
            yield SharedStep(pinged.words, pinged.after, prefill)

    def landing(self, decode: DecodeSide, prefill: PrefillSide, index: int) -> SharedStep:
        """A post is done, its bytes landed; or it fails because its receiving process is gone."""
        part, there = prefill.parts[index], decode.parts[index]
        if not reaches(decode, prefill, part, self.rules):
            failed = prefill_steps.fail_post(prefill, index, Cause.PROGRESS, self.rules)
            words = f"{failed.words}: its receiving process is gone"
            return SharedStep(words, decode, failed.after, failed.sends)
        part = part._replace(posts=prefill_side.changed(part.posts, Post.FLYING, Post.DONE))
        done, sends = prefill_side.conclude(
            prefill_side.with_part(prefill, index, part), index, self.rules
        )
        if there.pages in (Pages.HELD, Pages.QUARANTINED):
            there = there._replace(landed=there.landed + 1)
        landed = decode_side.with_part(decode, index, there)
        return SharedStep(
            f"a post of handoff {index} lands and is done", landed, done, tuple(sends)
        )
