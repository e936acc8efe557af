"""The protocol of engines' own copies: every order of its steps, on the real core.

An engine is two processes: one that has the lease, and a worker that copies. Words between the
worker and the daemon travel in order; a byte may move from the answer to an order until its end is
said; the worker may lose its connection, die, and be proven dead at any step, and the daemon may be
started again at any step, knowing only which pages its leases had. Another engine takes what it
can get at any moment.

What must hold after each step: no page under a copy that may still move is free, cached under a
save, or another lease's; nothing is written, or found by another engine, of which no copy has been
reported; the lease ends behind its last copy, and then it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd.core import inputs
from kvd.core.audit.invariants import violations
from kvd.core.effects import AnswerEngine, AnswerWorker
from kvd.core.node import NodeState
from kvd.types import NO_TOKENS, Pages, Tokens, page_ids, slice_pages
from kvd.wire import client
from kvd.wire.attach import CopyBegins, CopyEnds, CopyPart, CopyWaits, KeepsBlocks, pages_sum
from tests.core.world import PAGE, settings, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOW_S = 500.0
ENGINE, OTHER, WORKER = 1, 2, 7
POOL = 4
"""Pages: two of the lease, two that another engine may have."""

PROMPT = tokens((1, 2 * PAGE))

ORDERS = {"save 0": (0, 1), "save 1": (1, 2), "load 0": (0, 1)}
"""Pages of the row."""

LATE = "save 1"
"""Its mark is late, and the daemon is told."""


class Plain(NamedTuple):
    """All that is not the node's: of the worker, of the wire, and what is remembered."""

    orders: tuple[str, ...] = ("new",) * len(ORDERS)
    words: tuple[CopyWaits | CopyBegins | CopyEnds, ...] = ()
    """To the daemon, in order."""
    heard: tuple[tuple[int, bool], ...] = ()
    """To the worker: which call, and whether it may."""
    counted: frozenset[int] = frozenset()
    """Pages of the row of which the daemon has been told that they are saved."""
    is_alive: bool = True
    is_connected: bool = True
    is_gone: bool = False
    """The daemon has proof of its death."""
    has_lease: bool = True
    is_back: bool = True
    """The process that has the lease is attached to this life of the daemon."""
    life: int = 0
    is_late: bool = False
    """The daemon was told of a mark."""


