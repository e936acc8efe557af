"""Nodes, the wire between them, and time: everything a handoff meets, without a socket or a clock.

By default every message arrives at once and in order. A test may hold, lose, repeat or reorder what
is on the wire, hold posts, restart daemons and transfer processes. What is checked at every step is
in ``side``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from kvd.core import inputs
from tests.core.side import PAGE, Letter, Side, content, incarnation, settings, spec, tokens

if TYPE_CHECKING:
    from kvd.core.effects import Step
    from kvd.wire.peer import Message

__all__ = ["PAGE", "Side", "World", "content", "settings", "spec", "tokens"]


class World:
    """A prefill side ``p``, a decode side ``d`` that dials it, and more of both if named."""

    side: ClassVar[type[Side]] = Side
    """Of which kind they are: what their pages hold may be looked at more closely."""

    def __init__(
        self,
        *,
        p_pages: int = 64,
        d_pages: int = 64,
        names: tuple[str, ...] = ("d",),
        sources: tuple[str, ...] = ("p",),
        **more: object,
    ) -> None:
        self.now_s = 100.0
        self.wire: list[Letter] = []
        self.restarts: list[tuple[Side, str]] = []
        self.lost: set[type[Message]] = set()
        """Messages of these types vanish."""
        self.cut: set[str] = set()
        """Whatever these sides send or should hear vanishes."""
        self.hold_wire = self.hold_posts = self.hold_quiet = self.hold_shells = False
        self.hold_copies = False
        self.torn_pages = 1
        """So many pages of a copy were copied when its transfer process is killed."""
        self.hold_verify = False
        self.doubts = False
        """A destroyed sending agent leaves bytes behind."""
        self.hold_network = False
        """What a sender that is over had sent is still on its way, and the ends behind it."""
        self.connections = 0
        self.sides: dict[str, Side] = {}
        for name in sources:
            self.sides[name] = self.side(self, settings(name, p_pages, **more))
        self.p = self.sides[sources[0]]
        for name in names:
            side = self.sides[name] = self.side(self, settings(name, d_pages, **more))
            side.dials += [self.sides[source] for source in sources]
        self.d = self.sides[names[0]]
        for side in self.sides.values():
            side.attach()
            self.start(side)
        self.run()

    def start(self, side: Side) -> None:
        """A process begins to serve and dials its peers."""
        side.start_transfer()
        for other in side.dials:
            side.feed(
                inputs.LinkDialed(
                    self.now_s, f"out:{other.name}", other.name, f"tcp://{other.name}"
                )
            )

    def restart(self, side: Side) -> None:
        """The daemon dies with its engines, and comes back as a new incarnation."""
        side.stop_processes()
        self.wire = [letter for letter in self.wire if letter.to is not side]
        side.life += 1
        side.config = msgspec.structs.replace(
            side.config, incarnation=incarnation(side.name, side.life)
        )
        side.begin()
        self.start(side)
        self.run()

    def side_of(self, owner: str) -> Side:
        """The side one of whose lives this incarnation is."""
        return self.sides[bytes.fromhex(owner[16:]).rstrip(b"\0").decode()]

    # ---- the wire ----------------------------------------------------------------------------

    def happened(self, side: Side, happened: inputs.Input, step: Step) -> None:
        """For who tells the story: after every step, before its effects are carried out."""

    def post_letter(self, letter: Letter) -> None:
        if not self.is_lost(letter):
            self.wire.append(letter)

    def is_lost(self, letter: Letter) -> bool:
        is_cut = bool(self.cut & {letter.sender.name, letter.to.name})
        return is_cut or type(letter.message) in self.lost

    def deliver(self, letter: Letter) -> None:
        """This letter arrives now."""
        letter.to.feed(inputs.FromPeer(self.now_s, letter.link, letter.message))

    def inject(self, to: Side, message: Message, sender: Side | None = None) -> None:
        """A message arrives at ``to`` as if its peer had sent it."""
        sender = sender or next(side for side in self.sides.values() if side is not to)
        kind = "out" if sender in to.dials else f"in{sender.connection}"
        link = f"{kind}:{sender.name}"
        to.feed(inputs.FromPeer(self.now_s, link, message))
        self.run()

    def held(self, kind: type[Message]) -> list[Letter]:
        """What is on the wire of this type, oldest first."""
        return [letter for letter in self.wire if isinstance(letter.message, kind)]

    def run(self, limit: int = 10_000) -> None:
        """Deliver everything until nothing is on its way."""
        while self.step_shells() or (self.wire and not self.hold_wire):
            limit -= 1
            assert limit, "messages never stop"
            if self.wire and not self.hold_wire:
                self.deliver(self.wire.pop(0))

    def step_shells(self) -> bool:
        """Whatever the transfer processes have to report; whether there was anything."""
        if self.hold_shells:
            return False
        reports = sum(side.report_next() for side in self.sides.values())
        return self.replace_processes() or reports > 0

    def replace_processes(self) -> bool:
        """Carry out the restarts that were asked for; whether there were any."""
        asked, self.restarts = self.restarts, []
        for side, why in asked:
            side.stop_transfer(why)
            side.start_transfer(why)
        return bool(asked)

    def flow(self) -> None:
        """Everything that is on its way arrives."""
        for side in self.sides.values():
            side.arrive_all()
        self.run()

    # ---- posts and time ----------------------------------------------------------------------

    def land_posts(self) -> None:
        """Every post that is under way arrives."""
        for side in self.sides.values():
            for flight in list(side.flights.values()):
                side.land(flight)
        self.run()

    def pass_time(self, seconds: float, tick_s: float = 0.1) -> None:
        """Tick every node, delivering in between."""
        for _ in range(round(seconds / tick_s)):
            self.now_s = round(self.now_s + tick_s, 6)
            for side in self.sides.values():
                side.feed(inputs.Tick(self.now_s))
            self.run()
