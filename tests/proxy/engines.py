"""Engines that say what they were asked, and answer as engines of the HTTP API do."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from kvd.proxy.engines import EngineAddress, EngineRole
from kvd.proxy.server import ProxyServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HERE = "127.0.0.1"


@dataclass
class FakeEngine:
    """One engine; ``bodies`` and ``headers`` are of the requests that came."""

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
    url: str = ""

    def application(self) -> web.Application:
        """What it serves."""
        app = web.Application()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name}], "asked": request.path_qs})

    async def _tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": self.tokens, "count": len(self.tokens)})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return web.Response(
                status=self.status, body=self.refusal, content_type="application/json"
            )
        told = body.get("kv_transfer_params") or {}
        if told.get("do_remote_decode"):
            room = told["kvd"]["room"]
            answered = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p0", "room": room}}
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


async def _serve(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
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


@asynccontextmanager
async def proxy_for(
    prefills: list[str], decodes: list[str], **options: str
) -> AsyncIterator[tuple[ProxyServer, str]]:
    """A proxy for engines at these addresses; ``options`` are those of each."""
    server = ProxyServer(
        [
            *(EngineAddress(EngineRole.PREFILL, url, **options) for url in prefills),
            *(EngineAddress(EngineRole.DECODE, url, **options) for url in decodes),
        ]
    )
    runner, url = await _serve(server.application())
    try:
        yield server, url
    finally:
        await runner.cleanup()