class Moment:
    """A node, and what is beside it."""

    def __init__(self, node: NodeState, plain: Plain, lease: int, row: Pages) -> None:
        self.node, self.plain, self.lease, self.row = node, plain, lease, row

    def digest(self) -> object:
        """Equal where everything goes on equally, as far as leases, pages and copies go."""
        node, table = self.node, self.node.leases
        leases = [
            (lease.id, tuple(sorted(lease.holders)), lease.written_tokens, lease.said, lease.held)
            for lease in table.leases.values()
        ]
        copying = [
            (tuple(sorted(lease.copying.ahead.items())), lease.reads, lease.copying.has_saved)
            for lease in table.leases.values()
            if lease.copying is not None
        ]
        cached = [(edge.pages, edge.lock_ref) for edge in table.tree.nodes()]
        copies = [(copy.worker, copy.call) for copy in node.engine_copies]
        late = [wait.call for wait in node.engine_copies.marks]
        free = frozenset(page_ids(table.pool.free_ids()))
        return repr((leases, copying, cached, copies, late, self.plain)), free, self.row

    # ---- what the node is told -----------------------------------------------------------------

    def feed(self, got: inputs.Input) -> list[object]:
        return list(self.node.step(got).effects)

    def call(self, session: int, request: client.Request, toks: bytes = b"") -> client.Reply:
        effects = self.feed(inputs.FromClient(NOW_S, session, request, Tokens(toks)))
        return next(
            one.message
            for one in effects
            if isinstance(one, AnswerEngine) and one.session == session
        )

    def now(self, **fields: object) -> None:
        self.plain = self.plain._replace(**fields)  # type: ignore[arg-type]

    def becomes(self, order: int, state: str) -> None:
        orders = list(self.plain.orders)
        orders[order] = state
        self.now(orders=tuple(orders))

    def word(self, message: CopyWaits | CopyBegins | CopyEnds) -> None:
        self.now(words=(*self.plain.words, message))

    # ---- what must hold --------------------------------------------------------------------------

    def pages(self, order: int) -> set[int]:
        first, end = list(ORDERS.values())[order]
        return set(page_ids(slice_pages(self.row, first, end)))

    def check(self) -> None:
        node, plain = self.node, self.plain
        found = violations(node)
        assert not found, found
        leases = node.leases.leases
        free = set(page_ids(node.leases.pool.free_ids()))
        cached = {page for edge in node.leases.tree.nodes() for page in page_ids(edge.pages)}
        for order, (name, state) in enumerate(zip(ORDERS, plain.orders, strict=True)):
            if state != "moving" or not plain.is_alive:
                continue
            pages = self.pages(order)
            assert not pages & free, f"{name} moves, and its pages are free"
            if name.startswith("save"):
                assert not pages & cached, f"{name} moves, and its pages are cached"
            for other in leases.values():
                held = set(page_ids(other.held))
                assert other.id == self.lease or not pages & held, f"{name} moves pages of {other}"
        lease = leases.get(self.lease)
        known = min({0, 1, 2} - plain.counted) * PAGE
        if lease is not None:
            assert lease.written_tokens <= known, "what no copy has reported is written"
        assert node.leases.tree.probe(PROMPT, "") <= known, "what nobody has saved is found"
        self._check_end()

    def _check_end(self) -> None:
        """The lease is there while it is copied, and when it is let go of no longer than that."""
        plain, is_there = self.plain, self.lease in self.node.leases.leases
        moves = plain.is_alive and "moving" in plain.orders
        if moves:
            assert is_there or plain.life, "its lease has ended under a copy"
        is_quiet = not plain.words and not plain.heard and plain.is_back and not plain.has_lease
        may_copy = not plain.is_gone and (moves or not plain.is_connected)
        if is_quiet and not may_copy and "ending" not in plain.orders:
            assert not is_there, "nobody has the lease, nothing copies it, and it is kept"


def began() -> Moment:
    """A lease of two pages, and a worker that may copy."""
    node = NodeState(settings("d", POOL + 1, is_journaled=True), NOW_S)
    made = Moment(node, Plain(), 0, Pages(b""))
    made.feed(inputs.TransferReady(NOW_S, 1, b"meta", "simulated", "start"))
    for session in (ENGINE, OTHER):
        made.feed(inputs.ClientJoined(NOW_S, session, f"engine-{session}", 1000 + session))
    told(made, KeepsBlocks(1))
    leased = made.call(ENGINE, client.OpenLease(call=2), PROMPT)
    assert isinstance(leased, client.Leased), leased
    made.lease, made.row = leased.lease, leased.pages
    return made


def after_restart(name: str) -> Moment:
    """The daemon was started again in the middle of that copy, and the engine is not back yet."""
    made = began()
    _ask(made, list(ORDERS).index(name))
    for go_on in (_deliver, _hear, _restart):
        go_on(made)
    return made


def told(moment: Moment, message: KeepsBlocks | CopyWaits | CopyBegins | CopyEnds) -> bool:
    """The daemon hears a word; whether it has nothing against it."""
    effects = moment.feed(inputs.WorkerCopies(NOW_S, ENGINE, WORKER, message))
    answer = next(one for one in effects if isinstance(one, AnswerWorker))
    return answer.refusal is None


# ---- what can happen ---------------------------------------------------------------------------


class Step(NamedTuple):
    """Something that can happen next."""

    name: str
    do: Callable[[Moment], None]


