"""Pages that have arrived, until our transfer process has said that they are what was sent.

The writer's Settled(DELIVERED) brings its sums; our own transfer process sums what lies in the
pages and compares, off the loop. The answer ends the wait, and nothing else does: the writer has
settled, so nobody writes the pages any more, and no timer is needed to be safe. A transfer process
that ends meanwhile takes the question along; its successor is asked again.

So that little is left to sum then, it sums ahead what is told to have landed while the rest is on
its way: under the ticket that the question will have, and for nothing if it never comes. Where an
engine uses what has come (``arriving``), the writer says the sums of that on the way, and they are
compared then; what is wrong is said when all of it is asked about.

What must not live here: transitions, and what becomes of the pages (``receive``).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np
from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.layout.seal import SUM_BYTES, chosen, n_chosen
from kvd.errors import Code, Refusal
from kvd.types import Pages
from kvd.wire import events
from kvd.wire.peer import Grant, Offer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.handoff.parts import ReceivePart
    from kvd.core.handoff.payload import Payload
    from kvd.core.inputs import Verified
    from kvd.core.outbox import Outbox
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.wire.peer import Progress

SHOWN_PAGES = 8
"""Of the wrong pages, in a sentence and an event."""

ARRIVED_BYTES = 256 * 1024
"""So much more is worth a word to an engine that uses what has come."""

ADVICE = (
    "nothing of it was cached: send it again, and if that fails too, test the memory and the "
    "network of both hosts"
)


class SumFinding(enum.Enum):
    """What is known of a part's pages, where they are not known to be wrong."""

    ASKED = "asked"
    GOOD = "good"


