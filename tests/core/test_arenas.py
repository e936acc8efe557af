"""Arenas: an engine's own pages, sent from where they are and received where they are wanted."""

from __future__ import annotations

import random

import pytest

from kvd.core.audit.invariants import violations
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import NO_PAGES, count, pack_ids, page_ids, slice_pages
from kvd.wire import admin, client
from kvd.wire.peer import Settled
from tests.core.engines import Sender, cached, totals
from tests.core.families import SPECS
from tests.core.world import PAGE, World, tokens

PROMPT = tokens((1, 5 * PAGE + 3))
N_PAGES = 6


def opened(side, n_pages=20, **fields):
    reply = side.call(client.OpenArena, n_pages=n_pages, **fields)
    assert isinstance(reply, client.Leased), reply
    return reply


def into(world, arena, pages, prompt=PROMPT, *, have_tokens=0, room=7, **fields):
    return world.d.call(
        client.ReceiveRequest,
        prompt,
        room=room,
        source=("p",),
        arena=arena.lease,
        pages=pages,
        have_tokens=have_tokens,
        **fields,
    )


def pushed(side, kind):
    return [one for one in side.answers if isinstance(one, kind)]


def chosen(arena, *places):
    """Those pages of an arena, in that order."""
    ids = page_ids(arena.pages)
    return pack_ids([ids[place] for place in places])


def code(reply):
    assert isinstance(reply, client.Failed), reply
    return reply.refusal.code


# ---- opening and closing -------------------------------------------------------------------------


def test_an_arena_is_a_run_of_pages_with_a_named_owner():
    world = World()
    arena = opened(world.d, 20)
    ids = page_ids(arena.pages)
    assert ids == list(range(ids[0], ids[0] + 20))
    assert totals(world.d).held == 20
    (lease,) = snapshot(world.d.node).leases
    assert (lease.reason, lease.owner, lease.held_pages) == ("arena", "engine", 20)
    world.d.call(client.ReleaseLease, lease=arena.lease)
    assert totals(world.d).held == 0
    assert not violations(world.d.node)


def test_it_is_found_among_scattered_free_pages():
    world = World()
    leases = [world.d.lease(tokens((100 * k, 3 * PAGE))) for k in range(10)]
    for one in leases[::2]:
        world.d.call(client.ReleaseLease, lease=one.lease)
    refused = world.d.call(client.OpenArena, n_pages=40)
    assert code(refused) is Code.NO_ROOM
    assert refused.refusal.numbers["longest_run"] == 33
    assert "longest run" in refused.refusal.message
    assert count(opened(world.d, 33).pages) == 33


def test_cached_pages_give_way_to_it():
    world = World()
    cached(world.d, tokens((1, 63 * PAGE)))
    assert totals(world.d).free == 0
    assert count(opened(world.d, 60).pages) == 60


@pytest.mark.parametrize(("n_pages", "expected"), [(64, Code.TOO_LARGE), (0, Code.BAD_REQUEST)])
def test_one_that_can_never_be_is_refused(n_pages, expected):
    world = World()
    assert code(world.d.call(client.OpenArena, n_pages=n_pages)) is expected
    assert totals(world.d).held == 0


def test_pools_with_several_components_have_none():
    world = World(spec=SPECS["swa"])
    refused = world.d.call(client.OpenArena, n_pages=2)
    assert code(refused) is Code.NOT_SUPPORTED
    assert "swa" in refused.refusal.message


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (client.ExtendLease, {"n_tokens": 1}),
        (client.SlideLease, {"upto_tokens": 1}),
        (client.CommitLease, {}),
        (client.CommitAndRelease, {}),
        (client.CommitUpTo, {"upto_tokens": 1}),
        (client.SayWritten, {"upto_tokens": 1}),
        (client.RetractLease, {}),
        (client.ResumeLease, {}),
        (client.SendRequest, {"room": 7}),
        (client.HandOver, {"room": 7}),
    ],
)
def test_what_a_lease_with_tokens_can_do_it_cannot(kind, fields):
    world = World()
    arena = opened(world.d)
    assert code(world.d.call(kind, lease=arena.lease, **fields)) is Code.WRONG_STATE
    assert snapshot(world.d.node).leases[0].held_pages == 20


