"""Retraction of leases with more than pages of tokens: all components are saved, or none.

scenario C13, scenario C15, scenario C17, scenario A34.
"""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Host,
    Mha,
    Nowhere,
    PageOrder,
    PerRequest,
    PoolSpec,
    Raw,
    State,
    StateTensor,
    Tail,
    companion_pages,
)
from kvd.errors import Code
from kvd.types import Pages, Tokens, count, page_ids
from kvd.wire import admin, client, events
from tests.core.keeping import check
from tests.core.world import PAGE, Side, World, tokens
from tests.core.writing import lost, mapped, write

PREFIX = tokens((1, 64))
PROMPT = tokens((1, 100))
OUTPUT = tokens((5000, 29))
KNOWN = Tokens(PROMPT + OUTPUT)
"""129 tokens: 9 pages, of which 4 were cached; of the windows 3 are looked back at."""

KV = Component("kv", 1, Mha(1, 1, 1, "float32"), PAGE)
INDEX = Component("index", 1, Raw(8), PAGE // 4)
SWA = Component("swa", 2, Mha(1, 1, 1, "float32"), PAGE, Tail(32))
STATE = Component("state", 1, State((StateTensor("conv", (2, 8), "float32"),)), 1, PerRequest())
BUFFER = Component("buffer", 1, Mha(1, 1, 1, "float32"), PAGE, Buffer(32))
PAGE_BYTES = {"kv": 128, "index": 8, "swa": 256, "state": 64}


def spec(*components: Component, pages: tuple[int, ...], saved: tuple[int, ...]) -> PoolSpec:
    return PoolSpec("main", "many", PageOrder.PAGE_FIRST, components, pages, saved)


EVERYTHING = spec(KV, INDEX, SWA, STATE, BUFFER, pages=(64, 256, 32, 8, 8), saved=(13, 52, 7, 3, 0))
SAVED_PAGES = 9 + 4 * 9 + 3 + 1
SAVED_BYTES = 9 * 128 + 36 * 8 + 3 * 256 + 64


@pytest.fixture
def world() -> World:
    return World(spec=EVERYTHING)


def holds(side: Side, rows: tuple[bytes, ...], toks: Tokens, *, window: int = 3) -> bool:
    """Whether every component has exactly these tokens, of the windows at least so many pages."""
    return lost(side, rows, toks) == "" and mapped(side, rows) >= window


def rows(reply: client.Reply | None) -> tuple[bytes, ...]:
    assert isinstance(reply, client.Leased | client.Resumed), reply
    return (reply.pages, *reply.beside)


def cached(side: Side, toks: Tokens) -> None:
    lease = side.lease(toks)
    write(side, rows(lease), toks, start=lease.prefix_tokens)
    side.call(client.CommitAndRelease, lease=lease.lease)


def running(side: Side, **fields: object) -> client.Leased:
    """A lease with KV of 129 tokens, 64 of them cached by somebody else."""
    cached(side, PREFIX)
    lease = side.lease(PROMPT, reserve_tokens=40, **fields)
    assert lease.prefix_tokens == 64
    write(side, rows(lease), KNOWN, start=64)
    return lease


def retract(side: Side, lease: client.Leased, **fields: object) -> client.Reply | None:
    return side.call(client.RetractLease, OUTPUT, lease=lease.lease, **fields)


def resume(side: Side, lease: client.Leased) -> client.Reply | None:
    return side.call(client.ResumeLease, lease=lease.lease)


def scramble(side: Side) -> None:
    """Others had every page that is free meanwhile."""
    for name in PAGE_BYTES:
        if name != "index":
            memory = side.memory_of(name)
            memory.update(dict.fromkeys(page_ids(side.free_of(name)), "somebody else's"))
    kv = page_ids(side.free_of("kv"))
    side.memory_of("index").update(
        dict.fromkeys([page * 4 + k for page in kv for k in range(4)], "somebody else's")
    )


def free(side: Side) -> dict[str, tuple[int, int]]:
    """By component, free pages of the pool and of the saved area."""
    area = side.node.leases.saved.pools
    return {
        name: (count(side.free_of(name)), area[name].free_pages if name in area else 0)
        for name in ("kv", *(one.component.name for one in side.node.leases.components.each))
    }


def standing(side: Side, lease: client.Leased) -> LeaseStage:
    return side.node.leases.leases[lease.lease].state


# ---- out and back --------------------------------------------------------------------------------


def test_one_copy_is_ordered_for_each_component_with_bytes(world):
    world.hold_copies = True
    lease = running(world.d)
    kv, swa, state = (Pages(row) for row in rows(lease)[:3])

    made = world.d.feed(inputs.FromClient(100.0, 1, client.RetractLease(900, lease.lease), OUTPUT))

    slots = Pages(world.d.node.leases.leases[lease.lease].saved.parts[0].slots)
    used = Pages(kv[: 9 * 4])
    swa_slots, state_slots = (
        part.slots for part in world.d.node.leases.leases[lease.lease].saved.parts[1:]
    )
    assert made == [
        effects.Copy(1, "kv", used, "kv.saved", slots),
        effects.Copy(
            2, "index", companion_pages(used, 4), "index.saved", companion_pages(slots, 4)
        ),
        # 129 - 1 - 32 is token 96: pages 6, 7 and 8.
        effects.Copy(3, "swa", Pages(swa[6 * 4 : 9 * 4]), "swa.saved", swa_slots),
        effects.Copy(4, "state", Pages(state[4:]), "state.saved", state_slots),
    ]
    assert [count(one) for one in (slots, swa_slots, state_slots)] == [9, 3, 1]


def test_the_answer_comes_with_the_last_copy_and_counts_all_of_them(world):
    world.hold_copies = True
    lease = running(world.d)
    retract(world.d, lease)
    call = world.d.calls

    for _ in range(3):
        world.d.finish_copy()
        world.run()
        assert world.d.answer(call) is None
        assert standing(world.d, lease) is LeaseStage.SAVING
    world.d.finish_copy()
    world.run()

    assert world.d.answer(call) == client.Retracted(call, SAVED_PAGES, SAVED_BYTES)
    told = next(one for one in world.d.events if isinstance(one, events.LeaseRetracted))
    assert (told.saved_pages, told.saved_bytes) == (SAVED_PAGES, SAVED_BYTES)
    (state,) = snapshot(world.d.node).leases
    assert (state.saved_pages, state.saved_bytes) == (SAVED_PAGES, SAVED_BYTES)
    pools = {one.component: one for one in snapshot(world.d.node).pools}
    used = {name: (one.saved_pages, one.saved_capacity_pages) for name, one in pools.items()}
    assert used == {"kv": (9, 12), "swa": (3, 6), "state": (1, 2), "buffer": (0, 0)}
    check(world.d.node.leases)


def test_a_retracted_lease_has_no_page_of_any_component(world):
    lease = running(world.d)
    retract(world.d, lease)

    held = snapshot(world.d.node).leases[0]
    assert held.held_pages == 0
    # The prefix is still cached, with its windows and its snapshot.
    assert free(world.d) == {"kv": (59, 3), "swa": (27, 3), "state": (6, 1), "buffer": (7, 0)}


def test_what_the_tree_still_has_is_spared_and_windows_and_state_come_back(world):
    lease = running(world.d)
    retract(world.d, lease)
    scramble(world.d)

    reply = resume(world.d, lease)

    assert isinstance(reply, client.Resumed)
    assert (reply.prefix_tokens, reply.restored_tokens, reply.kv_tokens) == (64, 65, 129)
    assert holds(world.d, rows(reply), KNOWN)
    shot = snapshot(world.d.node).totals
    restored = 5 * 128 + 20 * 8 + 3 * 256 + 64
    assert (shot.restored_bytes, shot.spared_bytes) == (restored, SAVED_BYTES - restored)
    told = next(one for one in world.d.events if isinstance(one, events.LeaseResumed))
    assert (told.restored_bytes, told.spared_bytes) == (restored, SAVED_BYTES - restored)
    assert {name: saved for name, (_, saved) in free(world.d).items()} == {
        "kv": 12,
        "swa": 6,
        "state": 2,
        "buffer": 0,
    }
    check(world.d.node.leases)


def test_everything_is_restored_when_the_prefix_is_gone(world):
    lease = running(world.d)
    retract(world.d, lease)
    world.d.ask(admin.Evict(1, pages=9))
    scramble(world.d)

    reply = resume(world.d, lease)

    assert (reply.prefix_tokens, reply.restored_tokens, reply.kv_tokens) == (0, 129, 129)
    assert holds(world.d, rows(reply), KNOWN)
    assert snapshot(world.d.node).totals.spared_bytes == 0


def test_the_row_of_windows_comes_back_with_the_same_stretch_mapped(world):
    lease = running(world.d)
    retract(world.d, lease)

    reply = resume(world.d, lease)

    kv, swa, state, buffer = (page_ids(Pages(row)) for row in rows(reply))
    assert [k for k, page in enumerate(swa) if page] == list(range(6, len(kv)))
    assert (state[0], len(state), len(buffer)) == (0, 2, 2)


def test_windows_and_state_are_copied_back_though_the_tree_has_every_token(world):
    lease = running(world.d)
    retract(world.d, lease)
    cached(world.d, Tokens(KNOWN[: 128 * 4]))
    world.hold_copies = True

    resume(world.d, lease)

    regions = [(one.source_region, count(one.source)) for one in world.d.copies]
    assert regions == [("kv.saved", 1), ("index.saved", 4), ("swa.saved", 3), ("state.saved", 1)]


def test_of_a_prompt_of_1000_tokens_3_window_pages_of_168_tokens_are_saved():
    swa = msgspec.structs.replace(SWA, page_size=64, extent=Tail(128))
    kv = msgspec.structs.replace(KV, page_size=64)
    pool = spec(kv, swa, pages=(20, 20), saved=(17, 4))
    side = World(spec=pool).d
    lease = side.lease(tokens((1, 1000)))

    reply = side.call(client.RetractLease, lease=lease.lease)

    assert isinstance(reply, client.Retracted)
    assert (reply.saved_pages, free(side)["kv"], free(side)["swa"]) == (19, (19, 0), (19, 0))
    back = resume(side, lease)
    mapped = [k for k, page in enumerate(page_ids(Pages(back.beside[0]))) if page]
    assert mapped == [13, 14, 15]


def test_the_null_page_is_never_copied(world):
    lease = running(world.d)
    world.hold_copies = True
    world.d.call(client.SlideLease, lease=lease.lease, upto_tokens=100)

    retract(world.d, lease)

    for copy in world.d.copies:
        assert 0 not in page_ids(copy.source) + page_ids(copy.destination)


def test_a_lease_without_tokens_saves_nothing_of_any_component(world):
    lease = world.d.lease(tokens(), reserve_tokens=40)

    reply = world.d.call(client.RetractLease, lease=lease.lease)

    assert reply == client.Retracted(reply.call, 0, 0)
    assert isinstance(resume(world.d, lease), client.Resumed)
    check(world.d.node.leases)


def test_a_pool_that_only_counts_tokens_saves_the_state_alone():
    kv = Component("kv", 0, Raw(0), 1, tier=Nowhere())
    side = World(spec=spec(kv, STATE, pages=(200, 4), saved=(0, 3))).d
    lease = side.lease(PROMPT, reserve_tokens=29)
    side.memory_of("state")[page_ids(Pages(lease.beside[0]))[1]] = "after 129"

    reply = side.call(client.RetractLease, OUTPUT, lease=lease.lease)
    assert reply == client.Retracted(reply.call, 1, 64)
    side.memory_of("state").clear()
    back = resume(side, lease)

    assert back.kv_tokens == 129
    assert side.memory_of("state")[page_ids(Pages(back.beside[0]))[1]] == "after 129"


def test_what_a_buffer_holds_is_not_saved_and_its_pages_come_back():
    kv = msgspec.structs.replace(KV, tier=Host())
    side = World(spec=spec(kv, INDEX, BUFFER, pages=(64, 256, 8), saved=(13, 52, 0))).d
    lease = side.lease(PROMPT, reserve_tokens=29)
    side.world.hold_copies = True

    side.call(client.RetractLease, OUTPUT, lease=lease.lease)

    assert [one.source_region for one in side.copies] == ["kv", "index"]
    for _ in range(2):
        side.finish_copy()
    side.world.run()
    side.world.hold_copies = False
    assert count(side.free_of("buffer")) == 7
    assert count(resume(side, lease).beside[0]) == 2


def test_without_the_bytes_a_lease_goes_on_from_the_trees_window_and_snapshot(world):
    lease = running(world.d)

    assert retract(world.d, lease, keep="nothing") == client.Retracted(world.d.calls, 0, 0)
    reply = resume(world.d, lease)

    assert (reply.prefix_tokens, reply.restored_tokens, reply.kv_tokens) == (64, 0, 64)
    write(world.d, rows(reply), KNOWN, start=64)
    assert holds(world.d, rows(reply), KNOWN)
    state = page_ids(Pages(reply.beside[1]))
    assert state[0] != 0


def test_without_the_bytes_a_lease_goes_on_behind_its_last_token_where_a_snapshot_is(world):
    lease = world.d.lease(PREFIX)
    write(world.d, rows(lease), PREFIX)
    cached(world.d, PREFIX)
    world.d.call(client.RetractLease, lease=lease.lease, keep="nothing")

    reply = resume(world.d, lease)

    assert (reply.prefix_tokens, reply.kv_tokens) == (64, 64)


def test_without_the_bytes_and_without_a_window_everything_is_computed_again(world):
    lease = running(world.d)
    retract(world.d, lease, keep="nothing")
    world.d.node.leases.components.each[0].make_room(31)

    reply = resume(world.d, lease)

    assert (reply.prefix_tokens, reply.kv_tokens) == (0, 0)


def test_a_lease_of_steps_turns_its_windows_on_after_it_has_resumed():
    pool = spec(KV, SWA, pages=(64, 7), saved=(13, 7))
    side = World(spec=pool).d
    lease = side.lease(KNOWN, reserve_tokens=200, step_tokens=16)
    for upto in range(16, 129, 16):
        side.call(client.SlideLease, lease=lease.lease, upto_tokens=upto)

    assert isinstance(side.call(client.RetractLease, lease=lease.lease), client.Retracted)
    assert isinstance(resume(side, lease), client.Resumed)

    for upto in range(129, 320, 16):
        reply = side.call(client.SlideLease, lease=lease.lease, upto_tokens=upto)
        assert isinstance(reply, client.PageTable), reply
        swa = page_ids(Pages(reply.beside[0]))
        assert all(swa[(upto - 32) // PAGE : -(-(upto + 16) // PAGE)])
    check(side.node.leases)


def test_restored_windows_join_the_tree_like_those_that_were_computed(world):
    lease = running(world.d)
    retract(world.d, lease)
    world.d.ask(admin.Evict(1, pages=9))
    reply = resume(world.d, lease)

    world.d.call(client.CommitAndRelease, lease=lease.lease)

    other = world.d.lease(Tokens(KNOWN[: 128 * 4] + tokens((9000, 8))), cache=False)
    windows = world.d.node.leases.components.each[0]
    assert windows.cached_pages == 2
    assert isinstance(reply, client.Resumed)
    # The state is of 129 tokens, which is no whole page: nothing can be gone on from.
    assert other.prefix_tokens == 0


def test_a_lease_that_caches_nothing_comes_back_and_gives_nothing_to_the_tree(world):
    lease = running(world.d, cache=False)
    retract(world.d, lease)
    scramble(world.d)
    windows = world.d.node.leases.components.each[0]
    before = windows.cached_pages

    reply = resume(world.d, lease)

    assert reply.prefix_tokens == 64
    assert holds(world.d, rows(reply), KNOWN)
    world.d.call(client.CommitAndRelease, lease=lease.lease)
    assert windows.cached_pages == before
    assert world.d.node.leases.tree.probe(KNOWN, "") == 64


# ---- refused, and nothing changed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "name", "needed", "there"),
    [
        ((9, 36, 7, 3, 0), "kv", 9, 8),
        ((13, 52, 3, 3, 0), "swa", 3, 2),
        ((13, 52, 7, 1, 0), "state", 1, 0),
    ],
)
def test_the_component_whose_saved_pages_are_short_is_named_and_none_is_taken(
    saved, name, needed, there
):
    side = World(spec=msgspec.structs.replace(EVERYTHING, saved_pages=saved)).d
    lease = running(side)
    before = free(side)

    refusal = retract(side, lease).refusal

    assert refusal.code is Code.NO_ROOM
    assert refusal.message.startswith(
        f"saving lease {lease.lease} takes {needed} pages of {name}.saved, {there} of {there} are "
        "free"
    )
    assert refusal.numbers == {"needed_pages": needed, "free_pages": there}
    assert free(side) == before
    assert standing(side, lease) is LeaseStage.RUNNING


def test_tokens_beyond_the_windows_that_are_mapped_are_not_saved(world):
    lease = world.d.lease(PROMPT, step_tokens=16)
    before = free(world.d)

    refusal = world.d.call(client.RetractLease, lease=lease.lease).refusal

    assert refusal.code is Code.WRONG_STATE
    assert refusal.message == (
        f"lease {lease.lease} has swa pages of tokens [0, 16), to go on behind 100 it needs those "
        "of [64, 100): slide it to the token that it computes next, and name all before that"
    )
    assert free(world.d) == before
    assert standing(world.d, lease) is LeaseStage.RUNNING


@pytest.mark.parametrize(("named", "is_saved"), [(129, True), (128, True), (111, False)])
def test_fewer_tokens_than_it_has_slid_along_are_not_saved(world, named, is_saved):
    """Slid to token 129 it has windows from 96 on; behind 111 tokens it looks back to 79."""
    lease = world.d.lease(PROMPT, reserve_tokens=29)
    world.d.call(client.SlideLease, lease=lease.lease, upto_tokens=129)
    before = free(world.d)

    output = Tokens(OUTPUT[: (named - 100) * 4])
    reply = world.d.call(client.RetractLease, output, lease=lease.lease)

    assert isinstance(reply, client.Retracted) is is_saved
    if not is_saved:
        assert reply.refusal.code is Code.WRONG_STATE
        assert reply.refusal.numbers == {
            "tokens": 111,
            "mapped_tokens": 144,
            "mapped_from_tokens": 96,
        }
        assert free(world.d) == before


@pytest.mark.parametrize("lost", ["first", "last", "all"])
def test_a_row_that_is_mapped_and_was_not_saved_is_refused(world, lost):
    lease = running(world.d)
    retract(world.d, lease)
    before = free(world.d)
    found = world.d.node.leases.leases[lease.lease]
    whole = found.saved
    kv, swa, state = whole.parts
    part = {
        "first": [msgspec.structs.replace(swa, first=7, slots=Pages(swa.slots[4:]))],
        "last": [msgspec.structs.replace(swa, slots=Pages(swa.slots[:-4]))],
        "all": [],
    }[lost]
    gone = {"first": swa.slots[:4], "last": swa.slots[-4:], "all": swa.slots}[lost]
    found.saved = msgspec.structs.replace(whole, parts=(kv, *part, state))
    world.d.node.leases.saved.pools["swa"].return_pages(Pages(gone))

    refusal = resume(world.d, lease).refusal

    assert refusal.code is Code.INTERNAL
    assert refusal.message.startswith(
        f"lease {lease.lease} has pages [6, 9) of swa in its row and "
        f"{ {'first': '[7, 9)', 'last': '[6, 8)', 'all': '[0, 0)'}[lost] } saved"
    )
    assert standing(world.d, lease) is LeaseStage.RETRACTED
    assert {name: pool for name, (pool, _) in free(world.d).items()} == {
        name: pool for name, (pool, _) in before.items()
    }
    check(world.d.node.leases)


def test_a_resumption_waits_for_window_pages_and_says_so(world):
    lease = running(world.d)
    retract(world.d, lease)
    # Of 31 window pages 29 are held; 3 are wanted, from token 96 to 140.
    held = [world.d.lease(tokens((first, n)), cache=False) for first, n in ((20_000, 416), (1, 48))]

    assert resume(world.d, lease) is None

    call, waiter = world.d.calls, world.d.node.admission.queue[0]
    assert (waiter.budget, waiter.needed_pages, waiter.obtainable_pages) == ("swa", 3, 2)
    world.d.call(client.ReleaseLease, lease=held[0].lease)
    assert isinstance(world.d.answer(call), client.Resumed)


# ---- several copies, and what can end them -------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_save_of_which_one_copy_is_refused_is_over_when_the_others_are(world, first):
    world.hold_copies = True
    lease = running(world.d)
    before = free(world.d)
    retract(world.d, lease)
    call = world.d.calls
    world.d.copies.rotate(-first)

    world.d.refuse_copy("no such page")
    world.run()
    assert world.d.answer(call) is None
    assert standing(world.d, lease) is LeaseStage.SAVING
    for _ in range(3):
        world.d.finish_copy()
        world.run()

    assert world.d.answer(call).refusal.code is Code.INTERNAL
    assert standing(world.d, lease) is LeaseStage.RUNNING
    assert free(world.d) == before
    assert holds(world.d, rows(lease), KNOWN)


def test_a_restore_of_which_one_copy_is_refused_is_undone_when_the_others_are_over(world):
    lease = running(world.d)
    retract(world.d, lease)
    before = free(world.d)
    world.hold_copies = True
    resume(world.d, lease)
    call = world.d.calls

    world.d.refuse_copy("no such page")
    world.run()
    assert standing(world.d, lease) is LeaseStage.RESTORING
    for _ in range(3):
        world.d.finish_copy()
        world.run()

    assert world.d.answer(call).refusal.code is Code.INTERNAL
    assert standing(world.d, lease) is LeaseStage.RETRACTED
    assert free(world.d) == before
    world.hold_copies = False
    assert holds(world.d, rows(resume(world.d, lease)), KNOWN)


@pytest.mark.parametrize("end", ["refused", "killed"])
def test_windows_that_were_not_restored_never_join_the_tree(world, end):
    lease = running(world.d)
    retract(world.d, lease)
    cached(world.d, Tokens(KNOWN[: 128 * 4]))
    windows = world.d.node.leases.components.each[0]
    windows.make_room(31)
    world.hold_copies = True
    resume(world.d, lease)
    assert world.d.node.leases.leases[lease.lease].prefix_tokens == 128

    if end == "killed":
        world.d.hang_up()
        world.d.stop_transfer("killed")
    for _ in range(len(world.d.copies)):
        world.d.refuse_copy("no such page")
    world.run()

    assert windows.cached_pages == 0
    assert (lease.lease in world.d.node.leases.leases) is (end == "refused")
    check(world.d.node.leases)


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_save_that_is_cut_between_two_copies_leaves_the_lease_as_it_was(world, done):
    world.hold_copies = True
    lease = running(world.d)
    before = free(world.d)
    retract(world.d, lease)
    call = world.d.calls
    for _ in range(done):
        world.d.finish_copy()
        world.run()

    world.d.restart_transfer("killed")
    world.run()

    assert world.d.answer(call).refusal.code is Code.ABORTED
    assert standing(world.d, lease) is LeaseStage.RUNNING
    assert free(world.d) == before
    world.hold_copies = False
    assert isinstance(retract(world.d, lease), client.Retracted)


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_restore_that_is_cut_between_two_copies_is_done_again_whole(world, done):
    lease = running(world.d)
    retract(world.d, lease)
    scramble(world.d)
    world.hold_copies = True
    resume(world.d, lease)
    call = world.d.calls
    for _ in range(done):
        world.d.finish_copy()
        world.run()

    world.d.restart_transfer("killed")
    world.run()
    assert world.d.answer(call) is None
    assert [one.source_region for one in world.d.copies] == [
        "kv.saved",
        "index.saved",
        "swa.saved",
        "state.saved",
    ]
    for _ in range(4):
        world.d.finish_copy()
    world.run()

    assert holds(world.d, rows(world.d.answer(call)), KNOWN)


@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize("way", ["out", "back"])
@pytest.mark.parametrize("end", ["over", "killed"])
def test_pages_of_a_dead_engine_are_free_when_all_of_its_copies_are_over(world, done, way, end):
    lease = running(world.d)
    world.hold_copies = way == "out"
    retract(world.d, lease)
    world.hold_copies = True
    if way == "back":
        resume(world.d, lease)
    for _ in range(done):
        world.d.finish_copy()
        world.run()
    held = free(world.d)

    world.d.hang_up()
    assert free(world.d) == held

    if end == "killed":
        world.d.stop_transfer("killed")
    else:
        for _ in range(4 - done):
            world.d.finish_copy()
        world.run()
    assert world.d.node.leases.leases == {}
    assert {name: saved for name, (_, saved) in free(world.d).items()} == {
        "kv": 12,
        "swa": 6,
        "state": 2,
        "buffer": 0,
    }
    assert free(world.d)["kv"] == (59, 12)
    check(world.d.node.leases)


def test_a_restore_waits_whole_for_a_transfer_process(world):
    lease = running(world.d)
    retract(world.d, lease)
    scramble(world.d)
    world.d.stop_transfer("killed")

    assert resume(world.d, lease) is None
    call = world.d.calls
    world.d.start_transfer("again")
    world.run()

    assert holds(world.d, rows(world.d.answer(call)), KNOWN)
