"""Pieces of our pages brought into the peer's order before they travel.

Page-first, a piece of a page is a stretch of a few kilobytes in each of its tensors, while the
peer's page is contiguous. Written from where they lie that is a descriptor for each stretch, and a
descriptor costs microseconds; so the pieces of one handle are packed into a slot of registered
memory first and leave it as whole pages::

    our page 7   [L0: 0 1 2 3][L1: 0 1 2 3]
    the slot     [L0: 0 1][L1: 0 1] [L0: 2 3][L1: 2 3]      written over the peer's pages

Measured, 30 layers of 1152 bytes a token, pages of 64 tokens written into pages of one: 0.23 GiB/s
from where they lie and 3.8 packed on one host, 0.18 and 1.0 over TCP; pages of 16: 1.6 and 3.8, 0.5
and 1.8. Layer-first, pieces of neighbouring pages touch on both sides and nothing is packed.

Pieces of several shards that make one page of the peer are packed alike (see ``assembly``), of a
page larger than a slot some layers at a time.

Packing is one more pass over memory, so a thread of its own does it ahead of the post; where it has
nothing ready, because there is no idle core or the post has just begun, the loop packs for itself::

    thread   pack 1   pack 2   pack 3 ...
    loop     pack 0   write 0  write 1  write 2 ...

Posts that read the same pages, for two shards of a peer say, are packed in turns, a quarter of a
megabyte each: one reads what lies between the heads of the other, and finds it in the cache.

Measured, 32 pages of a Llama-8B shape onto other shards of one host, speed over that of whole pages
and seconds of computing a gigabyte (whole pages: 0.14), real-time, so with two cores for itself: by
the loop 0.47 and 0.34 (one shard onto two), 0.49 and 0.32 (two onto one); with the thread 0.72 and
0.40, 0.84 and 0.34. Where the thread has to share a core it costs up to a fifth more and gains
nothing, so it rests then, and is not woken; a tenth of the time went into that, and into slots in
pages of 4 KiB. As descriptors of 1 KiB where they lie: 0.15 and 1.1.

Invariants:
  - A slot is in one place: free, in the hands of whoever packs it, packed, or with one handle until
    that is done or its agent is gone.
  - Each handle of a post is packed once at most, and nothing of a post that is over is handed out.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.transfer.core_waits import CoreWaits
from kvd.transfer.metadata import strips

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from kvd.transfer.copies import Bytes
    from kvd.transfer.metadata import RegionNote
    from kvd.transfer.window_layout import Stretches
    from kvd.types import Pages

    Gather = Callable[[NDArray[np.int32], Bytes], None]
    """Brings what is written for each of these pages together, in a row of the array each."""
    Steps = Callable[[NDArray[np.int32], Bytes, int], Iterator[None]]
    """As ``Gather``, about so many bytes at each step."""

SLOT_BYTES: Final = 2 * 2**20
SLOTS: Final = 32
"""Enough for eight peers at a time; no memory is taken before a slot is used."""
STAGING_BYTES: Final = SLOTS * SLOT_BYTES
AHEAD: Final = 2
"""Handles of a post that are packed before their turn."""
RESERVED: Final = SLOTS // 2
"""Free slots that nothing is packed into ahead: posts that stand still must not hold up others."""
RESTS: Final = 32
"""Handles in whose time nothing is packed ahead, after the thread had to wait for a core."""
IN_TURNS_BYTES: Final = 256 * 2**10
"""Of each post in turns, where several are packed together: what they read stays in the cache."""
PACKER: Final = "packer"
"""The name of its thread."""
GATHER_BELOW_BYTES: Final = 64 * 2**10
"""Stretches of this size and above travel as fast from where they lie."""


class StagingSlot(NamedTuple):
    """Where the pages of one handle are packed."""

    address: int
    memory: Bytes


class Band(NamedTuple):
    """What is packed of each page at a time, in ``page_bytes``: all of it, or some layers."""

    steps: Steps
    page_bytes: int


class Packing:
    """The pieces of one post, and how to pack those of one handle.

    First come the handles of the first band of all pages, then those of the next. Two of equal
    ``reads`` read the same pages for handles of the same number.
    """

    def __init__(self, regions: tuple[str, ...], pages: Pages, bands: list[Band]) -> None:
        """``pages`` of these regions of ours; one page of each of the bands fits into a slot."""
        self._ids = np.frombuffer(pages, "<i4")
        self._bands = bands
        # By the largest band: a handle has as many pages in each of them.
        self.handle_pages = SLOT_BYTES // max(band.page_bytes for band in bands)
        self.reads = regions, pages, self.handle_pages, len(bands)

    @property
    def handles(self) -> int:
        """How many there are."""
        return self._band_handles * len(self._bands)

    @property
    def _band_handles(self) -> int:
        return -(-self._ids.size // self.handle_pages)

    def steps(self, handle: int, memory: Bytes, step_bytes: int) -> Iterator[None]:
        """Pack the pages of this handle, one after the other, from the start of ``memory``."""
        band, at = divmod(handle, self._band_handles)
        steps, page_bytes = self._bands[band]
        low = at * self.handle_pages
        ids = self._ids[low : low + self.handle_pages]
        rows = memory[: ids.size * page_bytes].reshape(ids.size, page_bytes)
        return steps(ids, rows, step_bytes)


class PackedPost:
    """A post under way whose pages are packed; handles ``[0, begun)`` are, or somebody does it."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.begun = 0
        self.ahead = 0
        """Handles that are packed, or on the way to it, and wait for their turn."""
        self.ready: deque[Portion] = deque()
        self.is_over = False

    @property
    def is_begun(self) -> bool:
        """Whether there is nothing left to begin with."""
        return self.is_over or self.begun == self.packing.handles