@mypyc_attr(allow_interpreted_subclasses=True)
class Verifying:
    """Asks about the pages of delivered parts, and puts the answers into words."""

    def __init__(self, settings: Settings, payload: Payload, peers: Peers, out: Outbox) -> None:
        self.parts: dict[int, ReceivePart] = {}
        """By ticket: what has been asked and not answered."""
        self._routes: dict[int, int] = {}
        """By ticket: which route of the part it is about."""
        self.ahead: dict[int, tuple[ReceivePart, int]] = {}
        """By ticket, part and route of which something may be said before it is asked."""
        self._settings = settings
        self._arrived_bytes = min(ARRIVED_BYTES, settings.sum_ahead_bytes)
        self._payload = payload
        self._peers = peers
        self._out = out
        self._last_ticket = 0

    def note_landed(self, part: ReceivePart, message: Progress) -> None:
        """So many of the first pages of each route are whole here; others are still to come."""
        landed = message.landed
        # What a peer says of other routes than those granted is not read. And where the process
        # that they were granted through is gone, the part is as good as over.
        if len(landed) != len(part.seals) or not self._peers.generation:
            return
        _hear_sums(part, message)
        for index, (seal, told) in enumerate(zip(part.seals, landed, strict=True)):
            n_pages = min(told, seal.end - seal.first)
            n_summed = part.heard.get(index, 0)
            known, summed = part.landed.get(index, 0), part.summed.get(index, 0)
            more = chosen(seal, seal.first + known, seal.first + n_pages).size
            is_more = self._is_worth(part, index, more, self._settings.sum_ahead_bytes)
            is_said = self._is_worth(part, index, n_summed - summed, self._arrived_bytes)
            if not is_more and not is_said:
                continue
            # Never less than was told before.
            part.landed[index] = n_pages = max(n_pages, known)
            ticket, sums = self._ticket(part, index), b""
            if is_said:
                sums = part.unsaid.pop(index)
                part.summed[index] = n_summed
                self.ahead[ticket] = part, index
            grant, shard_route = _grant(part, index), part.routes[index].shard_route
            self._out.effects.append(
                effects.SumLanded(
                    ticket=ticket,
                    component=grant.component,
                    seal=seal,
                    pages=Pages(grant.pages),
                    landed=n_pages,
                    shard=shard_route.peer_shard,
                    window=shard_route.window,
                    summed=n_summed if is_said else 0,
                    sums=sums,
                )
            )

    def _is_worth(self, part: ReceivePart, index: int, n_pages: int, least_bytes: int) -> bool:
        """Whether so many more pages are worth a word."""
        route = part.routes[index]
        page_bytes = self._payload.parts[route.grant].bytes_per_page(route.shard_route)
        return n_pages > 0 and n_pages * page_bytes >= least_bytes

    def begin_part(self, part: ReceivePart, checksums: bytes) -> SumFinding | Refusal:
        """Every byte has landed; ``checksums`` is what the writer says of them."""
        # Of a full hit nothing is chosen, and to find that out by numpy takes as long as the rest.
        sizes = [SUM_BYTES * n_chosen(seal) if seal.first < seal.end else 0 for seal in part.seals]
        wanted_bytes = sum(sizes)
        # Integrity is off, or it was a full hit: there is nothing to look at.
        if not wanted_bytes:
            return SumFinding.GOOD
        # Too few sums would leave pages unverified, too many belong to another handoff: neither is
        # looked at in part.
        if len(checksums) != wanted_bytes:
            return self._unsummed(part, len(checksums), wanted_bytes)
        at = 0
        for index, size in enumerate(sizes):
            if size:
                part.sums[index] = checksums[at : at + size]
                at += size
                ticket = self._ticket(part, index)
                self.ahead.pop(ticket, None)
                self.parts[ticket] = part
                self._routes[ticket] = index
        part.history.add_line(self._out.at_s, f"{self._told(part)} pages to verify")
        # Otherwise ``ask_again`` asks when one serves: the question outlives the process.
        # All sums are noted by now: the answer to the first finds that others are missing.
        if self._peers.generation:
            self._ask([ticket for _, ticket in sorted(part.tickets.items())])
        return SumFinding.ASKED

    def ask_again(self) -> None:
        """The transfer process that was asked is gone, and a new one serves."""
        self._ask(list(self.parts))

    def judge_answer(self, got: Verified) -> SumFinding | Refusal:
        """Our transfer process has looked at the pages of one route."""
        # ``Decoder.verified`` has found the ticket: one of a part that is over is forgotten.
        part = self.parts.pop(got.ticket)
        index = self._routes.pop(got.ticket)
        # Popped by answer, so that an empty ``sums`` says that every route is good.
        checked = len(part.sums.pop(index)) // SUM_BYTES
        del part.tickets[index]
        if got.why:
            self.forget_part(part)
            return Refusal(
                Code.CORRUPT,
                f"room {part.room} from {part.peer} cannot be verified: {got.why}",
                side=self._settings.name,
            )
        if got.bad_pages:
            self.forget_part(part)
            return self._corrupt(part, index, got.bad_pages, checked)
        return SumFinding.ASKED if part.sums else SumFinding.GOOD

    def forget_part(self, part: ReceivePart) -> None:
        """It is decided: no further answer about it matters."""
        # An answer may be under way: it finds no ticket then, and is dropped.
        # What was summed ahead is for nothing, where it was never asked about.
        for ticket in part.tickets.values():
            self.ahead.pop(ticket, None)
            if self.parts.pop(ticket, None) is None:
                self._out.effects.append(effects.ForgetSums(ticket))
            else:
                del self._routes[ticket]
        part.sums, part.tickets = {}, {}

    def _ticket(self, part: ReceivePart, index: int) -> int:
        """Of a route, the one that it has or a new one."""
        if index not in part.tickets:
            self._last_ticket += 1
            part.tickets[index] = self._last_ticket
        return part.tickets[index]

    def _ask(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            part, index = self.parts[ticket], self._routes[ticket]
            grant, shard_route = _grant(part, index), part.routes[index].shard_route
            self._out.effects.append(
                effects.Verify(
                    ticket=ticket,
                    component=grant.component,
                    seal=part.seals[index],
                    pages=Pages(grant.pages),
                    sums=part.sums[index],
                    shard=shard_route.peer_shard,
                    window=shard_route.window,
                )
            )

    def _told(self, part: ReceivePart) -> str:
        checked = sum(len(sums) for sums in part.sums.values()) // SUM_BYTES
        return f"{checked} of {_sent_pages(part)}"

    def _unsummed(self, part: ReceivePart, got_bytes: int, wanted_bytes: int) -> Refusal:
        mode, n_pages = part.seals[0].integrity.value, _sent_pages(part)
        return Refusal(
            Code.CORRUPT,
            f"room {part.room}: {part.peer} sent {got_bytes} bytes of page sums where "
            f"{wanted_bytes} are needed ({mode}, {n_pages} pages), so nothing of it can be "
            "verified: run the same version of kvd on both nodes, or set transfer.integrity = "
            '"off" here to take what it sends unverified',
            side=self._settings.name,
            numbers={"checksums_bytes": got_bytes, "needed_bytes": wanted_bytes},
        )

    def _corrupt(
        self, part: ReceivePart, index: int, bad_pages: tuple[int, ...], checked: int
    ) -> Refusal:
        """Name the wrong pages, in a refusal and an event."""
        seal, grant, out = part.seals[index], _grant(part, index), self._out
        route = part.routes[index]
        size = self._payload.parts[route.grant].component.page_size
        shard = f" of shard {route.shard_route.peer_shard}" if self._settings.spec.held else ""
        total, n_bad = seal.end - seal.first, len(bad_pages)
        shown = bad_pages[:SHOWN_PAGES]
        ids = np.frombuffer(grant.pages, dtype="<i4")
        pages = tuple(int(ids[logical - seal.first]) for logical in shown)
        named = ", ".join(
            f"page {page} (page {logical} of the prompt, tokens "
            f"[{logical * size}, {min((logical + 1) * size, part.prompt_tokens)}))"
            for page, logical in zip(pages, shown, strict=True)
        )
        more = f" and {n_bad - len(shown)} more" if n_bad > len(shown) else ""
        why = (
            f"room {part.room} from {part.peer}: {n_bad} of {checked} verified pages{shard} "
            f"({seal.integrity.value}, {total} were sent) are not what was sent: {named}{more}; "
            f"{ADVICE}"
        )
        out.emit(
            events.PagesCorrupt(
                part=part.id,
                room=part.room,
                peer=part.peer,
                component=grant.component,
                pages=pages,
                logical_pages=shown,
                bad_pages=n_bad,
                checked_pages=checked,
                total_pages=total,
                why=why,
            )
        )
        return Refusal(
            Code.CORRUPT,
            why,
            side=self._settings.name,
            numbers={
                "bad_pages": n_bad,
                "checked_pages": checked,
                "total_pages": total,
                "pages": " ".join(map(str, pages)),
                "logical_pages": " ".join(map(str, shown)),
                "page_size": size,
            },
        )


def _grant(part: ReceivePart, index: int) -> Grant:
    """The grant of a route; the Offer is what it said last while its pages are verified."""
    offer = part.unanswered
    assert isinstance(offer, Offer)
    return offer.grants[part.routes[index].grant]


def _hear_sums(part: ReceivePart, message: Progress) -> None:
    """What the writer says ahead of the pages of each route, behind what it has said before.

    A writer may say any number: what does not fit, or leaves some out, is not read.
    """
    if not part.attempt.as_it_comes or len(message.summed) != 2 * len(part.seals):
        return
    heard: list[tuple[int, int, bytes]] = []
    at = 0
    for index, seal in enumerate(part.seals):
        since, told = message.summed[2 * index : 2 * index + 2]
        known = part.heard.get(index, 0)
        if since > told or told > min(message.landed[index], seal.end - seal.first):
            return
        size = SUM_BYTES * chosen(seal, seal.first + since, seal.first + told).size
        if since == known < told:
            heard.append((index, told, message.checksums[at : at + size]))
        at += size
    if at != len(message.checksums):
        return
    for index, told, sums in heard:
        part.heard[index] = told
        part.unsaid[index] = part.unsaid.get(index, b"") + sums


def _sent_pages(part: ReceivePart) -> int:
    return sum(seal.end - seal.first for seal in part.seals)
