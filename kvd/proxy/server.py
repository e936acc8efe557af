"""The HTTP side of the proxy: its pages, its health, its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvd.errors import KvdError
from kvd.proxy.bodies import error_body, new_traceparent, parse_body
from kvd.proxy.engines import EngineRole, ProxiedEngine
from kvd.proxy.lookup import PromptLookup
from kvd.proxy.relay import JSON, OK, UNAVAILABLE, Relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvd.proxy.engines import EngineAddress

MOST_BODY_BYTES: Final = 64 * 2**20
CONNECT_S: Final = 5.0
HEALTH_S: Final = 2.0
"""Between two questions to an engine whether it is there, and for its answer."""

PASSED_HEADERS: Final = (
    "authorization",
    "x-request-id",
    "traceparent",
    "tracestate",
    "x-session-id",
)
"""Of a request, on to the engines."""

BAD_REQUEST: Final = 400


class ProxyMetrics:
    """What a proxy counts, in a registry of its own."""

    def __init__(self, engines: Sequence[ProxiedEngine]) -> None:
        self.registry = registry = CollectorRegistry()
        counters = {
            "requests": "Requests for tokens.",
            "prefill_failed": "Prefills that failed; the prompt was computed where it was decoded.",
            "decode_failed": "Decode engines that were gone before an answer began.",
            "cut": "Answers that broke off in the middle.",
        }
        made = {
            name: Counter(f"kvd_proxy_{name}", about, registry=registry)
            for name, about in counters.items()
        }
        self.requests = made["requests"]
        self.prefill_failed = made["prefill_failed"]
        self.decode_failed = made["decode_failed"]
        self.cut = made["cut"]
        labels = ("role", "engine")
        up = Gauge("kvd_proxy_engine_up", "It answers.", labels, registry=registry)
        is_open = Gauge(
            "kvd_proxy_open_requests", "Sent to it, not ended.", labels, registry=registry
        )
        waiting = Gauge(
            "kvd_proxy_waiting_tokens",
            "Of prompts that it was sent and has not begun to answer.",
            labels,
            registry=registry,
        )

        def watch(one: ProxiedEngine) -> None:
            names = (one.address.role.value, one.address.url)
            up.labels(*names).set_function(lambda: float(one.is_up))
            is_open.labels(*names).set_function(lambda: float(one.open_requests))
            waiting.labels(*names).set_function(lambda: float(one.waiting_tokens))

        for one in engines:
            watch(one)


class ProxyServer:
    """The proxy: engines behind it, clients before it."""

    def __init__(self, addresses: Sequence[EngineAddress]) -> None:
        self.engines = tuple(ProxiedEngine(address) for address in addresses)
        self._metrics = ProxyMetrics(self.engines)
        self._relay: Relay | None = None
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """What an HTTP server runs."""
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_route("*", "/{path:.*}", self._forward)
        app.cleanup_ctx.append(self._up)
        return app

    async def _up(self, app: web.Application) -> AsyncIterator[None]:
        """Ask the engines once before anybody is served, and again and again meanwhile."""
        # An answer takes as long as it takes; only who cannot be reached is given up.
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
            self._session = session
            lookup = PromptLookup(session, self.engines)
            self._relay = Relay(session, self.engines, lookup, self._metrics)
            await self._ask_all(session)
            asking = asyncio.create_task(self._keep_asking(session))
            try:
                yield
            finally:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
                await lookup.close()

    async def _keep_asking(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            await self._ask_all(session)

    async def _ask_all(self, session: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(self._ask(session, one) for one in self.engines))

    async def _ask(self, session: aiohttp.ClientSession, engine: ProxiedEngine) -> None:
        limit = aiohttp.ClientTimeout(total=HEALTH_S)
        try:
            async with session.get(f"{engine.address.url}/health", timeout=limit) as answer:
                if answer.status == OK:
                    engine.came_up()
                else:
                    engine.went_down(f"/health says {answer.status}")
        except TimeoutError:
            engine.went_down(f"/health took more than {HEALTH_S:.0f} s")
        except aiohttp.ClientError as error:
            engine.went_down(str(error))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        assert self._relay is not None  # it is there before anybody is served
        self._metrics.requests.inc()
        try:
            body = parse_body(await request.read())
        except KvdError as error:
            said = error_body(str(error), "invalid_request_error", BAD_REQUEST)
            return web.Response(status=BAD_REQUEST, body=said, content_type=JSON)
        return await self._relay.serve(request, body, headers_of(request))

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._relay is not None  # it is there before anybody is served
        return await self._relay.forward(request, headers_of(request))

    async def _health(self, _: web.Request) -> web.Response:
        is_up = any(one.is_up for one in self.engines if one.address.role is EngineRole.DECODE)
        engines = [
            {
                "role": one.address.role.value,
                "url": one.address.url,
                "up": one.is_up,
                "why": one.why_down,
                "open_requests": one.open_requests,
            }
            for one in self.engines
        ]
        said = json.dumps({"engines": engines}).encode()
        return web.Response(status=OK if is_up else UNAVAILABLE, body=said, content_type=JSON)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        page = generate_latest(self._metrics.registry)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE_LATEST})


def headers_of(request: web.Request) -> dict[str, str]:
    """Of a request, what engines are told; a request without a trace begins one."""
    passed = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
    passed.setdefault("traceparent", new_traceparent())
    return passed


def run(addresses: Sequence[EngineAddress], host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    web.run_app(
        ProxyServer(addresses).application(),
        host=host,
        port=port,
        # Who hangs up ends the engine's request too.
        handler_cancellation=True,
        access_log=None,
        print=None,
    )
