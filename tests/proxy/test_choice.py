"""Which engine a request goes to, and what is guessed of what its node has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import KvdError
from kvd.proxy.engines import (
    EngineAddress,
    EngineRole,
    EngineState,
    ProxiedEngine,
    check_engines,
    parse_engine,
    soonest,
)
from kvd.proxy.lookup import BLOCK_BYTES, ServedPrefixes

NOW_S = 100.0


def engine(number, **state):
    address = EngineAddress(EngineRole.DECODE, f"http://127.0.0.1:{8000 + number}")
    return ProxiedEngine(address, **{"answered_s": NOW_S, **state})


def chosen(engines, cached, n_tokens):
    return soonest(engines, cached, n_tokens, NOW_S)


def test_a_long_match_wins_where_nobody_waits():
    one, two = engine(1), engine(2)
    found = chosen([one, two], {two: 900}, 1000)
    assert (found.engine, found.lacking_tokens) == (two, 100)


def test_a_long_match_loses_to_an_idle_engine_when_more_waits_there_than_it_saves():
    one, two = engine(1), engine(2, waiting_tokens=901)
    assert chosen([one, two], {two: 900}, 1000).engine is one
    two.waiting_tokens = 899
    assert chosen([one, two], {two: 900}, 1000).engine is two


def test_among_equals_the_one_with_fewer_open_requests_then_with_fewer_ever_then_the_first():
    one, two, three = engine(1, open_requests=2), engine(2), engine(3)
    assert chosen([one, two, three], {}, 10).engine is two
    two.sent_requests = 1
    assert chosen([one, two, three], {}, 10).engine is three


def test_an_engine_that_is_down_gets_nothing():
    assert chosen([engine(1, is_refusing=True)], {}, 10) is None


def test_an_engine_that_is_doubted_gets_what_nobody_else_takes():
    late, idle = engine(1, is_late=True), engine(2, waiting_tokens=10**6)
    assert chosen([late, idle], {late: 10}, 10).engine is idle
    assert chosen([late], {}, 10).engine is late
    never = engine(3, answered_s=float("-inf"))
    assert chosen([never], {}, 10).engine is never


def test_a_slow_health_is_no_death_and_any_answer_ends_the_doubt():
    one = engine(1)
    for _ in range(100):
        one.was_late(NOW_S, "late")
    assert one.state(NOW_S) is EngineState.DOUBTED
    one.served(NOW_S)
    assert (one.state(NOW_S), one.why) == (EngineState.UP, "")


def test_requests_that_break_are_doubted_for_longer_each_and_health_alone_does_not_end_that():
    one = engine(1)
    one.failed(NOW_S, "broke")
    one.said_well(NOW_S)
    assert (one.state(NOW_S + 4.9), one.why) == (EngineState.DOUBTED, "broke")
    one.said_well(NOW_S + 5.0)
    assert (one.state(NOW_S + 5.0), one.why) == (EngineState.UP, "")
    for _ in range(50):
        one.failed(NOW_S, "broke")
    assert one.state(NOW_S + 59.9) is EngineState.DOUBTED
    assert one.state(NOW_S + 60.0) is EngineState.UP
    one.failed(NOW_S, "broke")
    one.served(NOW_S)
    assert one.state(NOW_S) is EngineState.UP


def test_who_is_busy_is_left_alone_for_a_while_and_no_longer_than_that():
    one = engine(1)
    for said_s, for_s in ((2.0, 2.0), (3600.0, 5.0)):
        one.was_busy(NOW_S, said_s, "429")
        assert one.state(NOW_S + for_s - 0.1) is EngineState.DOUBTED
        assert one.state(NOW_S + for_s) is EngineState.UP


def test_a_prompt_waits_for_no_prefill_engine_that_may_be_hung():
    one = engine(1, open_requests=3)
    assert one.may_prefill(NOW_S)
    one.was_late(NOW_S + 9, "late")
    assert one.may_prefill(NOW_S + 9)
    assert not one.may_prefill(NOW_S + 10)
    one.open_requests = 0
    assert one.may_prefill(NOW_S + 10)
    one.failed(NOW_S + 10, "slow")
    assert not one.may_prefill(NOW_S + 14)
    one.refused(NOW_S + 20, "refused")
    assert not one.may_prefill(NOW_S + 20)


def test_who_refuses_connections_is_down_until_it_answers():
    one = engine(1)
    one.refused(NOW_S, "refused")
    assert one.state(NOW_S + 10**6) is EngineState.DOWN
    one.was_late(NOW_S, "late")
    assert one.state(NOW_S) is EngineState.DOWN
    one.said_well(NOW_S)
    assert one.state(NOW_S) is EngineState.UP


def test_a_guess_is_whole_blocks_of_what_was_sent():
    served = ServedPrefixes()
    prompt = bytes(range(256)) * 5
    assert served.cached_tokens(prompt) == 0
    served.note(prompt)
    assert served.cached_tokens(prompt) == 5 * BLOCK_BYTES // 4
    assert served.cached_tokens(prompt[:-1]) == 4 * BLOCK_BYTES // 4
    assert served.cached_tokens(b"x" + prompt[1:]) == 0


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 12))
def test_what_is_remembered_is_bounded_and_always_a_beginning(numbers, most):
    served = ServedPrefixes(most)
    for number in numbers:
        served.note(b"".join(bytes([number]) * BLOCK_BYTES for _ in range(1 + number)))
        assert len(served) <= most
    last = numbers[-1]
    newest = bytes([last]) * (BLOCK_BYTES * (1 + last))
    assert served.cached_tokens(newest) == min(most, 1 + last) * BLOCK_BYTES // 4


def test_an_engine_on_the_command_line():
    text = "http://h:81/,daemon=ipc:///run/kvd/client.sock,namespace=m"
    assert parse_engine(EngineRole.PREFILL, text) == EngineAddress(
        EngineRole.PREFILL, "http://h:81", "ipc:///run/kvd/client.sock", "m"
    )


def test_the_namespace_without_a_name_is_said_too():
    text = "http://h:81,daemon=ipc:///run/kvd/client.sock,namespace="
    assert parse_engine(EngineRole.DECODE, text).namespace == ""


def test_a_namespace_that_is_not_given_is_for_the_engine_to_say():
    text = "http://h:81,daemon=ipc:///run/kvd/client.sock"
    assert parse_engine(EngineRole.DECODE, text).namespace is None


def test_a_password_is_in_no_text_of_an_engine():
    address = parse_engine(EngineRole.PREFILL, "http://user:hunter%322@h:81/")
    assert (address.url, address.authorization) == ("http://h:81", "Basic dXNlcjpodW50ZXIyMg==")
    assert "dXNl" not in repr(address)
    for text in (
        *("ftp://user:hunter2@h:81", "http://user:hunter2,x@h:81", "http://user:hunter2,/@h:81"),
        *("http://user:hunter2é@h:81", "http://user:hunter2,x@h:81,daemon=ipc://@x"),
        *("http://user:80,hunter2@h:81", "http://user:hunter2@h:81,daemon="),
    ):
        with pytest.raises(KvdError) as caught:
            parse_engine(EngineRole.PREFILL, text)
        assert "hunter2" not in str(caught.value)


def test_an_engine_is_named_once_in_a_role_however_it_is_written():
    def named(*texts):
        return [parse_engine(EngineRole.DECODE, text) for text in texts]

    check_engines(named("http://h", "http://h:81", "https://h", "http://h/a", "http://[::1]:80"))
    check_engines([*named("http://h"), parse_engine(EngineRole.PREFILL, "http://h")])
    for other in ("http://h", "HTTP://H:80", "http://h/", "http://user:p@h:080"):
        with pytest.raises(KvdError, match="twice"):
            check_engines(named("http://h", other))


@pytest.mark.parametrize(
    "text",
    [
        "h:81",
        "http://",
        "http://[::1",
        "http://h:port",
        "http://h:99999",
        "http://h:81?x",
        "http://h:81#x",
        "http://h 1",
        "http://h\n",
        "http://h:81,daemon=,namespace=m",
        "http://h:81,daemon=",
        "http://h:81,daemon=client.sock",
        "http://h;x:81",
        "http://h\\x:81",
        "http://h:81/../x",
        "http://h:81/%2e",
        "http://h:81//x",
        "ftp://h",
        "http://h:81,peer=x",
        "http://h:81,daemon",
        "http://h:81,namespace=m",
        "http://h,daemon=a,daemon=b,namespace=m",
    ],
)
def test_an_engine_that_cannot_be_read_is_refused_in_words(text):
    with pytest.raises(KvdError, match="--decode"):
        parse_engine(EngineRole.DECODE, text)
