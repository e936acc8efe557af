"""Prompts that a real daemon keeps for an engine: what is asked about them, and what that sends."""

from __future__ import annotations

import pytest

import kvd.client
from kvd.client import KvdError
from kvd.client.connection import Connection
from kvd.core.leases.prompts import MOST_PROMPTS
from tests.daemon.kv import PAGE, SHAPE, digest, tokens_of, write
from tests.daemon.test_page_keys import keys_of
from tests.support.daemons import one_daemon


@pytest.fixture
def sent(monkeypatch):
    """Bytes of every message that a client sends."""
    sizes = []
    take = Connection.take_outgoing

    def spy(self):
        out = take(self)
        sizes.extend(sum(map(len, one.frames)) for one in out)
        return out

    monkeypatch.setattr(Connection, "take_outgoing", spy)
    return sizes


async def test_a_look_up_of_a_known_long_prompt_sends_less_than_a_hundred_bytes(engines, sent):
    prompt = engines.p.prompt(tokens_of(32_000, seed=60))
    await engines.p.match(prompt)
    first = sum(sent)
    sent.clear()
    await engines.p.match(prompt, namespace="m")
    assert first > 128_000
    assert 0 < sum(sent) < 100


async def test_what_follows_travels_alone_and_hits_what_others_cached(engines, sent):
    tokens = tokens_of(12 * PAGE, seed=61)
    await (await engines.p.lease(tokens)).release(())
    prompt = engines.p.prompt(tokens[: 8 * PAGE])
    assert (await engines.p.match(prompt)).tokens == 8 * PAGE
    prompt.extend(tokens[8 * PAGE :])
    sent.clear()
    lease = await engines.p.lease(prompt)
    assert 4 * 4 * PAGE < sum(sent) < 4 * 4 * PAGE + 150
    assert (lease.prefix_len, prompt.n_tokens) == (12 * PAGE, 12 * PAGE)
    # The lease goes on by itself; the prompt stays what it was.
    await lease.extend(PAGE)
    await lease.release(tokens_of(PAGE, seed=62))
    assert prompt.n_tokens == 12 * PAGE


async def test_one_prompt_for_a_whole_handoff(engines, sent):
    tokens = tokens_of(10 * PAGE + 3, seed=63)
    sending, receiving = engines.p.prompt(tokens), engines.d.prompt(tokens)
    assert (await engines.d.match(receiving)).tokens == 0
    lease = await engines.p.lease(sending)
    write(engines.p, lease, tokens)
    sent.clear()
    room = 6300
    receive = await engines.d.receive(room, receiving, "p")
    send = await engines.p.send(room, sending, lease=lease)
    await send.advance(len(tokens))
    assert (await send.finish()).committed
    got = await receive.done()
    assert sum(sent) < 600
    assert digest(engines.d, receive.lease.pages[:10]) == digest(engines.p, lease.pages[:10])
    assert got is None
    await receive.lease.release()
    await lease.release()


async def test_a_send_without_a_prompt_is_of_all_that_its_lease_knows(engines):
    tokens = tokens_of(5 * PAGE, seed=64)
    lease = await engines.p.lease(tokens)
    write(engines.p, lease, tokens)
    receive = await engines.d.receive(6400, tokens, "p")
    send = await engines.p.send(6400, lease=lease)
    assert (await send.finish()).sent_pages == 5
    await receive.done()
    await receive.lease.release()
    await lease.release()


async def test_a_prompt_of_keys_has_a_number_too(engines, sent):
    keys = keys_of(40, seed=65)
    await (await engines.p.lease(keys=keys[:30])).release(keys=())
    prompt = engines.p.prompt(keys=keys[:20])
    assert (await engines.p.match(prompt)).tokens == 20 * PAGE
    prompt.extend(keys=keys[20:])
    assert (await engines.p.match(prompt)).tokens == 30 * PAGE
    sent.clear()
    assert (await engines.p.match(prompt)).tokens == 30 * PAGE
    assert sum(sent) < 100


async def test_what_the_daemon_dropped_is_told_anew_by_itself(engines, sent):
    tokens = tokens_of(3 * PAGE, seed=66)
    await (await engines.p.lease(tokens)).release(())
    prompt = engines.p.prompt(tokens)
    assert (await engines.p.match(prompt)).tokens == 3 * PAGE
    for number in range(MOST_PROMPTS):
        await engines.p.match(engines.p.prompt([number]))
    sent.clear()
    assert (await engines.p.match(prompt)).tokens == 3 * PAGE
    assert len(sent) == 2  # the first was refused
    (mine,) = [one for one in (await engines.p.snapshot()).clients if one.name == "prefill-engine"]
    assert mine.prompts == MOST_PROMPTS


async def test_a_forgotten_one_is_kept_no_more_and_can_be_asked_about_again(engines):
    prompt = engines.p.prompt(tokens_of(3 * PAGE, seed=67))
    await engines.p.match(prompt)
    prompt.forget()
    (mine,) = [one for one in (await engines.p.snapshot()).clients if one.name == "prefill-engine"]
    assert (mine.prompts, mine.prompt_bytes) == (0, 0)
    assert (await engines.p.match(prompt)).tokens == 0


async def test_keys_beside_a_prompt_are_refused_here(engines):
    prompt = engines.p.prompt([1, 2, 3])
    with pytest.raises(KvdError) as caught:
        await engines.p.match(prompt, extra_keys=b"salt")
    assert caught.value.code == "bad-keys"


def test_the_blocking_client_takes_it_and_a_begun_call_too(pair, sent):
    tokens = tokens_of(40 * PAGE, seed=68)
    with kvd.client.connect_sync(pair.prefill.client, name="scheduler") as node:
        prompt = node.prompt(tokens)
        looking, leasing = node.begin_match(prompt), node.begin_lease(prompt)
        # The second was sent before the first was answered, and sent no token.
        assert len(sent) == 2
        assert sent[1] < 150 < sent[0]
        assert looking.result().tokens == 0
        lease = leasing.result()
        assert len(lease.pages) == 40
        lease.release(upto_tokens=0)


def test_what_all_sessions_may_keep_is_little_and_no_engine_notices(tmp_path, sent):
    """The session with most forgets, and its next call tells its prompt anew by itself."""
    tokens = tokens_of(100 * PAGE, seed=69)
    own = {**SHAPE, "limits.max_told_bytes": str(4 * 150 * PAGE)}
    with (
        one_daemon(tmp_path, own) as daemon,
        kvd.client.connect_sync(daemon.client, name="small") as small,
        kvd.client.connect_sync(daemon.client, name="large") as large,
    ):
        little = small.prompt(tokens[: 40 * PAGE])
        assert small.match(little).tokens == 0
        first, second = large.prompt(tokens), large.prompt([7, *tokens[1:]])
        for _ in range(3):
            for prompt in (first, second):
                lease = large.lease(prompt)
                lease.commit()
                assert large.match(prompt).tokens == 100 * PAGE
                lease.release(())
        sent.clear()
        assert small.match(little).tokens == 40 * PAGE
        assert sum(sent) < 100, "it pays for what another one tells"
        kept = {one.name: one.prompt_bytes for one in large.snapshot().clients}
        assert kept == {"small": 4 * 40 * PAGE, "large": 4 * 100 * PAGE}
