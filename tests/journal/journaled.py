"""A journal with a plain model beside it: dictionaries that are told the same.

The model knows what was proven when, and what each page was at its last store. Sums of pages are
made of what the model says is in them, so a page with another content has another sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.core.effects import NoteCached, NoteEnded, NoteFreed, NoteHeld
from kvd.journal.identity import Identity
from kvd.journal.layout import Journal, make_journal, open_journal, size_bytes
from kvd.journal.reader import FoundJournal, Reading, VerifyDepth
from kvd.types import Pages, Tokens, pack_ids, page_ids

if TYPE_CHECKING:
    from kvd.journal.writer import JournalWriter

PAGE_SIZE = 4


class Place(msgspec.Struct, frozen=True):
    """What a page holds: namespace and all tokens of its path."""

    namespace: str
    path: tuple[int, ...]


def identity(pages: int = 64, page_size: int = PAGE_SIZE, **other) -> Identity:
    return msgspec.structs.replace(Identity(b"l" * 32, pages, page_size, "n0"), **other)


def made(ours: Identity) -> tuple[bytearray, Journal]:
    buffer = bytearray(size_bytes(ours.pages, ours.page_size))
    return buffer, make_journal(buffer, ours)


def sum_of(page: int, place: Place | None) -> int:
    """What the transfer process would find in that page."""
    return hash((page, place)) & (2**64 - 1)


def packed_sums(pages: Pages, contents: dict[int, Place]) -> bytes:
    return np.array(
        [sum_of(page, contents.get(page)) for page in page_ids(pages)], dtype="<u8"
    ).tobytes()


def tokens_of(path: tuple[int, ...]) -> Tokens:
    return Tokens(pack_ids(list(path)))


def cached(
    pages: list[int], path: tuple[int, ...], *, namespace: str = "", before: int = 0, lease: int = 0
) -> NoteCached:
    """``path``: all tokens up to the last of ``pages``."""
    first = len(path) // PAGE_SIZE - len(pages)
    anchor = pages[-1] if lease else 0
    tokens = tokens_of(path[first * PAGE_SIZE :])
    return NoteCached(lease, anchor, namespace, before, first, Pages(pack_ids(pages)), tokens)


def held(lease: int, pages: list[int], *, session: int = 1, anchor: int = 0) -> NoteHeld:
    return NoteHeld(lease, session, anchor, Pages(pack_ids(pages)))


def freed(pages: list[int]) -> NoteFreed:
    return NoteFreed(Pages(pack_ids(pages)))


def ended(lease: int) -> NoteEnded:
    return NoteEnded(lease)


def prove(writer: JournalWriter, pages: list[int], contents: dict[int, Place]) -> int:
    waiting, words = writer.pending(Pages(pack_ids(pages)))
    return writer.summed(waiting, words, packed_sums(waiting, contents))


def read(
    buffer: bytearray, ours: Identity, verify: VerifyDepth = VerifyDepth.NONE, contents=None
) -> tuple[Reading, FoundJournal]:
    """Read it whole; ``contents``: what is in the pages, for the sums."""
    journal = open_journal(buffer, ours)
    assert isinstance(journal, Journal), journal
    reading = Reading(journal, verify)
    while pages := reading.to_sum():
        reading.summed(pages, packed_sums(pages, contents or {}))
    return reading, reading.found()


def n_summed(reading: Reading) -> int:
    """How many pages were summed."""
    return int(reading._is_summed.sum())


def places_in(found: FoundJournal, page_size: int = PAGE_SIZE) -> dict[int, Place]:
    """Each page of the branches, and what it is said to hold."""
    paths: list[tuple[int, ...]] = []
    places: dict[int, Place] = {}
    for branch in found.branches:
        path = paths[branch.parent] if branch.parent >= 0 else ()
        if branch.parent >= 0:
            assert found.branches[branch.parent].namespace == branch.namespace
        tokens = tuple(page_ids(Pages(branch.tokens)))
        pages = page_ids(branch.pages)
        assert len(tokens) == len(pages) * page_size > 0
        for at, page in enumerate(pages, 1):
            assert page not in places, f"page {page} occurs twice"
            places[page] = Place(branch.namespace, path + tokens[: at * page_size])
        paths.append(path + tokens)
    return places
