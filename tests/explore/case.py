"""One moment of two real nodes: what can happen next, and what must be true when all is calm.

Two ``kvd.core.node.Node``s with the transfer processes, the wire and the memory of ``tests/core``,
everything held: a message, a report, a page of a post moves only when it is chosen. ``side`` checks
I1 to I9 after every step and every page that lands; this file has the choices and the end.
"""

from __future__ import annotations

import copy
import hashlib
from types import BuiltinMethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvd.core import inputs
from kvd.core.replay import graph
from kvd.core.replay.freeze import freeze
from kvd.types import ID_BYTES, NO_PAGES, count, page_ids, slice_pages
from kvd.wire import client
from kvd.wire.attach import CopyBegins, CopyEnds, CopyPart, pages_sum
from kvd.wire.peer import Integrity
from tests.core.world import PAGE, World, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.sim.node_shell import Stream
    from kvd.types import Tokens
    from tests.core.side import Letter, Side

ROOM = 7
PROMPT = tokens((1, 2 * PAGE + 5))
"""Three pages, the last one not whole: enough for two posts, one of them with two pages."""

HIT = PROMPT[: 2 * PAGE * ID_BYTES]
"""What the decode side may have already: then nothing is posted."""

QUICK = {"drain_s": 1.0, "linger_s": 3.0, "stall_s": 4.0, "forget_s": 4.0}
"""So that what ends by a clock ends while the calm lasts."""

SAVED = {"save head": (0, 2), "save tail": (2, 3)}
"""Pages that an engine with blocks of its own saves at once."""

SENDING = {"send", "advance", "finish", "hand over", "send kept", "hand over kept", *SAVED}
"""What a prefill engine does."""

SILENCE_S = 6.0
"""Longer than it takes to be lost, to be answered for no more, and to be forgotten."""
CALM_S = 3.0
GONE_S = 5.0
TICK_S = 0.5


CONSTANTS = graph.constants()


def _copy_bound(method: Any, known: dict[int, object]) -> object:
    """A bound method of a dict or a deque, which ``copy`` would leave bound to the original."""
    owner = method.__self__
    if isinstance(owner, ModuleType):
        return method
    return getattr(copy.deepcopy(owner, known), method.__name__)


copy._deepcopy_dispatch[BuiltinMethodType] = _copy_bound  # type: ignore[attr-defined]


class Choice(NamedTuple):
    """Something that can happen next."""

    name: str
    do: Callable[[Case], None]
    is_fault: bool = False
    keeps_promise: bool = False
    """A fault in spite of which the prompt arrives: of the wire alone."""


class Save(NamedTuple):
    """A copy that the prefill engine makes, from the answer to its order on."""

    call: int
    step: str


