"""What a pull locks at its source: how much, for how long, and for whom it gives way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.core.audit.invariants import faults
from kvd.core.handoff import pull_source
from kvd.core.handoff.protocol import Prefill
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Tokens
from kvd.wire import client
from kvd.wire.peer import AskPrefix, Message, Offer, PrefixFound
from tests.core.engines import totals
from tests.core.world import PAGE, World, tokens
from tests.support.compiled import replaces_methods

if TYPE_CHECKING:
    from kvd.core.handoff.parts import SendPart
    from tests.core.side import Side

N_PAGES = 10
PROMPT = tokens((1, N_PAGES * PAGE))
OFFER_S = 2.0


def other(n: int, n_pages: int = N_PAGES) -> Tokens:
    """A prompt that begins like no other."""
    return tokens((10_000 * (n + 1), n_pages * PAGE))


def cached(side: Side, *prompts: Tokens) -> None:
    for prompt in prompts:
        lease = side.lease(prompt)
        side.write(lease.pages, prompt)
        side.call(client.CommitAndRelease, lease=lease.lease)


class Asking:
    """A peer that asks for prefixes and offers nothing, and what it is told."""

    def __init__(self, world: World, side: Side) -> None:
        self.world = world
        self.side = side
        self.asks = 0
        self.heard: dict[int, PrefixFound] = {}
        deliver = world.deliver

        def hear(letter: object) -> None:
            message = letter.message  # type: ignore[attr-defined]
            if isinstance(message, PrefixFound) and message.target == side.incarnation:
                self.heard[message.ask] = message
            else:
                deliver(letter)  # type: ignore[arg-type]

        world.deliver = hear  # type: ignore[method-assign]

    def ask(
        self, prompt: Tokens = PROMPT, *, have_tokens: int = 0, number: int = 0, **more: float
    ) -> PrefixFound:
        self.asks = number or self.asks + 1
        self.heard.pop(self.asks, None)
        message: Message = AskPrefix(
            source=self.side.incarnation,
            target=self.world.p.incarnation,
            ask=self.asks,
            namespace="",
            tokens=prompt,
            have_tokens=have_tokens,
            deadline_s=more.get("deadline_s", 600.0),
        )
        self.world.inject(self.world.p, message, self.side)
        return self.heard[self.asks]


def asking(**more: object) -> tuple[World, Asking]:
    world = World(**{"pull_offer_s": OFFER_S, "max_deadline_s": 600.0, **more})
    return world, Asking(world, world.d)


def refusal(found: PrefixFound) -> Refusal:
    assert (found.room, found.n_tokens) == (0, 0)
    assert found.refusal is not None
    return found.refusal


def open_rooms(world: World) -> list[SendPart]:
    assert not faults(world.p.node)
    return world.p.node.prefiller.rooms.live()


def locked(world: World) -> int:
    pool = totals(world.p)
    return pool.held + pool.cached - pool.evictable


# ---- how long ------------------------------------------------------------------------------------


def test_a_pull_without_an_offer_is_over_soon_however_long_its_deadline():
    world, peer = asking()
    cached(world.p, PROMPT)
    assert peer.ask(deadline_s=600.0).n_tokens == N_PAGES * PAGE
    assert locked(world) == N_PAGES

    world.pass_time(OFFER_S + 0.2)

    assert not open_rooms(world)
    assert locked(world) == 0


def test_who_offers_too_late_hears_how_long_it_was_kept():
    world = World(pull_offer_s=OFFER_S)
    cached(world.p, PROMPT)
    world.lost = {Offer}
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), deadline_s=20.0)
    world.pass_time(OFFER_S + 0.2)
    world.lost = set()
    world.pass_time(2)
    (told,) = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert told.refusal.code is Code.DEADLINE
    assert told.refusal.numbers["offer_s"] == OFFER_S
    assert "d offered no pages for it" in told.refusal.message
    assert not world.d.node.leases.leases
    expired = world.p.node.prefiller.expired_rooms
    assert (len(expired.by_room), len(expired.pulled)) == (0, 1)
    world.pass_time(world.p.config.max_deadline_s, tick_s=1.0)
    assert not expired.pulled


def test_its_own_deadline_ends_it_sooner():
    world, peer = asking()
    cached(world.p, PROMPT)
    peer.ask(deadline_s=0.5)
    world.pass_time(0.7)
    assert not open_rooms(world)


def test_asking_again_keeps_it_to_the_deadline_that_was_said_first():
    world, peer = asking()
    cached(world.p, PROMPT)
    first = peer.ask(deadline_s=4.0)
    for _ in range(3):
        world.pass_time(1.2)
        assert peer.ask(number=1, deadline_s=600.0) == first
    assert locked(world) == N_PAGES
    world.pass_time(0.6)
    assert not open_rooms(world)
    assert locked(world) == 0


def waiting_for_memory(**more: int) -> tuple[World, client.Leased]:
    """A pull that has its answer and no pages, and the lease that has them."""
    world = World(pull_offer_s=OFFER_S, d_pages=3 * N_PAGES, **more)
    cached(world.p, PROMPT)
    had = world.d.lease(other(7, 3 * N_PAGES - 1))
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), deadline_s=30.0)
    assert locked(world) == N_PAGES
    assert len(world.d.node.admission) == 1
    return world, had


def test_a_puller_that_waits_for_memory_is_waited_for_while_it_lives():
    world, had = waiting_for_memory()
    (room,) = [part.room for part in open_rooms(world)]
    world.pass_time(5 * OFFER_S)
    assert [part.room for part in open_rooms(world)] == [room]
    assert locked(world) == N_PAGES

    world.d.call(client.ReleaseLease, lease=had.lease)

    assert [one for one in world.d.take() if isinstance(one, client.Received)]
    world.pass_time(3)
    assert not world.d.node.pulls.asks.queued
    assert locked(world) == 0


def test_a_puller_that_is_silent_while_it_waits_is_not_waited_for():
    world, _ = waiting_for_memory()
    world.lost = {AskPrefix}
    world.pass_time(OFFER_S + 0.2)
    assert not open_rooms(world)
    assert locked(world) == 0


def test_a_pull_whose_pages_were_needed_hears_what_its_source_has_now():
    world, had = waiting_for_memory(p_pages=2 * N_PAGES)
    mine = world.p.lease(other(8, 2 * N_PAGES - 1))
    assert not open_rooms(world)
    world.pass_time(OFFER_S)
    world.d.call(client.ReleaseLease, lease=had.lease)
    world.run()
    (got,) = [one for one in world.d.take() if isinstance(one, client.Receiving)]
    assert got.prompt_tokens == 0
    assert mine.pages


def test_a_pull_goes_on_with_the_next_daemon_of_its_source():
    world, had = waiting_for_memory()
    world.lost = {AskPrefix}
    world.restart(world.p)
    world.run()
    world.p.attach()
    cached(world.p, Tokens(PROMPT[: ID_BYTES * PAGE * 4]))
    assert not open_rooms(world)
    world.lost = set()
    world.pass_time(OFFER_S)
    assert len(open_rooms(world)) == 1
    world.d.call(client.ReleaseLease, lease=had.lease)
    world.run()
    world.pass_time(1)
    told = world.d.take()
    (got,) = [one for one in told if isinstance(one, client.Receiving)]
    assert got.prompt_tokens == 4 * PAGE
    assert [one for one in told if isinstance(one, client.Received)]
    assert not open_rooms(world)


def test_who_cancels_a_pull_that_waits_leaves_no_lock_there():
    world, _ = waiting_for_memory()
    world.pass_time(OFFER_S)
    world.d.call(client.CancelCall, of=world.d.calls)
    world.pass_time(OFFER_S)
    assert not open_rooms(world)
    assert not world.d.node.pulls.asks.queued
    assert locked(world) == 0


def test_an_ask_whose_room_is_over_is_answered_anew():
    world, peer = asking()
    cached(world.p, PROMPT)
    first = peer.ask()
    world.pass_time(OFFER_S + 0.2)
    again = peer.ask(number=1)
    assert again.room not in {0, first.room}
    assert [one.room for one in open_rooms(world)] == [again.room]


def test_an_offer_gives_it_the_time_of_the_receive():
    world = World(pull_offer_s=OFFER_S)
    cached(world.p, PROMPT)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), deadline_s=20.0)
    (part,) = open_rooms(world)
    assert part.state is Prefill.FLUSHING
    assert part.deadline_s == pytest.approx(world.now_s + 20.0)
    world.pass_time(OFFER_S + 1)
    world.hold_posts = False
    world.land_posts()
    assert [one for one in world.d.take() if isinstance(one, client.Received)]
    assert locked(world) == 0


@pytest.mark.parametrize("how", ["silent", "restarted"])
def test_locks_of_a_puller_that_is_gone_go_with_it(how):
    world, peer = asking(pull_offer_s=600.0, max_peer_pulls=500, p_pages=300)
    prompts = [other(n, 2) for n in range(100)]
    cached(world.p, *prompts)
    for prompt in prompts:
        peer.ask(prompt)
    assert len(open_rooms(world)) > 10

    if how == "silent":
        world.cut = {"d"}
        world.pass_time(world.p.config.lost_s + 1)
    else:
        world.restart(world.d)
        world.run()

    assert not open_rooms(world)
    assert locked(world) == 0
    assert not world.p.node.pull_source.open_pulls()


def test_no_lock_is_forgotten_with_its_answer(monkeypatch):
    monkeypatch.setattr(pull_source, "MOST_TICKETS", 4)
    world, peer = asking(pull_offer_s=600.0, pull_share=1.0, peer_pull_share=1.0)
    cached(world.p, PROMPT)
    first = peer.ask()
    for n in range(20):
        peer.ask(other(n))  # nothing is cached of these
    assert peer.ask(number=1) == first
    assert len(open_rooms(world)) == 1
    world.restart(world.d)
    world.run()
    assert not open_rooms(world)


# ---- how much ------------------------------------------------------------------------------------


def test_so_many_pulls_of_one_peer_are_open_and_no_more():
    world, peer = asking(max_peer_pulls=3, pull_share=1.0, peer_pull_share=1.0)
    cached(world.p, PROMPT)
    rooms = [peer.ask().room for _ in range(3)]
    assert len(set(rooms)) == 3

    why = refusal(peer.ask())

    assert why.code is Code.NO_ROOM
    assert why.numbers == {"open": 3, "limit": 3}
    # Asked again what was answered is answered so; when one is over there is a place.
    assert refusal(peer.ask(number=4)) == why
    world.pass_time(OFFER_S + 0.2)
    assert peer.ask(number=5).room


def test_so_many_pulls_of_all_peers_are_open_and_no_more():
    world = World(names=("d", "e"), max_pulls=3, max_peer_pulls=2)
    cached(world.p, PROMPT)
    one, two = Asking(world, world.d), Asking(world, world.sides["e"])
    assert one.ask().room
    assert one.ask().room
    assert refusal(one.ask()).numbers["limit"] == 2
    assert two.ask().room
    assert refusal(two.ask()).numbers == {"open": 3, "limit": 3}


def test_pulls_lock_no_more_than_their_share_of_the_pages():
    world, peer = asking(p_pages=101, peer_pull_share=0.3)
    prompts = [other(n) for n in range(8)]
    cached(world.p, *prompts)
    assert all(peer.ask(prompt).room for prompt in prompts[:3])

    why = refusal(peer.ask(prompts[3]))

    assert why.code is Code.NO_ROOM
    assert why.numbers == {"locked_pages": 40, "limit": 30, "open": 3}
    assert locked(world) == 30
    # What is locked already costs nothing more.
    assert peer.ask(prompts[0]).room
    assert locked(world) == 30


def test_all_peers_together_lock_no_more_than_their_share():
    world = World(names=("d", "e"), p_pages=101, peer_pull_share=0.5, pull_share=0.3)
    prompts = [other(n) for n in range(8)]
    cached(world.p, *prompts)
    one, two = Asking(world, world.d), Asking(world, world.sides["e"])
    assert one.ask(prompts[0]).room
    assert one.ask(prompts[1]).room
    assert two.ask(prompts[2]).room
    assert refusal(two.ask(prompts[3])).numbers["limit"] == 30


def test_the_tokens_of_open_pulls_are_bounded_as_are_those_of_prompts():
    world, peer = asking(max_prompt_tokens=N_PAGES * PAGE, pull_share=1.0, peer_pull_share=1.0)
    cached(world.p, PROMPT)
    assert all(peer.ask().room for _ in range(4))
    assert refusal(peer.ask()).numbers == {
        "tokens": 5 * N_PAGES * PAGE,
        "limit": 4 * N_PAGES * PAGE,
        "open": 4,
    }


def test_one_alone_may_lock_more():
    world, peer = asking(p_pages=12, peer_pull_share=0.1, pull_share=0.1)
    cached(world.p, PROMPT)
    assert peer.ask().n_tokens == N_PAGES * PAGE


def test_a_pull_that_is_refused_locks_nothing():
    world, peer = asking(p_pages=41, peer_pull_share=0.3)
    cached(world.p, other(0), other(1))
    peer.ask(other(0))
    refusal(peer.ask(other(1)))
    assert len(snapshot(world.p.node).leases) == 1
    assert locked(world) == N_PAGES


def test_who_pulls_is_not_remembered_as_who_had_a_room():
    """Nobody asks for such a room again; that of an engine must not be forgotten for it."""
    world = World()
    cached(world.p, PROMPT)
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",))
    assert [one for one in world.d.take() if isinstance(one, client.Received)]
    assert world.p.node.prefiller.served_rooms.by_room == {}


def test_an_engine_whose_pull_is_refused_hears_the_numbers():
    world = World(max_peer_pulls=1)
    cached(world.p, PROMPT, other(1))
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",))
    told = world.d.call(client.ReceiveRequest, other(1), room=0, source=("p",))
    assert isinstance(told, client.Failed)
    assert told.refusal.code is Code.NO_ROOM
    assert told.refusal.numbers == {"open": 1, "limit": 1}


# ---- for whom it gives way -----------------------------------------------------------------------


def test_fifteen_hundred_asks_leave_the_source_to_its_own_engine():
    world, peer = asking(pull_offer_s=600.0, p_pages=101, max_peer_pulls=100)
    cached(world.p, tokens((1, 90 * PAGE)))
    for _ in range(1500):
        peer.ask(tokens((1, 90 * PAGE)))
    assert len(open_rooms(world)) == 100

    got = world.p.lease(other(1, 95))

    assert len(got.pages) == ID_BYTES * 95
    assert not open_rooms(world)
    assert not faults(world.p.node)


def test_only_as_many_give_way_as_are_in_the_way():
    world, peer = asking(p_pages=61, pull_share=1.0, peer_pull_share=1.0)
    prompts = [other(n) for n in range(5)]
    cached(world.p, *prompts)
    rooms = [peer.ask(prompt).room for prompt in prompts]

    world.p.lease(tokens((1, 25 * PAGE)))

    # 10 pages are free: the two oldest had to go.
    assert [one.room for one in open_rooms(world)] == rooms[2:]


def test_none_gives_way_in_vain():
    world, peer = asking(p_pages=61, pull_share=1.0, peer_pull_share=1.0)
    prompts = [other(n) for n in range(3)]
    cached(world.p, *prompts)
    world.p.lease(tokens((1, 20 * PAGE)))
    for prompt in prompts:
        peer.ask(prompt)
    assert world.p.call(client.OpenLease, tokens((1, 50 * PAGE)), deadline_s=5.0) is None
    assert len(open_rooms(world)) == 3


@pytest.mark.parametrize("how", ["waits", "extends", "arena", "receives"])
def test_they_give_way_to_whatever_an_engine_asks(how):
    world, peer = asking(p_pages=61, pull_share=1.0, peer_pull_share=1.0)
    cached(world.p, *[other(n) for n in range(4)])
    held = world.p.lease(tokens((1, 15 * PAGE)))
    for n in range(4):
        peer.ask(other(n))
    calls = world.p.calls + 1
    if how == "waits":
        # Behind one that waits for more than there is.
        assert world.p.call(client.OpenLease, tokens((1, 50 * PAGE)), deadline_s=9.0) is None
        assert world.p.call(client.OpenLease, tokens((5, 10 * PAGE)), deadline_s=9.0) is None
        world.p.call(client.ReleaseLease, lease=held.lease)
        assert isinstance(world.p.answer(calls), client.Leased)
    elif how == "extends":
        reply = world.p.call(client.ExtendLease, lease=held.lease, n_tokens=20 * PAGE)
        assert isinstance(reply, client.PageTable)
    elif how == "arena":
        # Whatever is cached goes for a run of pages.
        reply = world.p.call(client.OpenArena, n_pages=8)
        assert isinstance(reply, client.Leased)
    else:
        world.p.call(client.ReceiveRequest, other(9, 30), room=3, source=("d",))
        assert world.p.node.decoder.open.attempts
    assert len(open_rooms(world)) < 4


def test_one_that_gives_way_in_the_tick_in_which_its_time_is_over_ends_once():
    """A waiter's time is over, the one behind it is admitted, and rooms end, all at once."""
    world, peer = asking(p_pages=61, pull_share=1.0, peer_pull_share=1.0, pull_offer_s=0.5)
    cached(world.p, *[other(n) for n in range(4)])
    world.p.lease(tokens((1, 15 * PAGE)))
    for n in range(4):
        peer.ask(other(n))
    world.p.call(client.OpenLease, tokens((1, 50 * PAGE)), deadline_s=0.3)
    world.p.call(client.OpenLease, tokens((5, 10 * PAGE)), deadline_s=9.0)
    waits = world.p.calls
    assert len(open_rooms(world)) == 4

    world.pass_time(0.6, tick_s=0.6)

    assert isinstance(world.p.answer(waits), client.Leased)
    assert not open_rooms(world)
    assert world.p.node.leases.giving_way.gone == []


