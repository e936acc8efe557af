"""KV events for routers: what the core tells, as numbered batches on a PUB; and once more, asked.

    core  --BlocksStored, BlocksRemoved, BlocksCleared--> gathered  --once a turn--> batches
    batch --> every subscriber that has room;  --> kept, for whoever asks for its number

Consumers find what they have missed by the numbers (``kv_event_numbers``), and ask for them. Who
asks for a number that is kept is sent all from there on. Who asks for an older one is answered that
there is nothing, and within a second ``AllBlocksCleared`` and all that is cached are published
(``BlocksMissed``): consumers of vLLM's events take the first batch after an empty answer for their
new beginning. The same is published for whoever subscribes, because a router that never asks would
know nothing of what was cached before it came; and a new daemon begins with it. Those who ask or
come within a second, or while it is under way, are served by one of them.

An empty batch goes out where nothing else did for a while: by its number a consumer notices that it
has missed the last ones.

The loop waits for nobody. A subscriber that reads too slowly has no room, and misses batches; who
asks for kept ones is sent as many as it has room for.

What must not live here: which blocks are told (``core.kv_events``), how a batch is spelled
(``wire.kv_events``).
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
import numpy as np
from typing_extensions import override

from kvd.core import effects
from kvd.core.inputs import BlocksMissed, KvEventsSaid
from kvd.core.kv_events.block_names import NO_BLOCK, each_name
from kvd.types import ID_BYTES, Sent
from kvd.wire.kv_events import (
    END,
    NUMBER_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    encode,
    topic_of,
)
from kvd.wire.snapshot import KvEventState
from kvd.zmtp.frames import CANCELLED, SUBSCRIBED
from kvd.zmtp.listener import ListenerOwner
from kvd.zmtp.mechanism import PUB

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Iterator

    from kvd.config import Config
    from kvd.daemon.kv_event_numbers import KvEventNumbers
    from kvd.daemon.reactor import Perform, Reactor
    from kvd.wire.kv_events import RoutedEvent
    from kvd.zmtp.bounds import Bounds
    from kvd.zmtp.connection import ZmtpConnection
    from kvd.zmtp.events import ConnectionClosed, Frames
    from kvd.zmtp.turns import WriteBatch

MOST_EVENT_TOKENS: Final = 8192
"""Of one ``BlockStored``."""
MOST_BATCH_TOKENS: Final = 16_384
"""A snapshot goes out in batches of some hundred blocks: a batch a block would fill every queue on
its way, and one batch of everything would be too long for some consumers."""
MOST_REMOVED: Final = 4096
"""Blocks of one ``BlockRemoved``."""

MOST_KEPT_BYTES: Final = 64 * 2**20
"""Of batches, for those who ask."""

TOGETHER_S: Final = 1.0
"""Who has missed something within this time is served by one snapshot."""
SAY_S: Final = 1.0
"""How late the node hears what became of what it tells."""

MOST_LISTENERS: Final = 256
"""Connections of each of the two sockets."""
MOST_HEARD_BYTES: Final = 1024
"""Of a message that comes: the beginning of topics, or a number."""
MOST_TOPICS: Final = 64
"""Of one subscriber."""

SLICE: Final = 64
"""Batches that one replay is sent before the loop has another turn."""
FULL_S: Final = 0.02
"""How long a replay waits for room."""
MOST_ASKED: Final = 8
"""Questions of one connection that wait; consumers ask two or three times."""


def bounds_of_routers(bounds: Bounds) -> Bounds:
    """Of either socket: these say little, and there are few."""
    return msgspec.structs.replace(
        bounds,
        max_message_bytes=MOST_HEARD_BYTES,
        max_connections=min(bounds.max_connections, MOST_LISTENERS),
    )


class KeptBatch(msgspec.Struct, frozen=True, gc=False):
    """One that was published."""

    number: int
    payload: bytes


class KeptBatches:
    """The last batches. ``[unused, first)`` are numbers that nobody has used: empty ones."""

    def __init__(self, unused: int, first: int, most: int) -> None:
        self._batches: deque[KeptBatch] = deque()
        self._most = most
        self._bytes = 0
        self._oldest = unused
        self._first = first
        self._next = first
        self._empty = encode([], time.time())

    def add(self, batch: KeptBatch) -> None:
        """It was published."""
        self._batches.append(batch)
        self._bytes += len(batch.payload)
        self._next = batch.number + 1
        while len(self._batches) > self._most or self._bytes > MOST_KEPT_BYTES:
            gone = self._batches.popleft()
            self._bytes -= len(gone.payload)
            self._oldest = gone.number + 1

    def since(self, number: int) -> list[KeptBatch] | None:
        """All from that number on; None: there were older ones, and they are not kept."""
        if number < self._oldest:
            return None
        empty = [KeptBatch(at, self._empty) for at in range(number, min(self._first, self._next))]
        skipped = max(0, number - (self._batches[0].number if self._batches else self._next))
        return empty + list(islice(self._batches, skipped, None))


class KvEventPublisher(ListenerOwner):
    """Publishes what the core tells; ``publish_on`` once the daemon has sockets."""

    socket_type: ClassVar[bytes] = PUB

    def __init__(
        self, config: Config, reactor: Reactor, numbers: KvEventNumbers, page_tokens: int
    ) -> None:
        section = config.kv_events
        self._topic = topic_of(config.node.name, str(section.model))
        self._reactor = reactor
        self._numbers = numbers
        self._page_tokens = page_tokens
        self._heartbeat_s = section.heartbeat_s
        self._kept = KeptBatches(numbers.unused, numbers.first, section.keep_batches)
        # What the daemon before has said counts no more, whatever of it is true still.
        self._gathered: list[effects.BlockEvent] = [effects.BlocksCleared()]
        self._subscribers: dict[ZmtpConnection, set[bytes]] = {}
        """And the beginnings of topics that each wants to hear."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._snapshot: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._saying: asyncio.TimerHandle | None = None
        self._state = KvEventState(
            listen=section.listen, replay=section.replay, topic=self._topic.decode()
        )
        self._batches = self._replays = self._cut = self._dropped = 0
        numbers.on_more = self.missed
        self.perform: Perform = {
            effects.BlocksStored: self._gather,
            effects.BlocksRemoved: self._gather,
            effects.BlocksCleared: self._gather,
        }

    def publish_on(self, sock: socket.socket, batch: WriteBatch, bounds: Bounds) -> None:
        """Publish what was gathered, and go on with that."""
        self._loop = batch.loop
        self.start(sock, batch, bounds)
        self._speak()
        self._beat()
        self._say()

    @override
    async def close(self) -> None:
        """What was told goes out, under the last numbers that are used."""
        for timer in (self._snapshot, self._heartbeat, self._saying):
            if timer is not None:
                timer.cancel()
        self._speak()
        self._loop = None
        await super().close()
        await self._numbers.close()

    # ---- what is told ------------------------------------------------------------------------

    def _gather(self, effect: effects.BlockEvent) -> None:
        if not self._gathered and self._loop is not None:
            self.batch.ahead(self._speak)
        self._gathered.append(effect)

    def _speak(self) -> None:
        """Publish what this turn has brought, in batches."""
        gathered, self._gathered = self._gathered, []
        events: list[RoutedEvent] = []
        n_tokens = 0
        for effect in gathered:
            for event in self._routed(effect):
                events.append(event)
                n_tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
                if n_tokens >= MOST_BATCH_TOKENS or len(events) >= MOST_REMOVED:
                    self._publish(events)
                    events, n_tokens = [], 0
        if events:
            self._publish(events)

    def _routed(self, effect: effects.BlockEvent) -> Iterator[RoutedEvent]:
        """The same in the words of routers, none of it too long."""
        match effect:
            case effects.BlocksCleared():
                yield AllBlocksCleared()
            case effects.BlocksRemoved():
                names = each_name(effect.names)
                for at in range(0, len(names), MOST_REMOVED):
                    yield BlockRemoved(
                        block_hashes=names[at : at + MOST_REMOVED], medium=effect.medium
                    )
            case effects.BlocksStored():
                yield from self._stored(effect)

    def _stored(self, effect: effects.BlocksStored) -> Iterator[BlockStored]:
        names, size = each_name(effect.names), self._page_tokens
        most = max(1, MOST_EVENT_TOKENS // size)
        before = effect.before
        for at in range(0, len(names), most):
            hashes = names[at : at + most]
            n_tokens = len(hashes) * size
            begins = before == NO_BLOCK
            salts: list[list[str] | None] = [[effect.salt], *[None] * (len(hashes) - 1)]
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if begins else before,
                token_ids=np.frombuffer(
                    effect.tokens, "<i4", n_tokens, at * size * ID_BYTES
                ).tolist(),
                block_size=size,
                lora_id=None,
                medium=effect.medium,
                lora_name=effect.lora_name or None,
                extra_keys=salts if begins and effect.salt else None,
            )
            before = hashes[-1]

    def _publish(self, events: list[RoutedEvent]) -> None:
        number = self._numbers.take()
        if number is None:
            # Told anew when there are numbers: what is not numbered here nobody can ask for.
            self._dropped += 1
            self._say_soon()
            return
        batch = KeptBatch(number, encode(events, time.time()))
        self._kept.add(batch)
        self._batches += 1
        frames = (self._topic, number.to_bytes(NUMBER_BYTES, "big"), batch.payload)
        for connection, topics in list(self._subscribers.items()):
            wants = any(map(self._topic.startswith, topics))
            if wants and connection.send(frames) is Sent.FULL:
                self._cut += 1
        self._say_soon()

    def _beat(self) -> None:
        """An empty batch, where there was none since the last time."""
        assert self._loop is not None
        before = self._numbers.next
        self._heartbeat = self._loop.call_later(self._heartbeat_s, self._beat_after, before)

    def _beat_after(self, before: int) -> None:
        if self._numbers.next == before:
            self._publish([])
        self._beat()

    # ---- who listens -------------------------------------------------------------------------

    @override
    def welcome(self, connection: ZmtpConnection) -> bool:
        self._subscribers[connection] = set()
        # It has nothing to say from now on, and is no stranger for that.
        self.listener.keep(connection, connection.origin)
        return True

    @override
    def gone(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        if self._subscribers.pop(connection, None) is not None:
            self._say_soon()

    @override
    def take(self, connection: ZmtpConnection, frames: Frames) -> None:
        topics = self._subscribers.get(connection)
        if topics is None or len(frames) != 1:
            return
        word, prefix = frames[0][:1], frames[0][1:]
        if word == CANCELLED:
            topics.discard(prefix)
        elif word == SUBSCRIBED and len(topics) < MOST_TOPICS and prefix not in topics:
            topics.add(prefix)
            self._say_soon()
            if self._topic.startswith(prefix):
                self.missed()

    def missed(self) -> None:
        """Somebody lacks what was published: soon everything is told anew."""
        if self._snapshot is None and self._loop is not None:
            self._snapshot = self._loop.call_later(TOGETHER_S, self._tell_all)

    def _tell_all(self) -> None:
        assert self._loop is not None
        announcer = self._reactor.node.announcer
        if announcer is not None and announcer.is_telling_all:
            # Who came meanwhile has missed its beginning: once more, behind its end.
            self._snapshot = self._loop.call_later(TOGETHER_S, self._tell_all)
            return
        self._snapshot = None
        self._reactor.feed(BlocksMissed(self._reactor.clock()))

    # ---- what is kept ------------------------------------------------------------------------

    def asked(self, number: int) -> list[KeptBatch]:
        """Somebody asks for all batches from that one on; none where that is not kept."""
        self._replays += 1
        self._say_soon()
        found = self._kept.since(number)
        if found is None:
            self.missed()
        return found or []

    @property
    def topic(self) -> bytes:
        """Before each batch."""
        return self._topic

    # ---- what the node knows of it -----------------------------------------------------------

    def _say_soon(self) -> None:
        if self._saying is None and self._loop is not None:
            self._saying = self._loop.call_later(SAY_S, self._say)

    def _say(self) -> None:
        if self._saying is not None:
            self._saying.cancel()
            self._saying = None
        state = msgspec.structs.replace(
            self._state,
            last_number=self._numbers.next - 1,
            subscribers=sum(map(bool, self._subscribers.values())),
            batches=self._batches,
            replays=self._replays,
            cut=self._cut,
            dropped=self._dropped,
        )
        self._reactor.feed(KvEventsSaid(self._reactor.clock(), state))


class KvEventReplay(ListenerOwner):
    """Answers whoever asks for batches again, one question of a connection after the other."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher
        self._asked: dict[ZmtpConnection, deque[int]] = {}
        """Who is being answered, and what else it asks for."""

    @override
    def take(self, connection: ZmtpConnection, frames: Frames) -> None:
        # As vLLM: whatever else comes is no question, and is not answered.
        if len(frames) != 2 or frames[0] or len(frames[1]) != NUMBER_BYTES:
            return
        number = int.from_bytes(frames[1], "big")
        waiting = self._asked.get(connection)
        if waiting is None:
            self._asked[connection] = deque()
            self._answer(connection, deque(self._publisher.asked(number)))
        elif len(waiting) < MOST_ASKED:
            waiting.append(number)

    @override
    def gone(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        self._asked.pop(connection, None)

    def _answer(self, connection: ZmtpConnection, left: deque[KeptBatch]) -> None:
        """Send some of what is left; the rest in later turns."""
        if connection not in self._asked:
            return
        topic, loop = self._publisher.topic, self.batch.loop
        for _ in range(SLICE):
            if left:
                batch = left[0]
                number = batch.number.to_bytes(NUMBER_BYTES, "big")
                outcome = connection.send((b"", topic, number, batch.payload))
            else:
                outcome = connection.send(END)
            if outcome is Sent.FULL:
                loop.call_later(FULL_S, self._answer, connection, left)
                return
            if not left:
                self._next(connection)
                return
            left.popleft()
        loop.call_soon(self._answer, connection, left)

    def _next(self, connection: ZmtpConnection) -> None:
        waiting = self._asked.get(connection)
        if waiting:
            number = waiting.popleft()
            self._answer(connection, deque(self._publisher.asked(number)))
        else:
            self._asked.pop(connection, None)
