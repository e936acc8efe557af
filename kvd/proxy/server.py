"""The HTTP side of the proxy: what a client may ask, what goes on to engines, health.

Who may hang here is bounded by the HTTP server: a connection without the whole head of a request is
closed after ``head_s``, whether it has sent half of one or nothing. Bodies are read here, within
bounds of time and of memory for all of them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import resource
import traceback
from typing import TYPE_CHECKING, Final, TypedDict

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from kvd.errors import KvdError
from kvd.proxy.bodies import (
    VALUE_BYTES,
    Upload,
    error_body,
    json_bytes,
    most_values_in,
    new_traceparent,
    parse_body,
    parse_json,
    worked,
)
from kvd.proxy.engines import EngineRole, EngineState, ProxiedEngine
from kvd.proxy.exchange import EngineCall, EngineClient, EngineFault, FaultKind
from kvd.proxy.headers import check_headers, media_type, own_request_headers, proxy_name
from kvd.proxy.limits import ProxyLimits
from kvd.proxy.lookup import PromptLookup
from kvd.proxy.metrics import METRICS_TYPE, ProxyMetrics, RequestEnd
from kvd.proxy.paths import (
    BAD_REQUEST,
    METHOD_NOT_ALLOWED,
    OWN_PAGES,
    NotForwarded,
    check_forwarded,
    target_of,
)
from kvd.proxy.relay import CLIENT_ERROR, JSON, OK, SERVER_ERROR, UNAVAILABLE, Relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from kvd.proxy.engines import EngineAddress
    from kvd.proxy.paths import RequestTarget

TOO_SLOW: Final = 408
TOO_LARGE: Final = 413
UNSUPPORTED_MEDIA: Final = 415
NOT_MET: Final = 417

FORM: Final = "multipart/form-data"
URLENCODED: Final = "application/x-www-form-urlencoded"
UPLOADED: Final = ("audio/", "image/", "video/", "application/octet-stream")
"""What is no JSON and goes through unread, beside forms."""

LINGER_S: Final = 2.0
"""After a refusal, for what a client still sends: it could not read the answer otherwise."""

WANTED_DESCRIPTORS: Final = 65_536
BACKLOG: Final = 1024

_said: Final = logging.getLogger("kvd.proxy")


class HttpOptions(TypedDict):
    """Of aiohttp's server: the arguments that one is run with."""

    handler_cancellation: bool
    keepalive_timeout: float
    auto_decompress: bool
    lingering_time: float
    access_log: None
    logger: logging.Logger


