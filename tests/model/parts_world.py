"""Two writers, one decode side, and both links: every step of a receive from two sources.

As ``world``, with a third side. A state is one integer: ``flight | decode | writer 0 | writer 1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from kvd.core.handoff.protocol import Decode
from tests.model import decode_side, prefill_side, prefill_steps, reception
from tests.model.decode_side import DecodePart, DecodeSide
from tests.model.prefill_side import Call, Phase, PrefillPart, PrefillSide, PrefillStep
from tests.model.protocol import (
    FAULTS,
    NOBODY,
    OUTSTANDING,
    Cause,
    Kind,
    Message,
    Pages,
    Post,
    Rules,
    Side,
)
from tests.model.reception import Joint, Reception, ReceptionStep, Sent
from tests.model.verdict import KEPT, is_over, reaches, source_is_free
from tests.model.world import BITS, SIDE, Edge, Numbering, bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RULES = Rules()
WRITER = (BITS, 0)
"""Where in a state each writer is."""
DECODE_AT = 2 * BITS
SIDES = (1 << 3 * BITS) - 1
Move = tuple[Edge, int, int]
"""A step, the sides after it, and what flies on."""
UNCOMMITTED = (Decode.OFFERED, Decode.RECEIVING, Decode.VERIFYING, Decode.DRAINING)


class PartsScope(NamedTuple):
    """How much is explored: posts of each writer, and how far its engine is when it begins."""

    posts: tuple[int, int] = (1, 1)
    phases: tuple[Phase, Phase] = (Phase.PREFILLING, Phase.FINISHING)
    faults: frozenset[Cause] = frozenset()
    budget: int = 0

    @override
    def __str__(self) -> str:
        kinds = "any" if self.faults == FAULTS else "+".join(sorted(f.name for f in self.faults))
        return (
            f"two parts of {self.posts[0]} and {self.posts[1]} posts, {self.budget} faults"
            f"{f' ({kinds})' if self.faults else ''}"
        )


class PartsWorld:
    """The steps of the whole under one set of sentences."""

    def __init__(self, scope: PartsScope, joint: Joint | None = None) -> None:
        self.scope = scope
        self.joint = joint or Joint()
        self.decodes: Numbering[Reception] = Numbering()
        self.writers: Numbering[PrefillSide] = Numbering()
        self.messages: Numbering[Sent] = Numbering()
        self._pinged: dict[int, int] = {}
        self._own: dict[int, list[Edge]] = {}
        self._writer_own: dict[tuple[int, int], list[Edge]] = {}
        self._shared: dict[tuple[int, int, int], list[Edge]] = {}
        self._arrivals: dict[tuple[int, int], list[Edge]] = {}
        self._spent: dict[int, int] = {}
        self._decode_spent: dict[int, int] = {}
        self._writer_spent: dict[tuple[int, int], int] = {}

    def start(self) -> int:
        link = DecodeSide(parts=(DecodePart(),))
        decode = self.decodes.number(Reception((link, link)))
        state = decode << DECODE_AT
        for posts, phase, at in zip(self.scope.posts, self.scope.phases, WRITER, strict=True):
            side = PrefillSide((PrefillPart(),), (Call(phase),), posts)
            state |= self.writers.number(side) << at
        return state

    # --- what the explorer asks -------------------------------------------------------------

    def sides_of(self, world: int) -> int:
        return world & SIDES

    def canonical(self, world: int) -> int:
        return world

    def sides(self, state: int) -> tuple[Reception, tuple[PrefillSide, PrefillSide]]:
        first, second = (self.writers.values[state >> at & SIDE] for at in WRITER)
        return self.decodes.values[state >> DECODE_AT & SIDE], (first, second)

    def wrong(self, sides: int) -> str | None:
        return violation(*self.sides(sides), RULES)

    def is_over(self, sides: int) -> bool:
        whole, writers = self.sides(sides)
        return all(is_over(*pair) for pair in zip(whole.links, writers, strict=True))

    # --- steps ------------------------------------------------------------------------------

    def free_steps(self, world: int) -> list[tuple[Edge, int]]:
        return self.after([move for move in self.moves(world) if move[0].cause < Cause.LOSS])

    def fault_steps(self, world: int) -> list[tuple[Edge, int]]:
        found = [move for move in self.moves(world) if move[0].cause in self.scope.faults]
        flight = world >> 3 * BITS
        for bit in bits(flight):
            if Cause.LOSS in self.scope.faults:
                lost = Edge(Cause.LOSS, f"{self.message(bit)} is lost", NOBODY)
                found.append((lost, world & SIDES, flight ^ bit))
            if Cause.DUPLICATE in self.scope.faults:
                found += [
                    (edge._replace(cause=Cause.DUPLICATE), sides, flight)
                    for edge, sides, _ in self.arrivals(bit, world)
                ]
        return self.after(found)

    def moves(self, world: int) -> list[Move]:
        """Every step but losses and duplicates."""
        flight = world >> 3 * BITS
        found = self.decode_moves(world, self.decode_edges(world >> DECODE_AT & SIDE))
        for link, at in enumerate(WRITER):
            found += self.writer_moves(world, link, self.writer_edges(world >> at & SIDE, link))
            found += self.shared_moves(world, link)
        for bit in bits(flight):
            found += self.arrivals(bit, world)
        return found

    def after(self, found: Iterable[Move]) -> list[tuple[Edge, int]]:
        """The states after the moves, with the messages that may still change something."""
        worlds = []
        for edge, moved, flight in found:
            sides = self._pinged.get(moved)
            if sides is None:
                sides = self._pinged[moved] = self.pinged(moved)
            spent = self._spent.get(sides)
            if spent is None:
                spent = self._spent[sides] = self.spent(sides)
            worlds.append((edge, ((flight | edge.sends) & ~spent) << 3 * BITS | sides))
        return worlds

    def message(self, bit: int) -> Sent:
        return self.messages.values[bit.bit_length() - 1]

    def flight(self, sent: Iterable[Sent]) -> int:
        flight = 0
        for one in sent:
            if one.message.kind is Kind.ACCEPT:
                continue  # it changes nothing that several parts have in common
            known = len(self.messages.values)
            flight |= 1 << self.messages.number(one)
            if len(self.messages.values) != known:
                for spent in (self._spent, self._decode_spent, self._writer_spent):
                    spent.clear()
        return flight

    def spent(self, sides: int) -> int:
        """The messages that can change nothing any more."""
        number = sides >> DECODE_AT & SIDE
        found = self._decode_spent.get(number)
        whole, writers = self.sides(sides)
        if found is None:
            found = self._decode_spent[number] = self.flight(
                sent
                for sent in self.messages.values
                if sent.message.to is Side.DECODE
                and decode_side.is_spent(whole.links[sent.link], sent.message, RULES)
            )
        for link, at in enumerate(WRITER):
            key = link, sides >> at & SIDE
            if key not in self._writer_spent:
                self._writer_spent[key] = self.flight(
                    sent
                    for sent in self.messages.values
                    if sent.message.to is Side.PREFILL
                    and sent.link == link
                    and prefill_side.is_spent(writers[link], sent.message, RULES)
                )
            found |= self._writer_spent[key]
        return found

    # --- the steps of one side, worked out once: ``after`` is what changes in the state -------

    def decode_edges(self, number: int) -> list[Edge]:
        found = self._own.get(number)
        if found is None:
            steps = reception.steps(self.decodes.values[number], self.joint)
            found = self._own[number] = self.told(steps, number)
        return found

    def told(self, steps: Iterable[ReceptionStep], before: int) -> list[Edge]:
        """The edges of the decode side that do something."""
        edges = [
            Edge(step.cause, step.words, self.decodes.number(step.after), self.flight(step.sends))
            for step in steps
        ]
        return [edge for edge in edges if edge.after != before or edge.sends]

    def decode_moves(self, world: int, edges: list[Edge]) -> list[Move]:
        rest, flight = world & SIDES & ~(SIDE << DECODE_AT), world >> 3 * BITS
        return [(edge, rest | edge.after << DECODE_AT, flight) for edge in edges]

    def writer_edges(self, number: int, link: int) -> list[Edge]:
        found = self._writer_own.get((link, number))
        if found is None:
            steps = prefill_steps.steps(self.writers.values[number], RULES)
            found = self._writer_own[link, number] = self.written(steps, link, number)
        return found

    def written(self, steps: Iterable[PrefillStep], link: int, before: int) -> list[Edge]:
        """The edges of one writer that do something."""
        edges = [
            Edge(
                step.cause,
                f"writer {link}: {step.words}",
                self.writers.number(step.after),
                self.flight(reception.over(link, step.sends)),
            )
            for step in steps
        ]
        return [edge for edge in edges if edge.after != before or edge.sends]

    def writer_moves(self, world: int, link: int, edges: list[Edge]) -> list[Move]:
        at, flight = WRITER[link], world >> 3 * BITS
        rest = world & SIDES & ~(SIDE << at)
        return [(edge, rest | edge.after << at, flight) for edge in edges]

    def arrivals(self, bit: int, world: int) -> list[Move]:
        """What the arrival of one message may do; nothing arrives at a dead daemon."""
        sent, left = self.message(bit), (world >> 3 * BITS) ^ bit
        is_to_decode = sent.message.to is Side.DECODE
        number = world >> (DECODE_AT if is_to_decode else WRITER[sent.link]) & SIDE
        found = self._arrivals.get((bit, number))
        if found is None:
            found = self._arrivals[bit, number] = (
                self.decode_arrival(sent, number) if is_to_decode else self.arrival(sent, number)
            )
        moves = (
            self.decode_moves(world, found)
            if is_to_decode
            else self.writer_moves(world, sent.link, found)
        )
        return [(edge, sides, left) for edge, sides, _ in moves]

    def arrival(self, sent: Sent, number: int) -> list[Edge]:
        side = self.writers.values[number]
        steps = prefill_side.deliver(side, sent.message, RULES) if side.is_up else []
        # One that changes nothing is an edge, too: it takes the message out of flight.
        return self.written(steps, sent.link, NOBODY)

    def decode_arrival(self, sent: Sent, number: int) -> list[Edge]:
        whole = self.decodes.values[number]
        if not whole.links[0].is_up:
            return []
        step = reception.deliver(whole, sent.link, sent.message, self.joint)
        return self.told([step], NOBODY)

    # --- what needs both ends of a link -------------------------------------------------------

    def shared_moves(self, world: int, link: int) -> list[Move]:
        here, there = world >> DECODE_AT & SIDE, world >> WRITER[link] & SIDE
        found = self._shared.get((link, here, there))
        if found is None:
            whole, writer = self.decodes.values[here], self.writers.values[there]
            found = self._shared[link, here, there] = [
                Edge(
                    Cause.PROGRESS,
                    f"link {link}: {words}",
                    self.decodes.number(after) << DECODE_AT
                    | self.writers.number(side) << WRITER[link],
                    self.flight(reception.over(link, sends)),
                )
                for words, after, side, sends in self.shared_steps(whole, writer, link)
            ]
        rest = world & SIDES & ~(SIDE << DECODE_AT | SIDE << WRITER[link])
        return [(edge, rest | edge.after, world >> 3 * BITS) for edge in found]

    def shared_steps(
        self, whole: Reception, writer: PrefillSide, link: int
    ) -> Iterator[tuple[str, Reception, PrefillSide, tuple[Message, ...]]]:
        decode = whole.links[link]
        news = (decode.incarnation, decode.generation)
        if decode.is_up and (writer.sees, writer.sees_generation) != news:
            hello = Message(Side.PREFILL, Kind.HELLO, NOBODY, news[0], NOBODY, news[1])
            yield "decode says Hello", whole, writer, (hello,)
        if writer.is_up and decode.sees != writer.incarnation:
            hello = Message(Side.DECODE, Kind.HELLO, NOBODY, writer.incarnation, NOBODY, 0)
            yield "prefill says Hello", whole, writer, (hello,)
        part = writer.parts[0]
        if Post.FLYING in part.posts and not part.is_orphan:
            yield self.landing(whole, writer, link)
        if writer.left[0] != NOBODY:
            arrived = prefill_side.left_behind(writer, 0, NOBODY)
            yield "what was left arrives, and the end behind it", whole, arrived, ()
        is_quiet = decode_side.is_quiet(decode, writer.left[0], RULES)
        # While the daemon is down nobody learns of it: the one after it frees all pages at once.
        if decode.is_up and whole.parts[link].in_doubt and is_quiet:
            yield "decode is quiet", reception.quiet(whole, link, self.joint), writer, ()

    def pinged(self, sides: int) -> int:
        """The sides when each has heard the other's floor: here a Ping arrives at once."""
        for link, at in enumerate(WRITER):
            whole, writers = self.sides(sides)
            decode, writer = whole.links[link], writers[link]
            here, there = decode.incarnation, writer.incarnation
            if not (decode.is_up and writer.is_up and (decode.sees, writer.sees) == (there, here)):
                continue
            floor = decode_side.floor(decode)
            if floor > writer.peer_floor:
                ping = Message(Side.PREFILL, Kind.PING, NOBODY, here, there, floor)
                (step,) = prefill_side.deliver(writer, ping, RULES)
                writer = step.after
            floor = prefill_side.floor(writer)
            if floor > decode.peer_floor:
                ping = Message(Side.DECODE, Kind.PING, NOBODY, there, here, floor)
                decode = decode_side.deliver(decode, ping, RULES).after
            number = self.decodes.number(reception.on(whole, link, decode))
            sides = sides & ~(SIDE << DECODE_AT | SIDE << at)
            sides |= number << DECODE_AT | self.writers.number(writer) << at
        return sides

    def landing(
        self, whole: Reception, writer: PrefillSide, link: int
    ) -> tuple[str, Reception, PrefillSide, tuple[Message, ...]]:
        """A post is done, its bytes landed; or it fails because its receiving process is gone."""
        part, there = writer.parts[0], whole.parts[link]
        if not reaches(whole.links[link], writer, part, RULES):
            step = prefill_steps.fail_post(writer, 0, Cause.PROGRESS, RULES)
            return f"{step.words}: its process is gone", whole, step.after, step.sends
        part = part._replace(posts=prefill_side.changed(part.posts, Post.FLYING, Post.DONE))
        side, sends = prefill_side.conclude(prefill_side.with_part(writer, 0, part), 0, RULES)
        if there.pages in (Pages.HELD, Pages.QUARANTINED):
            there = there._replace(landed=there.landed + 1)
        after = reception.put_quietly(whole, link, there)
        return "a post lands and is done", after, side, tuple(sends)