def test_what_is_being_sent_does_not_give_way():
    world = World(p_pages=21)
    cached(world.p, PROMPT)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",))
    assert world.p.call(client.OpenLease, other(1, 15), deadline_s=5.0) is None
    assert len(open_rooms(world)) == 1
    world.hold_posts = False
    world.land_posts()
    (got,) = [one for one in world.d.take() if isinstance(one, client.Received)]
    assert world.d.holds(got.pages, PROMPT)
    assert isinstance(world.p.answer(world.p.calls), client.Leased)


@replaces_methods
def test_what_has_been_offered_does_not_give_way_before_its_first_post_either():
    world = World(p_pages=21)
    cached(world.p, PROMPT)
    world.p.node.prefiller.posts.push_part = lambda _: None  # as where no agent is there yet
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",))
    (part,) = open_rooms(world)
    assert (part.state, part.outstanding) == (Prefill.FLUSHING, set())
    assert world.p.call(client.OpenLease, other(1, 15), deadline_s=5.0) is None
    assert open_rooms(world) == [part]


def test_the_puller_hears_that_its_pages_were_needed():
    world = World(p_pages=21)
    cached(world.p, PROMPT)
    world.lost = {Offer}
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), deadline_s=20.0)
    got = world.p.lease(other(1, 15))
    world.p.write(got.pages, other(1, 15))
    world.lost = set()
    world.pass_time(2)
    (told,) = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert told.refusal.code is Code.NO_ROOM
    assert "needed by an engine of p" in told.refusal.message
    assert not faults(world.d.node)
    assert not faults(world.p.node)
