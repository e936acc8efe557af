"""One more process of a session: it maps the pools, and keeps the session alive while it lives.

It opens nothing and sends nothing. One that joins as a rank says how far that has written.

A worker may say nothing for hours, so nobody would notice that the daemon was restarted: a thread
of its own sleeps until the daemon hangs up, and then joins the session again, once the process that
opened it is back. Descriptors and mappings stay as they are, so nothing else in this process is
disturbed.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from kvd.client import blocking
from kvd.client.arguments import whole
from kvd.client.attachment import ATTACH_WITHIN_S
from kvd.client.device_event import handle_of
from kvd.client.endpoint import attach_path, client_endpoint
from kvd.client.lease_key import is_ours, why_foreign
from kvd.client.mover.mover import CLOSE_WITHIN_S
from kvd.client.mover.movers import Movers
from kvd.client.mover.pending_copy import MARK_WITHIN_S
from kvd.client.pool import Pools
from kvd.client.rank_words import RankWords
from kvd.client.returning import WayBack, leave_former, leave_later, leave_with_memory
from kvd.errors import Code, KvdError, Refusal
from kvd.wire.attach import Join, RankWritten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.client.attachment import Attachment
    from kvd.client.device_event import WhenWritten
    from kvd.client.lease_key import LeaseKey
    from kvd.client.mover.blocks import Caches, EngineBlocks
    from kvd.client.pool import Pool
    from kvd.client.rank_words import PendingWord

EVENTS_KEPT: Final = 4096
"""The last event objects that were given: the daemon may open one of them a moment later."""


UNHEARD_WITHIN_S: Final = 1.0
"""How long a close waits for its threads once no answer can come."""


class Worker:
    """A process that joined. ``end`` is why it is of no session any more; None while it is.

    Any thread may use it. Close it when no other one waits for an answer.
    """

    def __init__(self, attachment: Attachment, path: str, *, rank: int = 0, ranks: int = 0) -> None:
        """Use ``join``. Takes the attachment over; ``path`` is of the attach socket."""
        self.end: Refusal | None = None
        self._attachment = attachment
        self._path = path
        self._rank = rank
        self._ranks = ranks
        self._pools = Pools(attachment, lambda: self.end)
        self._words = RankWords(attachment)
        self.movers = Movers(self._words, self.check)
        """Of the blocks that this process has given."""
        attachment.copies = self.movers
        leave_former(path, attachment)
        self._events: deque[WhenWritten] = deque(maxlen=EVENTS_KEPT)
        self._closing = threading.Event()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._stay, name="kvd-worker", daemon=True)
        self._thread.start()

    def pool(self, name: str) -> Pool:
        """The pool of that name.

        Raises:
            KvdError: ``bad-request`` when there is none; ``pool-changed`` or ``unknown-session``
                when the daemon was restarted and this process could not stay of its session.
        """
        if self.end is not None:
            raise KvdError(self.end)
        return self._pools.pool(name)

    @property
    def session(self) -> int:
        """The number of the session that it has joined, as tables and events show it."""
        return self._attachment.attached.session

    @property
    def incarnation(self) -> str:
        """The life of the daemon that this process is attached to; another one after a restart."""
        return self._attachment.attached.incarnation

    def check(self, key: LeaseKey) -> None:
        """Refuse an order that is not of this process' session as it is now: right before the copy.

        Page numbers outlive what they are numbers of: an order may come late, after the daemon was
        restarted, or after this process has joined another session. This asks nobody, and takes a
        few microseconds. Whether the lease lives is for the process that opened it to see to: it
        releases none before the copies that it has ordered are done.

        Args:
            key: ``Lease.key``, read with the page numbers.

        Raises:
            KvdError: what ended the session; ``wrong-state`` in a process that was forked from the
                one that joined; ``unknown-session`` for a key of another one;
                ``before-restart`` for one of another life of the daemon; ``unreachable``, which is
                retryable, while the daemon is away or this process is not back in its session yet.
        """
        if self.end is not None:
            raise KvdError(self.end)
        self._attachment.require_own()
        attached = self._attachment.attached
        # It is attached again a moment before it can say a word there.
        if self._words.end is not None or self._attachment.has_hung_up():
            raise KvdError(_not_back(attached.node))
        refusal = why_foreign(key, attached)
        if refusal is not None:
            raise KvdError(refusal)

    def owns(self, key: LeaseKey) -> bool:
        """Whether ``check`` has nothing against it."""
        return is_ours(self.check, key)

    def blocks(
        self,
        caches: Caches,
        *,
        block_size: int,
        pool: str = "",
        shard: int | None = None,
        threads: int = 1,
        mark_within_s: float = MARK_WITHIN_S,
    ) -> EngineBlocks:
        """The engine's own KV memory, from which pages are filled and which is filled from them.

        Args:
            caches: by layer, in their order, its tensor, or those of the parts that a page has of
                it (K and V). Its first dimension is the block. A torch tensor, or anything with
                ``__array_interface__`` or ``__cuda_array_interface__``, or a ``LayerMemory``. A
                list of such mappings, where groups of layers have blocks of their own for the same
                tokens: layers of the pool are theirs in this order. Of a pool of several
                components, the same by component.
            block_size: tokens of a block. It divides the page size of the pool, or the other way
                round.
            pool: its name; left out, the one that there is.
            shard: of the pool, the one whose layers and heads these are; left out, that of this
                rank.
            threads: how many copy, where the blocks are in host memory.
            mark_within_s: a mark that has not come by then ends its order.

        Raises:
            KvdError: ``layout-mismatch`` where blocks are no pages of this pool, with both numbers;
                ``bad-request``; as ``Pool.arrays``; ``unreachable`` or ``deadline`` where the
                daemon does not hear of it: from now on no commit counts what is not said or saved.
        """
        found = self._pools.chosen(pool)
        if shard is None:
            shard = self._rank if found.shards else 0
        return self.movers.blocks(
            found,
            caches,
            block_size=whole(block_size, "block_size"),
            shard=shard,
            threads=whole(threads, "threads"),
            mark_within_s=mark_within_s,
        )

    def written(
        self, lease_id: int, upto_tokens: int, *, after: WhenWritten | bytes | None = None
    ) -> None:
        """This rank has written its part of the KV of all tokens below ``upto_tokens``.

        As ``Lease.written``: the least of the ranks counts, and sends of the prompt go on by it. It
        stays said whatever becomes of this process; when that ends before the whole of a prompt is
        said, the sends that wait for it end with ``client-gone``.

        Args:
            lease_id: ``lease.id`` of the process that opened it, a lease of this session.
            upto_tokens: counted from the start; not less than before.
            after: it is written when this event comes, as in ``Send.advance``. The last 4096 event
                objects are kept; whoever gives bytes keeps its event until the sends are over. One
                event that is recorded anew for each step will do.

        Raises:
            KvdError: ``bad-request`` with the numbers when it is less than before, or more than
                the pages of the lease have room for; ``unknown-lease``; ``wrong-state`` when this
                process has joined without a rank; ``unreachable`` while the daemon is away.
        """
        self.begin_written(lease_id, upto_tokens, after=after).result()

    def begin_written(
        self, lease_id: int, upto_tokens: int, *, after: WhenWritten | bytes | None = None
    ) -> PendingWord:
        """As ``written``, and returns at once: ``await`` it, ``poll`` it, or wait for ``result``.

        It is said in any case; errors are those of ``written``, when it is asked for.
        """
        if self.end is not None:
            raise KvdError(self.end)
        if after is not None and not isinstance(after, bytes):
            self._events.append(after)
        lease, upto = whole(lease_id, "lease_id"), whole(upto_tokens, "upto_tokens")
        event = handle_of(after)
        return self._words.begin(
            lambda call: RankWritten(call=call, lease=lease, upto_tokens=upto, after=event)
        )

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._closing.is_set():
            return
        is_quiet = not self._attachment.is_own or self.movers.close(_CLOSED, CLOSE_WITHIN_S)
        is_lost = self.end is not None or self._attachment.has_hung_up()
        self._closing.set()
        self.end = self.end or _CLOSED
        # A forked child has no such thread, and the bell and the words are its parent's too.
        if self._attachment.is_own:
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            self._words.closed(_CLOSED)
            # Of a daemon that did not answer no word is waited for any more. Where no byte moves,
            # its pages need not wait for the end of this process.
            is_quiet = is_quiet or self.movers.close(_CLOSED, UNHEARD_WITHIN_S)
        self._pools.close()
        way = WayBack(self._path, self._attachment, self._join_again)
        if is_lost and is_quiet:
            leave_with_memory(WayBack(self._path, self._attachment, self._join_again))
        self._attachment.close(
            says_leave=is_quiet, unheard=lambda before: leave_later(way.leaves, before)
        )
        os.close(self._bell)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stay(self) -> None:
        """Sleep until the daemon hangs up, go back to it, and so on; a thread's whole life."""
        while not self._closing.is_set() and self.end is None:
            # Until the daemon ends the connection: answers to words are read by who waits for them.
            self._sleep(self._attachment.fileno(), None, select.POLLRDHUP)
            word = None if self._closing.is_set() else self._words.look()
            if word is None:
                continue
            if word.is_retryable:
                self._go_back()
            else:
                self.end = word

    def _go_back(self) -> None:
        way = WayBack(self._path, self._attachment, self._join_again)
        try:
            while not self._closing.is_set() and not way.step():
                if way.sock is not None:
                    self._sleep(way.sock.fileno(), None)
                else:
                    self._sleep(-1, way.pause_s)
            self._words.renewed()
        except KvdError as error:
            self.end = error.refusal
        finally:
            way.abandon()

    def _join_again(self) -> Join:
        token = self._attachment.attached.token
        keeps_blocks = self.movers.has_blocks
        return Join(token, rank=self._rank, ranks=self._ranks, keeps_blocks=keeps_blocks)

    def _sleep(self, fd: int, within_s: float | None, event: int = select.POLLIN) -> None:
        """Until ``event`` of ``fd``, the time is up, or the bell rings; -1: no descriptor."""
        ready = select.poll()
        ready.register(self._bell, select.POLLIN)
        if fd >= 0:
            ready.register(fd, event)
        found = ready.poll(None if within_s is None else within_s * 1000)
        if any(fd == self._bell for fd, _ in found) and not self._closing.is_set():
            os.eventfd_read(self._bell)


