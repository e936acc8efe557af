"""The transfer process; how it is started is said in ``child``.

One loop thread owns the sending agents. It sleeps in epoll on the order socket, on a wake-up
descriptor and on UCX's own TCP descriptors; it posts, checks and reports. Beside it: NIXL's
progress thread (the receiver), the builder (creating an agent takes 20 to 40 ms and must not hold
up posts), the copier (pages to the saved area and back), the summers (page sums), the packer (small
pieces brought together before they are posted, see ``staging``) and, for a while, the collapser.
They hand their results to the loop's inbox.

    daemon --Order--> loop --LoadAgent--> builder --Sender--> loop --first write--> AgentLoaded
                       |---Post--> handles --> PostMoved, PostFailed, PostDone with its sums
                       |---Post(after)--> waits for its event --> as above, or Unposted
                       |---Verify--> summers --> Verified
                       |---DropAgent--> the agent is destroyed --> AgentDropped
                       '---Copy--> copier --> Copied, CopyFailed

An exception that ends the builder, the copier, the packer or a summer is a bug: the process says so
and ends too, for without them a later load, copy, post or sum would wait for ever. Without the
collapser, copies are slower, and that is all.

The process ends with its parent: by the death signal, and by the end of the order socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn

from kvd.core.effects import (
    Copy,
    DropAgent,
    Exempt,
    Forget,
    ForgetSums,
    LoadAgent,
    Post,
    Quiesce,
    SumLanded,
    Verify,
)
from kvd.core.inputs import Copied, CopyFailed, MemoryPinned
from kvd.device.cuda import CudaError
from kvd.transfer.child import first_orders
from kvd.transfer.copies import COPIER, Area, Copier, mapped_area
from kvd.transfer.device_streams import DeviceStuck
from kvd.transfer.devices import Devices, DeviceUnusable
from kvd.transfer.event_waits import EventWaits
from kvd.transfer.mapping import (
    Collapser,
    RegionUnusable,
    Upkeep,
    keep_map,
    map_region,
    map_scratch,
)
from kvd.transfer.metadata import VERSION, Metadata, pack
from kvd.transfer.nixl import Binding, NixlUnusable, ReceivingAgent
from kvd.transfer.orders import (
    TRANSFER_STREAM,
    Alive,
    BeginTransfer,
    Collapsed,
    Dying,
    Frames,
    Order,
    Probe,
    Ready,
    RegionPlan,
    Report,
    Sum,
    frame_of,
    order_of,
    with_descriptors,
)
from kvd.transfer.quiescence import Quiescence
from kvd.transfer.self_write import advised, prove
from kvd.transfer.sending_agents import (
    BUILDER,
    SCRATCH_BYTES,
    AgentBuilder,
    BuiltAgent,
    OwnMemory,
    SendingAgents,
)
from kvd.transfer.staging import PACKER, STAGING_BYTES
from kvd.transfer.sums import SUMMER, PageSumJob, Summers, Sums

if TYPE_CHECKING:
    import socket

TICK_S: Final = 0.02
"""A look at what is in flight, should no descriptor have told of it."""
BLIND_TICK_S: Final = 0.0005
READ_BYTES: Final = 2**20
LAST_WORDS_S: Final = 2.0


Item = BuiltAgent | Collapsed | MemoryPinned | Copied | CopyFailed | PageSumJob | Dying
"""What other threads hand to the loop."""


class Inbox:
    """Results of other threads, and the descriptor that wakes the loop for them."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: deque[Item] = deque()

    def put(self, item: Item) -> None:
        """Add a result; from any thread."""
        # The item before the wake: the loop may look at once, and then sleeps.
        self._items.append(item)
        os.eventfd_write(self.descriptor, 1)

    def take(self) -> list[Item]:
        """Everything added so far."""
        # Before the items: what is put between the two wakes the loop once more, for nothing. The
        # other way round its wake would be eaten, and the item would lie until something else came.
        os.eventfd_read(self.descriptor)
        return [self._items.popleft() for _ in range(len(self._items))]


