"""Whose slice is next: small copies pass much larger ones, and none of those waits for ever."""

from __future__ import annotations

import numpy as np

from kvd.core.effects import Copy
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.transfer.copies import PASSING_BYTES, SLICE_BYTES, Area, CopyTurns, copy_job
from tests.transfer.layouts import ids, note

PAGE_BYTES = SLICE_BYTES // 4


class Desk:
    """Copies between two arrays, a slice at each step."""

    def __init__(self):
        shape = Geometry(100, PAGE_BYTES, (PieceRow(0, PAGE_BYTES, PAGE_BYTES),), ())
        memory = np.zeros(shape.total_bytes, np.uint8)
        self.areas = {name: Area(note(shape, name=name), memory) for name in ("a", "b")}
        self.turns = CopyTurns()

    def want(self, ticket, n_pages):
        pages = ids(range(1, 1 + n_pages))
        self.turns.jobs.append(copy_job(Copy(ticket, "a", pages, "b", pages), self.areas))

    def done(self, steps):
        """The tickets of the copies whose last slice was among the next ones."""
        ended = [self.turns.step() for _ in range(steps)]
        return [job.ticket for job in ended if job is not None]


def test_a_slice_is_all_that_a_small_copy_waits_for():
    desk = Desk()
    desk.want(1, 80)
    assert desk.done(steps=3) == []

    desk.want(2, 2)
    desk.want(3, 1)

    assert desk.done(steps=2) == [2, 3]
    assert desk.done(steps=17) == [1]


def test_a_copy_that_is_not_much_smaller_waits_for_its_turn():
    desk = Desk()
    for ticket, n_pages in enumerate((16, 8, 5, 16, 4), 1):
        desk.want(ticket, n_pages)

    assert desk.done(steps=13) == [5, 1, 2, 3, 4]


def test_the_oldest_copy_goes_on_however_many_small_ones_pass_it():
    desk = Desk()
    desk.want(0, 40)
    ended = []
    for ticket in range(1, 101):
        desk.want(ticket, 4)
        ended += desk.done(steps=1)

    assert ended.index(0) == PASSING_BYTES // SLICE_BYTES * 7
    assert [one for one in ended if one] == list(range(1, len(ended)))