class BodyBudget:
    """The memory of all request bodies in JSON that are being served.

    Attributes:
        taken_bytes: by those that there are.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.taken_bytes = 0

    def take(self, n_bytes: int) -> None:
        """Count some more of one body.

        Raises:
            NotForwarded: 503: there is no room for it now.
        """
        if self.taken_bytes + n_bytes > self._most_bytes:
            raise NotForwarded(
                UNAVAILABLE,
                f"the proxy holds {self.taken_bytes} bytes of other requests, of "
                f"{self._most_bytes}: try again",
            )
        self.taken_bytes += n_bytes


class ProxyServer:
    """The proxy: engines behind it, clients before it.

    Args:
        addresses: of the engines.
        limits: of time and size.
        also: further paths that go on to engines, as ``paths.FORWARDED`` has them.
    """

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        limits: ProxyLimits | None = None,
        also: tuple[str, ...] = (),
        *,
        in_turn: bool = False,
    ) -> None:
        self._in_turn = in_turn
        self.limits = limits if limits is not None else ProxyLimits()
        self.engines = tuple(
            ProxiedEngine(address, doubted_s=self.limits.doubted_s) for address in addresses
        )
        self._also = also
        self._name = proxy_name()
        self._budget = BodyBudget(self.limits.bodies_bytes)
        self._metrics = ProxyMetrics(self.engines, lambda: asyncio.get_running_loop().time())
        self._client: EngineClient | None = None
        self._lookup: PromptLookup | None = None
        self._relay: Relay | None = None

    def application(self) -> web.Application:
        """What an HTTP server runs."""
        app = web.Application(client_max_size=self.limits.body_bytes)
        # Routers read a path in their own way; here it is read in one, as it came.
        app.router.add_route("*", "/{path:.*}", self._serve, expect_handler=self._expect)
        app.cleanup_ctx.append(self._up)
        return app

    def http_options(self) -> HttpOptions:
        """How the HTTP server is to run it; without these a client may hang as long as it likes."""
        quiet = logging.getLogger("kvd.proxy.http")
        # What cannot be parsed is answered with 400; a traceback for each is a gift to who sends
        # them.
        quiet.setLevel(logging.CRITICAL)
        return HttpOptions(
            # Who hangs up ends the engine's request too.
            handler_cancellation=True,
            keepalive_timeout=self.limits.head_s,
            auto_decompress=False,
            lingering_time=min(LINGER_S, self.limits.head_s),
            access_log=None,
            logger=quiet,
        )

    async def _up(self, app: web.Application) -> AsyncIterator[None]:
        """Ask the engines once before anybody is served, and again and again meanwhile."""
        client = EngineClient(self.limits, self._metrics)
        lookup = PromptLookup(client, self.engines, self._metrics, self.limits.tokenize_s)
        self._client, self._lookup = client, lookup
        self._relay = Relay(
            client,
            self.engines,
            lookup,
            self._metrics,
            self.limits,
            self._name,
            in_turn=self._in_turn,
        )
        asking = [asyncio.create_task(self._keep_asking(engine, lookup)) for engine in self.engines]
        await self._ask_all()
        await asyncio.gather(
            *(lookup.namespaces.ask(engine, self.limits.health_s) for engine in self.engines)
        )
        try:
            yield
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await lookup.close()
            await client.close()

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._ask(engine) for engine in self.engines))

    async def _keep_asking(self, engine: ProxiedEngine, lookup: PromptLookup) -> None:
        while True:
            await asyncio.sleep(self.limits.health_s)
            await self._ask(engine)
            await lookup.namespaces.ask(engine, self.limits.health_s)

    async def _ask(self, engine: ProxiedEngine) -> None:
        """Ask an engine for its health. What it says late, or not at all, is no proof of death."""
        assert self._client is not None
        clock = asyncio.get_running_loop().time
        headers = own_request_headers(CIMultiDict())
        if engine.address.authorization:
            headers["authorization"] = engine.address.authorization
        asks = EngineCall(method="GET", target="/health", headers=headers, anew=True)
        until_s = clock() + self.limits.health_s
        try:
            async with self._client.asked(engine, asks, until_s=until_s) as answer:
                status = answer.status
        except EngineFault as fault:
            if fault.fault is FaultKind.SLOW:
                why = f"/health took more than {self.limits.health_s:g} s"
                engine.was_late(clock(), why)
            elif fault.fault is not FaultKind.OURS:
                engine.refused(clock(), f"/health: {fault.why}")
            return
        # 401 and 404 are said by engines that are well and have no such page for the proxy.
        if status == OK or CLIENT_ERROR <= status < SERVER_ERROR:
            engine.said_well(clock())
        else:
            engine.refused(clock(), f"/health says {status}")

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """Judge a request before its client sends the body."""
        try:
            _check_expected(", ".join(request.headers.getall("expect")))
            self._judged(request)
        except NotForwarded as error:
            self._count(RequestEnd.REFUSED)
            return _refused(error)
        if request.version < HttpVersion11:
            # It knows no answer before the answer (RFC 9110, 10.1.1).
            return None
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # That was no part of the answer.
        request.writer.output_size = 0
        return None

    def _judged(self, request: web.Request) -> RequestTarget:
        """Where a request goes, if it goes anywhere.

        Raises:
            NotForwarded: with what is wrong with it.
        """
        target = target_of(request.raw_path)
        check_headers(request.headers, self._name)
        if target.path not in OWN_PAGES:
            check_forwarded(request.method, target.path, self._also)
        length = request.content_length
        if length is not None and length > self.limits.body_bytes and not _is_upload(request):
            raise _too_large(self.limits.body_bytes)
        return target

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, whatever it is."""
        try:
            response = await self._answered(request)
            if not response.prepared:
                async with asyncio.timeout(self.limits.write_s):
                    await response.prepare(request)
                    await response.write_eof()
        except asyncio.CancelledError:
            self._count(RequestEnd.CLIENT_GONE)
            raise
        except (ConnectionError, TimeoutError):
            self._count(RequestEnd.CLIENT_GONE)
            request.protocol.force_close()
            return web.Response()
        return response

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        with contextlib.ExitStack() as held:
            try:
                target = self._judged(request)
                if target.path == "/health" and request.method in {"GET", "HEAD"}:
                    return self._health()
                if target.path == "/metrics" and request.method in {"GET", "HEAD"}:
                    page = self._metrics.page()
                    return web.Response(body=page, headers={"content-type": METRICS_TYPE})
                return await self._passed_on(request, target, held)
            except NotForwarded as error:
                self._count(
                    RequestEnd.CLIENT_SLOW if error.status == TOO_SLOW else RequestEnd.REFUSED
                )
                return _refused(error)
            except KvdError as error:
                self._count(RequestEnd.REFUSED)
                return _refused(NotForwarded(BAD_REQUEST, error.refusal.message))
            except (ConnectionError, TimeoutError):
                raise
            except Exception as error:
                self._count(RequestEnd.INTERNAL)
                where = traceback.extract_tb(error.__traceback__)[-1]
                # No text of the error: there may be a header in it, or a prompt.
                _said.error("%s at %s:%s", type(error).__name__, where.filename, where.lineno)
                raise

    async def _passed_on(
        self, request: web.Request, target: RequestTarget, held: contextlib.ExitStack
    ) -> web.StreamResponse:
        assert self._relay is not None  # it is there before anybody is served
        trace = new_traceparent()
        if target.is_for_tokens and request.method == "POST":
            self._metrics.requests.inc()
            raw = await self._whole_body(request, held)
            n_bytes = len(raw)
            body = await worked(n_bytes, parse_body, raw, self.limits.body_values)
            del raw
            return await self._relay.serve(request, target.as_it_came, body, n_bytes, trace)
        if target.path in OWN_PAGES:
            raise NotForwarded(METHOD_NOT_ALLOWED, f"{target.path} is read with GET")
        self._metrics.other_requests.inc()
        if not request.can_read_body:
            return await self._relay.forward(request, target.as_it_came, None, trace)
        if _is_upload(request):
            next_piece = functools.partial(self._next_piece, request, self._body_until_s())
            upload = Upload(next_piece, is_form=media_type(request.headers) == FORM)
            await upload.begin()
            return await self._relay.forward(request, target.as_it_came, upload, trace)
        if media_type(request.headers) == URLENCODED:
            raise NotForwarded(UNSUPPORTED_MEDIA, "engines take JSON, and forms with a boundary")
        raw = await self._whole_body(request, held)
        if not raw:
            return await self._relay.forward(request, target.as_it_came, None, trace)
        found = await worked(len(raw), parse_json, raw, self.limits.body_values)
        told = await worked(len(raw), json_bytes, found)
        return await self._relay.forward(request, target.as_it_came, told, trace)

    async def _whole_body(self, request: web.Request, held: contextlib.ExitStack) -> bytes:
        """A body in JSON; its bytes are given back when ``held`` closes."""
        taken_bytes = 0

        def give_back() -> None:
            self._budget.taken_bytes -= taken_bytes

        held.callback(give_back)
        pieces = []
        until_s = self._body_until_s()
        while piece := await self._next_piece(request, until_s):
            if taken_bytes + len(piece) > self.limits.body_bytes:
                raise _too_large(self.limits.body_bytes)
            self._budget.take(len(piece))
            taken_bytes += len(piece)
            pieces.append(piece)
        raw = b"".join(pieces)
        # What is made of it counts too, or a few megabytes of brackets would be as many gigabytes.
        values_bytes = VALUE_BYTES * min(most_values_in(raw), self.limits.body_values)
        self._budget.take(values_bytes)
        taken_bytes += values_bytes
        return raw

    async def _next_piece(self, request: web.Request, until_s: float) -> bytes:
        """Of a request's body; empty at its end.

        Raises:
            NotForwarded: it did not come in time, or is no body.
        """
        next_s = asyncio.get_running_loop().time() + self.limits.body_idle_s
        try:
            async with asyncio.timeout_at(min(next_s, until_s)):
                return await request.content.readany()
        except TimeoutError:
            why = "the body of the request did not come in time"
            raise NotForwarded(TOO_SLOW, why) from None
        except (aiohttp.ClientError, web.RequestPayloadError, ValueError) as error:
            raise NotForwarded(BAD_REQUEST, "the body of the request cannot be read") from error

    def _body_until_s(self) -> float:
        return asyncio.get_running_loop().time() + self.limits.body_s

    def _health(self) -> web.Response:
        now_s = asyncio.get_running_loop().time()
        is_up = any(
            engine.state(now_s) is not EngineState.DOWN
            for engine in self.engines
            if engine.address.role is EngineRole.DECODE
        )
        said = json.dumps({"engines": [self._evidence(engine, now_s) for engine in self.engines]})
        return web.Response(
            status=OK if is_up else UNAVAILABLE, body=said.encode(), content_type=JSON
        )

    def _evidence(self, engine: ProxiedEngine, now_s: float) -> dict[str, object]:
        """What is known of one engine, and since when."""
        assert self._lookup is not None
        state = engine.state(now_s)
        said: dict[str, object] = {
            "role": engine.address.role.value,
            "url": engine.address.url,
            "up": state is not EngineState.DOWN,
            "state": state.name.lower(),
            "why": engine.why,
            "answered_s_ago": _ago_s(engine.answered_s, now_s),
            "failed_s_ago": _ago_s(engine.failed_s, now_s),
            "failed_in_a_row": engine.failed_in_a_row,
            "open_requests": engine.open_requests,
            "sent_requests": engine.sent_requests,
            "waiting_tokens": engine.waiting_tokens,
        }
        if (counts := self._lookup.counts.get(engine)) is not None:
            said["lookups"] = {
                "namespace": self._lookup.namespaces.of(engine),
                "asked": counts.asked,
                "answered": counts.answered,
                "tokens": counts.tokens,
                "cached_tokens": counts.cached_tokens,
                "no_namespace": counts.no_namespace,
                "why_not_asked": self._lookup.why_not_asked(engine),
            }
        return said

    def _count(self, end: RequestEnd) -> None:
        self._metrics.ended.labels(end.value).inc()