def _not_back(node: str) -> Refusal:
    return Refusal(
        Code.UNREACHABLE,
        f"{node} has ended or was restarted, and this process is not back in its session yet: "
        "whose pages these are is not known here, so nothing is copied; order it anew",
        side="client",
    )


_CLOSED: Final = Refusal(Code.UNREACHABLE, "this worker was closed: join again", side="client")


def join(
    endpoint: str | None = None,
    *,
    token: bytes = b"",
    key: str = "",
    wait_s: float = 60.0,
    rank: int = 0,
    ranks: int = 0,
    expects: Mapping[str, str | int] | None = None,
) -> Worker:
    """Map the pools in one more process of a session, for example a tensor-parallel worker.

    By its ``key``, which all processes of an engine know from the start, or by its ``token``.

    Args:
        endpoint: as for ``connect``.
        token: ``node.token`` of the process that connected; whoever knows it is of the session.
        key: with which that process connects, or is going to. Only processes of the same user find
            each other by a key.
        wait_s: with a key, the longest wait for that process; an hour at most.
        rank: of the processes that each write a part of every page, this one.
        ranks: how many they are; 0: this process says nothing about what is written.
        expects: as for ``connect``.

    Raises:
        KvdError: ``deadline`` when nobody has connected with the key by then; ``unreachable``, also
            while the process of that token is not back after a restart; ``unknown-session`` when
            that session has ended; ``wrong-state`` when another living process is that rank;
            ``no-room`` when too many wait; ``bad-request`` for ranks that cannot be;
            ``layout-mismatch`` where the pool is not as ``expects`` says.
    """
    address = client_endpoint(endpoint)
    rank, ranks = whole(rank, "rank"), whole(ranks, "ranks")
    request = Join(token, key=key, wait_s=wait_s if key else 0.0, rank=rank, ranks=ranks)
    # The daemon says at the end of the wait that nobody came.
    longest_s = ATTACH_WITHIN_S + max(0.0, request.wait_s)
    attachment = blocking.attach(address, request, longest_s)
    attachment.require(expects)
    with attachment.or_left():
        return Worker(attachment, attach_path(address), rank=rank, ranks=ranks)
