"""``kvd proxy`` as a process under load, on loopback: ``python -m tests.proxy.load [streams]``.

A thousand streams at once, clients that vanish, half requests, engines that lie, hang and die in
each phase. At the end its memory and its descriptors are compared with those of the beginning. What
it prints is what the page of the proxy quotes; it ends with 1 if any part did not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from tests.proxy.engines import HERE, RawEngine, RawRequest, http_answer, post, say, status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

EVENTS: Final = 20
GAP_S: Final = 0.1
"""Between two events of a stream."""

LIMITS: Final = (
    *("head_s=3", "prefill_s=10", "first_byte_s=10", "idle_s=10", "answer_s=60", "health_s=1"),
    "doubted_s=0.001",
)
"""Short ones, so that a phase that hangs ends while somebody looks, and the next fault is met."""

FAULTS: Final = (
    *("lies", "lies in its body", "hangs", "hangs behind its head", "hangs in its body"),
    *("dies", "dies behind its head", "dies in its body", "is busy"),
)

HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def event(number: int, prompt: str) -> bytes:
    """One of a stream; it says which prompt it is of."""
    return b"data: " + json.dumps({"n": number, "of": prompt}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """As one piece of a body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class LoadedEngine:
    """Prefills and streams, and does as its prompt says: ``{"prompt": "... !FAULT"}``."""

    role: str
    hung_up: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    async def answer(self, request: RawRequest) -> bool:
        body = json.loads(request.body)
        prompt = body["prompt"]
        fault = prompt.partition("!")[2]
        role, _, fault = fault.partition(" ")
        if role == self.role and fault:
            self.faults[fault] += 1
            return await self._fail(request, fault)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            told = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p", "room": "1"}}
            await request.says(http_answer(json.dumps({"kv_transfer_params": told}).encode()))
            return False
        events = EVENTS * 100 if prompt.startswith("vanishes") else EVENTS
        try:
            await request.says(HEAD)
            for number in range(events):
                await request.says(chunk(event(number, prompt)))
                await asyncio.sleep(GAP_S)
                if request.reader.at_eof():
                    self.hung_up += 1
                    return True
            await request.says(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")
        except ConnectionError:
            self.hung_up += 1
            return True
        return False

    async def _fail(self, request: RawRequest, fault: str) -> bool:
        if fault == "is busy":
            busy = http_answer(b'{"error": "busy"}', "Retry-After: 3", status="429 Busy")
            await request.says(busy)
            return True
        what, _, where = fault.partition(" ")
        if where:
            await request.says(HEAD)
        if where == "in its body":
            await request.says(chunk(event(0, "fault")))
        if what == "lies":
            await request.says(b"this is no HTTP\r\n\r\n")
        if what == "hangs":
            await request.reader.read()
        return True


@dataclass
class ProcessSize:
    """Of a process: megabytes of memory, and descriptors."""

    rss_mb: float
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> ProcessSize:
        place = Path(f"/proc/{pid}")
        pages = int((place / "statm").read_text("ascii").split()[1])
        return cls(pages * 4096 / 1e6, len(list((place / "fd").iterdir())))


@dataclass
class LoadedProxy:
    """A ``kvd proxy`` with two engines of each role behind it."""

    url: str
    pid: int
    prefills: list[LoadedEngine]
    decodes: list[LoadedEngine]
    failures: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        """Note what did not hold."""
        if not holds:
            self.failures.append(what)

    async def metrics(self) -> dict[str, float]:
        """All that it counts, by name with labels."""
        async with aiohttp.request("GET", f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    async def open_requests(self) -> float:
        found = await self.metrics()
        return sum(value for name, value in found.items() if "open_requests" in name)


@asynccontextmanager
async def loaded(*options: str) -> AsyncIterator[LoadedProxy]:
    async with contextlib.AsyncExitStack() as stack:
        # One of each role does what a prompt says, the other one is always well.
        prefills = [LoadedEngine("prefill"), LoadedEngine("well")]
        decodes = [LoadedEngine("decode"), LoadedEngine("well")]
        arguments = []
        for role, engines in (("prefill", prefills), ("decode", decodes)):
            for engine in engines:
                server = await asyncio.start_server(
                    RawEngine(engine.answer).serve, HERE, 0, backlog=2048
                )
                stack.callback(server.close)
                port = server.sockets[0].getsockname()[1]
                arguments += [f"--{role}", f"http://{HERE}:{port}"]
        port = _free_port()
        limits = [part for limit in LIMITS for part in ("--limit", limit)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvd", "proxy", "--listen", f"{HERE}:{port}"),
            *(*arguments, *limits, *options),
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            await _listens(port)
            yield LoadedProxy(f"http://{HERE}:{port}", process.pid, prefills, decodes)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HERE, 0))
        return int(found.getsockname()[1])


async def _listens(port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection(HERE, port)
                writer.close()
                return
            await asyncio.sleep(0.1)


async def streams_at_once(proxy: LoadedProxy, streams: int) -> dict[str, Any]:
    """Each whole, and each of its own prompt."""
    whole, odd, first_s = 0, Counter[str](), []
    peak = ProcessSize.of(proxy.pid)
    began_s = time.monotonic()

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        nonlocal whole
        prompt = f"prompt {number}"
        expected = b"".join(event(at, prompt) for at in range(EVENTS)) + b"data: [DONE]\n\n"
        asked_s = time.monotonic()
        try:
            body = {"prompt": prompt, "stream": True}
            async with http.post(f"{proxy.url}/v1/completions", json=body) as answer:
                found = await answer.content.readany()
                first_s.append(time.monotonic() - asked_s)
                found += await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            odd[type(error).__name__] += 1
            return
        if found == expected:
            whole += 1
        else:
            odd[f"{answer.status}, {len(found)} bytes"] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        going = [asyncio.create_task(one(http, number)) for number in range(streams)]
        while not all(task.done() for task in going):
            await asyncio.sleep(0.2)
            now = ProcessSize.of(proxy.pid)
            peak = ProcessSize(max(peak.rss_mb, now.rss_mb), max(peak.descriptors, now.descriptors))
    proxy.check(whole == streams, f"of {streams} streams {whole} were whole: {dict(odd)}")
    first_s.sort()
    return {
        "streams": streams,
        "whole": whole,
        "took_s": round(time.monotonic() - began_s, 1),
        "first_byte_p50_s": round(first_s[len(first_s) // 2], 2) if first_s else None,
        "first_byte_max_s": round(first_s[-1], 2) if first_s else None,
        "peak_rss_mb": round(peak.rss_mb),
        "peak_descriptors": peak.descriptors,
    }


async def clients_that_vanish(proxy: LoadedProxy, clients: int) -> dict[str, Any]:
    """Each ends its engine's request."""
    before = sum(engine.hung_up for engine in proxy.decodes)
    host, _, port = proxy.url.removeprefix("http://").rpartition(":")
    writers = []
    for number in range(clients):
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": f"vanishes {number}", "stream": True}).encode()
        writer.write(post("/v1/completions", body))
        writers.append((reader, writer))
    for reader, _ in writers:
        await asyncio.wait_for(reader.readuntil(b"data: "), 20)
    began_s = time.monotonic()
    for _, writer in writers:
        writer.transport.abort()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            while await proxy.open_requests():  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.05)
    took_s = time.monotonic() - began_s
    await asyncio.sleep(0.2 + 2 * GAP_S)
    ended = sum(engine.hung_up for engine in proxy.decodes) - before
    left = await proxy.open_requests()
    proxy.check(ended == clients and not left, f"{ended} of {clients} ended, {left} left open")
    return {"clients": clients, "engine_requests_ended": ended, "took_s": round(took_s, 2)}


async def half_requests(proxy: LoadedProxy, halves: int) -> dict[str, Any]:
    """Half requests are hung up on, and a whole one beside them is served."""
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "
    began_s = time.monotonic()
    going = [asyncio.create_task(say(proxy.url, half, wait_s=30)) for _ in range(halves)]
    await asyncio.sleep(0.5)
    asked_s = time.monotonic()
    honest = await say(proxy.url, post("/v1/completions", b'{"prompt": "honest"}'), wait_s=20)
    honest_s = time.monotonic() - asked_s - EVENTS * GAP_S
    answers = await asyncio.gather(*going, return_exceptions=True)
    ended = answers.count(b"")
    proxy.check(ended == halves, f"{ended} of {halves} half requests were hung up on")
    proxy.check(status_of(honest) == 200, "an honest request beside half ones was not served")
    return {
        "half_requests": halves,
        "hung_up_on": ended,
        "took_s": round(time.monotonic() - began_s, 1),
        "honest_request_waited_s": round(honest_s, 2),
    }


async def engines_that_fail(proxy: LoadedProxy, of_each: int) -> dict[str, Any]:
    """In each phase; a client hears of it only where an answer had begun."""
    found: dict[str, Any] = {}
    for role in ("prefill", "decode"):
        for fault in FAULTS:
            if role == "prefill" and fault == "lies in its body":
                continue
            body = json.dumps({"prompt": f"x !{role} {fault}", "stream": True}).encode()
            ask = post("/v1/completions", body)
            said = await asyncio.gather(*(say(proxy.url, ask, wait_s=30) for _ in range(of_each)))
            ends = Counter(_end_of(answer) for answer in said)
            engine = proxy.prefills[0] if role == "prefill" else proxy.decodes[0]
            found[f"{role} {fault}"] = {"met": engine.faults[fault], **ends}
            proxy.check(engine.faults[fault] > 0, f"{role} engine that {fault}: nobody met it")
            is_cut = role == "decode" and fault.endswith("in its body")
            allowed = {"whole", "cut"} if is_cut else {"whole"}
            proxy.check(set(ends) <= allowed, f"{role} engine that {fault}: {dict(ends)}")
    return found


def _end_of(answer: bytes) -> str:
    if status_of(answer) != 200:
        return str(status_of(answer))
    return "whole" if answer.endswith(b"0\r\n\r\n") and b"[DONE]" in answer else "cut"


async def run(streams: int, vanish: int, halves: int, of_each: int) -> dict[str, Any]:
    """All parts, one after the other; ``failures`` is empty if all held."""
    async with loaded() as proxy:
        # What is loaded once is no leak.
        await streams_at_once(proxy, min(streams, 50))
        before = ProcessSize.of(proxy.pid)
        found: dict[str, Any] = {
            "before": vars(before),
            "streams": await streams_at_once(proxy, streams),
            "vanish": await clients_that_vanish(proxy, vanish),
            "half": await half_requests(proxy, halves),
            "faults": await engines_that_fail(proxy, of_each),
        }
        settled_s = time.monotonic() + 15
        while time.monotonic() < settled_s:
            after = ProcessSize.of(proxy.pid)
            if after.descriptors <= before.descriptors + 4 and not await proxy.open_requests():
                break
            await asyncio.sleep(0.5)
        proxy.check(
            after.descriptors <= before.descriptors + 4,
            f"descriptors: {before.descriptors} before, {after.descriptors} after",
        )
        found["after"] = vars(after)
        # A second load of the same size must find its memory there.
        again = await streams_at_once(proxy, streams)
        found["again"] = again
        grown_mb = again["peak_rss_mb"] - found["streams"]["peak_rss_mb"]
        proxy.check(grown_mb < 20, f"the same load again took {grown_mb} MB more")
        waiting = {
            name: value for name, value in (await proxy.metrics()).items() if "waiting" in name
        }
        proxy.check(not any(waiting.values()), f"tokens that wait for nothing: {waiting}")
        found["failures"] = proxy.failures
        return found


if __name__ == "__main__":
    result = asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, 50, 1000, 10))
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    sys.exit(bool(result["failures"]))
