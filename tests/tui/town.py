"""Real nodes in situations that an operator meets: the same for the same seed, down to the byte.

Two prefill and two decode nodes of the real core, with the simulated transfer processes and the
manual clock of ``tests.core.world``. Consoles look at ``decode-0``. Invariants are checked once a
situation is made (``test_fake``), not at every step: one of them has ten thousand leases.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvd.console.history import Recent
from kvd.core import inputs
from kvd.core.layout.spec import (
    Component,
    Mha,
    PageOrder,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
)
from kvd.observe.bus import Bus
from kvd.wire import admin, client
from tests.core.side import SAVED, Side, settings, tokens
from tests.core.world import PAGE, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import Effect
    from kvd.types import Tokens

PREFILLS = ("prefill0", "prefill1")
DECODES = ("decode-0", "decode-1")
SYSTEM = (1, 20 * PAGE)
"""First and number of the tokens that all prompts begin with."""


def spec(pages: int) -> PoolSpec:
    """A page of 16 tokens of 28 layers: 1.75 MiB."""
    component = Component("kv", 28, Mha(8, 128, 128, "bfloat16"), PAGE)
    return PoolSpec("main", "mha", PageOrder.PAGE_FIRST, (component,), (pages,), (SAVED + 1,))


def mixed(pages: int) -> PoolSpec:
    """Of a model with an index beside its KV, windows, and recurrent layers."""
    layout = Mha(4, 128, 128, "bfloat16")
    components = (
        Component("kv", 12, layout, PAGE),
        Component("index", 12, Mha(1, 64, 0, "float8_e4m3fn"), PAGE // 4),
        Component("swa", 24, layout, PAGE, Tail(128)),
        Component("state", 20, State((StateTensor("ssm", (32, 128), "float32"),)), 1, PerRequest()),
    )
    counts = (pages, 4 * pages, pages // 2, 64)
    return PoolSpec("main", "swa", PageOrder.PAGE_FIRST, components, counts)


class Resident(Side):
    """A node with a bus and somebody who remembers, as a daemon has them."""

    bus: Bus
    recent: Recent
    world: Town

    def begin(self) -> None:
        self.bus, self.recent = Bus(), Recent()
        self.bus.subscribe(self.recent.take, wants=self.recent.wants)
        super().begin()

    def feed(self, happened: inputs.Input) -> list[Effect]:
        step = self.node.step(happened)
        self.bus.publish(step.events)
        for effect in step.effects:
            self.perform(effect)
        return step.effects

    def join(self, name: str, *pids: int) -> int:
        """A session with these processes."""
        self.sessions += 1
        for pid in pids:
            self.feed(inputs.ClientJoined(self.world.now_s, self.sessions, name, pid))
        return self.sessions


class Town(World):
    """The nodes of a cluster, and which processes of engines are dead."""

    side = Resident
    sides: dict[str, Resident]

    def __init__(self, seed: int, pages: int, **more: object) -> None:
        self.chance = random.Random(seed)
        self.dead: set[int] = set()
        self.watched_s = 1.0
        """So long a console has been open when the test begins: some things only show with time."""
        self.rooms = 0
        self.now_s = 86_400.0
        self.wire, self.restarts, self.lost, self.cut = [], [], set(), set()
        self.hold_wire = self.hold_posts = self.hold_quiet = self.hold_shells = False
        self.hold_copies = self.hold_verify = self.doubts = self.hold_network = False
        self.torn_pages = 1
        self.connections = 0
        self.sides = {
            name: Resident(self, settings(name, pages, **{"spec": spec(pages), **more}))
            for name in (*PREFILLS, *DECODES)
        }
        self.p, self.d = self.sides[PREFILLS[0]], self.sides[DECODES[0]]
        for decode in DECODES:
            self.sides[decode].dials = [self.sides[name] for name in PREFILLS]
        for side in self.sides.values():
            self.start(side)
        self.run()

    # ---- what engines do ---------------------------------------------------------------------

    def die(self, pid: int) -> None:
        """The process is gone; others of its session keep that, or what nobody sees."""
        self.dead.add(pid)
        for session in [one for one in self.d.node.sessions.by_id.values() if pid in one.pids]:
            living = tuple(one for one in session.pids if one not in self.dead)
            heirs = () if living else (inputs.Heir(pid=0, of_pid=pid),)
            self.d.feed(inputs.ProcessesNow(self.now_s, session.id, living or (pid,), heirs))

    def prompt(self, pages: int, rest_tokens: int = 0) -> Tokens:
        """The system prompt, then tokens that no other prompt has."""
        first = 10_000 + self.chance.randrange(1_000_000) * 1000
        return tokens(SYSTEM, (first, pages * PAGE + rest_tokens))

    def keep(self, side: Resident, toks: Tokens, session: int) -> None:
        """The prompt comes into the tree, and its lease is over."""
        lease = side.lease(toks, session=session)
        side.call(client.CommitAndRelease, session=session, lease=lease.lease)

    def receive(self, source: Resident, toks: Tokens, session: int, **more: object) -> int:
        """The decode side asks for a prompt in a new room, which is returned."""
        self.rooms += 1
        self.d.call(
            client.ReceiveRequest,
            toks,
            session=session,
            room=self.rooms,
            source=(source.name,),
            **more,
        )
        return self.rooms

    def send(self, source: Resident, toks: Tokens, room: int, upto_tokens: int) -> int:
        """The prefill side computes so many tokens of it, in chunks; the number of its send."""
        lease = source.lease(toks)
        reply = source.call(client.SendRequest, toks, room=room, lease=lease.lease)
        assert isinstance(reply, client.Sending), reply
        for upto in range(lease.prefix_tokens + 8 * PAGE, upto_tokens + 1, 8 * PAGE):
            source.call(client.Advance, send=reply.send, upto_tokens=upto)
        return reply.send

    def deliver_prompt(self, source: Resident, toks: Tokens, session: int) -> None:
        """A whole handoff; the prefill side's lease is over, the decode side's lives on."""
        room = self.receive(source, toks, session)
        send = self.send(source, toks, room, len(toks) // 4)
        source.call(client.Finish, send=send, aux=b"aux")
        part = source.node.prefiller.by_send.get(send)
        assert part is None or part.lease is not None
        self.pass_time(0.1)


# ---- situations ---------------------------------------------------------------------------------


def empty(seed: int) -> Town:
    """It has just begun: peers, and nobody who uses it."""
    return Town(seed, 1024)


def normal(seed: int) -> Town:
    """Three engines; a tree of cached prompts; leases; handoffs delivered, given up, under way."""
    town = Town(seed, 1024)
    used(town)
    under_way(town)
    return town


def used(town: Town) -> None:
    """Engines have worked for a while, and hold what they are at."""
    chance, d = town.chance, town.d
    engines = [d.join("sglang-0", 4120, 4121), d.join("sglang-1", 4188), d.join("router", 977)]
    for name in PREFILLS:
        town.sides[name].join(f"engine@{name}", 2200)
    prompts = [town.prompt(chance.randrange(4, 30), chance.randrange(PAGE)) for _ in range(9)]
    for at, prompt in enumerate(prompts):
        town.keep(d, prompt, engines[at % 2])
        town.pass_time(0.3)
    for at in range(6):
        source = town.sides[PREFILLS[at % 2]]
        town.deliver_prompt(source, town.prompt(chance.randrange(8, 24)), engines[at % 2])
    for at, prompt in enumerate(prompts[:5]):
        d.lease(prompt + town.prompt(2)[-4 * PAGE :], session=engines[at % 2], reserve_tokens=32)
        town.pass_time(0.7)


def under_way(town: Town) -> None:
    """Handoffs at every point of their lives; one was given up."""
    d = town.d
    town.hold_posts = True
    given_up = town.prompt(12)
    room = town.receive(town.sides["prefill1"], given_up, 1)
    town.send(town.sides["prefill1"], given_up, room, 20 * PAGE)
    [receive] = [part.id for part in d.node.decoder.open.parts.values() if part.room == room]
    d.call(client.CancelReceive, session=1, receive=receive)
    land(town, "prefill1", 99)
    for at, landed in enumerate((0, 1, 3)):
        source = PREFILLS[at % 2]
        toks = town.prompt(40)
        room = town.receive(town.sides[source], toks, 1 + at % 2, priority=at)
        town.send(town.sides[source], toks, room, len(toks) // 4 - 8 * PAGE * at)
        land(town, source, landed)
        town.pass_time(0.4)
    town.receive(town.sides["prefill0"], town.prompt(6), 2)
    town.pass_time(0.2)


def land(town: Town, source: str, posts: int) -> None:
    """The next posts of that node arrive."""
    side = town.sides[source]
    for flight in list(side.flights.values())[:posts]:
        side.land(flight)
    town.run()


def overloaded(seed: int) -> Town:
    """A full pool with ten thousand leases, and a long queue."""
    town = Town(seed, 32_768)
    d = town.d
    engines = [d.join(f"sglang-{at}", 4100 + at) for at in range(8)]
    town.keep(d, tokens(SYSTEM), engines[0])
    for at in range(12_000):
        toks = tokens(SYSTEM, (100_000 + at * 100, 3 * PAGE))
        d.feed(
            inputs.FromClient(
                town.now_s,
                engines[at % 8],
                client.OpenLease(call=1_000_000 + at, deadline_s=30.0, priority=at % 3),
                toks,
            )
        )
        if at % 1000 == 0:
            town.pass_time(0.1)
        if len(d.node.admission.queue) >= 240:
            break
    town.watched_s = 2.0
    return town


def stuck(seed: int) -> Town:
    """A handoff whose bytes have stopped, ten seconds from its deadline."""
    town = Town(seed, 1024, stall_s=25.0)
    used(town)
    town.hold_posts = True
    source = town.sides["prefill0"]
    toks = town.prompt(48)
    room = town.receive(source, toks, 1, deadline_s=20.0)
    town.send(source, toks, room, len(toks) // 4)
    land(town, "prefill0", 2)
    town.watched_s = 9.7
    return town


def dead_client(seed: int) -> Town:
    """An engine is dead, and its session still holds what it held."""
    town = normal(seed)
    town.die(4188)
    town.watched_s = 3.0
    return town


def leak(seed: int) -> Town:
    """Pages that are neither free nor anybody's: a bug of the daemon, which the audit has found."""
    town = normal(seed)
    town.d.node.leases.pool.take_pages(3)
    town.pass_time(0.1)
    town.d.ask(admin.Audit(1))
    town.watched_s = 4.0
    return town


def silent_peer(seed: int) -> Town:
    """Nothing has been heard of one prefill node for a while."""
    town = normal(seed)
    town.cut.add("prefill1")
    town.watched_s = 4.0
    return town


def mixture(seed: int) -> Town:
    """As ``normal``, with a pool of four components."""
    town = Town(seed, 1024, spec=mixed(1024))
    used(town)
    under_way(town)
    return town


SITUATIONS: dict[str, Callable[[int], Town]] = {
    "normal": normal,
    "empty": empty,
    "overloaded": overloaded,
    "stuck": stuck,
    "dead-client": dead_client,
    "leak": leak,
    "silent-peer": silent_peer,
    "mixture": mixture,
}
