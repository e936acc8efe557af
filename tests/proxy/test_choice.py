"""Which engine a request goes to, and what is guessed of what its node has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import Code, KvdError
from kvd.proxy.bodies import (
    decode_body,
    parse_body,
    prefill_body,
    prompt_bytes,
    transfer_in,
)
from kvd.proxy.engines import EngineAddress, EngineRole, ProxiedEngine, parse_engine, soonest
from kvd.proxy.lookup import BLOCK_BYTES, ServedPrefixes


def engine(number, **state):
    address = EngineAddress(EngineRole.DECODE, f"http://127.0.0.1:{8000 + number}")
    return ProxiedEngine(address, **{"is_up": True, **state})


def test_a_long_match_wins_where_nobody_waits():
    one, two = engine(1), engine(2)
    chosen = soonest([one, two], {two: 900}, 1000)
    assert (chosen.engine, chosen.lacking_tokens) == (two, 100)


def test_a_long_match_loses_to_an_idle_engine_when_more_waits_there_than_it_saves():
    one, two = engine(1), engine(2, waiting_tokens=901)
    assert soonest([one, two], {two: 900}, 1000).engine is one
    two.waiting_tokens = 899
    assert soonest([one, two], {two: 900}, 1000).engine is two


def test_among_equals_the_one_with_fewer_open_requests_then_the_first():
    one, two, three = engine(1, open_requests=2), engine(2), engine(3)
    assert soonest([one, two, three], {}, 10).engine is two


def test_an_engine_that_is_down_gets_nothing():
    assert soonest([engine(1, is_up=False)], {}, 10) is None


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


def test_a_prefill_asks_for_one_token_and_names_a_room():
    body = {
        "model": "m",
        "prompt": "hi",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 40,
        "min_tokens": 4,
        "n": 2,
        "temperature": 0.5,
    }
    assert prefill_body(body, "77") == {
        "model": "m",
        "prompt": "hi",
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "temperature": 0.5,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "kvd": {"v": 1, "room": "77"},
        },
    }


def test_a_client_s_own_transfer_parameters_go_no_further():
    body = {"prompt": "hi", "kv_transfer_params": {"do_remote_prefill": True}}
    assert decode_body(body, None) == {"prompt": "hi"}
    assert decode_body(body, {"a": 1}) == {"prompt": "hi", "kv_transfer_params": {"a": 1}}


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b"{}", b'{"kv_transfer_params": null}'])
def test_an_answer_that_names_no_place_is_none(answer):
    assert transfer_in(answer) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "abc"}, b"abc"),
        ({"prompt": [1, 256]}, b"\x01\0\0\0\0\x01\0\0"),
        ({"prompt": ["a", "b"]}, b'["a","b"]'),
        ({"prompt": [True, -1]}, b"[true,-1]"),
        ({"messages": [{"role": "user"}]}, b'[{"role":"user"}]'),
        ({}, b""),
    ],
)
def test_prompts_as_bytes(body, expected):
    assert prompt_bytes(body) == expected


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b"\xff"])
def test_a_body_that_is_no_object_is_refused(raw):
    with pytest.raises(KvdError) as caught:
        parse_body(raw)
    assert caught.value.code == Code.BAD_REQUEST.value


def test_an_engine_on_the_command_line():
    text = "http://h:81/,daemon=ipc:///run/kvd/client.sock,namespace=m"
    assert parse_engine(EngineRole.PREFILL, text) == EngineAddress(
        EngineRole.PREFILL, "http://h:81", "ipc:///run/kvd/client.sock", "m"
    )


@pytest.mark.parametrize(
    "text",
    [
        "h:81",
        "ftp://h",
        "http://h:81,peer=x",
        "http://h:81,daemon",
        "http://h:81,namespace=m",
        "http://h,daemon=a,daemon=b",
    ],
)
def test_an_engine_that_cannot_be_read_is_refused_in_words(text):
    with pytest.raises(KvdError, match="--decode"):
        parse_engine(EngineRole.DECODE, text)