class Case:
    """A world, and what its engines still mean to do."""

    def __init__(self, **more: object) -> None:
        self.world = World(p_pages=10, d_pages=10, **{**QUICK, **more})
        self.prompt = PROMPT
        self.script: tuple[str, ...] = ()
        """What the engines do next, in this order."""
        self.path: tuple[str, ...] = ()
        self.faults = 0
        self.ticks = 0
        self.is_promised = True
        """Whether nothing has happened that may cost the prompt."""
        self.source = 0
        self.send = 0
        self.receives = 1
        self.filler = 0
        self.held: list[tuple[str, bytes, bytes]] = []
        self.row = NO_PAGES
        """Pages of the source."""
        self.saves: tuple[Save, ...] = ()
        """Under way."""
        self.calls = 500

    def hold(self) -> None:
        """From now on nothing moves by itself."""
        world = self.world
        world.hold_wire = world.hold_posts = world.hold_quiet = world.hold_shells = True
        world.hold_verify = world.hold_network = world.doubts = True

    def copy(self) -> Case:
        """Another one just like it; what modules hold for good is shared, as ``freeze`` has it."""
        known = {number: graph.named(name) for number, name in CONSTANTS.items()}
        return copy.deepcopy(self, known)

    def digest(self) -> bytes:
        """Equal where everything goes on equally."""
        world = self.world
        parts: list[Any] = [world.now_s, self.script, self.faults, self.ticks, self.is_promised]
        parts += [[save.step for save in self.saves]]
        found = hashlib.sha256()
        for side in world.sides.values():
            found.update(freeze(side.node))
            parts += [sorted(side.memory.items()), list(side.inbox), side.asked]
            parts += [_flight(one) for one in (*side.flights.values(), *side.late)]
            parts += [(one.lease, sorted(one.ends)) for one in side.inflow.questions]
            parts += [_stream(one) for one in side.inflow.streams.values()]
            parts += [one.name for one in side.inflow.gone]
            parts += [sorted(side.waiting), side.generation, side.life, side.connection]
        parts += [(one.to.name, one.link, one.message) for one in world.wire]
        found.update(repr(parts).encode())
        return found.digest()

    def after(self, choice: Choice) -> Case:
        """What it is when this has happened."""
        next_one = self.copy()
        next_one.path = (*self.path, choice.name)
        next_one.faults += choice.is_fault
        next_one.is_promised &= not choice.is_fault or choice.keeps_promise
        choice.do(next_one)
        next_one.world.replace_processes()
        return next_one

    # ---- what engines do ---------------------------------------------------------------------

    def engine(self) -> None:
        """The next line of the script."""
        step, *rest = self.script
        self.script = tuple(rest)
        p, d = self.world.p, self.world.d
        match step:
            case "receive":
                d.call(client.ReceiveRequest, self.prompt, room=ROOM, source=("p",))
            case "send":
                reply = p.call(client.SendRequest, self.prompt, room=ROOM, lease=self.source)
                self.send = reply.send if isinstance(reply, client.Sending) else 0
            case "send kept":
                fields = {"room": ROOM, "lease": self.source, "takers": 2}
                reply = p.call(client.SendRequest, self.prompt, **fields)
                self.send = reply.send if isinstance(reply, client.Sending) else 0
            case "hand over kept":
                fields = {"room": ROOM, "lease": self.source, "aux": b"aux", "ttl_s": 20.0}
                p.call(client.HandOver, self.prompt, ends_lease=True, **fields)
            case "advance":
                p.call(client.Advance, send=self.send, upto_tokens=2 * PAGE)
            case "finish":
                p.call(client.Finish, send=self.send, aux=b"aux")
            case "hand over":
                fields = {"room": ROOM, "lease": self.source, "aux": b"aux", "ends_lease": True}
                p.call(client.HandOver, self.prompt, **fields)
            case "make room":
                d.call(client.ReleaseLease, lease=self.filler)
            case "save head" | "save tail":
                self._begin_save(step)

    def _begin_save(self, step: str) -> None:
        p, (first, end) = self.world.p, SAVED[step]
        self.calls += 1
        pages = slice_pages(self.row, first, end)
        part = CopyPart("kv", first, end - first, pages_sum(pages))
        upto_tokens = min(end * PAGE, count(PROMPT))
        refusal = p.copy_said(CopyBegins(self.calls, self.source, True, (part,), upto_tokens))
        assert refusal is None, refusal
        for page in page_ids(pages):
            p.memory[page] = "half of it"
        self.saves = (*self.saves, Save(self.calls, step))

    def end_save(self, at: int, *, is_done: bool) -> None:
        """That one is over; where it has failed it is made again."""
        p, save = self.world.p, self.saves[at]
        self.saves = (*self.saves[:at], *self.saves[at + 1 :])
        if is_done:
            first, end = SAVED[save.step]
            p.write(self.row, PROMPT, start=first * PAGE, end=min(end * PAGE, count(PROMPT)))
        else:
            self.script = (save.step, *self.script)
        self.calls += 1
        refusal = p.copy_said(CopyEnds(self.calls, save.call, is_done))
        assert refusal is None, refusal

    def lose_worker(self) -> None:
        """The process that copies is dead, and another one makes what it did not."""
        self.script = (*[save.step for save in self.saves], *self.script)
        self.saves = ()
        self.world.p.feed(inputs.WorkerGone(self.world.now_s, 1, 1))

    def forget_engine(self, side: Side) -> None:
        """Its engine is gone: it does nothing any more."""
        mine = {"receive", "make room"} if side is self.world.d else SENDING
        if side is self.world.p:
            self.saves = ()
        self.script = tuple(one for one in self.script if one not in mine)

    # ---- the end -----------------------------------------------------------------------------

    def calm(self) -> None:
        """Nothing goes wrong any more: all ends, the prompt is there if it was promised."""
        world = self.world
        world.hold_wire = world.hold_posts = world.hold_quiet = world.hold_shells = False
        world.hold_verify = world.hold_network = False
        self._let_go()
        while self.script:
            self.engine()
            self._let_go()
        self._pass(CALM_S, TICK_S)
        if self.is_promised:
            self._check_promise()
        for side in world.sides.values():
            for session in list(side.node.sessions.by_id):
                side.hang_up(session)
        self._pass(GONE_S, 2 * TICK_S)
        for side in world.sides.values():
            check_nothing_is_left(side)

    def _let_go(self) -> None:
        """What was held goes on its way."""
        while self.saves:
            self.end_save(0, is_done=True)
        for side in self.world.sides.values():
            while side.asked:
                side.answer_verify()
            side.arrive_all()
            side.be_quiet()
        self.world.run()
        self.world.land_posts()

    def _pass(self, seconds: float, tick_s: float) -> None:
        for _ in range(round(seconds / tick_s)):
            self.world.pass_time(tick_s, tick_s)
            self._let_go()

    def _check_promise(self) -> None:
        d, p = self.world.d, self.world.p
        delivered = [one for one in d.answers if isinstance(one, client.Received)]
        assert len(delivered) == self.receives
        for received in delivered:
            assert d.holds(received.pages, self.prompt), "the prompt is not what was sent"
            assert received.aux == b"aux"
        (finished,) = [one for one in p.answers if isinstance(one, client.Finished)]
        assert finished.failure is None, finished.failure


