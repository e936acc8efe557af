"""The blocking client: the verbs of ``api`` in the calling thread, which may also go on meanwhile.

One thread at a time may use a node and its handles. Each verb exists twice: ``begin_lease`` sends
the request and returns a ``PendingCall``, ``lease`` is that and waits for its outcome. Nothing is
read between two calls: a death of the daemon or an event is noticed by the next one or by a
``pump``, and that goes back to a daemon that is there again. Until then the daemon keeps everything
as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from kvd.client.answers import Matched
from kvd.client.api import Node
from kvd.client.attachment import ATTACH_WITHIN_S
from kvd.client.blocking import BlockingChannel, attach
from kvd.client.connection import UNDONE, Connection
from kvd.client.endpoint import client_endpoint
from kvd.client.mover.pending_copy import MARK_WITHIN_S
from kvd.client.pending import PendingCall, blocking, blocking_quietly, finished
from kvd.client.returning import RETURN_WITHIN_S
from kvd.errors import Code, KvdError, Refusal
from kvd.wire.attach import Attach

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvd.client.answers import FlushResult, PinnedPrefix
    from kvd.client.arena import PageArena
    from kvd.client.attachment import Attachment
    from kvd.client.device_event import WhenWritten
    from kvd.client.handoff import ArrivingPages, KeptRoom, Outcome, Receive, Send, Share
    from kvd.client.lease import Fetched, Lease, Resumption, Retraction
    from kvd.client.lease_key import LeaseKey
    from kvd.client.mover.blocks import Caches, EngineBlocks
    from kvd.client.pending import CallDriver
    from kvd.client.pool import Pool
    from kvd.client.prompt import Prompt
    from kvd.client.rows import PageNumbers
    from kvd.client.state import EventsLost, LeaseTiers
    from kvd.client.tokens import TokenIds
    from kvd.wire.events import Event
    from kvd.wire.page_address import ExtraKeys
    from kvd.wire.snapshot import Snapshot

T = TypeVar("T")
H = TypeVar("H")

MISS: Final = Matched(tokens=0, load=0, free=0)
"""What ``match`` answers for a daemon that is not there, where that is asked for."""


async def _then(verb: Coroutine[Any, Any, None], handle: H) -> H:
    """The outcome of a verb that has none: the handle that it was about."""
    await verb
    return handle


class SyncLease:
    """``Lease``, blocking; each ``begin_`` does the same without blocking."""

    def __init__(self, lease: Lease, driver: CallDriver) -> None:
        self.wrapped = lease
        self._driver = driver

    @property
    def id(self) -> int:
        """As ``Lease.id``."""
        return self.wrapped.id

    @property
    def prefix_len(self) -> int:
        """As ``Lease.prefix_len``."""
        return self.wrapped.prefix_len

    @property
    def tiers(self) -> LeaseTiers:
        """As ``Lease.tiers``."""
        return self.wrapped.tiers

    @property
    def kv_len(self) -> int:
        """As ``Lease.kv_len``."""
        return self.wrapped.kv_len

    @property
    def is_retracted(self) -> bool:
        """As ``Lease.is_retracted``."""
        return self.wrapped.is_retracted

    @property
    def is_released(self) -> bool:
        """As ``Lease.is_released``."""
        return self.wrapped.is_released

    @property
    def pages(self) -> NDArray[np.int32]:
        """As ``Lease.pages``."""
        return self.wrapped.pages

    @property
    def key(self) -> LeaseKey:
        """As ``Lease.key``."""
        return self.wrapped.key

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """As ``Lease.pages_of``."""
        return self.wrapped.pages_of(component)

    def begin_extend(self, n_tokens: int) -> PendingCall[SyncLease]:
        """Begin ``Lease.extend``; the outcome is this lease."""
        return self._begin(self.wrapped.extend(n_tokens))

    def begin_slide(self, upto_tokens: int) -> PendingCall[SyncLease]:
        """Begin ``Lease.slide``; the outcome is this lease."""
        return self._begin(self.wrapped.slide(upto_tokens))

    def begin_fetch(self, pages: PageNumbers, ahead: PageNumbers = ()) -> PendingCall[Fetched]:
        """Begin ``Lease.fetch``."""
        return PendingCall(self._driver, self.wrapped.fetch(pages, ahead))

    def begin_written(
        self,
        upto_tokens: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        after: WhenWritten | bytes | None = None,
    ) -> PendingCall[SyncLease]:
        """Begin ``Lease.written``; the outcome is this lease."""
        return self._begin(self.wrapped.written(upto_tokens, rank=rank, ranks=ranks, after=after))

    def begin_commit(
        self,
        new_tokens: TokenIds = (),
        upto_tokens: int | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        swap: bool = True,
        extend: int = 0,
    ) -> PendingCall[NDArray[np.int32]]:
        """Begin ``Lease.commit``."""
        verb = self.wrapped.commit(new_tokens, upto_tokens, keys=keys, swap=swap, extend=extend)
        return PendingCall(self._driver, verb)

    def begin_retract(
        self, new_tokens: TokenIds = (), *, keep: str = "host"
    ) -> PendingCall[Retraction]:
        """Begin ``Lease.retract``."""
        return PendingCall(self._driver, self.wrapped.retract(new_tokens, keep=keep))

    def begin_resume(self, *, deadline_s: float = 30.0) -> PendingCall[Resumption]:
        """Begin ``Lease.resume``."""
        return PendingCall(self._driver, self.wrapped.resume(deadline_s=deadline_s))

    def begin_release(
        self,
        new_tokens: TokenIds | None = None,
        upto_tokens: int | None = None,
        *,
        keys: Sequence[bytes] | None = None,
    ) -> PendingCall[SyncLease]:
        """Begin ``Lease.release``; the outcome is this lease."""
        return self._begin(self.wrapped.release(new_tokens, upto_tokens, keys=keys))

    def share(self, new_tokens: TokenIds = (), upto_tokens: int | None = None) -> None:
        """As ``Lease.share``."""
        self.wrapped.share(new_tokens, upto_tokens)

    def leave(self, new_tokens: TokenIds | None = None, upto_tokens: int | None = None) -> None:
        """As ``Lease.leave``."""
        self.wrapped.leave(new_tokens, upto_tokens)

    extend = blocking_quietly(begin_extend)
    slide = blocking_quietly(begin_slide)
    fetch = blocking(begin_fetch)
    written = blocking_quietly(begin_written)
    commit = blocking(begin_commit)
    retract = blocking(begin_retract)
    resume = blocking(begin_resume)
    release = blocking_quietly(begin_release)

    def _begin(self, verb: Coroutine[Any, Any, None]) -> PendingCall[SyncLease]:
        return PendingCall(self._driver, _then(verb, self))


class SyncArrival:
    """What every receive has; each ``begin_`` does the same without blocking."""

    def __init__(self, receive: Receive, driver: CallDriver) -> None:
        self.wrapped = receive
        self._driver = driver

    @property
    def id(self) -> int:
        """As ``Receive.id``."""
        return self.wrapped.id

    @property
    def prefix_len(self) -> int:
        """As ``Receive.prefix_len``."""
        return self.wrapped.prefix_len

    @property
    def promoted_len(self) -> int:
        """As ``Receive.promoted_len``."""
        return self.wrapped.promoted_len

    @property
    def n_tokens(self) -> int:
        """As ``Receive.n_tokens``."""
        return self.wrapped.n_tokens

    @property
    def arriving(self) -> ArrivingPages | None:
        """As ``Receive.arriving``; reads nothing."""
        return self.wrapped.arriving

    @property
    def aux(self) -> bytes:
        """As ``Receive.aux``."""
        return self.wrapped.aux

    @property
    def is_safe(self) -> bool:
        """As ``Receive.is_safe``; reads what has come, and never blocks."""
        if not self.wrapped.is_safe:
            self._driver.glance()
        return self.wrapped.is_safe

    def begin_cancel(self) -> PendingCall[Self]:
        """Begin ``Receive.cancel``; the outcome is this receive."""
        return PendingCall(self._driver, _then(self.wrapped.cancel(), self))

    def begin_safe(self) -> PendingCall[Self]:
        """Begin ``Receive.safe``; the outcome is this receive."""
        return PendingCall(self._driver, _then(self.wrapped.safe(), self))

    cancel = blocking_quietly(begin_cancel)
    safe = blocking_quietly(begin_safe)

    def _has_ended(self) -> bool:
        if not self.wrapped.is_ended:
            self._driver.glance()
        return self.wrapped.is_ended


class SyncReceive(SyncArrival):
    """``Receive``, blocking."""

    _lease: SyncLease | None = None

    @property
    def lease(self) -> SyncLease:
        """As ``Receive.lease``."""
        if self._lease is None:
            self._lease = SyncLease(self.wrapped.lease, self._driver)
        return self._lease

    def poll(self) -> SyncLease | None:
        """The lease once the prompt's KV is here; None before. Never blocks.

        Raises:
            HandoffError: as ``Receive.done``.
        """
        return self.begin_done().result() if self._has_ended() else None

    def begin_done(self) -> PendingCall[SyncLease]:
        """Begin ``Receive.done``; the outcome is the lease."""
        return PendingCall(self._driver, self._done())

    done = blocking_quietly(begin_done)

    async def _done(self) -> SyncLease:
        await self.wrapped.done()
        return self.lease


class SyncArenaReceive(SyncArrival):
    """``Receive`` into an arena, blocking: its outcome is that the KV is there."""

    def poll(self) -> bool:
        """Whether the prompt's KV is in its pages. Never blocks.

        Raises:
            HandoffError: as ``Receive.done``; the pages may still be written until ``is_safe``.
        """
        return self._has_ended() and self.begin_done().result() is self

    def begin_done(self) -> PendingCall[SyncArenaReceive]:
        """Begin ``Receive.done``; the outcome is this receive."""
        return PendingCall(self._driver, _then(self.wrapped.done(), self))

    done = blocking_quietly(begin_done)


class SyncSend:
    """``Send``, blocking; each ``begin_`` does the same without blocking."""

    def __init__(self, send: Send, driver: CallDriver) -> None:
        self.wrapped = send
        self._driver = driver

    @property
    def id(self) -> int:
        """As ``Send.id``."""
        return self.wrapped.id

    @property
    def decode_prefix_len(self) -> int:
        """As ``Send.decode_prefix_len``."""
        return self.wrapped.decode_prefix_len

    @property
    def share(self) -> Share:
        """As ``Send.share``."""
        return self.wrapped.share

    @property
    def outcome(self) -> Outcome | None:
        """As ``Send.outcome``; reads what has come, and never blocks."""
        if self.wrapped.outcome is None:
            self._driver.glance()
        return self.wrapped.outcome

    def begin_accepted(self) -> PendingCall[SyncSend]:
        """Begin ``Send.accepted``; the outcome is this send."""
        return self._begin(self.wrapped.accepted())

    def begin_advance(
        self, upto_tokens: int, *, after: WhenWritten | bytes | None = None
    ) -> PendingCall[SyncSend]:
        """Begin ``Send.advance``; the outcome is this send."""
        return self._begin(self.wrapped.advance(upto_tokens, after=after))

    def begin_finish(
        self,
        aux: bytes = b"",
        *,
        after: WhenWritten | bytes | None = None,
        release: bool = False,
    ) -> PendingCall[Outcome]:
        """Begin ``Send.finish``."""
        return PendingCall(self._driver, self.wrapped.finish(aux, after=after, release=release))

    def begin_abort(self, reason: str) -> PendingCall[SyncSend]:
        """Begin ``Send.abort``; the outcome is this send."""
        return self._begin(self.wrapped.abort(reason))

    def begin_renew(self, ttl_s: float) -> PendingCall[KeptRoom]:
        """Begin ``Send.renew``."""
        return PendingCall(self._driver, self.wrapped.renew(ttl_s))

    def begin_end(self) -> PendingCall[KeptRoom]:
        """Begin ``Send.end``."""
        return PendingCall(self._driver, self.wrapped.end())

    accepted = blocking_quietly(begin_accepted)
    advance = blocking_quietly(begin_advance)
    finish = blocking(begin_finish)
    abort = blocking_quietly(begin_abort)
    renew = blocking(begin_renew)
    end = blocking(begin_end)

    def _begin(self, verb: Coroutine[Any, Any, None]) -> PendingCall[SyncSend]:
        return PendingCall(self._driver, _then(verb, self))


class SyncArena:
    """``PageArena``, blocking; each ``begin_`` does the same without blocking."""

    def __init__(self, arena: PageArena, driver: CallDriver) -> None:
        self.wrapped = arena
        self._driver = driver

    @property
    def id(self) -> int:
        """As ``PageArena.id``."""
        return self.wrapped.id

    @property
    def pages(self) -> NDArray[np.int32]:
        """As ``PageArena.pages``."""
        return self.wrapped.pages

    @property
    def key(self) -> LeaseKey:
        """As ``PageArena.key``."""
        return self.wrapped.key

    @property
    def first_page(self) -> int:
        """As ``PageArena.first_page``."""
        return self.wrapped.first_page

    @property
    def is_closed(self) -> bool:
        """As ``PageArena.is_closed``."""
        return self.wrapped.is_closed

    def begin_receive(  # noqa: PLR0913 - as PageArena.receive
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        source: str = "",
        *,
        pages: PageNumbers,
        have_tokens: int = 0,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
        deadline_s: float = 30.0,
        request_id: str = "",
    ) -> PendingCall[SyncArenaReceive]:
        """Begin ``PageArena.receive``."""
        verb = self.wrapped.receive(
            room,
            tokens,
            source,
            pages=pages,
            have_tokens=have_tokens,
            keys=keys,
            extra_keys=extra_keys,
            namespace=namespace,
            deadline_s=deadline_s,
            request_id=request_id,
        )
        return PendingCall(self._driver, verb, SyncArenaReceive.begin_cancel, SyncArenaReceive)

    def begin_send(  # noqa: PLR0913 - as PageArena.send
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        *,
        pages: PageNumbers,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        ttl_s: float = 0.0,
        takers: int = 0,
        request_id: str = "",
    ) -> PendingCall[SyncSend]:
        """Begin ``PageArena.send``."""
        verb = self.wrapped.send(
            room,
            tokens,
            pages=pages,
            keys=keys,
            extra_keys=extra_keys,
            namespace=namespace,
            deadline_s=deadline_s,
            to=to,
            ttl_s=ttl_s,
            takers=takers,
            request_id=request_id,
        )
        return PendingCall(self._driver, verb, _end_send, SyncSend)

    def begin_hand_over(  # noqa: PLR0913 - as PageArena.hand_over
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        *,
        pages: PageNumbers,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        aux: bytes = b"",
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        after: WhenWritten | bytes | None = None,
        ttl_s: float = 0.0,
        takers: int = 0,
        request_id: str = "",
    ) -> PendingCall[Outcome]:
        """Begin ``PageArena.hand_over``; to cancel it ends the handoff."""
        verb = self.wrapped.hand_over(
            room,
            tokens,
            pages=pages,
            keys=keys,
            extra_keys=extra_keys,
            aux=aux,
            namespace=namespace,
            deadline_s=deadline_s,
            to=to,
            after=after,
            ttl_s=ttl_s,
            takers=takers,
            request_id=request_id,
        )
        return PendingCall(self._driver, verb)

    def begin_close(self) -> PendingCall[SyncArena]:
        """Begin ``PageArena.close``; the outcome is this arena."""
        return PendingCall(self._driver, _then(self.wrapped.close(), self))

    receive = blocking(begin_receive)
    send = blocking(begin_send)
    hand_over = blocking(begin_hand_over)
    close = blocking_quietly(begin_close)


class SyncEvents:
    """``Node.events``, blocking where it is iterated over; ``poll`` never blocks.

    Events come from the first ``poll`` or ``next`` on, until ``close``.
    """

    def __init__(
        self, events: AsyncGenerator[Event | EventsLost, None], driver: CallDriver
    ) -> None:
        self._events = events
        self._driver = driver
        self._next: PendingCall[Event | EventsLost] | None = None

    def __iter__(self) -> Iterator[Event | EventsLost]:
        return self

    def __next__(self) -> Event | EventsLost:
        """The next one, once it is there.

        Raises:
            KvdError: as ``Node.events``; so each time, and no event comes any more.
            StopIteration: it was closed.
        """
        try:
            event = self._begun().result()
        except StopAsyncIteration:
            raise StopIteration from None
        self._next = None
        return event

    def poll(self) -> Event | EventsLost | None:
        """The next one; None while there is none. Reads what has come, and never blocks.

        Raises:
            KvdError: as ``Node.events``; so each time, and no event comes any more.
        """
        try:
            event = self._begun().poll()
        except StopAsyncIteration:
            return None
        if event is not None:
            self._next = None
        return event

    def close(self) -> None:
        """No more of them; repeatable."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        finished(PendingCall(self._driver, self._events.aclose()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begun(self) -> PendingCall[Event | EventsLost]:
        if self._next is None:
            self._next = PendingCall(self._driver, _next_of(self._events))
        return self._next


