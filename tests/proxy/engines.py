"""Engines that say what they were asked, and answer as engines of the HTTP API do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvd.proxy.engines import EngineAddress, EngineRole
from kvd.proxy.server import ProxyServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvd.proxy.limits import ProxyLimits

HERE = "127.0.0.1"


@dataclass
class FakeEngine:
    """One engine; ``bodies`` and ``headers`` are of the requests that came.

    ``opens_at``: the node where it opens the rooms that it is told of; empty: it has its own.
    ``computes``: it answers a prompt when this is set; ``waits_for``: it begins to answer then.
    """

    name: str
    pieces: int = 3
    status: int = 200
    refusal: bytes = b""
    breaks_after: int | None = None
    tokens: list[int] = field(default_factory=lambda: list(range(64)))
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: str = ""
    url: str = ""
    opens_at: str = ""
    computes: asyncio.Event | None = None
    waits_for: asyncio.Event | None = None
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def application(self) -> web.Application:
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/metrics", self._measured)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _measured(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name}], "asked": request.path_qs})

    async def _tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": self.tokens, "count": len(self.tokens)})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.came.set()
        told = body.get("kv_transfer_params") or {}
        is_prompt = bool(told.get("do_remote_decode"))
        waited = self.computes if is_prompt else self.waits_for
        try:
            if waited is not None:
                await waited.wait()
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        if self.status != 200:
            return web.Response(
                status=self.status, body=self.refusal, content_type="application/json"
            )
        if is_prompt:
            answered = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p0", "room": "77"}}
            if self.opens_at:
                answered["kvd"] |= {"peer": self.opens_at, "room": told["kvd"]["opens"]}
            return web.json_response({"choices": [], "kv_transfer_params": answered})
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": self.name}]})
        return await self._stream(request)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(self.pieces):
                if number == self.breaks_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(f"data: {json.dumps({'n': number})}\n\n".encode())
                if number == 0:
                    await self.go_on.wait()
        except (asyncio.CancelledError, ConnectionResetError):
            self.hung_up.set()
            raise
        await response.write(b"data: [DONE]\n\n")
        return response


async def _serve(app: web.Application, **options: Any) -> tuple[web.AppRunner, str]:
    options = {"handler_cancellation": True, **options}
    runner = web.AppRunner(app, shutdown_timeout=0.1, **options)
    await runner.setup()
    site = web.TCPSite(runner, HERE, 0)
    await site.start()
    _, port = runner.addresses[0][:2]
    return runner, f"http://{HERE}:{port}"


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """The engine, where it can be reached."""
    runner, engine.url = await _serve(engine.application())
    try:
        yield engine
    finally:
        await runner.cleanup()


@dataclass
class RawRequest:
    """What came at a ``RawEngine``, and how to answer it."""

    line: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    of_connection: int
    """Its number among those of its connection, from 0."""

    async def says(self, *pieces: bytes) -> None:
        """Write them, as they are."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()


class RawEngine:
    """An engine that says any bytes: ``/health`` is answered well, all else by ``answer``.

    The connection ends when ``answer`` raises ``ConnectionError`` or returns True.
    """

    def __init__(self, answer: Callable[[RawRequest], Awaitable[bool | None]]) -> None:
        self._answer = answer
        self.requests: list[RawRequest] = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for number in itertools.count():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *fields = head.split("\r\n")[:-2]
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (field.partition(":") for field in fields)
                }
                if line.startswith("GET /health"):
                    writer.write(WELL)
                    continue
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                request = RawRequest(line, headers, body, reader, writer, number)
                self.requests.append(request)
                if await self._answer(request):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            await _closed(writer)


def http_answer(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    """A whole answer; the fields stand before those of a JSON body."""
    lines = [f"HTTP/1.1 {status}", *fields, "Content-Type: application/json"]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


WELL = http_answer(b"{}")


@asynccontextmanager
async def raw(answer: Callable[[RawRequest], Awaitable[bool | None]]) -> AsyncIterator[RawEngine]:
    """A ``RawEngine`` that can be reached."""
    engine = RawEngine(answer)
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        await engine.serve(reader, writer)

    server = await asyncio.start_server(serve, HERE, 0)
    engine.url = f"http://{HERE}:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def proxy_for(
    prefills: list[str],
    decodes: list[str],
    limits: ProxyLimits | None = None,
    also: tuple[str, ...] = (),
    daemons: dict[str, str] | None = None,
) -> AsyncIterator[tuple[ProxyServer, str]]:
    """A proxy for engines at these addresses, served as ``kvd proxy`` does.

    ``daemons``: by address, where that of an engine is asked, in the namespace ``m``.
    """
    asked = {url: (daemon, "m") for url, daemon in (daemons or {}).items()}
    server = ProxyServer(
        [
            *(EngineAddress(EngineRole.PREFILL, url, *asked.get(url, ())) for url in prefills),
            *(EngineAddress(EngineRole.DECODE, url, *asked.get(url, ())) for url in decodes),
        ],
        limits,
        also,
    )
    runner, url = await _serve(server.application(), **server.http_options())
    try:
        yield server, url
    finally:
        await runner.cleanup()


async def say(url: str, *pieces: bytes, wait_s: float = 5.0) -> bytes:
    """Send these bytes to a proxy and read all that it says until it hangs up."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), wait_s)
    finally:
        await _closed(writer)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError, asyncio.CancelledError):
        await writer.wait_closed()


def post(path: str, body: bytes, *fields: str, version: str = "1.1") -> bytes:
    """A whole request with a JSON body, after which the connection is to end."""
    lines = [f"POST {path} HTTP/{version}", "Host: x", *fields, f"Content-Length: {len(body)}"]
    if not any(field.lower().startswith("content-type") for field in fields):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "Connection: close"]).encode() + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    """Of what ``say`` read; 0: nothing."""
    return int(answer.split(b" ", 2)[1]) if answer else 0
