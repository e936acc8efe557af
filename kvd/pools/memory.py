"""The memory of a daemon's pool: found where the one before left it, or made.

All or nothing: the arenas and their journal are found together or made together. A journal without
its pages, or pages without the journal that says who may write to them, are worth nothing; and an
engine of the daemon before may still write into the old pages, so new ones are other memory.

The order makes that hold at every moment: the journal is the last to be made and the first to go.

Saved areas are never kept: what they hold belongs to leases that end with their daemon.
"""

from __future__ import annotations

import enum
import hashlib
import os
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvd.pools.arena import Arena, NotReserved, check_free
from kvd.pools.build import PoolRegion, pool_regions, reserve_all, saved_regions, sizes
from kvd.pools.file_memory import open_directory
from kvd.pools.host_memory import Free, free_memory
from kvd.pools.kept_memory import JOURNAL, MISSING, PREFIX, KeptMemory, UnfitMemory
from kvd.pools.location import Backing
from kvd.pools.memfd_memory import StoredMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.core.layout.spec import PoolSpec
    from kvd.pools.location import PoolLocation


WAIT_S: Final = 3.0
"""A killed daemon's transfer process ends within milliseconds; three seconds is somebody alive."""


class MemoryOrigin(enum.Enum):
    """Where the memory of a pool came from."""

    FOUND = "found"
    """The daemon before left it: its bytes are as they were, the journal says what they are."""
    MADE = "made"
    """It is new, and zero."""


def open_memory(
    spec: PoolSpec,
    place: PoolLocation,
    journal_bytes: int,
    given: Mapping[str, int] | None = None,
    advance: Callable[[int], None] = lambda _size_bytes: None,
) -> DaemonMemory:
    """Find the memory of a pool where ``place`` keeps it, or make it there.

    Args:
        spec: what the pool holds.
        place: where it is kept.
        journal_bytes: the size of its journal; not used with anon.
        given: with fdstore, what systemd gave back by name: those of pool memory are taken over
            and closed by ``close``. None where there is no systemd to hold anything.
        advance: called while memory is taken, which takes a second per GiB or so, with the bytes
            since the last time.

    Returns:
        the memory, open; nobody else uses it as long as what is in ``keep_open`` is held.

    Raises:
        NotReserved: there is not enough memory, it is in use, or somebody else could have written
            to it; the message says what to do.
    """
    keeper = _keeper(place, given)
    memory = DaemonMemory(spec, keeper, _journal_bytes(place, journal_bytes), advance)
    try:
        memory.obtain()
    except BaseException:
        memory.close()
        raise
    return memory


def kept_names(spec: PoolSpec) -> tuple[str, ...]:
    """The names under which the memory of such a pool is kept."""
    return (*(PREFIX + region.name for region in pool_regions(spec)), JOURNAL)


def _keeper(place: PoolLocation, given: Mapping[str, int] | None) -> KeptMemory:
    match place.backing:
        case Backing.ANON:
            return KeptMemory()
        case Backing.SHM | Backing.HUGETLBFS:
            return open_directory(place, wait_s=WAIT_S)
        case Backing.FDSTORE:
            if given is None:
                raise NotReserved(
                    "pool.backing = fdstore leaves the pool to systemd while the daemon is away, "
                    "and systemd did not start this one with a store (NOTIFY_SOCKET is not set): "
                    "start it as a unit with FileDescriptorStoreMax=, or set pool.backing = 'shm'"
                )
            return StoredMemory(given)


def _journal_bytes(place: PoolLocation, journal_bytes: int) -> int:
    """Nobody reads the journal of memory that ends with its daemon."""
    return 0 if place.backing is Backing.ANON else journal_bytes


