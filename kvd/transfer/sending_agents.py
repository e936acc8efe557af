"""The sending agents of this process, one per transport generation of a peer incarnation.

    LoadAgent -> BUILDING (builder thread) -> WARMING (a first write) -> UP -> DropAgent -> gone

The first write goes from our scratch memory to the peer's, so it harms nothing; it connects, finds
out how bytes travel to this peer, and makes ``AgentLoaded`` mean that they do. A ``DropAgent`` at
any point ends the agent; one that is still being built is destroyed when it comes out.
"""

from __future__ import annotations

import select
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.core.inputs import AgentDropped, AgentFailed, AgentLoaded, PostFailed, WritePath
from kvd.transfer.metadata import BadMetadata, unpack
from kvd.transfer.nixl import MemorySpan, NixlUnusable, SendingAgent
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.paths import AgentKey
from kvd.transfer.post_queue import PostQueue
from kvd.transfer.staging import STAGING_BYTES, Staging
from kvd.transfer.streams import names

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import DropAgent, LoadAgent, Post
    from kvd.transfer.copies import Area
    from kvd.transfer.metadata import Metadata
    from kvd.transfer.nixl import Binding
    from kvd.transfer.orders import Report

SCRATCH_BYTES: Final = 128 * 2**10
WARM_LIMIT_S: Final = 10.0
IDLE_WAKES: Final = 64
BUILDER: Final = "builder"
"""The name of its thread."""
_ABOUT_THE_PEER: Final = (NixlUnusable, OSError, RuntimeError, ValueError, IndexError, MemoryError)
"""What a peer's blob can bring about: the binding turns C++ exceptions into any of these."""


class BuiltAgent(NamedTuple):
    """What the builder made of a ``LoadAgent``: a sender, or why there is none."""

    key: AgentKey
    peer: Metadata
    sender: SendingAgent | NixlUnusable


class OwnMemory(NamedTuple):
    """What this process sends from: its regions, and its scratch and staging memory by address."""

    name: str
    regions: dict[str, Area]
    scratch: int
    staging: int

    def spans(self) -> list[MemorySpan]:
        """Everything to register."""
        notes = [area.note for area in self.regions.values()]
        spans = [MemorySpan(note.address, note.region_bytes, note.place) for note in notes]
        return [
            *spans,
            MemorySpan(self.scratch, SCRATCH_BYTES),
            MemorySpan(self.staging, STAGING_BYTES),
        ]


class AgentBuilder:
    """Creates sending agents on a thread of its own, one after the other."""

    def __init__(
        self, binding: Binding, mine: OwnMemory, on_built: Callable[[BuiltAgent], None]
    ) -> None:
        self._binding = binding
        self._mine = mine
        self._on_built = on_built
        self._wanted: SimpleQueue[tuple[AgentKey, Metadata]] = SimpleQueue()
        self._made = 0
        threading.Thread(target=self._run, name=BUILDER, daemon=True).start()

    def want(self, key: AgentKey, peer: Metadata) -> None:
        """Queue one agent."""
        self._wanted.put((key, peer))

    def _run(self) -> None:
        """Build for ever; an agent name is never used twice.

        Any exception but those about one peer is a bug; the worker's hook ends the process, since
        without this thread every later ``LoadAgent`` would wait for ever.
        """
        while True:
            key, peer = self._wanted.get()
            self._made += 1
            name = f"{self._mine.name}-tx{self._made}"
            try:
                sender: SendingAgent | NixlUnusable = SendingAgent(
                    self._binding, name, spans=self._mine.spans(), peer=peer
                )
            except _ABOUT_THE_PEER as exc:
                what = "" if isinstance(exc, NixlUnusable) else f"{type(exc).__name__}: "
                sender = NixlUnusable(f"{what}{exc}")
            self._on_built(BuiltAgent(key, peer, sender))
            del sender  # the loop's is the only reference: the last one destroys the agent


class _Warming(NamedTuple):
    sender: SendingAgent
    peer: Metadata
    handle: int
    size: int
    since_s: float


