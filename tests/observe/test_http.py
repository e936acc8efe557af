from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from typing import TYPE_CHECKING

import pytest
import uvloop

from kvd.observe import http
from kvd.observe.http import HttpServer, Response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

BIG = b"x" * 5_000_000


def text(body: bytes, status: int = 200) -> Response:
    return Response(status, "text/plain", body)


def fail() -> Response:
    raise RuntimeError("a bug in a page")


PAGES = {
    "/livez": lambda: text(b"alive\n"),
    "/healthz": lambda: text(b"alive\n"),
    "/readyz": lambda: text(b"draining\n", 503),
    "/metrics": lambda: text(BIG),
    "/info": lambda: Response(200, "application/json", b"{}"),
    "/status": fail,
}


class Served:
    """A running server: its port, and what it reported as faults."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.refused: list[int] = []
        self.server = HttpServer(
            PAGES,
            lambda what, error: self.faults.append(f"{what}: {error}"),
            self.refused.append,
        )
        self.port = 0

    async def talk(self, data: bytes, *, finish: bool = True) -> bytes:
        """Send bytes and read until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            if finish:
                writer.write_eof()
        answer = await reader.read(-1)
        writer.close()
        return answer

    async def get(
        self, path: str, method: str = "GET", extra: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on its own connection: status, headers, body."""
        answer = await self.talk(
            f"{method} {path} HTTP/1.1\r\nHost: kvd\r\nConnection: close\r\n{extra}\r\n".encode()
        )
        return parsed(answer)


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split(" ")[1]), headers, body


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    served = Served()
    served.port = await served.server.start("127.0.0.1", 0)
    try:
        yield served
    finally:
        await served.server.stop()


async def test_pages_answer_with_their_status_type_and_body() -> None:
    async with serving() as served:
        status, headers, body = await served.get("/livez")
        assert (status, body) == (200, b"alive\n")
        assert headers.pop("date").endswith("GMT")
        assert headers == {
            "content-type": "text/plain",
            "content-length": "6",
            "cache-control": "no-store",
            "connection": "close",
        }
        assert (await served.get("/healthz"))[::2] == (200, b"alive\n")
        assert (await served.get("/readyz?verbose=1"))[::2] == (503, b"draining\n")
        assert (await served.get("http://kvd:1/info?x"))[::2] == (200, b"{}")
        assert served.faults == []


async def test_a_large_page_arrives_whole_before_the_connection_closes() -> None:
    async with serving() as served:
        status, _, body = await served.get("/metrics")

    assert (status, len(body), body == BIG) == (200, len(BIG), True)


async def test_head_gets_the_headers_alone() -> None:
    async with serving() as served:
        status, headers, body = await served.get("/livez", "HEAD")

    assert (status, headers["content-length"], body) == (200, "6", b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
async def test_other_methods_get_405_and_what_is_allowed(method: str) -> None:
    async with serving() as served:
        status, headers, body = await served.get("/livez", method)

    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert body == b"pages here are only read: use GET\n"


@pytest.mark.parametrize(
    "path", ["/", "/nope", "//livez", "/livez/", "*", "/%2e", "http://", "x:1"]
)
async def test_other_paths_get_404_and_what_there_is(path: str) -> None:
    async with serving() as served:
        status, _, body = await served.get(path)

    assert (status, body.split(b"; ")[0]) == (404, b"no such page")


async def test_a_page_that_fails_gives_500_and_is_reported() -> None:
    async with serving() as served:
        status, _, body = await served.get("/status")
        assert (status, body) == (500, b"this page failed; the log of kvd says why\n")
        assert (await served.get("/livez"))[0] == 200

    assert served.faults == ["http: a bug in a page"]


async def test_requests_follow_each_other_on_one_connection() -> None:
    one = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    body = b"GET /readyz HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
    last = b"GET /info HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    async with serving() as served:
        answer = await served.talk(one + body + one + last)

    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.count(b"HTTP/1.1 503 ") == 1
    assert answer.endswith(b"\r\n\r\n{}")


async def test_many_requests_in_one_piece_do_not_keep_the_loop() -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with serving() as served:
        other = asyncio.create_task(turn())
        answer = await served.talk(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" * 300)
        other.cancel()

    assert answer.count(b"HTTP/1.1 200 ") == 300
    assert turns > 300


async def test_http_1_0_closes_after_one_answer() -> None:
    async with serving() as served:
        status, headers, body = parsed(await served.talk(b"GET /livez HTTP/1.0\r\n\r\n"))

    assert (status, headers["connection"], body) == (200, "close", b"alive\n")


async def test_expect_100_continue_is_answered_without_the_body() -> None:
    request = (
        b"POST /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    )
    async with serving() as served:
        status, headers, _ = parsed(await served.talk(request, finish=False))

    assert (status, headers["connection"]) == (405, "close")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\xff" * 40 + b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /livez HTTP/9.9\r\nHost: a\r\n\r\n", 505),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /liv\xc3\xa9z HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: rot13\r\n\r\n", 501),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /livez HTTP/1.1\r\n bad: folding\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"y" * 40_000, 431),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", 413),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
         + b"8000\r\n" + b"z" * 0x8000 + b"\r\n0\r\n\r\n", 413),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x01" * 300, 400),  # a TLS hello
    ],
)  # fmt: skip
async def test_garbage_gets_a_typed_refusal_and_nothing_else_suffers(
    data: bytes, status: int
) -> None:
    async with serving() as served:
        found, headers, body = parsed(await served.talk(data, finish=False))
        assert (found, headers["connection"]) == (status, "close")
        assert served.refused == [status]
        assert int(headers["content-length"]) == len(body)
        assert (await served.get("/livez"))[0] == 200
        assert served.faults == []


async def test_a_client_that_hangs_up_half_way_is_forgotten() -> None:
    async with serving() as served:
        assert parsed(await served.talk(b"GET /livez HTT"))[0] == 400
        assert await served.talk(b"") == b""
        reset = socket.create_connection(("127.0.0.1", served.port))
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        reset.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        reset.close()
        assert (await served.get("/livez"))[0] == 200
        assert served.faults == []


async def test_random_bytes_never_stop_it() -> None:
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    valid = b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"
    async with serving() as served:
        for _ in range(200):
            data = bytearray(valid * dice.randint(1, 3))
            for _ in range(dice.randint(0, 6)):
                data[dice.randrange(len(data))] = dice.choice(b"\0\r\n :\xff/1Z")
            await served.talk(bytes(data[: dice.randint(0, len(data))]))
        assert (await served.get("/livez"))[0] == 200, f"seed {seed}"
        assert served.faults == [], f"seed {seed}"


async def test_slow_clients_are_cut_off_and_idle_ones_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the limits are lowered; the clients are real and do nothing."""
    monkeypatch.setattr(http, "REQUEST_S", 0.05)
    monkeypatch.setattr(http, "ANSWER_S", 0.05)
    monkeypatch.setattr(http, "LINGER_S", 0.05)
    async with serving() as served:
        slow = parsed(await served.talk(b"GET /livez HTTP/1.1\r\nHo", finish=False))
        assert slow[::2] == (408, b"no complete request came within 0.05 s\n")
        body = b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na"
        assert parsed(await served.talk(body, finish=False))[0] == 408
        assert await served.talk(b"", finish=False) == b""
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: not served.server._connections)
        writer.close()
        assert served.faults == []


