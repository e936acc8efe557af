"""Sentences about the end of a part: an aux that is too long, a part that took too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core.peer_drain import LEAVING, lost_because
from kvd.core.tables import Decode, Prefill
from kvd.errors import Code, Refusal
from kvd.types import short
from kvd.wire.peer import Outcome, Settled

if TYPE_CHECKING:
    from kvd.core.parts import DecodePart, PrefillPart
    from kvd.core.peer import Peer
    from kvd.core.settings import Settings


def bounded(message: Settled, mine: Settings) -> Settled:
    """The message, or a failure in its place where its aux is longer than we take."""
    n_bytes, limit = len(message.aux), mine.max_aux_bytes
    if n_bytes <= limit:
        return message
    refusal = Refusal(
        Code.TOO_LARGE,
        f"the prefill side sent aux of {n_bytes} bytes, {mine.name} takes {limit} at most: make "
        "limits.max_aux_bytes equal on both",
        side=mine.name,
        numbers={"bytes": n_bytes, "limit": limit},
    )
    return msgspec.structs.replace(message, outcome=Outcome.FAILED, reason=refusal, aux=b"")


def writer_restarted(incarnation: str, mine: Settings) -> Refusal:
    """The prefill daemon is another process by now."""
    return Refusal(
        Code.PEER_LOST,
        f"the prefill daemon restarted ({short(incarnation)} is gone): send it again",
        side=mine.name,
    )


def writer_silent(peer: Peer, now_s: float, mine: Settings) -> Refusal:
    """The prefill daemon is lost: it may still write."""
    silent_s = now_s - peer.heard_s
    limit = "" if peer.drain.state == LEAVING else f" (limit {mine.lost_s:.1f} s)"
    return Refusal(
        Code.PEER_LOST,
        f"{lost_because(peer, now_s)}{limit}: the pages stay in quarantine until it settles",
        side=mine.name,
        numbers={"silent_s": round(silent_s, 3)},
    )


def took_too_long(part: DecodePart, now_s: float, mine: Settings) -> Refusal:
    """The receive passed its deadline: what it waited for."""
    waited_s = now_s - part.since_s
    doing = "verifying them" if part.sums else "copying them to the device buffer"
    what = {
        Decode.OFFERED: "the prefill side never accepted the offer: has its engine called send() "
        "for this room?",
        Decode.VERIFYING: f"every byte had landed, and our transfer process is {doing}",
    }.get(part.state, f"{part.moved_bytes} bytes had landed")
    return Refusal(
        Code.DEADLINE,
        f"room {part.room} from {part.peer} took longer than {waited_s:.1f} s: {what}",
        side=mine.name,
        numbers={"waited_s": round(waited_s, 3), "moved_bytes": part.moved_bytes},
    )


def too_late(part: PrefillPart, now_s: float, mine: Settings) -> Refusal:
    """The send passed its deadline: what it waited for."""
    waited_s = now_s - part.since_s
    what = {
        Prefill.AWAIT_ENGINE: "no engine here called send() for it",
        Prefill.AWAIT_OFFER: "no decode side offered pages for it",
    }.get(part.state, f"written to token {part.cursor_tokens} of {part.prompt_tokens}")
    longest_s = mine.max_deadline_s
    cut = ""
    if part.deadline_s - part.since_s >= longest_s:
        cut = f" (the longest deadline here: admission.max_deadline_s={longest_s:g})"
    return Refusal(
        Code.DEADLINE,
        f"room {part.room} was open for {waited_s:.1f} s{cut}: {what}",
        side=mine.name,
        numbers={"waited_s": round(waited_s, 3)},
    )
