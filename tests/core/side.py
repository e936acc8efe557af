"""One real node with a simulated transfer process, its engines' inbox, and what its pages hold.

A post copies page contents between two dictionaries, all at once or page by page; so does a copy to
the saved area of the same node and back. Checked after
every step: I1 to I8, that no request is answered twice, and where the pool outlives its process
that all of it was noted. Checked at every page that lands: it is
a page that the receiving node keeps for exactly this handoff. This is the safety of the whole
protocol: no page changes hands while a remote write to it may still land.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash
from typing_extensions import override

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.layout.seal import SUM_BYTES, Seal, chosen, page_sum
from kvd.core.layout.spec import (
    Component,
    Mha,
    PageOrder,
    PoolSpec,
    page_bytes,
)
from kvd.core.node import NodeState
from kvd.core.settings import Settings
from kvd.sim.node_shell import (
    InboundQuestion,
    InboundStreams,
    NodeShell,
    Stream,
    incarnation,
)
from kvd.sim.router import SimRouter
from kvd.types import (
    ID_BYTES,
    NO_PAGES,
    NO_TOKENS,
    NodeName,
    Pages,
    Tokens,
    count,
    pack_ids,
    page_ids,
)
from kvd.wire import admin, client
from kvd.wire.peer import Message, Offer
from kvd.wire.pins import PrefixPinned
from tests.core.noted import Noted

if TYPE_CHECKING:
    from kvd.errors import Refusal
    from kvd.wire.attach import CopyBegins, CopyEnds, CopyWaits, KeepsBlocks
    from kvd.wire.events import Event
    from tests.core.world import World

PAGE = 16
SAVED = 12
"""Pages of the saved area, its null page not counted."""

ANSWERS = (
    PrefixPinned,
    client.Failed | client.Leased | client.PageTable | client.Done | client.Receiving
    | client.Sending | client.Finished | client.MatchReply | client.Snapshotted | client.Retracted
    | client.Resumed | client.FetchReply | client.FlushReport | client.RoomKept | PrefixPinned
)  # fmt: skip
"""Replies that answer a call; the others are pushes."""


def tokens(*ranges: tuple[int, int]) -> Tokens:
    """Tokens of each (first, count) range, one after the other."""
    ids = [first + k for first, n in ranges for k in range(n)]
    return Tokens(pack_ids(ids))


def spec(pages: int, page_size: int = PAGE, dtype: str = "float32") -> PoolSpec:
    component = Component("kv", 1, Mha(1, 1, 1, dtype), page_size)
    return PoolSpec("main", "mha", PageOrder.PAGE_FIRST, (component,), (pages,), (SAVED + 1,))


def settings(name: str, pages: int, **more: object) -> Settings:
    made = Settings(NodeName(name), incarnation(name, 1), spec(pages))
    return msgspec.structs.replace(made, **more)


def content(toks: Tokens, namespace: str, upto_tokens: int) -> str:
    """What an engine writes to the page that ends at ``upto_tokens`` of this sequence."""
    digest = xxhash.xxh32_hexdigest(namespace.encode() + toks[: upto_tokens * ID_BYTES])
    return f"{upto_tokens}:{digest}"


class Grant(NamedTuple):
    """Whose pages an Offer named: of which process, for which handoff, under which lease."""

    incarnation: str
    generation: int
    handoff: int
    lease: int


class Flight:
    """Pages on their way from one pool into another."""

    def __init__(self, post: effects.Post, grant: Grant) -> None:
        self.post = post
        self.grant = grant
        self.pairs = deque(zip(page_ids(post.source), page_ids(post.destination), strict=True))
        self.pages = len(self.pairs)
        self.sums = b""
        self.is_reported = False
        """Its end, good or bad, is told once."""


def sum_of(seal: Seal, logical: int, what: str) -> bytes:
    """Of one page that holds ``what``, if it is to be summed."""
    if not chosen(seal, logical, logical + 1).size:
        return b""
    return page_sum(seal, logical, [what.encode()]).to_bytes(8, "little")


class Letter(NamedTuple):
    """A message on the wire."""

    sender: Side
    to: Side
    link: str
    message: Message


class Inflow(InboundStreams):
    """The connections into a side. What was left in one arrives at once, or when a test says so."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side
        self.gone: list[Stream] = []
        """Connections whose senders send no more, and of which the end has not come."""

    @override
    def end(self, stream: Stream) -> None:
        super().end(stream)
        if stream in self.gone:
            self.gone.remove(stream)

    @override
    def waits_for(self, question: InboundQuestion) -> None:
        if question.ends:
            ends = tuple(sorted(question.ends))
            self.side.inbox.append(inputs.Awaiting(0.0, (question.lease,), ends))

    @override
    def over(self, stream: Stream) -> None:
        if self.streams.get(stream.name) is stream:
            self.gone.append(stream)
            if not self.side.world.hold_network:
                self.side.arrive(stream)

    def answered(self) -> list[int]:
        """The leases for which nothing is on its way any more."""
        found = [one.lease for one in self.questions if not one.ends]
        self.questions = [one for one in self.questions if one.ends]
        return found