async def test_too_many_connections_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)
    async with serving() as served:
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        await until(lambda: len(served.server._connections) == 2)
        status, _, body = parsed(await served.talk(b"", finish=False))
        assert (status, body) == (503, b"2 connections are open already\n")
        for _, writer in held:
            writer.close()
        await until(lambda: not served.server._connections)
        assert (await served.get("/livez"))[0] == 200


async def test_stop_ends_open_connections() -> None:
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        await until(lambda: len(served.server._connections) == 1)
        await served.server.stop()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionError):
            await served.talk(b"")
        assert served.faults == []


async def test_start_says_so_when_the_port_is_taken() -> None:
    async with serving() as served:
        with pytest.raises(OSError, match="in use"):
            await Served().server.start("127.0.0.1", served.port)


def test_all_of_it_works_on_uvloop() -> None:
    checks: list[Callable[[], Awaitable[None]]] = [
        test_pages_answer_with_their_status_type_and_body,
        test_a_large_page_arrives_whole_before_the_connection_closes,
        test_requests_follow_each_other_on_one_connection,
        test_a_page_that_fails_gives_500_and_is_reported,
        test_a_client_that_hangs_up_half_way_is_forgotten,
        test_stop_ends_open_connections,
    ]

    async def every() -> None:
        for check in checks:
            await check()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(every())


async def until(is_true: Callable[[], bool]) -> None:
    """Wait for a real process's doing, with a deadline."""
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.005)
