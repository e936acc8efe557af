"""A lease in the engine's hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd.client.arguments import whole
from kvd.client.device_event import handle_of
from kvd.client.port import foreign, within
from kvd.client.rows import Along, ComponentRow, along, page_frame, swapped
from kvd.errors import Code, KvdError, Refusal
from kvd.wire import client as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.client.device_event import WhenWritten
    from kvd.client.lease_key import LeaseKey
    from kvd.client.pool import Pools
    from kvd.client.port import Port
    from kvd.client.prompt import PromptAddress
    from kvd.client.rows import PageNumbers
    from kvd.client.state import LeaseTiers, LeaseView
    from kvd.client.tokens import TokenIds


COPY_WITHIN_S = 30.0
"""For the copy of a retraction or a resumption, beside any wait for room: GiBs take seconds."""


class Retraction(msgspec.Struct, frozen=True):
    """What is kept of a retracted lease, outside the pool."""

    saved_pages: int
    saved_bytes: int


class Resumption(msgspec.Struct, frozen=True):
    """Where the KV of a resumed lease comes from; below ``kv_len`` it is in the lease's pages.

    ``prefix_len`` tokens were cached, ``restored_tokens`` were copied back.
    """

    prefix_len: int
    restored_tokens: int
    kv_len: int


class Fetched(msgspec.Struct, frozen=True, eq=False):
    """Where pages of host KV lie on the device now; their bytes are there.

    ``pages`` are page ids of the buffer component in the order asked (int32, one dimension).
    ``hits`` of them were there before or on their way, ``misses`` were copied: ``copied_bytes``.
    """

    pages: NDArray[np.int32]
    hits: int
    misses: int
    copied_bytes: int


class Lease:
    """A locked prefix and held pages. It lasts until ``release``, or the death of the session.

    When the daemon is restarted, a lease of before keeps its pages for this engine, which may go on
    reading and writing them; ``release`` is all that can be asked for it then. Everything else
    raises ``before-restart``.

    Once the session is over, or the daemon that is back has not kept the lease, its pages may be
    another engine's: ``pages``, ``pages_of`` and ``key`` raise from then on. An array that they
    gave before cannot be taken back, so read them anew for each use and keep none.
    """

    def __init__(self, port: Port, pools: Pools, state: LeaseView, prompt: PromptAddress) -> None:
        self._port = port
        self._pools = pools
        self._state = state
        self._prompt = prompt
        self._events: list[WhenWritten] = []
        """An event that ends before it was waited for is undefined in CUDA."""

    @property
    def id(self) -> int:
        """The lease's number, as ``kvd why lease`` takes it."""
        return self._state.number

    def is_of(self, port: Port) -> bool:
        """Whether it was opened by the node that speaks through ``port``."""
        return self._port is port

    @property
    def record(self) -> LeaseView:
        """What is known of it; for the verbs of ``Node`` that take a lease."""
        return self._state

    @property
    def prefix_len(self) -> int:
        """Tokens that were cached already when the lease began or last resumed; page aligned."""
        return self._state.prefix_tokens

    @property
    def tiers(self) -> LeaseTiers:
        """What came out of a tier below the pool for it, and what more lies there."""
        return self._state.tiers

    @property
    def kv_len(self) -> int:
        """Tokens whose KV was in the pages when the lease began or last resumed.

        ``prefix_len`` at first, the whole prompt after a receive, and after ``resume`` all that was
        retracted, or the cached part of it where nothing else was kept. The engine computes the
        rest.
        """
        return self._state.kv_tokens

    @property
    def is_retracted(self) -> bool:
        """Whether it has given its pages back and not taken any since."""
        return self._state.is_retracted

    @property
    def is_released(self) -> bool:
        """Whether ``release`` has been answered."""
        return self._state.is_released

    @property
    def pages(self) -> NDArray[np.int32]:
        """Page ids of the first component, for all its tokens and the reserve, in token order.

        Read-only. A commit may swap pages for equal cached ones: read this again after it.
        ``torch`` knows no read-only tensors, so it takes a copy:
        ``torch.from_numpy(lease.pages.copy())``.

        Raises:
            KvdError: ``unknown-lease`` after the release, ``wrong-state`` while it is retracted:
                the pages are someone else's now. ``before-restart`` where the daemon that is back
                has not kept it; what ended the session once that is over: ``pool-changed``,
                ``unknown-session``, ``client-gone``, or ``unreachable`` after ``Node.close``.
        """
        self._check_runs()
        return np.frombuffer(self._state.row, dtype="<i4")

    @property
    def key(self) -> LeaseKey:
        """Of which session, life and lease ``pages`` are now: for an order to copy from or to them.

        Send it with the page numbers, and have ``Worker.check`` or ``Node.check`` look at it where
        the copy is made.

        Raises:
            KvdError: as ``pages``.
        """
        self._check_runs()
        return self._pools.key_of(self._state.number, self._state.version)

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """Page ids of one component: int32, one dimension, read-only; 0 means no page.

        What they are depends on the component's extent:

        * the first one, and every companion of it: a page for every ``page_size`` tokens of the
          component, in token order;
        * a window: parallel to ``pages``, with 0 outside the stretch that is mapped now;
        * a state: two ids, the state after ``prefix_len`` tokens, which is read and never written
          (0: there is none, begin with an empty one), and the lease's own, which is written;
        * a device buffer: the pages the lease has there. Which of them holds which page of the
          prompt is what ``fetch`` says.

        A window and a buffer change with ``slide``, ``extend``, ``commit`` and ``resume``: read
        this again after them.

        Raises:
            KvdError: ``bad-request`` when there is no such component; the message names those that
                there are. As ``pages`` after a release and while it is retracted.
        """
        row = self._pools.row_of(component)
        self._check_runs()
        match row:
            case Along(pages_each):
                return along(self._state.pages, pages_each)
            case ComponentRow(index):
                rows = self._state.beside
                if index >= len(rows):
                    raise _no_row(self.id, component, len(rows))
                return rows[index]

    async def extend(self, n_tokens: int) -> None:
        """Hold pages for ``n_tokens`` more; never waits.

        Raises:
            KvdError: ``no-room`` with the numbers and the holders; the lease is as it was. Never
                for tokens that were promised (``promise_tokens``).
        """
        request = wire.ExtendLease(
            self._port.connection.next_call(), self.id, whole(n_tokens, "n_tokens")
        )
        await self._port.ask(request, wire.PageTable, about=self._state)

    async def slide(self, upto_tokens: int) -> None:
        """The KV from ``upto_tokens`` on is computed next, the KV before it is written.

        Window pages that lie wholly behind the window go back to their pool, or are mapped ahead
        where the lease was opened with ``step_tokens``. Never waits for pages; without a window
        component it changes nothing. Read ``pages_of`` the window again after it.

        Args:
            upto_tokens: grows; less than before changes nothing.

        Raises:
            KvdError: ``bad-request`` beyond the pages of the lease; ``wrong-state`` when the step
                is longer than ``step_tokens``, or a send of the prompt still needs the pages that
                would go; ``not-supported`` where pages are only counted. As ``pages`` after a
                release and while it is retracted.
        """
        self._check_runs()
        request = wire.SlideLease(
            self._port.connection.next_call(), self.id, whole(upto_tokens, "upto_tokens")
        )
        await self._port.ask(request, wire.PageTable, about=self._state)

    async def fetch(self, pages: PageNumbers, ahead: PageNumbers = ()) -> Fetched:
        """Have pages of host KV in the device buffer; returns when their bytes are there.

        They stay there until a later ``fetch`` of this lease needs their place: the longest unused
        go first. Fetches of one lease are served one after the other.

        Write new KV to the host pages (``pages``). A page whose tokens are not all committed or
        ``written`` yet is copied anew by each ``fetch``, so what it holds is never older than the
        call; it is no hit.

        Args:
            pages: logical page numbers: ``n`` has the tokens from ``n * page_size`` on. Not more of
                them at once than the lease has in the buffer.
            ahead: what the next step is likely to need: copied as well where there is place, and
                nobody waits for it.

        Raises:
            KvdError: ``bad-pages`` for what is no page of this lease, or has no written KV yet;
                ``not-supported`` where the pool has no device buffer; ``too-large`` for more than
                fit at once; ``cancelled`` when the lease is released meanwhile. As ``pages`` after
                a release and while it is retracted.
        """
        self._check_runs()
        request = wire.FetchPages(
            call=self._port.connection.next_call(),
            lease=self.id,
            pages=page_frame(pages),
            ahead=page_frame(ahead),
        )
        done = await self._port.ask(
            request, wire.FetchReply, about=self._state, within_s=COPY_WITHIN_S
        )
        found = np.frombuffer(done.pages, dtype="<i4")
        return Fetched(
            pages=found, hits=done.hits, misses=done.misses, copied_bytes=done.copied_bytes
        )

    async def written(
        self,
        upto_tokens: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        after: WhenWritten | bytes | None = None,
    ) -> None:
        """The KV of all tokens below ``upto_tokens`` is in the pages, and stays as it is.

        Sends of the lease's prompt go on by it: there is no need to ``advance`` them too. It shares
        nothing by itself: ``commit`` does. But from the first word on, a ``commit`` or
        ``release`` without ``upto_tokens`` shares what was said and no more; and however the lease
        ends, by a release without tokens or the death of this engine, whole pages of what was said
        stay cached.

        Args:
            upto_tokens: counted from the start; tokens that no commit has named yet count too.
            rank: of the processes that each write a part of every page, the one that says so.
            ranks: how many they are: what the least of them has said counts. What was said of all
                of them before (``ranks=1``) holds for each. A process that has joined as a rank
                says it itself: ``Worker.written``.
            after: as in ``Send.advance``: written when this event comes. An event object is kept as
                long as this lease is.

        Raises:
            KvdError: ``bad-request`` when it is less than before, or more than the pages of the
                lease have room for, with both numbers. It is as it was.
        """
        request = wire.SayWritten(
            call=self._port.connection.next_call(),
            lease=self.id,
            upto_tokens=whole(upto_tokens, "upto_tokens"),
            rank=whole(rank, "rank"),
            ranks=whole(ranks, "ranks"),
            after=handle_of(after),
        )
        if after is not None and not isinstance(after, bytes):
            self._events.append(after)
        await self._port.ask(request, wire.Done, about=self._state)

    async def commit(
        self,
        new_tokens: TokenIds = (),
        upto_tokens: int | None = None,
        *,
        keys: Sequence[bytes] | None = None,
        swap: bool = True,
        extend: int = 0,
    ) -> NDArray[np.int32]:
        """Cache whole pages of what is written: others on this node find them from now on.

        The lease runs on, so a long prefill can share its chunks as they are done. What windows or
        states need is there for others when it has ended: a window of what was committed last, a
        state if nothing was computed beyond that.

        Args:
            new_tokens: follow the tokens that the lease knows; it knows them from now on.
            keys: of the pages that follow, for a lease that was opened with keys.
            upto_tokens: the KV of the tokens below this one is written, known and new ones counted.
                Left out: as far as was said before (``written``, or an ``upto_tokens``); where
                nothing was said, the KV of all known and new tokens is written.
            swap: take the cached pages where others had cached equal ones. False: ``pages`` stays
                as it is, and so do the bytes, until a later commit that swaps; for workers that
                were told the page ids a step ago.
            extend: hold pages for so many tokens more in the same message, as ``extend`` does, and
                before the commit, so that new tokens may have their place there. Both are done, or
                nothing is.

        Returns:
            The pages that were swapped, a row ``[old, new]`` for each (int32).

        Raises:
            KvdError: ``bad-request`` when the lease holds no pages for so many tokens: ``extend``
                it first; or when ``upto_tokens`` is below 0, beyond the tokens, or beyond what the
                last of several ranks has written; ``no-room`` where ``extend`` gets no pages. It is
                as it was.
        """
        before = self._state.pages
        call = self._port.connection.next_call()
        request: wire.CommitLease | wire.CommitUpTo | wire.CommitAndExtend
        request = wire.CommitLease(call, self.id)
        upto = None if upto_tokens is None else whole(upto_tokens, "upto_tokens")
        if extend:
            request = wire.CommitAndExtend(
                call, self.id, whole(extend, "extend"), upto_tokens=upto, swaps=swap
            )
        elif upto is not None or not swap:
            request = wire.CommitUpTo(call=call, lease=self.id, upto_tokens=upto, swaps=swap)
        frame = self._prompt.following(new_tokens, keys)
        await self._port.ask(request, wire.PageTable, tokens=frame, about=self._state)
        self._prompt.took(frame)
        return swapped(before, self._state.pages)

    def share(self, new_tokens: TokenIds = (), upto_tokens: int | None = None) -> None:
        """``commit`` for who goes on meanwhile: nothing is waited for, and no page is swapped.

        Whether it was done is not told. As ``upto_tokens`` says what is written, so that a later
        word may repeat it, nothing is lost where it was not.

        Args:
            new_tokens: as in ``commit``.
            upto_tokens: as in ``commit``.

        Raises:
            KvdError: it cannot be said: as ``pages``, and ``unreachable`` while the daemon is away.
        """
        request = wire.CommitUpTo(
            call=self._port.connection.next_call(),
            lease=self.id,
            upto_tokens=None if upto_tokens is None else whole(upto_tokens, "upto_tokens"),
            swaps=False,
        )
        frame = self._prompt.following(new_tokens)
        self._port.begin(request, tokens=frame, about=self._state)
        self._prompt.took(frame)

    async def retract(self, new_tokens: TokenIds = (), *, keep: str = "host") -> Retraction:
        """Give every page back and unlock the prefix; the lease stays, for ``resume``.

        The KV of the known tokens and of ``new_tokens`` is written; it is saved before the pages
        go. What is cached of it stays cached: ``commit`` first to leave whole pages there too.

        Args:
            new_tokens: as in ``commit``, but they do not enter the cache.
            keep: ``host`` copies the pages to host memory of the daemon; ``nothing`` does not, and
                what the cache has lost by then must be computed again.

        Raises:
            KvdError: ``no-room`` when that memory is full, with the numbers and who has it;
                ``wrong-state`` while a send reads the pages, or when it is retracted already;
                ``aborted`` when the transfer process ended meanwhile. The lease runs on as before.
        """
        request = wire.RetractLease(self._port.connection.next_call(), self.id, keep)
        frame = self._prompt.following(new_tokens)
        done = await self._port.ask(
            request,
            wire.Retracted,
            tokens=frame,
            about=self._state,
            within_s=COPY_WITHIN_S,
        )
        self._prompt.took(frame)
        return Retraction(done.saved_pages, done.saved_bytes)

    async def resume(self, *, deadline_s: float = 30.0) -> Resumption:
        """Have pages again for all tokens and the reserve; waits for room, before new requests.

        The tokens are matched against the cache again; only KV that is no longer there is copied
        back. ``pages`` are others than before: read them again.

        Args:
            deadline_s: longest wait for room.

        Raises:
            KvdError: ``deadline`` or ``no-room``, as for a lease; ``wrong-state`` when it is not
                retracted. It is retracted still, and what was saved is saved.
        """
        request = wire.ResumeLease(self._port.connection.next_call(), self.id, deadline_s)
        done = await self._port.ask(
            request,
            wire.Resumed,
            about=self._state,
            within_s=within(deadline_s) + COPY_WITHIN_S,
        )
        return Resumption(done.prefix_tokens, done.restored_tokens, done.kv_tokens)

    async def release(
        self,
        new_tokens: TokenIds | None = None,
        upto_tokens: int | None = None,
        *,
        keys: Sequence[bytes] | None = None,
    ) -> None:
        """Unlock and free; the lease is over.

        Args:
            new_tokens: commit first: the known tokens and these; ``()`` for none beyond the known.
                Left out: nothing is committed but whole pages of what was said to be ``written``.
                A lease of before the daemon's restart, or of a session that is over, commits
                nothing.
            upto_tokens: commit first, and no further than this; as in ``commit``.
            keys: commit first: the known pages and those of these keys.

        Raises:
            KvdError: as ``commit``; then it is not released.
        """
        self._port.look()
        if self._state.lost is not None or self._state.over is not None:
            await self._release_lost()
            return
        call = self._port.connection.next_call()
        request: wire.Request
        if new_tokens is None and upto_tokens is None and keys is None:
            request = wire.ReleaseLease(call, self.id)
            await self._port.ask(request, wire.Done, about=self._state, has_looked=True)
            return
        request = wire.CommitAndRelease(call, self.id)
        if upto_tokens is not None:
            request = wire.ReleaseUpTo(call, self.id, whole(upto_tokens, "upto_tokens"))
        frame = self._prompt.following(new_tokens, keys)
        await self._port.ask(request, wire.Done, tokens=frame, about=self._state, has_looked=True)

    def leave(self, new_tokens: TokenIds | None = None, upto_tokens: int | None = None) -> None:
        """``release`` for who goes on meanwhile: nothing is waited for, and it is over in any case.

        Where it cannot be committed as it is said here, it is released all the same.

        Args:
            new_tokens: as in ``release``.
            upto_tokens: as in ``release``.

        Raises:
            KvdError: ``bad-tokens``, ``bad-request``; then it is not over.
        """
        port, connection = self._port, self._port.connection
        port.look()
        request: wire.ReleaseLease | wire.CommitAndRelease | wire.ReleaseUpTo
        request, frame = wire.ReleaseLease(connection.next_call(), self._state.number), None
        if self._state.lost is None and not (new_tokens is None and upto_tokens is None):
            frame = self._prompt.following(new_tokens)
            request = wire.CommitAndRelease(request.call, self._state.number)
            if upto_tokens is not None:
                upto = whole(upto_tokens, "upto_tokens")
                request = wire.ReleaseUpTo(request.call, self._state.number, upto)
        # From here on no daemon that comes back keeps it for us.
        if not connection.forget_lease(self._state):
            return
        if frame is None:
            port.tell(request)
            return
        try:
            call = port.begin(request, tokens=frame, about=self._state, has_looked=True)
        except KvdError:
            port.tell(wire.ReleaseLease(connection.next_call(), self._state.number))
        else:
            call.releases_anyway = True

    async def _release_lost(self) -> None:
        """The pages of before the restart are used no more; a daemon that is away hears it later.

        It is over whatever becomes of the request: at the next return it is not named any more.
        """
        connection = self._port.connection
        if not connection.forget_lease(self._state):
            return
        try:
            await self._port.ask(wire.ReleaseLease(connection.next_call(), self.id), wire.Done)
        except KvdError:
            if connection.end is None and connection.back is None:
                raise

    def _check_runs(self) -> None:
        """Refuse what only a lease with pages can do.

        What has come is not looked at here: no daemon gives pages of a lease away before this
        process has come back to it, has left, or is dead.
        """
        if self._state.over is not None:
            raise KvdError(_over(self.id, self._state.over))
        if self._state.is_released:
            raise KvdError(
                Refusal(
                    Code.UNKNOWN_LEASE,
                    f"lease {self.id} was released: its pages may be someone else's by now",
                    side="client",
                )
            )
        if self._state.condemned is not None:
            raise KvdError(self._state.condemned)
        if self._state.lost is not None and not self._state.is_row_known:
            raise KvdError(
                Refusal(
                    Code.BEFORE_RESTART,
                    f"the daemon ended in the middle of a call that changes the pages of lease "
                    f"{self.id}: which are its own now was never said, those of before may be "
                    "someone else's by now; release it and open a new one",
                    side="client",
                    numbers={"lease": self.id},
                )
            )
        if self._state.lost is not None and not self._state.is_kept:
            raise KvdError(
                Refusal(
                    Code.BEFORE_RESTART,
                    f"lease {self.id} is of before the daemon's restart, and the daemon that is "
                    "back does not keep its pages: they may be someone else's by now; release it "
                    "and open a new one",
                    side="client",
                    numbers={"lease": self.id},
                )
            )
        if self._state.is_retracted:
            raise KvdError(
                Refusal(
                    Code.WRONG_STATE,
                    f"lease {self.id} is retracted: it has no pages until resume()",
                    side="client",
                )
            )


def _over(lease: int, why: Refusal) -> Refusal:
    """Of a lease whose session has ended, whatever it was before."""
    return msgspec.structs.replace(
        why,
        message=(
            f"the session of lease {lease} is over, so its pages may be another engine's by now: "
            f"{why.message}"
        ),
        numbers={**why.numbers, "lease": lease},
    )


def _no_row(lease: int, component: str, n_rows: int) -> KvdError:
    return KvdError(
        Refusal(
            Code.INTERNAL,
            f"the daemon sent {n_rows} rows beside that of lease {lease}, and none for "
            f"{component!r}: install the same version of kvd on both sides",
            side="client",
        )
    )


def lease_number(lease: Lease, port: Port) -> int:
    """The number of what a caller gave for a lease, for the node that speaks through ``port``.

    Raises:
        KvdError: ``bad-request`` where it is none, or not its own: the number is another lease
            there.
    """
    if isinstance(lease, Lease):
        if not lease.is_of(port):
            raise KvdError(foreign(port, "lease", "send it from the node that opened it"))
        return lease.id
    why = (
        f"lease is {lease!r:.100}, a {type(lease).__name__}: it is what lease() of this node, or a "
        "receive, has given"
    )
    raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client"))
