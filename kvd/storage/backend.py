"""The seam: what a tier must be able to do. A backend is one file that does it, such as ``posix``.

A backend moves bytes between memory of this process and objects that have a name; what an object
means, whether it verifies, and which objects there should be is none of its business. It is asked
by four threads: one writes and drops, one reads, one drops what was read and is bad, and one asks
what exists; and for once at the start, before those, to search.

What it must hold:

- ``put`` makes an object that is whole or is not there, whatever dies meanwhile.
- ``get`` reads nothing into memory before ``judge`` has taken the head.
- When ``put`` and ``get`` return, nothing of them reads or writes memory any more. Where that
  cannot be proven they raise ``StorageLost``, and the process ends: that proves it.
- Everything else that goes wrong with one object is said of that object, in words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvd.storage.objects import BadObject, ObjectHead

    Words = NDArray[np.uint64]
    Judge = Callable[[bytes], ObjectHead | BadObject]


class StorageLost(Exception):
    """A backend cannot go on, or cannot say what it still has under way; the message says why."""


class Capabilities(msgspec.Struct, frozen=True):
    """What a backend can do, and what suits it.

    ``batch_bytes``, ``batch_objects``: what it should be given at a time. ``write_bytes``: less of
    that where it is written, since a batch that was begun makes way for nobody.
    """

    transport: str
    batch_bytes: int
    batch_objects: int
    write_bytes: int


class ObjectName(NamedTuple):
    """One object of a tier."""

    namespace: str
    key: bytes


class ObjectWrite(NamedTuple):
    """An object to be made: its head, the memory that follows it, and when it was last used."""

    name: ObjectName
    head: bytes
    addresses: Words
    used_ns: int


class ObjectRead(NamedTuple):
    """An object to be read: who judges its head, where its page goes, and when that is."""

    name: ObjectName
    judge: Judge
    addresses: Words
    used_ns: int


class StoredObject(NamedTuple):
    """An object that is there, and when it was last used."""

    name: ObjectName
    used_ns: int


class SearchOutcome(NamedTuple):
    """What lies in a tier, and how much was removed because it was no object of it."""

    objects: list[StoredObject]
    removed: int
    why: str
    """Of the first that was removed."""


class Existence(NamedTuple):
    """Which objects are there."""

    there: list[bool]
    why: str
    """Why of some it is not known; those are not there, as far as this says."""


class Backend(Protocol):
    """One tier."""

    capabilities: Capabilities

    def search(self) -> SearchOutcome:
        """What lies there, as far as it can say; what is no object of this layout is removed."""

    def put(self, objects: Sequence[ObjectWrite]) -> list[str]:
        """Make them; of each why it was not made, empty if it was."""

    def get(self, objects: Sequence[ObjectRead]) -> list[ObjectHead | BadObject]:
        """Read their pages; of each its head, or why it was not read."""

    def exists(self, names: Sequence[ObjectName]) -> Existence:
        """Which of them are there, as far as that is known without reading their pages."""

    def drop(self, names: Iterable[ObjectName]) -> None:
        """Remove them; one that is not there is no error."""

    def age(self, objects: Iterable[StoredObject]) -> None:
        """Keep that they were last used then, for the next search."""

    def drop_namespace(self, namespace: str) -> None:
        """Remove all that it has."""
