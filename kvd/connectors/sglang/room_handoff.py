"""One request's KV on its way through a room, on either side; SGLang's scheduler reads how far.

    MEETING --both engines know of the room--> OPEN --pages--> MOVING --all is there--> DONE
       |                                         |                |
       +-----------------------------------------+----------------+--> FAILED, with a reason

The prefill side (``OutgoingKV``) copies SGLang's pages into those of a lease, chunk by chunk as
SGLang computes them, and the daemon sends them meanwhile. The decode side (``IncomingKV``) has the
daemon receive the whole prompt into pages of the pool, and only when it is there and committed are
SGLang's pages written, by a copy of this process. So no other process ever writes a page of
SGLang's, and what has to be waited for before one is another request's is this process's own copy
(``CopyGuard``). What is received or sent stays cached on its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from typing_extensions import override

from kvd.client import Code, HandoffError, KvdError
from kvd.connectors.refusals import BROKEN, refused_here
from kvd.connectors.sglang.copy_guard import CopyGuard, GivenUp
from kvd.connectors.sglang.room_mail import Letter, RoomHeard, RoomOpen, RoomOver, RoomWanted

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvd.client import Lease, Node, Outcome, PendingCopy, Send
    from kvd.connectors.sglang.chains import PromptKeys
    from kvd.connectors.sglang.handoff_link import HandoffLink
    from kvd.connectors.sglang.storage_link import PagesFit

logger = logging.getLogger("kvd.connectors.sglang")

WORD_BYTES: Final = 8
"""Of a word that is drawn so that nobody else has it."""

AGAIN_S: Final = 1.0
"""A letter that has not been answered is written again so soon; and so often it is looked whether a
send still goes on that waits for SGLang."""

OVER_TIMES: Final = 10
"""So often the other engine is told that a request is over; then it is not there."""


class HandoffStage(enum.Enum):
    """How far a request's KV is."""

    MEETING = "meeting"
    OPEN = "open"
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class PageChunk(NamedTuple):
    """Pages of SGLang's that it has computed."""

    first: int
    """Of the prompt, the first of them."""
    blocks: list[int]
    event: Any
    """Of a device: they are written when it has come; None: they are."""
    metadata: bytes | None
    """With the last chunk: what the decode engine needs beside."""


class HandoffTerms(NamedTuple):
    """What is said of a room before anything moves."""

    room: int
    """As SGLang's router has it."""
    kvd_room: int
    """Of this rank of the engine."""
    prompt: PromptKeys
    n_tokens: int
    namespace: str
    within_s: float
    """All of it takes no longer."""


class LetterPost(Protocol):
    """Sends letters, and says where answers go."""

    @property
    def here(self) -> tuple[str, int]:
        """Where this engine reads letters."""
        ...

    def post(self, host: str, port: int, letter: Letter, *, is_again: bool = False) -> None:
        """Send a letter; ``is_again``: there was no answer, so by a new connection."""
        ...


class RoomHandoff:
    """What both sides have in common.

    Args:
        link: to the daemon.
        terms: of the room.
        post: to the other engine.
    """

    def __init__(self, link: HandoffLink, terms: HandoffTerms, post: LetterPost) -> None:
        self._link, self.terms, self._post = link, terms, post
        self.guard = CopyGuard()
        self.stage = HandoffStage.MEETING
        self.why = ""
        """Why it has failed."""
        self._other: tuple[str, int] | None = None
        """Where the other engine reads letters."""
        self._life = ""
        self._heard_by_other = asyncio.Event()
        """The letter of now has been answered."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it ended, well or not."""
        return self.stage in {HandoffStage.DONE, HandoffStage.FAILED}

    def start(self) -> None:
        """From here on it goes on by itself."""
        self._link.call_soon(self._begin)

    def read(self, letter: Letter) -> None:
        """A letter of the other engine, in any thread."""
        self._link.call_soon(self._heard, letter)

    def give_up(self, why: str) -> bool:
        """SGLang has no use for it any more; whether no byte of its pages moves. Never waits."""
        self._link.call_soon(self._fail, why)
        return self.guard.give_up()

    def free_pages(self, why: str) -> None:
        """``give_up``, and return when no byte of SGLang's pages moves."""
        self._link.call_soon(self._fail, why)
        self.guard.wait()

    # ---- on the loop -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self.is_over:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """However it has ended, SGLang and the other engine hear so."""
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            logger.error("kvd: room %d has failed by a fault", self.terms.room, exc_info=fault)
        self._fail("the engine leaves its daemon" if fault is None else f"a fault: {fault!r}")

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self.terms.within_s):
                await self._hand_over()
        except GivenUp:
            self._fail("the request was given up")
        except TimeoutError:
            self._fail(f"nothing has come within {self.terms.within_s:g} s")
        except (KvdError, *BROKEN) as error:
            self._fail(str(error) or repr(error))
        else:
            self._goes_on(HandoffStage.DONE)

    async def _hand_over(self) -> None:
        raise NotImplementedError

    def _heard(self, letter: Letter) -> None:
        raise NotImplementedError

    def _goes_on(self, stage: HandoffStage) -> None:
        """It is so far. What has failed stays so: its task may have a step to go until it ends."""
        if not self.is_over:
            self.stage = stage

    def _fail(self, why: str) -> None:
        if self.is_over:
            return
        self.why, self.stage = why, HandoffStage.FAILED
        if self._other is not None:
            self._link.begin(self._tell_over(*self._other))
        if self._task is not None:
            self._task.cancel()

    async def _tell_over(self, host: str, port: int) -> None:
        """Tell the other engine, until it has heard it or is not there."""
        over = self._over(self._life, self.why)
        for turn in range(OVER_TIMES):
            if await self._was_heard(host, port, over, is_again=turn > 0):
                return
        logger.warning("kvd: nobody at %s:%d hears that room %d is over", host, port, over.room)

    def _over(self, life: str, why: str) -> RoomOver:
        host, port = self._post.here
        return RoomOver(room=self.terms.room, life=life, host=host, port=port, why=why)

    async def _was_heard(self, host: str, port: int, letter: Letter, *, is_again: bool) -> bool:
        self._heard_by_other.clear()
        self._post.post(host, port, letter, is_again=is_again)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_S):
                await self._heard_by_other.wait()
        return self._heard_by_other.is_set()

    def _was_answered(self, heard: RoomHeard) -> None:
        if heard.life == self._life and heard.is_over == self.is_over:
            self._heard_by_other.set()

    def _copy(
        self, fit: PagesFit[Node], lease: Lease, numbers: list[int], first: int, *, to_pages: bool
    ) -> Callable[[], PendingCopy]:
        """What begins a copy of these pages of SGLang's; ``first``: of the prompt."""
        blocks, pages = fit.blocks(self._link.pages), self._link.pages
        begin = blocks.begin_save if to_pages else blocks.begin_load
        return functools.partial(
            begin,
            lease,
            {fit.component: pages.rows(numbers, fit.page_bytes)},
            pages={fit.component: lease.pages_of(fit.component)[first : first + len(numbers)]},
            first_page=first,
        )


