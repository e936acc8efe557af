"""What is read of a client's body, and what engines are told of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.connectors.vllm.params import transfer_of
from kvd.errors import Code, KvdError
from kvd.proxy.bodies import (
    MAX_DEPTH,
    NOT_OF_CLIENTS,
    Upload,
    decode_body,
    is_one_prompt,
    json_bytes,
    looks_like_json,
    new_room,
    parse_body,
    parse_json,
    prefill_body,
    prompt_bytes,
    transfer_in,
)


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
            "transfer_id": "77",
            "kvd": {"v": 1, "opens": "77"},
        },
    }


def test_a_prefill_may_be_told_which_node_has_more_of_the_prompt():
    told = prefill_body({"prompt": "hi"}, "77", "node-1")["kv_transfer_params"]
    assert told["kvd"] == {"v": 1, "opens": "77", "peer": "node-1"}
    assert told["do_remote_decode"] is True


def test_a_client_s_own_transfer_parameters_go_no_further():
    body = {"prompt": "hi", "kv_transfer_params": {"do_remote_prefill": True}}
    assert decode_body(body, None) == {"prompt": "hi"}
    assert decode_body(body, {"a": 1}) == {"prompt": "hi", "kv_transfer_params": {"a": 1}}


@pytest.mark.parametrize("answer", [b"{}", b'{"kv_transfer_params": null}'])
def test_an_answer_that_names_no_place_is_none(answer):
    assert transfer_in(answer) is None


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"[]", b"{", b"<html>", b"\xff", b"[" * 100_000),
        b'{"kv_transfer_params": {"a": NaN}}',
        b'{"kv_transfer_params": {"a": 1e999}}',
        b'{"kv_transfer_params": {"a": "\\ud800"}}',
    ],
)
def test_an_answer_that_is_no_object_of_json_is_a_lie(answer):
    with pytest.raises(ValueError, match=r"JSON|Expecting|utf|number"):
        transfer_in(answer)


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


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "\\u0062": 2}}',
        b'{"a": "\\ud83d"}',
        b'{"\\uDC00": 1}',
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": 1} {}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"a":"' + b'\\"' * 1000 + b"[" * 300,
    ],
)
def test_what_two_readers_could_read_in_two_ways_is_refused(raw):
    with pytest.raises(KvdError) as caught:
        parse_body(raw)
    assert caught.value.code == Code.BAD_REQUEST.value


def test_brackets_in_a_text_are_no_depth_and_pairs_of_surrogates_are_characters():
    body = {"a": "[{" * 1000 + '"', "b": ["x"] * 1000, "c": "\U0001f600"}
    assert parse_body(json.dumps(body).encode()) == body


@given(st.integers(1, 2 * MAX_DEPTH))
def test_nesting_has_one_bound_whatever_is_beside_it(depth):
    raw = b'{"x": [' + b"[]," * MAX_DEPTH + b"[" * depth + b"]" * depth + b"]}"
    if depth + 2 <= MAX_DEPTH:
        parse_json(raw)
    else:
        with pytest.raises(KvdError, match=r"deeper|recursion"):
            parse_json(raw)


@pytest.mark.parametrize(
    "raw",
    [
        *(b'{"x": [' + value + b"]}" for value in (b"1," * 99 + b"1", b"[]," * 99 + b"1")),
        *(b'{"x": [' + value + b"]}" for value in (b'"",' * 99 + b"1", b"{}," * 99 + b"1")),
        b"{" + b",".join(b'"%d": 1' % number for number in range(101)) + b"}",
        b"[" * 100 + b"]" * 100,
    ],
)
def test_what_becomes_many_values_is_refused_before_it_does(raw):
    with pytest.raises(KvdError, match="more than 100 values"):
        parse_json(raw, 100)
    assert parse_json(raw, 400) == json.loads(raw)


def test_what_stands_in_texts_is_no_value():
    text = json.dumps({"a": "[,{" * 1000, "b,": ['"' * 50 + "\\,", "," * 500]}).encode()
    assert parse_json(text, 6) == json.loads(text)


@pytest.mark.parametrize("name", sorted(NOT_OF_CLIENTS))
def test_where_kv_is_is_said_by_no_client_however_it_is_spelled_and_wherever(name):
    escaped = "".join(f"\\u{ord(char):04x}" for char in name)
    spellings = (name, name.upper(), name.replace("_", "-"), f" {name} ", escaped)
    for spelling in spellings:
        evil = f'{{"{spelling}": {{"do_remote_prefill": true}}, "kept": 1}}'
        raw = f'{{"a": {evil}, "b": [[{evil}]], "vllm_xargs": {evil}, "{spelling}": 1}}'
        kept = {"kept": 1}
        assert parse_body(raw.encode()) == {"a": kept, "b": [[kept]], "vllm_xargs": kept}
    # What it is called in a text is nobody's business.
    assert parse_body(json.dumps({"prompt": name}).encode()) == {"prompt": name}


NAMES = st.text().filter(lambda name: name.strip().lower().replace("-", "_") not in NOT_OF_CLIENTS)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, JSON_VALUES), st.booleans())
def test_every_other_body_means_the_same_to_an_engine(body, is_ascii):
    raw = json.dumps(body, ensure_ascii=is_ascii).encode()
    assert json.loads(json_bytes(parse_body(raw))) == body


@given(st.binary())
def test_nothing_else_than_a_refusal_comes_of_any_bytes(raw):
    try:
        found = parse_json(raw)
    except KvdError as error:
        assert error.code == Code.BAD_REQUEST.value  # noqa: PT017 - or nothing at all
    else:
        json.loads(json_bytes(found))


def test_several_prompts_of_one_request_have_no_single_place():
    several = (["a", "b"], [[1], [2]])
    one = ("a", ["a"], [1, 2], [[1, 2]], None, 1.5)
    assert not any(is_one_prompt({"prompt": prompt}) for prompt in several)
    assert all(is_one_prompt({"prompt": prompt}) for prompt in one)
    assert is_one_prompt({"messages": [{}, {}]})


def test_what_a_prefill_is_told_is_sense_to_the_connector():
    told = prefill_body({"prompt": "x"}, new_room())["kv_transfer_params"]
    found = transfer_of(told)
    assert (found.sends, found.meeting, found.is_odd) == (True, None, False)


def upload_of(*pieces, is_form=True):
    left = list(pieces)

    async def next_piece():
        return left.pop(0) if left else b""

    return Upload(next_piece, is_form=is_form)


async def read(upload):
    await upload.begin()
    return [piece async for piece in upload.pieces()]


async def test_an_upload_goes_through_piece_by_piece():
    assert await read(upload_of(b"-", b"-B\r\n", b"x", b"y")) == [b"--B\r\n", b"x", b"y"]
    assert await read(upload_of(b"ID3\x04", b"\0{", is_form=False)) == [b"ID3\x04", b"\0{"]


@pytest.mark.parametrize(
    "pieces", [(b'{"a":1}',), (b" ", b"\n", b" [{}]"), (b"    ", b"{"), (b"x",)]
)
async def test_a_form_that_begins_as_none_goes_nowhere(pieces):
    with pytest.raises(KvdError, match="boundary"):
        await read(upload_of(*pieces))


@pytest.mark.parametrize("text", ['{"a": 1}', " [1]", "\n\t{}"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_json_is_known_by_its_beginning_in_any_encoding(text, encoding):
    assert looks_like_json(text.encode(encoding)[:8])


async def test_a_form_with_a_name_that_is_not_for_clients_is_stopped_also_across_pieces():
    name = b"KV_transfer_params"
    for at in range(1, len(name)):
        upload = upload_of(b"--B\r\n", b'name="' + name[:at], name[at:] + b'"')
        with pytest.raises(KvdError, match="not for clients"):
            await read(upload)
        assert isinstance(upload.error, KvdError)
