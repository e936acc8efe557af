"""The reactor: effects in order, steps that never nest, and a bug that costs one request."""

from __future__ import annotations

from kvd.core import effects, inputs
from kvd.core.node import NodeState
from kvd.daemon.reactor import Paranoid, Reactor
from kvd.errors import Code
from kvd.observe.bus import Bus
from kvd.types import Pages, Tokens, pack_ids
from kvd.wire import admin, client, events
from tests.core.side import settings


class Shell:
    """A reactor whose effects are only written down."""

    def __init__(self, kind: type[Reactor] = Reactor) -> None:
        self.done: list[effects.Effect] = []
        self.bugs: list[str] = []
        self.bus = Bus()
        node = NodeState(settings("n", 16), 0.0)
        self.reactor = kind(
            node, self.bus, clock=lambda: 0.0, on_bug=lambda what, _: self.bugs.append(what)
        )
        kinds = (
            effects.AnswerEngine,
            effects.AnswerOperator,
            effects.SendToPeer,
            effects.LoadAgent,
            effects.Recall,
        )
        self.reactor.perform = dict.fromkeys(kinds, self.done.append)
        self.reactor.feed(inputs.ClientJoined(0.0, 1, "engine", 100))


def lease(call: int) -> inputs.FromClient:
    return inputs.FromClient(0.0, 1, client.OpenLease(call), Tokens(pack_ids([1, 2, 3])))


def test_reactor_performs_effects_then_publishes_events() -> None:
    shell = Shell()

    shell.reactor.feed(lease(1))

    assert [type(effect) for effect in shell.done] == [effects.AnswerEngine]
    lost, events = shell.bus.after(0)
    assert (lost, [event.seq for event in events]) == (0, [1, 2])


def test_reactor_finishes_a_step_before_the_input_that_its_effect_caused() -> None:
    shell = Shell()
    order: list[str] = []

    def answer(effect: effects.AnswerEngine) -> None:
        order.append(f"begin {effect.message.call}")  # type: ignore[union-attr]
        if len(order) == 1:
            shell.reactor.feed(lease(2))
        order.append("end")

    shell.reactor.perform[effects.AnswerEngine] = answer
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

    def encode(effect: effects.AnswerEngine) -> None:
        if isinstance(effect.message, client.Leased):
            raise OverflowError("int too big to convert")
        told.append(effect.message)

    shell.reactor.perform[effects.AnswerEngine] = encode
    shell.reactor.feed(lease(7))
    shell.reactor.feed(inputs.FromClient(0.0, 1, client.ReleaseLease(8, 1)))

    [failed, done] = told
    assert isinstance(failed, client.Failed)
    assert (failed.call, failed.refusal.code) == (7, Code.INTERNAL)
    assert "OverflowError" in failed.refusal.message
    assert done == client.Done(8)
    assert shell.bugs == ["perform AnswerEngine"]
    lost, events = shell.bus.after(0)
    assert (lost, [event.seq for event in events]) == (0, [1, 2, 3])


def test_reactor_gives_up_an_answer_that_cannot_even_be_refused() -> None:
    shell = Shell()
    shell.reactor.perform[effects.AnswerEngine] = lambda effect: 1 / 0

    shell.reactor.feed(lease(7))

    assert shell.bugs == ["perform AnswerEngine", "perform AnswerEngine"]


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
    assert isinstance(report, effects.AnswerOperator)
    assert isinstance(report.message, admin.AdminFailed)
    assert (report.operator, report.message.call) == (b"op", 5)
    assert report.message.refusal.code is Code.INTERNAL
    assert shell.bugs == ["step FromOperator"]


def test_paranoid_reactor_tells_and_contains_what_a_step_broke_before_the_next() -> None:
    shell, tape = Shell(Paranoid), []
    shell.reactor.record_with(lambda happened, _: tape.append(happened))
    shell.reactor.feed(lease(1))
    shell.reactor.feed(lease(2))
    first, second = shell.reactor.node.leases.leases.values()
    shell.done.clear()

    second.page_table = Pages(second.page_table + first.page_table)
    shell.reactor.feed(inputs.Tick(1.0))

    answers = [one.message for one in shell.done if isinstance(one, effects.AnswerEngine)]
    assert [one.lease for one in answers] == [1, 2]
    assert {one.refusal.code for one in answers} == {Code.CONDEMNED}
    assert [type(one) for one in tape[-2:]] == [inputs.Tick, inputs.CheckedAll]
    (told,) = [one for one in shell.bus.after(0)[1] if isinstance(one, events.Violation)]
    assert told.done.endswith("lease 2 is lost, 1 pages condemned")

    shell.reactor.feed(inputs.Tick(2.0))
    assert type(tape[-1]) is inputs.Tick, "all is well again, nothing is news"


def test_paranoid_reactor_reports_once_what_it_cannot_mend() -> None:
    shell, tape = Shell(Paranoid), []
    shell.reactor.record_with(lambda happened, _: tape.append(happened))
    shell.reactor.feed(lease(1))
    shell.reactor.node.leases.leases[1].holders.clear()

    for k in range(5):
        shell.reactor.feed(inputs.Tick(1.0 + k))

    assert [type(one) for one in tape].count(inputs.CheckedAll) == 1


def test_a_reactor_that_is_not_paranoid_asks_nothing() -> None:
    shell = Shell()
    shell.reactor.feed(lease(1))
    shell.reactor.node.leases.leases[1].holders.clear()

    shell.reactor.feed(inputs.Tick(1.0))

    assert shell.reactor.node.audit.violations == 0
