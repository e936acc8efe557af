"""Which headers go through the proxy."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from kvd.proxy.headers import (
    answer_headers,
    check_headers,
    own_request_headers,
    request_headers,
)
from kvd.proxy.paths import NotForwarded

NAME = "kvd-0"


def headers(*fields):
    return CIMultiDict(fields)


def passed(*fields, authorization=""):
    return request_headers(headers(*fields), NAME, "trace", authorization)


def test_what_is_for_the_engine_goes_through_and_the_proxy_is_named():
    found = passed(
        ("Authorization", "Bearer x"),
        ("X-A", "1"),
        ("X-A", "2"),
        ("Accept", "a/b"),
        ("Via", "1.0 z"),
    )
    assert found.getall("x-a") == ["1", "2"]
    assert (found["authorization"], found["accept"]) == ("Bearer x", "a/b")
    assert found.getall("via") == ["1.0 z", "1.1 kvd-0"]
    assert found["traceparent"] == "trace"
    assert passed(("traceparent", "own"))["traceparent"] == "own"


@pytest.mark.parametrize(
    "name",
    [
        *("Connection", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding"),
        *("Upgrade", "HTTP2-Settings", "Proxy-Authorization", "Proxy-Authenticate"),
        *("Host", "Content-Length", "Expect", "Cookie", "Cookie2"),
    ],
)
def test_what_is_of_one_connection_or_of_the_proxy_does_not(name):
    assert name not in passed((name, "x"))
    assert name not in passed((name.upper(), "x"))


def test_nor_does_what_connection_names():
    found = passed(
        *(("Connection", "close, X-A ,x-b"), ("connection", "X-C")),
        *(("X-A", "1"), ("x-B", "1"), ("X-c", "1"), ("X-D", "1")),
    )
    assert [name for name in found if name.lower().startswith("x-")] == ["X-D"]


def test_an_engine_s_own_credentials_stand_in_the_place_of_a_client_s():
    found = passed(("Authorization", "Bearer client"), authorization="Basic engine")
    assert found.getall("authorization") == ["Basic engine"]


def test_the_proxy_asks_for_what_it_can_read():
    found = own_request_headers(
        headers(("Accept", "text/html"), ("Accept-Encoding", "gzip"), ("X-A", "1"), ("Range", "b"))
    )
    assert dict(found) == {
        "X-A": "1",
        "content-type": "application/json",
        "accept": "application/json",
        "accept-encoding": "identity",
    }


def test_of_an_answer_no_cookie_and_no_other_way_to_the_engine():
    found = answer_headers(
        headers(
            *(("Set-Cookie", "a=b"), ("Alt-Svc", "h3"), ("Connection", "X-A"), ("X-A", "1")),
            *(("Retry-After", "7"), ("Content-Encoding", "gzip"), ("Server", "uvicorn")),
        ),
        NAME,
    )
    assert dict(found) == {
        "Retry-After": "7",
        "Content-Encoding": "gzip",
        "Server": "uvicorn",
        "via": "1.1 kvd-0",
    }


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\0b", "\udcff"])
def test_an_answer_s_header_that_is_no_text_is_a_lie(value):
    with pytest.raises(ValueError, match="x-a"):
        answer_headers(headers(("X-A", value)), NAME)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([("Authorization", "a"), ("authorization", "b")], 400),
        ([("Content-Type", "a"), ("Content-Type", "b")], 400),
        ([("Host", "a"), ("Host", "a")], 400),
        ([("X-A", "\udcff")], 400),
        ([("Transfer-Encoding", "gzip, chunked")], 501),
        ([("Content-Encoding", "gzip")], 415),
        ([("Content-Encoding", "identity, br")], 415),
        ([("Upgrade", "WebSocket")], 501),
        ([("Via", "1.1 other, 1.1 kvd-0")], 508),
    ],
)
def test_requests_that_go_no_further(fields, status):
    with pytest.raises(NotForwarded) as caught:
        check_headers(headers(*fields), NAME)
    assert caught.value.status == status


def test_requests_that_do():
    for fields in (
        [],
        [("Transfer-Encoding", "Chunked"), ("Content-Encoding", "Identity")],
        [("Upgrade", "h2c"), ("Via", "1.1 kvd-1")],
        [("X-A", "é"), ("X-A", "2")],
    ):
        check_headers(headers(*fields), NAME)