def test_it_ends_with_its_engine():
    world = World()
    opened(world.d)
    world.d.hang_up()
    assert totals(world.d) == (63, 0, 0, 0, 0)


# ---- receiving -----------------------------------------------------------------------------------


@pytest.mark.parametrize("have_pages", [0, 2, 5])
def test_the_kv_lands_where_the_engine_wants_it_and_no_lease_comes_of_it(have_pages):
    world = World()
    arena = opened(world.d)
    pages = chosen(arena, 9, 4, 7, 0, 12, 2)
    world.d.write(slice_pages(pages, 0, have_pages), PROMPT)
    sender = Sender(world, PROMPT)

    begun = into(world, arena, slice_pages(pages, have_pages), have_tokens=have_pages * PAGE)
    assert begun.prefix_tokens == have_pages * PAGE
    finished = sender.finish(b"aux")

    (got,) = pushed(world.d, client.Received)
    assert (got.lease, got.pages, got.aux) == (0, slice_pages(pages, have_pages), b"aux")
    assert world.d.holds(pages, PROMPT)
    answer = world.p.answer(sender.finish_call)
    assert finished is None or finished == answer
    assert (answer.decode_prefix_len, answer.sent_pages) == (
        have_pages * PAGE,
        N_PAGES - have_pages,
    )
    # All of it is the arena's again, and nothing of it is in the tree.
    (lease,) = snapshot(world.d.node).leases
    assert (lease.id, lease.held_pages) == (arena.lease, 20)
    assert totals(world.d).cached == 0
    assert not pushed(world.d, client.PagesBack)


def test_a_prompt_that_is_all_there_moves_nothing():
    world = World()
    arena, prompt = opened(world.d), tokens((1, 4 * PAGE))
    sender = Sender(world, prompt)
    into(world, arena, NO_PAGES, prompt, have_tokens=4 * PAGE)
    sender.finish()
    assert pushed(world.d, client.Received)
    assert world.p.answer(sender.finish_call).sent_pages == 0


def test_while_it_arrives_the_pages_are_named_as_that():
    world = World()
    arena = opened(world.d)
    pages = chosen(arena, 3, 4, 5, 6, 7, 8)
    into(world, arena, pages)
    held, lent = snapshot(world.d.node).leases
    assert (held.held_pages, lent.held_pages) == (14, 6)
    assert lent.reason == f"receive from p into arena {arena.lease}"
    told = world.d.ask(admin.Why(1, "page", page_ids(pages)[0]))
    assert f"into arena {arena.lease}" in str(told)


