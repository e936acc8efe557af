"""Links that an engine asked for by an address: how many, by which rule, and when they end."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.peers.registry import IDLE_S, MAX_BY_ADDRESS
from kvd.core.settings import DialRule
from kvd.errors import Code, Refusal
from kvd.wire import client
from kvd.wire.peer import Hello, Ping, Reject
from tests.core.side import incarnation
from tests.core.test_peers import hello_of
from tests.core.world import World, tokens

PROMPT = tokens((1, 100))
AT = "tcp://10.0.0.9:7402"


def dialing(rule: DialRule = DialRule.ANY) -> World:
    world = World()
    world.d.config = msgspec.structs.replace(world.d.config, dials=rule)
    world.restart(world.d)
    world.pass_time(1)
    world.d.attach()
    return world


def asked(world: World, *sources: str, room: int = 7) -> list[effects.Effect]:
    """What a receive from there leads to; nothing is carried out."""
    node = world.d.node
    message = client.ReceiveRequest(99, room, sources, "", 0, 0, 600.0)
    step = node.step(inputs.FromClient(world.now_s, 1, message, PROMPT))
    world.d.events += step.events
    return step.effects


def refusal_of(found: list[effects.Effect]) -> Refusal:
    (answer,) = [one.message for one in found if isinstance(one, effects.AnswerEngine)]
    assert isinstance(answer, client.Failed), answer
    return answer.refusal


def hellos(found: list[effects.Effect]) -> list[str]:
    return [
        one.link
        for one in found
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, Hello)
    ]


def hears(world: World, message: object, link: str) -> list[effects.Effect]:
    step = world.d.node.step(inputs.FromPeer(world.now_s, link, message))
    world.d.events += step.events
    return step.effects


def ticks(world: World, seconds: float) -> list[effects.Effect]:
    found = []
    for _ in range(int(seconds)):
        world.now_s += 1
        step = world.d.node.step(inputs.Tick(world.now_s))
        world.d.events += step.events
        found += step.effects
    return found


@pytest.mark.parametrize(
    ("rule", "source", "is_dialed"),
    [
        (DialRule.ANY, AT, True),
        (DialRule.ANY, "tcp://[2001:db8::1]:7402", True),
        (DialRule.LOOPBACK, AT, False),
        (DialRule.LOOPBACK, "tcp://127.0.0.1:7402", True),
        (DialRule.LOOPBACK, "tcp://[::1]:7402", True),
        (DialRule.LOOPBACK, "tcp://localhost:7402", True),
        (DialRule.LOOPBACK, "tcp://127.evil.example:7402", False),
        (DialRule.LOOPBACK, "tcp://localhost.evil.example:7402", False),
        (DialRule.NONE, "tcp://127.0.0.1:7402", False),
        (DialRule.ANY, "tcp://10.0.0.9", False),
        (DialRule.ANY, "tcp://10.0.0.9:65535", True),
        (DialRule.ANY, "tcp://10.0.0.9:65536", False),
        (DialRule.ANY, "x y@" + AT, False),
        (DialRule.ANY, "p2@" + AT, True),
    ],
)
def test_whom_the_rule_allows_is_dialed_and_nobody_else(rule, source, is_dialed):
    world = dialing(rule)
    found = asked(world, source)
    if is_dialed:
        assert hellos(found) == ["at:" + source]
    else:
        assert hellos(found) == []
        assert refusal_of(found).code is Code.PEER_UNKNOWN


def test_so_many_are_dialed_and_an_address_once():
    world = dialing()
    for number in range(MAX_BY_ADDRESS):
        asked(world, f"tcp://10.0.0.9:{7000 + number}", room=100 + number)
    assert hellos(asked(world, "tcp://10.0.0.9:7000", room=1)) == []
    refusal = refusal_of(asked(world, AT, room=2))
    assert refusal.code is Code.PEER_UNKNOWN
    assert refusal.numbers == {"dialed": MAX_BY_ADDRESS, "limit": MAX_BY_ADDRESS}


def test_an_address_is_a_source_alone():
    refusal = refusal_of(asked(dialing(), "p", AT))
    assert "is received from alone" in refusal.message


def test_who_answers_has_the_name_that_it_says_and_what_waits_is_for_that():
    world = dialing()
    asked(world, AT)
    mine = world.d.incarnation
    found = hears(world, hello_of(world, node="far", target=mine), "at:" + AT)
    assert world.d.node.peers.find(AT) == "far"
    assert {part.peer for part in world.d.node.decoder.open.parts.values()} == {"far"}
    assert any(
        isinstance(one, effects.SendToPeer) and type(one.message).__name__ == "Offer"
        for one in found
    )


def test_a_name_before_the_address_must_be_its_own():
    world = dialing()
    asked(world, "near@" + AT)
    found = hears(world, hello_of(world, node="far", target=world.d.incarnation), "at:near@" + AT)
    assert any(isinstance(one.message, Reject) for one in found)
    assert "far" not in world.d.node.peers.by_name


def test_a_link_stays_while_something_is_open_on_it():
    world = dialing()
    asked(world, AT)
    link = "at:" + AT
    far = hello_of(world, node="far", target=world.d.incarnation)
    hears(world, far, link)
    assert not [one for one in ticks(world, 25) if isinstance(one, effects.HangUpLink)], (
        "the receive is open"
    )


def test_a_link_of_which_nothing_came_is_given_up_with_its_receive():
    world = dialing()
    asked(world, AT)
    found = ticks(world, 30 + IDLE_S + 5)  # the deadline of a receive here, and then
    (hang_up,) = [one for one in found if isinstance(one, effects.HangUpLink)]
    assert hang_up.link == "at:" + AT
    assert world.d.node.peers.find(AT) is None
    assert "at:" + AT not in hellos(ticks(world, 5))


def test_who_is_left_so_is_told_goodbye_and_is_dialed_again_when_it_is_asked_for():
    world = dialing()
    asked(world, AT)
    link = "at:" + AT
    hears(world, hello_of(world, node="far", target=world.d.incarnation), link)
    peer = world.d.node.peers.by_name["far"]
    world.d.node.decoder.open.parts.clear()
    world.d.node.decoder.open.attempts.clear()
    found = []
    for _ in range(int(IDLE_S) + 5):
        hears(world, Ping(incarnation("x", 1), world.d.incarnation, 1, 0, 0, 0), link)
        found += ticks(world, 1)
    said = [one.message for one in found if isinstance(one, effects.SendToPeer)]
    goodbyes = [one for one in said if isinstance(one, Ping) and one.state == "leaving"]
    assert len(goodbyes) == 1
    assert [one.link for one in found if isinstance(one, effects.HangUpLink)] == [link]
    assert peer.name not in world.d.node.peers.by_name
    assert hellos(asked(world, AT, room=8)) == [link]
