"""A pool that outlives its daemons: engines go on, notes are kept, nodes come and go.

The journal is the dict of ``noted``, fed by the effects and by nothing else. A restart keeps it,
the memory and the engines; the node that comes next knows what ``PoolAdopted`` says, made of the
dict the way a reader would make it. Whoever is given a page writes to it at once, so who still
reads it sees that it was given away too early.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.inputs import Branch, FormerLease, FormerSession, PoolAdopted
from kvd.core.node import NodeState
from kvd.errors import Code
from kvd.types import NO_TOKENS, Pages, Tokens, count, pack_ids, page_ids
from kvd.wire import admin, client
from tests.core.noted import Noted
from tests.core.side import content
from tests.core.world import PAGE, settings

if TYPE_CHECKING:
    from kvd.core.cache.eviction import Policy

POOL = 30
PAGE_BYTES = PAGE * 4
VERBS = (
    *(client.ExtendLease, client.CommitLease, client.RetractLease, client.ResumeLease),
    *(client.SlideLease, client.SendRequest),
)


class Held:
    """A lease as its engine knows it."""

    def __init__(self, namespace: str, tokens: Tokens, row: list[int], *, cache: bool) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.row = row
        self.cache = cache
        self.is_former = False
        self.seen: list[str] = []
        """What it read in its row when its daemon died."""


class Engine:
    """A process with a session, which outlives daemons."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.is_attached = True
        self.leases: dict[int, Held] = {}


