"""Sentences about the end of a part: an aux that is too long, a part that took too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core.cache.namespaces import epoch_in, name_in, quoted
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.peers.peer import LEAVING, lost_because
from kvd.errors import Code, Refusal
from kvd.types import MAX_ROOM, Tokens, amount, count, short
from kvd.wire.peer import ReceiveOutcome, Settled

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart, SendPart
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings
    from kvd.wire import client


def bounded(message: Settled, mine: Settings) -> Settled:
    """The message, or a failure in its place where its aux is longer than we take.

    Also where it says what the decode side alone can know: else we would repeat it as our word.
    """
    if message.outcome in {ReceiveOutcome.COMMITTED, ReceiveOutcome.CORRUPT}:
        why = f"the prefill side ended it as {message.outcome.value!r}, which it cannot know"
        refusal = Refusal(Code.BAD_REQUEST, why, side=mine.name)
        return msgspec.structs.replace(
            message, outcome=ReceiveOutcome.FAILED, reason=refusal, aux=b""
        )
    n_bytes, limit = len(message.aux), mine.max_aux_bytes
    if n_bytes <= limit:
        return message
    refusal = Refusal(
        Code.TOO_LARGE,
        f"the prefill side sent aux of {amount(n_bytes)}, {amount(n_bytes - limit)} more than "
        f"{mine.name} takes: make "
        "limits.max_aux_bytes equal on both",
        side=mine.name,
        numbers={"bytes": n_bytes, "limit": limit},
    )
    return msgspec.structs.replace(message, outcome=ReceiveOutcome.FAILED, reason=refusal, aux=b"")


def bad_room(room: int, side: str) -> Refusal | None:
    """Why that number is no room."""
    if 1 <= room <= MAX_ROOM:
        return None
    return Refusal(
        Code.BAD_ROOM,
        f"room {room} is not in 1..{MAX_ROOM} (0 means no room to every router)",
        side=side,
        numbers={"room": str(room)},
    )


def unknown_handoff(kind: str, part_id: int, side: str) -> Refusal:
    """What is said of a ``kind`` (receive, send) that this session has not."""
    return Refusal(
        Code.UNKNOWN_HANDOFF,
        f"this session has no open {kind} {part_id}: it ended, or never was its own",
        side=side,
        numbers={kind: part_id},
    )


def long_aux(part: SendPart, n_bytes: int, peer: Peer | None, mine: Settings) -> Refusal | None:
    """Why an aux could not be delivered: our own limit, or that of a known peer.

    Where another source sends the aux, this one stays here.
    """
    # 0 is a peer that does not say, or none that is known yet: then our own limit is the only one.
    theirs = peer.max_aux_bytes if peer is not None else 0
    limit = min(mine.max_aux_bytes, theirs) if theirs else mine.max_aux_bytes
    if n_bytes <= limit or not part.share.is_authoritative:
        return None
    whose = f"of {part.peer}" if limit < mine.max_aux_bytes else "here"
    return Refusal(
        Code.TOO_LARGE,
        f"aux of {amount(n_bytes)}, {amount(n_bytes - limit)} above the limit {whose} "
        "(limits.max_aux_bytes)",
        side=mine.name,
        numbers={"bytes": n_bytes, "limit": limit},
    )


def other_tokens(lease: LeaseRecord, tokens: Tokens, namespace: str, side: str) -> Refusal:
    """The peer would cache KV under a prompt that it does not belong to."""
    epoch, lease_epoch = epoch_in(namespace), epoch_in(lease.namespace)
    if lease_epoch != epoch and name_in(lease.namespace) == name_in(namespace):
        held = f"which began in epoch {lease_epoch}: open another and compute it again"
    else:
        name = quoted(lease.namespace)
        held = f"which holds other tokens ({count(lease.tokens)} in namespace {name})"
    return Refusal(
        Code.PROMPT_MISMATCH,
        f"send of {count(tokens)} tokens in namespace {quoted(namespace)} on lease {lease.id}, "
        f"{held}",
        side=side,
        numbers={"lease_epoch": lease_epoch, "epoch": epoch},
    )


def asked_again(message: client.ReceiveRequest | client.HandOver, side: str) -> Refusal:
    """A call whose request id has come again: the later call is the one that is waited for."""
    why = f"request {message.request_id} was asked for again (call {message.call})"
    return Refusal(Code.CANCELLED, why, side=side)


def rank_gone(why: str, rank: int, upto_tokens: int, prompt_tokens: int, what: str) -> Refusal:
    """Nobody will write what that rank has not; ``what`` needs it."""
    return Refusal(
        Code.CLIENT_GONE,
        f"{why}: it had written {upto_tokens} of the {prompt_tokens} tokens that {what} has to "
        "send; write them again under a new lease",
        numbers={"rank": rank, "upto_tokens": upto_tokens, "prompt_tokens": prompt_tokens},
    )


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


def reader_restarted(incarnation: str, mine: Settings) -> Refusal:
    """The decode daemon is another process by now."""
    return Refusal(
        Code.PEER_LOST,
        f"the decode daemon restarted (incarnation {short(incarnation)} is gone)",
        side=mine.name,
    )


def reader_silent(peer: Peer, now_s: float, mine: Settings) -> Refusal:
    """The decode daemon is lost."""
    return Refusal(Code.PEER_LOST, lost_because(peer, now_s), side=mine.name)


def never_delivered(part: SendPart, mine: Settings) -> Refusal:
    """The peer says that it has committed what was never sent to its end."""
    return Refusal(
        Code.WRONG_STATE,
        f"handoff {part.handoff} of {part.peer} ended here as {part.outcome.value}: nothing of it "
        "was delivered, so nothing can be committed",
        side=mine.name,
        numbers={"handoff": part.handoff},
    )


def not_its_own(part: ReceivePart, peer: Peer, what: str, mine: Settings) -> Refusal:
    """A peer speaks of a handoff that was offered to another one."""
    return Refusal(
        Code.UNKNOWN_HANDOFF,
        f"{what} of {peer.name} for handoff {part.handoff}, which was offered to {part.peer}",
        side=mine.name,
        numbers={"handoff": part.handoff},
    )


def of_source(part: ReceivePart, refusal: Refusal) -> Refusal:
    """The refusal, naming the source that it is about where there are several."""
    share = part.share
    if share.parts == 1:
        return refusal
    return msgspec.structs.replace(
        refusal,
        message=f"{part.peer} (source {share.part + 1} of {share.parts}): {refusal.message}",
        numbers={**refusal.numbers, "source": part.peer},
    )


def begun_elsewhere(part: ReceivePart, begins: int, mine: Settings) -> Refusal:
    """The prefill side sends from another token on than the Offer says."""
    prefix = part.prefix_tokens
    return Refusal(
        Code.BAD_PREFIX,
        f"room {part.room}: {part.peer} begins to send at token {begins}, "
        f"decode_prefix_len={prefix} was offered: run the same version of kvd on both nodes",
        side=mine.name,
        numbers={"offered": prefix, "accepted": begins},
    )


def took_too_long(attempt: ReceiveAttempt, now_s: float, mine: Settings) -> Refusal:
    """The receive passed its deadline: what it waited for, of several sources the first late."""
    # A source that has delivered is not to be blamed for another that has not.
    late = [part for part in attempt.parts if part.state is not Decode.VERIFYING]
    part = late[0] if late else attempt.parts[0]
    return of_source(part, _too_long(part, now_s, mine))


def _too_long(part: ReceivePart, now_s: float, mine: Settings) -> Refusal:
    waited_s = now_s - part.since_s
    doing = "verifying them" if part.sums else "copying them to the device buffer"
    what = {
        Decode.OFFERED: "the prefill side never accepted the offer: has its engine called send() "
        "for this room?",
        Decode.VERIFYING: f"every byte had landed, and our transfer process is {doing}",
    }.get(part.state, f"{amount(part.moved_bytes)} had landed")
    return Refusal(
        Code.DEADLINE,
        f"room {part.room} from {part.peer} took longer than {waited_s:.1f} s: {what}",
        side=mine.name,
        numbers={"waited_s": round(waited_s, 3), "moved_bytes": part.moved_bytes},
    )


def _not_offered(part: SendPart) -> str:
    awaited = part.awaited
    who = awaited.destination or "no decode side"
    what = f"{who} has not offered" if awaited.destination else f"{who} offered"
    turned_away = f" that fit: {awaited.turned_away}" if awaited.turned_away else " for it"
    return f"{what} pages{turned_away}"


def too_late(part: SendPart, now_s: float, mine: Settings) -> Refusal:
    """The send passed its deadline: what it waited for."""
    waited_s = now_s - part.since_s
    if part.state is Prefill.AWAIT_OFFER and not part.session:
        return Refusal(
            Code.DEADLINE,
            f"{mine.name} kept what is pulled in room {part.room} for {waited_s:.1f} s, and "
            f"{part.awaited.destination} offered no pages for it (pull.offer_s="
            f"{mine.pull_offer_s:g} there): compute it, or pull it again",
            side=mine.name,
            numbers={"waited_s": round(waited_s, 3), "offer_s": mine.pull_offer_s},
        )
    what = {
        Prefill.AWAIT_ENGINE: "no engine here called send() for it",
        Prefill.AWAIT_OFFER: _not_offered(part),
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
