"""HTTP for probes and metrics: a few pages on loopback, read only, HTTP/1.1 by h11.

Theory of operation. A connection is one task: read a request, answer it, read the next. Whatever
goes wrong ends that connection and nothing else. asyncio swallows an exception of a start_server
callback on Python 3.11 and leaves the connection open, so the callback only starts the task; the
task closes its connection whatever happens, and an exception that ends it is given to ``on_fault``.

Invariants: a request is complete within ``REQUEST_S`` or its connection is closed; an answer that
is not taken within ``ANSWER_S`` is abandoned; at most ``MAX_CONNECTIONS`` are open at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from email.utils import formatdate

import h11
import msgspec

REQUEST_S = 5.0
ANSWER_S = 5.0
LINGER_S = 1.0
"""How long what a refused client still sends is read, so that it gets the refusal, not a reset."""
LINGER_READS = 64
MAX_CONNECTIONS = 64
MAX_HEADER_BYTES = 16 * 1024
"""As nginx and node.js: 8 to 16 KiB."""
MAX_BODY_BYTES = 16 * 1024
"""A GET has none; what a client sends all the same is read and dropped up to here."""
READ_BYTES = 16 * 1024

ANSWERABLE: tuple[type, ...] = (h11.IDLE, h11.SEND_RESPONSE)
PLAIN = "text/plain; charset=utf-8"


class Response(msgspec.Struct, frozen=True):
    """What a page answers."""

    status: int
    content_type: str
    body: bytes


Handler = Callable[[], Response]
HttpPages = Mapping[str, Handler]
"""By path. A handler is called on the event loop and answers at once."""
OnFault = Callable[[str, BaseException], None]
OnRefused = Callable[[int], None]


def _plain(status: int, text: str) -> Response:
    return Response(status, PLAIN, f"{text}\n".encode())


class HttpServer:
    """Serves ``pages``.

    ``on_fault(what, error)`` hears of an exception that ended a connection, ``on_refused(status)``
    of a request that is none of the pages, or none at all.
    """

    def __init__(self, pages: HttpPages, on_fault: OnFault, on_refused: OnRefused) -> None:
        self._pages = pages
        self._on_fault = on_fault
        self._on_refused = on_refused
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and give the port: the one asked for, or a free one for 0.

        Raises:
            OSError: the address is taken or is none of this host's.
        """
        self._server = await asyncio.start_server(self._connected, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer, self._pages, self._on_refused)
        is_full = len(self._connections) >= MAX_CONNECTIONS
        task = asyncio.create_task(connection.serve(is_full=is_full))
        self._connections.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault("http", error)


