"""Objects in pages: held, loaded, stored. For one thread.

A page is read or written under a lease of a session that is there, and nothing is asked of the
daemon between the look at that and the last byte: whatever becomes of the daemon meanwhile, it
gives these pages to nobody before this process has come back to it, has left, or is dead. What is
loaded of a lease of before is not had.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.client import Code, KvdError
from kvd.connectors.daemon_link import TIER_WAIT_S, is_worth_waiting
from kvd.connectors.lmcache.names import ChunkName, page_keys
from kvd.connectors.refusals import is_short, refused_here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvd.client import PendingCall, Pool, SyncLease, SyncNode
    from kvd.connectors.daemon_link import ConnectorSession

    Bytes = NDArray[np.uint8]

FAMILY: Final = "raw"
SECTION: Final = '[pool]\nfamily = "raw"\nlayers = 1\npage_size = 256\npage_bytes = {}\nsize = "{}"'
PAGE_BYTES: Final = 1 << 20
"""Of a page in the section that is proposed."""


class ChunkPages:
    """The pages of a pool, as bytes.

    Raises:
        KvdError: ``layout-mismatch``: it has no pages of plain bytes, with a section that has.
    """

    def __init__(self, pool: Pool) -> None:
        memory = pool.memory
        if memory.family != FAMILY or pool.shards or len(memory.components) != 1:
            total = sum(part.total_bytes for part in memory.components)
            size = f"{max(1, math.ceil(total / 2**20))}MiB"
            why = (
                f"pool {pool.name} is of family {memory.family}"
                f"{f' in {len(pool.shards)} shards' if pool.shards else ''}: objects of LMCache "
                "need pages of plain bytes. This has them, in as much memory:\n\n"
                f"{SECTION.format(PAGE_BYTES, size)}"
            )
            raise refused_here(Code.LAYOUT_MISMATCH, why)
        (part,) = memory.components
        layers = sorted({tensor.layer for tensor in part.tensors})
        views = [view for layer in layers for view in pool.arrays(part.name, layer=layer).values()]
        self.page_size = pool.page_size
        self._slots: list[Bytes] = [view.view(np.uint8).reshape(len(view), -1) for view in views]
        self.page_bytes: int = sum(int(slot.shape[1]) for slot in self._slots)

    def count(self, n_bytes: int) -> int:
        """Pages of an object of so many bytes."""
        return max(1, -(-n_bytes // self.page_bytes))

    def write(self, pages: NDArray[np.int32], data: Bytes) -> None:
        """Have these bytes in these pages."""
        for slot, page, piece in self._pieces(pages, data):
            slot[page, : len(piece)] = piece

    def read(self, pages: NDArray[np.int32], data: Bytes) -> None:
        """Have there what is in these pages."""
        for slot, page, piece in self._pieces(pages, data):
            piece[:] = slot[page, : len(piece)]

    def _pieces(self, pages: NDArray[np.int32], data: Bytes) -> list[tuple[Bytes, int, Bytes]]:
        found, at = [], 0
        for page in pages:
            for slot in self._slots:
                piece = data[at : at + slot.shape[1]]
                at += len(piece)
                if len(piece):
                    found.append((slot, int(page), piece))
        return found


class HeldChunk(NamedTuple):
    """A lease, and of which life of which session it is."""

    life: object
    lease: SyncLease


class ChunkCache:
    """Those of one server. ``link``: the session; ``namespace``: of an object."""

    def __init__(
        self, link: ConnectorSession[ChunkPages], namespace: Callable[[ChunkName], str]
    ) -> None:
        self._link, self._namespace = link, namespace
        self._held: dict[ChunkName, list[HeldChunk]] = defaultdict(list)

    @property
    def held(self) -> int:
        """How often objects are held."""
        return sum(map(len, self._held.values()))

    def hold(self, names: Sequence[ChunkName]) -> list[bool]:
        """Have those that are cached stay until ``release``; which are."""
        found = [False] * len(names)
        with self._link.asked() as asked:
            if asked is None:
                return found
            node, pages = asked
            leases = self._leased(node, pages, names, hold="prefix")
            end_s, more = time.monotonic() + TIER_WAIT_S, len(names) + 1
            # A tier reads so much at once; what did not come with the first of them is next.
            while (lying := _lying(names, leases)) and len(lying) < more:
                wait_s, more = end_s - time.monotonic(), len(lying)
                if wait_s <= 0:
                    break
                _leave_all(leases)
                # One that takes no pages waits for nothing; one that does, for half of its time.
                _leave_all(self._leased(node, pages, lying, hold="all", deadline_s=2 * wait_s))
                leases = self._leased(node, pages, names, hold="prefix")
            for number, lease in enumerate(leases):
                found[number] = self._keep(names[number], pages, lease)
        return found

    def release(self, names: Sequence[ChunkName]) -> None:
        """Each is held once less."""
        for name in names:
            held = self._held.get(name)
            if held:
                _leave(held.pop().lease)
            if not held:
                self._held.pop(name, None)

    def load(self, names: Sequence[ChunkName], into: Sequence[Bytes]) -> list[bool]:
        """Copy what is held; which were. Others are not had, also where they are cached."""
        done = [False] * len(names)
        with self._link.asked() as asked:
            if asked is None:
                return done
            node, pages = asked
            node.pump()  # If the daemon is another one by now, this is where it is noticed.
            for number, (name, data) in enumerate(zip(names, into, strict=True)):
                held = self._held.get(name)
                # Of a session that is over it is not had, though its bytes might still be there.
                if held and held[-1].life == self._link.life and len(data) == name.n_bytes:
                    pages.read(held[-1].lease.pages[: pages.count(name.n_bytes)], data)
                    done[number] = True
        return done

    def store(self, names: Sequence[ChunkName], objects: Sequence[Bytes]) -> list[bool]:
        """Have them cached; which are by this, or were before."""
        done = [False] * len(names)
        with self._link.asked() as asked:
            if asked is None:
                return done
            node, pages = asked
            leases = self._leased(node, pages, names, hold="all")
            try:
                for number, (name, data) in enumerate(zip(names, objects, strict=True)):
                    lease = leases[number]
                    # Bytes that are not those of the layout are packed by who knows whom.
                    if lease is not None and len(data) == name.n_bytes:
                        leases[number] = None
                        done[number] = _written(pages, lease, data)
            finally:
                _leave_all(leases)
        return done

    def look(self) -> None:
        """See what has become of the daemon."""
        with self._link.asked() as asked:
            if asked is not None:
                asked[0].pump()

    def forget(self) -> None:
        """Nothing is held any more."""
        self.release([name for name, held in self._held.items() for _ in held])

    # ---- one object ------------------------------------------------------------------------------

    def _leased(
        self,
        node: SyncNode,
        pages: ChunkPages,
        names: Sequence[ChunkName],
        *,
        hold: str,
        deadline_s: float = 0.0,
    ) -> list[SyncLease | None]:
        """A lease for each, asked for at once; None: the daemon has no pages for it."""
        calls: list[PendingCall[SyncLease]] = []
        leases: list[SyncLease | None] = []
        try:
            # They leave with one write, so that the daemon wakes once, and so does this thread.
            node.gather()
            try:
                calls.extend(
                    node.begin_lease(
                        keys=page_keys(name, pages.count(name.n_bytes)),
                        namespace=self._namespace(name),
                        hold=hold,
                        deadline_s=deadline_s,
                    )
                    for name in names
                )
            finally:
                node.send_gathered()
            for call in calls:
                try:
                    leases.append(call.result())
                except KvdError as error:
                    if not is_short(error):
                        raise
                    leases.append(None)
        except BaseException:
            for call in calls[len(leases) :]:
                call.cancel()
            _leave_all(leases)
            raise
        return leases

    def _keep(self, name: ChunkName, pages: ChunkPages, lease: SyncLease | None) -> bool:
        if lease is None:
            return False
        if len(lease.pages) < pages.count(name.n_bytes):
            lease.leave()
            return False
        self._held[name].append(HeldChunk(self._link.life, lease))
        return True


def _written(pages: ChunkPages, lease: SyncLease, data: Bytes) -> bool:
    """Have it in the pages of the lease, and these cached."""
    count = pages.count(len(data))
    is_whole = False
    try:
        if lease.prefix_len < count * pages.page_size:
            pages.write(lease.pages[:count], data)
        is_whole = True
    finally:
        lease.leave(() if is_whole else None)
    return is_whole


def _lying(names: Sequence[ChunkName], leases: Sequence[SyncLease | None]) -> list[ChunkName]:
    """Those of which a tier has more, and has it soon."""
    pairs = zip(names, leases, strict=True)
    return [name for name, lease in pairs if lease and is_worth_waiting(lease)]


def _leave_all(leases: Sequence[SyncLease | None]) -> None:
    for lease in leases:
        if lease is not None:
            _leave(lease)


def _leave(lease: SyncLease) -> None:
    with contextlib.suppress(KvdError, OSError, ValueError):  # it has ended with its session
        lease.leave()