class Portion(NamedTuple):
    """One handle of a post, and where it is packed."""

    post: PackedPost
    handle: int
    slot: StagingSlot


class Staging:
    """The slots, the posts that are packed into them, and the thread that does it ahead.

    All but the thread's own part is called by the loop. ``descriptor`` becomes readable, edge by
    edge, when the thread has packed something.
    """

    def __init__(self, address: int, waits: Callable[[], CoreWaits] = CoreWaits) -> None:
        """``address`` is that of ``STAGING_BYTES`` of memory."""
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * STAGING_BYTES).from_address(address))
        starts = range(0, STAGING_BYTES, SLOT_BYTES)
        # The one given back last is the next to be taken: it may still be in the cache.
        self.free = [
            StagingSlot(address + at, memory[at : at + SLOT_BYTES]) for at in reversed(starts)
        ]
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._line: list[PackedPost] = []
        """Those of which something is still to be begun."""
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waits = waits
        self._rest = 0

    def begin(self, packing: Packing) -> PackedPost:
        """Take a post in."""
        post = PackedPost(packing)
        with self._news:
            self._line.append(post)
        return post

    def can_take(self, post: PackedPost) -> bool:
        """Whether a handle of the post is packed, or could be."""
        return bool(post.ready) or (bool(self.free) and not post.is_begun)

    def take(self, post: PackedPost) -> Portion | None:
        """A handle of the post, packed; None if, since ``can_take``, the thread began the last."""
        with self._news:
            self._rest = max(0, self._rest - 1)
            self._wake()  # one less is ahead now
            if post.ready:
                post.ahead -= 1
                return post.ready.popleft()
            if post.is_begun:
                return None
            portions = self._begin(post)
            post.ahead -= 1
        # With the first that leaves something to pack ahead: most processes never need it.
        if self._thread is None and self._line:
            self._thread = threading.Thread(target=self._run, name=PACKER, daemon=True)
            self._thread.start()
        _pack(portions)
        mine, *others = portions
        with self._news:
            self._packed(others)
        return mine

    def give(self, slots: Iterable[StagingSlot]) -> None:
        """Have slots back that nobody reads any more."""
        with self._news:
            self.free += slots
            self._wake()

    def drop(self, post: PackedPost) -> None:
        """Nothing of the post is wanted any more."""
        with self._news:
            post.is_over = True
            if post in self._line:
                self._line.remove(post)
            self.free += (portion.slot for portion in post.ready)
            post.ready.clear()
            self._wake()

    def _begin(self, post: PackedPost) -> list[Portion]:
        """The next handle of the post, and with it those of others that read the same pages."""
        wanted = [post]
        for packed in self._line:
            # What another is packed from is in the cache while this one is.
            is_like = packed.begun == post.begun and packed.packing.reads == post.packing.reads
            if is_like and packed is not post and packed.ahead < AHEAD:
                wanted.append(packed)
        room = max(1, len(self.free) - RESERVED)
        portions = [Portion(packed, packed.begun, self.free.pop()) for packed in wanted[:room]]
        for packed, _, _ in portions:
            packed.begun += 1
            packed.ahead += 1
        self._line = [packed for packed in self._line if not packed.is_begun]
        return portions

    def _wake(self) -> None:
        """The thread may have something to do; not while it rests, for a wake costs a switch."""
        if not self._rest:
            self._news.notify()

    def _packed(self, portions: Iterable[Portion]) -> None:
        for portion in portions:
            # Its post may have failed meanwhile, and nobody would ask for it.
            if portion.post.is_over:
                self.free.append(portion.slot)
            else:
                portion.post.ready.append(portion)

    def _run(self) -> None:
        """Pack ahead for ever. An exception is a bug; the worker's hook ends the process then."""
        # As the loop's own: what was just asked for does not preempt whoever asked.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        waits = self._waits()
        while True:
            with self._news:
                while not (portions := self._next_ahead()):
                    self._news.wait()
            _pack(portions)
            # Without a core of its own it only costs: what is packed on one is read on another.
            rest = RESTS if waits.is_scarce() else 0
            with self._news:
                self._rest = rest
                self._packed(portions)
            os.eventfd_write(self.descriptor, 1)

    def _next_ahead(self) -> list[Portion]:
        if self._rest or len(self.free) <= RESERVED:
            return []
        post = min(
            (packed for packed in self._line if packed.ahead < AHEAD),
            key=lambda packed: packed.ahead,
            default=None,
        )
        return [] if post is None else self._begin(post)


def _pack(portions: list[Portion]) -> None:
    """Pack them, those of several posts in turns."""
    step_bytes = SLOT_BYTES if len(portions) == 1 else IN_TURNS_BYTES
    works = [packed.packing.steps(at, slot.memory, step_bytes) for packed, at, slot in portions]
    for _ in zip_longest(*works):
        pass


def is_worth_packing(ours: RegionNote, theirs: RegionNote, split: int) -> bool:
    """Whether pieces of our pages are small and scattered while the peer's pages are whole."""
    if len(theirs.rows) > 1 or (split == 1 and len(ours.rows) == 1):
        return False
    if len(strips(theirs)) == 1:  # then a piece is one stretch, and touches the next one
        return False
    each_bytes = theirs.page_bytes // len(strips(theirs))
    return each_bytes < GATHER_BELOW_BYTES and theirs.page_bytes <= SLOT_BYTES


def is_worth_gathering(lying: Stretches, together: Stretches) -> bool:
    """Whether a window's pieces are small where they are ``lying``, and fewer ``together``."""
    n_bytes = int(together.size.sum())
    return len(together.size) < len(lying.size) and n_bytes < GATHER_BELOW_BYTES * len(lying.size)
