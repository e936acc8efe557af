"""The blocking client: the verbs of ``api``, each run to its end in the calling thread.

One thread at a time may use a node and its handles. Nothing is read between two calls: a death of
the daemon or an event is noticed by the next one, and that goes back to a daemon that is there
again. Until then the daemon keeps everything as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from kvd.client.api import Node
from kvd.client.blocking import BlockingChannel, attach
from kvd.client.connection import Connection
from kvd.client.endpoint import client_endpoint
from kvd.client.returning import RETURN_WITHIN_S
from kvd.wire.attach import Attach

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from kvd.client.api import Matched
    from kvd.client.device_event import WhenWritten
    from kvd.client.handoff import Outcome, Receive, Send, Share
    from kvd.client.lease import Fetched, Lease, Resumption, Retraction
    from kvd.client.pool import Pool
    from kvd.client.rows import PageNumbers
    from kvd.client.state import EventsLost
    from kvd.client.tokens import TokenIds
    from kvd.wire.events import Event
    from kvd.wire.snapshot import Snapshot

T = TypeVar("T")


def run(verb: Coroutine[Any, Any, T]) -> T:
    """The result of a verb over a channel that blocks: it never suspends, so one step is all."""
    try:
        verb.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    verb.close()
    raise RuntimeError("a verb of the blocking client was suspended: its channel must block")


class SyncLease:
    """``Lease``, blocking."""

    def __init__(self, lease: Lease) -> None:
        self.wrapped = lease

    @property
    def id(self) -> int:
        """As ``Lease.id``."""
        return self.wrapped.id

    @property
    def prefix_len(self) -> int:
        """As ``Lease.prefix_len``."""
        return self.wrapped.prefix_len

    @property
    def kv_len(self) -> int:
        """As ``Lease.kv_len``."""
        return self.wrapped.kv_len

    @property
    def is_retracted(self) -> bool:
        """As ``Lease.is_retracted``."""
        return self.wrapped.is_retracted

    @property
    def pages(self) -> NDArray[np.int32]:
        """As ``Lease.pages``."""
        return self.wrapped.pages

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """As ``Lease.pages_of``."""
        return self.wrapped.pages_of(component)

    def extend(self, n_tokens: int) -> None:
        """As ``Lease.extend``."""
        run(self.wrapped.extend(n_tokens))

    def slide(self, upto_tokens: int) -> None:
        """As ``Lease.slide``."""
        run(self.wrapped.slide(upto_tokens))

    def fetch(self, pages: PageNumbers, ahead: PageNumbers = ()) -> Fetched:
        """As ``Lease.fetch``."""
        return run(self.wrapped.fetch(pages, ahead))

    def written(
        self,
        upto_tokens: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        after: WhenWritten | bytes | None = None,
    ) -> None:
        """As ``Lease.written``."""
        run(self.wrapped.written(upto_tokens, rank=rank, ranks=ranks, after=after))

    def commit(
        self, new_tokens: TokenIds = (), upto_tokens: int | None = None, *, swap: bool = True
    ) -> NDArray[np.int32]:
        """As ``Lease.commit``."""
        return run(self.wrapped.commit(new_tokens, upto_tokens, swap=swap))

    def retract(self, new_tokens: TokenIds = (), *, keep: str = "host") -> Retraction:
        """As ``Lease.retract``."""
        return run(self.wrapped.retract(new_tokens, keep=keep))

    def resume(self, *, deadline_s: float = 30.0) -> Resumption:
        """As ``Lease.resume``."""
        return run(self.wrapped.resume(deadline_s=deadline_s))

    def release(self, new_tokens: TokenIds | None = None, upto_tokens: int | None = None) -> None:
        """As ``Lease.release``."""
        run(self.wrapped.release(new_tokens, upto_tokens))


class SyncReceive:
    """``Receive``, blocking."""

    def __init__(self, receive: Receive) -> None:
        self.wrapped = receive

    @property
    def id(self) -> int:
        """As ``Receive.id``."""
        return self.wrapped.id

    @property
    def prefix_len(self) -> int:
        """As ``Receive.prefix_len``."""
        return self.wrapped.prefix_len

    @property
    def lease(self) -> SyncLease:
        """As ``Receive.lease``."""
        return SyncLease(self.wrapped.lease)

    @property
    def aux(self) -> bytes:
        """As ``Receive.aux``."""
        return self.wrapped.aux

    def done(self) -> None:
        """As ``Receive.done``."""
        run(self.wrapped.done())

    def cancel(self) -> None:
        """As ``Receive.cancel``."""
        run(self.wrapped.cancel())


class SyncSend:
    """``Send``, blocking."""

    def __init__(self, send: Send) -> None:
        self.wrapped = send

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

    def accepted(self) -> None:
        """As ``Send.accepted``."""
        run(self.wrapped.accepted())

    def advance(self, upto_tokens: int, *, after: WhenWritten | bytes | None = None) -> None:
        """As ``Send.advance``."""
        run(self.wrapped.advance(upto_tokens, after=after))

    def finish(
        self,
        aux: bytes = b"",
        *,
        after: WhenWritten | bytes | None = None,
        release: bool = False,
    ) -> Outcome:
        """As ``Send.finish``."""
        return run(self.wrapped.finish(aux, after=after, release=release))

    def abort(self, reason: str) -> None:
        """As ``Send.abort``."""
        run(self.wrapped.abort(reason))


class SyncNode:
    """``Node``, blocking; a context manager that leaves the session."""

    def __init__(self, node: Node) -> None:
        self.wrapped = node

    @property
    def name(self) -> str:
        """As ``Node.name``."""
        return self.wrapped.name

    @property
    def incarnation(self) -> str:
        """As ``Node.incarnation``."""
        return self.wrapped.incarnation

    @property
    def session(self) -> int:
        """As ``Node.session``."""
        return self.wrapped.session

    @property
    def token(self) -> bytes:
        """As ``Node.token``."""
        return self.wrapped.token

    @property
    def is_away(self) -> bool:
        """As ``Node.is_away``."""
        return self.wrapped.is_away

    def __enter__(self) -> SyncNode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def pool(self, name: str) -> Pool:
        """As ``Node.pool``."""
        return self.wrapped.pool(name)

    def lease(
        self,
        tokens: TokenIds,
        *,
        namespace: str = "",
        reserve_tokens: int = 0,
        priority: int = 0,
        deadline_s: float = 30.0,
        cache: bool = True,
        step_tokens: int = 0,
    ) -> SyncLease:
        """As ``Node.lease``."""
        verb = self.wrapped.lease(
            tokens,
            namespace=namespace,
            reserve_tokens=reserve_tokens,
            priority=priority,
            deadline_s=deadline_s,
            cache=cache,
            step_tokens=step_tokens,
        )
        return SyncLease(run(verb))

    def receive(  # noqa: PLR0913 - as Node.receive
        self,
        room: int,
        tokens: TokenIds,
        source: str | Sequence[str],
        *,
        namespace: str = "",
        reserve_tokens: int = 0,
        priority: int = 0,
        tier: str | None = None,
        deadline_s: float = 30.0,
        cache: bool = True,
        step_tokens: int = 0,
    ) -> SyncReceive:
        """As ``Node.receive``."""
        verb = self.wrapped.receive(
            room,
            tokens,
            source,
            namespace=namespace,
            reserve_tokens=reserve_tokens,
            priority=priority,
            tier=tier,
            deadline_s=deadline_s,
            cache=cache,
            step_tokens=step_tokens,
        )
        return SyncReceive(run(verb))

    def send(
        self,
        room: int,
        tokens: TokenIds,
        *,
        lease: SyncLease,
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
    ) -> SyncSend:
        """As ``Node.send``."""
        verb = self.wrapped.send(
            room, tokens, lease=lease.wrapped, namespace=namespace, deadline_s=deadline_s, to=to
        )
        return SyncSend(run(verb))

    def hand_over(  # noqa: PLR0913 - as Node.hand_over
        self,
        room: int,
        tokens: TokenIds | None = None,
        *,
        lease: SyncLease,
        aux: bytes = b"",
        namespace: str = "",
        deadline_s: float = 30.0,
        to: str | None = None,
        after: WhenWritten | bytes | None = None,
        release: bool = False,
    ) -> Outcome:
        """As ``Node.hand_over``."""
        verb = self.wrapped.hand_over(
            room,
            tokens,
            lease=lease.wrapped,
            aux=aux,
            namespace=namespace,
            deadline_s=deadline_s,
            to=to,
            after=after,
            release=release,
        )
        return run(verb)

    def match(self, tokens: TokenIds, *, namespace: str = "") -> Matched:
        """As ``Node.match``."""
        return run(self.wrapped.match(tokens, namespace=namespace))

    def snapshot(self) -> Snapshot:
        """As ``Node.snapshot``."""
        return run(self.wrapped.snapshot())

    def events(self) -> Generator[Event | EventsLost, None, None]:
        """As ``Node.events``."""
        events = self.wrapped.events()
        try:
            while True:
                yield run(events.__anext__())
        finally:
            run(events.aclose())

    def close(self) -> None:
        """As ``Node.close``."""
        run(self.wrapped.close())


def connect_sync(
    endpoint: str | None = None,
    *,
    name: str,
    return_within_s: float = RETURN_WITHIN_S,
    key: str = "",
) -> SyncNode:
    """Open a session with the daemon of this node; ``connect``, blocking.

    Args:
        endpoint: ``ipc:///...``; left out: KVD_SOCKETS__CLIENT, else where a daemon would listen.
        name: what leases, events and tables call this engine, for example ``prefill-0``.
        return_within_s: as for ``connect``.
        key: as for ``connect``.

    Raises:
        KvdError: ``unreachable`` with what to do, or the daemon's refusal.
    """
    address = client_endpoint(endpoint)
    attachment = attach(address, Attach(name, key=key))
    attachment.key = key
    connection = Connection(max_frame_bytes=attachment.attached.max_frame_bytes)
    channel = BlockingChannel(address, attachment, connection, name)
    return SyncNode(Node(attachment, connection, channel, return_within_s=return_within_s))