async def _next_of(events: AsyncGenerator[Event | EventsLost, None]) -> Event | EventsLost:
    return await events.__anext__()


def _end_send(send: SyncSend) -> PendingCall[SyncSend]:
    return send.begin_abort(UNDONE)


def _wrapped(lease: Any) -> Lease:
    # What is none is refused where the request is made.
    return lease.wrapped if isinstance(lease, SyncLease) else lease


class SyncNode:
    """``Node``, blocking; a context manager that leaves the session.

    Each ``begin_`` does the same without blocking: it sends the request and returns a
    ``PendingCall``. What has come is read by ``pump``, by ``poll`` of a call, and by whatever
    blocks.
    """

    def __init__(
        self,
        node: Node,
        attachment: Attachment,
        channel: BlockingChannel,
        *,
        misses_when_away: bool = False,
    ) -> None:
        """Use ``connect_sync``."""
        self.wrapped = node
        self._attachment = attachment
        self._channel = channel
        self._misses_when_away = misses_when_away

    @property
    def name(self) -> str:
        """As ``Node.name``."""
        return self.wrapped.name

    @property
    def incarnation(self) -> str:
        """As ``Node.incarnation``."""
        return self._attachment.attached.incarnation

    @property
    def session(self) -> int:
        """As ``Node.session``."""
        return self._attachment.attached.session

    @property
    def life(self) -> tuple[int, str]:
        """As ``Node.life``."""
        attached = self._attachment.attached
        return attached.session, attached.incarnation

    @property
    def token(self) -> bytes:
        """As ``Node.token``."""
        return self.wrapped.token

    @property
    def is_away(self) -> bool:
        """As ``Node.is_away``."""
        return self.wrapped.is_away

    @property
    def end(self) -> KvdError | None:
        """As ``Node.end``."""
        return self.wrapped.end

    def check(self, key: LeaseKey) -> None:
        """As ``Node.check``."""
        self.wrapped.check(key)

    def owns(self, key: LeaseKey) -> bool:
        """As ``Node.owns``."""
        return self.wrapped.owns(key)

    def __enter__(self) -> SyncNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pool(self, name: str) -> Pool:
        """As ``Node.pool``."""
        return self.wrapped.pool(name)

    def blocks(
        self,
        caches: Caches,
        *,
        block_size: int,
        pool: str = "",
        shard: int = 0,
        threads: int = 1,
        mark_within_s: float = MARK_WITHIN_S,
    ) -> EngineBlocks:
        """As ``Node.blocks``."""
        return self.wrapped.blocks(
            caches,
            block_size=block_size,
            pool=pool,
            shard=shard,
            threads=threads,
            mark_within_s=mark_within_s,
        )

    def prompt(
        self,
        tokens: TokenIds | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
    ) -> Prompt:
        """As ``Node.prompt``."""
        return self.wrapped.prompt(tokens, keys=keys, extra_keys=extra_keys)

    def pump(self) -> list[PendingCall[Any]]:
        """Read what has come, write what waits, go back to a daemon that is back; never blocks.

        Returns:
            The begun calls that have ended, each once, but for those whose outcome was taken.
        """
        return self._channel.pump()

    def gather(self) -> None:
        """What calls say from now on leaves with one write: by ``send_gathered``.

        Also before the first of them is waited for; what comes behind that leaves at once again.
        """
        self._channel.gather()

    def send_gathered(self) -> None:
        """Have what was gathered leave; repeatable, and never blocks."""
        self._channel.send_gathered()

    def fileno(self) -> int:
        """A descriptor to wait on: readable while ``pump`` has something to do.

        It is the same one for as long as the node is open, and becomes readable for an answer, for
        the end of a handoff, when the daemon dies, and when the socket takes more. Time makes it
        readable never: a deadline that passes, or a daemon that is back, is found by a pump, so
        pump every 0.1 s too.
        """
        return self._channel.fileno()

    def begin_lease(  # noqa: PLR0913 - as Node.lease
        self,
        tokens: TokenIds | Prompt | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        hold: str = "all",
        namespace: str = "",
        reserve_tokens: int = 0,
        priority: int = 0,
        deadline_s: float = 30.0,
        cache: bool = True,
        step_tokens: int = 0,
        promise_tokens: int = 0,
        tiers: str = "",
    ) -> PendingCall[SyncLease]:
        """Begin ``Node.lease``."""
        verb = self.wrapped.lease(
            tokens,
            keys=keys,
            extra_keys=extra_keys,
            hold=hold,
            namespace=namespace,
            reserve_tokens=reserve_tokens,
            priority=priority,
            deadline_s=deadline_s,
            cache=cache,
            step_tokens=step_tokens,
            promise_tokens=promise_tokens,
            tiers=tiers,
        )
        return PendingCall(self._channel, verb, SyncLease.begin_release, SyncLease)

    def begin_receive(  # noqa: PLR0913 - as Node.receive
        self,
        room: int | TokenIds | Prompt | None = None,
        tokens: TokenIds | Prompt | None = None,
        source: str | Sequence[str] = (),
        *,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
        reserve_tokens: int = 0,
        priority: int = 0,
        tier: str | None = None,
        deadline_s: float = 30.0,
        cache: bool = True,
        step_tokens: int = 0,
        request_id: str = "",
        promise_tokens: int = 0,
        is_open: bool = False,
        as_it_comes: bool = False,
        tiers: str = "",
    ) -> PendingCall[SyncReceive]:
        """Begin ``Node.receive``: pages are held once it has an outcome; ``poll`` that then."""
        verb = self.wrapped.receive(
            room,
            tokens,
            source,
            keys=keys,
            extra_keys=extra_keys,
            namespace=namespace,
            reserve_tokens=reserve_tokens,
            priority=priority,
            tier=tier,
            deadline_s=deadline_s,
            cache=cache,
            step_tokens=step_tokens,
            request_id=request_id,
            promise_tokens=promise_tokens,
            is_open=is_open,
            as_it_comes=as_it_comes,
            tiers=tiers,
        )
        return PendingCall(self._channel, verb, SyncReceive.begin_cancel, SyncReceive)

    def begin_send(  # noqa: PLR0913 - as Node.send
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        *,
        lease: SyncLease,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        ttl_s: float = 0.0,
        takers: int = 0,
        request_id: str = "",
        when_written: bool = False,
    ) -> PendingCall[SyncSend]:
        """Begin ``Node.send``."""
        verb = self.wrapped.send(
            room,
            tokens,
            lease=_wrapped(lease),
            keys=keys,
            extra_keys=extra_keys,
            namespace=namespace,
            deadline_s=deadline_s,
            to=to,
            ttl_s=ttl_s,
            takers=takers,
            request_id=request_id,
            when_written=when_written,
        )
        return PendingCall(self._channel, verb, _end_send, SyncSend)

    def begin_hand_over(  # noqa: PLR0913 - as Node.hand_over
        self,
        room: int,
        tokens: TokenIds | Prompt | None = None,
        *,
        lease: SyncLease,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        aux: bytes = b"",
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        after: WhenWritten | bytes | None = None,
        release: bool = False,
        ttl_s: float = 0.0,
        takers: int = 0,
        request_id: str = "",
    ) -> PendingCall[Outcome]:
        """Begin ``Node.hand_over``; to cancel it ends the handoff."""
        verb = self.wrapped.hand_over(
            room,
            tokens,
            lease=_wrapped(lease),
            keys=keys,
            extra_keys=extra_keys,
            aux=aux,
            namespace=namespace,
            deadline_s=deadline_s,
            to=to,
            after=after,
            release=release,
            ttl_s=ttl_s,
            takers=takers,
            request_id=request_id,
        )
        return PendingCall(self._channel, verb)

    def begin_arena(self, pages: int) -> PendingCall[SyncArena]:
        """Begin ``Node.arena``."""
        return PendingCall(
            self._channel, self.wrapped.arena(pages), SyncArena.begin_close, SyncArena
        )

    def begin_keep_room(self, room: int, ttl_s: float) -> PendingCall[KeptRoom]:
        """Begin ``Node.keep_room``."""
        return PendingCall(self._channel, self.wrapped.keep_room(room, ttl_s))

    def begin_match(
        self,
        tokens: TokenIds | Prompt | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        extra_keys: ExtraKeys | None = None,
        namespace: str = "",
    ) -> PendingCall[Matched]:
        """Begin ``Node.match``."""
        verb = self.wrapped.match(tokens, keys=keys, extra_keys=extra_keys, namespace=namespace)
        return PendingCall(self._channel, _or_miss(verb) if self._misses_when_away else verb)

    def begin_prefetch(
        self, tokens: TokenIds | Prompt, *, namespace: str = ""
    ) -> PendingCall[Matched]:
        """Begin ``Node.prefetch``."""
        return PendingCall(self._channel, self.wrapped.prefetch(tokens, namespace=namespace))

    def begin_flush(self, namespace: str = "") -> PendingCall[FlushResult]:
        """Begin ``Node.flush``."""
        return PendingCall(self._channel, self.wrapped.flush(namespace))

    def begin_new_epoch(self, namespace: str, epoch: int | None = None) -> PendingCall[FlushResult]:
        """Begin ``Node.new_epoch``."""
        return PendingCall(self._channel, self.wrapped.new_epoch(namespace, epoch))

    def begin_pin(
        self,
        tokens: TokenIds | Prompt,
        *,
        ttl_s: float,
        owner: str = "",
        namespace: str = "",
        tiers: str = "",
    ) -> PendingCall[PinnedPrefix]:
        """Begin ``Node.pin``."""
        verb = self.wrapped.pin(tokens, ttl_s=ttl_s, owner=owner, namespace=namespace, tiers=tiers)
        return PendingCall(self._channel, verb)

    def begin_unpin(self, pin: PinnedPrefix) -> PendingCall[PinnedPrefix]:
        """Begin ``Node.unpin``."""
        return PendingCall(self._channel, self.wrapped.unpin(pin))

    def begin_snapshot(self) -> PendingCall[Snapshot]:
        """Begin ``Node.snapshot``."""
        return PendingCall(self._channel, self.wrapped.snapshot())

    lease = blocking(begin_lease)
    receive = blocking(begin_receive)
    send = blocking(begin_send)
    hand_over = blocking(begin_hand_over)
    arena = blocking(begin_arena)
    keep_room = blocking(begin_keep_room)
    match = blocking(begin_match)
    prefetch = blocking(begin_prefetch)
    flush = blocking(begin_flush)
    new_epoch = blocking(begin_new_epoch)
    pin = blocking(begin_pin)
    unpin = blocking(begin_unpin)
    snapshot = blocking(begin_snapshot)

    def events(self) -> SyncEvents:
        """As ``Node.events``: iterate over it, which blocks, or ``poll`` it; ``close`` it then."""
        return SyncEvents(self.wrapped.events(), self._channel)

    def close(self) -> None:
        """As ``Node.close``."""
        self._run(self.wrapped.close())

    def _run(self, verb: Coroutine[Any, Any, T]) -> T:
        return finished(PendingCall(self._channel, verb))


