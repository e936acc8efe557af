"""The proxy beside a real daemon: what is cached is asked, and a dead daemon delays nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

import kvd.client
from kvd.harness.daemons import one_daemon
from kvd.proxy.bodies import json_bytes, prompt_bytes
from kvd.proxy.engines import EngineAddress, EngineRole, ProxiedEngine
from kvd.proxy.exchange import EngineClient
from kvd.proxy.limits import ProxyLimits
from kvd.proxy.lookup import NAMED_AGAIN_S, DaemonLink, PromptLookup
from kvd.proxy.metrics import ProxyMetrics, namespaces_in
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

LIMIT_TOKENS = 2000
SHAPE = {
    "limits.max_prompt_tokens": str(LIMIT_TOKENS),
    "pool.layers": "1",
    "pool.heads": "1",
    "pool.head_dim": "8",
    "pool.pages": "64",
}
TOKENS = list(range(100, 180))


@pytest.fixture
def daemon(tmp_path):
    with one_daemon(tmp_path, SHAPE, name="node-0") as one:
        yield one


def engine(daemon, url="http://127.0.0.1:9", namespace=""):
    address = EngineAddress(EngineRole.DECODE, url, daemon.client, namespace)
    return ProxiedEngine(address, answered_s=0.0)


@pytest.fixture
def patient(monkeypatch):
    """A busy host may take longer than a request may wait, which is not asked about here."""
    monkeypatch.setattr("kvd.proxy.lookup.ASK_S", 10.0)


@pytest.fixture
async def lookup_for():
    metrics = ProxyMetrics([], time.monotonic)
    client = EngineClient(ProxyLimits(), metrics)
    made = []

    def make(*engines):
        made.append(PromptLookup(client, engines, metrics, 10.0))
        return made[-1]

    yield make
    for lookup in made:
        await lookup.close()
    await client.close()


@pytest.mark.usefixtures("patient")
async def test_the_daemon_says_what_is_cached_in_the_engines_namespace(daemon, lookup_for):
    async with kvd.client.connect(daemon.client, name="engine") as node:
        lease = await node.lease(TOKENS, namespace="m")
        await lease.release(())
    there, elsewhere = engine(daemon, namespace="m"), engine(daemon)
    lookup = lookup_for(there, elsewhere)
    prompt = await lookup.cached({"prompt": TOKENS})
    assert prompt.n_tokens == 80
    assert prompt.cached == {there: 80, elsewhere: 0}


@pytest.mark.usefixtures("patient")
async def test_a_node_that_has_more_of_a_prompt_is_named_in_the_namespace_of_the_engine(
    daemon, tmp_path, lookup_for
):
    with one_daemon(tmp_path, SHAPE, name="node-1") as other:
        for place, n_tokens in ((daemon, 16), (other, 80)):
            async with kvd.client.connect(place.client, name="engine") as node:
                await (await node.lease(TOKENS[:n_tokens], namespace="m")).release(())
        little, much = engine(daemon, namespace="m"), engine(other, namespace="m")
        unlike, silent = engine(daemon, namespace="n"), engine(daemon, namespace="m")
        lookup = lookup_for(little, much, unlike)
        prompt = await lookup.cached({"prompt": TOKENS})
        named = [lookup.fuller_node(one, prompt) for one in (little, much, unlike, silent)]
        assert named == ["node-1", "", "", ""]
        # A few more are not worth the way.
        prompt = await lookup.cached({"prompt": TOKENS[:64]})
        assert lookup.fuller_node(little, prompt) == ""


@pytest.mark.usefixtures("patient")
async def test_the_next_turn_is_prefilled_with_what_was_decoded_on_another_node(daemon, tmp_path):
    with one_daemon(tmp_path, SHAPE, name="node-1") as other:
        async with kvd.client.connect(other.client, name="engine") as node:
            await (await node.lease(TOKENS, namespace="m")).release(())
        async with running(FakeEngine("p")) as prefill, running(FakeEngine("d")) as decode:
            decode.go_on.set()
            daemons = {prefill.url: daemon.client, decode.url: other.client}
            async with proxy_for([prefill.url], [decode.url], daemons=daemons) as (_, url):
                body = {"prompt": TOKENS, "max_tokens": 4}
                answer = await say(url, post("/v1/completions", json_bytes(body)))
    assert status_of(answer) == 200
    (told,) = [asked["kv_transfer_params"] for asked in prefill.bodies]
    assert told["kvd"] == {"v": 1, "peer": "node-1", "opens": told["transfer_id"]}
    # And the decode engine is told where the prefill engine keeps it, as ever.
    assert decode.bodies[0]["kv_transfer_params"]["kvd"]["room"] == "77"


@pytest.mark.usefixtures("patient")
async def test_text_is_looked_up_in_the_tokens_of_the_engine(daemon, lookup_for):
    async with kvd.client.connect(daemon.client, name="engine") as node:
        await (await node.lease(TOKENS)).release(())
    async with running(FakeEngine("d", tokens=[*TOKENS[:64], 1, 2])) as decode:
        there = engine(daemon, decode.url)
        prompt = await lookup_for(there).cached({"messages": [{"role": "user", "content": "x"}]})
    assert (prompt.n_tokens, prompt.cached) == (66, {there: 64})


async def test_a_daemon_that_hangs_costs_one_tenth_of_a_second_once(daemon, lookup_for):
    there = engine(daemon)
    lookup = lookup_for(there)
    body = {"prompt": TOKENS}
    lookup.note(there, prompt_bytes(body))
    guessed = len(prompt_bytes(body)) // 256 * 64
    assert (await lookup.cached(body)).cached == {there: 0}
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        took_s = []
        for _ in range(2):
            began_s = time.monotonic()
            assert (await lookup.cached(body)).cached == {there: guessed}
            took_s.append(time.monotonic() - began_s)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert took_s[0] < 1.0
    assert took_s[1] < 0.05


@pytest.mark.usefixtures("patient")
async def test_a_prompt_that_the_daemon_refuses_blinds_nobody(daemon):
    async with kvd.client.connect(daemon.client, name="engine") as node:
        await (await node.lease(TOKENS)).release(())
    link = DaemonLink(daemon.client)
    assert await link.cached_tokens(TOKENS, "") == 80
    for namespace, tokens in (("", range(LIMIT_TOKENS + 1)), ("n" * 10_000, TOKENS)):
        assert await link.cached_tokens(list(tokens), namespace) is None
        assert await link.cached_tokens(TOKENS, "") == 80
    assert link.why == ""
    await link.close()


async def test_many_at_once_blind_nobody_whether_all_are_answered_in_time_or_not(daemon):
    link = DaemonLink(daemon.client)
    answers = await asyncio.gather(*(link.cached_tokens(TOKENS, "") for _ in range(200)))
    # Each has a tenth of a second, which a busy host may exceed; the link is not given up for it.
    assert set(answers) <= {0, None}
    assert 0 in answers
    assert link.why == ""
    await link.close()


async def test_a_daemon_that_is_not_there_is_asked_seldom_and_says_why(tmp_path):
    link = DaemonLink(f"ipc://{tmp_path}/client.sock")
    assert await link.cached_tokens(TOKENS, "") is None
    assert link.why
    began_s = time.monotonic()
    assert [await link.cached_tokens(TOKENS, "") for _ in range(20)] == [None] * 20
    assert time.monotonic() - began_s < 0.05


def named(*namespaces, value="1.0"):
    lines = ["# HELP vllm:kvd_namespace_info x", "# TYPE vllm:kvd_namespace_info gauge"]
    for number, namespace in enumerate(namespaces):
        labels = f'model_name="m",engine="{number}",namespace="{namespace}"'
        lines.append(f"vllm:kvd_namespace_info{{{labels}}} {value}")
    return "\n".join(["vllm:other 1.0", *lines, "vllm:kvd_namespace_information 1", ""])


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (named("lab/m:float32:0a"), {"lab/m:float32:0a"}),
        (named("m", "m"), {"m"}),
        (named("a", "b"), {"a", "b"}),
        (named("m", value="0.0"), set()),
        (named("a") + named("b", value="0"), {"a"}),
        (named('a\\"b}c\\\\d'), {'a"b}c\\d'}),
        ("", set()),
        ("vllm:kvd_namespace_info{", set()),
        ("vllm:kvd_namespace_info{} 1", set()),
        ('vllm:kvd_namespace_info{namespace="a"} x', set()),
        ("<html>vllm:kvd_namespace_info", set()),
    ],
)
def test_a_page_of_metrics_names_the_namespaces_of_now(page, expected):
    assert namespaces_in(page.encode()) == expected
    assert namespaces_in(b"\xff\xfe\0" + b"x" * 100 + b"\n" + page.encode()) == expected


def test_a_page_that_names_thousands_is_not_read_to_its_end():
    assert len(namespaces_in(named(*map(str, range(10_000))).encode())) <= 256
    assert namespaces_in(named("n" * 100_000, "m").encode()) == {"m"}


@pytest.mark.usefixtures("patient")
async def test_an_engine_says_its_namespace_itself_and_may_change_it(
    daemon, lookup_for, monkeypatch
):
    async with kvd.client.connect(daemon.client, name="engine") as node:
        await (await node.lease(TOKENS, namespace="old")).release(())
        await (await node.lease(TOKENS[:32], namespace="new")).release(())
    async with running(FakeEngine("d")) as decode:
        there = engine(daemon, decode.url, namespace=None)
        lookup = lookup_for(there)

        async def found():
            await lookup.namespaces.ask(there, 5.0)
            return (await lookup.cached({"prompt": TOKENS})).cached[there]

        assert await found() == 0
        assert "after its first request" in lookup.why_not_asked(there)
        assert (lookup.counts[there].asked, lookup.counts[there].no_namespace) == (0, 1)
        decode.metrics = named("old")
        assert await found() == 80
        assert lookup.why_not_asked(there) == ""
        # It is read again after a while, or when the engine was down meanwhile.
        decode.metrics = named("new")
        assert await found() == 80
        monkeypatch.setattr("kvd.proxy.lookup.NAMED_AGAIN_S", -1.0)
        assert NAMED_AGAIN_S > 0
        await found()
        there.refused(0.0, "gone")
        assert await found() == 0
        there.said_well(0.0)
        assert await found() == 32
        # Two at once are no answer.
        decode.metrics = named("new", "old")
        assert await found() == 0
        assert "several" in lookup.why_not_asked(there)


async def test_an_engine_that_does_not_say_its_namespace_in_time_keeps_the_one_it_said(
    daemon, lookup_for, monkeypatch
):
    monkeypatch.setattr("kvd.proxy.lookup.NAMED_AGAIN_S", -1.0)

    async def once(request):
        if len(decode.requests) == 1:
            await request.says(http_answer(named("m").encode()))
        else:
            await request.reader.read()
        return True

    async with raw(once) as decode:
        there = engine(daemon, decode.url, namespace=None)
        lookup = lookup_for(there)
        for wait_s in (5.0, 0.2):
            await lookup.namespaces.ask(there, wait_s)
            assert lookup.namespaces.of(there) == "m"
        assert len(decode.requests) == 2


@pytest.mark.usefixtures("patient")
async def test_what_came_of_lookups_is_counted(daemon, lookup_for):
    there = engine(daemon, namespace="nobody keeps anything here")
    lookup = lookup_for(there)
    await lookup.cached({"prompt": TOKENS})
    await lookup.cached({"prompt": list(range(LIMIT_TOKENS + 1))})
    counts = lookup.counts[there]
    assert (counts.asked, counts.answered, counts.tokens, counts.cached_tokens) == (2, 1, 80, 0)
    page = lookup_metrics(lookup)
    labels = 'engine="http://127.0.0.1:9"'
    assert f'kvd_proxy_lookups_total{{{labels},how="answered",role="decode"}} 1.0' in page
    assert f'kvd_proxy_lookups_total{{{labels},how="no-answer",role="decode"}} 1.0' in page
    assert f'kvd_proxy_lookup_tokens_total{{{labels},found="lacking",role="decode"}} 80.0' in page


def lookup_metrics(lookup):
    return lookup._metrics.page().decode()
