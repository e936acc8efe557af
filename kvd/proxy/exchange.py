"""One request to one engine: sent, answered, and what may go wrong with either.

    connect --> head of the answer --> first piece --> piece --> ... --> end
      | UNREACHABLE   | BROKE, SLOW, LIED                  | the same, in the middle of an answer

A kept connection may have been closed by the engine at the moment when a request is put on it. That
is no fault of the engine; such a request is sent once more, on a new connection. It is not when any
byte of an answer has come, and not when its body cannot be sent again. Whether the engine had taken
it nobody knows, so the second one may say something else.
"""

from __future__ import annotations

import asyncio
import enum
import errno
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import hdrs
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from types import SimpleNamespace

    from multidict import CIMultiDict

    from kvd.proxy.bodies import Upload
    from kvd.proxy.engines import ProxiedEngine
    from kvd.proxy.limits import ProxyLimits
    from kvd.proxy.metrics import ProxyMetrics

KEPT_S: Final = 3.0
"""For connections to engines without a request; most servers of engines close theirs after 5 s."""

OWN_LACK: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
)
"""Errors of a connection that say something of the proxy's host, and nothing of the engine."""

AUTO_HEADERS: Final = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)


class FaultKind(enum.StrEnum):
    """What went wrong at an engine."""

    UNREACHABLE = "unreachable"
    """No connection: it cannot have got the request."""
    BROKE = "broke"
    """It hung up before the end of its answer."""
    SLOW = "slow"
    """It did not say the next thing in time."""
    LIED = "lied"
    """What it said is not HTTP, or not an answer to this."""
    OURS = "ours"
    """The proxy's host lacks descriptors, ports or memory."""


class EngineFault(Exception):
    """A try at an engine that came to nothing."""

    def __init__(self, fault: FaultKind, why: str) -> None:
        super().__init__(why)
        self.fault = fault
        self.why = why


@dataclass(frozen=True, kw_only=True)
class EngineCall:
    """What is asked of an engine.

    Attributes:
        method: of HTTP.
        target: path and query, as they go on the wire.
        headers: all but those that the HTTP client says itself.
        body: bytes, an upload that can be sent once, or nothing.
        again: what is sent in place of ``body`` to an engine that may have got that already.
        anew: on a connection of its own.
    """

    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes | Upload | None = None
    again: Callable[[], bytes] | None = None
    anew: bool = False


class EngineClient:
    """Connections to engines, kept and new ones."""

    def __init__(self, limits: ProxyLimits, metrics: ProxyMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._kept = _session(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S), limits, [tracing]
        )
        self._fresh = _session(aiohttp.TCPConnector(limit=0, force_close=True), limits, [])

    async def close(self) -> None:
        """Hang up on all engines."""
        await self._kept.close()
        await self._fresh.close()

    @asynccontextmanager
    async def asked(
        self, engine: ProxiedEngine, call: EngineCall, *, until_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of an engine's answer; whoever leaves early hangs up.

        ``until_s``: by the clock of the loop, when the head must have come.

        Raises:
            EngineFault: there is none.
        """
        try:
            async with asyncio.timeout_at(until_s):
                answer = await self._open(engine, call)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _raise_client_s(call)
            raise fault_of(error, "of the head of an answer") from error
        async with answer:
            yield answer

    async def _open(self, engine: ProxiedEngine, call: EngineCall) -> aiohttp.ClientResponse:
        if call.anew or not isinstance(call.body, bytes | None):
            # What is sent once must not meet a connection that was closed meanwhile.
            return await _send(self._fresh, engine, call)
        met: dict[str, bool] = {}
        try:
            return await _send(self._kept, engine, call, met)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # What there was of a head is in the place of the sentence.
            has_begun = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(
                error.message, str
            )
            if not met.get("reused") or has_begun:
                raise
            self._metrics.stale.inc()
            if call.again is not None:
                call = replace(call, body=call.again())
            return await _send(self._fresh, engine, call)


async def pieces_of(
    answer: aiohttp.ClientResponse, *, first_until_s: float, idle_s: float, until_s: float
) -> AsyncGenerator[bytes, None]:
    """The body of an answer as it comes, unpacked by nobody.

    Args:
        answer: whose head has come.
        first_until_s: by the clock of the loop, for the first piece.
        idle_s: between two pieces.
        until_s: for the last one.

    Raises:
        EngineFault: it broke off, or the next piece did not come in time.
    """
    now_s = asyncio.get_running_loop().time
    next_until_s = first_until_s
    while True:
        try:
            async with asyncio.timeout_at(min(next_until_s, until_s)):
                piece = await answer.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise fault_of(error, "of the next piece of an answer") from error
        if not piece:
            return
        yield piece
        next_until_s = now_s() + idle_s


async def whole_of(answer: aiohttp.ClientResponse, *, until_s: float, most_bytes: int) -> bytes:
    """The body of an answer as a whole.

    Raises:
        EngineFault: it has none, in time and within ``most_bytes``, or it is compressed, which it
            was not asked for.
    """
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding not in {"identity", ""}:
        raise EngineFault(
            FaultKind.LIED, f"its answer is {coding[:20]!r}, which it was not asked for"
        )
    found = bytearray()
    async for piece in pieces_of(answer, first_until_s=until_s, idle_s=until_s, until_s=until_s):
        found += piece
        if len(found) > most_bytes:
            raise EngineFault(FaultKind.LIED, f"its answer is longer than {most_bytes} bytes")
    return bytes(found)


def fault_of(error: Exception, what: str) -> EngineFault:
    """An error of the HTTP client, as what it says of the engine. ``what`` was waited for."""
    said = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in OWN_LACK:
        return EngineFault(FaultKind.OURS, f"the proxy's host: {said}")
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            fault, why = FaultKind.UNREACHABLE, said
        case TimeoutError():
            fault, why = FaultKind.SLOW, f"it took too long, {what}"
        case aiohttp.ServerDisconnectedError():
            fault, why = FaultKind.BROKE, "it hung up before it answered"
        case aiohttp.ClientPayloadError():
            fault, why = FaultKind.BROKE, "it hung up in the middle of its answer"
        case aiohttp.ClientConnectionError() | OSError():
            fault, why = FaultKind.BROKE, said
        case _:
            fault, why = FaultKind.LIED, "what it said is no HTTP"
    return EngineFault(fault, why)


async def _send(
    session: aiohttp.ClientSession,
    engine: ProxiedEngine,
    call: EngineCall,
    met: dict[str, bool] | None = None,
) -> aiohttp.ClientResponse:
    body = call.body if isinstance(call.body, bytes | None) else call.body.pieces()
    return await session.request(
        call.method,
        # As it was judged: no second reading, no other spelling.
        URL(engine.address.url + call.target, encoded=True),
        data=body,
        headers=call.headers,
        skip_auto_headers=AUTO_HEADERS,
        allow_redirects=False,
        trace_request_ctx=met,
    )


def _session(
    connector: aiohttp.TCPConnector, limits: ProxyLimits, tracing: list[aiohttp.TraceConfig]
) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        # Clients of many people share it.
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=limits.connect_s),
        auto_decompress=False,
        # Neither a proxy of the environment nor the passwords of ~/.netrc.
        trust_env=False,
        trace_configs=tracing,
    )


async def _note_reuse(_: object, context: SimpleNamespace, __: object) -> None:
    met = context.trace_request_ctx
    if met is not None:
        met["reused"] = True


def _raise_client_s(call: EngineCall) -> None:
    """If an upload ended the request, that was its client, and no fault of the engine."""
    if not isinstance(call.body, bytes | None) and call.body.error is not None:
        raise call.body.error
