"""Pools of every family, small, and an engine that does random things with a node of one.

``EVERYTHING`` has all kinds of components at once, which no configuration has: one node on which
every rule has something to look at.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvd.core import effects, inputs
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Host,
    Mha,
    PageOrder,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
)
from kvd.core.node import NodeState
from kvd.core.settings import Settings
from kvd.types import ID_BYTES, NO_TOKENS, Incarnation, NodeName, Tokens
from kvd.wire import admin, client
from tests.core.side import PAGE, tokens

if TYPE_CHECKING:
    from kvd.core.effects import Step

_PAGE_BYTES = PAGE * ID_BYTES
_MHA = Mha(1, 1, 1, "float32")
_KV = Component("kv", 1, _MHA, PAGE)
_INDEX = Component("index", 1, Mha(1, 1, 0, "float32"), PAGE // 4)
_SWA = Component("swa", 1, _MHA, PAGE, Tail(40))
_STATE = Component("state", 1, State((StateTensor("conv", (2,), "float32"),)), 1, PerRequest())
_BUFFER = Component("buffer", 1, _MHA, PAGE, Buffer(64))


def pool(
    family: str,
    *components: Component,
    pages: tuple[int, ...],
    saved_pages: tuple[int, ...] = (),
) -> PoolSpec:
    return PoolSpec("main", family, PageOrder.PAGE_FIRST, components, pages, saved_pages)


SPECS = {
    "swa": pool("swa", _KV, _SWA, pages=(40, 24)),
    "recurrent": pool("recurrent", _KV, _STATE, pages=(40, 8)),
    "hisparse": pool(
        "hisparse",
        Component("kv", 1, _MHA, PAGE, tier=Host()),
        _INDEX,
        _BUFFER,
        pages=(40, 160, 14),
    ),
    "everything": pool(
        "swa",
        *(_KV, _INDEX, _SWA, _STATE, _BUFFER),
        pages=(40, 160, 30, 9, 20),
        saved_pages=(20, 80, 12, 5, 0),
    ),
}


def settings_of(family: str, name: str = "a") -> Settings:
    return Settings(NodeName(name), Incarnation(f"{1:032x}"), SPECS[family])


class Engine:
    """One session of a node, that leases, writes, slides and lets go as its dice say."""

    def __init__(self, node: NodeState, seed: int) -> None:
        self.node = node
        self.rng = random.Random(seed)
        self.now_s = 1.0
        self.log: list[inputs.Input] = []
        self.steps: list[Step] = []
        self.refused: list[client.Failed] = []
        self.leases: dict[int, int] = {}
        """By lease, the token that is computed next."""
        self._calls = 0
        self.feed(inputs.ClientJoined(self.now_s, 1, "engine", 7))

    def feed(self, happened: inputs.Input) -> Step:
        """One input, kept with what it came to."""
        self.log.append(happened)
        step = self.node.step(happened)
        self.steps.append(step)
        for effect in step.effects:
            if isinstance(effect, effects.AnswerEngine):
                self._hear(effect.message)
        return step

    def call(
        self, kind: type[client.Request], *fields: object, toks: Tokens = NO_TOKENS, **more: object
    ) -> client.Reply:
        """One request; its answer comes at once."""
        self._calls += 1
        message = kind(self._calls, *fields, **more)  # type: ignore[call-arg,arg-type]
        step = self.feed(inputs.FromClient(self.now_s, 1, message, toks))
        answers = [one.message for one in step.effects if isinstance(one, effects.AnswerEngine)]
        return answers[0]

    def _hear(self, reply: client.Reply) -> None:
        if isinstance(reply, client.Leased):
            self.leases[reply.lease] = reply.prefix_tokens
        elif isinstance(reply, client.Failed):
            self.refused.append(reply)

    # ---- random work -------------------------------------------------------------------------

    def work(self, steps: int) -> None:
        """So many requests, drawn by the dice."""
        for _ in range(steps):
            self.now_s += 0.01
            dice = self.rng.random()
            if not self.leases or dice < 0.25:
                self._open()
            elif dice < 0.30:
                pages = self.rng.randint(1, 6)
                self.feed(inputs.FromOperator(self.now_s, b"op", admin.Evict(1, pages)))
            elif dice < 0.31:
                self.feed(inputs.FromOperator(self.now_s, b"op", admin.Flush(1)))
            elif dice < 0.35:
                self.feed(inputs.Tick(self.now_s))
            else:
                self._go_on(self.rng.choice(list(self.leases)), dice)

    def _open(self) -> None:
        rng = self.rng
        shared = tokens((1000 * rng.randint(1, 3), rng.choice((0, 16, 48, 100, 160))))
        toks = Tokens(shared + tokens((rng.randint(1, 3), rng.randint(1, 60))))
        if rng.random() < 0.6:
            toks = Tokens(toks[: max(1, len(toks) // _PAGE_BYTES) * _PAGE_BYTES])
        message = client.OpenLease(
            0,
            "",
            rng.choice((0, 0, 32)),
            deadline_s=0.2,
            cache=rng.random() < 0.9,
            step_tokens=rng.choice((0, 0, PAGE, 48)),
        )
        fields = [getattr(message, name) for name in message.__struct_fields__[1:]]
        self._calls += 1
        self.feed(inputs.FromClient(self.now_s, 1, client.OpenLease(self._calls, *fields), toks))

    def _go_on(self, number: int, dice: float) -> None:
        lease = self.node.leases.leases[number]
        rng = self.rng
        if dice < 0.50:
            upto = min(lease.room_tokens, self.leases[number] + rng.choice((1, PAGE, 40)))
            reply = self.call(client.SlideLease, number, upto)
            if not isinstance(reply, client.Failed):
                self.leases[number] = upto
        elif dice < 0.60:
            self.call(client.ExtendLease, number, rng.randint(0, 40))
        elif dice < 0.75:
            known = len(lease.tokens) // ID_BYTES
            wanted = rng.choice((9, -known % PAGE))
            new = tokens((rng.randint(1, 3), min(lease.room_tokens - known, wanted)))
            self.call(client.CommitLease, number, toks=new)
        else:
            del self.leases[number]
            kind = client.CommitAndRelease if dice < 0.95 else client.ReleaseLease
            self.call(kind, number)


def worked(family: str, seed: int, steps: int) -> Engine:
    """An engine after so much work on a node of its own."""
    engine = Engine(NodeState(settings_of(family), 1.0), seed)
    engine.work(steps)
    return engine
