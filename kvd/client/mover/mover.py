"""The thread that sees orders through, from their marks to the daemon's last word on each.

Engine threads append an order and ring, or ask the daemon for one whose mark has come; all else
happens here. One order after another: pieces of two are never in one call. Of those that may move
the shorter one goes first, and each is taken for shorter the longer it has waited, so none waits
for ever.

Invariants: no copy begins before its mark has come and the daemon has said that the pages are kept
for it; the daemon hears that a copy is over when no byte of it moves, and of each that it kept
pages for; no stream of the engine waits for anything here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from kvd.client.mover.late_marks import MAX_WHY, LateMarks
from kvd.client.mover.pending_copy import CopyState, LaneDead, MemoryFault
from kvd.client.mover.pieces import PieceUnits
from kvd.errors import Code, KvdError, Refusal
from kvd.wire.attach import CopyBegins, CopyEnds, CopyPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.client.lease_key import LeaseKey
    from kvd.client.mover.bell import Bell
    from kvd.client.mover.lane import CopyLane, LaneCopy
    from kvd.client.mover.pending_copy import OrderPart, PendingCopy
    from kvd.client.rank_words import PendingWord, RankWords

log = logging.getLogger("kvd.client")

ANSWER_LOOK_S: Final = 0.5
"""The longest sleep where something is to come; what comes rings the bell earlier."""

LOOK_EVERY_S: Final = 0.00005
"""Between two looks at a device, which rings no bell."""

LOOK_SELDOM_S: Final = 0.0005
LOOK_SHARE: Final = 8
"""The longer nothing has come the more seldom: each look takes the interpreter from the engine for
some microseconds. What comes is noticed later by an eighth of what it took, half a millisecond at
most."""

ASKED_AT_ONCE: Final = 256
"""So many copies the daemon keeps pages for at most; it takes 1,024 of a process."""

MARKS_AT_ONCE: Final = 4
"""Marks that have not come are looked at so many in a turn: each is a call to the device."""

AGING_BYTES_PER_S: Final = 4 * 2**30
"""By so much an order counts as shorter for each second that it has waited."""

CLOSE_WITHIN_S: Final = 10.0
"""How long a close waits for what is in flight; it takes milliseconds, or the device hangs."""


class _LostCopy:
    """What a lane had when it died: of it nobody can tell what has begun."""

    is_over: Final = False

    def __init__(self, fault: Exception) -> None:
        self.fault = fault


class _Moving:
    """An order that moves: what of it is begun, what is under way, and whether that is all."""

    def __init__(self, copy: PendingCopy, call: int, chunk_bytes: int) -> None:
        self.copy = copy
        self.call = call
        self.left_bytes = sum(part.n_bytes for part in copy.parts)
        self.total_bytes = self.left_bytes
        self.under_way: deque[LaneCopy] = deque()
        self.began_s = 0.0
        self.fault: Exception | None = None
        self.chunks = _chunks(copy.parts, chunk_bytes)

    def rank(self, now_s: float) -> float:
        """Of several, the least goes on."""
        return self.left_bytes - (now_s - self.copy.ordered_s) * AGING_BYTES_PER_S

    @property
    def is_done(self) -> bool:
        """Whether all of it is there, once nothing of it is under way."""
        return self.fault is None and not self.left_bytes

    @property
    def has_more(self) -> bool:
        """Whether something of it is still to be begun."""
        return self.left_bytes > 0 and self.fault is None and not self.copy.is_cancelled


def _chunks(parts: Sequence[OrderPart], chunk_bytes: int) -> Iterator[tuple[OrderPart, PieceUnits]]:
    for part in parts:
        table = part.table
        step = max(1, min(table.units_at_once, chunk_bytes // table.unit_bytes))
        for first in range(0, part.units, step):
            yield part, PieceUnits(first, min(first + step, part.units))


class Mover:
    """Sees the orders of one process and device through."""

    def __init__(
        self,
        lane: CopyLane,
        bell: Bell,
        words: RankWords,
        check: Callable[[LeaseKey], None],
    ) -> None:
        """``check``: refuses keys of another session; ``words``: what the daemon is told by."""
        self.lane = lane
        self._bell = bell
        self._words = words
        self._check = check
        self._late = LateMarks(words, lane.device)
        self._new: deque[PendingCopy] = deque()
        self._waiting: deque[PendingCopy] = deque()
        self._asking: dict[PendingWord, PendingCopy] = {}
        self._moving: list[_Moving] = []
        self._unsaid: list[_Moving] = []
        """No byte of them moves, and the daemon could not be told yet: it reads nothing."""
        self._ending: dict[PendingWord, _Moving] = {}
        self._under_way: set[PendingCopy] = set()
        """Those for which the daemon keeps pages, or may."""
        self._busy_s = 0.0
        """When something has come last."""
        self._closing: Refusal | None = None
        self._lock = threading.Lock()
        """Held for an instant: nothing is ordered behind a close."""
        self._is_closed = False
        self._dead: Refusal | None = None
        self.doubt: Refusal | None = None
        """Why nobody can tell whether a copy still moves; None while none does."""
        self._thread = threading.Thread(target=self._run, name="kvd-mover", daemon=True)
        self._thread.start()

    @property
    def is_quiet(self) -> bool:
        """Whether the daemon keeps no page for a copy of this process; for any thread."""
        return not self._under_way

    def require_alive(self) -> None:
        """Refuse what could not be seen through.

        Raises:
            KvdError: nothing is any more; ``wrong-state`` in a forked child.
        """
        self._words.require_own()
        why = self._dead or self._closing
        if why is not None:
            raise KvdError(why)

    def order(self, copy: PendingCopy) -> None:
        """See this one through.

        Raises:
            KvdError: as ``require_alive``.
        """
        with self._lock:
            self.require_alive()
            copy.begun(self._bell.ring, self._words.require_own)
            if self._is_asked_at_once(copy):
                return
            self._new.append(copy)
        self._bell.ring()

    def _is_asked_at_once(self, copy: PendingCopy) -> bool:
        """Ask the daemon on the engine's thread where nothing has to come first.

        The answer wakes the mover's thread, so it takes one turn fewer until bytes move.
        """
        is_late = self.lane.polls or not self.lane.has_come(copy.after)
        if is_late or self._new or self._waiting or len(self._under_way) >= ASKED_AT_ONCE:
            return False
        try:
            self._ask(copy)  # its key was looked at in this very call
        except (KvdError, ArithmeticError, TypeError, ValueError):
            return False  # the thread asks again, and says why it ends
        if copy.state is CopyState.ASKING:
            # Last: where the thread was woken before the order was among those that are asked for,
            # it has gone to sleep again, and listens to nothing.
            self._bell.listen(self._words.fileno())
            if any(word.is_over for word in list(self._asking)):
                self._bell.ring()
        return True

    def give_up(self, copies: Sequence[PendingCopy], within_s: float = CLOSE_WITHIN_S) -> None:
        """Cancel them, and return when they are over; a forked child has none to wait for.

        Raises:
            KvdError: ``wrong-state`` for one that is not by then, or of which nobody can tell.
        """
        if not self._words.is_own:
            return
        for copy in copies:
            copy.cancel()
        end_s = time.monotonic() + within_s
        for copy in copies:
            with contextlib.suppress(KvdError):
                copy.result(max(0.0, end_s - time.monotonic()))
            if not copy.safe():
                raise KvdError(_still_moving(copy))

    def close(self, why: Refusal, within_s: float = CLOSE_WITHIN_S) -> bool:
        """End orders that do not move, wait for those that do; whether none is left."""
        with self._lock:
            self._closing = self._closing or why
        if not self._is_closed:
            self._bell.ring()
        self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        if not self._is_closed:
            self._is_closed = True
            self.lane.close()
            self._bell.close()
        return self.doubt is None

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.lane.enter()
        except KvdError as error:
            self._die(error.refusal.message)
        while True:
            self._take_new()
            try:
                # In this order, what one of them brings is taken on by the next in the same turn.
                is_busy = self._hear()
                is_busy |= self._look_at_marks()
                is_busy |= self._move()
            except LaneDead as dead:
                self._die(str(dead))
                continue
            except Exception as bug:
                # Whoever waits for an order hears of it: nobody else would see it through.
                log.exception("a bug of the thread that copies")
                self._die(f"a bug of this client, please report it: {bug!r:.200}")
                self._bell.sleep(LOOK_SELDOM_S)
                continue
            self._say_ends()
            if self._closing is not None and not self._open():
                return
            if is_busy:
                self._busy_s = time.monotonic()
            if not self._moving or not (
                self._may_begin(to_pages=True) or self._may_begin(to_pages=False)
            ):
                self._sleep()

    def _open(self) -> bool:
        return bool(
            self._new
            or self._waiting
            or self._asking
            or self._moving
            or self._unsaid
            or self._ending
        )

    def _take_new(self) -> None:
        while self._new:
            self._waiting.append(self._new.popleft())

    def _sleep(self) -> None:
        if self.lane.polls and (self._moving or self._waiting):
            idle_s = time.monotonic() - self._busy_s
            within_s = min(LOOK_SELDOM_S, max(LOOK_EVERY_S, idle_s / LOOK_SHARE))
        elif self._unsaid or self._waiting or self._late.has_more_to_say:
            within_s = LOOK_SELDOM_S
        else:
            within_s = ANSWER_LOOK_S if self._open() else 3600.0
        fd = self._words.fileno() if self._asking or self._ending else -1
        self._bell.sleep(within_s, fd)

    def _look_at_marks(self) -> bool:
        """Ask the daemon for those whose marks have come.

        Each time for a few marks that have not: those of the last steps come in their order.
        """
        now_s, is_busy = time.monotonic(), False
        late: set[object] = set()
        self._late.say_again()
        for _ in range(len(self._waiting)):
            if len(late) >= MARKS_AT_ONCE or len(self._under_way) >= ASKED_AT_ONCE:
                break
            # It leaves the queue when all that may fail is done: a lane that dies here finds it.
            copy = self._waiting[0]
            if not self._leaves(copy, now_s, is_late=copy.after in late):
                late.add(copy.after)
            if copy.state is CopyState.WAITING:
                self._waiting.rotate(-1)
            else:
                self._waiting.popleft()
                is_busy = True
        return is_busy

    def _why_dropped(self, copy: PendingCopy) -> Refusal | None:
        """Why one is not begun, whether its mark comes or not."""
        if copy.is_cancelled:
            return _cancelled(copy)
        return self._dead or self._closing

    def _leaves(self, copy: PendingCopy, now_s: float, *, is_late: bool) -> bool:
        """Whether its mark has come, or it waits for it no more."""
        why = self._why_dropped(copy)
        if why is None and (is_late or not self.lane.has_come(copy.after)):
            if now_s - copy.ordered_s < copy.mark_within_s:
                self._late.wait(copy, now_s)
                return False
            why = _no_mark(copy)
            log.warning("%s", why.message)
        if why is not None:
            self._drop(copy, why)
            return True
        try:
            self._check(copy.key)
            self._ask(copy)
        except KvdError as error:
            # Where the daemon lives and has not read what was said before, it is said later.
            if self._words.end is not None or not error.retryable:
                self._drop(copy, error.refusal)
        except Exception as error:
            log.exception("%s cannot be asked for", copy.words)
            told = f"{copy.words} cannot be asked for: {error!r:.200}"
            self._drop(copy, Refusal(Code.BAD_REQUEST, told, side="client"))
        return True

    def _drop(self, copy: PendingCopy, why: Refusal) -> None:
        """It is over before the daemon was asked."""
        copy.waited_s = time.monotonic() - copy.ordered_s
        self._late.given_up(copy, why.message)
        copy.end(why)

    def _ask(self, copy: PendingCopy) -> None:
        parts = tuple(
            CopyPart(
                component=part.table.component,
                first_page=part.first_page,
                n_pages=len(part.pages),
                pages_sum=part.page_sum,
            )
            for part in copy.parts
        )
        self._under_way.add(copy)
        try:
            word = self._words.begin(
                lambda call: CopyBegins(
                    call=call,
                    lease=copy.key.lease,
                    to_pages=copy.to_pages,
                    parts=parts,
                    upto_tokens=copy.upto_tokens,
                    device=self.lane.device,
                    waited=self._late.call_of(copy),
                ),
                self._answered,
            )
        except BaseException:
            self._under_way.discard(copy)
            raise
        self._late.begun(copy)
        copy.mark_s = copy.mark_s or time.monotonic() - copy.ordered_s
        copy.state = CopyState.ASKING
        self._asking[word] = copy

    def _answered(self) -> None:
        """Somebody has read an answer; where this thread has, it is awake."""
        if threading.get_ident() != self._thread.ident:
            self._bell.ring()

    def _hear(self) -> bool:
        """Take the daemon's answers. Meanwhile engine threads may ask for more."""
        if not self._asking and not self._ending:
            return False
        self._words.read()
        for copy in list(self._asking.values()):
            if copy.is_cancelled and not copy.is_over:
                # No byte of it has moved, and none will: nobody has to wait for the daemon.
                copy.end(_cancelled(copy))
        asked = [word for word in list(self._asking) if word.is_over]
        for word in asked:
            copy = self._asking.pop(word)
            if word.refusal is not None:
                self._under_way.discard(copy)
                if not copy.is_over:
                    copy.end(word.refusal)
                continue
            if copy.is_over:
                # The daemon keeps pages for it until it hears that it ended.
                self._unsaid.append(_Moving(copy, word.call, self.lane.chunk_bytes))
                continue
            copy.waited_s = time.monotonic() - copy.ordered_s
            copy.state = CopyState.MOVING
            moving = _Moving(copy, word.call, self.lane.chunk_bytes)
            if self._dead is not None:
                moving.fault = LaneDead(self._dead.message)
            self._moving.append(moving)
        ended = [word for word in self._ending if word.is_over]
        for word in ended:
            moving = self._ending.pop(word)
            self._under_way.discard(moving.copy)
            self._over(moving, word.refusal)
        return bool(asked or ended)

    def _move(self) -> bool:
        """Take note of what has ended, and begin what is next, each direction by itself."""
        if not self._moving:
            return False
        is_busy = self._note_ended()
        for to_pages in (False, True):
            is_busy |= self._begin_next(to_pages=to_pages)
        # Again: what a thread copies by itself is over when it is begun.
        is_busy |= self._note_ended()
        done = [moving for moving in self._moving if not moving.under_way and not moving.has_more]
        for moving in done:
            self._moving.remove(moving)
            moving.copy.moved_s = time.monotonic() - (moving.began_s or time.monotonic())
            moving.copy.landed()
            self._unsaid.append(moving)
        return is_busy or bool(done)

    def _note_ended(self) -> bool:
        is_busy = False
        for moving in self._moving:
            while moving.under_way and moving.under_way[0].is_over:
                is_busy = True
                fault = moving.under_way.popleft().fault
                moving.fault = moving.fault or fault
        return is_busy

    def _may_begin(self, *, to_pages: bool) -> bool:
        """Whether the lane takes more of some order."""
        mine = [moving for moving in self._moving if moving.copy.to_pages is to_pages]
        depth = sum(len(moving.under_way) for moving in mine)
        return depth < self.lane.depth and any(moving.has_more for moving in mine)

    def _die(self, why: str) -> None:
        """Nothing is copied any more. What is under way is in doubt: it may be written still."""
        lost = _lost(self.lane.device, why)
        if self._dead is None:
            log.error("%s", lost.message)
        self._dead = self._dead or lost
        for moving in list(self._moving):
            if moving.under_way:
                # The daemon keeps its pages until this process is gone.
                self._moving.remove(moving)
                self.doubt = self._dead
                moving.copy.end(self._dead, is_doubted=True)
            else:
                moving.fault = moving.fault or LaneDead(why)

    def _begin_next(self, *, to_pages: bool) -> bool:
        mine = [moving for moving in self._moving if moving.copy.to_pages is to_pages]
        depth = sum(len(moving.under_way) for moving in mine)
        ready = [moving for moving in mine if moving.has_more]
        is_begun = False
        while ready and depth < self.lane.depth:
            now_s = time.monotonic()
            moving = min(ready, key=lambda moving: moving.rank(now_s))
            self._begin(moving)
            is_begun, depth = True, depth + 1
            ready = [moving for moving in ready if moving.has_more]
        return is_begun

    def _begin(self, moving: _Moving) -> None:
        part, units = next(moving.chunks)
        moving.began_s = moving.began_s or time.monotonic()
        columns = part.table.pieces(part.blocks, part.pages, units)
        if not columns.sizes.size:
            return  # no layer has blocks for these tokens
        moving.left_bytes -= int(columns.sizes.sum())
        try:
            moving.under_way.append(self.lane.begin(columns, to_pages=moving.copy.to_pages))
        except MemoryFault as fault:
            moving.fault = fault
        except LaneDead as dead:
            moving.under_way.append(_LostCopy(dead))
            raise

    def _say_ends(self) -> None:
        """Tell the daemon of those of which no byte moves any more."""
        unsaid, self._unsaid = self._unsaid, []
        for moving in unsaid:
            if moving.is_done:
                moving.copy.n_bytes = moving.total_bytes
            try:
                said = self._words.begin(functools.partial(_ends, moving), self._answered)
            except KvdError as error:
                if self._words.end is None:
                    self._unsaid.append(moving)  # it has not read what was said before
                else:
                    self._under_way.discard(moving.copy)
                    self._over(moving, error.refusal)
                continue
            self._ending[said] = moving
            if not moving.copy.to_pages:
                # The bytes are there, and the pages were kept for all of them. A save counts with
                # the answer.
                self._over(moving, None)

    def _over(self, moving: _Moving, refusal: Refusal | None) -> None:
        if moving.copy.is_over:
            return  # it was given up before the daemon had answered
        if isinstance(moving.fault, LaneDead) and self._dead is not None:
            refusal = self._dead
        elif moving.fault is not None:
            refusal = _failed(moving.copy, moving.fault)
        elif moving.left_bytes:
            refusal = _cancelled(moving.copy)
        moving.copy.end(refusal)