def _stream(one: Stream) -> tuple[object, ...]:
    return one.name, [_flight(flight) for flight in one.left]


def _flight(one: Any) -> tuple[object, ...]:
    return one.post, one.grant, tuple(one.pairs), one.is_reported, one.sums


def check_nothing_is_left(side: Side) -> None:
    """No engine, no fault, and time has passed: every page is free or cached, and nobody waits."""
    node = side.node
    left = {
        "leases": list(node.leases.leases.values()),
        "receives": list(node.decoder.open.parts),
        "attempts": list(node.decoder.open.attempts),
        "rooms": [part.state.value for part in node.prefiller.rooms.by_room.values()],
        "settled": [part.outcome.value for part in node.prefiller.settled_sends.settled.values()],
        "posts": list(node.prefiller.posts.parts),
        "quiet": list(node.decoder.quarantines.leases),
        "queue": node.admission.queue,
    }
    stuck = {what: which for what, which in left.items() if which}
    assert not stuck, f"{side.name} keeps {stuck}"
    pool = node.leases.pool
    assert 1 + pool.free_pages + node.leases.tree.evictable_pages == pool.total_pages


# ---- choices -------------------------------------------------------------------------------------


def choices(case: Case, max_faults: int, max_ticks: int = 1) -> Iterator[Choice]:
    """Everything that can happen next."""
    yield from _moves(case, max_ticks)
    if case.faults < max_faults:
        yield from _faults(case)


def _moves(case: Case, max_ticks: int) -> Iterator[Choice]:
    if case.script and not (case.saves and case.script[0] == "finish"):
        yield Choice(f"engine: {case.script[0]}", Case.engine)
    for at, save in enumerate(case.saves):
        yield Choice(f"{save.step} is over", lambda one, at=at: one.end_save(at, is_done=True))
    for name in case.world.sides:
        if _towards(case, name):
            yield Choice(f"deliver to {name}", lambda one, name=name: _deliver(one, name, 0))
    yield from _reports(case)
    if case.ticks < max_ticks:
        yield Choice("tick", _tick)


def _reports(case: Case) -> Iterator[Choice]:
    """What the transfer processes can say or do next."""
    for name, side in case.world.sides.items():
        if side.inbox:
            yield Choice(f"report of {name}", _on(name, lambda one: one.report_next()))
        if side.flights:
            yield Choice(f"page of {name} lands", _on(name, _land))
        if side.late:
            yield Choice(f"late page lands at {name}", _on(name, lambda one: one.land_late()))
        if side.inflow.gone:
            yield Choice(f"a dead connection to {name} ends", _on(name, _end_connection))
        if not all(one.ends for one in side.inflow.questions):
            yield Choice(f"{name} is quiet", _on(name, lambda one: one.be_quiet()))
        if side.asked:
            yield Choice(f"{name} has verified", _on(name, lambda one: one.answer_verify()))


