"""What an audit costs grows with what there is to look at, and not with its square.

Counted, not timed, so that a busy machine says nothing else: each thing that a pass over a register
hands out is a visit. The compiled core is asked the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.audit.audit import EVERY_S
from kvd.core.audit.invariants import violations
from kvd.core.node import NodeState
from kvd.wire import client
from tests.core.families import Engine, settings_of
from tests.core.world import PAGE, World, spec, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.core.settings import Settings

FEW, MANY = 25, 100
MOST_TIMES = 6
"""Four times as much may cost so many times as much; a pass for each thing would cost 16 times."""


class Counted(dict[Any, Any]):
    """A register that counts what it hands out, whole or one by one."""

    visits = 0

    def __iter__(self) -> Iterator[Any]:
        self.visits += len(self)
        return super().__iter__()

    def values(self) -> Any:
        self.visits += len(self)
        return super().values()

    def items(self) -> Any:
        self.visits += len(self)
        return super().items()

    def __getitem__(self, key: Any) -> Any:
        self.visits += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.visits += 1
        return super().get(key, default)


def counted(owner: Any, *registers: str) -> list[Counted]:
    found = []
    for name in registers:
        register = Counted(getattr(owner, name))
        setattr(owner, name, register)
        found.append(register)
    return found


def registers_of(node: NodeState) -> list[Counted]:
    side_queue = node.admission.side_queue
    return [
        *counted(node.leases, "leases"),
        *counted(node.decoder.open, "parts", "by_handoff", "ready"),
        *counted(node.decoder.quarantines, "leases"),
        *counted(node.retractor.copies, "by_ticket"),
        *counted(node.prefiller, "by_send"),
        *counted(node.prefiller.rooms, "by_room"),
        *counted(node.prefiller.posts, "parts"),
        *counted(node.prefiller.settled_sends, "settled"),
        *counted(side_queue, "waiters"),
    ]


# ---- what there is to look at --------------------------------------------------------------------


def prompt(number: int) -> bytes:
    return tokens((100_000 + 100 * number, 32))


def with_leases(n: int) -> NodeState:
    """Of an engine, half of them committed."""
    world = World(d_pages=4 * n, max_queue=n)
    for k in range(n):
        lease = world.d.lease(prompt(k))
        if k % 2:
            world.d.call(client.CommitLease, lease=lease.lease)
    return world.d.node


def with_waiting(n: int) -> NodeState:
    """Receives from a peer that is silent."""
    world = World(d_pages=4 * n, max_queue=n)
    world.cut = {"p"}
    world.pass_time(4)
    for k in range(n):
        world.d.call(client.ReceiveRequest, prompt(k), room=k + 1, source=("p",), deadline_s=1e3)
    return world.d.node


def handoffs(n: int) -> World:
    """Under way, with a post that has not landed each."""
    world = World(p_pages=4 * n, d_pages=4 * n, max_queue=n, max_deadline_s=1e3)
    world.hold_posts = True
    for k in range(n):
        lease = world.p.lease(prompt(k))
        said = {"room": k + 1, "deadline_s": 1e3}
        world.d.call(client.ReceiveRequest, prompt(k), source=("p",), **said)
        world.p.call(client.SendRequest, prompt(k), lease=lease.lease, **said)
        send = world.p.node.prefiller.rooms.by_room[k + 1].id
        world.p.call(client.Advance, send=send, upto_tokens=32)
    return world


def with_sends(n: int) -> NodeState:
    return handoffs(n).p.node


def with_receives(n: int) -> NodeState:
    return handoffs(n).d.node


def with_quarantines(n: int) -> NodeState:
    """What was received is not wanted any more, and its writer says nothing."""
    world = handoffs(n)
    world.cut = {"p"}
    for receive in list(world.d.node.decoder.open.attempts):
        world.d.call(client.CancelReceive, receive=receive)
    return world.d.node


def with_copies(n: int) -> NodeState:
    """Leases that are being saved."""
    roomy = msgspec.structs.replace(spec(4 * n), saved_pages=(4 * n,))
    world = World(spec=roomy)
    world.hold_copies = True
    for k in range(n):
        lease = world.d.lease(prompt(k), cache=False)
        world.d.call(client.RetractLease, lease=lease.lease)
    assert len(world.d.node.retractor.copies.by_ticket) == n
    return world.d.node


def with_windows(n: int) -> NodeState:
    """Leases that go on from what is cached, windows and all."""
    each = 2 * n * PAGE
    pages = (each, 4 * each, each, 2 * n, each)
    roomy = msgspec.structs.replace(settings_of("everything"), max_queue=n)
    node = Engine(NodeState(roomy_pools(roomy, pages), 0.0), 1).node
    for k in range(n):
        for call in (2 * k, 2 * k + 1):
            opened = inputs.FromClient(1.0, 1, client.OpenLease(call), prompt(k))
            step = node.step(opened)
            if call % 2 == 0:
                (leased,) = [
                    one.message
                    for one in step.effects
                    if isinstance(one, effects.AnswerEngine)
                    and isinstance(one.message, client.Leased)
                ]
                done = client.CommitAndRelease(10_000 + k, leased.lease)
                node.step(inputs.FromClient(1.0, 1, done, b""))
    assert len(node.leases.leases) == n
    return node


def roomy_pools(settings: Settings, pages: tuple[int, ...]) -> Settings:
    bigger = msgspec.structs.replace(settings.spec, pages=pages)
    return msgspec.structs.replace(settings, spec=bigger)


WORLDS = (
    *(with_leases, with_waiting, with_sends, with_receives, with_quarantines),
    *(with_copies, with_windows),
)


# ---- how it is looked at -------------------------------------------------------------------------


def check(node: NodeState) -> None:
    """As ``kvd audit`` does."""
    assert violations(node) == []


def sweep(node: NodeState) -> None:
    """As the standing audit does, if its turns were long."""
    before = node.audit.sweeps
    at_s = node.out.at_s + EVERY_S
    while node.audit.sweeps == before:
        node.step(inputs.AuditTurn(at_s, 1_000_000))
    assert node.audit.state().findings == 0


@pytest.mark.parametrize("look", [check, sweep])
@pytest.mark.parametrize("made", WORLDS)
def test_four_times_as_much_costs_about_four_times_as_many_visits(
    made: Callable[[int], NodeState], look: Callable[[NodeState], None]
):
    visits = []
    for n in (FEW, MANY):
        node = made(n)
        registers = registers_of(node)
        look(node)
        visits.append(sum(one.visits for one in registers))

    few, many = visits
    assert few >= FEW, "what is counted is what the audit looks at"
    assert many < MOST_TIMES * few
