"""Both engines asked at once: what each is told, and what becomes of one when the other fails."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from kvd.proxy.at_once import MOST_BEFORE
from kvd.proxy.engines import EngineAddress, EngineRole
from kvd.proxy.limits import ProxyLimits
from tests.proxy.engines import FakeEngine, proxy_for, running

PROMPT = {"model": "m", "prompt": "tell me", "max_tokens": 7}
REFUSAL = b'{"error": {"message": "too long"}}'


class Met:
    """A proxy that knows that its prefill engine opens rooms, by one prompt that went in turn."""

    def __init__(self, http, url, prefills, decodes, server):
        self.http, self.url, self.server = http, url, server
        self.prefills, self.decodes = prefills, decodes

    @property
    def prefill(self):
        return self.prefills[0]

    @property
    def decode(self):
        return self.decodes[0]

    async def ask(self, **more):
        async with self.http.post(f"{self.url}/v1/completions", json={**PROMPT, **more}) as answer:
            return answer.status, json.loads(await answer.read())

    async def until_both_are_asked(self):
        async with asyncio.timeout(5):
            await asyncio.gather(self.prefill.came.wait(), self.decode.came.wait())

    async def metrics(self):
        async with self.http.get(f"{self.url}/metrics") as page:
            return await page.text()


@asynccontextmanager
async def met(prefills=1, decodes=1, limits=None):
    async with AsyncExitStack() as ends:
        http = await ends.enter_async_context(aiohttp.ClientSession())
        started = [
            [await ends.enter_async_context(running(FakeEngine(f"{name}{n}"))) for n in range(many)]
            for name, many in (("p", prefills), ("d", decodes))
        ]
        for engine in started[0]:
            engine.opens_at = f"node-{engine.name}"
        urls = [[engine.url for engine in engines] for engines in started]
        server, url = await ends.enter_async_context(proxy_for(*urls, limits))
        found = Met(http, url, *started, server)
        for _ in range(prefills):
            assert await found.ask() == (200, {"choices": [{"text": "d0"}]})
        for engine in (*started[0], *started[1]):
            engine.bodies.clear()
            engine.came.clear()
        started[0][0].computes = asyncio.Event()
        yield found


async def test_the_first_prompt_goes_in_turn_and_the_next_to_both_at_once():
    async with met() as pair:
        asked = asyncio.ensure_future(pair.ask())
        await pair.until_both_are_asked()
        (prompt,), (told,) = pair.prefill.bodies, pair.decode.bodies
        room = prompt["kv_transfer_params"]["kvd"]["opens"]
        assert 0 < int(room) < 1 << 62
        assert told == {
            **PROMPT,
            "kv_transfer_params": {"kvd": {"v": 1, "peer": "node-p0", "room": room, "soon": True}},
        }
        # It was there before the other one: it had all of it.
        assert await asyncio.wait_for(asked, 5) == (200, {"choices": [{"text": "d0"}]})
        await asyncio.wait_for(pair.prefill.hung_up.wait(), 5)


async def test_the_decode_engine_answers_when_the_prefill_engine_has_answered():
    async with met() as pair:
        pair.decode.waits_for = asyncio.Event()
        asked = asyncio.ensure_future(pair.ask())
        await pair.until_both_are_asked()
        pair.prefill.computes.set()
        await asyncio.sleep(0.1)
        pair.decode.waits_for.set()
        assert await asyncio.wait_for(asked, 5) == (200, {"choices": [{"text": "d0"}]})
        assert len(pair.decode.bodies) == 1
        assert not pair.prefill.hung_up.is_set()
        assert "kvd_proxy_prefill_failed_total 0.0" in await pair.metrics()


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_where_the_prompt_fails_the_decode_engine_computes_it(status):
    async with met() as pair:
        pair.decode.waits_for = asyncio.Event()
        asked = asyncio.ensure_future(pair.ask())
        await pair.until_both_are_asked()
        pair.prefill.status = status
        pair.prefill.computes.set()
        await asyncio.wait_for(pair.decode.hung_up.wait(), 5)
        pair.decode.waits_for.set()
        assert await asyncio.wait_for(asked, 5) == (200, {"choices": [{"text": "d0"}]})
        assert pair.decode.bodies[1] == PROMPT
        assert "kvd_proxy_prefill_failed_total 1.0" in await pair.metrics()
        # It is not held against the engine that waited.
        assert pair.server.engines[1].failed_in_a_row == 0
        assert pair.server.engines[1].open_requests == 0


async def test_where_the_prompt_fails_another_prefill_engine_computes_it():
    async with met(prefills=2) as pair:
        pair.decode.waits_for = asyncio.Event()
        asked = asyncio.ensure_future(pair.ask())
        await pair.until_both_are_asked()
        pair.prefill.status = 500
        pair.prefill.computes.set()
        await asyncio.wait_for(pair.decode.hung_up.wait(), 5)
        pair.decode.waits_for.set()
        assert (await asyncio.wait_for(asked, 5))[0] == 200
        assert pair.decode.bodies[1]["kv_transfer_params"]["kvd"]["peer"] == "node-p1"


async def test_a_prompt_that_went_on_without_kvd_is_not_waited_for():
    """Its node has no pages, or no daemon: the answer names no room, or another one."""
    async with met() as pair:
        pair.decode.waits_for = asyncio.Event()
        asked = asyncio.ensure_future(pair.ask())
        await pair.until_both_are_asked()
        pair.prefill.opens_at = ""
        pair.prefill.computes.set()
        await asyncio.wait_for(pair.decode.hung_up.wait(), 5)
        pair.decode.waits_for.set()
        assert (await asyncio.wait_for(asked, 5))[0] == 200
        assert pair.decode.bodies[1]["kv_transfer_params"]["kvd"]["room"] == "77"
        # From now on it goes in turn.
        assert pair.server.engines[0].opens_at == ""


async def test_what_the_client_did_wrong_is_told_as_the_prefill_engine_said_it():
    async with met() as pair:
        pair.decode.waits_for = asyncio.Event()
        asked = asyncio.ensure_future(pair.ask())
        await pair.until_both_are_asked()
        pair.prefill.status, pair.prefill.refusal = 400, REFUSAL
        pair.prefill.computes.set()
        assert await asyncio.wait_for(asked, 5) == (400, json.loads(REFUSAL))
        await asyncio.wait_for(pair.decode.hung_up.wait(), 5)


async def test_a_prompt_that_takes_too_long_is_computed_where_it_is_decoded():
    async with met(limits=ProxyLimits(prefill_s=0.3)) as pair:
        pair.decode.waits_for = asyncio.Event()
        asked = asyncio.ensure_future(pair.ask())
        await asyncio.wait_for(pair.decode.hung_up.wait(), 5)
        pair.decode.waits_for.set()
        assert (await asyncio.wait_for(asked, 5))[0] == 200
        assert pair.decode.bodies[1] == PROMPT


async def test_who_hangs_up_ends_both():
    async with met() as pair:
        pair.decode.waits_for = asyncio.Event()
        asked = asyncio.ensure_future(pair.ask())
        await pair.until_both_are_asked()
        asked.cancel()
        async with asyncio.timeout(5):
            await asyncio.gather(pair.prefill.hung_up.wait(), pair.decode.hung_up.wait())


async def test_a_decode_engine_that_is_busy_leaves_the_room_to_the_next():
    async with met(decodes=2) as pair:
        pair.prefill.computes.set()
        for decode in pair.decodes:
            decode.status = 429
        pair.decodes[1].status = 200
        # Whichever is asked first, the second one is told the same room.
        for _ in range(2):
            assert (await pair.ask())[1] == {"choices": [{"text": "d1"}]}
        for prompt, told in zip(pair.prefill.bodies, pair.decodes[1].bodies, strict=True):
            room = prompt["kv_transfer_params"]["kvd"]["opens"]
            assert told["kv_transfer_params"]["kvd"]["room"] == room


async def test_a_decode_engine_that_breaks_may_have_had_it():
    async with met(decodes=2) as pair:
        pair.decodes[0].status = 500
        pair.prefill.computes.set()
        assert await pair.ask() is not None


async def test_a_stream_goes_on_though_the_prefill_engine_breaks_then():
    async with met() as pair:
        url = f"{pair.url}/v1/completions"
        async with pair.http.post(url, json={**PROMPT, "stream": True}) as answer:
            first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 5)
            assert first == b'data: {"n": 0}\n\n'
            pair.prefill.status = 500
            pair.prefill.computes.set()
            await asyncio.sleep(0.1)
            pair.decode.go_on.set()
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")


async def test_two_engines_beside_one_daemon_go_in_turn():
    async with met() as pair:
        daemon = "ipc:///nowhere/client.sock"
        for engine, role in zip(pair.server.engines, EngineRole, strict=True):
            engine.address = EngineAddress(role, engine.address.url, daemon)
        asked = asyncio.ensure_future(pair.ask())
        await asyncio.wait_for(pair.prefill.came.wait(), 5)
        await asyncio.sleep(0.1)
        assert not pair.decode.came.is_set()
        pair.prefill.computes.set()
        assert (await asyncio.wait_for(asked, 5))[0] == 200


async def test_behind_many_prompts_the_next_goes_in_turn():
    async with met() as pair:
        pair.decode.waits_for = asyncio.Event()
        asked = [asyncio.ensure_future(pair.ask(prompt=f"{n}")) for n in range(MOST_BEFORE + 2)]
        async with asyncio.timeout(5):
            while len(pair.prefill.bodies) < MOST_BEFORE + 2:  # noqa: ASYNC110 - counts
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(pair.decode.bodies) == MOST_BEFORE
        pair.prefill.computes.set()
        pair.decode.waits_for.set()
        for answer in asked:
            assert (await asyncio.wait_for(answer, 5))[0] == 200


async def test_several_prompts_go_to_the_decode_engine_alone():
    async with met() as pair:
        assert (await pair.ask(prompt=["one", "two"]))[0] == 200
        assert pair.prefill.bodies == []
