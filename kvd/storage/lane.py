"""Two ways through a tier, each of two threads: what is written, and what is read; and who asks.

    Demote --> seal: sums, heads --> write: put ---> Demoted
    Drop, Age -------------------> write: drop, age
    Promote --> read: get ---> check: sums ---> Promoted
    ProbeTier ----> probe: exists ----------------> TierProbed

Orders are cut into batches of some megabytes; one is summed while the one before it is on the disk,
whichever order it is of. What is written or dropped is so in the order in which it was ordered:
room that is made is there before what it was made for. What is read passes by all of that, and
finds an object or does not.

What is written makes way for handoffs when it is told to (``PaceWrites``): it goes in small pieces
then, and rests after each. What is read never does: a request may wait for it.

An object that does not verify is removed at once, and named in the ``Promoted``. Invariants: each
order is answered once, after its last batch, and then none of its pages is read or written any
more; at most ``AHEAD`` batches wait between two threads.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import Queue
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from kvd.core.effects import (
    AgeObjects,
    Demote,
    DropNamespace,
    DropObjects,
    PaceWrites,
    ProbeTier,
    Promote,
)
from kvd.core.inputs import Demoted, Promoted, TierProbed
from kvd.core.tiers.keys import each_key
from kvd.storage.backend import ObjectName, ObjectRead, ObjectWrite, StoredObject
from kvd.storage.objects import BadObject, ObjectHead, packed_head, read_head, sum_of
from kvd.storage.probing import search, waiting
from kvd.transfer.core_waits import CoreWaits
from kvd.transfer.orders import UNSTAMPED
from kvd.types import count, page_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.core.effects import StorageOrder
    from kvd.core.inputs import StorageReport
    from kvd.storage.backend import Backend
    from kvd.storage.pages import ObjectPages

    Reporting = Callable[[StorageReport], None]

AHEAD: Final = 2
"""Batches between two threads."""

PIECE_BYTES: Final = 2**20
"""Written at a time beside handoffs, or one object; then it rests."""

APART_NS: Final = 1000
"""Between the times of two objects that are used together: of a prompt the last one goes first."""

OrderT = TypeVar("OrderT", Demote, Promote)


def refusal(order: Demote | Promote | ProbeTier, why: str) -> StorageReport:
    """The answer to an order of which nothing is done."""
    if isinstance(order, ProbeTier):
        return TierProbed(at_s=UNSTAMPED, ticket=order.ticket, n_there=0, why=why)
    if isinstance(order, Demote):
        return Demoted(at_s=UNSTAMPED, ticket=order.ticket, written=(), n_bytes=0, why=why)
    bad = tuple(range(len(each_key(order.keys))))
    return Promoted(at_s=UNSTAMPED, ticket=order.ticket, bad=bad, n_bytes=0, why=why)


class _Batch(Generic[OrderT]):
    """Some objects of one order that are moved together: those at ``places`` of it."""

    def __init__(
        self, order: OrderT, places: range, keys: list[bytes], pages: list[int], used_ns: int
    ) -> None:
        """``used_ns``: of the first object of the order."""
        self.order: OrderT = order
        self.used_ns = [used_ns - place * APART_NS for place in places]
        self.places = places
        self.names = [ObjectName(order.namespace, keys[place]) for place in places]
        self.pages = [pages[place] for place in places]
        self.is_last = places.stop == len(pages)


class _SealedBatch(NamedTuple):
    batch: _Batch[Demote]
    writes: list[ObjectWrite]


class _Aged(NamedTuple):
    objects: list[StoredObject]


def _aged(order: AgeObjects, used_ns: int) -> _Aged:
    return _Aged(
        [
            StoredObject(ObjectName(order.namespace, key), used_ns - place * APART_NS)
            for place, key in enumerate(each_key(order.keys))
        ]
    )


class _ReadBatch(NamedTuple):
    batch: _Batch[Promote]
    heads: list[ObjectHead | BadObject]


class _Tally:
    """What has become of an order so far."""

    def __init__(self) -> None:
        self.good: list[int] = []
        self.bad: list[int] = []
        self.why = ""

    def count(self, place: int, why: str) -> None:
        """One object of it; ``why`` it is bad, empty if it is not."""
        (self.bad if why else self.good).append(place)
        self.why = self.why or why


class Pace:
    """So many bytes a second at most, one way and on one thread; 0: as many as there are."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free_s = 0.0
        """When what was moved has had its time."""

    def spend(self, n_bytes: int) -> None:
        """Return when so many may be moved."""
        if self._rate:
            now_s = time.monotonic()
            begin_s = max(now_s, self._free_s)
            self._free_s = begin_s + n_bytes / self._rate
            time.sleep(begin_s - now_s)


