"""The view of the admission queue: who waits for room, what is missing, and who has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.view import Field, View, client_ref, owner
from kvd.core.inspect.snapshot import kind_of, lacks_pages, why_waits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.context import Context
    from kvd.core.leases.admission import Waiter
    from kvd.wire.console import Cell, Query


class WaitingRow:
    """One request in the queue, and how many come before it."""

    __slots__ = ("ahead", "receive", "waiter")

    def __init__(self, waiter: Waiter, ahead: int, receive: int) -> None:
        self.waiter = waiter
        self.ahead = ahead
        self.receive = receive
        """The part that it would become; 0 for a lease."""


def turns(context: Context) -> Iterator[WaitingRow]:
    """The queue in its order; one look at the receives."""
    queue = context.node.admission.queue
    if not queue:
        return
    parts = context.node.decoder.parts.values()
    receives = {part.waiter.number: part.id for part in parts if part.waiter is not None}
    ahead = 0
    for waiter in queue:
        yield WaitingRow(waiter, ahead, receives.get(waiter.number, 0))
        ahead += waiter.asker.blocked() is None


def _turns(context: Context, _: Query) -> Iterator[WaitingRow]:
    yield from turns(context)


def _what(_: Context, one: WaitingRow) -> Cell:
    if one.waiter.claim.resumes:
        return f"lease:{one.waiter.claim.resumes}"
    return f"receive:{one.receive}" if one.receive else None


def _held_by(context: Context, one: WaitingRow) -> Cell:
    return context.biggest.of(context, one.waiter.budget) if lacks_pages(one.waiter) else ()


WAITING: View[WaitingRow] = View(
    "waiting",
    (
        Field("place", "count", lambda _, one: one.ahead + 1, "in the queue"),
        Field("kind", "text", lambda _, one: kind_of(one.waiter)),
        Field("what", "ref", _what, "the handoff, or the lease that comes back"),
        Field("owner", "text", lambda context, one: owner(context, one.waiter.claim.session)),
        Field("client", "ref", lambda _, one: client_ref(one.waiter.claim.session)),
        Field("room", "count", lambda _, one: one.waiter.claim.room or None),
        Field("priority", "count", lambda _, one: one.waiter.claim.priority),
        Field("since", "since", lambda _, one: one.waiter.since_s),
        Field("until", "until", lambda _, one: one.waiter.deadline_s, "it gives up then"),
        Field(
            "budget",
            "text",
            lambda context, one: one.waiter.budget or context.node.leases.pool.name,
            "the component that is short",
        ),
        Field("needed_pages", "pages", lambda _, one: one.waiter.needed_pages),
        Field("missing_pages", "pages", lambda _, one: one.waiter.missing_pages),
        Field("ahead", "count", lambda _, one: one.ahead, "requests that come first"),
        Field("overtaken", "count", lambda _, one: one.waiter.overtaken, "how many went past it"),
        Field(
            "why",
            "text",
            lambda context, one: why_waits(context.node.admission, one.waiter, one.ahead),
        ),
        Field("held_by", "holders", _held_by, "who has the most of what is short"),
    ),
    objects=_turns,
    key=lambda one: f"waiting:{one.waiter.number}",
)
