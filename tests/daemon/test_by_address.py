"""Peers that no configuration names: an engine gives their address, and the daemon dials them."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

import pytest

import kvd.client
from kvd import curve
from kvd.client import KvdError
from tests.daemon.kv import SHAPE
from tests.support.daemons import Daemon, free_port

SMALL = SHAPE
PROMPT = list(range(1, 101))


@contextlib.contextmanager
def serving(*daemons):
    """They serve, for as long as the block lasts."""
    try:
        for one in daemons:
            one.start()
        for one in daemons:
            one.wait_ready()
        yield
    finally:
        for one in daemons:
            one.stop()


def two(directory, *, keyed):
    """``p`` and ``d``, of which none dials; each knows the other's key, and keys of strangers."""
    p, d = Daemon("p", directory, SMALL), Daemon("d", directory, SMALL)
    for one, other in ((p, d), (d, p)) if keyed else ():
        for stranger in ("a", "z"):
            one.trusts(stranger, curve.new_pair().public)
        other.trusts(one.name, one.make_keys())
    return p, d


@pytest.fixture(scope="module", params=[False, True], ids=["loopback", "keys"])
def strangers(request):
    with tempfile.TemporaryDirectory(prefix="kvd-address-") as name:
        p, d = two(Path(name), keyed=request.param)
        with serving(p, d):
            yield p, d


async def handed_over(p, d, room, *, source, to=""):
    async with (
        kvd.client.connect(p.client, name="pe") as prefill,
        kvd.client.connect(d.client, name="de") as decode,
    ):
        lease = await prefill.lease(PROMPT)
        receiving = await decode.receive(room, PROMPT, source, deadline_s=20)
        send = await prefill.send(
            room, PROMPT, lease=lease, deadline_s=20, **({"to": to} if to else {})
        )
        finishing = asyncio.create_task(send.finish(aux=b"x"))
        await receiving.done()
        await finishing
        aux = receiving.aux
        await receiving.lease.release()
        await lease.release()
        return aux


def test_a_prompt_comes_from_a_peer_that_is_dialed_by_its_address(strangers):
    p, d = strangers
    assert asyncio.run(handed_over(p, d, 7, source=p.peers)) == b"x"
    assert {one.name for one in d.snapshot().peers} == {"p"}
    assert asyncio.run(handed_over(p, d, 8, source="p")) == b"x", "it has a name by now"
    to = f"d@{d.peers}"
    assert asyncio.run(handed_over(p, d, 9, source=f"p@{p.peers}", to=to)) == b"x"


def test_a_send_to_an_address_alone_says_how_it_is_named(strangers):
    p, _ = strangers

    async def asked():
        async with kvd.client.connect(p.client, name="pe") as prefill:
            lease = await prefill.lease(PROMPT)
            await prefill.send(3, PROMPT, lease=lease, to="tcp://127.0.0.1:7", deadline_s=5)

    with pytest.raises(KvdError) as refused:
        asyncio.run(asked())
    assert "to='NAME@tcp://127.0.0.1:7'" in str(refused.value)


def test_a_pull_comes_from_an_address_too(strangers):
    p, d = strangers

    async def pulled():
        async with (
            kvd.client.connect(p.client, name="pe") as prefill,
            kvd.client.connect(d.client, name="de") as decode,
        ):
            prompt = list(range(500, 600))
            lease = await prefill.lease(prompt)
            await lease.release(new_tokens=())
            receiving = await decode.receive(tokens=prompt, source=f"p@{p.peers}", deadline_s=20)
            await receiving.done()
            n = receiving.prefix_len, len(receiving.lease.pages)
            await receiving.lease.release()
            return n

    assert asyncio.run(pulled())[1] > 0


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("nobody", "add it to peers.connect, or give its address"),
        ("tcp://", "add it to peers.connect, or give its address"),
        ("tcp://127.0.0.1:70000", "add it to peers.connect, or give its address"),
        ("tcp://127.0.0.1:0", "add it to peers.connect, or give its address"),
        ("ipc:///tmp/x", "add it to peers.connect, or give its address"),
        ("a b@tcp://127.0.0.1:7", "add it to peers.connect, or give its address"),
    ],
)
def test_what_is_no_address_is_refused(strangers, source, why):
    _, d = strangers

    async def asked():
        async with kvd.client.connect(d.client, name="de") as decode:
            await decode.receive(1, PROMPT, source, deadline_s=5)

    with pytest.raises(KvdError) as refused:
        asyncio.run(asked())
    assert refused.value.code == "peer-unknown"
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("tcp://127.0.0.1:{closed}", "nobody listens at 127.0.0.1 port {closed}"),
        ("a@tcp://127.0.0.1:{closed}", "nobody listens at 127.0.0.1 port {closed}"),
        ("q@tcp://127.0.0.1:{closed}", "127.0.0.1"),
        ("a@{p}", "at {p}"),
    ],
)
def test_who_does_not_answer_at_an_address_is_told_within_a_short_deadline(strangers, named, why):
    p, d = strangers
    closed = free_port()

    async def asked():
        async with kvd.client.connect(d.client, name="de") as decode:
            source = named.format(closed=closed, p=p.peers)
            receive = await decode.receive(tokens=PROMPT, source=source, deadline_s=2)
            await receive.done()

    with pytest.raises(KvdError) as refused:
        asyncio.run(asked())
    assert refused.value.code == "deadline"
    assert why.format(closed=closed, p=p.peers) in str(refused.value)
    assert "peers.connect" not in str(refused.value), "no configuration names it"


def test_without_keys_no_other_host_is_dialed(tmp_path):
    d = Daemon("d", tmp_path, SMALL)

    async def asked():
        async with kvd.client.connect(d.client, name="de") as decode:
            await decode.receive(1, PROMPT, "tcp://192.0.2.1:7402", deadline_s=5)

    with serving(d), pytest.raises(KvdError) as refused:
        asyncio.run(asked())
    assert refused.value.code == "peer-unknown"
    assert "without keys nothing leaves this host" in str(refused.value)


def test_nobody_at_an_address_is_told_with_the_deadline(tmp_path):
    d = Daemon("d", tmp_path, SMALL)

    async def asked():
        async with kvd.client.connect(d.client, name="de") as decode:
            receiving = await decode.receive(1, PROMPT, "tcp://127.0.0.1:9", deadline_s=7)
            await receiving.done()

    with serving(d), pytest.raises(KvdError) as refused:
        asyncio.run(asked())
    assert "nobody listens at 127.0.0.1 port 9" in str(refused.value)
