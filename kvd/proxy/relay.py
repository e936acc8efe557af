"""One request: prefilled by one engine, decoded by another, streamed to whoever asked.

    choose --> prefill (one token; the answer says where the KV is) --> decode, streamed
      |            | it failed                                             | it is down
      |            v                                                       v
      |          decode, which computes the prompt itself                another engine, likewise
      +-- nobody decodes: 503

Whoever asked may hang up at any time; then the engine's request is hung up on too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp
from aiohttp import web

from kvd.proxy.bodies import decode_body, error_body, new_room, prefill_body, transfer_in
from kvd.proxy.engines import EngineRole, soonest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.proxy.bodies import Body
    from kvd.proxy.engines import ProxiedEngine
    from kvd.proxy.lookup import CachedPrompt, PromptLookup
    from kvd.proxy.server import ProxyMetrics

JSON: Final = "application/json"
UNAVAILABLE: Final = 503
SERVER_ERROR: Final = 500
OK: Final = 200

KEPT_HEADERS: Final = ("content-type", "x-request-id", "retry-after")
"""Of an engine's answer; the rest is of its connection, or of nobody's interest."""


class EngineAnswer(NamedTuple):
    """What a prefill engine said: a status and a body that its client may need to see."""

    status: int
    body: bytes


class Relay:
    """Requests on their way through the proxy."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engines: tuple[ProxiedEngine, ...],
        lookup: PromptLookup,
        metrics: ProxyMetrics,
    ) -> None:
        self._session = session
        self._engines = engines
        self._lookup = lookup
        self._metrics = metrics

    async def serve(
        self, request: web.Request, body: Body, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Answer one request for tokens."""
        prompt = await self._lookup.cached(body)
        answer = await self._prefilled(request.path, body, headers, prompt)
        # What the client did wrong the decode engine would refuse alike.
        if answer is not None and OK < answer.status < SERVER_ERROR:
            return web.Response(status=answer.status, body=answer.body, content_type=JSON)
        transfer = transfer_in(answer.body) if answer is not None else None
        tried: set[ProxiedEngine] = set()
        while (
            chosen := soonest(self._of(EngineRole.DECODE, tried), prompt.cached, prompt.n_tokens)
        ) is not None:
            told = decode_body(body, transfer)
            with self._at(chosen.engine, chosen.lacking_tokens) as begun:
                self._lookup.note(chosen.engine, body)
                served = await self._stream(request, chosen.engine, told, headers, begun)
            if served is not None:
                return served
            tried.add(chosen.engine)
            # The room was that engine's: it may have taken it before it went.
            transfer = None
        return unavailable(self._engines)

    async def forward(self, request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
        """Hand on a request that is not for tokens, as it is, to an engine that decodes."""
        raw = await request.read()
        for engine in self._of(EngineRole.DECODE, set()):
            if not engine.is_up:
                continue
            try:
                async with self._session.request(
                    request.method,
                    f"{engine.address.url}{request.path_qs}",
                    data=raw or None,
                    headers={**headers, "content-type": request.content_type},
                ) as answer:
                    return web.Response(
                        status=answer.status, body=await answer.read(), headers=_kept(answer)
                    )
            except aiohttp.ClientConnectionError as error:
                engine.went_down(str(error))
        return unavailable(self._engines)

    async def _prefilled(
        self, path: str, body: Body, headers: Mapping[str, str], prompt: CachedPrompt
    ) -> EngineAnswer | None:
        """What a prefill engine said of the prompt; None if there is none or it failed."""
        chosen = soonest(self._of(EngineRole.PREFILL, set()), prompt.cached, prompt.n_tokens)
        if chosen is None:
            return None
        engine = chosen.engine
        with self._at(engine, chosen.lacking_tokens):
            self._lookup.note(engine, body)
            try:
                async with self._session.post(
                    f"{engine.address.url}{path}",
                    json=prefill_body(body, new_room()),
                    headers=headers,
                ) as answer:
                    said = EngineAnswer(answer.status, await answer.read())
            except aiohttp.ClientConnectorError as error:
                engine.went_down(str(error))
                said = EngineAnswer(UNAVAILABLE, b"")
            except (aiohttp.ClientError, TimeoutError):
                said = EngineAnswer(UNAVAILABLE, b"")
        if said.status >= SERVER_ERROR:
            self._metrics.prefill_failed.inc()
            return None
        return said

    async def _stream(
        self,
        request: web.Request,
        engine: ProxiedEngine,
        body: Body,
        headers: Mapping[str, str],
        begun: contextlib.ExitStack,
    ) -> web.StreamResponse | None:
        """The engine's answer as it comes; None if the engine is gone before it began one."""
        try:
            answer = await self._session.post(
                f"{engine.address.url}{request.path}", json=body, headers=headers
            )
        except aiohttp.ClientConnectionError as error:
            engine.went_down(str(error))
            self._metrics.decode_failed.inc()
            return None
        async with answer:
            response = web.StreamResponse(status=answer.status, headers=_kept(answer))
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    begun.close()
                    await response.write(piece)
            except aiohttp.ClientError as error:
                # In the middle of an answer, which cannot be taken back: the client must see that
                # it is cut, so the connection ends without an end of the answer.
                self._metrics.cut.inc()
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError(f"{engine.address.url}: {error}") from error
            await response.write_eof()
        return response

    def _of(self, role: EngineRole, without: set[ProxiedEngine]) -> list[ProxiedEngine]:
        return [one for one in self._engines if one.address.role is role and one not in without]

    @contextlib.contextmanager
    def _at(self, engine: ProxiedEngine, lacking_tokens: int) -> Iterator[contextlib.ExitStack]:
        """While a request is at an engine: what is given is closed when its answer begins."""
        engine.open_requests += 1
        engine.waiting_tokens += lacking_tokens

        def began() -> None:
            engine.waiting_tokens -= lacking_tokens

        try:
            with contextlib.ExitStack() as waiting:
                waiting.callback(began)
                yield waiting
        finally:
            engine.open_requests -= 1


def unavailable(engines: tuple[ProxiedEngine, ...]) -> web.Response:
    """Nobody is there who could decode; what each engine's last failure was."""
    down = "; ".join(
        f"{one.address.role} {one.address.url}: {one.why_down or 'up'}" for one in engines
    )
    return web.Response(
        status=UNAVAILABLE,
        body=error_body(f"no decode engine answers ({down})", "service_unavailable", UNAVAILABLE),
        content_type=JSON,
        headers={"retry-after": "1"},
    )


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in KEPT_HEADERS if name in answer.headers}