def _ends(moving: _Moving, call: int) -> CopyEnds:
    copy = moving.copy
    why = "" if moving.is_done else str(moving.fault or "cancelled")
    return CopyEnds(
        call=call,
        copy=moving.call,
        is_done=moving.is_done,
        n_bytes=copy.n_bytes,
        waited_us=int(copy.waited_s * 1e6),
        moved_us=int(copy.moved_s * 1e6),
        why=why[:MAX_WHY],
        mark_us=int(copy.mark_s * 1e6),
    )


def _cancelled(copy: PendingCopy) -> Refusal:
    return Refusal(
        Code.CANCELLED,
        f"{copy.words} was cancelled here: nothing may be assumed of what it wrote",
        side="client",
        numbers={"lease": copy.key.lease},
    )


def _no_mark(copy: PendingCopy) -> Refusal:
    within_s = copy.mark_within_s
    return Refusal(
        Code.DEADLINE,
        f"the mark of {copy.words} has not come within {within_s:g} s: what is computed before it "
        "hangs, or it was never recorded; nothing was copied",
        side="client",
        numbers={"lease": copy.key.lease, "within_s": within_s},
    )


def _lost(device: str, why: str) -> Refusal:
    return Refusal(
        Code.POST_FAILED,
        f"copies with {device} have ended for this process: {why}; blocks of those that were under "
        "way may still be written, and their pages are kept until it is gone: end this process",
        side="client",
    )


def _failed(copy: PendingCopy, fault: Exception) -> Refusal:
    return Refusal(
        Code.POST_FAILED,
        f"{copy.words} failed: {fault}; what it wrote so far counts for nothing",
        side="client",
        numbers={"lease": copy.key.lease},
    )


def _still_moving(copy: PendingCopy) -> Refusal:
    return Refusal(
        Code.WRONG_STATE,
        f"{copy.words} is {copy.state.value} and cannot be ended: its bytes may still move, so "
        "free neither its blocks nor what they are in before this process is gone",
        side="client",
        numbers={"lease": copy.key.lease},
    )