class OutgoingKV(RoomHandoff):
    """The prefill side."""

    def __init__(self, link: HandoffLink, terms: HandoffTerms, post: LetterPost) -> None:
        super().__init__(link, terms, post)
        self._wanted: asyncio.Queue[RoomWanted] = asyncio.Queue()
        self._chunks: asyncio.Queue[PageChunk] = asyncio.Queue()
        self._node = ""
        """Where its room is open, once it is."""

    def put(self, chunk: PageChunk) -> None:
        """These pages are computed, and stay as they are until this is over."""
        self._link.call_soon(self._chunks.put_nowait, chunk)

    @override
    def _heard(self, letter: Letter) -> None:
        match letter:
            case RoomWanted() if letter.life == self._life and not self.why:
                # It is written again: what was answered did not come, or not yet.
                self._tell_open()
            case RoomWanted() if self._life or self.is_over:
                why = self.why or f"room {letter.room} is another request's"
                self._post.post(letter.host, letter.port, self._over(letter.life, why))
            case RoomWanted():
                self._life, self._other = letter.life, (letter.host, letter.port)
                self._wanted.put_nowait(letter)
            case RoomOver() if letter.life == self._life or not self._life:
                self._fail(f"the decode engine: {letter.why}")
            case RoomHeard():
                self._was_answered(letter)
            case RoomOpen() | RoomOver():
                pass

    def _tell_open(self) -> None:
        if self._other is not None and self._node:
            self._post.post(*self._other, RoomOpen(self.terms.room, self._life, self._node))

    @override
    async def _hand_over(self) -> None:
        wanted = await self._wanted.get()
        self._check(wanted)
        fit = await self._link.here()
        terms = self.terms
        lease = await fit.node.lease(
            keys=terms.prompt.of_life(self._life),
            namespace=terms.namespace,
            deadline_s=terms.within_s,
            cache=terms.prompt.is_shared,
            tiers="now",
        )
        send: Send | None = None
        try:
            send = await fit.node.send(
                terms.kvd_room,
                lease=lease,
                namespace=terms.namespace,
                deadline_s=terms.within_s,
                to=wanted.node,
            )
            self._node = fit.node.name
            self._tell_open()
            self._goes_on(HandoffStage.OPEN)
            metadata = await self._pages_saved(fit, lease, send)
            _require_committed(await send.finish(metadata))
        except BaseException as error:
            if send is not None:
                await _said(send.abort(self.why or str(error) or "it was given up"))
            raise
        finally:
            _leave(lease)

    def _check(self, wanted: RoomWanted) -> None:
        terms = self.terms
        mine = (terms.namespace, terms.n_tokens, terms.prompt.is_shared, terms.kvd_room)
        theirs = (wanted.namespace, wanted.n_tokens, wanted.is_shared, wanted.kvd_room)
        if mine != theirs:
            why = (
                f"the engines do not mean the same KV of room {terms.room}: namespace, tokens, "
                f"whether tokens say all, and the rank's room are {theirs} there and {mine} here; "
                "each engine's log says what its namespace is of"
            )
            raise refused_here(Code.PROMPT_MISMATCH, why)

    async def _pages_saved(self, fit: PagesFit[Node], lease: Lease, send: Send) -> bytes:
        """Copy chunk after chunk; what came with the last one."""
        n_there = lease.prefix_len // fit.page_size
        while True:
            chunk = await self._next_chunk(send)
            self._goes_on(HandoffStage.MOVING)
            if chunk.event is not None:
                await asyncio.to_thread(chunk.event.synchronize)
            first = max(chunk.first, n_there)
            blocks = chunk.blocks[first - chunk.first :]
            if blocks:
                await self.guard.order(self._copy(fit, lease, blocks, first, to_pages=True))
            if chunk.metadata is not None:
                return chunk.metadata

    async def _next_chunk(self, send: Send) -> PageChunk:
        """Wait for SGLang, and no longer than the send goes on."""
        while True:
            if send.outcome is not None:
                _require_committed(send.outcome)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    return await self._chunks.get()


