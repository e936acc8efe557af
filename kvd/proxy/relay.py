"""One request: prefilled by one engine, decoded by another, streamed to whoever asked.

    choose --> prefill (one token; the answer says where the KV is) --> decode, streamed
      |            | it failed                                             | it is down
      |            v                                                       v
      |          decode, which computes the prompt itself                another engine, likewise
      +-- nobody decodes: 503

Where the prefill engine opens rooms that it is told of both are asked at once, see ``at_once``.

A client is told nothing before the first byte of an answer is there, so until then another engine
can be tried: after 429 and 503, after a connection that failed or broke, after nonsense, and after
silence. Whoever asked may hang up at any time; then the engine's request is hung up on too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from aiohttp import web

from kvd.proxy.at_once import PrefillEnd, PromptAtOnce, may_meet, room_in, to_come
from kvd.proxy.bodies import (
    decode_body,
    error_body,
    json_bytes,
    new_room,
    prefill_body,
    transfer_in,
    worked,
)
from kvd.proxy.engines import EngineRole, EngineState, soonest
from kvd.proxy.exchange import EngineCall, EngineFault, FaultKind, pieces_of, whole_of
from kvd.proxy.headers import answer_headers, media_type, own_request_headers, request_headers
from kvd.proxy.metrics import RequestEnd
from kvd.proxy.tries import TOO_MANY, HeardAnswer, Tries

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator

    import aiohttp
    from multidict import CIMultiDict

    from kvd.proxy.bodies import Body, Upload
    from kvd.proxy.engines import EngineChoice, ProxiedEngine
    from kvd.proxy.exchange import EngineClient
    from kvd.proxy.limits import ProxyLimits
    from kvd.proxy.lookup import CachedPrompt, PromptLookup
    from kvd.proxy.metrics import ProxyMetrics

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"

OK: Final = 200
REDIRECTS: Final = frozenset({300, 301, 302, 303, 305, 307, 308})
BUSY: Final = frozenset({TOO_MANY, 503})
"""What an engine says that cannot take one more, or none at all; another one may."""
CLIENT_ERROR: Final = 400
SERVER_ERROR: Final = 500
BAD_GATEWAY: Final = 502
UNAVAILABLE: Final = 503
TOO_LATE: Final = 504

MOST_HELD_BYTES: Final = 256 * 1024
"""Of an answer in JSON, before any of it goes to the client: an end that lies shows by then."""

MOST_PREFILL_BYTES: Final = 64 * 2**20


class AskedTokens(NamedTuple):
    """A request for tokens.

    Attributes:
        target: its path and query.
        body: what was asked; of ``n_bytes``, as it came.
        headers: the client's, as engines are told.
        prompt: how much of it each node has.
    """

    target: str
    body: Body
    n_bytes: int
    headers: CIMultiDict[str]
    prompt: CachedPrompt


class ClientAway(Exception):
    """Whoever asked is gone, or does not read on."""


class Relay:
    """Requests on their way through the proxy."""

    def __init__(
        self,
        client: EngineClient,
        engines: tuple[ProxiedEngine, ...],
        lookup: PromptLookup,
        metrics: ProxyMetrics,
        limits: ProxyLimits,
        name: str,
        *,
        in_turn: bool = False,
    ) -> None:
        self._in_turn = in_turn
        self._client = client
        self._engines = engines
        self._lookup = lookup
        self._metrics = metrics
        self._limits = limits
        self._name = name
        self._now_s = asyncio.get_running_loop().time

    async def serve(
        self, request: web.Request, target: str, body: Body, n_bytes: int, trace: str
    ) -> web.StreamResponse:
        """Answer one request for tokens; ``n_bytes``: of its body, as it came."""
        headers = request_headers(request.headers, self._name, trace, "")
        prompt = await self._lookup.cached(body, headers, n_bytes)
        asked = AskedTokens(target, body, n_bytes, headers, prompt)
        prefills = self._tries(is_for_tokens=True)
        at_once = self._at_once(asked, prefills)
        end = PrefillEnd(is_failed=True, may_retry=prompt.is_one)
        if at_once is not None:
            try:
                response, end = await self._decoded(request, asked, end, at_once)
            finally:
                await at_once.close()
            if response is not None:
                return response
        if end.may_retry:
            end = await self._prefilled(asked, prefills)
        elif end.is_failed and at_once is not None:
            self._metrics.prefill_failed.inc()
        if end.refusal is not None:
            return self._ended(RequestEnd.ANSWERED, end.refusal.for_client())
        response, _ = await self._decoded(request, asked, end, None)
        assert response is not None
        return response

    async def _decoded(
        self,
        request: web.Request,
        asked: AskedTokens,
        end: PrefillEnd,
        at_once: PromptAtOnce | None,
    ) -> tuple[web.StreamResponse | None, PrefillEnd]:
        """The answer of a decode engine that is told where the KV is, or is going to be.

        None, and what came of the prompt, where nothing comes of it in the room that it was told.
        """
        body, n_bytes, headers, prompt = asked.body, asked.n_bytes, asked.headers, asked.prompt
        transfer = end.transfer if at_once is None else at_once.transfer

        def without_kv() -> bytes:
            # Whoever reads KV a second time may read what lies there by then.
            nonlocal transfer
            transfer = None
            return json_bytes(decode_body(body, None))

        tries = self._tries(is_for_tokens=True)
        while tries.may_go_on:
            chosen = soonest(
                self._of(EngineRole.DECODE, tries.without),
                prompt.cached,
                prompt.n_tokens,
                self._now_s(),
            )
            if chosen is None:
                break
            engine = chosen.engine
            told = own_request_headers(headers)
            for kept in ("accept", "accept-encoding"):
                # The answer goes through as it is, so it is the client's that counts.
                told.popall(kept)
                told.extend((kept, value) for value in headers.getall(kept, ()))
            call = EngineCall(
                method="POST",
                target=asked.target,
                headers=self._with_credentials(told, engine),
                body=await worked(n_bytes, json_bytes, decode_body(body, transfer)),
                again=without_kv if transfer is not None else None,
            )
            with self._at(engine, chosen.lacking_tokens) as begun:
                self._lookup.note(engine, prompt.beginning)
                answer = self._tried(request, engine, call, tries, begun)
                awaited = at_once if transfer is not None else None
                response = await (answer if awaited is None else awaited.beside(answer, tries))
            if response is not None:
                return response, end
            if awaited is not None and awaited.end is not None:
                return None, awaited.end
            if tries.may_have_taken:
                transfer = None
        return self._no_answer(tries), end

    def _at_once(self, asked: AskedTokens, tries: Tries) -> PromptAtOnce | None:
        """Have it computed where a room is opened for it meanwhile; None: there is no such engine.

        The engine is the one that would be asked in turn, or none.
        """
        prompt, now_s = asked.prompt, self._now_s()
        if self._in_turn or not prompt.is_one:
            return None
        chosen = self._prefill_engine(asked, set())
        decode = soonest(self._of(EngineRole.DECODE, set()), prompt.cached, prompt.n_tokens, now_s)
        if chosen is None or decode is None or not may_meet(chosen.engine, decode.engine):
            return None
        room = new_room()
        transfer = to_come(chosen.engine.opens_at, room)
        # Counted now, and not when its task begins: the next request may be here before that.
        counted = contextlib.ExitStack()
        counted.enter_context(self._at(chosen.engine, chosen.lacking_tokens))
        prefill = self._prefilled_at(asked, chosen.engine, room, tries)
        return PromptAtOnce(prefill, transfer, counted.close)

    async def forward(
        self, request: web.Request, target: str, body: bytes | Upload | None, trace: str
    ) -> web.StreamResponse:
        """Hand on a request that is not for tokens, as it is, to an engine that decodes."""
        headers = request_headers(request.headers, self._name, trace, "")
        if not isinstance(body, bytes | None) and request.content_length is not None:
            headers["content-length"] = str(request.content_length)
        tries = self._tries(is_for_tokens=False)
        while tries.may_go_on:
            chosen = soonest(self._of(EngineRole.DECODE, tries.without), {}, 0, self._now_s())
            if chosen is None:
                break
            call = EngineCall(
                method=request.method,
                target=target,
                headers=self._with_credentials(headers, chosen.engine),
                body=body,
            )
            with self._at(chosen.engine, 0) as begun:
                response = await self._tried(request, chosen.engine, call, tries, begun)
            if response is not None:
                return response
            if not isinstance(body, bytes | None):
                # What was sent on was not kept.
                break
        return self._no_answer(tries)

    def _prefill_engine(
        self, asked: AskedTokens, without: set[ProxiedEngine]
    ) -> EngineChoice | None:
        now_s = self._now_s()
        able = [
            engine for engine in self._of(EngineRole.PREFILL, without) if engine.may_prefill(now_s)
        ]
        return soonest(able, asked.prompt.cached, asked.prompt.n_tokens, now_s)

    async def _prefilled(self, asked: AskedTokens, tries: Tries) -> PrefillEnd:
        """Where a prefill engine says that the KV is, or its refusal, which is for the client."""
        while tries.may_go_on:
            chosen = self._prefill_engine(asked, tries.without)
            if chosen is None:
                break
            with self._at(chosen.engine, chosen.lacking_tokens):
                end = await self._prefilled_at(asked, chosen.engine, new_room(), tries)
            if not end.is_failed:
                return end
            if not end.may_retry:
                break
        if tries.without:
            self._metrics.prefill_failed.inc()
        return PrefillEnd()

    async def _prefilled_at(
        self, asked: AskedTokens, engine: ProxiedEngine, room: str, tries: Tries
    ) -> PrefillEnd:
        """What one prefill engine says."""
        fuller_node = self._lookup.fuller_node(engine, asked.prompt)
        told = prefill_body(asked.body, room, fuller_node)
        call = EngineCall(
            method="POST",
            target=asked.target,
            headers=self._with_credentials(own_request_headers(asked.headers), engine),
            body=await worked(asked.n_bytes, json_bytes, told),
        )
        self._lookup.note(engine, asked.prompt.beginning)
        try:
            answer = await self._heard(engine, call)
            if answer.status == OK:
                transfer = await worked(len(answer.body), _transfer_of, answer)
                engine.served(self._now_s())
                node, opened = room_in(transfer) or ("", "")
                engine.opens_at = node if opened == room else ""
                return PrefillEnd(transfer)
        except EngineFault as fault:
            self._note_fault(engine, fault)
            tries.note_fault(engine, fault)
            # Where it is decoded it may well be computed sooner than at another one.
            return PrefillEnd(is_failed=True, may_retry=fault.fault is not FaultKind.SLOW)
        if answer.status < SERVER_ERROR and answer.status not in BUSY:
            # What the client did wrong the decode engine would refuse alike.
            engine.served(self._now_s())
            return PrefillEnd(refusal=answer)
        self._note_status(engine, answer.status, answer.headers.get("retry-after", ""))
        tries.note_busy(engine, answer)
        return PrefillEnd(is_failed=True, may_retry=True)

    async def _heard(self, engine: ProxiedEngine, call: EngineCall) -> HeardAnswer:
        """The answer of a prefill engine, as a whole."""
        until_s = self._now_s() + self._limits.prefill_s
        async with self._client.asked(engine, call, until_s=until_s) as answer:
            self._check_head(answer)
            raw = await whole_of(answer, until_s=until_s, most_bytes=MOST_PREFILL_BYTES)
            return HeardAnswer(answer.status, self._headers_of(answer), raw)

    async def _tried(
        self,
        request: web.Request,
        engine: ProxiedEngine,
        call: EngineCall,
        tries: Tries,
        begun: contextlib.ExitStack,
    ) -> web.StreamResponse | None:
        """The engine's answer, gone to the client; None if another engine may be tried."""
        first_until_s = min(self._now_s() + self._limits.first_byte_s, tries.until_s)
        try:
            async with self._client.asked(engine, call, until_s=first_until_s) as answer:
                self._check_head(answer)
                pieces = pieces_of(
                    answer,
                    first_until_s=first_until_s,
                    idle_s=self._limits.idle_s,
                    until_s=tries.until_s,
                )
                async with contextlib.aclosing(pieces):
                    held, is_whole = await _held(answer, pieces)
                    begun.close()
                    tries.is_answering = True
                    headers = self._headers_of(answer)
                    if answer.status in BUSY and is_whole:
                        after = headers.get("retry-after", "")
                        self._note_status(engine, answer.status, after)
                        tries.note_busy(engine, HeardAnswer(answer.status, headers, held))
                        return None
                    if tries.is_for_tokens and answer.status == OK:
                        _check_tokens(answer, held)
                    if answer.status >= SERVER_ERROR:
                        # Its client is told; but an engine that fails fast must not look idle.
                        self._note_status(engine, answer.status)
                    else:
                        engine.served(self._now_s())
                    if is_whole and request.method != "HEAD":
                        headers.popall("content-length", None)
                        whole = HeardAnswer(answer.status, headers, held)
                        return self._ended(RequestEnd.ANSWERED, whole.for_client())
                    return await self._streamed(request, engine, answer, headers, held, pieces)
        except EngineFault as fault:
            self._note_fault(engine, fault)
            self._metrics.decode_failed.inc()
            tries.note_fault(engine, fault)
            return None

    async def _streamed(
        self,
        request: web.Request,
        engine: ProxiedEngine,
        answer: aiohttp.ClientResponse,
        headers: CIMultiDict[str],
        held: bytes,
        pieces: AsyncGenerator[bytes, None],
    ) -> web.StreamResponse:
        """Pass an answer on as it comes."""
        response = web.StreamResponse(status=answer.status, headers=headers)
        end = b""
        try:
            await self._to_client(response.prepare(request))
            if held:
                await self._to_client(response.write(held))
                end = held[-2:]
            async for piece in pieces:
                engine.served(self._now_s())
                await self._to_client(response.write(piece))
                end = (end + piece)[-2:]
            await self._to_client(response.write_eof())
        except EngineFault as fault:
            # In the middle of an answer, which cannot be taken back: the client must see that it is
            # cut, so the connection ends without an end of the answer.
            self._note_fault(engine, fault)
            self._metrics.cut.inc()
            self._count(RequestEnd.CUT)
            await self._cut(request, response, engine, fault, is_between=end == b"\n\n")
        except (ClientAway, ConnectionError):
            self._count(RequestEnd.CLIENT_GONE)
            _abort(request)
        else:
            self._count(RequestEnd.ANSWERED)
        return response

    async def _cut(
        self,
        request: web.Request,
        response: web.StreamResponse,
        engine: ProxiedEngine,
        fault: EngineFault,
        *,
        is_between: bool,
    ) -> None:
        is_plain = response.headers.get("content-encoding", "identity") == "identity"
        if is_between and is_plain and media_type(response.headers) == EVENTS:
            said = error_body(
                f"the answer broke off: {engine.address.role} engine: {fault.why}",
                "engine_error",
                BAD_GATEWAY,
            )
            with contextlib.suppress(ClientAway, ConnectionError):
                await self._to_client(response.write(b"data: " + said + b"\n\n"))
        elif not {"transfer-encoding", "content-length"} & {
            name.lower() for name in response.headers
        }:
            # To a client of HTTP/1.0 the end of the connection is the end of the answer, unless the
            # connection is reset.
            _reset(request)
            return
        request.protocol.force_close()

    async def _to_client(self, step: Awaitable[object]) -> None:
        """Whatever is written has an end: a client that reads nothing holds an engine."""
        try:
            async with asyncio.timeout(self._limits.write_s):
                await step
        except TimeoutError as error:
            raise ClientAway from error

    def _check_head(self, answer: aiohttp.ClientResponse) -> None:
        """What no engine says to a request of this proxy."""
        if answer.status in REDIRECTS:
            raise EngineFault(
                FaultKind.LIED,
                f"it sends the request elsewhere ({answer.status}), which is not done",
            )
        if answer.status < OK:
            raise EngineFault(FaultKind.LIED, f"its status is {answer.status}")

    def _headers_of(self, answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
        try:
            return answer_headers(answer.headers, self._name)
        except ValueError as error:
            raise EngineFault(FaultKind.LIED, str(error)) from error

    def _with_credentials(
        self, headers: CIMultiDict[str], engine: ProxiedEngine
    ) -> CIMultiDict[str]:
        if engine.address.authorization:
            headers = headers.copy()
            headers["authorization"] = engine.address.authorization
        return headers

    def _note_fault(self, engine: ProxiedEngine, fault: EngineFault) -> None:
        address = engine.address
        self._metrics.faults.labels(address.role.value, address.url, fault.fault.value).inc()
        if fault.fault is FaultKind.UNREACHABLE:
            engine.refused(self._now_s(), fault.why)
        elif fault.fault is not FaultKind.OURS:
            engine.failed(self._now_s(), fault.why)

    def _note_status(self, engine: ProxiedEngine, status: int, retry_after: str = "") -> None:
        """It answered, so it is there; but it is not well, or has enough to do."""
        address = engine.address
        self._metrics.faults.labels(address.role.value, address.url, f"said-{status}").inc()
        if status in BUSY:
            for_s = float(retry_after) if retry_after.isdecimal() else 1.0
            engine.was_busy(self._now_s(), for_s, f"it said {status}")
        else:
            engine.failed(self._now_s(), f"it said {status}")

    def _tries(self, *, is_for_tokens: bool) -> Tries:
        return Tries(self._now_s() + self._limits.answer_s, is_for_tokens=is_for_tokens)

    def _of(self, role: EngineRole, without: set[ProxiedEngine]) -> list[ProxiedEngine]:
        return [
            engine
            for engine in self._engines
            if engine.address.role is role and engine not in without
        ]

    @contextlib.contextmanager
    def _at(self, engine: ProxiedEngine, lacking_tokens: int) -> Iterator[contextlib.ExitStack]:
        """While a request is at an engine: what is given is closed when its answer begins."""
        engine.open_requests += 1
        engine.sent_requests += 1
        engine.waiting_tokens += lacking_tokens

        def began() -> None:
            engine.waiting_tokens -= lacking_tokens

        try:
            with contextlib.ExitStack() as waiting:
                waiting.callback(began)
                yield waiting
        finally:
            engine.open_requests -= 1

    def _count(self, end: RequestEnd) -> None:
        self._metrics.ended.labels(end.value).inc()

    def _ended(self, end: RequestEnd, response: web.StreamResponse) -> web.StreamResponse:
        self._count(end)
        return response

    def _no_answer(self, tries: Tries) -> web.StreamResponse:
        """What a client is told that no engine answered."""
        if tries.busy is not None:
            return self._ended(RequestEnd.OVERLOADED, tries.busy.for_client())
        faults = {fault.fault for fault in tries.faults}
        if FaultKind.SLOW in faults:
            last = tries.faults[-1]
            return self._ended(
                RequestEnd.TIMED_OUT,
                failed(TOO_LATE, f"a decode engine did not answer: {last.why}"),
            )
        if faults & {FaultKind.BROKE, FaultKind.LIED}:
            whys = "; ".join(dict.fromkeys(fault.why for fault in tries.faults))
            return self._ended(
                RequestEnd.BROKEN, failed(BAD_GATEWAY, f"no decode engine answered: {whys}")
            )
        if FaultKind.OURS in faults:
            return self._ended(
                RequestEnd.INTERNAL,
                failed(UNAVAILABLE, "the proxy's host has no descriptor or port left; try again"),
            )
        down = "; ".join(
            f"{engine.address.role} {engine.address.url}: {self._shown(engine)}"
            for engine in self._engines
        )
        return self._ended(
            RequestEnd.UNAVAILABLE, failed(UNAVAILABLE, f"no decode engine answers ({down})")
        )

    def _shown(self, engine: ProxiedEngine) -> str:
        state = engine.state(self._now_s())
        return "up" if state is EngineState.UP else f"{state.name.lower()}, {engine.why}"


def failed(status: int, why: str) -> web.Response:
    """An answer of the proxy itself that no engine could be had to answer."""
    kind = "service_unavailable" if status == UNAVAILABLE else "engine_error"
    headers = {"retry-after": "1"} if status == UNAVAILABLE else None
    return web.Response(
        status=status, body=error_body(why, kind, status), content_type=JSON, headers=headers
    )


async def _held(answer: aiohttp.ClientResponse, pieces: AsyncIterator[bytes]) -> tuple[bytes, bool]:
    """The beginning of an answer, before its client hears of it; whether that is all of it.

    Of JSON all that is not long, so that one which breaks off can be asked elsewhere; of all else
    the first piece.
    """
    is_json = media_type(answer.headers) == JSON or answer.status >= CLIENT_ERROR
    held = bytearray()
    async for piece in pieces:
        held += piece
        if not is_json or len(held) > MOST_HELD_BYTES:
            return bytes(held), False
    return bytes(held), True


def _check_tokens(answer: aiohttp.ClientResponse, held: bytes) -> None:
    media = media_type(answer.headers)
    if media == EVENTS or (held.lstrip()[:1] == b"{" and media in {JSON, ""}):
        return
    if answer.headers.get("content-encoding", "identity") != "identity" and media == JSON:
        return
    raise EngineFault(
        FaultKind.LIED,
        f"its answer is {media[:40] or 'nothing'!r} and no JSON object or event stream",
    )


def _transfer_of(answer: HeardAnswer) -> Body | None:
    try:
        return transfer_in(answer.body)
    except ValueError as error:
        raise EngineFault(FaultKind.LIED, str(error)[:200]) from error


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _reset(request: web.Request) -> None:
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
