"""How bytes travel to a peer: what is known of it, who is told where that is slow, until when."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvd.cli import render
from kvd.core import inputs
from kvd.core.inputs import PathSide, WritePath
from kvd.wire import admin, client, events
from tests.core.engines import PROMPT, Sender
from tests.core.world import World


def printed(shown: object) -> str:
    console = Console(width=1000)
    with console.capture() as said:
        console.print(shown)
    return said.get()


HOST, DEVICE = PathSide.HOST, PathSide.DEVICE


def seen(
    world: World, path: WritePath, source: PathSide = DEVICE, onto: PathSide = HOST, **other
) -> inputs.PathFound:
    peer = world.p.node.peers.by_name["d"]
    fields = {"incarnation": peer.incarnation, "generation": peer.generation} | other
    return inputs.PathFound(
        at_s=world.now_s, source=source, destination=onto, path=path, bytes_s=0.93e9, **fields
    )


def told(world: World) -> list[events.SlowPath]:
    return [one for one in world.p.events if isinstance(one, events.SlowPath)]


def state(world: World):
    (peer,) = world.p.ask(admin.ShowStatus(1)).snapshot.peers
    return peer


def test_what_is_emulated_is_said_everywhere_with_what_to_do():
    world = World()
    assert state(world).path == "host to host: network"
    assert not state(world).slow_path

    world.p.feed(seen(world, WritePath.EMULATED))

    (event,) = told(world)
    assert (event.peer, event.what) == ("d", "device to host: emulated, 0.9 GB/s")
    assert "keep the pool in host memory (no pool.device)" in event.why
    assert "worker.blocks" in event.why
    assert "GPUDirect RDMA; on one host there is none" in event.why
    shown = state(world)
    assert shown.path == "host to host: network; device to host: emulated, 0.9 GB/s"
    assert shown.slow_path == f"{event.what}: {event.why}"
    why = world.p.ask(admin.Why(1, "peer", 0, name="d"))
    assert f"slow: {shown.slow_path}" in why.facts
    snapshot = world.p.ask(admin.ShowStatus(1)).snapshot
    assert "bytes to d are slow: device to host: emulated" in printed(render.status(snapshot))
    assert "slow: device to host: emulated" in printed(render.peers(snapshot.peers))


def test_a_handoff_over_a_slow_way_says_so():
    world = World()
    world.hold_posts = True
    world.p.feed(seen(world, WritePath.EMULATED))
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(40)
    why = world.p.ask(admin.Why(1, "room", 7))

    assert any(fact.startswith("slow: device to host: emulated") for fact in why.facts), why


@pytest.mark.parametrize(
    ("path", "onto"), [(WritePath.SAME_HOST, DEVICE), (WritePath.NETWORK, HOST)]
)
def test_a_way_of_its_own_is_shown_and_alarms_nobody(path, onto):
    world = World()

    world.p.feed(seen(world, path, DEVICE, onto))

    assert state(world).path.endswith(f"device to {onto.value}: {path.value}, 0.9 GB/s")
    assert not state(world).slow_path
    assert not told(world)


def test_between_devices_the_advice_is_another():
    world = World()
    world.p.feed(seen(world, WritePath.EMULATED, DEVICE, DEVICE))
    assert "cuda_ipc (UCX_TLS must not leave it out" in told(world)[0].why


def test_a_word_of_an_agent_that_nobody_has_any_more_is_none():
    world = World()
    world.p.feed(seen(world, WritePath.EMULATED, generation=99))
    world.p.feed(seen(world, WritePath.EMULATED, incarnation="0" * 32))
    assert not told(world)
    assert not state(world).slow_path


def test_what_was_seen_ends_with_the_agent_that_showed_it():
    world = World()
    world.p.feed(seen(world, WritePath.EMULATED))

    world.p.restart_transfer("fenced")
    world.pass_time(1)

    assert state(world).path == "host to host: network"
    assert not state(world).slow_path


def test_memory_that_is_not_pinned_is_said_with_its_numbers():
    world = World()
    gib = 2**30
    pinned = inputs.MemoryPinned(
        at_s=world.now_s,
        region="kv.saved",
        pinned_bytes=gib // 4,
        region_bytes=gib,
        took_s=0.04,
        why="registering 268,435,456 bytes: cudaErrorMemoryAllocation (2): out of memory",
    )
    world.p.feed(pinned)

    (event,) = told(world)
    assert event.what == "region kv.saved: 0.25 of 1.00 GiB are registered with CUDA"
    assert "cudaErrorMemoryAllocation (2)" in event.why
    assert "lower pool.saved_size" in event.why
    snapshot = world.p.ask(admin.ShowStatus(1)).snapshot
    assert event.what in snapshot.slow_path
    assert "copies in this node are slow: region kv.saved: 0.25" in printed(render.status(snapshot))
    world.p.stop_transfer("killed")
    assert not world.p.ask(admin.ShowStatus(1)).snapshot.slow_path


def test_memory_that_is_pinned_is_told_once_and_alarms_nobody():
    world = World()
    world.p.feed(
        inputs.MemoryPinned(
            at_s=world.now_s, region="kv.saved", pinned_bytes=4096, region_bytes=4096, took_s=0.1
        )
    )
    assert [one.region for one in world.p.events if isinstance(one, events.Pinned)] == ["kv.saved"]
    assert not told(world)
