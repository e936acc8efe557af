"""Which engines there are: their tokens, names and processes, a slot each.

    slot   session, stored last, 0 when it is over | check | token | length, flag | name | processes
    process   when it started | its pid, with a proof of both

A process is known by its pid and by when it started, in clock ticks since boot, so that a later one
with the same pid is not taken for it. A pid of 0 is not known: nobody can prove such a one dead.

The flag is set where KV of the engine is in blocks of its own first (``KeepsBlocks``): which of its
processes had said so, and whether that one comes back, does not matter then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import xxhash
from typing_extensions import override

from kvd.journal.checked_words import WORD_BYTES, sealed, unsealed
from kvd.journal.layout import ENGINE_BYTES, ENGINE_SLOTS, LAST_SESSION, NAME_BYTES, PROCESSES

if TYPE_CHECKING:
    from kvd.journal.layout import Journal, Store

_WORDS: Final = ENGINE_BYTES // WORD_BYTES
_TOKEN_AT: Final = 2 * WORD_BYTES
_LENGTH: Final = 4
_KEEPS_BLOCKS: Final = 1 << 32
"""Beside the length, which is shorter: both are stored at once."""
_NAME_AT: Final = 5 * WORD_BYTES
_PROCESSES: Final = 5 + NAME_BYTES // WORD_BYTES
TOKEN_BYTES: Final = 16


class Process(msgspec.Struct, frozen=True):
    """A process of an engine; ``start_ticks`` tells it from a later one with the same number.

    They are field 22 of ``/proc/PID/stat``. A ``pid`` of 0 is one that cannot be seen from
    here; ``start_ticks`` of 0 are not known.
    """

    pid: int
    start_ticks: int = 0


class EngineRecord(msgspec.Struct, frozen=True):
    """A session as it was noted."""

    session: int
    token: bytes
    name: str
    processes: tuple[Process, ...]
    keeps_blocks: bool = False


class SessionNotes:
    """Whoever writes down who is here, for the daemon after this one; this one writes nothing."""

    def session_opened(self, session: int, token: bytes, name: str, process: Process) -> None:
        """A process opened the session; ``token``, of 16 bytes, is what it proves that by."""

    def session_joined(self, session: int, process: Process) -> None:
        """A process of it that was not written down yet."""

    def session_keeps_blocks(self, session: int) -> None:
        """Of its leases only what is said or saved is written."""

    def process_left(self, session: int, pid: int) -> None:
        """A process of it is dead, or maps the pool no more; others are of it."""

    def session_ended(self, session: int) -> None:
        """Its last process is gone."""


NO_NOTES: Final = SessionNotes()


def _check(session: int, token: bytes, name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(session.to_bytes(WORD_BYTES, "little") + token + name)


def read_engines(journal: Journal) -> dict[int, EngineRecord]:
    """The engines by slot, without those that are damaged."""
    words, whole = journal.engines, journal.whole
    found: dict[int, EngineRecord] = {}
    for slot in np.flatnonzero(np.asarray(words)[::_WORDS]).tolist():
        at, start = slot * _WORDS, journal.sizes.engines_at + slot * ENGINE_BYTES
        session, said = words[at], words[at + _LENGTH]
        length = min(said % _KEEPS_BLOCKS, NAME_BYTES)
        token = bytes(whole[start + _TOKEN_AT : start + _TOKEN_AT + TOKEN_BYTES])
        name = bytes(whole[start + _NAME_AT : start + _NAME_AT + length])
        # Torn: who cannot prove that it is it must not be given another one's leases.
        if words[at + 1] != _check(session, token, name):
            continue
        processes = []
        for index in range(PROCESSES):
            start_ticks, word = words[at + _PROCESSES + 2 * index :][:2].tolist()
            pid = unsealed(word, session ^ start_ticks) if word else None
            if pid is not None:
                processes.append(Process(pid, start_ticks))
        found[slot] = EngineRecord(
            session=session,
            token=token,
            name=name.decode(errors="replace"),
            processes=tuple(processes),
            keeps_blocks=bool(said & _KEEPS_BLOCKS),
        )
    return found


class EngineRecords(SessionNotes):
    """Who writes the slots of engines."""

    def __init__(self, journal: Journal, store: Store, known: dict[int, EngineRecord]) -> None:
        self._journal = journal
        self._words = journal.engines
        self._whole = journal.whole
        self._base = journal.sizes.engines_at
        self._store = store
        self._last_session = journal.counter(LAST_SESSION)
        self.slots = {engine.session: slot for slot, engine in known.items()}
        self._free = [slot for slot in range(ENGINE_SLOTS) if slot not in known][::-1]

    @override
    def session_opened(self, session: int, token: bytes, name: str, process: Process) -> None:
        if session > self._last_session:
            self._last_session = session
            self._store(self._journal.head, LAST_SESSION, sealed(session, LAST_SESSION))
        # No slot: after a restart nobody knows of it, and what it holds is kept as unproven.
        if session in self.slots or not self._free:
            return
        slot = self.slots[session] = self._free.pop()
        # Cut at a character: half of one would be another name when it is read.
        said = name.encode()[:NAME_BYTES].decode(errors="ignore").encode()
        store, words, at = self._store, self._words, slot * _WORDS
        start = self._base + slot * ENGINE_BYTES
        for index in range(PROCESSES):
            # The slot may have been another's: a process of that one must not be taken for one of
            # this.
            store(words, at + _PROCESSES + 2 * index + 1, 0)
        store(self._whole, slice(start + _TOKEN_AT, start + _TOKEN_AT + TOKEN_BYTES), token)
        store(self._whole, slice(start + _NAME_AT, start + _NAME_AT + len(said)), said)
        store(words, at + _LENGTH, len(said))
        store(words, at + 1, _check(session, token, said))
        self._enter(slot, session, process)
        # Last: a slot without a session is empty, whatever else stands in it.
        store(words, at, session)

    @override
    def session_joined(self, session: int, process: Process) -> None:
        slot = self.slots.get(session)
        if slot is not None:
            self._enter(slot, session, process)

    @override
    def session_keeps_blocks(self, session: int) -> None:
        slot = self.slots.get(session)
        if slot is not None:
            at = slot * _WORDS + _LENGTH
            self._store(self._words, at, self._words[at] | _KEEPS_BLOCKS)

    @override
    def process_left(self, session: int, pid: int) -> None:
        slot = self.slots.get(session)
        for at in [] if slot is None else self._places(slot):
            start_ticks, word = self._words[at : at + 2].tolist()
            # By the proof too: a place that was torn names nobody.
            if word and unsealed(word, session ^ start_ticks) == pid:
                self._store(self._words, at + 1, 0)

    @override
    def session_ended(self, session: int) -> None:
        slot = self.slots.pop(session, None)
        if slot is not None:
            self._store(self._words, slot * _WORDS, 0)
            self._free.append(slot)

    def drop_but(self, known: dict[int, EngineRecord]) -> None:
        """Clear every slot but these."""
        for slot in np.flatnonzero(np.asarray(self._words)[::_WORDS]).tolist():
            if slot not in known:
                self._store(self._words, slot * _WORDS, 0)

    def _enter(self, slot: int, session: int, process: Process) -> None:
        places = self._places(slot)
        proof = sealed(process.pid, session ^ process.start_ticks)
        if process.pid and any(self._words[place + 1] == proof for place in places):
            return  # it has joined twice
        at = next((place for place in places if not self._words[place + 1]), None)
        if at is None:
            # One that is not noted must not be forgotten: an engine with a process that nobody
            # knows is never found dead.
            at, process = places[-1], Process(0)
        # The proof last: without it the place is empty.
        self._store(self._words, at + 1, 0)
        self._store(self._words, at, process.start_ticks)
        self._store(self._words, at + 1, sealed(process.pid, session ^ process.start_ticks))

    @staticmethod
    def _places(slot: int) -> range:
        """Of the processes of a slot."""
        at = slot * _WORDS + _PROCESSES
        return range(at, at + 2 * PROCESSES, 2)
