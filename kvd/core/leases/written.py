"""How far an engine says that the KV of a lease is written: nothing beyond it is ever shared.

An engine writes a prompt in pieces and may fail, or die, between two of them. So it says how far it
is. Where several processes each write a part of every page, each says so for its part, and the
least counts::

    rank 0   |############ 64          |
    rank 1   |######## 48              |
             0       ^ 48: whole pages below it may join the tree

Where nothing was said a commit is the word of the engine about all tokens that the lease knows. Of
one that keeps KV in blocks of its own it never is (``SessionTable.keeps_blocks``): what was ordered
to be saved may not have begun, so only what is said counts, from the start.
From the first word on (``written``, a send's ``advance`` or ``finish``, a ``hand_over``, an
``upto_tokens`` of a commit) a commit without a number means what was said and no more, and so does
the end of the lease, whoever ends it. KV that is written when an event of a device comes is a word
for the commit of an engine, which has seen the event by then; the end of a lease has not. A post
that waited for the event and is done has seen it too: that KV counts as written from then on.

What was said of a lease is said to every send of its prompt: each posts as far as the least of the
ranks is, behind the events that this least has named (``word_for_sends``).

Invariant: where something was said, no page of the lease joins the tree beyond the least of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.wire.client import SayWritten

MAX_RANKS = 1024
"""Processes that write one lease; a session has 16 unless it is configured otherwise."""


def why_unwritten(lease: LeaseRecord, upto_tokens: int, rank: int | None = None) -> Refusal | None:
    """Why KV below ``upto_tokens`` is not written, whoever says so: a save of some is under way."""
    if lease.copying is None:
        return None
    first = lease.copying.unwritten_from(rank)
    if first is None or upto_tokens <= first:
        return None
    return Refusal(
        Code.WRONG_STATE,
        f"KV of {upto_tokens} tokens of lease {lease.id} is not written: a save from token {first} "
        "on is under way; say nothing of what is saved, it counts when the save is over",
        numbers={"upto_tokens": upto_tokens, "unwritten_from": first},
    )


def say_written(lease: LeaseRecord, message: SayWritten, room_tokens: int) -> Refusal | None:
    """One rank has written so far; or why that cannot be, and nothing was changed.

    Args:
        lease: whose pages they are.
        message: who says so, and how far.
        room_tokens: tokens that its pages have room for, known or not.
    """
    upto, rank, ranks = message.upto_tokens, message.rank, message.ranks
    refusal = _bad_word(lease, message, room_tokens) or why_unwritten(lease, upto, rank)
    if refusal is not None:
        return refusal
    said = lease.said or (0,)
    if len(said) == 1:  # what one process said for all of them holds for each
        said *= ranks
    if len(said) != ranks:
        return _bad(
            f"lease {lease.id} is written by {len(said)} processes, and one of {ranks} says how "
            "far it is: name the same number of ranks each time",
            ranks=ranks,
            said_ranks=len(said),
        )
    before = said[rank]
    # Less without an event than with one is no step back: that much is certain already.
    if message.after:
        before = max(before, _awaited(lease, ranks)[rank])
    if upto < before:
        return _bad(
            f"rank {rank} says that it has written {upto} tokens of lease {lease.id}, and said "
            f"{before} before: what is written stays written",
            upto_tokens=upto,
            written_tokens=before,
        )
    if message.after:
        lease.said = said
        _await(lease, rank, upto, message.after)
        return None
    lease.said = (*said[:rank], upto, *said[rank + 1 :])
    lease.written_tokens = max(lease.written_tokens, min(lease.said))
    return None


def _bad_word(lease: LeaseRecord, message: SayWritten, room_tokens: int) -> Refusal | None:
    """Why nobody could have written that."""
    upto, rank, ranks = message.upto_tokens, message.rank, message.ranks
    if not 0 <= rank < ranks <= MAX_RANKS:
        return _bad(
            f"rank {rank} of {ranks} on lease {lease.id}: ranks count from 0, and there are at "
            f"most {MAX_RANKS}",
            rank=rank,
            ranks=ranks,
        )
    if not 0 <= upto <= room_tokens:
        return _bad(
            f"lease {lease.id} holds pages for {room_tokens} tokens, {upto} are said to be written",
            upto_tokens=upto,
            room_tokens=room_tokens,
        )
    return None


def say_advanced(lease: LeaseRecord, upto_tokens: int, after: bytes = b"") -> None:
    """A send of its prompt was told so, for every rank; with ``after`` once that event has come."""
    if lease.is_arena:  # it has many prompts: what is said of one is that send's alone
        return
    said = lease.said or (0,)
    if after:
        # Said from now on, however little: a commit without a number must not mean all that is
        # known, while the event has not come.
        lease.said = said
        for rank in range(len(said)):
            _await(lease, rank, upto_tokens, after)
        return
    lease.said = tuple([max(upto, upto_tokens) for upto in said])
    lease.written_tokens = max(lease.written_tokens, min(lease.said))


def _awaited(lease: LeaseRecord, ranks: int) -> tuple[int, ...]:
    """How far each rank is once its event has come; what one named for all holds for each."""
    awaited = lease.awaited or (0,)
    return awaited * ranks if len(awaited) == 1 else awaited


def _await(lease: LeaseRecord, rank: int, upto_tokens: int, after: bytes) -> None:
    """That rank has written so far once this event has come."""
    ranks = len(lease.said)
    awaited, events = _awaited(lease, ranks), lease.events or (b"",)
    if len(events) == 1:
        events *= ranks
    # The later event of one stream comes behind the earlier one: it stands for both.
    lease.awaited = (*awaited[:rank], max(awaited[rank], upto_tokens), *awaited[rank + 1 :])
    lease.events = (*events[:rank], after, *events[rank + 1 :])


def tokens_of_ranks(lease: LeaseRecord) -> tuple[int, ...]:
    """By rank, how far it is by its word, once the events that it has named have come."""
    awaited = _awaited(lease, len(lease.said))
    return tuple(map(max, lease.said, awaited))


def word_for_sends(
    lease: LeaseRecord, prompt_tokens: int, *, with_cached: bool = False
) -> tuple[int, bytes]:
    """How far a send of its prompt may read its pages, and behind which events, one by one.

    ``with_cached``: also where nothing was said yet, what was cached when the lease was opened.
    """
    if not lease.said:
        return (min(prompt_tokens, lease.written_tokens) if with_cached else 0), b""
    upto = min(prompt_tokens, *tokens_of_ranks(lease))
    if not lease.events:
        return upto, b""
    events = lease.events if len(lease.events) > 1 else lease.events * len(lease.said)
    # Only of ranks that are so far by their event alone; ranks may have named one between them.
    needed = [event for event, said in zip(events, lease.said, strict=True) if said < upto]
    return upto, b"".join(dict.fromkeys(needed))


def said_tokens(lease: LeaseRecord) -> int:
    """How far its engine is by its own word, where it has said anything."""
    return max(lease.written_tokens, min(tokens_of_ranks(lease), default=0))


def tokens_to_commit(
    lease: LeaseRecord, known_tokens: int, upto_tokens: int | None
) -> int | Refusal:
    """The end of what a commit may share of ``known_tokens``, where only what is said counts.

    A number in it is a word as well.
    """
    if upto_tokens is None:
        # What an event was awaited for counts here, because the engine that commits has seen it
        # come.
        return min(known_tokens, said_tokens(lease))
    if not 0 <= upto_tokens <= known_tokens:
        return _bad(
            f"commit of lease {lease.id} up to token {upto_tokens}, it knows {known_tokens}",
            upto_tokens=upto_tokens,
            tokens=known_tokens,
        )
    refusal = why_unwritten(lease, upto_tokens)
    if refusal is not None:
        return refusal
    least = min(lease.said, default=0)
    # One rank speaks here, and its pages are written in parts by the others too.
    if len(lease.said) > 1 and upto_tokens > least:
        return _bad(
            f"commit of lease {lease.id} up to token {upto_tokens}, of its {len(lease.said)} ranks "
            f"the last has written {least}",
            upto_tokens=upto_tokens,
            written_tokens=least,
        )
    # A lower number is no word about what is written: it only shares less this time.
    if upto_tokens >= least:
        lease.said = lease.said if len(lease.said) > 1 else (upto_tokens,)
    return upto_tokens


def _bad(message: str, **numbers: int) -> Refusal:
    return Refusal(Code.BAD_REQUEST, message, numbers=dict(numbers))
