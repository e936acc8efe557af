"""A pool that ends with its node is written to its tiers first, what is worth most at the head."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.quota import Quota
from kvd.core.settings import Demotion
from kvd.core.tiers.keys import KEY_BYTES, each_key
from kvd.types import NO_TOKENS, page_ids
from kvd.wire import admin, client, events
from kvd.wire.peer import Ping
from tests.core.side import content
from tests.core.tiered import DISK, PAGE, TieredSide, TieredWorld, cached, disk
from tests.core.world import tokens

STOP_S = 10.0


def stop(side: TieredSide, *, runs: bool = True) -> None:
    side.feed(inputs.StopAsked(side.world.now_s, "SIGTERM", 20.0))
    if runs:
        side.world.run()


def is_stopped(side: TieredSide) -> bool:
    return effects.ReadyToStop() in side.effects


def prompt(number: int, pages: int = 4):
    return tokens((1000 * (number + 1), pages * PAGE))


def world_of(objects: int = 64, prompts: int = 3, pages: int = 32, **more) -> TieredWorld:
    """A decode side that has some prompts cached, the last one used last, and nothing written."""
    more.setdefault("stop_s", STOP_S)
    journaled = more.pop("is_journaled", False)
    world = TieredWorld(tier=disk(objects, **more), d_pages=pages, is_journaled=journaled)
    for number in range(prompts):
        cached(world.d, prompt(number))
        world.pass_time(0.1)
    assert not world.d.stored.objects
    return world


def found(side: TieredSide) -> list[str]:
    """What the next storage process finds, the oldest used first."""
    return [
        side.stored.objects[namespace, key]
        for namespace, keys in side.stored.found().items()
        for key in each_key(keys)
    ]


def told(side: TieredSide, kind: type):
    return [event for event in side.events if isinstance(event, kind)]


def test_what_is_cached_is_written_before_the_node_is_ready_to_stop():
    world = world_of()
    world.d.hold_storage = True

    stop(world.d)

    assert not is_stopped(world.d)
    world.d.hold_storage = False
    world.run()
    assert is_stopped(world.d)
    assert len(world.d.stored.objects) == 12
    (began,) = told(world.d, events.StopDemotionBegan)
    (ended,) = told(world.d, events.StopDemotionEnded)
    assert (began.tier, began.pages, began.for_s) == (DISK, 12, STOP_S)
    assert (ended.pages, ended.left, ended.why) == (12, 0, "")


def test_the_goodbye_comes_before_the_disk():
    world = world_of()
    world.d.hold_storage = True

    stop(world.d)
    world.pass_time(3.0)

    said = [effect.message for effect in world.d.effects if isinstance(effect, effects.SendToPeer)]
    pings = [message for message in said if isinstance(message, Ping)]
    assert pings[-1].state == "leaving"
    assert said[-1] is pings[-1]


def test_what_would_be_evicted_last_is_written_first_and_of_a_prompt_the_first_page():
    world = world_of(moving=2)

    stop(world.d)

    assert is_stopped(world.d)
    assert list(world.d.stored.objects.values()) == [
        content(prompt(number), "", (page + 1) * PAGE) for number in (2, 1, 0) for page in range(4)
    ]


@pytest.mark.parametrize("moving", [1, 2, 64])
def test_what_is_written_first_is_used_last_for_whoever_finds_it(moving):
    world = world_of(moving=moving)

    stop(world.d)

    assert found(world.d) == [
        content(prompt(number), "", (page + 1) * PAGE)
        for number in (0, 1, 2)
        for page in (3, 2, 1, 0)
    ]


def test_what_lies_there_already_or_is_being_written_has_its_place_among_the_rest():
    world = world_of(pages=17, moving=2)
    world.d.hold_storage = True
    # The first one is next to be evicted: it is being written when the node is asked to stop.
    cached(world.d, prompt(3, pages=1))
    world.pass_time(0.1)
    assert world.d.node.tiers.moves.under_way
    cached(world.d, prompt(1))

    stop(world.d, runs=False)
    world.d.hold_storage = False
    world.run()

    there = found(world.d)
    assert len(there) == 13
    assert there[-5:] == [
        content(prompt(3, pages=1), "", PAGE),
        *[content(prompt(1), "", (page + 1) * PAGE) for page in (3, 2, 1, 0)],
    ]
    assert there[:4] == [content(prompt(0), "", (page + 1) * PAGE) for page in (3, 2, 1, 0)]


def test_prompts_that_begin_alike_are_written_once_and_from_the_top():
    world = world_of(prompts=0)
    trunk = prompt(0)
    cached(world.d, tokens((1000, 4 * PAGE), (5000, 2 * PAGE)))
    cached(world.d, tokens((1000, 4 * PAGE), (7000, 2 * PAGE)))

    stop(world.d)

    written = list(world.d.stored.objects.values())
    assert len(written) == len(set(written)) == 8
    assert written[:4] == [content(trunk, "", (page + 1) * PAGE) for page in range(4)]


@pytest.mark.parametrize("ends", ["bound", "storage", "away"])
def test_it_ends_at_its_bound_and_with_its_storage_process(ends):
    world = world_of(deadline_s=2 * STOP_S)
    world.d.hold_storage = True
    stop(world.d)
    assert not is_stopped(world.d)

    if ends == "bound":
        world.pass_time(STOP_S / 2)
        assert not is_stopped(world.d)
        world.pass_time(STOP_S / 2)
    elif ends == "storage":
        world.d.stop_storage("killed by 9")
    else:
        world.d.fails_writing, world.d.hold_storage = "No space left on device", False
        world.run()

    assert is_stopped(world.d)
    (ended,) = told(world.d, events.StopDemotionEnded)
    why = {
        "bound": "its time was over",
        "storage": "the tier is down: killed by 9",
        "away": "nothing is written: No space left on device",
    }
    assert ended.why == why[ends]


@pytest.mark.parametrize(
    "more", [{"stop_s": 0.0}, {"demotion": Demotion.NEVER}, {"is_journaled": True}]
)
def test_nothing_is_written_where_it_is_not_wanted(more):
    world = world_of(**more)

    stop(world.d)

    assert is_stopped(world.d)
    assert not world.d.stored.objects
    assert not told(world.d, events.StopDemotionBegan)


def test_the_policy_holds_at_a_stop_too():
    world = world_of(demotion=Demotion.SECOND_USE)
    cached(world.d, prompt(1))  # found again

    stop(world.d)

    assert is_stopped(world.d)
    assert len(world.d.stored.objects) == 4


def test_a_tier_that_is_too_small_gets_what_was_used_last():
    world = world_of(objects=6, moving=6)

    stop(world.d)

    assert is_stopped(world.d)
    (ended,) = told(world.d, events.StopDemotionEnded)
    assert ended.why == "the tier holds no more"
    assert world.d.tier.index.n_objects == 6
    assert list(world.d.stored.objects.values()) == [
        content(prompt(number), "", (page + 1) * PAGE)
        for number, pages in ((2, 4), (1, 2))
        for page in range(pages)
    ]


def lies_there(side: TieredSide, namespace: str, n_objects: int) -> None:
    """The next storage process finds so many of it."""
    for number in range(n_objects):
        side.stored.write(namespace, bytes([number]) * KEY_BYTES, namespace, number)
    side.stop_storage()
    side.start_storage(2)


def hottest(n_pages: int) -> list[str]:
    pages = [(number, page) for number in (2, 1, 0) for page in range(4)]
    return [content(prompt(number), "", (page + 1) * PAGE) for number, page in pages[:n_pages]]


@pytest.mark.parametrize("there", [0, 2, 4, 6])
def test_what_a_floor_keeps_there_is_no_room_for_a_stop(there):
    """Else what is written last pushes out what was written first, which is worth most."""
    world = world_of(objects=8, moving=2, quotas=(Quota("a", 4),))
    lies_there(world.d, "a", there)

    stop(world.d)

    (ended,) = told(world.d, events.StopDemotionEnded)
    n_written = 8 - min(there, 4)
    assert (ended.why, ended.pages, ended.left) == (
        *("the tier holds no more", n_written),
        12 - n_written,
    )
    assert [one for one in world.d.stored.objects.values() if one != "a"] == hottest(n_written)


def test_of_a_namespace_with_a_ceiling_a_stop_writes_no_more_than_that_and_goes_on():
    world = world_of(objects=10, moving=2, quotas=(Quota("b", 0, 3),))
    lies_there(world.d, "a", 10)
    cached(world.d, prompt(5), "b")

    stop(world.d)

    (ended,) = told(world.d, events.StopDemotionEnded)
    written = [one for one in world.d.stored.objects.values() if one != "a"]
    assert written == [
        *[content(prompt(5), "b", (page + 1) * PAGE) for page in range(3)],
        *hottest(7),
    ]
    assert (ended.why, ended.pages, ended.left) == ("the tier holds no more", 10, 6)


def test_what_is_pinned_and_lies_there_alone_is_no_room_for_a_stop():
    world = world_of(objects=8, moving=2, prompts=0)
    d = world.d
    cached(d, prompt(5))
    lease = d.lease(prompt(5))
    page = page_ids(lease.pages)[3]
    d.call(client.ReleaseLease, lease=lease.lease)
    d.ask(admin.Pin(1, "page", page, 60.0))
    world.pass_time(0.3)
    whole = d.lease(prompt(9, pages=31))
    d.call(client.ReleaseLease, lease=whole.lease)
    assert not d.node.leases.tree.probe(prompt(5), "")
    for number in range(3):
        cached(d, prompt(number))
        world.pass_time(0.1)

    stop(d)

    (ended,) = told(d, events.StopDemotionEnded)
    pinned = [content(prompt(5), "", (page + 1) * PAGE) for page in range(4)]
    assert list(d.stored.objects.values()) == [*pinned, *hottest(4)]
    assert (ended.why, ended.pages, ended.left) == ("the tier holds no more", 4, 8)


def test_a_page_that_is_written_has_an_owner_and_a_reason():
    world = world_of()
    world.d.hold_storage = True

    stop(world.d)

    leases = world.d.node.leases.leases.values()
    assert {lease.reason for lease in leases} == {"demotion to disk at stop"}


def test_what_is_left_is_told():
    world = world_of(moving=3)
    world.d.hold_storage = True

    stop(world.d)

    assert snapshot(world.d.node).drain.unwritten == 9
    assert world.d.node.drainer.words().endswith(", and writes 9 more pages to its tiers")


def test_what_an_engine_holds_is_given_back_first_and_nothing_new_is_begun():
    world = world_of()
    lease = world.d.lease(prompt(7))
    world.d.write(lease.pages, prompt(7))
    world.d.call(client.CommitLease, NO_TOKENS, lease=lease.lease)
    world.d.hold_storage = True

    stop(world.d)

    refused = world.d.call(client.OpenLease, prompt(9))
    assert isinstance(refused, client.Failed)
    world.d.hold_storage = False
    world.run()
    assert len(world.d.stored.objects) == 16


def test_a_demotion_that_is_under_way_is_not_ordered_again():
    world = world_of(prompts=0, pages=8)
    world.d.hold_storage = True
    cached(world.d, prompt(0, 7))
    world.pass_time(0.1)
    ordered = sum(len(order.pages) for order in world.d.orders)
    assert ordered

    stop(world.d)
    world.d.hold_storage = False
    world.run()

    assert is_stopped(world.d)
    assert len(world.d.stored.objects) == 7
    written = [event.pages for event in told(world.d, events.PagesDemoted)]
    assert sum(written) == 7
