"""Several page budgets in front of one queue: which one is short, by how much, and who waits.

scenario C8, scenario C9, scenario C11.
"""

from __future__ import annotations

import pytest

from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.wire import admin, client
from tests.core.keeping import check, pool_spec
from tests.core.world import Side, World, tokens

PAGE = 16
WINDOW = 32


def side_of(**more: int) -> Side:
    """A node with 30 pages, and beside them what is asked for."""
    return World(spec=pool_spec(PAGE, 30, **more)).d


@pytest.fixture
def side() -> Side:
    """8 window pages: four of them are behind and ahead of a lease of steps of 16 tokens."""
    return side_of(window=WINDOW, swa=8)


def test_a_lease_that_waits_for_window_pages_says_so_with_the_numbers(side):
    side.lease(tokens((1, 96)))

    assert side.call(client.OpenLease, tokens((500, 48)), deadline_s=1.0) is None
    call = side.calls
    waiter = side.node.admission.queue[0]
    assert (waiter.budget, waiter.needed_pages, waiter.obtainable_pages) == ("swa", 3, 2)

    side.world.pass_time(1.2)
    refusal = side.answer(call).refusal
    assert refusal.code is Code.DEADLINE
    assert (
        "needs 3 pages of swa beyond what is cached of it, 2 obtainable: 1 missing"
        in refusal.message
    )
    assert refusal.numbers == {"waited_s": 1.0, "needed_pages": 3, "headroom_pages": 2}


def test_it_is_admitted_when_its_window_pages_are_free_and_not_before(side):
    side.lease(tokens((1, 96)))
    held = [side.lease(tokens((first, 16))) for first in (200, 300)]
    assert side.call(client.OpenLease, tokens((500, 32))) is None
    call = side.calls
    assert side.node.leases.headroom_pages == 30 - 8

    side.call(client.ReleaseLease, lease=held[0].lease)
    assert side.answer(call) is None
    assert side.node.admission.queue[0].obtainable_pages == 1

    side.call(client.ReleaseLease, lease=held[1].lease)
    assert isinstance(side.answer(call), client.Leased)
    check(side.node.leases)


def test_a_slide_lets_in_who_waits_for_what_it_gives_back(side):
    held = side.lease(tokens((1, 112)))
    call = side.calls + 1
    assert side.call(client.OpenLease, tokens((500, 48))) is None

    # 112 - 1 - 32 is token 79: pages 0 to 3 are behind.
    reply = side.call(client.SlideLease, lease=held.lease, upto_tokens=112)

    assert isinstance(reply, client.PageTable)
    assert isinstance(side.answer(call), client.Leased)


def test_a_refused_request_leaves_no_lock_and_the_next_goes_on(side):
    cached = side.lease(tokens((1, 16)))
    side.write(cached.pages, tokens((1, 16)))
    side.call(client.CommitAndRelease, lease=cached.lease)
    side.lease(tokens((500, 112)))
    assert side.call(client.OpenLease, tokens((1, 64)), deadline_s=1.0) is None
    refused = side.calls
    assert side.call(client.OpenLease, tokens((900, 16)), deadline_s=9.0) is None
    waiting = side.calls

    side.world.pass_time(1.2)

    assert side.answer(refused).refusal.code is Code.DEADLINE
    assert isinstance(side.answer(waiting), client.Leased)
    assert all(not node.lock_ref for node in side.node.leases.tree.nodes())
    check(side.node.leases)


@pytest.mark.parametrize(
    ("more", "remedy", "needed", "capacity"),
    [
        (
            {"window": WINDOW, "swa": 8},
            "compute it in steps (step_tokens, and slide), or enlarge pool.window_pages",
            9,
            8,
        ),
        ({"buffer_tokens": 160, "buffers": 8}, "enlarge pool.buffer_pages", 9, 8),
    ],
)
def test_what_can_never_fit_names_the_budget_and_the_remedy(more, remedy, needed, capacity):
    side = side_of(**more)

    refusal = side.call(client.OpenLease, tokens((1, 144))).refusal

    assert refusal.code is Code.TOO_LARGE
    budget = "swa" if "swa" in more else "buffer"
    assert refusal.message == (
        f"144 tokens need {needed} pages of {budget}, the pool has {capacity}: it can never fit; "
        f"{remedy}"
    )
    assert refusal.numbers == {"needed_pages": needed, "pool_pages": capacity}