class IncomingKV(RoomHandoff):
    """The decode side: where its pages are, and its row of metadata, once SGLang has given them."""

    def __init__(self, link: HandoffLink, terms: HandoffTerms, post: LetterPost) -> None:
        super().__init__(link, terms, post)
        self._life = secrets.token_hex(WORD_BYTES)
        self._opened: asyncio.Queue[RoomOpen] = asyncio.Queue()
        self._first, self._blocks = 0, list[int]()
        self._write: Callable[[bytes], None] | None = None
        self._prefill = ""
        """Which engine has heard that the room is wanted."""
        self._look_up: Callable[[], tuple[str, int] | None] = lambda: None

    def meets(self, host: str, port: int, look_up: Callable[[], tuple[str, int] | None]) -> None:
        """Where the prefill engine reads letters; ``look_up`` asks that anew, and may wait."""
        self._other, self._look_up = (host, port), look_up

    def fill(self, first: int, blocks: list[int], write: Callable[[bytes], None]) -> None:
        """Have these pages filled, and then the metadata written.

        Args:
            first: of the prompt, the page that the first of them is for; SGLang has those before.
            blocks: their numbers.
            write: fills the row.
        """
        self._first, self._blocks, self._write = first, blocks, write
        self.start()

    @override
    def _heard(self, letter: Letter) -> None:
        if letter.life not in {self._life, ""}:
            return
        match letter:
            case RoomOpen():
                self._opened.put_nowait(letter)
            case RoomOver():
                self._fail(f"the prefill engine: {letter.why}")
            case RoomHeard() if letter.engine != (self._prefill or letter.engine):
                self._fail("the prefill engine: another one is in its place")
            case RoomHeard():
                self._prefill = letter.engine
                self._was_answered(letter)
            case RoomWanted():
                pass

    @override
    async def _hand_over(self) -> None:
        terms = self.terms
        fit = await self._link.here()
        opened = await self._room_opened(fit.node.name)
        receive = await fit.node.receive(
            terms.kvd_room,
            keys=terms.prompt.of_life(self._life),
            source=opened.node,
            namespace=terms.namespace,
            deadline_s=terms.within_s,
            cache=terms.prompt.is_shared,
            is_open=True,
            tiers="now",
        )
        self._goes_on(HandoffStage.MOVING)
        try:
            await receive.done()
        except BaseException:
            await _said(receive.cancel())
            raise
        try:
            if self._blocks:
                blocks, first = self._blocks, self._first
                await self.guard.order(
                    self._copy(fit, receive.lease, blocks, first, to_pages=False)
                )
            self.guard.write(lambda: self._fill_row(receive.aux))
        finally:
            _leave(receive.lease)

    async def _room_opened(self, node: str) -> RoomOpen:
        """Ask for it until it is open; where nobody hears, another engine may be in that place."""
        assert self._other is not None, "it is met before it is filled"
        host, port = self._post.here
        wanted = RoomWanted(
            room=self.terms.room,
            kvd_room=self.terms.kvd_room,
            life=self._life,
            host=host,
            port=port,
            node=node,
            namespace=self.terms.namespace,
            n_tokens=self.terms.n_tokens,
            is_shared=self.terms.prompt.is_shared,
        )
        is_silent = False
        while True:
            if is_silent and (found := await asyncio.to_thread(self._look_up)) is not None:
                self._other = found
            is_silent = not await self._was_heard(*self._other, wanted, is_again=is_silent)
            if not is_silent:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S):
                        return await self._opened.get()

    def _fill_row(self, metadata: bytes) -> None:
        assert self._write is not None
        self._write(metadata)


def _require_committed(outcome: Outcome) -> None:
    if outcome.reason is not None:
        raise HandoffError(outcome.reason)


async def _said(call: Coroutine[Any, Any, None]) -> None:
    """Say it to the daemon, if it is there."""
    with contextlib.suppress(KvdError, *BROKEN):
        await call


def _leave(lease: Lease) -> None:
    """Its pages are the daemon's; what was written stays cached."""
    with contextlib.suppress(KvdError, *BROKEN):
        lease.leave(())
