"""Two real nodes and everything between them, without a socket or a clock.

``World`` carries messages between the nodes and plays the transfer processes: a post copies page
contents between two dictionaries. Delivery is immediate and in order by default; a random one is in
``tests/property``. After every step the invariants of both nodes are checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvd.core import effects, inputs
from kvd.core.invariants import violations
from kvd.core.node import Node
from kvd.core.settings import Settings
from kvd.core.spec import Component, Mha, Order, PoolSpec
from kvd.types import NO_TOKENS, Incarnation, NodeName, Tokens, pack_ids, page_ids
from kvd.wire import admin, client
from kvd.wire.events import Event

PAGE = 16


def tokens(*ranges: tuple[int, int]) -> Tokens:
    """Tokens of each (first, count) range, one after the other."""
    ids = [first + k for first, n in ranges for k in range(n)]
    return Tokens(pack_ids(ids))


def spec(pages: int, page_size: int = PAGE, dtype: str = "float32") -> PoolSpec:
    component = Component("kv", 1, Mha(1, 1, 1, dtype), page_size)
    return PoolSpec("main", "mha", Order.PAGE_FIRST, (component,), (pages,))


def settings(name: str, incarnation: str, pages: int, **more: object) -> Settings:
    made = Settings(NodeName(name), Incarnation(incarnation), spec(pages))
    return made if not more else __import__("msgspec").structs.replace(made, **more)


class Side:
    """One node with its transfer process, its engine's inbox, and the bytes of its pages."""

    def __init__(self, world: World, config: Settings) -> None:
        self.world = world
        self.node = Node(config, world.now_s)
        self.name = config.name
        self.answers: list[client.Reply] = []
        self.reports: list[admin.AdminReply] = []
        self.events: list[Event] = []
        self.memory: dict[int, str] = {}
        self.posts: list[effects.Post] = []
        self.dropped: list[effects.DropAgent] = []
        self.generation = 0
        self.calls = 0

    def feed(self, happened: inputs.Input) -> list[effects.Effect]:
        step = self.node.step(happened)
        self.events += step.events
        problems = violations(self.node)
        assert not problems, (happened, problems)
        assert [e.seq for e in self.events] == list(range(1, len(self.events) + 1))
        for effect in step.effects:
            self.world.perform(self, effect)
        return step.effects

    def start_transfer(self, why: str = "start") -> None:
        self.generation += 1
        self.feed(
            inputs.TransferReady(self.world.now_s, self.generation, b"meta", "simulated", why)
        )

    def attach(self, session: int = 1, name: str = "engine") -> None:
        self.feed(inputs.ClientJoined(self.world.now_s, session, name, 1000 + session))

    def call(
        self, message_of: Callable[[int], client.Request], toks: Tokens = NO_TOKENS, session: int = 1
    ) -> client.Reply | None:
        """Make one request; the answer to it if it came at once."""
        self.calls += 1
        message = message_of(self.calls)
        before = len(self.answers)
        self.feed(inputs.FromClient(self.world.now_s, session, message, toks))
        for answer in self.answers[before:]:
            if getattr(answer, "call", None) == message.call:
                return answer
        return None

    def ask(self, message: admin.AdminRequest) -> admin.AdminReply:
        self.feed(inputs.FromOperator(self.world.now_s, b"op", message))
        return self.reports[-1]

    def write(self, pages: bytes, what: str) -> None:
        """The engine writes page k of a prompt."""
        for k, page in enumerate(page_ids(pages)):
            self.memory[page] = f"{what}:{k}"

    def read(self, pages: bytes) -> list[str]:
        return [self.memory.get(page, "?") for page in page_ids(pages)]


class World:
    """Two sides, `p` (prefill) and `d` (decode), and what is on its way between them."""

    def __init__(self, *, p_pages: int = 64, d_pages: int = 64, **more: object) -> None:
        self.now_s = 100.0
        self.wire: deque[tuple[Side, inputs.FromPeer]] = deque()
        self.hold_posts = False
        self.hold_wire = False
        self.p = Side(self, settings("p", "1" * 32, p_pages, **more))
        self.d = Side(self, settings("d", "2" * 32, d_pages, **more))
        for side in (self.p, self.d):
            side.start_transfer()
            side.attach()
        self.d.feed(inputs.LinkDialed(self.now_s, "out:p", "p", "tcp://p"))
        self.run()

    def other(self, side: Side) -> Side:
        return self.p if side is self.d else self.d

    def perform(self, side: Side, effect: effects.Effect) -> None:
        match effect:
            case effects.Answer(message=message):
                side.answers.append(message)
            case effects.Report(message=message):
                side.reports.append(message)
            case effects.Send(message=message):
                link = "in:d" if side is self.d else "out:p"
                self.wire.append((self.other(side), inputs.FromPeer(0.0, link, message)))
            case effects.LoadAgent(incarnation=incarnation, generation=generation):
                self.later(side, inputs.AgentLoaded(0.0, incarnation, generation))
            case effects.DropAgent() as drop:
                self.drop_agent(side, drop)
            case effects.Post() as post:
                side.posts.append(post)
                if not self.hold_posts:
                    self.land(side, post)
            case effects.Quiesce(lease=lease):
                self.later(side, inputs.Quiet(0.0, lease))
            case effects.RestartTransfer(why=why):
                self.restart_transfer(side, why)

    def later(self, side: Side, happened: inputs.Input) -> None:
        self.wire.append((side, happened))  # type: ignore[arg-type]

    def land(self, side: Side, post: effects.Post) -> None:
        """The post's bytes arrive, and its end is reported."""
        if post not in side.posts:
            return
        side.posts.remove(post)
        there = self.other(side)
        pairs = zip(page_ids(post.source), page_ids(post.destination), strict=True)
        for source, destination in pairs:
            there.memory[destination] = side.memory.get(source, "?")
        moved = len(post.source) // 4 * side.node.leases.page_bytes
        self.later(side, inputs.PostDone(0.0, post.post, moved))

    def drop_agent(self, side: Side, drop: effects.DropAgent) -> None:
        over = [p for p in side.posts if (p.incarnation, p.generation) == (drop.incarnation, drop.generation)]
        for post in over:
            side.posts.remove(post)
            self.later(side, inputs.PostFailed(0.0, post.post, "agent destroyed"))
        self.later(side, inputs.AgentDropped(0.0, drop.incarnation, drop.generation))

    def restart_transfer(self, side: Side, why: str) -> None:
        side.posts.clear()
        side.feed(inputs.TransferGone(self.now_s, why))
        side.start_transfer(why)

    def run(self, limit: int = 10_000) -> None:
        """Deliver everything until nothing is on its way."""
        while self.wire and not self.hold_wire:
            limit -= 1
            assert limit, "messages never stop"
            side, happened = self.wire.popleft()
            side.feed(__import__("msgspec").structs.replace(happened, at_s=self.now_s))

    def pass_time(self, seconds: float, tick_s: float = 0.1) -> None:
        """Tick both nodes, delivering in between."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += tick_s
            for side in (self.p, self.d):
                side.feed(inputs.Tick(self.now_s))
            self.run()