def _faults(case: Case) -> Iterator[Choice]:
    yield from _faults_of_the_wire(case)
    yield from _faults_of_saves(case)
    yield Choice("a long silence", _silence, is_fault=True)
    for name, side in case.world.sides.items():
        yield Choice(f"transfer process of {name} killed", _on(name, _kill), is_fault=True)
        yield Choice(f"{name} restarts", lambda one, name=name: _restart(one, name), is_fault=True)
        if side.node.sessions.by_id:
            yield Choice(
                f"engine of {name} dies", lambda one, name=name: _die(one, name), is_fault=True
            )
        if side.flights:
            yield Choice(f"post of {name} fails", _on(name, _fail), is_fault=True)
    d, p = case.world.d.node, case.world.p.node
    if any(one.ended is None for one in d.decoder.open.attempts.values()):
        yield Choice("receive cancelled", _cancel, is_fault=True)
        yield Choice("deadline at d", _deadline_d, is_fault=True)
    if p.prefiller.by_send:
        yield Choice("send aborted", _abort, is_fault=True)
        yield Choice("deadline at p", _deadline_p, is_fault=True)


def _faults_of_the_wire(case: Case) -> Iterator[Choice]:
    for name in case.world.sides:
        n_letters = len(_towards(case, name))
        for at, what in ((0, "next"), (n_letters - 1, "last")):
            if n_letters > at >= 0 and (not at or what == "last"):
                lost = Choice(
                    f"{what} message to {name} lost",
                    lambda one, name=name, at=at: _lose(one, name, at),
                    is_fault=True,
                    keeps_promise=True,
                )
                if not (at == 0 and what == "last"):
                    yield lost
        if n_letters:
            yield Choice(
                f"message to {name} duplicated",
                lambda one, name=name: _duplicate(one, name),
                is_fault=True,
                keeps_promise=True,
            )
        if n_letters > 1:
            yield Choice(
                f"last message to {name} overtakes",
                lambda one, name=name: _deliver(one, name, -1),
                is_fault=True,
                keeps_promise=True,
            )


def _faults_of_saves(case: Case) -> Iterator[Choice]:
    for at, save in enumerate(case.saves):
        yield Choice(
            f"{save.step} fails",
            lambda one, at=at: one.end_save(at, is_done=False),
            is_fault=True,
            keeps_promise=True,
        )
    if case.saves:
        yield Choice("who saves dies", Case.lose_worker, is_fault=True, keeps_promise=True)


def _towards(case: Case, name: str) -> list[Letter]:
    return [one for one in case.world.wire if one.to.name == name]


def _on(name: str, does: Callable[[Side], object]) -> Callable[[Case], None]:
    def do(case: Case) -> None:
        does(case.world.sides[name])

    return do


def _deliver(case: Case, name: str, at: int) -> None:
    letter = _towards(case, name)[at]
    _remove(case, letter)
    case.world.deliver(letter)


def _lose(case: Case, name: str, at: int) -> None:
    _remove(case, _towards(case, name)[at])


def _duplicate(case: Case, name: str) -> None:
    case.world.deliver(_towards(case, name)[0])


def _remove(case: Case, letter: Letter) -> None:
    wire = case.world.wire
    del wire[next(at for at, one in enumerate(wire) if one is letter)]


def _silence(case: Case) -> None:
    """Nothing that is said arrives for so long that who came to a node is forgotten there."""
    world = case.world
    world.wire.clear()
    world.cut = set(world.sides)
    world.pass_time(SILENCE_S, TICK_S)
    world.cut = set()


def _end_connection(side: Side) -> None:
    """The oldest whose sender is over: what it had sent is in our sockets now, and its end."""
    side.arrive(side.inflow.gone[0])


def _land(side: Side) -> None:
    side.land(next(iter(side.flights.values())), 1)


def _fail(side: Side) -> None:
    flight = next(iter(side.flights.values()))
    side.fail(flight, "failed")


def _kill(side: Side) -> None:
    side.stop_transfer("killed")
    side.start_transfer("again")


def _restart(case: Case, name: str) -> None:
    side = case.world.sides[name]
    case.forget_engine(side)
    case.world.restart(side)


def _die(case: Case, name: str) -> None:
    side = case.world.sides[name]
    case.forget_engine(side)
    side.hang_up(max(side.node.sessions.by_id))


def _cancel(case: Case) -> None:
    d = case.world.d
    attempt = next(one for one in d.node.decoder.open.attempts.values() if one.ended is None)
    refusing = client.CancelReceive
    if attempt.waiter is None:
        d.call(refusing, receive=attempt.id)
    else:
        d.call(client.CancelCall, of=attempt.waiter.claim.call)


def _abort(case: Case) -> None:
    case.script = tuple(one for one in case.script if one not in {"advance", "finish"})
    send = next(iter(case.world.p.node.prefiller.by_send))
    case.world.p.call(client.AbortSend, send=send, reason="tired")


