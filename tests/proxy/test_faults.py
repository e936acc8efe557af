"""Engines that lie, hang, are busy or die, in each phase of a request."""

from __future__ import annotations

import asyncio
import gzip
import json

import aiohttp
import pytest

from kvd.proxy.engines import EngineState
from kvd.proxy.limits import ProxyLimits
from tests.proxy.engines import (
    WELL,
    FakeEngine,
    http_answer,
    post,
    proxy_for,
    raw,
    running,
    say,
    status_of,
)

HASTY = ProxyLimits(
    connect_s=0.5, prefill_s=0.4, first_byte_s=0.4, idle_s=0.4, answer_s=3.0, health_s=0.3
)
ASK = post("/v1/completions", b'{"prompt": "x"}')
ASK_STREAM = post("/v1/completions", b'{"prompt": "x", "stream": true}')
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text):
    said = b"data: %s\n\n" % text
    return b"%x\r\n%s\r\n" % (len(said), said)


def says(*pieces, then_hangs=False):
    """An engine that says these bytes to every request, and hangs up or keeps silent."""

    async def answer(request):
        await request.says(*pieces)
        if then_hangs:
            await request.reader.read()
        return True

    return answer


async def metric(url, name):
    async with aiohttp.request("GET", f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


LIES = {
    "no HTTP": b"hello\r\n\r\n",
    "a status of six digits": b"HTTP/1.1 999999 X\r\n\r\n",
    "less than it says": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{}",
    "a chunk without a length": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a header with a line in it": b"HTTP/1.1 200 OK\r\nX-A: a\rb\r\nContent-Length: 2\r\n\r\n{}",
    "a header that is no text": http_answer(b"{}", "X-A: a").replace(b": a\r", b": \xff\r"),
    "a page": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    "no JSON": http_answer(b"<html>"),
    "another place": http_answer(b"", "Location: http://127.0.0.1:9/x", status="307 Moved"),
    "yet another place": http_answer(b"", "Location: /v1/completions", status="302 Found"),
    "a head without an end": b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"a" * 100_000,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_decode_engine_that_lies_is_replaced_and_alone_it_is_a_bad_gateway(lie):
    async with raw(says(LIES[lie])) as engine:
        async with proxy_for([], [engine.url], HASTY) as (_, url):
            answer = await say(url, ASK)
            assert status_of(answer) == 502
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "engine_error"
            assert await metric(url, 'kvd_proxy_ended_total{how="broken"}') == 1
            assert await metric(url, "kvd_proxy_open_requests") == 0
        async with (
            running(FakeEngine("d")) as well,
            proxy_for([], [engine.url, well.url]) as (_, url),
        ):
            assert [status_of(await say(url, ASK)) for _ in range(4)] == [200] * 4


@pytest.mark.parametrize("lie", LIES)
async def test_a_prefill_engine_that_lies_is_replaced_and_alone_the_decode_engine_computes(lie):
    async with raw(says(LIES[lie])) as engine, running(FakeEngine("d")) as decode:
        async with proxy_for([engine.url], [decode.url], HASTY) as (_, url):
            assert status_of(await say(url, ASK)) == 200
            assert await metric(url, "kvd_proxy_prefill_failed_total") == 1
            assert "kv_transfer_params" not in decode.bodies[-1]
        async with running(FakeEngine("p")) as well:
            async with proxy_for([engine.url, well.url], [decode.url], HASTY) as (_, url):
                assert status_of(await say(url, ASK)) == 200
                assert await metric(url, "kvd_proxy_prefill_failed_total") == 0
            assert "kv_transfer_params" in decode.bodies[-1]


async def test_a_few_packed_bytes_of_a_prefill_engine_stay_packed():
    bomb = http_answer(gzip.compress(bytes(64 * 2**20)), "Content-Encoding: gzip")
    async with (
        raw(says(bomb)) as prefill,
        running(FakeEngine("d")) as decode,
        proxy_for([prefill.url], [decode.url]) as (server, url),
    ):
        assert status_of(await say(url, ASK)) == 200
        assert "gzip" in server.engines[0].why
        assert prefill.requests[0].headers["accept-encoding"] == "identity"


async def test_an_answer_of_a_decode_engine_goes_through_packed_as_it_is():
    packed = gzip.compress(b'{"a": 1}')
    async with (
        raw(says(http_answer(packed, "Content-Encoding: gzip"))) as engine,
        proxy_for([], [engine.url]) as (_, url),
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json={}) as answer,
    ):
        assert answer.headers["content-encoding"] == "gzip"
        assert await answer.json() == {"a": 1}


HANGS = {
    "before its head": (),
    "in its head": (b"HTTP/1.1 200 OK\r\n",),
    "behind its head": (EVENTS,),
    "in its body": (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
    ),
}


@pytest.mark.parametrize("phase", HANGS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_hangs_is_waited_for_so_long_and_then_doubted(phase, role):
    hangs = raw(says(*HANGS[phase], then_hangs=True))
    async with hangs as engine, running(FakeEngine("d")) as well:
        prefills, decodes = ([engine.url], [well.url]) if role == "prefill" else ([], [engine.url])
        async with proxy_for(prefills, decodes, HASTY) as (server, url):
            assert status_of(await say(url, ASK)) == (200 if role == "prefill" else 504)
            hung = server.engines[0]
            assert hung.state(asyncio.get_running_loop().time()) is EngineState.DOUBTED
            assert "too long" in hung.why
            assert await metric(url, "kvd_proxy_open_requests") == 0
        if role == "decode":
            async with proxy_for([], [engine.url, well.url], HASTY) as (_, url):
                assert status_of(await say(url, ASK)) == 200


CUTS = {
    "a hang-up": ((EVENTS, event(b"1")), False),
    "a hang-up in an event": ((EVENTS, b"5\r\ndata:\r\n"), False),
    "no end of a chunk": ((EVENTS, event(b"1"), b"ffff\r\ndata"), False),
    "a lie": ((EVENTS, event(b"1"), b"ZZ\r\n"), True),
    "silence": ((EVENTS, event(b"1")), True),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_that_breaks_off_has_no_clean_end(cut, version):
    pieces, then_hangs = CUTS[cut]

    async def answer(request):
        for piece in pieces:
            await request.says(piece)
            await asyncio.sleep(0.05)
        if then_hangs:
            await request.reader.read()
        return True

    ask = post("/v1/completions", b'{"prompt": "x", "stream": true}', version=version)
    async with raw(answer) as engine, proxy_for([], [engine.url], HASTY) as (_, url):
        try:
            said = await say(url, ask)
        except ConnectionResetError:
            # Nothing else tells a client of HTTP/1.0 that a stream has not ended.
            assert (version, cut) in {
                *(("1.0", "a hang-up in an event"), ("1.0", "no end of a chunk"))
            }
        else:
            assert status_of(said) == 200
            assert b"[DONE]" not in said
            assert not said.endswith(b"0\r\n\r\n")
            is_between = cut not in {"a hang-up in an event", "no end of a chunk"}
            assert (b'data: {"error": {"message": "the answer broke off' in said) == is_between
        assert await metric(url, "kvd_proxy_cut_total") == 1
        assert await metric(url, 'kvd_proxy_ended_total{how="cut"}') == 1


async def test_a_long_answer_in_json_that_breaks_off_is_cut_by_its_length():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    async with (
        raw(says(head, b"{" + b" " * 600_000)) as engine,
        proxy_for([], [engine.url]) as (_, url),
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json={}) as answer,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_engine_s_word_reaches_another_engine_and_then_the_client(status):
    refusal = http_answer(b'{"error": "busy"}', "Retry-After: 7", status=f"{status} Busy")
    async with (
        raw(says(refusal)) as busy,
        running(FakeEngine("p")) as prefill,
        running(FakeEngine("d")) as well,
    ):
        async with proxy_for([prefill.url], [busy.url], HASTY) as (server, url):
            answer = await say(url, ASK)
            assert status_of(answer) == status
            assert b"Retry-After: 7" in answer
            assert answer.endswith(b'{"error": "busy"}')
            assert await metric(url, 'kvd_proxy_ended_total{how="overloaded"}') == 1
            assert not server.engines[1].is_refusing
        async with proxy_for([prefill.url], [busy.url, well.url], HASTY) as (_, url):
            for _ in range(3):
                assert status_of(await say(url, ASK)) == 200
            # Who says 429 has not begun; after 503 somebody else computes the prompt.
            first = well.bodies[0]
            assert ("kv_transfer_params" in first) is (status == 429)
        async with proxy_for([busy.url, prefill.url], [well.url], HASTY) as (_, url):
            assert status_of(await say(url, ASK)) == 200
            assert "kv_transfer_params" in well.bodies[-1]
        async with proxy_for([busy.url], [well.url], HASTY) as (_, url):
            assert status_of(await say(url, ASK)) == 200
            assert "kv_transfer_params" not in well.bodies[-1]
        async with proxy_for([], [busy.url, well.url], HASTY) as (_, url):
            ask = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            assert [status_of(await say(url, ask)) for _ in range(4)] == [200] * 4


async def test_a_request_that_breaks_engines_breaks_three_at_most():
    async with (
        raw(says()) as one,
        raw(says()) as two,
        raw(says()) as three,
        raw(says()) as four,
        proxy_for([], [one.url, two.url, three.url, four.url]) as (_, url),
    ):
        assert status_of(await say(url, ASK)) == 502
        assert sum(len(engine.requests) for engine in (one, two, three, four)) == 3


def first_of_each_connection(*then):
    async def answer(request):
        if request.of_connection:
            await request.says(*then)
            return True
        await request.says(http_answer(b"{}"))
        return False

    return answer


@pytest.mark.parametrize("method", ["completions", "responses"])
async def test_a_kept_connection_that_was_closed_is_no_fault_of_the_engine(method):
    async with raw(first_of_each_connection()) as engine, proxy_for([], [engine.url]) as (_, url):
        ask = post(f"/v1/{method}", b'{"prompt": "x"}')
        assert [status_of(await say(url, ask)) for _ in range(4)] == [200] * 4
        assert await metric(url, "kvd_proxy_stale_connections_total") >= 1
        assert await metric(url, "kvd_proxy_engine_faults_total") == 0


async def test_what_may_have_fetched_the_kv_already_is_not_told_where_it_is_once_more():
    """The request may have been taken before its connection ended: the KV may be others' by now."""
    told = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p", "room": "9"}}
    prefilled = http_answer(json.dumps({"kv_transfer_params": told}).encode())
    async with (
        raw(says(prefilled)) as prefill,
        raw(first_of_each_connection()) as first,
        raw(says(http_answer(b"{}"))) as second,
        proxy_for([prefill.url], [first.url, second.url]) as (_, url),
    ):
        for _ in range(6):
            assert status_of(await say(url, ASK)) == 200
        stale = await metric(url, "kvd_proxy_stale_connections_total")
        bodies = [json.loads(request.body) for request in first.requests + second.requests]
        assert stale >= 1
        assert sum("kv_transfer_params" not in body for body in bodies) == stale


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 200 OK\r\n\r\n{"])
async def test_once_a_byte_of_an_answer_has_come_nothing_is_asked_again(begun):
    engines = raw(first_of_each_connection(begun))
    async with engines as engine, proxy_for([], [engine.url]) as (_, url):
        statuses = [status_of(await say(url, ASK)) for _ in range(2)]
        assert statuses[0] == 200
        assert len(engine.requests) == 2
        assert await metric(url, "kvd_proxy_stale_connections_total") == 0


async def test_an_engine_that_hangs_up_on_a_new_connection_is_asked_once():
    async with raw(says()) as engine, proxy_for([], [engine.url]) as (_, url):
        assert status_of(await say(url, ASK)) == 502
        assert len(engine.requests) == 1


async def test_a_slow_health_is_evidence_of_nothing():
    async def late(_):
        await asyncio.sleep(10)

    engine = FakeEngine("d")
    engine._healthy = late
    async with running(engine), proxy_for([], [engine.url], HASTY) as (server, url):
        for _ in range(3):
            assert status_of(await say(url, ASK)) == 200
            async with asyncio.timeout(30):
                while not server.engines[0].is_late:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        async with aiohttp.request("GET", f"{url}/health") as page:
            assert page.status == 200
            (said,) = (await page.json())["engines"]
        assert (said["up"], said["state"]) == (True, "doubted")
        assert said["why"] == "/health took more than 0.3 s"
        assert said["answered_s_ago"] < 30


@pytest.mark.parametrize(
    ("status", "is_up"), [(200, True), (401, True), (404, True), (503, False), (307, False)]
)
async def test_what_an_engine_says_of_its_health(status, is_up):
    async def health(_):
        return aiohttp.web.Response(status=status, headers={"location": "/"})

    engine = FakeEngine("d")
    engine._healthy = health
    async with running(engine), proxy_for([], [engine.url], HASTY) as (_, url):
        assert status_of(await say(url, ASK)) == (200 if is_up else 503)
        async with aiohttp.request("GET", f"{url}/health") as page:
            assert (page.status == 200) is is_up


async def test_a_dead_engine_gets_requests_again_when_it_lives():
    async with (
        running(FakeEngine("d")) as engine,
        proxy_for([], [engine.url], HASTY) as (server, url),
    ):
        server.engines[0].refused(0.0, "test")
        assert status_of(await say(url, ASK)) == 503
        await asyncio.sleep(0.6)
        assert status_of(await say(url, ASK)) == 200


async def test_other_paths_are_spread_over_engines_and_streamed():
    seen = []

    def answers(name, go_on):
        async def answer(request):
            seen.append(name)
            await request.says(EVENTS, event(b"1"))
            await go_on.wait()
            await request.says(event(b"2"), b"0\r\n\r\n")

        return answer

    go_on = asyncio.Event()
    async with (
        raw(answers("d0", go_on)) as one,
        raw(answers("d1", go_on)) as two,
        proxy_for([], [one.url, two.url]) as (_, url),
        aiohttp.ClientSession() as http,
    ):
        async with http.post(f"{url}/v1/responses", json={"stream": True}) as answer:
            first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 5)
            assert first == b"data: 1\n\n"
            go_on.set()
            assert await answer.read() == b"data: 2\n\n"
        for _ in range(5):
            await (await http.get(f"{url}/v1/models")).read()
    assert (seen.count("d0"), seen.count("d1")) == (3, 3)


async def test_several_prompts_are_not_handed_over_as_one():
    async with (
        running(FakeEngine("p")) as prefill,
        running(FakeEngine("d")) as decode,
        proxy_for([prefill.url], [decode.url]) as (_, url),
    ):
        assert status_of(await say(url, post("/v1/completions", b'{"prompt": ["a", "b"]}'))) == 200
        assert prefill.bodies == []
        assert "kv_transfer_params" not in decode.bodies[0]


async def test_what_the_prefill_engine_answers_goes_to_the_decode_engine_word_for_word():
    told = {"do_remote_prefill": True, "kvd": {"v": 1, "peer": "p", "room": "9"}, "x": [1.5, None]}
    answer = http_answer(json.dumps({"kv_transfer_params": told}).encode())
    async with (
        raw(says(answer)) as prefill,
        running(FakeEngine("d")) as decode,
        proxy_for([prefill.url], [decode.url]) as (_, url),
    ):
        assert status_of(await say(url, ASK)) == 200
        assert decode.bodies[0]["kv_transfer_params"] == told


async def test_an_engine_that_answers_an_upload_early_is_heard():
    async with (
        raw(says(http_answer(b'{"error": "too large"}', status="413 X"))) as engine,
        proxy_for([], [engine.url], HASTY) as (_, url),
    ):
        ask = post(
            "/v1/audio/transcriptions",
            b"--B\r\n" + b"x" * 100,
            "Content-Type: multipart/form-data; boundary=B",
        )
        assert status_of(await say(url, ask)) == 413


async def test_an_engine_that_fails_fast_does_not_draw_all_requests():
    fails = says(http_answer(b'{"error": "oh"}', status="500 Oh"))
    async with (
        raw(fails) as one,
        running(FakeEngine("d")) as well,
        proxy_for([], [one.url, well.url], HASTY) as (_, url),
    ):
        statuses = [status_of(await say(url, ASK)) for _ in range(6)]
    assert statuses == [500, *[200] * 5]


async def test_an_engine_has_an_address_of_ipv6():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WELL)
        writer.close()

    server = await asyncio.start_server(serve, "::1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, proxy_for([], [f"http://[::1]:{port}"]) as (_, url):
        assert status_of(await say(url, ASK)) == 200


async def test_an_answer_without_a_body_goes_through():
    nothing = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with raw(says(nothing)) as engine, proxy_for([], [engine.url]) as (_, url):
        for ask in (
            b"DELETE /v1/responses/a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            b"POST /v1/responses/a/cancel HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ):
            assert status_of(await say(url, ask)) == 204


async def test_stand_in_is_well():
    """The double of these tests says nothing odd when it is not told to."""
    async with raw(says(WELL)) as engine, proxy_for([], [engine.url]) as (_, url):
        assert status_of(await say(url, ASK_STREAM)) == 200
