"""Handoffs of pools with more than one component: what is granted, posted, verified, and kept.

The window has 128 tokens and pages have 64 where nothing else is said: the numbers of scenario C1.
"""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.audit.invariants import faults
from kvd.core.components.tail import tail_start
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Device,
    Host,
    Mha,
    Mla,
    Nowhere,
    PageOrder,
    PerRequest,
    PoolSpec,
    Raw,
    State,
    StateTensor,
    Tail,
)
from kvd.errors import Code
from kvd.types import NULL_PAGE, page_ids
from kvd.wire import client
from kvd.wire.peer import Integrity, Offer, ReceiveOutcome, Settled
from tests.core.engines import offered
from tests.core.world import Side, World, tokens

ROOM = 7
PAGE, WINDOW = 64, 128
PROMPT = tokens((1, 1000))
LAYOUT = Mha(1, 1, 1, "float32")


def swa(pages: int = 64, window_pages: int = 64) -> PoolSpec:
    components = (
        Component("kv", 1, LAYOUT, PAGE),
        Component("swa", 5, LAYOUT, PAGE, Tail(WINDOW)),
    )
    return PoolSpec("main", "swa", PageOrder.PAGE_FIRST, components, (pages, window_pages))


def recurrent(pages: int = 3000, states: int = 8) -> PoolSpec:
    state = State((StateTensor("conv", (4, 4), "float32"),))
    components = (
        Component("kv", 0, Raw(0), 1, tier=Nowhere()),
        Component("state", 2, state, 1, PerRequest()),
    )
    return PoolSpec("main", "recurrent", PageOrder.PAGE_FIRST, components, (pages, states))


