"""Page sums, beside the posting loop: of what is sent while it travels, and of what has arrived.

    Post ---> job --> turns --> summers --> sums --> joined with its Posted --> Posted
    Verify -> job --> turns --> summers --> sums --> compared with the writer's --> Verified
    Sum ----> job --> turns --> summers --> sums --> Summed

Jobs take turns, a slice of a few megabytes each, so a small one does not wait for all of a large
one before it; slices of one job may be summed by several threads at once. ``Posted`` of a sealed
post is held back until its sums are there.

The hash lets go of the interpreter for pieces above about 100 KB. Below that the loop gets it back
at the next switch, so the switch interval is shortened with the first summer.

Invariants: each ``Verify`` is answered by one ``Verified``, each ``Sum`` by one ``Summed``; each
post still ends by exactly one of ``Posted`` and ``PostFailed``. What waits here is bounded by what
the daemon has under way: a job keeps page numbers and sums, no pages.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from kvd.core.seal import SUM_BYTES, Seal, chosen, page_sum
from kvd.transfer.descriptors import strays
from kvd.transfer.orders import Posted, PostFailed, Summed, Verified
from kvd.transfer.strips import uncut
from kvd.types import NO_PAGES
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from kvd.transfer.copies import Area
    from kvd.transfer.orders import Post, Report, Sum, Verify
    from kvd.types import Pages

SUMMER: Final = "summer"
"""The name of its threads."""
SUMMERS: Final = 2
"""Two reach what the memory of a host of two cores gives; more only take cores from the copies."""
SLICE_BYTES: Final = 4 * 2**20
SWITCH_S: Final = 0.0005


class Job:
    """The sums of the chosen pages of one post, or of one delta that has arrived."""

    split = 1

    def __init__(self, ticket: int, area: Area, seal: Seal, pages: Pages, first_page: int) -> None:
        """``pages`` are of ``area``, ``first_page`` first."""
        ids = np.frombuffer(pages, "<i4")
        self.ticket = ticket
        self.area = area
        self.seal = seal
        self.logical = chosen(seal, first_page, first_page + ids.size)
        self.ids = ids[self.logical - first_page]
        self.sums = np.zeros(self.ids.size, np.uint64)
        self.begun = 0
        self.left = self.ids.size
        self.is_unwanted = False

    def sum_slice(self, low: int, high: int) -> None:
        """Sum the chosen pages ``[low, high)``."""
        pages, seal, sums = self.ids[low:high], self.seal, self.sums
        arrays = self.area.pieces()
        if self.split > 1:
            arrays = [np.empty((pages.size, 1, self.page_bytes), np.uint8)]
            self.area.gather(pages, self.split, arrays[0][:, 0])
            pages = np.arange(pages.size)
        pairs = zip(pages.tolist(), self.logical[low:high].tolist(), strict=True)
        for at, (page, logical) in enumerate(pairs, low):
            sums[at] = page_sum(seal, logical, (array[page, 0] for array in arrays))

    @property
    def page_bytes(self) -> int:
        """Bytes of what is summed as one page."""
        return self.area.note.page_bytes // self.split

    def packed(self) -> bytes:
        """The sums as they travel."""
        return self.sums.astype("<u8").tobytes()


class PostJob(Job):
    """Of a post; its ``Posted`` waits here for the sums, or the sums for it.

    Where our pages are cut, ``ids`` are pieces.
    """

    posted: Posted | None = None


class VerifyJob(Job):
    """Of a delta; ``wanted`` is what the writer says."""

    wanted = b""


class SumJob(Job):
    """Of pages as they lie here: each sum is bound to the number of its page."""

    def __init__(self, ticket: int, area: Area, pages: Pages) -> None:
        super().__init__(ticket, area, _HERE, NO_PAGES, 0)
        self.ids = np.frombuffer(pages, "<i4")
        self.logical = self.ids.astype(np.int64)
        self.sums = np.zeros(self.ids.size, np.uint64)
        self.left = self.ids.size


_HERE: Final = Seal(Integrity.FULL, b"kvd page of ours", 0, 0)


def post_job(order: Post, areas: Mapping[str, Area]) -> PostJob | None:
    """The job of a post; None where nothing is to be summed, or the post will be refused."""
    area = areas.get(order.region)
    if area is None or order.seal.is_open or uncut(area.note, order.split):
        return None
    if strays(order.source, area.note, order.split).size:
        return None
    job = PostJob(order.post, area, order.seal, order.source, order.first_page)
    job.split = order.split
    return job if job.left else None


def verify_job(order: Verify, areas: Mapping[str, Area]) -> VerifyJob | Verified:
    """The job of a ``Verify``, or the answer where there is nothing that could be summed."""
    seal, area = order.seal, areas.get(order.region)
    why = ""
    if area is None:
        why = f"there is no region {order.region!r} here"
    elif strays(order.pages, area.note).size or len(order.pages) // 4 != seal.end - seal.first:
        why = f"the pages are not those of tokens {seal.first} to {seal.end} in {order.region!r}"
    if why or area is None:
        return Verified(order.ticket, (), why)
    job = VerifyJob(order.ticket, area, seal, order.pages, seal.first)
    job.wanted = order.sums
    if len(order.sums) != SUM_BYTES * job.left:
        return Verified(order.ticket, (), f"{len(order.sums)} bytes of sums for {job.left} pages")
    return job if job.left else Verified(order.ticket, ())


def sum_job(order: Sum, areas: Mapping[str, Area]) -> SumJob | Summed:
    """The job of a ``Sum``, or the answer where there is nothing that could be summed."""
    area = areas.get(order.region)
    if area is None:
        return Summed(order.ticket, b"", f"there is no region {order.region!r} here")
    if strays(order.pages, area.note).size:
        return Summed(order.ticket, b"", f"some pages are not of {order.region!r}")
    return SumJob(order.ticket, area, order.pages) if order.pages else Summed(order.ticket, b"")


def verdict(job: VerifyJob) -> Verified:
    """What the sums of a job say."""
    wanted: NDArray[np.uint64] = np.frombuffer(job.wanted, "<u8")
    return Verified(job.ticket, tuple(job.logical[job.sums != wanted].tolist()))


class Summers:
    """The threads, and whose turn it is."""

    def __init__(self, on_done: Callable[[Job], None]) -> None:
        """``on_done`` takes each job whose sums are there, on a summer's thread."""
        self._on_done = on_done
        self._turns: deque[Job] = deque()
        self._news = threading.Condition()

    def start(self) -> None:
        """Start the threads."""
        sys.setswitchinterval(SWITCH_S)
        for _ in range(SUMMERS):
            threading.Thread(target=self._run, name=SUMMER, daemon=True).start()

    def want(self, job: Job) -> None:
        """Queue one job; from any thread."""
        with self._news:
            self._turns.append(job)
            self._news.notify_all()

    def _run(self) -> None:
        """Sum for ever. An exception is a bug; the worker's hook ends the process then."""
        # As the loop's own: a sum that was just ordered does not preempt whoever ordered it.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while True:
            job, low, high = self._next()
            if not job.is_unwanted:
                job.sum_slice(low, high)
            with self._news:
                job.left -= high - low
                is_done = not job.left
            if is_done:
                self._on_done(job)

    def _next(self) -> tuple[Job, int, int]:
        """The next slice of the job whose turn it is."""
        with self._news:
            while not self._turns:
                self._news.wait()
            job = self._turns.popleft()
            low = job.begun
            stride = max(1, SLICE_BYTES // job.page_bytes)
            job.begun = high = min(low + stride, job.ids.size)
            if high < job.ids.size:
                self._turns.append(job)
            return job, low, high


class Sums:
    """The loop's side: takes orders and the reports of the links, passes reports on."""

    def __init__(
        self,
        areas: Mapping[str, Area],
        summers: Summers,
        report: Callable[[Report], None],
    ) -> None:
        self._areas = areas
        self._summers = summers
        self._report = report
        self._posts: dict[int, PostJob] = {}

    def post(self, order: Post) -> None:
        """Begin to sum what is posted; before the links have the order."""
        job = post_job(order, self._areas)
        if job is not None and order.post not in self._posts:
            self._posts[order.post] = job
            self._summers.want(job)

    def verify(self, order: Verify) -> None:
        """Begin to sum what has arrived."""
        found = verify_job(order, self._areas)
        if isinstance(found, Verified):
            self._report(found)
        else:
            self._summers.want(found)

    def sum(self, order: Sum) -> None:
        """Begin to sum pages of ours."""
        found = sum_job(order, self._areas)
        if isinstance(found, Summed):
            self._report(found)
        else:
            self._summers.want(found)

    def pass_on(self, report: Report) -> None:
        """A report of the links; ``Posted`` waits for its sums."""
        match report:
            case Posted(post) if post in self._posts:
                job = self._posts[post]
                job.posted = report
                if not job.left:
                    self._conclude(job, report)
                return
            case PostFailed(post) if post in self._posts:
                self._posts.pop(post).is_unwanted = True
            case _:
                pass
        self._report(report)

    def done(self, job: Job) -> None:
        """The sums of a job are there."""
        match job:
            case VerifyJob():
                self._report(verdict(job))
            case SumJob():
                self._report(Summed(job.ticket, job.packed()))
            case PostJob(posted=Posted() as posted) if job.ticket in self._posts:
                self._conclude(job, posted)
            case _:
                pass

    def _conclude(self, job: PostJob, posted: Posted) -> None:
        del self._posts[job.ticket]
        self._report(msgspec.structs.replace(posted, sums=job.packed()))