def _is_upload(request: web.Request) -> bool:
    media = media_type(request.headers)
    return media == FORM or media.startswith(UPLOADED)


def _check_expected(value: str) -> None:
    if value.strip().lower() != "100-continue":
        raise NotForwarded(NOT_MET, "the proxy meets no expectation but 100-continue")


def _too_large(most_bytes: int) -> NotForwarded:
    return NotForwarded(TOO_LARGE, f"the body is longer than {most_bytes} bytes")


def _refused(error: NotForwarded) -> web.Response:
    kinds = {UNAVAILABLE: "service_unavailable", SERVER_ERROR: "internal_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    response = web.Response(
        status=error.status,
        body=error_body(str(error), kind, error.status),
        content_type=JSON,
        headers={"retry-after": "1"} if error.status == UNAVAILABLE else None,
    )
    # What may still come of its body is nobody's.
    response.force_close()
    return response


def _ago_s(then_s: float, now_s: float) -> float | None:
    return round(now_s - then_s, 1) if then_s > float("-inf") else None


def run(
    addresses: Sequence[EngineAddress],
    host: str,
    port: int,
    limits: ProxyLimits | None = None,
    also: tuple[str, ...] = (),
    *,
    in_turn: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; then end what there is, within ``stop_s``."""
    _allow_descriptors()
    server = ProxyServer(addresses, limits, also, in_turn=in_turn)
    web.run_app(
        server.application(),
        host=host,
        port=port,
        backlog=BACKLOG,
        print=None,
        # It waits so long for requests to end, and once more for those that it has told to.
        shutdown_timeout=server.limits.stop_s / 2,
        **server.http_options(),
    )


def _allow_descriptors() -> None:
    """A stream takes two; the limit that a shell gives by default is for a thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
