"""The transfer process dies, or is fenced: a new generation serves, and the daemons agree on it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import TYPE_CHECKING

import pytest

import kvd.client
from kvd.wire import admin
from tests.support.daemons import Daemon, Pair, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

POOL = {"pool.layers": "1", "pool.heads": "1", "pool.head_dim": "8", "pool.pages": "64"}
POOL |= {"transfer.silent_s": "1"}
WITHIN_S = 10.0

rooms = itertools.count(1)
"""No room and no prompt twice, so that nothing is cached."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with two_daemons(tmp_path_factory.mktemp("restart"), POOL) as made:
        yield made


def wait_for_generation(pair: Pair, of: Daemon, generation: int) -> None:
    """Until both daemons know ``of`` in that generation and can send to each other."""
    other = pair.other(of)

    def is_known() -> bool:
        here, there = of.snapshot(), other.snapshot()
        peers = (*here.peers, *there.peers)
        return (
            here.generation == generation
            and any(p.name == of.name and p.generation == generation for p in there.peers)
            and all(p.agent == "loaded" for p in peers)
        )

    of.wait_for(is_known, f"does not serve as generation {generation}", WITHIN_S)


async def hand_over(pair: Pair) -> None:
    """One handoff of 100 fresh tokens, with the bytes compared."""
    room = next(rooms)
    prompt = list(range(1000 * room, 1000 * room + 100))
    async with (
        kvd.client.connect(pair.prefill.client, name="prefill") as prefill,
        kvd.client.connect(pair.decode.client, name="decode") as decode,
    ):
        lease = await prefill.lease(prompt)
        written, _ = prefill.pool("main").layer(0)
        for page in lease.pages:
            written[int(page)] = room
        sending = await prefill.send(room, prompt, lease=lease)
        receiving = await decode.receive(room, prompt, source="p")
        outcome = await sending.finish(aux=b"x")
        await receiving.done()
        arrived, _ = decode.pool("main").layer(0)
        assert outcome.committed
        assert [float(arrived[int(page), 0, 0, 0]) for page in receiving.lease.pages] == [room] * 7


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_daemon_starts_a_new_transfer_process_when_the_old_one_is_killed(
    pair: Pair, side: str
) -> None:
    daemon = pair.prefill if side == "prefill" else pair.decode
    generation = daemon.snapshot().generation
    await hand_over(pair)

    os.kill(daemon.transfer_pid(), signal.SIGKILL)
    wait_for_generation(pair, daemon, generation + 1)

    await hand_over(pair)
    assert daemon.ask(admin.Audit(1), admin.Report).changed["violations"] == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_daemon_replaces_a_transfer_process_that_is_stopped(pair: Pair, side: str) -> None:
    daemon = pair.prefill if side == "prefill" else pair.decode
    generation = daemon.snapshot().generation
    await hand_over(pair)

    os.kill(daemon.transfer_pid(), signal.SIGSTOP)
    wait_for_generation(pair, daemon, generation + 1)

    await hand_over(pair)
    assert daemon.ask(admin.Audit(1), admin.Report).changed["violations"] == 0


async def test_fence_frees_the_quarantine_of_a_writer_that_does_not_answer(pair: Pair) -> None:
    """scenario A26: the pages come back by a fence, not by time."""
    os.kill(pair.prefill.pid, signal.SIGSTOP)
    try:
        async with kvd.client.connect(pair.decode.client, name="decode") as decode:
            handoff = await decode.receive(77, range(5, 105), source="p", deadline_s=1)
            with pytest.raises(kvd.client.KvdError) as failed:
                await handoff.done()
        assert failed.value.code in {"deadline", "peer-lost"}
        held = pair.decode.snapshot().pools[0].quarantined_pages
        await asyncio.sleep(0.5)
        assert held == pair.decode.snapshot().pools[0].quarantined_pages == 7

        generation = pair.decode.snapshot().generation
        report = pair.decode.ask(admin.Fence(1), admin.Report)
        pair.decode.wait_for(
            lambda: pair.decode.snapshot().generation == generation + 1, "not fenced", WITHIN_S
        )
        assert report.changed["quarantined_pages"] == 7
        assert pair.decode.snapshot().pools[0].quarantined_pages == 0
    finally:
        os.kill(pair.prefill.pid, signal.SIGCONT)
    wait_for_generation(pair, pair.decode, generation + 1)
    await hand_over(pair)