def violation(
    whole: Reception, writers: tuple[PrefillSide, PrefillSide], rules: Rules
) -> str | None:
    """What is unsafe in this state, in words."""
    for link, (there, writer) in enumerate(zip(whole.parts, writers, strict=True)):
        part, side = writer.parts[0], whole.links[link]
        if any(post in OUTSTANDING for post in part.posts):
            if there.pages not in KEPT and reaches(side, writer, part, rules):
                return f"a post of writer {link} may land in pages that are {there.pages.name}"
            if source_is_free(writer, part, rules):
                return f"a post of writer {link} reads source pages that are free"
        if writer.left[0] == side.generation and there.pages not in KEPT:
            return f"late bytes of writer {link} may land in pages that are {there.pages.name}"
        if part.heard_committed and there.pages is not Pages.CACHED:
            return f"writer {link} hears that it is committed, and it is not"
        if there.committed and there.landed != writer.posts_per_part:
            return f"committed with {there.landed} of the posts of writer {link} landed"
        if there.pages is Pages.CACHED and there.state in UNCOMMITTED:
            return f"committed while part {link} is {there.state.value}"
        if there.committed and there.damaged:
            return f"committed with a page of writer {link} that is not what was sent"
    return None if whole.auxes in (NOBODY, 1) else f"the aux is delivered {whole.auxes} times"
