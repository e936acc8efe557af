"""What clients may do to a proxy: odd requests, half ones, slow ones, and those who vanish."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import aiohttp
import pytest

from kvd.proxy.limits import ProxyLimits
from tests.proxy.engines import (
    FakeEngine,
    http_answer,
    post,
    proxy_for,
    raw,
    running,
    say,
    status_of,
)

HASTY = ProxyLimits(head_s=0.3, body_idle_s=0.3, body_s=0.6, write_s=0.3)
BODY = b'{"prompt": "x"}'
EVIL = b'{"prompt": "x", "kv_transfer_params": {"kvd": {"v": 1, "peer": "evil", "room": "5"}}}'


async def echo(request):
    """Answers with what came."""
    said = {"line": request.line, "headers": request.headers, "body": request.body.decode()}
    answer = http_answer(json.dumps(said).encode())
    if request.line.startswith("HEAD"):
        answer = answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    await request.says(answer)


@pytest.fixture
async def decode():
    async with raw(echo) as engine:
        yield engine


@pytest.fixture
async def proxy(decode):
    async with proxy_for([], [decode.url], HASTY) as (_, url):
        yield url


def heard(answer):
    return json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions/", "/v1//completions", "/x/../v1/completions", "/v1/%63ompletions"),
        *("/v1/completions%2f", "/v1/completions;x", "//h/v1/completions", "/V1/completions"),
        *("/sleep", "/v1/load_lora_adapter", "/metrics"),
    ],
)
async def test_no_spelling_of_a_path_gets_around_the_proxy(proxy, decode, path):
    answer = await say(proxy, post(path, EVIL))
    assert status_of(answer) in {400, 404, 405}
    assert heard(answer)["error"]["type"] == "invalid_request_error"
    assert decode.requests == []


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/inference/v1/generate", "/v1/completions?a=1", "http://x/v1/completions", "/tokenize"),
    ],
)
@pytest.mark.parametrize("media", ["application/json", "text/plain", "application/x-yaml", ""])
async def test_no_client_says_where_kv_is_on_any_path_in_any_type(proxy, decode, path, media):
    answer = await say(proxy, post(path, EVIL, f"Content-Type: {media}"))
    assert status_of(answer) == 200
    (seen,) = decode.requests
    assert json.loads(seen.body) == {"prompt": "x"}
    assert seen.line == f"POST {path.removeprefix('http://x')} HTTP/1.1"


@pytest.mark.parametrize(
    "media", ["multipart/form-data; boundary=B", "audio/wav", "application/octet-stream"]
)
async def test_nor_in_a_body_that_calls_itself_something_else(proxy, decode, media):
    answer = await say(proxy, post("/v1/responses", EVIL, f"Content-Type: {media}"))
    assert status_of(answer) == 400
    assert decode.requests == []


@pytest.mark.parametrize(
    ("fields", "body", "status"),
    [
        (["Content-Encoding: gzip"], gzip.compress(bytes(2**20)), 415),
        (["Content-Encoding: deflate"], zlib.compress(bytes(2**20)), 415),
        (["Content-Encoding: br"], BODY, 415),
        (["Content-Type: application/x-www-form-urlencoded"], b"prompt=x", 415),
        (["Upgrade: websocket", "Sec-WebSocket-Version: 13"], BODY, 501),
        (["Authorization: a", "Authorization: b"], BODY, 400),
        (["X-A: \u00ff".encode("latin-1").decode("latin-1")], BODY, 200),
        (["Expect: a-miracle"], BODY, 417),
        ([f"X-A: {'a' * 9000}"], BODY, 400),
        ([f"X-{number}: a" for number in range(200)], BODY, 400),
        (["Transfer-Encoding: chunked"], BODY, 400),
        ([], b'{"prompt": "\\ud83d"}', 400),
        ([], b"[" * 100_000, 400),
        ([], b'{"temperature": NaN}', 400),
    ],
)
async def test_requests_that_are_refused_in_words(proxy, decode, fields, body, status):
    path = "/v1/responses" if "urlencoded" in "".join(fields) else "/v1/completions"
    answer = await say(proxy, post(path, body, *fields))
    assert status_of(answer) == status
    assert len(decode.requests) == (status == 200)
    assert b"Traceback" not in answer


def chunked(*pieces, fields=()):
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", *fields]
    head.append("Transfer-Encoding: chunked")
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def test_a_chunked_body_is_read_and_a_packed_one_is_not(proxy, decode):
    whole = chunked(BODY[:4], BODY[4:]) + b"0\r\n\r\n"
    assert status_of(await say(proxy, whole)) == 200
    assert json.loads(decode.requests[0].body) == {"prompt": "x"}
    packed = chunked(gzip.compress(BODY), fields=["Content-Encoding: gzip"]) + b"0\r\n\r\n"
    assert status_of(await say(proxy, packed)) == 415
    coded = packed.replace(b"Encoding: chunked", b"Encoding: gzip, chunked")
    assert status_of(await say(proxy, coded)) in {400, 415, 501}
    assert len(decode.requests) == 1


async def test_the_headers_that_an_engine_gets(proxy, decode):
    fields = ["Cookie: a=b", "TE: trailers", "Connection: x-hop", "X-Hop: 1", "X-End: 2"]
    fields += ["Authorization: Bearer me", "Accept: text/event-stream", "Host: y"][:2]
    found = heard(await say(proxy, post("/v1/completions", BODY, *fields)))["headers"]
    assert found["authorization"] == "Bearer me"
    assert found["x-end"] == "2"
    assert found["accept"] == "text/event-stream"
    assert found["host"] == decode.url.removeprefix("http://")
    assert not {"cookie", "te", "x-hop", "expect", "transfer-encoding"} & set(found)
    assert found["via"].startswith("1.1 kvd-")


async def test_no_cookie_of_one_client_goes_with_another(decode):
    async def sets(request):
        await request.says(http_answer(b"{}", "Set-Cookie: session=alice"))

    async with raw(sets) as engine, proxy_for([], [engine.url]) as (_, url):
        for _ in range(2):
            answer = await say(url, post("/v1/completions", BODY))
            assert b"cookie" not in answer.lower()
        assert all("cookie" not in request.headers for request in engine.requests)


async def test_credentials_of_an_engine_are_said_to_it_and_to_nobody_else(decode):
    address = decode.url.replace("http://", "http://user:hunter2@")
    dead = "http://user:hunter2@127.0.0.1:9"
    async with proxy_for([], [address, dead]) as (server, url):
        await say(url, post("/v1/completions", BODY, "Authorization: Bearer me"))
        assert decode.requests[0].headers["authorization"] == "Basic dXNlcjpodW50ZXIy"
        server.engines[0].refused(0.0, "test")
        answers = [await say(url, post("/v1/completions", BODY))]
        for page in ("/health", "/metrics"):
            async with aiohttp.request("GET", url + page) as answer:
                answers.append(await answer.read())
    assert status_of(answers[0]) == 503
    assert not any(b"hunter2" in said or b"dXNl" in said for said in answers)


@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ",
        b"G",
    ],
)
async def test_who_does_not_end_the_head_of_a_request_is_hung_up_on(proxy, half):
    assert await say(proxy, half) == b""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/audio/translations"])
async def test_who_does_not_end_the_body_of_a_request_is_told_and_hung_up_on(proxy, path):
    media = "multipart/form-data; boundary=B" if "audio" in path else "application/json"
    whole = post(path, b"-" * 100, f"Content-Type: {media}")
    assert status_of(await say(proxy, whole[:-50])) == 408


async def test_who_sends_a_body_a_byte_at_a_time_is_hung_up_on_all_the_same(proxy):
    whole = post("/v1/completions", b" " * 1000)

    async def drip():
        host, _, port = proxy.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole[:-1000])
        for _ in range(100):
            writer.write(b" ")
            await asyncio.sleep(0.02)
            if reader.at_eof() or reader._buffer:
                break
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return answer

    assert status_of(await drip()) == 408


async def test_bodies_have_a_bound_each_and_one_for_all(decode):
    limits = ProxyLimits(body_bytes=1000, bodies_bytes=1500, body_idle_s=0.5)
    async with proxy_for([], [decode.url], limits) as (_, url):
        long = b'{"prompt": "' + b"a" * 1000 + b'"}'
        assert status_of(await say(url, post("/v1/completions", long))) == 413
        assert status_of(await say(url, chunked(long[:600], long[600:]) + b"0\r\n\r\n")) == 413
        nearly = post("/v1/completions", b'{"prompt": "' + b"a" * 900 + b'"}')
        waiting = asyncio.create_task(say(url, nearly[:-5]))
        await asyncio.sleep(0.1)
        answer = await say(url, nearly)
        assert status_of(answer) == 503
        assert b"Retry-After" in answer or b"retry-after" in answer
        assert status_of(await waiting) == 408
        assert status_of(await say(url, nearly)) == 200


async def test_a_few_bytes_that_would_become_many_values_have_a_bound(decode):
    limits = ProxyLimits(body_values=20_000, bodies_bytes=1_000_000, body_idle_s=0.5)
    async with proxy_for([], [decode.url], limits) as (_, url):
        many = b'{"prompt": [' + b"1," * 30_000 + b"1]}"
        for path in ("/v1/completions", "/v1/responses"):
            answer = await say(url, post(path, many))
            assert status_of(answer) == 400
            assert b"body_values" in answer
        # Each of them is far below the bytes for all, and what is made of both is not.
        fewer = post("/v1/completions", b'{"prompt": [' + b"1," * 15_000 + b"1]}")
        assert status_of(await say(url, fewer)) == 200
    held = ProxyLimits(body_values=20_000, bodies_bytes=500_000)
    async with proxy_for([], [decode.url], held) as (_, url):
        assert status_of(await say(url, fewer)) == 503


async def test_http_1_0_head_options_and_100_continue(proxy, decode):
    answer = await say(proxy, post("/v1/completions", BODY, version="1.0"))
    assert status_of(answer) == 200
    assert b"chunked" not in answer
    head = await say(proxy, b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert status_of(head) == 200
    assert head.endswith(b"\r\n\r\n")
    options = b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert status_of(await say(proxy, options)) == 200
    expecting = post("/v1/completions", BODY, "Expect: 100-continue")
    assert (await say(proxy, expecting)).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    older = post("/v1/completions", BODY, "Expect: 100-continue", version="1.0")
    assert status_of(await say(proxy, older)) == 200
    two = post("/v1/completions", BODY, "Expect: 100-continue", "Expect: more")
    assert status_of(await say(proxy, two)) == 417
    assert [request.line.split()[0] for request in decode.requests] == [
        *("POST", "HEAD", "OPTIONS", "POST", "POST")
    ]


async def test_what_goes_nowhere_is_not_asked_for_its_body(proxy, decode):
    answer = await say(proxy, post("/sleep", BODY, "Expect: 100-continue"))
    assert status_of(answer) == 404
    assert decode.requests == []


async def test_requests_in_one_breath_are_answered_in_their_order(proxy, decode):
    keeps = [
        post("/v1/completions", b'{"prompt": "%d"}' % number).replace(b"Connection: close\r\n", b"")
        for number in range(5)
    ]
    answer = await say(proxy, b"".join(keeps), post("/v1/completions", b'{"prompt": "5"}'))
    assert answer.count(b"HTTP/1.1 200") == 6
    seen = [json.loads(request.body)["prompt"] for request in decode.requests]
    assert seen == [str(number) for number in range(6)]


async def test_a_proxy_that_is_its_own_engine_is_found_out():
    async with proxy_for([], ["http://127.0.0.1:9"]) as (server, url):
        (engine,) = server.engines
        engine.address = type(engine.address)(engine.address.role, url)
        engine.said_well(0.0)
        assert status_of(await say(url, post("/v1/completions", BODY))) == 508


async def test_an_upload_goes_through_as_it_comes_with_its_boundary():
    got, first = [], asyncio.Event()

    async def takes(request):
        # Of unknown length; the second half is sent when the first one is here.
        got.append(request.headers["content-type"])
        while got[-1] != b"0\r\n":
            got.append(await request.reader.readuntil(b"\r\n"))
            if b"first" in got[-1]:
                first.set()
        await request.says(http_answer(b'{"ok": 1}'))
        return True

    async def pieces():
        yield b"--B\r\nfirst\r\n"
        await asyncio.wait_for(first.wait(), 5)
        yield b"second\r\n--B--"

    async with (
        raw(takes) as engine,
        proxy_for([], [engine.url]) as (_, url),
        aiohttp.ClientSession() as http,
        http.post(
            f"{url}/v1/audio/transcriptions",
            data=pieces(),
            headers={"content-type": "multipart/form-data; boundary=B"},
        ) as answer,
    ):
        assert (answer.status, await answer.json()) == (200, {"ok": 1})
    assert got[0] == "multipart/form-data; boundary=B"
    assert [one for one in got[1:] if b"first" in one or b"second" in one] == [
        *(b"first\r\n", b"second\r\n")
    ]


async def test_who_does_not_read_the_answer_is_hung_up_on_and_so_is_the_engine():
    ended = asyncio.Event()

    async def endless(request):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        try:
            await request.says(head)
            while True:
                await request.says(b"data: " + b"x" * 65536 + b"\n\n")
        finally:
            ended.set()

    async with raw(endless) as engine, proxy_for([], [engine.url], HASTY) as (server, url):
        host, _, port = url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(post("/v1/completions", BODY))
        await asyncio.wait_for(ended.wait(), 10)
        writer.close()
        async with asyncio.timeout(5):
            while server.engines[0].open_requests:  # noqa: ASYNC110 - counts, not an event
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_who_hangs_up_before_an_answer_ends_the_engine_s_request(phase):
    asked, ended = asyncio.Event(), asyncio.Event()

    async def hangs(request):
        asked.set()
        if await request.reader.read(1) == b"":
            ended.set()
        return True

    async with raw(hangs) as engine, running(FakeEngine("d")) as well:
        prefills, decodes = ([engine.url], [well.url]) if phase == "prefill" else ([], [engine.url])
        async with proxy_for(prefills, decodes) as (server, url):
            going = asyncio.create_task(say(url, post("/v1/completions", BODY)))
            await asyncio.wait_for(asked.wait(), 5)
            going.cancel()
            await asyncio.wait_for(ended.wait(), 5)
            async with asyncio.timeout(5):
                while any(one.open_requests for one in server.engines):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert [one.waiting_tokens for one in server.engines] == [0] * len(server.engines)
            assert well.bodies == []