class WriteShare:
    """How much of their time the threads that write take: all of it, or a share, beside handoffs.

    A share only where cores are scarce: a thread that rests beside an idle core helps nobody.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._changed = threading.Condition()

    @property
    def is_whole(self) -> bool:
        """Whether they make way for nobody."""
        return self._share >= 1

    def set(self, share: float) -> None:
        """It is that much from now on; with all of it who rests goes on at once."""
        with self._changed:
            self._share = share
            self._changed.notify_all()

    def rest(self, began_s: float, waits: CoreWaits) -> None:
        """Return when what a thread has done since then has had its share of the time."""
        if self._share < 1 and waits.is_scarce():
            rest_s = (time.monotonic() - began_s) * (1 / self._share - 1)
            with self._changed:
                self._changed.wait_for(lambda: self.is_whole, rest_s)


class TierLanes:
    """What writes and reads one tier."""

    def __init__(
        self,
        tier: str,
        backend: Backend,
        pages: ObjectPages,
        layout: bytes,
        report: Reporting,
        max_rate: int = 0,
    ) -> None:
        """``report`` takes each outcome, on a thread of a lane."""
        self._tier = tier
        self._backend = backend
        self._pages = pages
        self._layout = layout
        self._report = report
        able = backend.capabilities
        self._read_stride, self._write_stride, self._piece = [
            max(1, min(able.batch_objects, n_bytes // pages.page_bytes))
            for n_bytes in (able.batch_bytes, able.write_bytes, PIECE_BYTES)
        ]
        self._write_share = WriteShare()
        self._writing, self._reading = Pace(max_rate), Pace(max_rate)
        self._to_write: Queue[Demote | DropObjects | AgeObjects | DropNamespace] = Queue()
        self._to_read: Queue[Promote] = Queue()
        self._to_probe: Queue[ProbeTier] = Queue()
        self._sealed: Queue[_SealedBatch | _Aged | DropObjects | DropNamespace] = Queue(AHEAD)
        self._got: Queue[_ReadBatch] = Queue(AHEAD)
        self._stop_ns = 0
        """When the first order of a stop was carried out; only what seals knows it."""

    def start(self) -> None:
        """Begin to serve. An exception on one of the threads is the end of the process."""
        for name, run in (
            ("seal", self._seal),
            ("write", self._write),
            ("read", self._read),
            ("check", self._check),
            ("probe", self._probe),
        ):
            threading.Thread(target=run, name=f"{self._tier}-{name}", daemon=True).start()

    def want(self, order: StorageOrder) -> None:
        """Queue an order; one that makes no sense is refused whole."""
        match order:
            case PaceWrites(share=share):
                self._write_share.set(share)
            case ProbeTier():
                self._to_probe.put(order)
            case DropObjects() | AgeObjects() | DropNamespace():
                self._to_write.put(order)
            case _ if why := self._flaw(order):
                self._report(refusal(order, why))
            case Demote():
                self._to_write.put(order)
            case Promote():
                self._to_read.put(order)

    def _flaw(self, order: Demote | Promote) -> str:
        n_keys, n_pages = len(each_key(order.keys)), count(order.pages)
        if n_keys != n_pages:
            return f"{n_keys} keys for {n_pages} pages"
        strays = self._pages.strays(order.pages)
        return f"page {strays[0]} is no page of the pool" if strays else ""

    def _batches(self, order: OrderT, stride: int, used_ns: int) -> Iterator[_Batch[OrderT]]:
        keys, pages = each_key(order.keys), page_ids(order.pages)
        # One batch of nothing for an order of nothing: it is answered as any other.
        for first in range(0, max(1, len(pages)), stride):
            end = min(first + stride, len(pages))
            yield _Batch(order, range(first, end), keys, pages, used_ns)

    # ---- what is written -------------------------------------------------------------------------

    def _seal(self) -> None:
        """Sum pages and make heads of them."""
        waits = CoreWaits()
        while True:
            match self._to_write.get():
                case Demote() as order:
                    for batch in self._batches(order, self._write_stride, self._used_ns(order)):
                        self._sealed.put(_SealedBatch(batch, self._writes(batch, waits)))
                case AgeObjects() as order:
                    self._sealed.put(_aged(order, self._used_ns(order)))
                case order:
                    self._sealed.put(order)

    def _used_ns(self, order: Demote | AgeObjects) -> int:
        """When the first object of it counts as used."""
        now_ns = time.time_ns()
        if not order.behind:
            return now_ns
        self._stop_ns = self._stop_ns or now_ns
        return self._stop_ns - order.behind * APART_NS

    def _writes(self, batch: _Batch[Demote], waits: CoreWaits) -> list[ObjectWrite]:
        writes: list[ObjectWrite] = []
        for name, page, used_ns in zip(batch.names, batch.pages, batch.used_ns, strict=True):
            began_s = time.monotonic()
            head, addresses = self._head(name.key, page), self._pages.addresses(page)
            writes.append(ObjectWrite(name, head, addresses, used_ns))
            self._write_share.rest(began_s, waits)
        return writes

    def _head(self, key: bytes, page: int) -> bytes:
        head = ObjectHead(
            key=key,
            layout=self._layout,
            page_bytes=self._pages.page_bytes,
            page_sum=sum_of(key, self._pages.pieces(page)),
        )
        return packed_head(head)

    def _write(self) -> None:
        """Carry out what is sealed, in its order."""
        tally, waits = _Tally(), CoreWaits()
        while True:
            match self._sealed.get():
                case DropObjects(namespace=namespace, keys=keys):
                    self._backend.drop(ObjectName(namespace, key) for key in each_key(keys))
                case _Aged(objects):
                    self._backend.age(objects)
                case DropNamespace(namespace=namespace):
                    self._backend.drop_namespace(namespace)
                case _SealedBatch(batch, writes):
                    self._writing.spend(len(writes) * self._pages.page_bytes)
                    outcomes = self._put(writes, waits)
                    for place, why in zip(batch.places, outcomes, strict=True):
                        tally.count(place, why)
                    if batch.is_last:
                        self._report(self._demoted(batch.order, tally))
                        tally = _Tally()

    def _put(self, writes: list[ObjectWrite], waits: CoreWaits) -> list[str]:
        """Write them together, or some at a time beside handoffs; what is wrong with each."""
        outcomes: list[str] = []
        while len(outcomes) < len(writes):
            began_s, first = time.monotonic(), len(outcomes)
            end = len(writes) if self._write_share.is_whole else first + self._piece
            outcomes += self._backend.put(writes[first:end])
            self._write_share.rest(began_s, waits)
        return outcomes

    def _demoted(self, order: Demote, tally: _Tally) -> Demoted:
        return Demoted(
            at_s=UNSTAMPED,
            ticket=order.ticket,
            written=tuple(tally.good),
            n_bytes=len(tally.good) * self._pages.page_bytes,
            why=tally.why,
        )

    # ---- what is read ----------------------------------------------------------------------------

    def _read(self) -> None:
        """Read objects over their pages."""
        while True:
            for batch in self._batches(self._to_read.get(), self._read_stride, time.time_ns()):
                reads = [
                    ObjectRead(name, self._judge(name.key), self._pages.addresses(page), used_ns)
                    for name, page, used_ns in zip(
                        batch.names, batch.pages, batch.used_ns, strict=True
                    )
                ]
                self._reading.spend(len(reads) * self._pages.page_bytes)
                self._got.put(_ReadBatch(batch, self._backend.get(reads)))

    def _judge(self, key: bytes) -> Callable[[bytes], ObjectHead | BadObject]:
        return partial(read_head, key=key, layout=self._layout, page_bytes=self._pages.page_bytes)

    def _check(self) -> None:
        """Compare what was read with its sums; remove what is not what it should be."""
        tally = _Tally()
        while True:
            batch, heads = self._got.get()
            for at, (name, page, head) in enumerate(
                zip(batch.names, batch.pages, heads, strict=True), batch.places.start
            ):
                why = self._wrong(name.key, page, head)
                if why and not (isinstance(head, BadObject) and not head.is_there):
                    self._backend.drop([name])
                tally.count(at, why)
            if batch.is_last:
                self._report(self._promoted(batch.order, tally))
                tally = _Tally()

    def _wrong(self, key: bytes, page: int, head: ObjectHead | BadObject) -> str:
        """What is wrong with an object that was read; empty if its page is what it should be."""
        if isinstance(head, BadObject):
            why = head.why
        elif sum_of(key, self._pages.pieces(page)) == head.page_sum:
            return ""
        else:
            why = "its page does not have the sum that its head says"
        return f"object {key.hex()[:12]}: {why}"

    def _promoted(self, order: Promote, tally: _Tally) -> Promoted:
        return Promoted(
            at_s=UNSTAMPED,
            ticket=order.ticket,
            bad=tuple(tally.bad),
            n_bytes=len(tally.good) * self._pages.page_bytes,
            why=tally.why,
        )

    # ---- what is asked for -----------------------------------------------------------------------

    def _probe(self) -> None:
        """Say what is there."""
        while True:
            for probed in search(self._backend, waiting(self._to_probe)):
                self._report(probed)
