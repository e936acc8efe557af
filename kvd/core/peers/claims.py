"""Who may have a node's name, where another process has it already.

Processes of one *home* are in order: one lock lets in one at a time, and numbers their births. So
the later one has reaped the earlier, and takes its name at once; the earlier never comes back, and
a Hello of it that was delayed is refused. Clocks are not compared.

Processes of two homes are in no order: a node that moved to another disk or host, or two nodes that
were given one name. Their clocks say nothing of each other. So whoever has the name keeps it while
it lives, and the other is refused, with words. When the first is lost, the other is asked whether
it lives: a Hello may have been on its way for long, and what is dead must not take a name from what
is only silent. It answers a ping that was made for it, and has the name with its next Hello::

    holder         the other says Hello        here
    UP, SUSPECT    -> refused: the name is taken
    LOST           -> Hello, Ping(n)           <- Ping(echo n), Hello    it is the peer from now on

Whoever was replaced so may still live, and have posts under way. It comes back with a Hello of a
newer generation alone: that one says that its old transfer process is reaped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core.peers.peer import Life
from kvd.errors import Code, Refusal
from kvd.types import short

if TYPE_CHECKING:
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.pulse import Pulse
    from kvd.core.settings import Settings
    from kvd.wire.peer import Hello, Ping

MAX_REPLACED: Final = 64
"""Processes of other homes that had a name before, remembered of each name."""


@dataclass(slots=True, eq=False)
class NameClaim:
    """A process that wants a name whose holder is lost."""

    source: str
    ping: int
    asked_s: float
    is_alive: bool = False
    """Whether it has answered."""


@mypyc_attr(allow_interpreted_subclasses=True)
class NameClaims:
    """One at a time for each name."""

    def __init__(self, settings: Settings, pulse: Pulse, out: Outbox) -> None:
        self._settings = settings
        self._pulse = pulse
        self._out = out
        self._of_name: dict[str, NameClaim] = {}

    def refusal(self, holder: Peer, message: Hello) -> Refusal | None:
        """Why the sender of a Hello does not take the name; None where it does, or may do yet."""
        source, side = message.source, self._settings.name
        generation = holder.replaced.get(source)
        if generation is not None and message.generation <= generation:
            return Refusal(
                Code.PEER_STALE,
                f"incarnation {short(source)} of {holder.name} was silent, and "
                f"{short(holder.incarnation)} has its name since: its messages are not acted on. "
                f"Stop one of the two; if {short(source)} is to stay, run kvd fence on its host, "
                "or restart it: that ends what it had under way, and then it comes back once the "
                "other is gone",
                side=side,
            )
        if holder.home == message.home:
            if source > holder.incarnation:
                return None
            return Refusal(
                Code.PEER_STALE,
                f"incarnation {source} of {holder.name} is older than {holder.incarnation}, "
                "which has said Hello before: its messages are not acted on",
                side=side,
            )
        if holder.life is Life.LOST:
            return None
        silent_s = self._out.at_s - holder.heard_s
        return Refusal(
            Code.PEER_UNKNOWN,
            f"two daemons call themselves {holder.name!r}: {side} talks to incarnation "
            f"{short(holder.incarnation)}, heard {silent_s:.1f} s ago, and not to "
            f"{short(source)}; give every node its own node.name, or stop one of them: the other "
            f"is taken when this one has been silent for {self._settings.lost_s:.1f} s",
            side=side,
        )

    def is_proven(self, holder: Peer, message: Hello) -> bool:
        """Whether the sender, which is not refused, has the name at once."""
        if holder.home == message.home:
            self._of_name.pop(holder.name, None)
            return True
        claim = self._of_name.get(holder.name)
        if claim is None or claim.source != message.source or not claim.is_alive:
            return False
        del self._of_name[holder.name]
        return True

    def is_due(self, name: str) -> bool:
        """Whether it is time to ask somebody who wants that name; of two, the first may answer."""
        claim, now_s = self._of_name.get(name), self._out.at_s
        # Not with each Hello: whoever does not know us answers a ping with one.
        return claim is None or now_s - claim.asked_s >= self._settings.heartbeat_s

    def ask(self, link: str, message: Hello) -> None:
        """Ping the sender of a Hello, to hear whether it lives."""
        number = self._pulse.ask(link, message.source)
        self._of_name[message.node] = NameClaim(message.source, number, self._out.at_s)

    def heard(self, message: Ping) -> bool:
        """Take the echo of a process that is no peer; whether it answers what it was asked."""
        for claim in self._of_name.values():
            if claim.source == message.source and claim.ping == message.echo:
                claim.is_alive = True
                return True
        return False

    def forget(self, name: str) -> None:
        """Nobody has that name any more."""
        self._of_name.pop(name, None)


def replace(holder: Peer, message: Hello) -> None:
    """The sender has the name from now on; who had it may come back as said above."""
    if holder.incarnation and holder.home != message.home:
        holder.replaced.pop(message.source, None)
        holder.replaced[holder.incarnation] = holder.generation
        if len(holder.replaced) > MAX_REPLACED:
            del holder.replaced[next(iter(holder.replaced))]
    holder.home = message.home
