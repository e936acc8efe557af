"""Copies between two regions of this process: pages to the saved area and back.

    Copy -> queue -> copier thread: one memory copy per run of pages and row -> Copied

The loop never waits for one: a thread does them, in the order in which they came. Where the pages
step by one on both sides they are copied in one piece per row, which for page-first memory is one
piece in all; numpy lets go of the interpreter meanwhile, so posts go on beside it.

Invariants: each ``Copy`` is answered by one ``Copied`` or ``CopyFailed``; one that is refused has
written nothing; no byte outside the destination pages is written.
"""

from __future__ import annotations

import ctypes
import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.transfer.descriptors import objection
from kvd.transfer.orders import Copied, CopyFailed
from kvd.transfer.strips import matched, strips

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from kvd.core.geometry import Row
    from kvd.transfer.metadata import RegionNote
    from kvd.transfer.orders import Copy
    from kvd.types import Pages

    Bytes = NDArray[np.uint8]

COPIER: Final = "copier"
"""The name of its thread."""


class Area:
    """One mapped region as arrays of uint8."""

    def __init__(self, note: RegionNote, memory: Bytes) -> None:
        """``memory`` is the whole region from its byte 0."""
        self.note = note
        self._memory = memory
        self._known: dict[tuple[int, bool], list[Bytes]] = {}

    def pieces(self, split: int = 1, *, by_tensor: bool = False) -> list[Bytes]:
        """The pages as arrays ``(pages, split, bytes)``, in the order of a page's bytes.

        One for each row, or for each tensor: those are what a page is cut into pieces by.
        """
        views = self._known.get((split, by_tensor))
        if views is None:
            rows = strips(self.note) if by_tensor else self.note.rows
            views = self._known[split, by_tensor] = [self._cut(row, split) for row in rows]
        return views

    def _cut(self, row: Row, split: int) -> Bytes:
        size = row.piece_bytes // split
        shape, steps = (self.note.pages, split, size), (row.stride_bytes, size, 1)
        return np.lib.stride_tricks.as_strided(self._memory[row.offset_bytes :], shape, steps)


def mapped_area(note: RegionNote) -> Area:
    """The area of a region that is mapped at its address for the life of the process."""
    memory = (ctypes.c_ubyte * note.region_bytes).from_address(note.address)
    return Area(note, np.ctypeslib.as_array(memory))


def carry_out(order: Copy, areas: Mapping[str, Area]) -> Copied | CopyFailed:
    """Copy the pages of one order, or refuse it whole."""
    source = areas.get(order.source_region)
    destination = areas.get(order.destination_region)
    if source is None or destination is None:
        missing = order.source_region if source is None else order.destination_region
        return CopyFailed(order.ticket, f"there is no region {missing!r} here")
    why = objection(order.source, order.destination, source.note, destination.note)
    if why:
        return CopyFailed(order.ticket, why)
    _copy(order.source, order.destination, source, destination)
    n_pages = len(order.source) // 4
    return Copied(order.ticket, n_pages * source.note.page_bytes)


def _copy(source: Pages, destination: Pages, here: Area, there: Area) -> None:
    """One assignment per row and per run of pages that steps by one on both sides."""
    of, to = np.frombuffer(source, "<i4"), np.frombuffer(destination, "<i4")
    if not of.size:
        return
    cuts = np.flatnonzero((np.diff(of) != 1) | (np.diff(to) != 1)) + 1
    starts = np.concatenate(([0], cuts))
    counts = np.diff(np.append(starts, of.size)).tolist()
    runs = list(zip(of[starts].tolist(), to[starts].tolist(), counts, strict=True))
    ours, theirs = matched(here.note, there.note, 1)
    reads = here.pieces(by_tensor=ours != here.note.rows)
    stores = there.pieces(by_tensor=theirs != there.note.rows)
    for read, store in zip(reads, stores, strict=True):
        for first, onto, n_pages in runs:
            store[onto : onto + n_pages] = read[first : first + n_pages]


class Copier:
    """Carries out copies off the loop, one after the other."""

    def __init__(
        self, areas: Mapping[str, Area], on_over: Callable[[Copied | CopyFailed], None]
    ) -> None:
        """``on_over`` takes each outcome, on the copier's thread."""
        self._areas = areas
        self._on_over = on_over
        self._wanted: SimpleQueue[Copy] = SimpleQueue()

    def want(self, order: Copy) -> None:
        """Queue one copy."""
        self._wanted.put(order)

    def start(self) -> None:
        """Start the thread that copies."""
        threading.Thread(target=self._run, name=COPIER, daemon=True).start()

    def _run(self) -> None:
        """Copy for ever. An exception is a bug; the worker's hook ends the process then."""
        # As the loop's own: a copy that was just ordered does not preempt whoever ordered it.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while True:
            self._on_over(carry_out(self._wanted.get(), self._areas))
