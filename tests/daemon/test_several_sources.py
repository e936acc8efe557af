"""Real daemons, several of which send one prompt: every byte is where it belongs, or nothing is.

Context-parallel ranks that each have all of the prompt, pipeline stages that have some layers, and
tensor-parallel ranks on two nodes, with NIXL between the processes and every page summed. scenario
F1, scenario F4, scenario G13.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

import kvd.client
from kvd.client import HandoffError, KvdError
from kvd.wire import admin
from tests.daemon.conftest import settle, until
from tests.daemon.kv import tokens_of
from tests.daemon.test_sharded_pools import MODEL, PROMPT_TOKENS, fill, model_kv, tp, wrong
from tests.support.daemons import START_S, Daemon, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.client import Node, Outcome, Receive, Send

    Kv = object

SOURCES = {
    "cp-0": {},
    "cp-1": {},
    "stage-0": {"pool.stage": "0:2"},
    "stage-1": {"pool.stage": "2:4"},
    "tp-0": tp(4, tp_ranks="0-1"),
    "tp-1": tp(4, tp_ranks="2-3"),
}
QUICK = {"peers.heartbeat_s": "0.2", "peers.suspect_s": "0.5", "peers.lost_s": "1.0"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    """A decode node that has all of the model, and those that it may ask for parts of it."""
    place = tmp_path_factory.mktemp("parts")
    fleet = {name: Daemon(name, place, {**MODEL, **QUICK, **own}) for name, own in SOURCES.items()}
    decode = Daemon("d", place, {**MODEL, **QUICK})
    for one in fleet.values():
        decode.knows(one)
    fleet["d"] = decode
    try:
        for one in fleet.values():
            one.start()
        decode.wait_for(lambda: is_up(decode), "does not know the others", START_S)
        yield fleet
    finally:
        for one in fleet.values():
            one.stop()


def is_up(daemon: Daemon) -> bool:
    with contextlib.suppress(KvdError):
        peers = daemon.snapshot().peers
        return len(peers) == len(SOURCES) and all(one.agent == "loaded" for one in peers)
    return False


class Group:
    """Sessions with some sources and the decode node, and one prompt that is in the first."""

    def __init__(self, fleet: dict[str, Daemon], names: Sequence[str], room: int) -> None:
        self.daemons = [fleet[name] for name in names]
        self.names, self.decode, self.room = list(names), fleet["d"], room
        self.tokens = tokens_of(PROMPT_TOKENS, seed=room)
        self.nodes: list[Node] = []
        self.sends: list[Send] = []

    async def __aenter__(self) -> Group:
        self._stack = contextlib.AsyncExitStack()
        for one in self.daemons:
            node = kvd.client.connect(one.client, name=f"engine of {one.name}")
            self.nodes.append(await self._stack.enter_async_context(node))
        self.d = await self._stack.enter_async_context(
            kvd.client.connect(self.decode.client, name="decode engine")
        )
        whole = self.d.pool("main")
        self.kv = model_kv(whole, seed=self.room)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def open(self) -> Receive:
        """The receive, and a send of each source; every page is written, none is told."""
        receive = await self.d.receive(self.room, self.tokens, self.names)
        for node in self.nodes:
            lease = await node.lease(self.tokens, reserve_tokens=16)
            if lease.prefix_len == 0:
                fill(node, lease, self.kv)
            self.sends.append(await node.send(self.room, self.tokens, lease=lease))
        return receive

    async def finish(self) -> list[Outcome]:
        """Every engine finishes, each with an aux of its own."""
        auxes = [name.encode() for name in self.names]
        finishing = (one.finish(aux) for one, aux in zip(self.sends, auxes, strict=True))
        return list(await asyncio.gather(*finishing))


@pytest.mark.parametrize(
    ("names", "aux", "spans"),
    [
        (["cp-0", "cp-1"], b"cp-0", [(0, 112), (112, PROMPT_TOKENS)]),
        (["stage-0", "stage-1"], b"stage-1", [(0, PROMPT_TOKENS)] * 2),
        (["tp-1", "tp-0"], b"tp-1", [(0, PROMPT_TOKENS)] * 2),
    ],
)
async def test_what_several_sources_send_is_all_there(fleet, names, aux, spans):
    room = 1 + sum(map(ord, names[0]))
    async with Group(fleet, names, room) as group:
        receive = await group.open()
        outcomes = await group.finish()
        await receive.done()

        assert [one.committed for one in outcomes] == [True, True]
        assert receive.aux == aux
        assert [one.share.tokens for one in group.sends] == spans
        assert [one.share.is_authoritative for one in group.sends] == [
            name.encode() == aux for name in names
        ]
        assert wrong(group.d, receive.lease.pages, group.kv) == []
        whole = await again(group)  # all of it is cached now: two sources, not a page
        assert [one.sent_pages for one in whole] == [0, 0]
    for name in names:
        settle(Pair(fleet[name], fleet["d"]))


async def again(group: Group) -> list[Outcome]:
    """The same prompt without its partial page, a full hit on the decode side."""
    group.room += 1000
    group.tokens = group.tokens[: PROMPT_TOKENS // 16 * 16]
    group.sends = []
    receive = await group.open()
    outcomes = await group.finish()
    await receive.done()
    assert receive.prefix_len == len(group.tokens)
    assert receive.aux in {name.encode() for name in group.names}
    return outcomes


async def test_stages_that_are_not_all_of_the_model_are_refused_with_what_is_missing(fleet):
    async with Group(fleet, ["stage-0"], 90) as group:
        with pytest.raises(KvdError, match="layers 2-3 of heads 0-3 must come from elsewhere too"):
            await group.d.receive(90, group.tokens, ["stage-0"])
        with pytest.raises(KvdError, match="cp-0 is named 2 times"):
            await group.d.receive(90, group.tokens, ["cp-0", "cp-0"])


async def test_a_source_that_dies_on_the_way_fails_the_receive_and_holds_nothing_for_long(fleet):
    names = ["cp-0", "cp-1"]
    doomed = fleet["cp-1"]
    async with Group(fleet, names, 91) as group:
        receive = await group.open()
        for one in group.sends:
            await one.advance(PROMPT_TOKENS - 40)
        doomed.kill()
        with pytest.raises(HandoffError) as failed:
            await receive.done()

        assert failed.value.source == "cp-1"
        assert failed.value.code == "peer-lost"
        assert "cp-1 (source 2 of 2)" in str(failed.value)
        outcome = await group.sends[0].finish(b"")
        assert not outcome.committed
        until(lambda: not rooms_of(fleet["d"], "cp-0"))
        (lease,) = fleet["d"].snapshot().leases
        assert lease.state == "quarantined"
        assert "cp-1" in lease.waiting_for
        assert "cp-0" not in lease.waiting_for

        doomed.start()
        until(lambda: not fleet["d"].snapshot().leases, START_S)
    doomed.wait_for(lambda: is_up(fleet["d"]), "is not back", START_S)
    settle(Pair(fleet["cp-0"], fleet["d"]))
    assert fleet["d"].ask(admin.Audit(1), admin.Report).refused == ()


def rooms_of(daemon: Daemon, peer: str) -> list[str]:
    return [one.state for one in daemon.snapshot().rooms if one.peer == peer]
