"""The reactor: effects in order, steps that never nest, and a bug that costs one request."""

from __future__ import annotations

from kvd.core import effects, inputs
from kvd.core.node import Node
from kvd.daemon.reactor import Reactor
from kvd.errors import Code
from kvd.observe.bus import Bus
from kvd.types import Tokens, pack_ids
from kvd.wire import admin, client
from tests.core.side import settings


class Shell:
    """A reactor whose effects are only written down."""

    def __init__(self) -> None:
        self.done: list[effects.Effect] = []
        self.bugs: list[str] = []
        self.bus = Bus()
        node = Node(settings("n", 16), 0.0)
        self.reactor = Reactor(
            node, self.bus, clock=lambda: 0.0, on_bug=lambda what, _: self.bugs.append(what)
        )
        kinds = (effects.Answer, effects.Report, effects.Send, effects.LoadAgent)
        self.reactor.perform = dict.fromkeys(kinds, self.done.append)
        self.reactor.feed(inputs.ClientJoined(0.0, 1, "engine", 100))


def lease(call: int) -> inputs.FromClient:
    return inputs.FromClient(0.0, 1, client.OpenLease(call), Tokens(pack_ids([1, 2, 3])))


def test_reactor_performs_effects_then_publishes_events() -> None:
    shell = Shell()

    shell.reactor.feed(lease(1))

    assert [type(effect) for effect in shell.done] == [effects.Answer]
    lost, events = shell.bus.after(0)
    assert (lost, [event.seq for event in events]) == (0, [1, 2])


def test_reactor_finishes_a_step_before_the_input_that_its_effect_caused() -> None:
    shell = Shell()
    order: list[str] = []

    def answer(effect: effects.Answer) -> None:
        order.append(f"begin {effect.message.call}")  # type: ignore[union-attr]
        if len(order) == 1:
            shell.reactor.feed(lease(2))
        order.append("end")

    shell.reactor.perform[effects.Answer] = answer
    shell.reactor.feed(lease(1))

    assert order == ["begin 1", "end", "begin 2", "end"]


def test_reactor_answers_the_request_that_met_a_bug_and_goes_on() -> None:
    shell = Shell()
    broken = inputs.FromClient(0.0, 1, client.OpenLease(7), None)  # type: ignore[arg-type]

    shell.reactor.feed(broken)
    shell.reactor.feed(lease(8))

    first, second = (effect.message for effect in shell.done)  # type: ignore[union-attr]
    assert isinstance(first, client.Failed)
    assert (first.call, first.refusal.code) == (7, Code.INTERNAL)
    assert isinstance(second, client.Leased)
    assert shell.bugs == ["step FromClient"]


def test_reactor_goes_on_after_an_effect_that_raises_and_tells_who_waits() -> None:
    """An answer that no encoder takes, with another effect and the events behind it."""
    shell = Shell()
    told: list[client.Reply] = []

    def encode(effect: effects.Answer) -> None:
        if isinstance(effect.message, client.Leased):
            raise OverflowError("int too big to convert")
        told.append(effect.message)

    shell.reactor.perform[effects.Answer] = encode
    shell.reactor.feed(lease(7))
    shell.reactor.feed(inputs.FromClient(0.0, 1, client.ReleaseLease(8, 1)))

    [failed, done] = told
    assert isinstance(failed, client.Failed)
    assert (failed.call, failed.refusal.code) == (7, Code.INTERNAL)
    assert "OverflowError" in failed.refusal.message
    assert done == client.Done(8)
    assert shell.bugs == ["perform Answer"]
    lost, events = shell.bus.after(0)
    assert (lost, [event.seq for event in events]) == (0, [1, 2, 3])


def test_reactor_gives_up_an_answer_that_cannot_even_be_refused() -> None:
    shell = Shell()
    shell.reactor.perform[effects.Answer] = lambda effect: 1 / 0

    shell.reactor.feed(lease(7))

    assert shell.bugs == ["perform Answer", "perform Answer"]


def test_reactor_outlives_an_event_taker_that_raises() -> None:
    shell = Shell()
    shell.bus.subscribe(lambda event: 1 / 0)  # type: ignore[func-returns-value, arg-type]

    shell.reactor.feed(lease(7))
    shell.reactor.feed(lease(8))

    assert [effect.message.call for effect in shell.done] == [7, 8]  # type: ignore[union-attr]
    assert shell.bugs == ["publish", "publish"]


def test_reactor_answers_the_operator_who_met_a_bug() -> None:
    shell = Shell()
    broken = inputs.FromOperator(0.0, b"op", admin.Evict(5, None))  # type: ignore[arg-type]

    shell.reactor.feed(broken)

    [report] = shell.done
    assert isinstance(report, effects.Report)
    assert isinstance(report.message, admin.AdminFailed)
    assert (report.operator, report.message.call) == (b"op", 5)
    assert report.message.refusal.code is Code.INTERNAL
    assert shell.bugs == ["step FromOperator"]