def steps(moment: Moment) -> Iterator[Step]:
    """All that can happen now."""
    plain = moment.plain
    if plain.is_alive:
        yield from _of_the_worker(moment)
        yield Step("the worker dies", _worker_dies)
        if plain.is_connected:
            yield Step("its connection is lost", lambda one: one.now(is_connected=False, words=()))
    elif not plain.is_gone:
        yield Step("it is proven dead", _proven_dead)
    if plain.words and plain.is_connected:
        yield Step("the daemon hears", _deliver)
    if plain.is_back and plain.has_lease:
        yield Step("the engine lets go", _release)
        if plain.life == 0:
            yield Step("the engine commits", _commit)
    if plain.life == 0:
        yield Step("the daemon is started again", _restart)
    if not plain.is_back:
        yield Step("the engine comes back", _come_back)
    if moment.node.leases.pool.free_pages:
        yield Step("another engine takes what there is", _take)


def _of_the_worker(moment: Moment) -> Iterator[Step]:
    plain = moment.plain
    for order, (name, state) in enumerate(zip(ORDERS, plain.orders, strict=True)):
        if state == "new" and plain.is_connected and plain.life == 0:
            if name == LATE and not plain.is_late:
                yield Step(f"{name}: its mark is late", _mark_is_late)
            yield Step(f"{name}: asked", lambda one, order=order: _ask(one, order))
        elif state == "moving":
            for is_done in (True, False):
                end = "done" if is_done else "failed"
                yield Step(
                    f"{name}: {end}",
                    lambda one, order=order, is_done=is_done: _end(one, order, is_done=is_done),
                )
    if plain.heard:
        yield Step("the worker hears", _hear)
    if plain.life and not plain.is_connected and plain.is_back and "moving" not in plain.orders:
        yield Step("the worker comes back", _worker_back)


def _call_of(order: int, *, ends: bool = False) -> int:
    return 100 + order + 10 * ends


def _mark_is_late(moment: Moment) -> None:
    order = list(ORDERS).index(LATE)
    moment.word(CopyWaits(_call_of(order) + 50, moment.lease, True, 1))
    moment.now(is_late=True)


def _ask(moment: Moment, order: int) -> None:
    name = list(ORDERS)[order]
    first, end = ORDERS[name]
    named = slice_pages(moment.row, first, end)
    part = CopyPart("kv", first, end - first, pages_sum(named))
    is_save = name.startswith("save")
    call = _call_of(order)
    moment.word(
        CopyBegins(call, moment.lease, is_save, (part,), end * PAGE * is_save, waited=call + 50)
    )
    moment.becomes(order, "asked")


def _deliver(moment: Moment) -> None:
    word, *rest = moment.plain.words
    moment.now(words=tuple(rest))
    if isinstance(word, CopyEnds):
        order = word.copy - _call_of(0)
        name = list(ORDERS)[order]
        # Before: from this step on it may be written.
        if word.is_done and name.startswith("save"):
            moment.now(counted=moment.plain.counted | {ORDERS[name][0]})
        told(moment, word)
        moment.becomes(order, "over")
        return
    may = told(moment, word)
    if isinstance(word, CopyBegins):
        moment.now(heard=(*moment.plain.heard, (word.call, may)))


def _hear(moment: Moment) -> None:
    (call, may), *rest = moment.plain.heard
    moment.now(heard=tuple(rest))
    moment.becomes(call - _call_of(0), "moving" if may else "over")


def _end(moment: Moment, order: int, *, is_done: bool) -> None:
    if not moment.plain.is_connected:
        moment.becomes(order, "over")  # nobody hears of it
        return
    moment.word(CopyEnds(_call_of(order, ends=True), _call_of(order), is_done))
    moment.becomes(order, "ending")


def _worker_dies(moment: Moment) -> None:
    """What it has said is read before its hang-up; what it had not heard it never will."""
    while moment.plain.words and moment.plain.is_connected:
        _deliver(moment)
    moment.now(is_alive=False, is_connected=False, heard=())


def _proven_dead(moment: Moment) -> None:
    plain = moment.plain
    moment.now(is_gone=True, orders=tuple("over" for _ in ORDERS))
    if plain.life == 0:
        moment.feed(inputs.WorkerGone(NOW_S, ENGINE, WORKER))
    elif plain.is_back:
        moment.feed(inputs.SessionWhole(NOW_S, ENGINE))