class TransferWorker:
    """The loop of the transfer process."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._frames = Frames()
        self._poll = select.epoll()
        self._inbox = Inbox()
        self._reports: list[Report] = []
        self._unsent = bytearray()
        self._is_full = False

    def begin(self) -> None:
        """Wait for ``BeginTransfer``; map, register, and report ``Ready``.

        Raises:
            NixlUnusable: NIXL is missing or refuses.
            RegionUnusable: a region cannot be mapped.
            DeviceUnusable: a region cannot be allocated on its device.
        """
        begin, later = self._first_order()
        os.environ.update(begin.environment)
        threading.excepthook = self._broke  # before there is a thread that others wait for
        # Before anything of the pool is mapped: by its witness this process counts as gone only
        # when its map is, and the map has the pool in it.
        for descriptor in begin.kept:
            keep_map(descriptor)
        devices = Devices()
        areas = {plan.name: _area(plan, devices) for plan in begin.regions}
        registered = {plan.name: areas[plan.name] for plan in begin.regions if plan.is_registered}
        scratch = map_scratch(SCRATCH_BYTES)
        staging = map_scratch(STAGING_BYTES, in_huge_pages=True)
        mine = OwnMemory(begin.name, registered, scratch, staging)
        binding = Binding(devices.cuda_major)
        with advised(binding, mine):
            self._receiver = ReceivingAgent(binding, begin.name, mine.spans())
            told = _told(mine, self._receiver.blob)
            # Before ``Ready``: what is announced to peers must be memory that NIXL does reach.
            prove(binding, mine, told)
        builder = AgentBuilder(binding, mine, self._inbox.put)
        summers = Summers(self._inbox.put)
        self._sums = Sums(areas, summers, self._reports.append)
        self._agents = SendingAgents(
            builder=builder,
            mine=mine,
            poll=self._poll,
            report=self._sums.pass_on,
            posting=self._sums.posting,
        )
        report = self._reports.append
        self._quiescence = Quiescence(self._receiver.thread, self._agents.sockets, report)
        self._event_waits = EventWaits(devices, post=self._post, report=report)
        self._copier = Copier(areas, self._inbox.put)
        summers.start()
        shared = devices.shared(areas)
        self._reports.append(Ready(pack(told), f"{binding.module} UCX", shared))
        self._flush()
        self._orders.settimeout(0.0)
        self._poll.register(self._orders, select.EPOLLIN)
        self._poll.register(self._inbox.descriptor, select.EPOLLIN)
        # After ``Ready``: it takes seconds for a large pool, and nobody waits for it.
        upkeep = [self._upkeep(plan, areas[plan.name], devices) for plan in begin.regions]
        # First what copies of devices go faster for.
        upkeep.sort(key=lambda work: work.register is None)
        Collapser(upkeep, is_busy=self._is_busy, on_over=self._inbox.put).start()
        # What came in one read with the first order, and is told by no descriptor any more.
        for order in later:
            self._obey(order)

    def _upkeep(self, plan: RegionPlan, area: Area, devices: Devices) -> Upkeep:
        """What is done to a region while it serves."""
        register = None
        if plan.meets_device and devices.are_used:
            register = devices.pinning(area.note, self._inbox.put)
        return Upkeep(area.note, plan.in_huge_pages, register)

    def run(self) -> None:
        """Serve until the end of the order socket."""
        while True:
            for descriptor, _ in self._poll.poll(self._patience_s()):
                if descriptor == self._orders.fileno():
                    self._read()
                elif descriptor == self._inbox.descriptor:
                    self._take()
                else:
                    self._agents.woken(descriptor)
            # Before posts get their turns: what its event has released goes in this round.
            if self._event_waits.is_pending:
                self._event_waits.step()
            self._agents.post_round()
            self._agents.step()  # last: what one host copies is done when it is posted
            self._quiescence.step()
            if self._sums_here:
                self._sums.step()
            if self._reports or self._unsent:
                self._flush()

    def fail(self, last: Dying) -> NoReturn:
        """Send what is unsent and the last words, and end."""
        self._unsent += frame_of([*self._reports, last])
        # A blocking send for a moment: what was done before the end is as true as ever.
        self._orders.settimeout(LAST_WORDS_S)
        # The daemon may be gone, or not read: then the exit status is all that it learns.
        with contextlib.suppress(OSError):
            self._orders.sendall(self._unsent)
        os._exit(1)

    def _broke(self, args: threading.ExceptHookArgs) -> None:
        """Show the traceback of a thread that ended by an exception; end if others wait for it."""
        threading.__excepthook__(args)
        if args.thread is not None and args.thread.name in {BUILDER, COPIER, PACKER, SUMMER}:
            what = f"{args.exc_type.__name__}: {args.exc_value}"
            self._inbox.put(Dying(f"thread {args.thread.name} ended by {what}"))

    def _first_order(self) -> tuple[BeginTransfer, list[Order]]:
        orders, received = first_orders(self._orders, self._frames, TRANSFER_STREAM)
        match orders[0]:
            case BeginTransfer() as begin:
                return with_descriptors(begin, received), orders[1:]
            case other:
                raise RegionUnusable(f"the first order is {type(other).__name__}, not Begin")

    def _is_busy(self) -> bool:
        """Whether posts are under way; read by the collapser, where an old answer does no harm."""
        return self._agents.is_pending

    @property
    def _sums_here(self) -> bool:
        """Whether this thread sums too: it has no handle to post, or to look after."""
        return self._sums.are_awaited and not (self._agents.can_post or self._agents.is_pending)

    def _patience_s(self) -> float | None:
        """How long the loop may sleep."""
        # It does not sleep while a handle could be posted: each round posts one for each queue
        # only.
        if self._agents.can_post or self._agents.is_fast or self._sums_here:
            return 0.0
        if self._agents.is_blind or self._event_waits.is_pending:
            return BLIND_TICK_S
        patience_s = self._quiescence.patience_s
        if self._agents.is_pending:
            return TICK_S if patience_s is None else min(TICK_S, patience_s)
        return patience_s

    def _read(self) -> None:
        try:
            data = self._orders.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            os._exit(0)
        for body in self._frames.feed(data):
            self._obey(order_of(body))

    def _obey(self, order: Order) -> None:
        match order:
            case LoadAgent():
                self._agents.load(order)
            case DropAgent() | Post() | Forget():
                self._obey_of_posts(order)
            case Verify() | SumLanded() | ForgetSums() | Sum():
                self._obey_of_sums(order)
            case Quiesce():
                self._quiescence.ask(order)
            case Exempt():
                self._quiescence.exempt(order)
            case Copy():
                self._copier.want(order)
            case Probe(number):
                self._reports.append(Alive(number))
            case BeginTransfer():
                os._exit(0)

    def _obey_of_posts(self, order: DropAgent | Post | Forget) -> None:
        match order:
            case DropAgent():
                # Before the agent goes: a post whose event comes now must not be handed to it.
                self._event_waits.drop(order)
                self._agents.drop(order)
            case Post(after=b""):
                self._post(order)
            case Post():
                self._event_waits.add(order)
            case Forget(post):
                self._event_waits.forget(post)

    def _obey_of_sums(self, order: Verify | SumLanded | ForgetSums | Sum) -> None:
        match order:
            case Verify():
                self._sums.verify(order)
            case SumLanded():
                self._sums.landed(order)
            case ForgetSums():
                self._sums.forget(order)
            case Sum():
                self._sums.sum(order)

    def _post(self, order: Post) -> None:
        """What it reads is written: sum it, and send it."""
        # Summed as it is sent, from the same bytes: the sums ride in the ``PostDone``.
        self._sums.post(order)
        self._agents.post(order)

    def _take(self) -> None:
        for item in self._inbox.take():
            match item:
                case BuiltAgent():
                    self._agents.built(item)
                case PageSumJob():
                    self._sums.done(item)
                case Collapsed() | MemoryPinned() | Copied() | CopyFailed():
                    self._reports.append(item)
                case Dying():
                    self.fail(item)

    def _flush(self) -> None:
        """Send the reports; what the socket does not take now goes when it is writable."""
        if self._reports:
            self._unsent += frame_of(self._reports)
            self._reports.clear()
        try:
            while self._unsent:
                sent = self._orders.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            self._poll.modify(self._orders, select.EPOLLIN | select.EPOLLOUT)
            self._is_full = True
            return
        except OSError:
            os._exit(0)
        if self._is_full:
            self._poll.modify(self._orders, select.EPOLLIN)
            self._is_full = False


def _area(plan: RegionPlan, devices: Devices) -> Area:
    """The region in its memory."""
    if plan.device is not None:
        return devices.area(plan, plan.device)
    note = map_region(plan)
    os.close(plan.fd)
    return mapped_area(note)


def _told(mine: OwnMemory, blob: bytes) -> Metadata:
    """What peers must know."""
    notes = tuple(area.note for area in mine.regions.values())
    return Metadata(
        version=VERSION,
        agent=mine.name,
        blob=blob,
        scratch=mine.scratch,
        scratch_bytes=SCRATCH_BYTES,
        regions=notes,
    )


def main(orders: socket.socket) -> None:
    """Serve that socket."""
    worker = TransferWorker(orders)
    try:
        worker.begin()
    except (NixlUnusable, RegionUnusable, DeviceUnusable) as exc:
        worker.fail(Dying(str(exc)))
    # A woken batch thread does not preempt the one that woke it: without this the daemon's loop
    # stood still for up to 8 ms in the send of an order, because the copy began there and then.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        worker.run()
    except (CudaError, DeviceStuck) as exc:
        # While it has nothing to post the loop sums too; of a device that has failed it says so.
        worker.fail(Dying(str(exc)))
