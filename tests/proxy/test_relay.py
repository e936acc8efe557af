"""Requests through a proxy, with engines that tell what they were asked."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.proxy.engines import FakeEngine, proxy_for, running

PROMPT = {"model": "m", "prompt": "tell me", "max_tokens": 7}
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(http, url, **more):
    async with http.post(f"{url}/v1/completions", json={**PROMPT, **more}) as answer:
        return answer.status, json.loads(await answer.read())


async def test_the_prompt_is_prefilled_by_one_and_decoded_by_the_other(http):
    async with (
        running(FakeEngine("p")) as prefill,
        running(FakeEngine("d")) as decode,
        proxy_for([prefill.url], [decode.url]) as (_, url),
    ):
        assert await ask(http, url) == (200, {"choices": [{"text": "d"}]})
        (asked,), (told,) = prefill.bodies, decode.bodies
    assert (asked["max_tokens"], asked["stream"]) == (1, False)
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert told == {
        **PROMPT,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "kvd": {"v": 1, "peer": "p0", "room": "77"},
        },
    }
    trace = prefill.headers[0]["traceparent"]
    assert trace == decode.headers[0]["traceparent"]
    assert len(trace) == 55


async def test_pieces_come_when_the_engine_says_them(http):
    async with (
        running(FakeEngine("d")) as decode,
        proxy_for([], [decode.url]) as (server, url),
        http.post(f"{url}/v1/completions", json={**PROMPT, "stream": True}) as answer,
    ):
        # The engine says nothing more until it is told to.
        first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 5)
        assert first == b'data: {"n": 0}\n\n'
        assert [one.waiting_tokens for one in server.engines] == [0]
        assert [one.open_requests for one in server.engines] == [1]
        decode.go_on.set()
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        assert answer.headers["content-type"] == "text/event-stream"
        assert [one.open_requests for one in server.engines] == [0]


async def test_who_hangs_up_ends_the_request_of_the_engine(http):
    async with (
        running(FakeEngine("d", pieces=50)) as decode,
        proxy_for([], [decode.url]) as (server, url),
    ):
        async with http.post(f"{url}/v1/completions", json={**PROMPT, "stream": True}) as answer:
            await answer.content.readuntil(b"\n\n")
            answer.close()
        await asyncio.wait_for(decode.hung_up.wait(), 5)
        async with asyncio.timeout(5):
            while server.engines[0].open_requests:  # noqa: ASYNC110 - counts, not an event
                await asyncio.sleep(0.01)


async def test_a_prefill_that_fails_is_computed_where_it_is_decoded(http):
    async with (
        running(FakeEngine("p", status=500)) as prefill,
        running(FakeEngine("d")) as decode,
        proxy_for([prefill.url], [decode.url]) as (_, url),
    ):
        assert (await ask(http, url))[0] == 200
        assert decode.bodies == [PROMPT]
        async with http.get(f"{url}/metrics") as page:
            assert "kvd_proxy_prefill_failed_total 1.0" in await page.text()


async def test_what_the_client_did_wrong_is_told_as_the_engine_said_it(http):
    refusal = b'{"error": {"message": "too long"}}'
    async with (
        running(FakeEngine("p", status=400, refusal=refusal)) as prefill,
        running(FakeEngine("d")) as decode,
        proxy_for([prefill.url], [decode.url]) as (_, url),
    ):
        assert await ask(http, url) == (400, json.loads(refusal))
        assert decode.bodies == []


async def test_a_decode_engine_that_cannot_be_reached_is_replaced_and_has_taken_no_room(http):
    async with (
        running(FakeEngine("p")) as prefill,
        running(FakeEngine("d1")) as first,
        running(FakeEngine("d2")) as second,
        proxy_for([prefill.url], [first.url, second.url]) as (server, url),
    ):
        gone, _ = server.engines[1:]
        gone.address = type(gone.address)(gone.address.role, NOBODY)
        assert await ask(http, url) == (200, {"choices": [{"text": "d2"}]})
        assert gone.is_refusing
        assert (await ask(http, url))[0] == 200
        assert all("kv_transfer_params" in body for body in second.bodies)


async def test_without_engines_the_client_is_told_who_is_down_and_why(http):
    async with proxy_for([], [NOBODY]) as (_, url):
        status, said = await ask(http, url)
        assert status == 503
        assert NOBODY in said["error"]["message"]
        async with http.get(f"{url}/health") as page:
            assert page.status == 503
            assert json.loads(await page.read())["engines"][0]["up"] is False


async def test_an_answer_that_breaks_off_is_cut_for_the_client_too(http):
    async with (
        running(FakeEngine("d", breaks_after=1)) as decode,
        proxy_for([], [decode.url]) as (_, url),
    ):
        decode.go_on.set()
        with pytest.raises(aiohttp.ClientError):
            async with http.post(f"{url}/v1/completions", json={**PROMPT, "stream": True}) as one:
                await one.content.read()


async def test_a_conversation_goes_where_it_was_before(http):
    async with (
        running(FakeEngine("d1")) as first,
        running(FakeEngine("d2")) as second,
        proxy_for([], [first.url, second.url]) as (_, url),
    ):
        talks = {"a": "a" * 3000, "b": "b" * 3000}
        async with http.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}):
            # One request is open at the first, so that the other is preferred.
            (_, said) = await ask(http, url, prompt=talks["b"])
            assert said["choices"][0]["text"] == "d2"
            first.go_on.set()
        for turn in range(3):
            _, said = await ask(http, url, prompt=talks["b"] + "more" * turn)
            assert said["choices"][0]["text"] == "d2"
        assert len(second.bodies) == 4


async def test_other_pages_go_to_an_engine_as_they_are(http):
    async with (
        running(FakeEngine("d")) as decode,
        proxy_for([], [decode.url]) as (_, url),
        http.get(f"{url}/v1/models?full=1") as page,
    ):
        said = json.loads(await page.read())
        assert said == {"data": [{"id": "d"}], "asked": "/v1/models?full=1"}


async def test_a_body_that_is_no_json_is_refused_here(http):
    async with (
        running(FakeEngine("d")) as decode,
        proxy_for([], [decode.url]) as (_, url),
        http.post(f"{url}/v1/chat/completions", data=b"{") as answer,
    ):
        assert answer.status == 400
        assert json.loads(await answer.read())["error"]["type"] == "invalid_request_error"
        assert decode.bodies == []