class _Connection:
    """One client: its bytes, the HTTP state machine, and the pages it may ask for."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pages: HttpPages,
        on_refused: OnRefused,
    ) -> None:
        self._on_refused = on_refused
        self._reader = reader
        self._writer = writer
        self._pages = pages
        writer.transport.set_write_buffer_limits(high=0)  # so that drain waits for the last byte
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def serve(self, *, is_full: bool) -> None:
        """Answer requests until either side is done with the connection; none where it is full."""
        try:
            if is_full:
                await self._refuse(_plain(503, f"{MAX_CONNECTIONS} connections are open already"))
                return
            while await self._answer_one():
                self._http.start_next_cycle()
                # Requests that came in one piece are read and answered without a wait: give way.
                await asyncio.sleep(0)
        except OSError:
            pass  # the client hung up, or does not take its answer in time
        finally:
            self._writer.transport.abort()

    async def _answer_one(self) -> bool:
        """Read one request and answer it; whether another may follow."""
        match await self._read_in_time():
            case None:
                return False
            case Response() as refusal:
                await self._refuse(refusal)
                return False
            case request:
                await self._answer(request)
        if (self._http.our_state, self._http.their_state) == (h11.DONE, h11.DONE):
            return True
        await self._linger()
        return False

    async def _read_in_time(self) -> h11.Request | Response | None:
        """The next request, or the refusal of one; None if the client is done or idle."""
        try:
            async with asyncio.timeout(REQUEST_S):
                return await self._read()
        except TimeoutError:
            if self._http.their_state is h11.IDLE and not self._http.trailing_data[0]:
                return None
            return _plain(408, f"no complete request came within {REQUEST_S:g} s")

    async def _read(self) -> h11.Request | Response | None:
        """The next request with its body read and dropped."""
        request: h11.Request | None = None
        read_bytes = 0
        while True:
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    if self._http.they_are_waiting_for_100_continue:
                        return request  # no page needs the body: answer without it
                    self._http.receive_data(await self._reader.read(READ_BYTES))
                    continue
            except h11.RemoteProtocolError as error:
                return _plain(error.error_status_hint, f"this is not HTTP/1.1: {error}")
            match event:
                case h11.Request():
                    if event.http_version not in {b"1.0", b"1.1"}:
                        return _plain(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
                    request, body_bytes = event, _announced_bytes(event)
                case h11.Data():
                    read_bytes += len(event.data)
                    body_bytes = read_bytes
                case h11.EndOfMessage():
                    return request
                case _:  # the client closed, before or after a request
                    return None
            if body_bytes > MAX_BODY_BYTES:
                return _plain(413, f"no request here needs {body_bytes} bytes of body")

    async def _answer(self, request: h11.Request) -> None:
        """Send the page that the request asks for; a handler that raises leaves a 500 behind."""
        response = _plain(500, "this page failed; the log of kvd says why")
        try:
            response = self._page(request)
        finally:
            await self._send(response, method=request.method)

    def _page(self, request: h11.Request) -> Response:
        """What the target and the method of the request give."""
        target = request.target.decode("ascii")
        if target.startswith("http://"):  # as a proxy writes it
            target = f"/{target.removeprefix('http://').partition('/')[2]}"
        handler = self._pages.get(target.partition("?")[0])
        if handler is None:
            return self._refusal(404, f"no such page; there are {' '.join(self._pages)}")
        if request.method not in {b"GET", b"HEAD"}:
            return self._refusal(405, "pages here are only read: use GET")
        return handler()

    def _refusal(self, status: int, text: str) -> Response:
        """Of a request that was read whole: the connection goes on."""
        self._on_refused(status)
        return _plain(status, text)

    async def _refuse(self, refusal: Response) -> None:
        """Send a refusal as the last thing on this connection."""
        self._on_refused(refusal.status)
        if self._http.our_state in ANSWERABLE:
            await self._send(refusal, method=b"GET")
            await self._linger()

    async def _send(self, response: Response, *, method: bytes) -> None:
        """Write one response, without its body to HEAD; close if the request was not read whole.

        Raises:
            TimeoutError: the client does not take it.
        """
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Cache-Control", "no-store"),
        ]
        if self._http.their_state is not h11.DONE:
            headers.append(("Connection", "close"))
        if response.status == 405:
            headers.append(("Allow", "GET, HEAD"))
        head = h11.Response(status_code=response.status, headers=headers)
        body = b"" if method == b"HEAD" else response.body
        parts = [self._http.send(e) for e in (head, h11.Data(data=body), h11.EndOfMessage())]
        self._writer.write(b"".join(part for part in parts if part))
        async with asyncio.timeout(ANSWER_S):
            await self._writer.drain()

    async def _linger(self) -> None:
        """Read what still comes for a moment: closing on unread bytes would reset the answer."""
        self._writer.write_eof()
        async with asyncio.timeout(LINGER_S):
            for _ in range(LINGER_READS):
                if not await self._reader.read(READ_BYTES):
                    return


def _announced_bytes(request: h11.Request) -> int:
    """The body that a request says it has; h11 has checked that it is a number."""
    lengths = [int(value) for name, value in request.headers if name == b"content-length"]
    return lengths[0] if lengths else 0
