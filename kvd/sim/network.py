"""The control network between the simulated nodes.

A dialing node has one link ``out:NAME`` to each node that it dials; that one knows it as
``inK:NAME``, where K is another number for every connection, as the identities of a socket are.
What was sent on a connection that is over is lost. Everything else that happens to a message is
drawn: lost, repeated, or so late that others overtake it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from kvd.sim.agenda import Agenda
    from kvd.sim.host import SimHost
    from kvd.sim.profile import Profile
    from kvd.wire.peer import Message

LATENCY_S = 0.0005


class Network:
    """Who reaches whom, and what becomes of messages on the way."""

    def __init__(self, agenda: Agenda, rng: random.Random, profile: Profile) -> None:
        self._agenda = agenda
        self._random = rng.random
        self._connections = 0
        self._cut: set[tuple[str, str]] = set()
        """(from, to): nothing passes."""
        self._longest_delay_s = profile.longest_delay_s
        # One dice a message: below the first it is lost, below the second repeated, and so on.
        self._lost = profile.loss
        self._repeated = self._lost + profile.repeats
        self._late = self._repeated + profile.delays
        self.sent = self.lost = 0

    def connect(self, dialer: SimHost, listener: SimHost) -> None:
        """A new connection in place of the old one, if there was any."""
        link = f"out:{listener.name}"
        old = dialer.links.get(link)
        if old is not None:
            listener.links.pop(old[1], None)
        self._connections += 1
        back = f"in{self._connections}:{dialer.name}"
        dialer.links[link] = (listener, back)
        listener.links[back] = (dialer, link)

    def send(self, sender: SimHost, link: str, message: Message) -> None:
        """A message leaves; where, whether and when it arrives is decided here."""
        self.sent += 1
        route = sender.links.get(link)
        if route is None or (self._cut and (sender.name, route[0].name) in self._cut):
            self.lost += 1
            return
        to, back = route
        delay_s = LATENCY_S
        dice = self._random()
        if dice < self._late:
            if dice < self._lost:
                self.lost += 1
                return
            if dice < self._repeated:
                self._agenda.after(
                    self._random() * self._longest_delay_s, to.hear, to.life, back, message
                )
            else:
                delay_s = self._random() * self._longest_delay_s
        self._agenda.after(delay_s, to.hear, to.life, back, message)

    def cut(self, one: str, other: str, *, both_ways: bool) -> None:
        """Nothing passes from ``one`` to ``other`` until ``mend``."""
        self._cut.add((one, other))
        if both_ways:
            self._cut.add((other, one))

    def is_cut(self, sender: str, to: str) -> bool:
        """Whether nothing passes."""
        return (sender, to) in self._cut

    def mend(self, one: str, other: str) -> None:
        """Messages pass again."""
        self._cut -= {(one, other), (other, one)}

    def heal(self) -> None:
        """From now on everything arrives, once and in order."""
        self._cut.clear()
        self._lost = self._repeated = self._late = 0.0
