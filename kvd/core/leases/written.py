"""How far an engine says that the KV of a lease is written: nothing beyond it is ever shared.

An engine writes a prompt in pieces and may fail, or die, between two of them. So it says how far it
is. Where several processes each write a part of every page, each says so for its part, and the
least counts::

    rank 0   |############ 64          |
    rank 1   |######## 48              |
             0       ^ 48: whole pages below it may join the tree

Where nothing was said a commit is the word of the engine about all tokens that the lease knows.
From the first word on (``written``, a send's ``advance`` or ``finish``, a ``hand_over``, an
``upto_tokens`` of a commit) a commit without a number means what was said and no more, and so does
the end of the lease, whoever ends it. KV that is written when an event of a device comes is a word
for the commit of an engine, which has seen the event by then; the end of a lease has not.

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


def say_written(lease: LeaseRecord, message: SayWritten, room_tokens: int) -> Refusal | None:
    """One rank has written so far; or why that cannot be, and nothing was changed.

    Args:
        lease: whose pages they are.
        message: who says so, and how far.
        room_tokens: tokens that its pages have room for, known or not.
    """
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
    if upto < said[rank]:
        return _bad(
            f"rank {rank} says that it has written {upto} tokens of lease {lease.id}, and said "
            f"{said[rank]} before: what is written stays written",
            upto_tokens=upto,
            written_tokens=said[rank],
        )
    lease.said = (*said[:rank], upto, *said[rank + 1 :])
    lease.written_tokens = max(lease.written_tokens, min(lease.said))
    return None


def say_advanced(lease: LeaseRecord, upto_tokens: int, *, is_awaited: bool) -> None:
    """A send of its prompt was told so, for every rank; ``is_awaited``: once an event has come."""
    said = lease.said or (0,)
    if is_awaited:
        # Said from now on, however little: a commit without a number must not mean all that is
        # known, while the event has not come.
        lease.said = said
        lease.awaited_tokens = max(lease.awaited_tokens, upto_tokens)
        return
    lease.said = tuple([max(one, upto_tokens) for one in said])
    lease.written_tokens = max(lease.written_tokens, min(lease.said))


def said_tokens(lease: LeaseRecord) -> int:
    """How far its engine is by its own word, where it has said anything."""
    return max(lease.written_tokens, lease.awaited_tokens)


def tokens_to_commit(
    lease: LeaseRecord, known_tokens: int, upto_tokens: int | None
) -> int | Refusal:
    """The end of what a commit may share of ``known_tokens``; a number in it is a word as well."""
    if upto_tokens is None:
        # What an event was awaited for counts here, because the engine that commits has seen it
        # come.
        return min(known_tokens, said_tokens(lease)) if lease.said else known_tokens
    if not 0 <= upto_tokens <= known_tokens:
        return _bad(
            f"commit of lease {lease.id} up to token {upto_tokens}, it knows {known_tokens}",
            upto_tokens=upto_tokens,
            tokens=known_tokens,
        )
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