def indexed(page: int, index_page: int, *, is_host: bool = False) -> PoolSpec:
    pages = 4096 // page
    components = [
        Component("kv", 1, Mla(8, 4, "float32"), page, tier=Host() if is_host else Device("cpu")),
        Component("index", 1, Mha(1, 2, 1, "float32"), index_page),
    ]
    counts = [pages, pages * (page // index_page)]
    if is_host:
        components.append(Component("buffer", 1, Mla(8, 4, "float32"), page, Buffer(4 * page)))
        counts.append(40)
    family = "hisparse" if is_host else "mla"
    return PoolSpec("main", family, PageOrder.PAGE_FIRST, tuple(components), tuple(counts))


def apart(p: PoolSpec, d: PoolSpec, **more: object) -> World:
    """A prefill side and a decode side with pools of their own."""
    world = World(spec=d, **more)
    world.p.config = msgspec.structs.replace(world.p.config, spec=p)
    world.restart(world.p)
    world.p.attach()
    world.pass_time(1)
    return world


class Engine:
    """A prefill engine over all components: it writes what it computes, page by page."""

    def __init__(self, side: Side, toks: bytes, **fields: object) -> None:
        self.side, self.toks = side, toks
        self.leased = side.lease(toks, **fields)
        self.rows = {"kv": self.leased.pages}
        self.told(self.leased.beside)

    def told(self, beside: tuple[bytes, ...]) -> None:
        names = [one.component.name for one in self.side.node.leases.components.each]
        self.rows |= dict(zip(names, beside, strict=True))

    def compute(self, start: int, end: int) -> None:
        """What each token page holds afterwards says which component and which tokens it is."""
        for name, row in self.rows.items():
            for k, page in enumerate(page_ids(row)):
                if name == "state":
                    if k == 1:
                        self.side.memory_of(name)[page] = f"state:{end}"
                elif page != NULL_PAGE and k * PAGE < end and (k + 1) * PAGE > start:
                    self.side.memory_of(name)[page] = f"{name}:{k}"

    def slide(self, upto: int) -> None:
        reply = self.side.call(client.SlideLease, lease=self.leased.lease, upto_tokens=upto)
        assert isinstance(reply, client.PageTable), reply
        self.told(reply.beside)

    def send(self, room: int = ROOM) -> int:
        reply = self.side.call(client.SendRequest, self.toks, room=room, lease=self.leased.lease)
        assert isinstance(reply, client.Sending), reply
        return reply.send

    def finish(self, send: int) -> client.Reply | None:
        return self.side.call(client.Finish, send=send, aux=b"aux")


def received(world: World) -> client.Received:
    (got,) = [one for one in world.d.take() if isinstance(one, client.Received)]
    return got


def test_the_tail_of_the_windows_is_granted_and_sent_fresh():
    """Scenario C1 over a handoff: 16 pages of kv and 3 window pages, the rest is the null page."""
    world = World(spec=swa(), integrity=Integrity.FULL)
    engine = Engine(world.p, PROMPT)
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    offer = offered(world)
    send = engine.send()
    engine.compute(0, 1000)
    finished = engine.finish(send)
    got = received(world)

    kv, window = offer.grants
    assert [(one.component, one.start_tokens, one.end_tokens) for one in offer.grants] == [
        ("kv", 0, 1000),
        ("swa", 832, 1000),
    ]
    assert (len(kv.pages) // 4, len(window.pages) // 4) == (16, 3)
    assert got.pages == kv.pages
    (row,) = got.beside
    assert page_ids(row)[:13] == [NULL_PAGE] * 13
    assert row[13 * 4 :] == window.pages
    assert [world.d.memory_of("swa")[page] for page in page_ids(window.pages)] == [
        "swa:13",
        "swa:14",
        "swa:15",
    ]
    assert [world.d.memory[page] for page in page_ids(kv.pages)] == [f"kv:{k}" for k in range(16)]
    assert isinstance(finished, client.Finished) or finished is None


def test_what_is_cached_beyond_the_tail_is_sent_again():
    """Scenario C7: the tree has 960 tokens, the match is capped at 832, 3 pages of each go."""
    world = World(spec=swa())
    lease = world.d.lease(PROMPT)
    world.d.call(client.CommitAndRelease, lease=lease.lease)
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))

    offer = offered(world)

    assert offer.decode_prefix_len == 832
    assert [len(one.pages) // 4 for one in offer.grants] == [3, 3]


def test_a_prefill_engine_that_slides_sends_the_same_tail():
    """It never holds more window pages than span, step and one, and the tail arrives whole."""
    world = World(spec=swa(window_pages=8), integrity=Integrity.FULL)
    engine = Engine(world.p, PROMPT, step_tokens=100)
    keeper = world.p.node.leases.components.each[0]
    assert len(keeper.own_pages(world.p.node.leases.leases[engine.leased.lease])) // 4 == 5
    send = engine.send()
    for start in range(0, 1000, 100):
        engine.compute(start, start + 100)
        world.p.call(client.Advance, send=send, upto_tokens=start + 100)
        engine.slide(start + 100)
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    engine.finish(send)

    (row,) = received(world).beside
    held = [world.d.memory_of("swa")[page] for page in page_ids(row) if page != NULL_PAGE]
    assert held == ["swa:13", "swa:14", "swa:15"]


def test_with_pages_of_one_token_all_windows_are_sent_behind_a_prefix_of_the_prefill_side():
    components = (
        Component("kv", 1, LAYOUT, 1),
        Component("swa", 1, LAYOUT, 1, Tail(4)),
    )
    world = World(spec=PoolSpec("main", "swa", PageOrder.PAGE_FIRST, components, (64, 64)))
    known = world.p.lease(tokens((1, 20)))
    world.p.call(client.CommitAndRelease, lease=known.lease)
    leased = world.p.lease(tokens((1, 30)))
    assert leased.prefix_tokens == 20
    (source,) = leased.beside
    for k, page in enumerate(page_ids(source)):
        world.p.memory_of("swa")[page] = f"swa:{k}"
    world.d.call(client.ReceiveRequest, tokens((1, 30)), room=ROOM, source=("p",))

    sending = world.p.call(client.SendRequest, tokens((1, 30)), room=ROOM, lease=leased.lease)
    assert isinstance(sending, client.Sending), sending
    world.p.call(client.Finish, send=sending.send)

    (row,) = received(world).beside
    there = [world.d.memory_of("swa")[page] for page in page_ids(row)]
    assert there == [f"swa:{k}" for k in range(30)]


def test_a_finish_before_the_windows_have_come_so_far_is_refused():
    world = World(spec=swa())
    engine = Engine(world.p, PROMPT, step_tokens=100)
    send = engine.send()

    refused = engine.finish(send)

    assert isinstance(refused, client.Failed)
    assert refused.refusal.code is Code.BAD_REQUEST
    assert refused.refusal.numbers == {"prompt_tokens": 1000, "mapped_tokens": 128}


def test_an_engine_that_has_slid_past_the_tail_of_a_shorter_prompt_is_told_so():
    """The decode side wants the tail of 300 tokens, the lease has windows of 1000 only."""
    world = World(spec=swa())
    short = PROMPT[: 300 * 4]
    engine = Engine(world.p, PROMPT)
    engine.slide(1000)
    world.d.call(client.ReceiveRequest, short, room=ROOM, source=("p",))

    refused = world.p.call(client.SendRequest, short, room=ROOM, lease=engine.leased.lease)

    assert isinstance(refused, client.Failed)
    assert refused.refusal.code is Code.BAD_PAGES
    assert refused.refusal.numbers == {"wanted_tokens": 128, "mapped_tokens": 832}


@pytest.mark.parametrize("start", [0, 768, 896])
def test_a_tail_of_another_length_is_refused(start):
    """Both sides work out the range from prompt, window and page; 832 is the only right one."""
    assert tail_start(1000, WINDOW, PAGE, cached=True) == 832
    world = World(spec=swa())
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    (letter,) = world.held(Offer)
    kv, window = letter.message.grants
    window = msgspec.structs.replace(window, start_tokens=start)
    offer = msgspec.structs.replace(letter.message, grants=(kv, window))
    world.wire.clear()

    world.deliver(letter._replace(message=offer))

    (settled,) = [one.message for one in world.held(Settled)]
    assert settled.outcome is ReceiveOutcome.REFUSED
    assert (
        settled.reason.message
        == (
            f"pages of swa for tokens [{start}, 1000), what is sent of it is [832, 1000) or "
            "[832, 1000)".split(" or ")[0]
        )
    )


def test_a_torn_window_page_fails_the_room_and_names_the_component():
    world = World(spec=swa(), integrity=Integrity.FULL)
    world.hold_verify = True
    engine = Engine(world.p, PROMPT)
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    offer = offered(world)
    send = engine.send()
    engine.compute(0, 1000)
    engine.finish(send)
    assert [one.component for one in world.d.asked] == ["kv", "swa"]
    page = page_ids(offer.grants[1].pages)[1]
    world.d.memory_of("swa")[page] = "torn"

    world.d.answer_verify()
    world.run()
    assert [type(one) for one in world.d.take()] == [client.Receiving]
    world.d.answer_verify()
    world.run()

    (failed,) = world.d.take()
    assert isinstance(failed, client.ReceiveFailed)
    assert f"page {page} (page 14 of the prompt, tokens [896, 960))" in failed.refusal.message
    assert world.d.node.leases.components.each[0].pool.free_pages == 63
    assert world.d.node.leases.pool.free_pages == 63


def test_an_abort_quarantines_the_pages_of_every_component():
    """Scenario E13 and C: nobody gets them before the writer has settled, and then all are free."""
    world = World(spec=swa())
    world.hold_posts = True
    engine = Engine(world.p, PROMPT)
    reply = world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    send = engine.send()
    engine.compute(0, 1000)
    engine.finish(send)
    world.d.call(client.CancelReceive, receive=reply.receive)
    table = world.d.node.leases
    (lease,) = table.leases.values()
    keeper = table.components.each[0]

    assert lease.quarantine is not None
    assert (table.pool.free_pages, keeper.pool.free_pages) == (63 - 16, 63 - 3)
    world.land_posts()
    world.pass_time(1)

    assert table.leases == {}
    assert (table.pool.free_pages, keeper.pool.free_pages) == (63, 63)


def test_a_state_is_always_sent_whole_even_when_every_token_is_cached():
    """Scenario B5: no page of kv at all, one state; a full hit still gets it."""
    world = World(spec=recurrent(), integrity=Integrity.FULL)
    for room in (1, 2):
        engine = Engine(world.p, PROMPT)
        world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
        offer = offered(world)
        send = engine.send(room)
        engine.compute(0, 1000)
        engine.finish(send)
        got = received(world)
        assert [(one.component, len(one.pages)) for one in offer.grants] == [("state", 4)]
        assert offer.decode_prefix_len == (0 if room == 1 else 1000)
        (row,) = got.beside
        source, own = page_ids(row)
        assert source == NULL_PAGE
        assert world.d.memory_of("state")[own] == "state:1000"
        finished = [one for one in world.p.take() if isinstance(one, client.Finished)]
        assert [(one.sent_pages, one.failure) for one in finished] == [(0, None)]
        world.d.call(client.CommitAndRelease, lease=got.lease)
        world.p.call(client.CommitAndRelease, lease=engine.leased.lease)


def test_a_state_that_stands_for_more_than_the_prompt_is_not_sent():
    """It has no history: what was computed behind the prompt cannot be taken out of it."""
    world = World(spec=recurrent())
    engine = Engine(world.p, PROMPT, reserve_tokens=3)
    send = engine.send()
    world.p.call(client.CommitLease, tokens((7, 3)), lease=engine.leased.lease)

    refused = engine.finish(send)

    assert isinstance(refused, client.Failed)
    assert refused.refusal.code is Code.BAD_REQUEST
    assert refused.refusal.numbers == {"prompt_tokens": 1000, "written_tokens": 1003}


def test_companions_travel_with_their_pages():
    """Index pages of 16 tokens beside kv pages of 64: four of them for each, by number."""
    world = World(spec=indexed(64, 16), integrity=Integrity.FULL)
    toks = PROMPT[: 200 * 4]
    engine = Engine(world.p, toks)
    world.d.call(client.ReceiveRequest, toks, room=ROOM, source=("p",))
    offer = offered(world)
    kv, index = offer.grants
    factor_pages = [page * 4 + k for page in page_ids(kv.pages) for k in range(4)]
    assert page_ids(index.pages) == factor_pages[:13]
    for page in page_ids(engine.rows["kv"]):
        for k in range(4):
            world.p.memory_of("index")[page * 4 + k] = f"index:{page * 4 + k}"
    send = engine.send()
    engine.compute(0, 200)
    engine.finish(send)
    got = received(world)

    sent = [page * 4 + k for page in page_ids(engine.rows["kv"]) for k in range(4)]
    landed = [world.d.memory_of("index")[page] for page in page_ids(index.pages)]
    assert landed == [f"index:{page}" for page in sent[:13]]
    assert got.beside == ()


def test_large_pages_are_cut_for_a_host_pool_with_small_ones():
    """Scenario E1, E4: 64-token pages land on 16-token pages, the last one trimmed."""
    world = apart(indexed(64, 16), indexed(16, 16, is_host=True), integrity=Integrity.FULL)
    toks = PROMPT[: 200 * 4]
    engine = Engine(world.p, toks)
    engine.compute(0, 200)
    reply = world.d.call(client.ReceiveRequest, toks, room=ROOM, source=("p",))
    assert isinstance(reply, client.Receiving), reply
    offer = offered(world)
    send = engine.send()
    world.p.call(client.Advance, send=send, upto_tokens=50)
    engine.finish(send)

    received(world)

    kv, index = offer.grants
    assert (len(kv.pages) // 4, len(index.pages) // 4) == (13, 13)
    assert [world.d.memory[page] for page in page_ids(kv.pages)] == [
        f"kv:{unit // 4}/{unit % 4}" for unit in range(13)
    ]


def test_small_pages_are_never_put_together():
    """Both directions say both numbers; device memory does not take cut pages."""
    world = apart(indexed(64, 16), indexed(16, 16))
    reply = world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.LAYOUT_MISMATCH
    assert reply.refusal.numbers == {"ours": 16, "theirs": 64}


def test_a_prefix_in_the_middle_of_a_large_page_is_gone_on_from():
    """The decode side has 80 tokens, which is one and a quarter of the prefill side's pages."""
    world = apart(indexed(64, 16), indexed(16, 16, is_host=True))
    toks = PROMPT[: 200 * 4]
    lease = world.d.lease(toks[: 80 * 4])
    world.d.call(client.CommitAndRelease, lease=lease.lease)
    engine = Engine(world.p, toks)
    engine.compute(0, 200)
    world.d.call(client.ReceiveRequest, toks, room=ROOM, source=("p",))
    offer = offered(world)
    send = engine.send()
    engine.finish(send)
    received(world)

    assert offer.decode_prefix_len == 80
    assert [world.d.memory[page] for page in page_ids(offer.grants[0].pages)] == [
        f"kv:{unit // 4}/{unit % 4}" for unit in range(5, 13)
    ]


# ---- a lease that is released while its prompt is sent -------------------------------------------


@pytest.mark.parametrize("how", ["kept", "gives way"])
@pytest.mark.parametrize(
    "spec",
    [swa(), recurrent(), indexed(64, 16), indexed(64, 16, is_host=True)],
    ids=["swa", "recurrent", "index", "hisparse"],
)
def test_the_reserve_of_a_released_lease_goes_back_and_its_prompt_is_sent(spec, how):
    world = World(spec=spec)
    table = world.p.node.leases
    leased = world.p.lease(PROMPT, reserve_tokens=640)
    before = table.budgets.headroom("kv")
    asked = {"room": ROOM, "lease": leased.lease, "ends_lease": True, "ttl_s": 20.0}
    world.p.call(client.HandOver, PROMPT, **asked)

    assert table.budgets.headroom("kv") >= before + 640 // spec.components[0].page_size
    assert faults(world.p.node) == []
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    assert [one for one in world.d.take() if isinstance(one, client.Received)]
    if how == "gives way":
        n_tokens = table.capacity_pages * table.page_size
        world.p.call(client.OpenLease, tokens((50_000, n_tokens)), step_tokens=64, deadline_s=5.0)
        assert world.p.node.prefiller.rooms.by_room == {}
    else:
        world.p.call(client.KeepRoom, room=ROOM, ttl_s=0.0)
    assert faults(world.p.node) == []
    assert leased.lease not in table.leases