class DaemonMemory:
    """The arenas of a pool and of its journal, open until ``close``.

    Attributes:
        placed: the components in their memory, then their saved areas.
        journal: the journal's arena; None where the pool ends with the daemon (anon).
        origin: whether the components and the journal were found or made.
        reason: which of both, where, and why, as a sentence for the log.
        keeper: who keeps it while the daemon is away. Its ``keep_open`` is the lock of the files;
            the transfer process must hold that too, like the daemon's own, so that whoever gets it
            next knows that nobody writes into the pages any more. With fdstore ``to_store`` is what
            systemd is to hold from now on, by name, and empty if all was found; the descriptors
            stay ours. ``stale`` are names that it must let go of before.
    """

    def __init__(
        self,
        spec: PoolSpec,
        keeper: KeptMemory,
        journal_bytes: int,
        advance: Callable[[int], None],
    ) -> None:
        """Use ``open_memory``."""
        self._advance = advance
        self._spec = spec
        self.keeper = keeper
        self._pool = list(pool_regions(spec))
        self._regions = [region for region in self._pool if region.device is None]
        self._saved = list(saved_regions(spec))
        self._sizes = {PREFIX + name: size for name, size in sizes(self._regions).items()}
        if journal_bytes:
            self._sizes[JOURNAL] = journal_bytes
        self._arenas: dict[str, Arena] = {}
        self._saved_placed: list[PoolRegion] = []
        self.origin = MemoryOrigin.MADE
        self.reason = ""

    @property
    def placed(self) -> list[PoolRegion]:
        """The components in the order of the specification, then the saved areas."""
        arenas = self._arenas
        pool = [replace(region, arena=arenas.get(PREFIX + region.name)) for region in self._pool]
        return [*pool, *self._saved_placed]

    @property
    def journal(self) -> Arena | None:
        """The journal's arena."""
        return self._arenas.get(JOURNAL)

    @property
    def identity(self) -> bytes:
        """16 bytes that are of these arenas alone while they live, for the journal to name them."""
        seen = [os.fstat(self._arenas[PREFIX + region.name].fd) for region in self._regions]
        whole = [(status.st_dev, status.st_ino, status.st_size) for status in seen]
        return hashlib.blake2b(repr(whole).encode(), digest_size=16).digest()

    def obtain(self) -> None:
        """Find what there is, or make it; then reserve the saved areas.

        Raises:
            NotReserved: neither can be done.
        """
        unfit = self._find()
        if unfit:
            is_first = all(flaw == MISSING for flaw in unfit.values()) and not (
                self._arenas or self.keeper.kept_bytes()
            )
            why = "; ".join(f"{name} {flaw.why}" for name, flaw in unfit.items())
            self._make("there was none" if is_first else why)
        else:
            self.keeper.clear(keep=frozenset(self._sizes))
            check_free(self._saved_sizes())
            self.origin = MemoryOrigin.FOUND
            self.reason = f"found {self.keeper.where}"
        self._saved_placed = reserve_all(self._spec, self._saved, self._advance)

    def renew(self, why: str) -> None:
        """Let go of what was found and make it anew, because of ``why``: its journal is no good.

        Descriptors that were taken from it before are closed; ask for them again.

        Raises:
            NotReserved: there is not enough memory; what was found is gone all the same.
        """
        self._make(why)

    def close(self) -> None:
        """Drop our descriptors. What is kept stays, and the lock if somebody holds a copy."""
        self._close_arenas()
        for region in self._saved_placed:
            if region.arena is not None:
                region.arena.close()
        self.keeper.close()

    def _find(self) -> dict[str, UnfitMemory]:
        """Take what fits; what does not, by name."""
        unfit: dict[str, UnfitMemory] = {}
        for name, size in self._rounded().items():
            found = self.keeper.find(name, size)
            match found:
                case Arena():
                    self._arenas[name] = found
                case UnfitMemory():
                    unfit[name] = found
        return unfit

    def _make(self, why: str) -> None:
        self._close_arenas()
        wanted = self._rounded()
        kept = self.keeper.kept_bytes()
        self.keeper.check_room(sum(wanted.values()))
        self._check_host(kept)
        self.keeper.clear()
        self._check_host(0)
        for name, size in wanted.items():
            self._arenas[name] = self.keeper.make(name, size, self._advance)
        self.origin = MemoryOrigin.MADE
        self.reason = f"made {self.keeper.where}: {why}"

    def _check_host(self, kept_bytes: int) -> None:
        """Refuse what the host cannot hold, when ``kept_bytes`` are given back."""
        free = free_memory()
        free = Free(free.free_bytes + kept_bytes, free.limited_by)
        check_free(self._saved_sizes() | self._host_sizes(), free)

    def _host_sizes(self) -> dict[str, int]:
        """What is taken of the host's ordinary memory: huge pages were set apart before."""
        if self.keeper.is_apart:
            return {}
        return {name.removeprefix(PREFIX): size for name, size in self._sizes.items()}

    def _saved_sizes(self) -> dict[str, int]:
        return {} if self._saved_placed else sizes(self._saved)

    def _rounded(self) -> dict[str, int]:
        grain = self.keeper.grain_bytes
        return {name: -(-size // grain) * grain for name, size in self._sizes.items()}

    def _close_arenas(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}
