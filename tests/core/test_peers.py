"""Links, incarnations, generations and sending agents between two nodes."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.spec import Host, PageOrder, fingerprint
from kvd.core.peers.peer import Agent
from kvd.errors import Code, Refusal
from kvd.wire import client, events
from kvd.wire.peer import (
    Abort,
    Accept,
    Closed,
    Hello,
    Message,
    Offer,
    Ping,
    Progress,
    ReceiveOutcome,
    Reject,
    Settled,
)
from tests.core.sentences import sentence_of
from tests.core.side import incarnation
from tests.core.world import World, spec, tokens

PROMPT = tokens((1, 100))


def handed_over(world: World, room: int = 7) -> client.Reply:
    """One whole handoff; the last thing the decode engine heard."""
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    send = world.p.call(client.SendRequest, PROMPT, room=room, lease=lease.lease)
    assert isinstance(send, client.Sending)
    world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
    world.p.call(client.Finish, send=send.send, aux=b"x")
    return world.d.take()[-1]


def test_an_agent_that_failed_to_load_is_tried_again():
    world = World()
    world.p.fails_loading = 1
    world.d.restart_transfer("crashed")
    world.run()
    peer = world.p.node.peers.by_name["d"]
    assert (peer.agent, peer.agent_why) == (Agent.FAILED, "no route")
    failed = handed_over(world)
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.POST_FAILED
    assert failed.refusal.message == sentence_of("an agent that failed to load is tried again")

    world.pass_time(3)

    assert peer.agent is Agent.LOADED
    assert isinstance(handed_over(world, room=8), client.Received)


def test_an_offer_of_an_unknown_generation_asks_for_the_hello_that_was_lost():
    world = World()
    world.lost = {Hello}
    world.d.restart_transfer("crashed")
    world.run()
    world.lost = set()
    assert world.p.node.peers.by_name["d"].generation == 1

    assert isinstance(handed_over(world), client.Receiving)
    world.pass_time(0.5)

    assert world.p.node.peers.by_name["d"].generation == 2
    assert isinstance(world.d.take()[-1], client.Received)


# ---- who may speak -------------------------------------------------------------------------------


def hello_of(world: World, **changes: object) -> Hello:
    """A Hello as the decode side would say it, changed."""
    sound = Hello(
        source=incarnation("x", 1),
        target=world.p.incarnation,
        node="x",
        layout=fingerprint(world.p.config.spec),
        generation=1,
        metadata=b"meta",
        max_prompt_tokens=1_048_576,
        max_aux_bytes=65_536,
        max_frame_bytes=16_777_216,
    )
    return msgspec.structs.replace(sound, **changes)


def answer_to(world: World, message: Message, link: str = "in:d") -> Message:
    """The one message that the prefill side sends back."""
    world.hold_wire = True
    world.wire.clear()
    world.p.feed(inputs.FromPeer(world.now_s, link, message))
    (letter,) = world.wire
    return letter.message


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (
            {"node": "p"},
            Code.PEER_UNKNOWN,
            "a peer calls itself 'p', which is this node's own name: "
            "give every node its own node.name",
        ),
        (
            {"source": incarnation("p", 1)},
            Code.PEER_UNKNOWN,
            "a peer calls itself 'x', which is this node's own name: "
            "give every node its own node.name",
        ),
        (
            {"protocol": 2},
            Code.VERSIONS_DIFFER,
            "x speaks peer protocol 2, p speaks 1: run the same kvd version on both",
        ),
        (
            {"source": incarnation("d", 1)},
            Code.PEER_UNKNOWN,
            "incarnation 64000000 calls itself 'x', it was 'd' before",
        ),
        (
            {"node": ""},
            Code.BAD_REQUEST,
            f"a Hello of node '', incarnation '{incarnation('x', 1)}', generation 1: "
            "a name, 32 hex digits, and 1 or more are expected",
        ),
        (
            {"node": "x\x1b[2J"},
            Code.BAD_REQUEST,
            f"a Hello of node 'x\\x1b[2J', incarnation '{incarnation('x', 1)}', generation 1: "
            "a name, 32 hex digits, and 1 or more are expected",
        ),
        (
            {"source": "z" * 32},
            Code.BAD_REQUEST,
            f"a Hello of node 'x', incarnation '{'z' * 32}', generation 1: "
            "a name, 32 hex digits, and 1 or more are expected",
        ),
        (
            {"generation": 0},
            Code.BAD_REQUEST,
            f"a Hello of node 'x', incarnation '{incarnation('x', 1)}', generation 0: "
            "a name, 32 hex digits, and 1 or more are expected",
        ),
    ],
)
def test_a_hello_that_is_not_welcome_is_answered_with_the_reason(changes, code, message):
    world = World()

    reject = answer_to(world, hello_of(world, **changes))

    assert isinstance(reject, Reject)
    assert (reject.refusal.code, reject.refusal.message) == (code, message)
    assert list(world.p.node.peers.by_name) == ["d"]
    assert world.p.node.refused == 1
    last = world.p.events[-1]
    assert last == events.MessageRefused(
        last.seq, 100.0, socket="peers", sender="in:d", code=code.value, why=message
    )


def test_a_node_that_is_not_on_the_allow_list_is_rejected():
    world = World(allow=("d", "p"))
    reject = answer_to(world, hello_of(world))
    assert isinstance(reject, Reject)
    assert reject.refusal.message == sentence_of("a node that is not on the allow list is rejected")
    assert world.p.node.peers.by_name["d"].agent is Agent.LOADED


def test_a_dialed_daemon_with_another_name_is_rejected():
    world = World()
    world.hold_wire = True
    world.d.feed(inputs.FromPeer(world.now_s, "out:p", hello_of(world, target=world.d.incarnation)))
    (letter,) = world.wire
    assert isinstance(letter.message, Reject)
    assert letter.message.refusal.message == sentence_of(
        "a dialed daemon with another name is rejected"
    )


def test_a_hello_of_an_older_process_is_stale():
    world = World()
    older = world.d.incarnation
    world.restart(world.d)
    world.pass_time(1)

    reject = answer_to(world, hello_of(world, node="d", source=older))

    assert isinstance(reject, Reject)
    assert reject.refusal.code is Code.PEER_STALE
    assert world.p.node.peers.by_name["d"].incarnation == world.d.incarnation


@pytest.mark.parametrize("kind", [Ping, Offer, Abort, Closed, Accept, Progress, Settled])
@pytest.mark.parametrize("who", ["unknown", "superseded", "to another incarnation"])
def test_a_message_between_other_processes_is_answered_and_never_acted_on(kind, who):
    """scenario G3: from nobody we know, from a replaced process, or for our predecessor."""
    world = World()
    older = world.d.incarnation
    world.restart(world.d)
    world.pass_time(1)
    source = {
        "unknown": incarnation("x", 1),
        "superseded": older,
        "to another incarnation": world.d.incarnation,
    }[who]
    target = incarnation("p", 9) if who == "to another incarnation" else world.p.incarnation
    more: dict[type, tuple[object, ...]] = {
        Ping: (1, 0, 0, 0),
        Offer: (1, 7, 1, 16, 0, b"", (), 1.0),
        Abort: (1, 7, "why"),
        Closed: (1, ReceiveOutcome.COMMITTED),
        Accept: (1,),
        Progress: (1, 1),
        Settled: (1, ReceiveOutcome.FAILED),
    }

    reply = answer_to(world, kind(source, target, *more[kind]))

    assert isinstance(reply, Hello), "whoever it is learns who serves here now"
    assert reply.source == world.p.incarnation
    assert world.p.node.prefiller.rooms.by_room == {}
    assert world.p.node.prefiller.settled_sends.records == {}


def test_a_reject_is_never_answered():
    world = World()
    world.hold_wire = True
    refusal = Refusal(Code.INTERNAL, "why")
    for source in (world.d.incarnation, incarnation("x", 1), ""):
        world.p.feed(
            inputs.FromPeer(world.now_s, "in:d", Reject(source, world.p.incarnation, refusal))
        )
    assert world.wire == []


def test_a_ping_of_nothing_is_not_echoed_for_ever():
    world = World()
    world.hold_wire = True
    d, p = world.d.incarnation, world.p.incarnation
    world.p.feed(inputs.FromPeer(world.now_s, "in:d", Ping(d, p, 0, 0, 0, 0)))
    assert world.wire == []


# ---- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (
            spec(64, page_size=24),
            "components.0.page_size: ours 16, theirs 24",
        ),
        (
            spec(64, dtype="bfloat16"),
            "components.0.layout.dtype: ours float32, theirs bfloat16",
        ),
        (
            msgspec.structs.replace(spec(64), order=PageOrder.LAYER_FIRST),
            "order: ours page_first, theirs layer_first",
        ),
    ],
)
def test_pools_of_other_layouts_are_refused_before_a_page_is_held(theirs, difference):
    """scenario G10: page size, dtype and order, each with both values."""
    world = World()
    world.p.config = msgspec.structs.replace(world.p.config, spec=theirs)
    world.restart(world.p)
    world.pass_time(1)

    reply = world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.LAYOUT_MISMATCH
    assert reply.refusal.message == (
        f"d and p lay out their pools differently: {difference}; configure [pool] alike on both"
    )
    assert world.d.node.leases.leases == {}
    assert world.d.node.peers.by_name["p"].agent is Agent.NONE


def test_peers_of_other_page_sizes_are_told_what_goes_in_which_direction():
    """scenario E4: both numbers on both sides, and no side says that all is the same."""
    world = World()
    host = msgspec.structs.replace(spec(64).components[0], tier=Host())
    world.d.config = msgspec.structs.replace(
        world.d.config, spec=msgspec.structs.replace(spec(64), components=(host,))
    )
    world.p.config = msgspec.structs.replace(world.p.config, spec=spec(64, page_size=32))
    world.restart(world.d)
    world.restart(world.p)
    world.pass_time(1)

    (there,), (here,) = snapshot(world.p.node).peers, snapshot(world.d.node).peers

    assert there.layout == sentence_of(
        "peers of other page sizes are told what goes in which direction 1"
    )
    assert here.layout == sentence_of(
        "peers of other page sizes are told what goes in which direction 2"
    )


@pytest.mark.parametrize("layout", ["", "{", "[" * 500, "null", '"x"', "[]"])
def test_a_layout_that_is_none_is_refused_like_any_other(layout):
    """scenario G2: what cannot be read is refused, and says so."""
    world = World()
    world.p.node.step(inputs.FromPeer(world.now_s, "in:x", hello_of(world, layout=layout)))

    refusal = world.p.node.peers.by_name["x"].refusal
    assert refusal is not None
    assert refusal.code is Code.LAYOUT_MISMATCH


def test_pools_of_other_sizes_exchange_pages():
    world = World(p_pages=64, d_pages=17)
    assert isinstance(handed_over(world), client.Received)


def test_messages_of_strangers_and_for_former_lives_are_counted_as_refused():
    world = World()
    d, p = world.d, world.p
    before = d.node.refused
    heard = [Ping("f" * 32, d.incarnation, 1, 0, 0, 0), Ping(p.incarnation, "e" * 32, 1, 0, 0, 0)]

    for message in heard:
        d.feed(inputs.FromPeer(world.now_s, "out:p", message))

    refused = [one for one in d.events if isinstance(one, events.MessageRefused)]
    assert [(one.socket, one.sender, one.code) for one in refused] == [
        ("peers", "out:p", "peer-unknown"),
        ("peers", "out:p", "peer-stale"),
    ]
    assert [one.why for one in refused] == [
        "Ping of ffffffff, which has not said Hello",
        f"Ping of {p.incarnation[16:24]} is for another life of this node",
    ]
    assert d.node.refused == before + 2