def _worker_back(moment: Moment) -> None:
    moment.now(is_connected=True, heard=(), orders=tuple("over" for _ in ORDERS))
    moment.feed(inputs.SessionWhole(NOW_S, ENGINE))


def _release(moment: Moment) -> None:
    answer = moment.call(ENGINE, client.ReleaseLease(call=3, lease=moment.lease))
    assert isinstance(answer, client.Done), answer
    moment.now(has_lease=False)


def _commit(moment: Moment) -> None:
    """Of all that it knows: only what is saved may count."""
    moment.call(ENGINE, client.CommitLease(call=4, lease=moment.lease))
    lease = moment.node.leases.leases[moment.lease]
    moment.row = lease.page_table


def _take(moment: Moment) -> None:
    n_pages = moment.node.leases.pool.free_pages
    toks = tokens((7000, n_pages * PAGE))
    moment.call(OTHER, client.OpenLease(call=5, deadline_s=0.0), toks)


def _restart(moment: Moment) -> None:
    """The next daemon knows which pages each lease had, and proves nothing of what is cached."""
    old, plain = moment.node, moment.plain
    former = tuple(
        inputs.FormerLease(lease.id, "", NO_TOKENS, lease.held)
        for lease in old.leases.leases.values()
        if lease.session == ENGINE
    )
    cached = b"".join(edge.pages for edge in old.leases.tree.nodes())
    engine = inputs.FormerSession(ENGINE, "engine-1", (1001, 1007), former, keeps_blocks=True)
    moment.node = NodeState(settings("d", POOL + 1, is_journaled=True), NOW_S)
    moment.feed(inputs.PoolAdopted(NOW_S, 1, (), (engine,), Pages(cached), 40))
    moment.feed(inputs.TransferReady(NOW_S, 2, b"meta", "simulated", "start"))
    moment.feed(inputs.ClientJoined(NOW_S, OTHER, "engine-2", 1002))
    orders = tuple("moving" if state == "moving" else "over" for state in plain.orders)
    moment.now(
        orders=orders, words=(), heard=(), is_connected=False, is_back=False, life=1,
        counted=frozenset(),
    )  # fmt: skip


def _come_back(moment: Moment) -> None:
    plain = moment.plain
    mine = [moment.lease] if plain.has_lease else []
    leases = tuple(one for one in mine if one in moment.node.leases.leases)
    # One that has not returned, and is not proven dead, is awaited.
    moment.feed(
        inputs.ClientCameBack(
            NOW_S, ENGINE, 1001, leases, is_whole=plain.is_gone, keeps_blocks=True
        )
    )
    moment.now(is_back=True, has_lease=bool(leases))


# ---- all of it -----------------------------------------------------------------------------------


class Explored(NamedTuple):
    """What was looked at."""

    n_steps: int
    n_states: int


class CopiesViolated(AssertionError):
    """Something does not hold; the message has the way there."""


def explore(depth: int, make: Callable[[], Moment] = began) -> Explored:
    """All sequences of so many steps, each state once.

    Raises:
        CopiesViolated: with the sequence.
    """
    start = make()
    here: list[tuple[Step, ...]] = [()]
    seen = {start.digest()}
    n_steps = 0
    for _ in range(depth):
        there: list[tuple[Step, ...]] = []
        for path in here:
            for step in steps(_gone(make, path)):
                n_steps += 1
                way = (*path, step)
                moment = _gone(make, path)
                try:
                    step.do(moment)
                    moment.check()
                except AssertionError as error:
                    names = " -> ".join([one.name for one in way])
                    raise CopiesViolated(f"{names}: {error}") from error
                digest = moment.digest()
                if digest not in seen:
                    seen.add(digest)
                    there.append(way)
        here = there
    return Explored(n_steps, len(seen))


def _gone(make: Callable[[], Moment], path: tuple[Step, ...]) -> Moment:
    """Where that way leads: sooner gone again than a node is copied."""
    moment = make()
    for step in path:
        step.do(moment)
    return moment
