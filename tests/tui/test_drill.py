"""The drill: what goes wrong on real daemons is on the screens within five seconds, explained."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.daemon.test_standing_audit import breakable_daemon
from tests.support.daemons import two_daemons
from tests.tui.drill import operator, stopped, wait_linked
from tests.tui.engine import engines

SHAPE = {"pool.layers": "4", "pool.heads": "2", "pool.head_dim": "64", "pool.pages": "513"}
RELEASED_S = 1.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    more = {"admission.max_deadline_s": "600"}
    with two_daemons(tmp_path_factory.mktemp("pair"), {**SHAPE, **more}) as both:
        yield both


@pytest.fixture
def start(pair):
    with engines() as started:
        yield started
    for daemon in (pair.prefill, pair.decode):
        daemon.wait_for(lambda one=daemon: is_at_rest(one.snapshot()), "still holds", 10.0)


@pytest.fixture
def told(capsys):
    """Prints how long after its cause each thing was on a screen."""
    told: dict[str, float] = {}
    yield told
    with capsys.disabled():
        print("\nseen after", {name: f"{took_s:.2f} s" for name, took_s in told.items()})  # noqa: T201
    assert told


def is_at_rest(now):
    pool = now.pools[0]
    return not (now.leases or now.rooms or now.waiting or pool.held_pages + pool.quarantined_pages)


# ---- a leak --------------------------------------------------------------------------------------


async def test_leaked_page_and_forgotten_lock_are_found_and_shown_where_they_are(tmp_path, told):
    with (
        breakable_daemon(tmp_path) as (daemon, wish),
        engines() as start,
    ):
        start("works", daemon.client, "sglang-0", 1, 2)
        async with operator(daemon, told) as person:

            def breaks(how):
                wish.write_text(how)
                os.kill(daemon.pid, signal.SIGUSR1)
                person.causes()

            breaks("lost_page")
            await person.reads("leak in the head", r"\A BAD .* problems 1 ")
            await person.reads("leak on overview", r"violation: .*page \d+ is nowhere")
            await person.turns("overview")
            await person.reads(
                "leak among the findings", r"HIGH +violation: ", r"page \d+ is nowhere"
            )
            await person.turns("pools")
            await person.reads("leak on pools", r"\? nobody .* 1\n")

            breaks("lost_unlock")
            await person.reads("lock in the head", r"\A BAD .* problems 2 ")
            await person.turns("overview")
            text = await person.reads(
                "lock among the findings", r"violation: I2: node \d+ .*lock_ref"
            )
            node = f"node:{re.search(r'violation: I2: node ([0-9]+)', text)[1]}"
            await person.turns("radix")
            await person.presses("l")
            await person.reads(
                "lock on radix", r"locked nodes ━+ 1-\d+ of \d+", r"\(no namespace\) +\d+ "
            )
            assert node in person.app.page.table().data.order


# ---- a dead engine -------------------------------------------------------------------------------


async def test_killed_engine_is_gone_from_the_screens_and_its_pages_are_free(pair, start, told):
    engine = start("hoards", pair.decode.client, "sglang-0", 10**6, 112)
    async with operator(pair.decode, told, "engines") as person:
        await person.reads("alive", r"sglang-0 .* . alive .* 400 ")
        engine.kill()
        engine.wait()
        person.causes()
        await person.reads("free on engines", r"engines 0 ", r"none", within_s=RELEASED_S)
        assert pair.decode.snapshot().pools[0].free_pages == 512
        await person.turns("events")
        await person.reads("death on events", r"client-left|sglang-0", r"released")


async def test_pages_that_a_remote_may_write_for_a_killed_engine_are_quarantined_by_name(
    pair, start, told
):
    engine = start("receives-and-keeps", pair.decode.client, "sglang-0", 100, 2, "p")
    start("sends-some", pair.prefill.client, "prefill-0", 100, 2)
    async with operator(pair.decode, told, "engines") as person:
        await person.reads("alive", r"sglang-0 .* . alive ", r"receive from p")
        with stopped(pair.prefill):
            engine.kill()
            engine.wait()
            person.causes()
            await person.reads("writer on engines", r"quarantine", r"\bp\b", within_s=RELEASED_S)
            await person.turns("overview")
            await person.reads("quarantine among the findings", r"quarantine: .* lease \d+")
            await person.reads("its evidence", r"p .*may still write", r"x: (fence|open)")
            await person.types("fence")
            await person.reads(
                "fence rehearsed", r"What would come of it now", r"\d+ +quarantined pages"
            )
            await person.presses("y")
            await person.reads("fence done", r"\d+ +quarantined pages", within_s=10.0)
            await person.presses("escape")
            person.causes()
            await person.turns("pools")
            await person.presses("l")
            freed = r"(?s)\A(?!.*(?:Q quarantined|asked for)).*lens state.*\n\. free "
            await person.reads("free on pools", freed, within_s=RELEASED_S)
    wait_linked(pair)


async def test_engine_whose_child_keeps_its_connection_is_said_to_be_dead(pair, start, told):
    engine = start("forks", pair.decode.client, "sglang-0", 1, 1)
    async with operator(pair.decode, told) as person:
        engine.kill()
        engine.wait()
        person.causes()
        await person.reads("death on overview", r"client-gone: sglang-0 is kept by pid \d+")
        await person.turns("pools")
        await person.presses("e")
        await person.reads("death on engines", r"sglang-0 .* ! outlived ")
        await person.turns("overview")
        await person.reads(
            "action among the findings", r"forked from pid \d+, which ended", r"copy: kill \d+"
        )
        person.causes()
        engine.stdin.close()
        await person.reads("released", r"engines 0 ", r"problems", within_s=RELEASED_S)


# ---- a stuck handoff -----------------------------------------------------------------------------


async def test_handoff_whose_prefill_engine_stops_is_explained_and_ended_from_here(
    pair, start, told
):
    start("receives-and-keeps", pair.decode.client, "decode-0", 300, 1, "p")
    start("sends-some", pair.prefill.client, "prefill-0", 300, 1)
    async with operator(pair.decode, told, "handoffs") as person:
        person.causes()
        await person.reads(
            "silence on handoffs",
            r"nothing for [2-9]\.\d*s: d waits for the rest of .*, as p waits for the engine to",
        )
        await person.turns("overview")
        await person.reads(
            "stuck among the findings",
            r"stuck-handoff: room 300 from p: [\d.]+ \w+ of [\d.]+ \w+, and nothing since",
        )
        person.causes()
        await person.presses("x")
        await person.reads("proposed", r":open receive:\d+")
        await person.presses("enter")
        await person.reads("opened", r">4 handoffs<", r"receiving")
        await person.presses("ctrl+k", "enter")
        await person.reads("rehearsed", r"What would come of it now", r"y  do it")
        await person.presses("y")
        await person.reads("done", r"\b1 +receive\b")
        await person.presses("escape")
        await person.turns("events")
        await person.reads("ended", r"handoff-ended +room 300 .*an operator asked for it")
        assert not pair.decode.snapshot().rooms
        assert not pair.prefill.snapshot().rooms


async def test_prompt_that_a_decode_engine_never_lets_go_has_its_name_and_age(pair, start, told):
    start("receives-and-keeps", pair.decode.client, "decode-0", 400, 1, "p")
    start("sends-all", pair.prefill.client, "prefill-0", 400, 1)
    async with operator(pair.decode, told, "engines") as person:
        person.causes()
        await person.reads("kept", r"held +received from p ", r"leases of decode-0 \(client:\d+\)")
        await person.presses("tab", "enter")
        await person.reads("card", r"lease:\d+", r"decode-0", r"received from p")


async def test_silent_peer_is_named_as_what_a_handoff_waits_for(pair, start, told):
    start("receives-and-keeps", pair.decode.client, "decode-0", 500, 1, "p")
    start("sends-some", pair.prefill.client, "prefill-0", 500, 1)
    async with operator(pair.decode, told, "overview") as person:
        with stopped(pair.prefill):
            person.causes()
            await person.reads("silent peer", r"peer-silent: p is suspect")
            await person.turns("handoffs")
            await person.reads(
                "drained", r"draining +. p ", r"p has been silent for", r"or a fence"
            )
            await person.turns("peers")
            await person.reads("on peers", r"\bp\b.*lost")
            await person.turns("overview")
            await person.reads("lost among the findings", r"peer-lost: p is lost", r"quarantine: ")
            await person.reads("quarantine", r"p .*may still write", r"x: (fence|open)")
    wait_linked(pair)


# ---- a full pool ---------------------------------------------------------------------------------


async def test_full_pool_says_who_has_the_most_of_it_and_since_when(pair, start, told):
    start("hoards", pair.decode.client, "greedy", 10**6, 0)
    async with operator(pair.decode, told) as person:
        start("waits", pair.decode.client, "patient", 1, 3)
        person.causes()
        await person.reads(
            "overview",
            r"waiting 3 ",
            r"pool-short: kv can give 0 of 512 pages, 1 request waits and 2 behind",
            r"lease of patient needs\b",
            r"greedy\s+\d+: 512 pages by 1 lease",
            r"x: open lease:\d+",
        )
        await person.presses("x", "enter")
        await person.reads("holder", r"lease:\d+", r"greedy")