async def _or_miss(verb: Coroutine[Any, Any, Matched]) -> Matched:
    try:
        return await verb
    except KvdError as error:
        if error.refusal.code is Code.UNREACHABLE:
            return MISS
        raise


def connect_sync(
    endpoint: str | None = None,
    *,
    name: str,
    return_within_s: float = RETURN_WITHIN_S,
    key: str = "",
    expects: Mapping[str, str | int] | None = None,
    kind: str = "",
    within_s: float = ATTACH_WITHIN_S,
    on_unreachable: Literal["wait", "miss"] = "wait",
) -> SyncNode:
    """Open a session with the daemon of this node; ``connect``, blocking.

    Args:
        endpoint: ``ipc:///...``; left out: KVD_SOCKETS__CLIENT, else where a daemon would listen.
        name: what leases, events and tables call this engine, for example ``prefill-0``.
        return_within_s: as for ``connect``.
        key: as for ``connect``.
        expects: as for ``connect``.
        kind: as for ``connect``.
        within_s: as for ``connect``.
        on_unreachable: what a call does once the daemon has ended. ``wait``: it waits for the next
            one, for ``return_within_s`` at most. ``miss``: it costs no more than a look. ``match``
            then finds nothing, everything else raises ``unreachable`` at once, and the node goes
            back by itself, a step with each call and each ``pump``. To other memory it does not go
            back: then every call, ``match`` too, raises ``pool-changed``, see ``Node.end``.

    Raises:
        KvdError: as for ``connect``.
    """
    misses = _is_miss(on_unreachable)
    address = client_endpoint(endpoint)
    attachment = attach(address, Attach(name, key=key, kind=kind), within_s)
    attachment.require(expects)
    attachment.key, attachment.kind = key, kind
    connection = Connection(max_frame_bytes=attachment.attached.max_frame_bytes)
    waits_s = 0.0 if misses else return_within_s
    with attachment.or_left():
        channel = BlockingChannel(
            address, attachment, connection, name, waits_for_return=not misses
        )
    node = Node(attachment, connection, channel, return_within_s=waits_s)
    return SyncNode(node, attachment, channel, misses_when_away=misses)


def _is_miss(on_unreachable: str) -> bool:
    if on_unreachable not in {"wait", "miss"}:
        why = f"on_unreachable is {on_unreachable!r}: it is 'wait' or 'miss'"
        raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client"))
    return on_unreachable == "miss"