def _deadline_d(case: Case) -> None:
    """As if it had been asked for a shorter time."""
    d = case.world.d
    # One that stood in the queue is refused as it is asked anew, and is gone.
    for attempt in list(d.node.decoder.open.attempts.values()):
        attempt.deadline_s = case.world.now_s
        if attempt.waiter is not None:
            d.node.admission.withdraw(attempt.waiter)
            attempt.waiter.deadline_s = case.world.now_s
            d.node.admission.submit(attempt.waiter)
    d.feed(inputs.Tick(case.world.now_s))


def _deadline_p(case: Case) -> None:
    p = case.world.p
    for part in p.node.prefiller.by_send.values():
        part.deadline_s = case.world.now_s
    case.script = tuple(one for one in case.script if one not in {"advance", "finish"})
    p.feed(inputs.Tick(case.world.now_s))


def _tick(case: Case) -> None:
    case.ticks += 1
    world = case.world
    world.now_s = round(world.now_s + TICK_S, 6)
    for side in world.sides.values():
        side.feed(inputs.Tick(world.now_s))


# ---- where it begins -----------------------------------------------------------------------------


def start(name: str) -> Case:
    """A handoff in this state of its decode side, with everything after that still to come."""
    case = Case(integrity=Integrity.FULL) if name == "verifying" else Case()
    world = case.world
    p, d = world.p, world.d
    leased = p.lease(PROMPT)
    case.source, case.row = leased.lease, leased.pages
    if name != "saving":
        p.write(leased.pages, PROMPT)
    if name == "queued":
        case.filler = d.lease(tokens((9000, 8 * PAGE)), cache=False).lease
    case.script = ("receive", "send", "advance", "finish")
    if name == "saving":
        case.script = ("receive", "send", "save head", "save tail", "finish")
    if name in {"hit", "computed"}:
        case.script = ("hand over", "receive")
    if name in KEPT:
        case.script, case.receives = KEPT[name], 2
    if name == "hit":
        _cache(d, HIT)
        case.prompt = HIT
    case.hold()
    if name == "queued":
        case.engine()
        case.script = ("make room", *case.script)
        return case
    for step in BEFORE[name]:
        case = case.after(next(one for one in choices(case, 9, 9) if one.name == step))
    case.path, case.faults, case.ticks = (), 0, 0
    case.is_promised = name not in {"draining", "forgotten"}
    return case


def _cache(side: Side, prompt: Tokens) -> None:
    """An engine of this side has computed it before."""
    leased = side.lease(prompt)
    side.write(leased.pages, prompt)
    side.call(client.CommitAndRelease, lease=leased.lease)


OPENED = ("engine: receive", "engine: send", "deliver to p", "deliver to d")
WRITTEN = ("engine: advance", "page of p lands")
SENT = ("engine: advance", "engine: finish", *("page of p lands",) * 3, *("report of p",) * 2)
KEPT = {
    "kept": ("hand over kept", "receive", "receive"),
    "kept streaming": ("receive", "send kept", "advance", "receive", "finish"),
}
"""A room for several receives, and what its engines do."""

BEFORE = {
    "offered": ("engine: receive",),
    "hit": ("engine: hand over", "engine: receive"),
    "computed": (),
    "streaming": (*OPENED, "engine: advance"),
    "saving": (*OPENED, "engine: save head", "engine: save tail"),
    "flushing": (*OPENED, *WRITTEN, "engine: finish"),
    "draining": (*OPENED, *WRITTEN, "receive cancelled"),
    # What its dead process had sent has not arrived, and d asks how it ended.
    "forgotten": (
        *(*OPENED, *WRITTEN, "transfer process of p killed", "a long silence", "tick"),
        # They greet each other anew, the Abort comes again, and its answer is the next that comes.
        *("deliver to p", "deliver to p", "tick", "tick", "deliver to p", "deliver to p"),
        *("deliver to d",) * 5,
    ),
    "settled": (*OPENED, *SENT, *("deliver to d",) * 2),
    "verifying": (*OPENED, *SENT, *("deliver to d",) * 3),
    "kept": ("engine: hand over kept", "engine: receive", "deliver to p"),
    "kept streaming": (
        *("engine: receive", "engine: send kept", "deliver to p", "deliver to d"),
        *("engine: advance", "engine: receive"),
    ),
}
STARTS = ("queued", *BEFORE)
