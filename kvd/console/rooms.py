"""The view of the handoffs: each part on this node, and for a moment those that have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.history import DELIVERED
from kvd.console.view import Field, View, client_ref, lease_ref, owner, peer_ref
from kvd.core.handoff.parts import ReceivePart
from kvd.core.inspect.words import receive_share, receive_waits_for, send_share, send_waits_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.context import Context
    from kvd.core.cache.lease import LeaseRecord
    from kvd.core.handoff.parts import SendPart
    from kvd.wire.console import Query
    from kvd.wire.events import HandoffEnded

SHOWN_S = 3.0
"""So long a handoff that has ended is still shown."""


class HandoffRow:
    """One part on this node, of either side, or its end. Plain record."""

    __slots__ = (
        *(
            "decode_prefix_len",
            "done_bytes",
            "done_pages",
            "end",
            "key",
            "lease",
            "moved_s",
            "part",
        ),
        *("peer", "posts", "prompt_tokens", "room", "session", "side", "since_s", "state"),
        *("total_bytes", "until_s"),
    )

    def __init__(self, key: str, side: str, room: int, peer: str, state: str) -> None:
        self.key = key
        self.side = side
        self.room = room
        self.peer = peer
        self.state = state
        self.part: ReceivePart | SendPart | None = None
        self.end: HandoffEnded | None = None
        self.session = 0
        self.lease: LeaseRecord | None = None
        self.prompt_tokens = 0
        self.decode_prefix_len = 0
        self.done_bytes = 0
        self.total_bytes: int | None = None
        self.done_pages: int | None = None
        """Given to the transfer process; only who sends knows, as how many posts are under way."""
        self.posts: int | None = None
        self.since_s = 0.0
        self.until_s: float | None = None
        self.moved_s: float | None = None


def _receive(context: Context, part: ReceivePart) -> HandoffRow:
    one = HandoffRow(f"receive:{part.id}", "decode", part.room, part.peer, part.state.value)
    one.part = part
    one.session, one.lease = part.session, part.lease
    one.prompt_tokens, one.decode_prefix_len = part.prompt_tokens, part.prefix_tokens
    delta_tokens = part.prompt_tokens - part.prefix_tokens
    one.done_bytes = part.moved_bytes
    one.total_bytes = part.total_bytes or context.node.leases.bytes_of(delta_tokens)
    one.since_s, one.until_s = part.since_s, part.deadline_s
    one.moved_s = context.progress.moved_s("decode", part.id)
    return one


def _send(context: Context, part: SendPart) -> HandoffRow:
    node = context.node
    one = HandoffRow(f"send:{part.id}", "prefill", part.room, part.peer, part.state.value)
    one.part = part
    one.session = part.session
    one.lease = part.engine.lease if part.engine is not None else None
    one.prompt_tokens, one.decode_prefix_len = part.prompt_tokens, part.decode_prefix_len
    delta_tokens = part.prompt_tokens - part.decode_prefix_len
    one.done_bytes = node.prefiller.posts.live_bytes(part)
    one.total_bytes = part.total_bytes or node.leases.bytes_of(delta_tokens)
    one.done_pages, one.posts = part.posted_pages, len(part.outstanding)
    one.since_s, one.until_s = part.since_s, part.deadline_s
    one.moved_s = context.progress.moved_s("prefill", part.id)
    return one


def _over(key: str, end: HandoffEnded) -> HandoffRow:
    """Of one that failed nobody knows any more how much it would have been."""
    is_delivered = end.outcome in DELIVERED
    state = "delivered" if is_delivered else "failed"
    one = HandoffRow(key, end.side, end.room, end.peer, state)
    one.end = end
    one.prompt_tokens, one.decode_prefix_len = end.prompt_tokens, end.decode_prefix_len
    one.done_bytes = end.moved_bytes
    one.total_bytes = end.moved_bytes if is_delivered else None
    one.since_s = end.at_s - end.took_s
    return one


def _rooms(context: Context, _: Query) -> Iterator[HandoffRow]:
    """Every part that has not ended, both sides, the oldest first; then what has ended lately.

    A delivered one is a lease like others. Under load most have been delivered: those come last,
    the latest first, so that what is under way and what has failed is at the top.
    """
    context.progress.look(context)
    shown = set()
    prefiller = context.node.prefiller
    receives, sends = context.node.decoder.parts, prefiller.rooms.live()
    alive = [
        *[_receive(context, part) for part in receives.values()],
        *[_send(context, part) for part in sends],
        *[_send(context, part) for part in prefiller.settled_sends.settled.values()],
    ]
    for one in sorted(alive, key=lambda one: one.since_s):
        shown.add(one.key)
        yield one
    over = []
    for end in reversed(context.recent.ended):
        if context.now_s - end.at_s > SHOWN_S:
            break
        key = f"{'receive' if end.side == 'decode' else 'send'}:{end.part}"
        if key not in shown:
            shown.add(key)
            over.append(_over(key, end))
    yield from sorted(over, key=lambda one: one.state == "delivered")


def _waits_for(context: Context, one: HandoffRow) -> str:
    """What would take it further; of one that failed, why."""
    if one.end is not None:
        return f"{one.end.code}: {one.end.reason}" if one.end.code else ""
    if isinstance(one.part, ReceivePart):
        return receive_waits_for(context.node.decoder, one.part)
    return send_waits_for(one.part) if one.part is not None else ""


def _share(context: Context, one: HandoffRow) -> str:
    if isinstance(one.part, ReceivePart):
        return receive_share(context.node.settings, one.part)
    return send_share(context.node.prefiller, one.part) if one.part is not None else ""


def _total_pages(context: Context, one: HandoffRow) -> int:
    return context.node.leases.pages_for(one.prompt_tokens - one.decode_prefix_len)


ROOMS: View[HandoffRow] = View(
    "rooms",
    (
        Field("room", "count", lambda _, one: one.room),
        Field("side", "text", lambda _, one: one.side),
        Field("state", "state", lambda _, one: one.state),
        Field("peer", "ref", lambda _, one: peer_ref(one.peer)),
        Field("owner", "text", lambda context, one: owner(context, one.session)),
        Field("client", "ref", lambda _, one: client_ref(one.session)),
        Field("lease", "ref", lambda _, one: lease_ref(one.lease)),
        Field("prompt_tokens", "tokens", lambda _, one: one.prompt_tokens),
        Field(
            "decode_prefix_len",
            "tokens",
            lambda _, one: one.decode_prefix_len,
            "cached on the decode side: not sent",
        ),
        Field("done_bytes", "bytes", lambda _, one: one.done_bytes),
        Field("total_bytes", "bytes", lambda _, one: one.total_bytes),
        Field(
            "done_pages", "pages", lambda _, one: one.done_pages, "given to the transfer process"
        ),
        Field("total_pages", "pages", _total_pages),
        Field("posts", "count", lambda _, one: one.posts, "under way"),
        Field("path", "text", lambda context, _: context.node.transport, "what carries the bytes"),
        Field("since", "since", lambda _, one: one.since_s),
        Field("until", "until", lambda _, one: one.until_s, "its deadline"),
        Field(
            "moved",
            "since",
            lambda _, one: one.moved_s,
            "last byte or change of state, as far as was seen",
        ),
        Field("ended", "since", lambda _, one: one.end.at_s if one.end is not None else None),
        Field("waiting_for", "text", _waits_for, "or why it failed"),
        Field("share", "text", _share, "of one of several sources: which part of the prompt"),
    ),
    objects=_rooms,
    key=lambda one: one.key,
)