def test_what_can_never_fit_into_the_pages_names_these(side):
    refusal = side.call(client.OpenLease, tokens((1, 31 * PAGE)), step_tokens=16).refusal

    assert refusal.code is Code.TOO_LARGE
    assert refusal.message.startswith("496 tokens need 31 pages of kv, the pool has 30")
    assert refusal.message.endswith("enlarge pool.pages")


def cached_in_steps(side: Side, n_tokens: int) -> None:
    """So many tokens are cached, of the windows those behind the end."""
    lease = side.lease(tokens((1, n_tokens)), step_tokens=PAGE)
    for upto in range(0, n_tokens, PAGE):
        side.call(client.SlideLease, lease=lease.lease, upto_tokens=upto)
    side.call(client.CommitAndRelease, lease=lease.lease)


def test_what_fits_behind_its_cached_prefix_waits_for_room(side):
    """176 tokens at once are 11 window pages of 8; behind 160 cached ones they are one.

    What it waits for is the last page of kv.
    """
    cached_in_steps(side, 160)
    other = side.lease(tokens((900, 320)), step_tokens=PAGE)

    assert side.call(client.OpenLease, tokens((1, 176)), deadline_s=5.0) is None
    call = side.calls
    side.call(client.ReleaseLease, lease=other.lease)

    assert side.answer(call).prefix_tokens == 160
    check(side.node.leases)


def test_who_lost_the_prefix_that_it_fits_behind_is_told_so_and_keeps_nobody_waiting(side):
    cached_in_steps(side, 160)
    other = side.lease(tokens((900, 320)), step_tokens=PAGE)
    assert side.call(client.OpenLease, tokens((1, 176)), deadline_s=5.0) is None
    hopeless = side.calls
    assert side.call(client.OpenLease, tokens((500, 48)), deadline_s=5.0) is None
    behind = side.calls

    side.ask(admin.Flush(1))
    side.call(client.ReleaseLease, lease=other.lease)

    refusal = side.answer(hopeless).refusal
    assert refusal.code is Code.TOO_LARGE
    assert refusal.numbers == {"needed_pages": 11, "pool_pages": 8}
    assert isinstance(side.answer(behind), client.Leased)


@pytest.mark.parametrize(
    ("more", "step_tokens"), [({"states": 1}, 0), ({"window": WINDOW, "swa": 5}, PAGE)]
)
def test_a_prefix_that_leaves_no_room_for_the_rest_is_not_gone_on_from(more, step_tokens):
    """The snapshot is the only state there is; two of five window pages leave three, not four."""
    side = side_of(**more)
    cached_in_steps(side, 48)

    lease = side.call(client.OpenLease, tokens((1, 150)), step_tokens=step_tokens)

    assert isinstance(lease, client.Leased)
    assert lease.prefix_tokens == 0
    check(side.node.leases)


def test_an_extension_names_the_budget_that_is_short(side):
    lease = side.lease(tokens((1, 96)))

    refusal = side.call(client.ExtendLease, lease=lease.lease, n_tokens=48).refusal

    assert refusal.code is Code.NO_ROOM
    assert refusal.message.startswith(
        f"lease {lease.lease} needs 3 more pages of swa, 2 are obtainable (2 free, 0 evictable)"
    )
    assert refusal.numbers == {"needed_pages": 3, "headroom_pages": 2}


def test_two_that_are_admitted_together_fit_side_by_side_in_every_budget(side):
    held = side.lease(tokens((1, 128)))
    calls = []
    for first in (200, 300, 400):
        assert side.call(client.OpenLease, tokens((first, 64))) is None
        calls.append(side.calls)

    side.call(client.ReleaseLease, lease=held.lease)

    assert [isinstance(side.answer(call), client.Leased) for call in calls] == [True, True, False]
    waiter = side.node.admission.queue[0]
    assert (waiter.budget, waiter.needed_pages, waiter.obtainable_pages) == ("swa", 4, 0)
    check(side.node.leases)


def test_every_answer_names_the_rows_of_all_components():
    side = side_of(window=WINDOW, swa=8, states=2, buffer_tokens=32, buffers=4)

    lease = side.lease(tokens((1, 40)))

    assert [len(row) // 4 for row in lease.beside] == [3, 2, 2]
    reply = side.call(client.SlideLease, lease=lease.lease, upto_tokens=40)
    assert reply == client.PageTable(reply.call, 3, b"", lease.beside)
    assert snapshot(side.node).leases[0].held_pages == 3