class Pool:
    """Everything that outlives a daemon, and the daemon that there is."""

    def __init__(self, seed: int, policy: Policy) -> None:
        self.rng = random.Random(f"{seed} restarts")
        self.policy = policy
        self.noted = Noted(PAGE, "kv")
        self.paths: dict[int, list[int]] = {}
        """Of former leases, the path that their anchor had when it was noted last."""
        self.memory: dict[int, str] = {}
        self.engines: dict[int, Engine] = {}
        self.done: Counter[str] = Counter()
        self.last_session = self.last_lease = self.generation = self.writes = 0
        self.now_s = 100.0
        self.node = self.new_node()

    def new_node(self) -> NodeState:
        config = settings("d", POOL + 1, is_journaled=True, policy=self.policy)
        return NodeState(config, self.now_s)

    # ---- steps -------------------------------------------------------------------------------

    def feed(self, happened: inputs.Input) -> client.Reply | None:
        """One input; what is noted is kept, and who is given pages writes there."""
        reply = None
        for effect in self.node.step(happened).effects:
            self.perform(effect)
            if isinstance(effect, effects.AnswerEngine):
                reply = effect.message
        self.check()
        return reply

    def perform(self, effect: effects.Effect) -> None:
        self.noted.perform(effect)
        match effect:
            case effects.NoteHeld(lease=lease, pages=pages):
                self.last_lease = max(self.last_lease, lease)
                self.write_garbage(page_ids(pages))
            case effects.NoteEnded(lease=lease):
                self.paths.pop(lease, None)
            case _:
                pass

    def joined(self, session: int, engine: Engine) -> None:
        """An engine has opened a session."""

    def left(self, session: int) -> None:
        """The session is over."""

    def check(self) -> None:
        assert violations(self.node) == []
        assert self.node.audit.findings.broken == 0
        self.noted.agree(self.node)
        for engine in self.engines.values():
            for held in engine.leases.values():
                if held.is_former:
                    assert self.read(held.row) == held.seen, "its pages were given away"

    def write_garbage(self, pages: list[int]) -> None:
        for page in pages:
            self.writes += 1
            self.memory[page] = f"write {self.writes}"

    def read(self, row: list[int]) -> list[str]:
        return [self.memory[page] for page in row]

    def ask(
        self, session: int, kind: type[client.Request], toks: Tokens = NO_TOKENS, **fields: object
    ) -> client.Reply | None:
        reply = self.feed(
            inputs.FromClient(self.now_s, session, kind(call=1, **fields), toks)  # type: ignore[call-arg]
        )
        word = reply.refusal.code.value if isinstance(reply, client.Failed) else "done"
        self.done[f"{kind.__name__}: {word}"] += 1
        return reply

    # ---- engines -----------------------------------------------------------------------------

    def text(self) -> Tokens:
        """Few letters by the page, so that prompts share beginnings."""
        pages = self.rng.randint(1, 6)
        ids = [letter for _ in range(pages) for letter in [self.rng.randint(1, 2)] * PAGE]
        return Tokens(pack_ids(ids[: self.rng.choice((len(ids), len(ids) - 3))]))

    def join(self) -> None:
        session = self.last_session = self.last_session + 1
        engine = self.engines[session] = Engine(f"works-{session}", 4000 + session)
        self.joined(session, engine)
        self.feed(inputs.ClientJoined(self.now_s, session, f"works-{session}", 4000 + session))

    def open(self, session: int) -> None:
        namespace, toks = self.rng.choice(("", "blue")), self.text()
        reserve, cache = self.rng.choice((0, 20)), self.rng.random() < 0.9
        reply = self.ask(
            session,
            client.OpenLease,
            toks,
            namespace=namespace,
            reserve_tokens=reserve,
            cache=cache,
        )
        if not isinstance(reply, client.Leased):
            number = 1
            self.ask(session, client.CancelCall, of=number)
            return
        row = page_ids(Pages(reply.pages))
        n_cached = reply.prefix_tokens // PAGE
        wanted = [content(toks, namespace, (k + 1) * PAGE) for k in range(n_cached)]
        assert self.read(row[:n_cached]) == wanted, "what is cached is not what was written"
        self.done["cached pages found"] += n_cached
        self.engines[session].leases[reply.lease] = Held(namespace, toks, row, cache=cache)

    def compute(self, held: Held) -> None:
        """The KV of its tokens is in its row; what was cached is written there already."""
        for k in range(-(-count(held.tokens) // PAGE)):
            end = min((k + 1) * PAGE, count(held.tokens))
            if held.row[k] not in self.noted.cached:
                self.memory[held.row[k]] = content(held.tokens, held.namespace, end)

    def use(self, session: int, number: int) -> None:
        """One thing that an engine does with a lease of this daemon."""
        held = self.engines[session].leases[number]
        act = self.rng.choice(("commit", "commit", "extend", "release", "end", "retract"))
        if act == "extend":
            reply = self.ask(session, client.ExtendLease, lease=number, n_tokens=20)
        elif act == "commit":
            self.compute(held)
            reply = self.ask(session, client.CommitLease, lease=number)
        else:
            self.compute(held)
            del self.engines[session].leases[number]
            kinds = {"release": client.ReleaseLease, "end": client.CommitAndRelease}
            if act in kinds:
                self.ask(session, kinds[act], lease=number)
            else:
                self.ask(session, client.RetractLease, lease=number, keep="nothing")
                if self.rng.random() < 0.5:
                    self.ask(session, client.ReleaseLease, lease=number)
            return
        if isinstance(reply, client.PageTable):
            held.row[reply.first :] = page_ids(Pages(reply.pages))

    def use_former(self, session: int, number: int) -> None:
        """It can be released and nothing else."""
        if self.rng.random() < 0.5:
            fields = {"n_tokens": 9, "upto_tokens": 9, "room": 9}
            kind = self.rng.choice(VERBS)
            known = {name: fields[name] for name in fields if name in kind.__struct_fields__}
            reply = self.ask(session, kind, lease=number, **known)
            assert isinstance(reply, client.Failed)
            assert reply.refusal.code is Code.BEFORE_RESTART
            return
        del self.engines[session].leases[number]
        kind = self.rng.choice((client.ReleaseLease, client.CommitAndRelease))
        assert isinstance(self.ask(session, kind, lease=number), client.Done)

    def come_back(self, session: int) -> None:
        """It names what it still uses; what it does not name it never reads again."""
        engine = self.engines[session]
        engine.is_attached = True
        for number in [one for one in engine.leases if self.rng.random() < 0.4]:
            del engine.leases[number]
        named = tuple(engine.leases)
        self.feed(inputs.ClientCameBack(self.now_s, session, engine.pid, named))
        kept = {one.id for one in self.node.former_leases.of_session(session)}
        assert kept == set(named), "a lease that its engine uses is not kept"
        self.done["came back"] += 1
        self.done["came back for leases"] += bool(named)

    def die(self, session: int) -> None:
        del self.engines[session]
        self.feed(inputs.ClientHungUp(self.now_s, session))
        self.left(session)
        self.done["died"] += 1

    # ---- restarts ----------------------------------------------------------------------------

    def restart(self) -> None:
        """The daemon is killed between two steps, and the next one adopts."""
        for session in [one for one in self.engines if self.rng.random() < 0.2]:
            del self.engines[session]  # it died while there was no daemon
        self.forget_retracted()
        for engine in self.engines.values():
            engine.is_attached = False
            for held in engine.leases.values():
                if not held.is_former:
                    held.is_former, held.seen = True, self.read(held.row)
        share = self.rng.choice((1.0, 1.0, 0.9, 0.5, 0.0))
        proven = {page for page in self.noted.cached if self.rng.random() < share}
        value = self.adopted(proven)
        self.node = self.new_node()
        self.feed(value)
        self.finds_all(value)
        for session in value.sessions:
            if session.id not in self.engines:
                self.feed(inputs.ClientHungUp(self.now_s, session.id))
                self.left(session.id)
        self.done["restarts"] += 1
        self.done["not proven"] += bool(value.unproven)
        self.done["former leases"] += len(self.node.former_leases.leases)

    def forget_retracted(self) -> None:
        """Engines keep only what the notes say that they have: nothing of it may be missing."""
        for session, engine in self.engines.items():
            for number in engine.leases:
                assert self.noted.leases[number][0] == session

    def adopted(self, proven: set[int]) -> PoolAdopted:
        """What a reader makes of the notes, of which it believes only ``proven``; that is kept."""
        noted = self.noted
        ended = [one for one, (session, _) in noted.leases.items() if session not in self.engines]
        paths = {one: self.path_of(one) for one in noted.leases if one not in ended}
        for lease in ended:
            del noted.leases[lease]
        noted.holder = {page: one for page, one in noted.holder.items() if one in noted.leases}
        self.paths = paths
        good: dict[int, bool] = {}
        for page, one in noted.cached.items():
            good[page] = page in proven and (not one.before or self.is_good(one.before, proven))
        whole = dict(noted.cached)
        noted.cached = {page: one for page, one in whole.items() if good[page]}
        former: dict[int, list[FormerLease]] = {}
        unproven: dict[int, None] = {}
        for lease, path in paths.items():
            known = [page for page in path if page in noted.cached]
            assert known == path[: len(known)]
            unproven |= dict.fromkeys(path[len(known) :])
            session = noted.leases[lease][0]
            noted.leases[lease] = (session, known[-1] if known else 0)
            prefix = Tokens(b"".join(noted.cached[page].tokens for page in known))
            namespace = noted.cached[known[0]].namespace if known else ""
            held = Pages(pack_ids([page for page, one in noted.holder.items() if one == lease]))
            one = FormerLease(lease, namespace, prefix, held)
            former.setdefault(session, []).append(one)
        self.generation += 1
        sessions = tuple(
            FormerSession(number, engine.name, (engine.pid,), tuple(former.get(number, ())))
            for number, engine in self.engines.items()
        )
        if self.rng.random() < 0.5:  # a reader that does not ask who reads what
            unproven |= dict.fromkeys(page for page in whole if page not in noted.cached)
        pages = Pages(pack_ids(list(unproven)))
        branches = branches_of(noted)
        return PoolAdopted(self.now_s, self.generation, branches, sessions, pages, self.last_lease)

    def is_good(self, page: int, proven: set[int]) -> bool:
        while page:
            if page not in proven:
                return False
            page = self.noted.cached[page].before
        return True

    def path_of(self, lease: int) -> list[int]:
        """From its anchor to the beginning; of a former one as it was when it was no former one."""
        if lease in self.paths:
            return self.paths[lease]
        path, page = [], self.noted.leases[lease][1]
        while page:
            path.append(page)
            page = self.noted.cached[page].before
        return path[::-1]

    def finds_all(self, value: PoolAdopted) -> None:
        """Each branch is found from its beginning to its end, where it was written."""
        tree = self.node.leases.tree
        toks: list[Tokens] = []
        for branch in value.branches:
            above = toks[branch.parent] if branch.parent >= 0 else NO_TOKENS
            toks.append(Tokens(above + branch.tokens))
            assert tree.probe(toks[-1], branch.namespace) == count(toks[-1])
        self.done["pages adopted"] += tree.cached_pages


def branches_of(noted: Noted) -> tuple[Branch, ...]:
    """The cached pages as maximal stretches, parents first."""
    below: dict[int, list[int]] = {}
    for page, one in noted.cached.items():
        below.setdefault(one.before, []).append(page)
    found: list[Branch] = []
    stack = [(-1, page) for page in reversed(below.get(0, []))]
    while stack:
        parent, page = stack.pop()
        run = [page]
        while len(below.get(run[-1], [])) == 1:
            run += below[run[-1]]
        toks = Tokens(b"".join(noted.cached[one].tokens for one in run))
        found.append(Branch(parent, noted.cached[page].namespace, toks, Pages(pack_ids(run))))
        stack += [(len(found) - 1, one) for one in reversed(below.get(run[-1], []))]
    return tuple(found)


def step(pool: Pool) -> None:
    """One thing that happens."""
    rng = pool.rng
    pool.now_s += 0.1
    attached = [one for one, engine in pool.engines.items() if engine.is_attached]
    away = [one for one in pool.engines if one not in attached]
    dice = {
        "use": 50, "open": 20, "evict": 3, "flush": 1, "audit": 4, "die": 1, "restart": 3,
        "join": 4 if len(pool.engines) < 4 else 0, "back": 10 if away else 0,
    }  # fmt: skip
    (act,) = rng.choices(list(dice), list(dice.values()))
    acts = {"join": pool.join, "restart": pool.restart}
    match act:
        case "join" | "restart":
            acts[act]()
        case "back":
            pool.come_back(rng.choice(away))
        case "die" if pool.engines:
            pool.die(rng.choice(list(pool.engines)))
        case "audit":
            pool.feed(inputs.AuditTurn(pool.now_s, rng.choice((20, 100_000))))
        case "evict":
            pool.feed(inputs.FromOperator(pool.now_s, b"op", admin.Evict(1, rng.randint(1, 9))))
        case "flush":
            pool.feed(inputs.FromOperator(pool.now_s, b"op", admin.Flush(1)))
        case "open" if attached:
            pool.open(rng.choice(attached))
        case "use" if attached:
            use(pool, rng.choice(attached))
        case _:
            pass


def use(pool: Pool, session: int) -> None:
    """One thing that an engine does with one of its leases."""
    leases = pool.engines[session].leases
    if leases:
        number = pool.rng.choice(list(leases))
        (pool.use_former if leases[number].is_former else pool.use)(session, number)


def calm(pool: Pool) -> None:
    """Everybody comes back or dies, and lets go: then the pool is whole again."""
    for session, engine in list(pool.engines.items()):
        if not engine.is_attached:
            pool.come_back(session)
        pool.die(session)
    assert pool.node.leases.leases == {}
    pool.feed(inputs.FromOperator(pool.now_s, b"op", admin.Flush(1)))
    assert pool.node.leases.pool.free_pages == POOL
    assert pool.noted.cached == {}
