"""A random world: engines, faults and a bad wire around two real nodes, all from one seed.

Engines behave as engines do: they write KV before they say so, and read what they were handed.
What is on the wire may be lost, repeated and reordered; daemons, transfer processes and engines may
die at any time; pools are small, so that admission waits and eviction runs.

Checked all the time, beside what ``tests.core.side`` checks at every step: a delivered prompt reads
back exactly as the prefill engine wrote it, with the aux of the same send; it still does when the
engine lets go of it; every page in either tree holds the KV of exactly its tokens.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvd.core import inputs
from kvd.types import ID_BYTES, NO_TOKENS, Pages, Tokens, count, page_ids
from kvd.wire import admin, client
from tests.core.world import PAGE, World, content, tokens

if TYPE_CHECKING:
    from tests.core.side import Side

ROOMS = 8
QUICK = {
    "max_deadline_s": 6.0,
    "linger_s": 5.0,
    "drain_s": 1.0,
    "heartbeat_s": 0.5,
    "suspect_s": 1.0,
    "lost_s": 2.0,
}


class Job:
    """What one engine does for one prompt: a lease or handoff, and the row it knows."""

    def __init__(self, toks: Tokens, namespace: str, room: int, *, cache: bool) -> None:
        self.toks = toks
        self.namespace = namespace
        self.room = room
        self.cache = cache
        self.lease = 0
        self.row = Pages(b"")
        self.part = 0
        self.written = 0
        self.aux = b""
        self.is_finishing = False
        self.is_over = False
        self.is_away = False
        """Retracted: its lease has no pages."""
        self.is_moving = False
        """On its way out of the pool or back."""


class Engine:
    """One engine session: it makes calls and hears answers."""

    def __init__(self, chaos: Chaos, side: Side) -> None:
        self.chaos = chaos
        self.side = side
        self.rng = chaos.rng
        self.session = side.attach(f"engine of {side.name}")
        self.calls: dict[int, tuple[type[client.Request], Job]] = {}
        """Unanswered."""
        self.jobs: list[Job] = []

    def call(
        self, kind: type[client.Request], job: Job, toks: Tokens = NO_TOKENS, **fields: object
    ) -> None:
        side = self.side
        side.calls += 1
        self.calls[side.calls] = (kind, job)
        message = kind(call=side.calls, **fields)  # type: ignore[call-arg]
        side.feed(inputs.FromClient(self.chaos.world.now_s, self.session, message, toks))
        self.chaos.hear(side)

    def part_named(self, part: int) -> Job | None:
        return next((job for job in self.jobs if job.part == part), None)

    def write(self, job: Job, upto: int) -> None:
        self.side.write(job.row, job.toks, job.namespace, start=job.written, end=upto)
        job.written = upto

    def act(self) -> None:
        """Go on with a random job, or begin one."""
        live = [job for job in self.jobs if not job.is_over]
        if live and self.rng.random() < 0.7:
            self.go_on(self.rng.choice(live))
        elif len(live) < 6:
            self.begin()

    def begin(self) -> None:
        raise NotImplementedError

    def go_on(self, job: Job) -> None:
        raise NotImplementedError

    def heard(self, reply: client.Reply) -> None:
        raise NotImplementedError

    def take(self, reply: client.Reply) -> tuple[type[client.Request], Job]:
        kind, job = self.calls.pop(reply.call)  # type: ignore[union-attr]
        if isinstance(reply, client.Row):
            job.row = Pages(job.row[: reply.first * ID_BYTES] + reply.pages)
        return kind, job


class PrefillEngine(Engine):
    """Leases a prompt, sends it while it writes it, finishes, lets go."""

    def begin(self) -> None:
        job = self.chaos.routed(self.side)
        self.jobs.append(job)
        self.call(
            client.OpenLease,
            job,
            job.toks,
            namespace=job.namespace,
            deadline_s=self.rng.choice((0.5, 3.0)),
            priority=self.rng.choice((0, 0, 1)),
            cache=job.cache,
        )

    def go_on(self, job: Job) -> None:
        rng, n = self.rng, count(job.toks)
        dice = rng.random()
        if not job.part:
            if job.lease and not job.is_finishing:
                job.is_finishing = True
                self.call(
                    client.Send,
                    job,
                    job.toks,
                    room=job.room,
                    lease=job.lease,
                    namespace=job.namespace,
                    deadline_s=rng.choice((1.0, 5.0)),
                )
        elif job.aux:
            if dice < 0.2 and job.lease:
                self.let_go(job)
            elif dice < 0.4 and job.lease:
                self.call(client.CommitLease, job, lease=job.lease)
        elif dice < 0.02:
            self.call(client.AbortSend, job, send=job.part, reason="engine failed")
        elif dice < 0.6:
            upto = rng.randint(job.written, n)
            self.write(job, upto)
            self.call(client.Advance, job, send=job.part, upto_tokens=upto)
        elif dice < 0.7 and job.written == n:
            self.call(client.CommitLease, job, lease=job.lease)
        else:
            self.write(job, n)
            job.aux = f"{job.room}:{self.session}:{job.part}:{self.side.life}".encode()
            self.chaos.sent[job.aux] = job
            self.call(client.Finish, job, send=job.part, aux=job.aux)

    def let_go(self, job: Job) -> None:
        kind = client.ReleaseLease
        if job.written == count(job.toks) and self.rng.random() < 0.7:
            kind = client.CommitAndRelease
        lease, job.lease = job.lease, 0
        self.call(kind, job, lease=lease)

    def heard(self, reply: client.Reply) -> None:
        match reply:
            case client.Accepted():
                return
            case client.SendFailed():
                return
        kind, job = self.take(reply)
        match reply:
            case client.Leased():
                job.lease, job.row = reply.lease, Pages(reply.pages)
                job.written = reply.prefix_tokens
            case client.Sending():
                job.part = reply.send
            case client.Finished():
                if reply.failure is not None:
                    assert "folded" not in reply.failure.message, "the outcome was forgotten"
                else:
                    assert job.aux in self.chaos.delivered, f"{job.aux!r} was never delivered"
                self.end(job)
            case client.Failed() if kind in {client.OpenLease, client.Send, client.Finish}:
                self.end(job)
            case client.Failed() if kind is client.Advance:
                self.end(job)
                self.call(client.AbortSend, job, send=job.part, reason="it failed")
            case client.Done() if kind is client.AbortSend:
                self.end(job)

    def end(self, job: Job) -> None:
        job.is_over = True
        if job.lease:
            self.let_go(job)


class DecodeEngine(Engine):
    """Receives prompts, reads them, adds tokens, lets go."""

    def begin(self) -> None:
        job = self.chaos.routed(self.side)
        self.jobs.append(job)
        self.call(
            client.Receive,
            job,
            job.toks,
            room=job.room,
            source=("p",),
            namespace=job.namespace,
            deadline_s=self.rng.choice((1.0, 5.0)),
            reserve_tokens=self.rng.choice((0, 0, 20)),
            priority=self.rng.choice((0, 0, 1)),
            cache=job.cache,
        )

    def go_on(self, job: Job) -> None:
        if job.part and not job.lease and self.rng.random() < 0.02:
            self.call(client.CancelReceive, job, receive=job.part)
        elif job.is_moving:
            return
        elif job.is_away:
            self.come_back(job)
        elif job.lease:
            assert self.side.holds(job.row, job.toks, job.namespace), "a lease lost its content"
            dice = self.rng.random()
            if dice < 0.3:
                self.call(client.ExtendLease, job, lease=job.lease, n_tokens=PAGE)
            elif dice < 0.5:
                self.generate(job)
            elif dice < 0.6:
                job.is_moving = True
                keep = self.rng.choice(("host", "host", "nothing"))
                self.call(client.RetractLease, job, lease=job.lease, keep=keep)
            else:
                job.is_over = True
                kind = client.CommitAndRelease if dice < 0.9 else client.ReleaseLease
                self.call(kind, job, lease=job.lease)

    def come_back(self, job: Job) -> None:
        """Resume, or give up what was retracted."""
        if self.rng.random() < 0.8:
            job.is_moving = True
            deadline_s = self.rng.choice((0.5, 3.0))
            self.call(client.ResumeLease, job, lease=job.lease, deadline_s=deadline_s)
        else:
            job.is_over = True
            self.call(client.ReleaseLease, job, lease=job.lease)

    def moved(self, job: Job, reply: client.Reply) -> None:
        """A retraction or a resumption is answered; what is not there is computed again."""
        job.is_moving = False
        if isinstance(reply, client.Retracted):
            job.is_away = True
            job.row = Pages(b"")
        elif isinstance(reply, client.Resumed):
            job.is_away = False
            job.row = Pages(reply.pages)
            start = min(reply.kv_tokens, count(job.toks))
            self.side.write(job.row, job.toks, job.namespace, start=start)

    def generate(self, job: Job) -> None:
        """Decode as many tokens as the row has room for, up to 20."""
        old = count(job.toks)
        room = len(job.row) // ID_BYTES * PAGE - old
        new = tokens((self.rng.randint(1, 3) * 1000, min(room, self.rng.randint(1, 20))))
        job.toks = Tokens(job.toks + new)
        self.side.write(job.row, job.toks, job.namespace, start=old)
        self.call(client.CommitLease, job, new, lease=job.lease)

    def heard(self, reply: client.Reply) -> None:
        match reply:
            case client.Received():
                job = self.part_named(reply.receive)
                assert job is not None
                assert not job.lease, "delivered twice"
                self.chaos.arrived(self, job, reply)
                return
            case client.ReceiveFailed():
                job = self.part_named(reply.receive)
                assert job is not None
                assert not job.is_over, "failed twice"
                assert not job.lease
                job.is_over = True
                return
        kind, job = self.take(reply)
        match reply:
            case client.Receiving():
                job.part = reply.receive
            case client.Failed() if kind is client.Receive:
                job.is_over = True
            case _ if kind in {client.RetractLease, client.ResumeLease}:
                self.moved(job, reply)


class Chaos:
    """One seed: the world, its engines, and the dice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.world = World(p_pages=rng.choice((24, 40)), d_pages=rng.choice((16, 24, 40)), **QUICK)
        world = self.world
        world.hold_wire = world.hold_posts = world.hold_quiet = world.hold_shells = True
        world.hold_copies = True
        self.loss = rng.choice((0.0, 0.02, 0.1, 0.3))
        self.repeats = rng.choice((0.0, 0.05, 0.2))
        self.reorders = rng.choice((0.0, 0.2, 1.0))
        self.troubles = rng.choice((0.0, 0.01, 0.03, 0.06))
        world.doubts = rng.random() < 0.7
        self.audits = rng.choice((0.3, 1.0))
        self.silent_until_s = 0.0
        self.asked: list[tuple[Tokens, str, int]] = []
        self.routes: dict[str, list[tuple[Tokens, str, int]]] = {"p": [], "d": []}
        self.sent: dict[bytes, Job] = {}
        self.delivered: dict[bytes, int] = {}
        self.engines: dict[str, Engine] = {}
        for side in (world.p, world.d):
            side.take()
            side.hang_up(1)
            self.attach(side)

    def attach(self, side: Side) -> None:
        kind = PrefillEngine if side is self.world.p else DecodeEngine
        self.engines[side.name] = kind(self, side)

    def routed(self, side: Side) -> Job:
        """The next request for the engine of this side: the other side gets it too, as a rule."""
        waiting = self.routes[side.name]
        if not waiting:
            request = self.request()
            for name, routes in self.routes.items():
                if name == side.name or self.rng.random() < 0.95:
                    routes.append(request)
        toks, namespace, room = waiting.pop(0)
        if self.rng.random() < 0.02:
            namespace = "another"
        return Job(toks, namespace, room, cache=self.rng.random() < 0.9)

    def request(self) -> tuple[Tokens, str, int]:
        """A prompt that shares its beginning with others, for a room that may be used again."""
        rng = self.rng
        if self.asked and rng.random() < 0.4:
            return rng.choice(self.asked[-4:])  # somebody tries again
        shared = rng.choice((0, 32, 64, 70))
        toks = tokens((1, shared), (1000 * rng.randint(1, 3), rng.randint(1, 100)))
        room = len(self.asked) % ROOMS + 1
        self.asked.append((toks, rng.choice(("", "", "lora")), room))
        return self.asked[-1]

    # ---- what is heard -----------------------------------------------------------------------

    def hear(self, side: Side) -> None:
        engine = self.engines[side.name]
        while side.answers:
            engine.heard(side.answers.pop(0))

    def arrived(self, engine: Engine, job: Job, reply: client.Received) -> None:
        """A prompt is there: it is what the prefill engine wrote, with its own aux."""
        sent = self.sent[reply.aux]
        assert (sent.room, sent.toks, sent.namespace) == (job.room, job.toks, job.namespace)
        assert reply.aux not in self.delivered, "the same send was delivered twice"
        self.delivered[reply.aux] = reply.receive
        job.lease, job.row = reply.lease, Pages(reply.pages)
        assert engine.side.holds(job.row, job.toks, job.namespace), "other content than was sent"

    # ---- one step ----------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        dice = rng.random()
        if dice < self.troubles:
            self.trouble()
        elif dice < 0.45:
            self.mail()
        elif dice < 0.60:
            self.report()
        elif dice < 0.72:
            self.move()
        elif dice < 0.80:
            self.tick()
        else:
            self.engines[self.rng.choice("pd")].act()
        if rng.random() < self.audits:
            side = rng.choice(list(self.world.sides.values()))
            side.feed(inputs.AuditTurn(self.world.now_s, rng.choice((1, 10, 100))))
            assert side.node.audit.state().findings == side.node.audit.refuted == 0
        self.settle()

    def settle(self) -> None:
        """Let the engines hear; the receiving one first, so that ``finish`` finds it delivered."""
        for side in (self.world.d, self.world.p):
            self.hear(side)

    def mail(self) -> None:
        wire, rng = self.world.wire, self.rng
        if not wire:
            return
        index = rng.randrange(len(wire)) if rng.random() < self.reorders else 0
        letter = wire[index] if rng.random() < self.repeats else wire.pop(index)
        if rng.random() >= self.loss:
            self.world.deliver(letter)

    def report(self) -> None:
        """The transfer process of one side says what it has to say next."""
        side = self.rng.choice(list(self.world.sides.values()))
        side.report_next()
        self.world.replace_processes()

    def move(self) -> None:
        """Some bytes land, or a post fails, or what is in a socket lands late."""
        rng = self.rng
        flights = [(side, f) for side in self.world.sides.values() for f in side.flights.values()]
        if flights:
            side, flight = rng.choice(flights)
            if rng.random() < 2 * self.troubles:
                side.fail(flight, "injected")
            else:
                side.land(flight, rng.randint(1, 4))
        for side in self.world.sides.values():
            if side.copies and rng.random() < 0.5:
                side.finish_copy()
            if side.late and rng.random() < 0.3:
                side.land_late()
            if side.noisy and rng.random() < 0.3:
                side.be_quiet()

    def tick(self) -> None:
        self.world.now_s += self.rng.choice((0.01, 0.1, 0.3, 0.5))
        if self.world.now_s > self.silent_until_s:
            self.world.cut.clear()
        for side in self.world.sides.values():
            side.feed(inputs.Tick(self.world.now_s))

    def trouble(self) -> None:
        world, rng = self.world, self.rng
        side = rng.choice((world.p, world.d))
        what = rng.choice(
            (
                *("engine", "daemon", "transfer", "fence", "evict", "abort", "agent", "flush"),
                *("silence", "silence", "silence"),
            )
        )
        match what:
            case "engine":
                self.kill_engine(side)
            case "daemon":
                world.restart(side)
                self.attach(side)
            case "transfer":
                side.restart_transfer("it crashed")
                world.replace_processes()
            case "fence":
                side.ask(admin.Fence(1))
            case "silence":
                world.cut.add(side.name)
                self.silent_until_s = world.now_s + rng.choice((0.5, 1.5, 3.0, 4.0))
            case "evict":
                side.ask(admin.Evict(1, pages=rng.randint(1, 10)))
            case "flush":
                side.ask(admin.Flush(1))
            case "abort":
                side.ask(admin.AbortRoom(1, room=rng.randint(1, ROOMS), reason="chaos"))
            case "agent":
                side.fails_loading = 1

    def kill_engine(self, side: Side) -> None:
        engine = self.engines[side.name]
        side.feed(inputs.ClientHungUp(self.world.now_s, engine.session))
        for lease in side.node.leases.leases.values():
            assert lease.session != engine.session or not lease.holders & {"engine"}, "leaked"
        side.take()
        self.attach(side)

    # ---- the end -----------------------------------------------------------------------------

    def check_trees(self) -> None:
        """Every cached page holds the KV of exactly its tokens."""
        for side in self.world.sides.values():
            tree = side.node.leases.tree
            for node in tree.nodes():
                toks = tree.path_tokens(node)
                first = node.end_tokens // PAGE - count(node.pages)
                for k, page in enumerate(page_ids(node.pages), start=first + 1):
                    assert side.memory.get(page) == content(toks, node.namespace, k * PAGE)

    def calm(self) -> None:
        """Faults stop, engines end what they began, time passes: everything drains."""
        world = self.world
        world.cut.clear()
        world.hold_wire = world.hold_posts = world.hold_quiet = world.hold_shells = False
        world.hold_copies = False
        self.loss = self.repeats = self.troubles = 0.0
        for round_ in range(16):
            for side in world.sides.values():
                side.fails_loading = 0
                side.be_quiet()
                while side.copies:
                    side.finish_copy()
            world.land_posts()
            world.pass_time(1.0, 0.25)
            self.settle()
            for engine in self.engines.values():
                for job in [job for job in engine.jobs if not job.is_over]:
                    for _ in range(4 if round_ < 12 else 40):
                        if not job.is_over:
                            engine.go_on(job)
                            world.run()
                            self.settle()
        self.check_trees()

    def final_handoff(self) -> None:
        """After all that, a handoff works."""
        p, d = self.world.p, self.world.d
        toks = tokens((50_000, 100))
        source = p.lease(toks, session=self.engines["p"].session)
        p.write(source.pages, toks)
        send = p.call(
            client.Send, toks, session=self.engines["p"].session, room=99, lease=source.lease
        )
        d.call(client.Receive, toks, session=self.engines["d"].session, room=99, source=("p",))
        assert isinstance(send, client.Sending), send
        p.call(client.Finish, session=self.engines["p"].session, send=send.send, aux=b"last")
        self.world.pass_time(1.0)
        got = d.take()[-1]
        assert isinstance(got, client.Received), got
        assert d.holds(got.pages, toks)