class SendingAgents:
    """Every sending agent and what it is doing; driven by the worker's loop."""

    def __init__(
        self,
        *,
        builder: AgentBuilder,
        mine: OwnMemory,
        poll: select.epoll,
        report: Callable[[Report], None],
        posting: Callable[[int, float], None],
    ) -> None:
        self._builder = builder
        self._mine = mine
        self._staging = Staging(mine.staging)
        self._poll = poll
        # Its edges alone wake the loop: nobody has to read it.
        poll.register(self._staging.descriptor, select.EPOLLIN | select.EPOLLET)
        self._report = report
        self._posting = posting
        self._building: set[AgentKey] = set()
        self._unwanted: set[AgentKey] = set()
        self._warming: dict[AgentKey, _Warming] = {}
        self._queues: dict[AgentKey, PostQueue] = {}
        self._watched: dict[int, AgentKey] = {}
        self._idle_wakes: dict[AgentKey, int] = {}

    @property
    def can_post(self) -> bool:
        """Whether a handle could be started right now."""
        return any(queue.can_post for queue in self._queues.values())

    @property
    def is_pending(self) -> bool:
        """Whether something in flight needs a look now and then."""
        return bool(self._warming) or any(queue.has_flights for queue in self._queues.values())

    @property
    def is_blind(self) -> bool:
        """Whether something in flight has no descriptor that would wake the loop."""
        return any(queue.is_blind for queue in self._queues.values()) or any(
            not warming.sender.polls for warming in self._warming.values()
        )

    @property
    def is_fast(self) -> bool:
        """Whether what is in flight may be done before the loop could fall asleep."""
        return any(queue.is_fast for queue in self._queues.values())

    def sockets(self) -> set[str]:
        """Those of all agents but the ones being built, by name."""
        senders = [warming.sender for warming in self._warming.values()]
        senders += [queue.sender for queue in self._queues.values()]
        return names([poll for sender in senders for poll in sender.polls])

    def load(self, order: LoadAgent) -> None:
        """Have an agent built; a repeated ``LoadAgent`` is answered again."""
        key = AgentKey(order.incarnation, order.generation)
        if key in self._queues:
            queue = self._queues[key]
            self._report(
                AgentLoaded(UNSTAMPED, *key, streams=queue.sender.streams(), path=queue.path)
            )
            return
        if key in self._building or key in self._warming:
            self._unwanted.discard(key)
            return
        try:
            peer = unpack(order.metadata)
        except BadMetadata as exc:
            # Before NIXL has seen a byte of it: damaged metadata can end this process.
            self._report(AgentFailed(UNSTAMPED, *key, why=str(exc)))
            return
        self._building.add(key)
        self._builder.want(key, peer)

    def drop(self, order: DropAgent) -> None:
        """Destroy an agent, failing its posts first; an unknown one is as good as destroyed."""
        key = AgentKey(order.incarnation, order.generation)
        # It cannot be stopped: it is destroyed, and its end reported, when it comes out.
        if key in self._building:
            self._unwanted.add(key)
            return
        open_bytes = 0
        if key in self._queues:
            queue = self._queues.pop(key)
            # Before it goes: the numbers of its descriptors may be another's a moment later.
            self._unwatch(key, queue.sender)
            open_bytes = queue.destroy(f"sending agent for {key.peer} was dropped")
        elif key in self._warming:
            warming = self._warming.pop(key)
            self._unwatch(key, warming.sender)
            warming.sender.destroy()
        self._report(AgentDropped(UNSTAMPED, *key, unconfirmed_bytes=open_bytes))

    def post(self, order: Post) -> None:
        """Hand a post to its queue."""
        key = AgentKey(order.incarnation, order.generation)
        queue = self._queues.get(key)
        if queue is None:
            why = f"no sending agent for peer {key.peer} generation {key.generation} is loaded"
            self._report(PostFailed(UNSTAMPED, order.post, why))
        else:
            # It may have been looked away from while it was idle, see ``woken``.
            self._watch(key, queue.sender)
            queue.add(order, self._mine.regions)

    def built(self, built: BuiltAgent) -> None:
        """Take over what the builder made and start its first write."""
        key = built.key
        self._building.discard(key)
        if isinstance(built.sender, NixlUnusable):
            self._load_failed(key, str(built.sender))
            return
        if key in self._unwanted:
            self._unwanted.discard(key)
            built.sender.destroy()
            self._report(AgentDropped(UNSTAMPED, *key))
            return
        self._watch(key, built.sender)
        # Theirs may be smaller, and beyond it is somebody's memory.
        size = min(SCRATCH_BYTES, built.peer.scratch_bytes)
        source = np.array([[self._mine.scratch, size, 0]], np.uint64)
        destination = np.array([[built.peer.scratch, size, 0]], np.uint64)
        try:
            handle = built.sender.post(source, destination)
        except NixlUnusable as exc:
            self._give_up(key, built.sender, str(exc))
            return
        self._warming[key] = _Warming(built.sender, built.peer, handle, size, time.monotonic())

    def step(self) -> None:
        """Look at everything in flight."""
        for key, warming in list(self._warming.items()):
            self._warm(key, warming)
        for queue in self._queues.values():
            if queue.has_flights:
                queue.step()

    def post_round(self) -> None:
        """Start at most one handle per queue."""
        able = [queue for queue in self._queues.values() if queue.can_post]
        for queue in able:
            queue.post_next(is_alone=len(able) == 1)

    def woken(self, descriptor: int) -> None:
        """A descriptor of UCX is readable; an idle agent has to be told.

        One that stays readable for no reason is not watched until its next post.
        """
        key = self._watched.get(descriptor)
        queue = self._queues.get(key) if key is not None else None
        if key is None or queue is None:
            return
        if queue.has_flights:
            self._idle_wakes[key] = 0
            return
        # Otherwise it stays readable, and the loop would turn without an end.
        queue.sender.progress()
        self._idle_wakes[key] = self._idle_wakes.get(key, 0) + 1
        if self._idle_wakes[key] > IDLE_WAKES:
            self._unwatch(key, queue.sender)

    def _warm(self, key: AgentKey, warming: _Warming) -> None:
        try:
            is_done = warming.sender.step(warming.handle)
        except NixlUnusable as exc:
            del self._warming[key]
            self._give_up(key, warming.sender, str(exc))
            return
        if is_done:
            del self._warming[key]
            # As UCX did it, and not by the address: peers on one host may be kept from each other's
            # memory.
            by_socket = warming.sender.socket_bytes() >= warming.size
            path = (
                WritePath.NETWORK if by_socket or not warming.sender.polls else WritePath.SAME_HOST
            )
            regions = {region.name: region for region in warming.peer.regions}
            self._queues[key] = PostQueue(
                warming.sender,
                key=key,
                path=path,
                regions=regions,
                staging=self._staging,
                report=self._report,
                posting=self._posting,
            )
            self._report(AgentLoaded(UNSTAMPED, *key, streams=warming.sender.streams(), path=path))
        elif time.monotonic() - warming.since_s > WARM_LIMIT_S:
            del self._warming[key]
            why = f"peer {key.peer} did not confirm a first write within {WARM_LIMIT_S:.0f} s"
            self._give_up(key, warming.sender, why)

    def _give_up(self, key: AgentKey, sender: SendingAgent, why: str) -> None:
        self._unwatch(key, sender)
        sender.destroy()
        self._load_failed(key, why)

    def _load_failed(self, key: AgentKey, why: str) -> None:
        """Report a failed load, and the drop that was waiting for its end."""
        self._report(AgentFailed(UNSTAMPED, *key, why=why))
        # A drop that waited for it: it was answered by nothing yet.
        if key in self._unwanted:
            self._unwanted.discard(key)
            self._report(AgentDropped(UNSTAMPED, *key))

    def _watch(self, key: AgentKey, sender: SendingAgent) -> None:
        for descriptor in sender.polls:
            if descriptor not in self._watched:
                self._poll.register(descriptor)
                self._watched[descriptor] = key
        self._idle_wakes[key] = 0

    def _unwatch(self, key: AgentKey, sender: SendingAgent) -> None:
        for descriptor in sender.polls:
            if self._watched.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)
        self._idle_wakes.pop(key, None)