class Side(NodeShell):
    """One node with its transfer process, its engines' inboxes, and what its pages hold."""

    def __init__(self, world: World, config: Settings) -> None:
        self.world = world
        self.name = config.name
        self.config = config
        self.dials: list[Side] = []
        self.life = 1
        self.calls = 0
        self.connection = ""
        """Of this side's dialed link, as those see it who accept it."""
        self.disk: dict[str, int] | None = None
        """The epochs that outlive a process; None: no process has kept any."""
        self.flushes: tuple[effects.KeptFlush, ...] = ()
        self.kept_at_s = 0.0
        """Beside these epochs, what was flushed when that was written."""
        self.disk_fails = ""
        """Why nothing can be written there; empty: it can."""
        self.hold_disk = False
        self.memory: dict[int, str] = {}
        self.landed: set[tuple[Grant, int, int]] = set()
        """By whom pages of ours were written, where shards are told apart."""
        self.beside: dict[str, dict[int, str]] = {}
        """What the pages of the other components hold."""
        self.begin()

    def begin(self) -> None:
        """A new process: nothing is known, nothing is held."""
        self.born_s = self.world.now_s
        self.node = NodeState(self.config, self.born_s)
        self.sessions = 0
        self.log: list[inputs.Input] = []
        self.effects: list[effects.Effect] = []
        self.inbox: deque[inputs.Input] = deque()
        self.answers: list[client.Reply] = []
        self.answered: set[int] = set()
        self.told_workers: list[effects.AnswerWorker] = []
        self.reports: list[admin.AdminReply] = []
        self.events: list[Event] = []
        self.memory.clear()
        self.beside.clear()
        self.landed.clear()
        component = self.config.spec.components[0]
        self.noted = Noted(component.page_size, component.name)
        self.flights: dict[int, Flight] = {}
        self.waiting: dict[int, effects.Post] = {}
        """Posts whose event has not come."""
        self.come: set[bytes] = set()
        """Events that have."""
        """Posts of ours that are under way."""
        self.late: list[Flight] = []
        """Pages in our own socket buffers, whose sender is over."""
        self.inflow = Inflow(self)
        """The connections into our transfer process."""
        self.agents: dict[tuple[str, int], Stream] = {}
        """The connections of our sending agents."""
        self.copies: deque[effects.Copy] = deque()
        """To the saved area and back, under way."""
        self.asked: list[effects.Verify] = []
        self.ahead: dict[int, list[bytes]] = {}
        """By ticket, the sums of what had landed before its Verify."""
        self.said: dict[int, bytes] = {}
        """By ticket, what the writer had said of them before that."""
        """What our transfer process has to verify."""
        self.fails_loading = 0
        """So many agents will fail to load."""
        self.grants: dict[int, Grant] = {}
        self.generation = 0
        self.unkept: list[effects.KeepEpochs] = []
        self.router = SimRouter(self.name)
        """Who hears its KV events, where it has any."""
        if self.disk is not None:
            flushes = [
                msgspec.structs.replace(flush, ago_s=flush.ago_s + self.born_s - self.kept_at_s)
                for flush in self.flushes
            ]
            self.feed(inputs.EpochsFound(self.born_s, dict(self.disk), flushes=tuple(flushes)))

    @property
    def incarnation(self) -> str:
        return self.node.settings.incarnation

    # ---- the node ----------------------------------------------------------------------------

    def feed(self, happened: inputs.Input) -> list[effects.Effect]:
        """One input; its effects are carried out, and returned for the curious."""
        self.log.append(happened)
        step = self.node.step(happened)
        for event in step.events:
            assert event.seq == len(self.events) + 1, "I8"
            self.events.append(event)
        problems = violations(self.node)
        assert not problems, (happened, problems)
        self.effects += step.effects
        self.world.happened(self, happened, step)
        for effect in step.effects:
            if self.config.is_journaled:
                self.noted.perform(effect)
            self.perform(effect)
        if self.config.is_journaled:
            self.noted.agree(self.node)
        if self.node.announcer is not None:
            self.router.agree(self.node)
        return step.effects

    @override
    def perform_other(self, effect: effects.Effect) -> None:
        """What is noted is looked at in ``feed``; nobody here audits, or waits for a stop."""
        if isinstance(effect, effects.AnswerWorker):
            assert effect.call not in self.answered, f"answered twice: {effect}"
            self.answered.add(effect.call)
            self.told_workers.append(effect)
        elif isinstance(effect, effects.BlockEvent):
            self.router.hear(effect)

    @override
    def keep_epochs(self, effect: effects.KeepEpochs) -> None:
        if self.hold_disk:
            self.unkept.append(effect)
            return
        if not self.disk_fails:
            self.disk = dict(effect.by_base)
            self.flushes, self.kept_at_s = effect.flushes, self.world.now_s
        self.inbox.append(inputs.EpochsKept(0.0, effect.ticket, self.disk_fails))

    def let_disk_go(self) -> None:
        self.hold_disk = False
        unkept, self.unkept = self.unkept, []
        for effect in unkept:
            self.keep_epochs(effect)
        self.world.run()

    @override
    def tell_operator(self, effect: effects.AnswerOperator) -> None:
        self.reports.append(effect.message)

    @override
    def tell_engine(self, answer: effects.AnswerEngine) -> None:
        """A session that has gone hears nothing."""
        if answer.session not in self.node.sessions.by_id:
            return
        message = answer.message
        call = message.call if isinstance(message, ANSWERS) else None
        if call is not None:
            assert call not in self.answered, f"answered twice: {message}"
            self.answered.add(call)
        self.answers.append(message)

    @override
    def send_message(self, effect: effects.SendToPeer) -> None:
        message = effect.message
        if isinstance(message, Offer):
            self.grants[message.handoff] = Grant(
                self.incarnation, message.generation, message.handoff, self.lease_of(message).id
            )
        kind, _, name = effect.link.partition(":")
        there = self.world.sides[name]
        if kind == "out":
            back = f"in{self.connection}:{self.name}"
        elif kind == f"in{there.connection}":
            back = f"out:{self.name}"
        else:
            return  # the connection is over, and its identity with it
        self.world.post_letter(Letter(self, there, back, message))

    # ---- engines and operators ---------------------------------------------------------------

    def attach(self, name: str = "engine") -> int:
        self.sessions += 1
        self.feed(inputs.ClientJoined(self.world.now_s, self.sessions, name, 1000 + self.sessions))
        return self.sessions

    def hang_up(self, session: int = 1) -> None:
        """The last process of the session is dead."""
        self.feed(inputs.ClientHungUp(self.world.now_s, session))
        self.world.run()

    def call(
        self,
        kind: type[client.Request],
        toks: Tokens = NO_TOKENS,
        *,
        session: int = 1,
        **fields: object,
    ) -> client.Reply | None:
        """Make one request and deliver what follows from it; the answer, if it has come."""
        self.calls += 1
        call = self.calls
        message = kind(call=call, **fields)  # type: ignore[call-arg]
        self.feed(inputs.FromClient(self.world.now_s, session, message, toks))
        self.world.run()
        return self.answer(call)

    def word(
        self,
        lease: int,
        upto: int,
        rank: int,
        ranks: int,
        *,
        after: bytes = b"",
        session: int = 1,
        worker: int = 1,
    ) -> Refusal | None:
        """A process of a session says how far its rank is; why that does not count, if so."""
        self.calls += 1
        message = client.SayWritten(self.calls, lease, upto, rank, ranks, after)
        self.feed(inputs.FromWorker(self.world.now_s, session, worker, message))
        self.world.run()
        told = self.told_workers[-1]
        assert (told.worker, told.call) == (worker, message.call), told
        return told.refusal

    def copy_said(
        self,
        message: KeepsBlocks | CopyWaits | CopyBegins | CopyEnds,
        *,
        rank: int = 0,
        ranks: int = 1,
        session: int = 1,
        worker: int = 1,
    ) -> Refusal | None:
        """A process of a session says what it copies; why it may not, if so."""
        self.feed(inputs.WorkerCopies(self.world.now_s, session, worker, message, rank, ranks))
        self.world.run()
        told = self.told_workers[-1]
        assert (told.worker, told.call) == (worker, message.call), told
        return told.refusal

    def answer(self, call: int) -> client.Reply | None:
        """The answer to a call, if it has come."""
        for reply in reversed(self.answers):
            if isinstance(reply, ANSWERS) and reply.call == call:
                return reply
        return None

    def take(self) -> list[client.Reply]:
        """Everything engines heard since the last look."""
        heard, self.answers = self.answers, []
        return heard

    def lease(self, toks: Tokens, **fields: object) -> client.Leased:
        """Open a lease that has room at once."""
        reply = self.call(client.OpenLease, toks, **fields)  # type: ignore[arg-type]
        assert isinstance(reply, client.Leased), reply
        return reply

    def ask(self, request: admin.AdminRequest) -> admin.AdminReply:
        self.feed(inputs.FromOperator(self.world.now_s, b"op", request))
        self.world.run()
        return self.reports[-1]

    # ---- pages -------------------------------------------------------------------------------

    def write(
        self, pages: bytes, toks: Tokens, namespace: str = "", *, start: int = 0, end: int = -1
    ) -> None:
        """An engine writes the KV of tokens ``[start, end)`` to the pages of its row."""
        end = count(toks) if end < 0 else end
        for k, page in enumerate(page_ids(pages)):
            if k * PAGE < end and (k + 1) * PAGE > start:
                self.memory[page] = content(toks, namespace, min((k + 1) * PAGE, end))

    def holds(self, pages: bytes, toks: Tokens, namespace: str = "") -> bool:
        """Whether the row holds exactly this prompt, in order."""
        n = count(toks)
        wanted = [content(toks, namespace, min(end + PAGE, n)) for end in range(0, n, PAGE)]
        return [self.memory.get(page, "?") for page in page_ids(pages)][: len(wanted)] == wanted

    # ---- the transfer process ----------------------------------------------------------------

    def start_transfer(self, why: str = "start") -> None:
        self.generation += 1
        self.feed(
            inputs.TransferReady(
                self.world.now_s, self.generation, f"meta:{self.name}".encode(), "simulated", why
            )
        )

    def stop_transfer(self, why: str) -> None:
        """Killed and reaped: our own sockets are gone with it."""
        self.stop_processes()
        self.feed(inputs.TransferGone(self.world.now_s, why))

    def stop_processes(self) -> None:
        """What was sent may still be on its way; nothing is reported any more."""
        self.inbox.clear()
        for key, stream in self.agents.items():
            self.end_agent(stream, self.flights_through(*key))
        self.agents.clear()
        for copy in self.copies:
            self.move_copy(copy, self.world.torn_pages)
        self.copies.clear()
        self.flights.clear()
        self.late.clear()
        self.inflow = Inflow(self)
        self.asked.clear()
        self.ahead.clear()
        self.said.clear()

    @override
    def restart_transfer(self, why: str) -> None:
        self.world.restarts.append((self, why))

    def report_next(self) -> bool:
        """The transfer process says what it has to say next, if anything."""
        if not self.inbox:
            return False
        self.feed(msgspec.structs.replace(self.inbox.popleft(), at_s=self.world.now_s))
        return True

    @override
    def order(self, order: effects.TransferOrder) -> None:
        """Each kind of order to whoever carries it out."""
        match order:
            case effects.LoadAgent():
                self.load_agent(order)
            case effects.DropAgent():
                self.drop_agent(order)
            case effects.Post():
                self.post(order)
            case effects.Forget():
                self.forget(order)
            case effects.Verify() | effects.SumLanded() | effects.ForgetSums():
                self.order_sums(order)
            case effects.Quiesce():
                self.quiesce(order)
            case effects.Exempt():
                self.exempt(order)
            case effects.Copy():
                self.begin_copy(order)

    def load_agent(self, load: effects.LoadAgent) -> None:
        if self.fails_loading:
            self.fails_loading -= 1
            self.inbox.append(
                inputs.AgentFailed(0.0, load.incarnation, load.generation, "no route")
            )
            return
        there = self.world.side_of(load.incarnation)
        self.world.connections += 1
        stream = Stream(f"{self.name}:{self.world.connections}>{there.name}", there.inflow)
        if (there.incarnation, there.generation) == (load.incarnation, load.generation):
            stream = there.inflow.connect(stream.name)
        self.agents[load.incarnation, load.generation] = stream
        self.inbox.append(
            inputs.AgentLoaded(0.0, load.incarnation, load.generation, (stream.name,))
        )

    def post(self, post: effects.Post) -> None:
        part = self.node.prefiller.posts.parts.get(post.post)
        if part is None:
            return  # the same step has already ended it
        events = (post.after[at : at + 64] for at in range(0, len(post.after), 64))
        if not self.come.issuperset(events):
            self.waiting[post.post] = post
            return
        grant = Grant(part.incarnation, part.generation, part.handoff, 0)
        there = self.world.side_of(part.incarnation)
        if there.incarnation == part.incarnation:
            grant = there.grants[part.handoff]
        flight = self.flights[post.post] = Flight(post, grant)
        if not self.world.hold_posts:
            self.land(flight)

    def forget(self, order: effects.Forget) -> None:
        if self.waiting.pop(order.post, None) is not None:
            self.inbox.append(inputs.Unposted(0.0, order.post, "given up"))

    def quiesce(self, order: effects.Quiesce) -> None:
        self.inflow.look(order)
        self.be_quiet_now()

    def exempt(self, order: effects.Exempt) -> None:
        self.inflow.exempt(order)
        self.be_quiet_now()

    def comes(self, event: bytes) -> None:
        """An event of the engine's device."""
        self.come.add(event)
        waiting, self.waiting = self.waiting, {}
        for post in waiting.values():
            self.post(post)

    def land(self, flight: Flight, n_pages: int | None = None) -> None:
        """The next pages of a post arrive; at the last one its end is reported."""
        there = self.world.side_of(flight.grant.incarnation)
        if not there.is_reachable(flight.grant):
            self.fail(flight, "the receiving process is gone")
            return
        component, split = flight.post.component, flight.post.split
        free = page_ids(self.free_of(component))
        for _ in range(len(flight.pairs) if n_pages is None else n_pages):
            if flight.pairs:
                source, destination = flight.pairs.popleft()
                whole, piece = divmod(source, split)
                assert whole not in free, f"read page {whole} after it was freed"
                assert whole, f"read the null page of {component}"
                page = flight.post.first_page + flight.pages - len(flight.pairs) - 1
                what = self.made_of(flight.post, whole, piece)
                flight.sums += sum_of(flight.post.seal, page, what)
                there.receive_page(flight.grant, destination, what, flight.post)
        if not flight.pairs and not flight.is_reported:
            flight.is_reported = True
            del self.flights[flight.post.post]
            moved = flight.pages * self.bytes_of(flight.post)
            self.inbox.append(inputs.PostDone(0.0, flight.post.post, moved, flight.sums))

    def bytes_of(self, post: effects.Post) -> int:
        return self.node.leases.page_bytes

    def made_of(self, post: effects.Post, page: int, piece: int) -> str:
        """What a post reads of one of our pages."""
        return self.piece_of(self.memory_of(post.component).get(page, "?"), piece, post.split)

    def put(self, post: effects.Post, page: int, what: str) -> None:
        """What a peer's post writes of one of our pages."""
        self.memory_of(post.component)[page] = what

    def seen(self, verify: effects.Verify | effects.SumLanded, page: int) -> str:
        """What is to be verified of one of our pages."""
        return self.memory_of(verify.component).get(page, "?")

    def piece_of(self, what: str, piece: int, split: int) -> str:
        """What goes over where a page is sent in so many pieces."""
        return f"{what}/{piece}" if split > 1 else what

    def memory_of(self, component: str) -> dict[int, str]:
        """What the pages of a component hold."""
        return self.memory if component == "kv" else self.beside.setdefault(component, {})

    def free_of(self, component: str) -> Pages:
        """The free pages of a region; what is in lockstep with kv is looked up there."""
        component = component.partition("#")[0]
        name = component.removesuffix(".saved")
        if name != component:
            area = self.node.leases.saved.pools.get(name)
            return area.free_ids() if area is not None else NO_PAGES
        keeper = self.node.leases.components.named(component)
        if keeper is not None:
            return keeper.pool.free_ids()
        return self.node.leases.pool.free_ids() if component == "kv" else NO_PAGES

    def cached_of(self, component: str) -> set[int]:
        """The pages of a component that lie in the tree; none of what is in lockstep with kv."""
        component = component.partition("#")[0]
        keeper = self.node.leases.components.named(component)
        if keeper is not None:
            return {page for node in keeper.nodes for page in page_ids(keeper.pages_at(node))}
        if component != "kv":
            return set()
        nodes = self.node.leases.tree.nodes()
        return {page for node in nodes for page in page_ids(node.pages)}

    def order_sums(self, order: effects.Verify | effects.SumLanded | effects.ForgetSums) -> None:
        match order:
            case effects.Verify():
                self.verify(order)
            case effects.SumLanded():
                self.sum_landed(order)
            case effects.ForgetSums(ticket):
                self.ahead.pop(ticket, None)
                self.said.pop(ticket, None)

    def sum_landed(self, order: effects.SumLanded) -> None:
        """Sum what is in the pages now: they are not looked at again."""
        seal, pages = order.seal, page_ids(order.pages)
        logical = chosen(seal, seal.first, seal.first + order.landed).tolist()
        known = self.ahead.setdefault(order.ticket, [])
        more = logical[len(known) :]
        assert more or order.summed, "nothing new has landed"
        known += [sum_of(seal, one, self.seen(order, pages[one - seal.first])) for one in more]
        said = self.said[order.ticket] = self.said.get(order.ticket, b"") + order.sums
        if order.summed and b"".join(known).startswith(said):
            self.inbox.append(inputs.LandedGood(0.0, order.ticket, order.summed))

    def verify(self, verify: effects.Verify) -> None:
        self.asked.append(verify)
        if not self.world.hold_verify:
            self.answer_verify()

    def answer_verify(self) -> None:
        """Compare what is in the pages with what was sent, for the oldest question."""
        verify = self.asked.pop(0)
        seal, pages = verify.seal, page_ids(verify.pages)
        logical = chosen(seal, seal.first, seal.end).tolist()
        assert len(verify.sums) == SUM_BYTES * len(logical)
        sums = self.ahead.pop(verify.ticket, [])
        self.said.pop(verify.ticket, None)
        rest = logical[len(sums) :]
        sums += [sum_of(seal, one, self.seen(verify, pages[one - seal.first])) for one in rest]
        wanted = [verify.sums[at : at + SUM_BYTES] for at in range(0, len(verify.sums), SUM_BYTES)]
        bad = tuple(p for p, s, w in zip(logical, sums, wanted, strict=True) if s != w)
        self.inbox.append(inputs.Verified(0.0, verify.ticket, bad))

    def begin_copy(self, copy: effects.Copy) -> None:
        self.copies.append(copy)
        if not self.world.hold_copies:
            self.finish_copy()

    def finish_copy(self) -> None:
        """The oldest copy to the saved area or back is done."""
        copy = self.copies.popleft()
        self.move_copy(copy, count(copy.source))
        name = copy.source_region.partition("#")[0].removesuffix(".saved")
        component = self.config.spec.components[self.config.spec.index(name)]
        moved = count(copy.source) * page_bytes(component)
        self.inbox.append(inputs.Copied(0.0, copy.ticket, moved))

    def refuse_copy(self, why: str) -> None:
        """The oldest copy is refused."""
        self.inbox.append(inputs.CopyFailed(0.0, self.copies.popleft().ticket, why))

    def move_copy(self, copy: effects.Copy, n_pages: int) -> None:
        """Its first pages are copied: none of either side may be free, or read by others."""
        source, destination = (
            self.memory_of(region) for region in (copy.source_region, copy.destination_region)
        )
        read = page_ids(self.free_of(copy.source_region))
        assert not set(page_ids(copy.source)) & {0, *read}, "reads a free page"
        onto = set(page_ids(copy.destination))
        written = page_ids(self.free_of(copy.destination_region))
        assert not onto & {0, *written}, "writes a free page"
        assert not onto & self.cached_of(copy.destination_region), "writes a cached page"
        pairs = zip(page_ids(copy.source), page_ids(copy.destination), strict=True)
        for page, over in list(pairs)[:n_pages]:
            destination[over] = source.get(page, "?")

    def fail(self, flight: Flight, why: str) -> None:
        """The post fails; its agent still exists, so more of it may land."""
        if not flight.is_reported:
            flight.is_reported = True
            self.inbox.append(inputs.PostFailed(0.0, flight.post.post, why))

    def is_reachable(self, grant: Grant) -> bool:
        return (self.incarnation, self.node.peers.generation) == grant[:2]

    def receive_page(self, grant: Grant, page: int, what: str, post: effects.Post) -> None:
        """Bytes land in our pool: they must land where this handoff still owns the page."""
        self.check_landing(grant.handoff, grant.lease, post.component, [page])
        self.put(post, page, what)

    def drop_agent(self, drop: effects.DropAgent) -> None:
        """Destroyed: nothing more is sent; what was sent may be in the receiver's sockets."""
        for post in list(self.waiting.values()):
            if (post.incarnation, post.generation) == (drop.incarnation, drop.generation):
                del self.waiting[post.post]
                self.inbox.append(inputs.Unposted(0.0, post.post, "agent destroyed"))
        over = self.flights_through(drop.incarnation, drop.generation)
        for flight in over:
            del self.flights[flight.post.post]
            self.fail(flight, "agent destroyed")
        left = over if self.world.doubts else []
        stream = self.agents.pop((drop.incarnation, drop.generation), None)
        if stream is not None:
            self.end_agent(stream, left)
        doubt = len(left)
        self.inbox.append(inputs.AgentDropped(0.0, drop.incarnation, drop.generation, doubt))

    def flights_through(self, incarnation: str, generation: int) -> list[Flight]:
        """Our posts that are under way through this agent."""
        return [
            flight
            for flight in self.flights.values()
            if (flight.post.incarnation, flight.post.generation) == (incarnation, generation)
        ]

    def end_agent(self, stream: Stream, left: list[Flight]) -> None:
        """It sends no more; what it has sent arrives in its own time."""
        stream.left.extend(left)
        stream.to.over(stream)

    def arrive(self, stream: Stream) -> None:
        """All that was left in a connection reaches our sockets, and then its end."""
        if self.inflow.streams.get(stream.name) is stream:
            self.late.extend(stream.left)
            stream.left.clear()
            self.inflow.end(stream)
            self.be_quiet_now()

    def arrive_all(self) -> None:
        """Of every connection whose sender is over."""
        for stream in list(self.inflow.gone):
            self.arrive(stream)

    def be_quiet_now(self) -> None:
        if not self.world.hold_quiet:
            self.be_quiet()

    def land_late(self) -> None:
        """One page that waited in a socket lands."""
        flight = self.late[0]
        if flight.pairs and self.is_reachable(flight.grant):
            page = flight.pairs.popleft()[1]
            self.receive_page(flight.grant, page, "late", flight.post)
        else:
            del self.late[0]

    def be_quiet(self) -> None:
        """Whatever has reached this host lands; who waits for nothing else is told."""
        while self.late:
            self.land_late()
        self.inbox.extend(inputs.Quiet(0.0, lease) for lease in self.inflow.answered())