def test_pages_that_cannot_be_written_are_refused_in_numbers():
    world = World()
    arena, other = opened(world.d, 12), opened(world.d, 12)
    first = chosen(arena, 0, 1, 2, 3, 4, 5)
    into(world, arena, first)
    for pages, expected, words in (
        (chosen(arena, 6, 7, 8, 9, 10), Code.BAD_REQUEST, "for what takes 6"),
        (chosen(arena, 6, 7, 8, 9, 10, 6), Code.BAD_REQUEST, "named twice"),
        (chosen(other, 0, 1, 2, 3, 4, 5), Code.BAD_REQUEST, "is not in arena"),
        (chosen(arena, 6, 7, 8, 9, 10, 0), Code.WRONG_STATE, "is received into by receive"),
        (pack_ids([0, 2**31 - 1, 1, 2, 3, 4]), Code.BAD_REQUEST, "is not in arena"),
        (b"abc", Code.BAD_REQUEST, "for what takes 6"),
    ):
        refused = into(world, arena, pages, room=8)
        assert code(refused) is expected, refused
        assert words in refused.refusal.message
    for have in (PAGE // 2, 7 * PAGE, 2**40):
        assert code(into(world, arena, first, have_tokens=have, room=8)) is Code.BAD_REQUEST
    assert code(into(world, arena, first, room=0)) is Code.BAD_REQUEST
    lease = world.d.lease(PROMPT)
    assert code(into(world, lease, lease.pages, room=8)) is Code.WRONG_STATE
    session = world.d.attach("other")
    stolen = into(world, arena, chosen(arena, 6, 7, 8, 9, 10, 11), room=8, session=session)
    assert code(stolen) is Code.UNKNOWN_LEASE


def test_a_receive_that_waits_for_its_source_has_its_pages_already():
    world = World()
    arena = opened(world.d)
    world.cut = {"p"}
    world.pass_time(8)  # its silence is noticed
    pages = chosen(arena, 0, 1, 2, 3, 4, 5)
    assert into(world, arena, pages) is None
    refused = into(world, arena, pages, room=8)
    assert code(refused) is Code.WRONG_STATE
    assert "in use by receive" in refused.refusal.message
    # Closed meanwhile: it hears so, and nothing is written.
    world.d.call(client.ReleaseLease, lease=arena.lease)
    assert totals(world.d).held == 0
    assert [one.refusal.code for one in pushed(world.d, client.Failed)][-1] is Code.CANCELLED


def test_pages_in_doubt_come_back_when_no_write_can_land():
    world = World()
    arena = opened(world.d)
    pages = chosen(arena, 0, 1, 2, 3, 4, 5)
    sender = Sender(world, PROMPT)
    world.hold_posts = True
    begun = into(world, arena, pages)
    sender.advance(3 * PAGE)
    world.d.call(client.CancelReceive, receive=begun.receive)
    (failed,) = pushed(world.d, client.ReceiveFailed)
    assert failed.refusal.code is Code.CANCELLED
    # A page is under way still: kept from everybody, its engine too.
    assert totals(world.d).quarantined == 6
    assert not pushed(world.d, client.PagesBack)
    refused = into(world, arena, pages, room=8)
    assert "may still be written by what was receive" in refused.refusal.message
    world.land_posts()
    (back,) = pushed(world.d, client.PagesBack)
    assert back.receive == begun.receive
    assert snapshot(world.d.node).leases[0].held_pages == 20
    assert totals(world.d).quarantined == 0
    assert isinstance(into(world, arena, pages, room=8), client.Receiving)


@pytest.mark.parametrize("is_dead", [True, False])
def test_an_arena_that_ends_leaves_pages_in_doubt_in_quarantine(is_dead):
    world = World()
    arena = opened(world.d)
    sender = Sender(world, PROMPT)
    world.hold_posts = True
    into(world, arena, chosen(arena, 0, 1, 2, 3, 4, 5))
    sender.advance(3 * PAGE)
    if is_dead:
        world.d.hang_up()
    else:
        world.d.call(client.ReleaseLease, lease=arena.lease)
    assert totals(world.d).quarantined == 6
    assert totals(world.d).held == 0
    world.land_posts()
    assert totals(world.d) == (63, 0, 0, 0, 0)


def test_a_source_that_fails_gives_the_pages_back_in_one_step():
    world = World()
    arena = opened(world.d)
    sender = Sender(world, PROMPT)
    into(world, arena, chosen(arena, 0, 1, 2, 3, 4, 5))
    world.p.call(client.AbortSend, send=sender.send, reason="no")
    assert [type(one) for one in world.d.answers[-2:]] == [client.ReceiveFailed, client.PagesBack]
    assert snapshot(world.d.node).leases[0].held_pages == 20


def test_a_lost_settled_is_said_again():
    world = World()
    arena = opened(world.d)
    sender = Sender(world, PROMPT)
    into(world, arena, chosen(arena, 0, 1, 2, 3, 4, 5))
    world.lost = {Settled}
    sender.finish()
    assert not pushed(world.d, client.Received)
    world.lost = set()
    world.pass_time(3)
    assert pushed(world.d, client.Received)


# ---- sending -------------------------------------------------------------------------------------


def sent(world, arena, pages, prompt=PROMPT, room=7, **fields):
    return world.p.call(
        client.SendRequest, prompt, room=room, lease=arena.lease, pages=pages, **fields
    )


def test_pages_are_sent_from_where_they_are():
    world = World()
    arena = opened(world.p)
    pages = chosen(arena, 9, 4, 7, 0, 12, 2)
    cached(world.d, tokens((1, 2 * PAGE)))
    opened_send = sent(world, arena, pages)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.p.write(pages, PROMPT, end=3 * PAGE)
    world.p.call(client.Advance, send=opened_send.send, upto_tokens=3 * PAGE)
    world.p.write(pages, PROMPT)
    world.p.call(client.Finish, send=opened_send.send)
    (got,) = pushed(world.d, client.Received)
    assert world.d.holds(got.pages[2 * 4 :], tokens((1, 5 * PAGE + 3))) is False
    assert [world.d.memory[page] for page in page_ids(got.pages)[2:]] == [
        world.p.memory[page] for page in page_ids(pages)[2:]
    ]
    (lease,) = snapshot(world.p.node).leases
    assert (lease.id, lease.held_pages, lease.reason) == (arena.lease, 20, "arena")
    assert totals(world.p).cached == 0


def test_from_arena_to_arena_in_one_message():
    world = World()
    here, there = opened(world.p), opened(world.d)
    mine, theirs = chosen(here, 5, 3, 1, 0, 2, 4), chosen(there, 10, 12, 11, 14, 13, 19)
    world.p.write(mine, PROMPT)
    into(world, there, theirs)
    world.p.call(client.HandOver, PROMPT, room=7, lease=here.lease, pages=mine, aux=b"a")
    assert world.d.holds(theirs, PROMPT)
    assert world.p.answers[-1].failure is None


def test_two_sends_may_share_pages_and_no_receive_gets_one_of_them():
    world = World(names=("d", "e"))
    arena = opened(world.p)
    pages = chosen(arena, 0, 1, 2, 3, 4, 5)
    sent(world, arena, pages, room=7)
    assert isinstance(sent(world, arena, pages, room=8), client.Sending)
    refused = world.p.call(
        client.ReceiveRequest,
        PROMPT,
        room=9,
        source=("d",),
        arena=arena.lease,
        pages=pages,
    )
    assert code(refused) is Code.WRONG_STATE
    assert "in use by send" in refused.refusal.message


def test_what_cannot_be_sent_is_refused():
    world = World()
    arena, lease = opened(world.p), world.p.lease(PROMPT)
    pages = chosen(arena, 0, 1, 2, 3, 4, 5)
    assert code(sent(world, arena, pages[:-4])) is Code.BAD_REQUEST
    assert code(sent(world, arena, pages, tokens())) is Code.BAD_REQUEST
    assert code(sent(world, lease, lease.pages)) is Code.WRONG_STATE
    hand_over = world.p.call(
        client.HandOver, PROMPT, room=7, lease=arena.lease, pages=pages, ends_lease=True
    )
    assert code(hand_over) is Code.BAD_REQUEST
    reply = sent(world, arena, pages)
    ended = world.p.call(client.FinishAndRelease, send=reply.send)
    assert code(ended) is Code.WRONG_STATE


def test_a_send_outlives_the_arena_that_it_reads():
    world = World()
    arena = opened(world.p)
    pages = chosen(arena, 0, 1, 2, 3, 4, 5)
    world.p.write(pages, PROMPT)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.p.call(client.HandOver, PROMPT, room=7, lease=arena.lease, pages=pages)
    world.p.call(client.ReleaseLease, lease=arena.lease)
    assert totals(world.p).held == 20
    world.hold_posts = False
    world.land_posts()
    assert pushed(world.d, client.Received)
    assert totals(world.p).held == 0


# ---- all of it at random -------------------------------------------------------------------------


class Walk:
    """Two nodes with engines that open arenas, hand over between them and change their minds."""

    def __init__(self, seed, **more):
        self.rng = random.Random(seed)
        self.world = World(p_pages=48, d_pages=48, **more)
        self.arenas = {side.name: [] for side in (self.world.p, self.world.d)}
        self.sends, self.receives = [], []
        deeds = {
            self.open: 2, self.close: 2, self.receive: 3, self.send: 3, self.go_on: 2,
            self.cancel: 1, self.weather: 2, self.wait: 1, self.lease: 1,
        }  # fmt: skip
        self.deeds = [deed for deed, weight in deeds.items() for _ in range(weight)]

    def side(self):
        return self.rng.choice([self.world.p, self.world.d])

    def room(self):
        """A room, and how long its prompt is."""
        room = self.rng.randint(1, 3)
        return room, 23 * room

    def open(self):
        side = self.side()
        reply = side.call(client.OpenArena, n_pages=self.rng.randint(6, 20))
        if isinstance(reply, client.Leased):
            self.arenas[side.name].append(reply)

    def close(self):
        side = self.side()
        arenas = self.arenas[side.name]
        if arenas:
            arena = arenas.pop(self.rng.randrange(len(arenas)))
            side.call(client.ReleaseLease, lease=arena.lease)

    def of_arena(self, name, n_pages):
        """An arena of that side, and so many pages of it; None where it has none."""
        if not self.arenas[name]:
            return None
        arena = self.rng.choice(self.arenas[name])
        ids = page_ids(arena.pages)
        return arena, pack_ids(self.rng.sample(ids, min(n_pages, len(ids))))

    def receive(self):
        room, n_tokens = self.room()
        have = self.rng.randint(0, n_tokens // PAGE)
        found = self.of_arena("d", -(-n_tokens // PAGE) - have)
        if found is None:
            return
        reply = into(
            self.world,
            *found,
            tokens((1, n_tokens)),
            have_tokens=have * PAGE,
            room=room,
            deadline_s=3.0,
        )
        if isinstance(reply, client.Receiving):
            self.receives.append(reply.receive)

    def send(self):
        room, n_tokens = self.room()
        found = self.of_arena("p", -(-n_tokens // PAGE))
        if found is None:
            return
        arena, pages = found
        self.world.p.write(pages, tokens((1, n_tokens)))
        reply = self.world.p.call(
            self.rng.choice([client.SendRequest, client.HandOver]),
            tokens((1, n_tokens)),
            room=room,
            lease=arena.lease,
            pages=pages,
            deadline_s=3.0,
        )
        if isinstance(reply, client.Sending):
            self.sends.append((reply.send, n_tokens))

    def go_on(self):
        if not self.sends:
            return
        number, n_tokens = self.sends.pop(self.rng.randrange(len(self.sends)))
        if self.rng.random() < 0.3:
            self.world.p.call(client.AbortSend, send=number, reason="no")
            return
        upto = self.rng.randint(0, n_tokens)
        self.world.p.call(client.Advance, send=number, upto_tokens=upto)
        self.world.p.call(client.Finish, send=number)

    def cancel(self):
        if self.receives:
            self.world.d.call(client.CancelReceive, receive=self.receives.pop())

    def weather(self):
        self.world.hold_posts = self.rng.random() < 0.4
        if not self.world.hold_posts:
            self.world.land_posts()

    def wait(self):
        self.world.pass_time(self.rng.choice([0.2, 1.0, 4.0]))

    def lease(self):
        side, n_tokens = self.side(), self.rng.randint(1, 6 * PAGE)
        lease = side.call(client.OpenLease, tokens((1, n_tokens)), deadline_s=0)
        if isinstance(lease, client.Leased):
            side.call(client.CommitAndRelease, lease=lease.lease)

    def end(self):
        """Everything is let go of, and what is under way has its end."""
        self.world.hold_posts = False
        self.world.land_posts()
        for side in (self.world.p, self.world.d):
            for arena in self.arenas[side.name]:
                side.call(client.ReleaseLease, lease=arena.lease)
        self.world.pass_time(8)


@pytest.mark.parametrize("is_journaled", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_page_is_lost_or_written_by_two(seed, is_journaled):
    """What lands is checked page by page in the world, and everything else after each step."""
    walk = Walk(seed, is_journaled=is_journaled)
    for _ in range(400):
        walk.rng.choice(walk.deeds)()
    walk.end()
    for side in (walk.world.p, walk.world.d):
        found = totals(side)
        assert (found.held, found.quarantined) == (0, 0), (seed, side.name, found)
    # Of each receive that failed after it had begun its engine hears when its pages are safe.
    failed = {one.receive for one in pushed(walk.world.d, client.ReceiveFailed)}
    assert failed <= {one.receive for one in pushed(walk.world.d, client.PagesBack)}
    assert pushed(walk.world.d, client.Received)
