"""A peer with a key speaks under the name of that key, and no other."""

from __future__ import annotations

import pytest

from kvd.core import inputs
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.spec import fingerprint
from kvd.errors import Code, Refusal
from kvd.wire import events
from kvd.wire.client import ReceiveRequest
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
    Withdrawn,
)
from tests.core.side import incarnation
from tests.core.world import World, tokens

MALLORY = "in:mallory"


def told(world: World, message: Message, proven: str, link: str = MALLORY) -> list[object]:
    """Effects and events of one message that came with the key of ``proven``."""
    step = world.p.node.step(inputs.FromPeer(world.now_s, link, message, proven))
    return [*step.effects, *step.events]


def hello_of(world: World, name: str, source: str) -> Hello:
    return Hello(
        source=source,
        target="",
        node=name,
        layout=fingerprint(world.p.config.spec),
        generation=1,
        metadata=b"meta",
        max_prompt_tokens=1_048_576,
        max_aux_bytes=65_536,
    )


def sentence(claimed: str) -> str:
    return (
        f"the key of 'mallory' speaks as '{claimed}': make node.name there and peers.keys of p "
        "equal"
    )


def test_a_hello_under_the_name_of_the_key_is_taken():
    world = World()
    told(world, hello_of(world, "mallory", incarnation("m", 1)), "mallory")
    assert world.p.node.peers.by_name["mallory"].incarnation == incarnation("m", 1)


@pytest.mark.parametrize("life", [1, 2])
def test_a_hello_under_another_name_is_refused_and_changes_nothing(life):
    """A newer incarnation of d would be the proof that d will never write again."""
    world = World()
    known = world.p.node.peers.by_name["d"].incarnation
    hello = hello_of(world, "d", incarnation("d", life + 1))

    _, event = told(world, hello, "mallory")

    assert isinstance(event, events.MessageRefused)
    assert (event.code, event.why) == (Code.PEER_UNKNOWN.value, sentence("d"))
    assert world.p.node.peers.by_name["d"].incarnation == known
    assert set(world.p.node.peers.by_name) == {"d"}


def test_a_listed_key_that_names_an_incarnation_first_keeps_its_owner_out():
    """Not a promise: what a peer that turned on the others can do."""
    world = World()
    stolen = incarnation("n", 1)
    told(world, hello_of(world, "mallory", stolen), "mallory")

    _, event = told(world, hello_of(world, "n", stolen), "n", "in:n")
    assert isinstance(event, events.MessageRefused)
    assert "it was 'mallory' before" in event.why

    told(world, hello_of(world, "n", incarnation("n", 2)), "n", "in:n")
    assert world.p.node.peers.by_name["n"].incarnation == incarnation("n", 2)


REST = {
    Ping: (1, 0, 0, 0),
    Offer: (1, 7, 1, 100, 0, b"d", (), 5.0),
    Abort: (1, 7, "why"),
    Closed: (1, ReceiveOutcome.ABORTED),
    Accept: (1,),
    Progress: (1, 5),
    Settled: (1, ReceiveOutcome.FAILED),
    Withdrawn: (7, "why"),
}


@pytest.mark.parametrize("kind", REST)
def test_a_message_in_the_name_of_another_process_is_refused_and_changes_nothing(kind):
    """Whoever is told an incarnation by its peers could end the handoffs of that node."""
    world = World()
    peer = world.p.node.peers.by_name["d"]
    link, steps = peer.link, world.p.node.refused
    message = kind(world.d.incarnation, world.p.incarnation, *REST[kind])

    effect, event = told(world, message, "mallory")

    assert (effect.link, type(effect.message)) == (MALLORY, Reject)
    assert effect.message.refusal.message == sentence("d")
    assert (type(event), event.why) == (events.MessageRefused, sentence("d"))
    assert peer.link == link, "it is still answered where it speaks itself"
    assert world.p.node.refused == steps + 1


def test_a_reject_of_an_impostor_is_not_answered_and_not_believed():
    world = World()
    refusal = Refusal(Code.INTERNAL, "why")
    reject = Reject(world.d.incarnation, world.p.incarnation, refusal)
    assert told(world, reject, "mallory") == []


def test_an_unknown_process_with_a_listed_key_is_asked_for_its_hello():
    world = World()
    ping = Ping(incarnation("m", 1), world.p.incarnation, 1, 0, 0, 0)

    effect, *_ = told(world, ping, "mallory")

    assert (effect.link, type(effect.message)) == (MALLORY, Hello)


# ---- handshakes ----------------------------------------------------------------------------------


def failed(world: World, link: str, why: str) -> inputs.HandshakeFailed:
    return inputs.HandshakeFailed(world.now_s, link, "tcp://10.0.0.1:1", "refused", why, 3)


def test_a_failed_handshake_is_an_event_with_the_peer_that_was_dialed():
    world = World()
    (event,) = world.d.node.step(failed(world, "out:p", "wrong key")).events
    assert isinstance(event, events.PeerHandshakeFailed)
    assert (event.peer, event.address, event.reason, event.why, event.times) == (
        "p",
        "tcp://10.0.0.1:1",
        "refused",
        "wrong key",
        3,
    )
    (event,) = world.d.node.step(failed(world, "", "unknown key")).events
    assert isinstance(event, events.PeerHandshakeFailed)
    assert event.peer == ""


def test_a_receive_that_waits_for_a_peer_says_why_it_cannot_be_talked_to():
    world = World()
    world.cut = {"p"}
    world.pass_time(3)
    world.d.feed(failed(world, "out:p", "its key is another"))
    world.d.call(ReceiveRequest, tokens((1, 100)), room=7, source=("p",), deadline_s=0.5)
    world.pass_time(1)

    answer = world.d.take()[-1]

    assert "p has been silent for" in answer.refusal.message
    assert ": its key is another" in answer.refusal.message
    assert [one.trouble for one in snapshot(world.d.node).peers] == ["its key is another"]


def test_trouble_of_the_past_is_not_told_of_a_peer_that_was_heard_since():
    world = World()
    world.d.feed(failed(world, "out:p", "its key is another"))
    world.pass_time(1)
    world.cut = {"p"}
    world.pass_time(4)

    why = world.d.node.peers.not_ready("p")

    assert why is not None
    assert why.startswith("p has been silent for")
    assert "key" not in why
    assert [one.trouble for one in snapshot(world.d.node).peers] == [""]
