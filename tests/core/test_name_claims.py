"""Which process has a node's name, when a second one wants it: at once, later, or never."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.inspect.why import of_peer
from kvd.core.leases.admission import Admission
from kvd.core.peers.claims import MAX_REPLACED
from kvd.core.peers.hello import NEWS_AT_ONCE
from kvd.core.peers.peer import Life
from kvd.errors import Code, Refusal
from kvd.wire import client, events
from kvd.wire.peer import Abort, Hello, Message, Ping, Reject
from tests.core.side import incarnation
from tests.core.test_peers import hello_of
from tests.core.world import World, tokens

HERE, THERE = "1" * 32, "2" * 32
OTHER, THIRD = "in8:d", "in9:d"
"""Links of other processes that call themselves d."""
BIRTHS = {"older": 1, "later": 99}


def met(home: str = HERE) -> World:
    """``p`` knows a ``d`` of that home, in its fiftieth life."""
    world = World()
    world.d.config = msgspec.structs.replace(world.d.config, home=home)
    world.d.life = 49
    world.restart(world.d)
    world.pass_time(5)
    assert holder(world) == incarnation("d", 50)
    return world


def holder(world: World) -> str:
    return world.p.node.peers.by_name["d"].incarnation


def second(world: World, life: int, home: str = THERE, **changes: object) -> Hello:
    source = incarnation("d", life)[:16] + "f" * 16
    return hello_of(world, **{"node": "d", "home": home, "source": source, **changes})


def says(world: World, message: Message, link: str = OTHER) -> list[Message]:
    """What ``p`` says on that link to a message of it."""
    step = world.p.node.step(inputs.FromPeer(world.now_s, link, message))
    world.p.events += step.events
    return [one.message for one in step.effects if getattr(one, "link", "") == link]


def silence(world: World, seconds: float = 4.0) -> None:
    """Nothing of ``d`` is heard for so long."""
    world.cut.add("d")
    world.pass_time(seconds)


def echo_of(ping: Message, hello: Hello) -> Ping:
    assert isinstance(ping, Ping)
    return Ping(hello.source, ping.source, 0, ping.number, 0, 0)


def claims(world: World, hello: Hello) -> None:
    """A living process of another home says Hello, until it is taken."""
    asked = says(world, hello)
    assert [type(one) for one in asked] == [Hello, Ping]
    assert [type(one) for one in says(world, echo_of(asked[1], hello))] == [Hello]
    says(world, hello)


@pytest.mark.parametrize("birth", BIRTHS)
def test_of_two_homes_who_has_the_name_keeps_it_while_it_lives(birth):
    world = met()
    hello = second(world, BIRTHS[birth])

    (reject,) = says(world, hello)

    assert isinstance(reject, Reject)
    assert reject.refusal.code is Code.PEER_UNKNOWN
    assert "two daemons call themselves 'd'" in reject.refusal.message
    assert "give every node its own node.name" in reject.refusal.message
    assert holder(world) == incarnation("d", 50)
    assert world.p.node.peers.by_name["d"].link != OTHER


@pytest.mark.parametrize("birth", BIRTHS)
def test_it_comes_in_by_itself_when_the_first_is_silent_whatever_the_clocks_say(birth):
    world = met()
    hello = second(world, BIRTHS[birth])
    says(world, hello)
    silence(world)

    claims(world, hello)

    assert holder(world) == hello.source
    assert world.p.node.peers.by_name["d"].life is Life.UP
    (replaced,) = [
        one for one in world.p.events if isinstance(one, events.PeerReplaced) and one.peer == "d"
    ][1:]
    assert replaced.after == hello.source


def test_a_node_that_moved_hands_over_again():
    """It said goodbye, and comes back elsewhere, where the clock is an hour behind."""
    world = met()
    world.d.config = msgspec.structs.replace(world.d.config, home=THERE)
    world.d.life = 3
    world.restart(world.d)
    assert holder(world) == incarnation("d", 50)
    world.pass_time(4)
    world.d.attach()

    assert holder(world) == incarnation("d", 4)
    prompt = tokens((1, 100))
    lease = world.p.lease(prompt)
    world.p.write(lease.pages, prompt)
    send = world.p.call(client.SendRequest, prompt, room=7, lease=lease.lease)
    assert isinstance(send, client.Sending)
    world.d.call(client.ReceiveRequest, prompt, room=7, source=("p",))
    world.p.call(client.Finish, send=send.send, aux=b"x")
    world.pass_time(1)
    assert isinstance(world.d.take()[-1], client.Received)


@pytest.mark.parametrize("life", [51, 60])
def test_of_one_home_the_later_has_the_name_at_once(life):
    """Its lock proves that the one before is reaped."""
    world = met()
    says(world, second(world, life, HERE))
    assert holder(world).startswith(incarnation("d", life)[:16])


@pytest.mark.parametrize("is_lost", [False, True])
def test_of_one_home_an_earlier_one_never_comes_back(is_lost):
    world = met()
    if is_lost:
        silence(world)
    (reject,) = says(world, second(world, 3, HERE))
    assert isinstance(reject, Reject)
    assert reject.refusal.code is Code.PEER_STALE
    assert holder(world) == incarnation("d", 50)


def test_a_hello_that_was_delayed_takes_no_name_from_one_that_is_only_silent():
    """Whoever said it is dead, and answers nothing."""
    world = met()
    silence(world)
    hello = second(world, 99)
    asked = [type(one) for _ in range(1000) for one in says(world, hello)]
    assert asked == [Hello, Ping], "and asked once in a heartbeat, however often it comes"
    for number in (1, 2**40):
        says(world, Ping(hello.source, world.p.incarnation, 0, number, 0, 0))
        says(world, hello)
    assert holder(world) == incarnation("d", 50)

    world.cut.clear()
    world.pass_time(2)

    assert world.p.node.peers.by_name["d"].life is Life.UP
    (reject,) = says(world, hello)
    assert isinstance(reject, Reject)


def test_an_echo_of_another_process_proves_nothing():
    world = met()
    silence(world)
    hello, other = second(world, 3), second(world, 4)
    _, ping = says(world, hello)
    says(world, echo_of(ping, other))
    says(world, other)
    says(world, hello)
    assert holder(world) == incarnation("d", 50)


def test_of_two_that_want_a_name_one_gets_it_and_the_other_waits():
    world = met()
    silence(world)
    first, other = second(world, 3), second(world, 4, "3" * 32)
    _, ping = says(world, first)
    assert says(world, other, THIRD) == []
    says(world, echo_of(ping, first))
    says(world, first)
    assert holder(world) == first.source
    (reject,) = says(world, other, THIRD)
    assert isinstance(reject, Reject)


def test_who_was_replaced_is_not_heard_and_comes_back_with_a_new_transfer_process():
    """Its posts may be under way still; a newer generation proves that they are not."""
    world = met()
    old = second(world, 50, HERE, source=incarnation("d", 50), generation=1)
    silence(world)
    new = second(world, 3)
    claims(world, new)

    says(world, Abort(old.source, world.p.incarnation, 1, 7, "why"), "in:d")
    assert holder(world) == new.source
    world.pass_time(4)
    (reject,) = says(world, old, "in:d")
    assert isinstance(reject, Reject)
    assert reject.refusal.code is Code.PEER_STALE
    # Both say what is to be done: whoever hung does nothing wrong that it could see by itself.
    world.inject(world.d, reject, world.p)
    for node, name in ((world.p.node, "d"), (world.d.node, "p")):
        said = of_peer(node, name)
        assert not isinstance(said, Refusal)
        assert any("run kvd fence on its host, or restart it" in fact for fact in said.facts)

    again = msgspec.structs.replace(old, generation=2)
    _, ping = says(world, again, "in:d")
    says(world, echo_of(ping, again), "in:d")
    says(world, again, "in:d")
    assert holder(world) == old.source
    (reject,) = says(world, new)
    assert isinstance(reject, Reject)


def test_the_clock_ahead_and_back_over_three_restarts_on_three_disks():
    world = met()
    for life, home in ((70, THERE), (2, "3" * 32), (60, "4" * 32)):
        silence(world)
        hello = second(world, life, home)
        claims(world, hello)
        assert holder(world) == hello.source
    assert len(world.p.node.peers.by_name["d"].replaced) == 4


def test_so_many_that_were_replaced_are_remembered():
    world = met()
    for number in range(MAX_REPLACED + 10):
        silence(world, 5.0)
        claims(world, second(world, number + 1, f"{number:032x}"))
    assert len(world.p.node.peers.by_name["d"].replaced) == MAX_REPLACED


@pytest.mark.parametrize(("before", "after"), [("", THERE), (HERE, "")])
def test_a_version_that_names_no_home_is_in_order_with_its_like_alone(before, after):
    world = met(before)
    assert isinstance(says(world, second(world, 99, after))[0], Reject)
    silence(world)
    claims(world, second(world, 99, after))
    assert holder(world) == second(world, 99).source


def test_what_is_refused_is_told_once_and_why_says_it():
    world = met()
    hello = second(world, 3)
    before = len(world.p.events)
    for _ in range(50):
        says(world, hello)
        says(world, Ping(hello.source, world.p.incarnation, 1, 0, 0, 0))
        world.pass_time(0.1)
    told = [one for one in world.p.events[before:] if isinstance(one, events.MessageRefused)]
    assert len(told) == 2, "the Hello, and the ping of whom has not said one"
    assert world.p.node.refused >= 100

    said = of_peer(world.p.node, "d")
    assert not isinstance(said, Refusal)
    assert any("two daemons call themselves 'd'" in fact for fact in said.facts)


def test_who_is_refused_says_why_too():
    world = met()
    refusal = Refusal(Code.PEER_UNKNOWN, "two daemons call themselves 'd'", side="p")
    for _ in range(20):
        world.inject(world.d, Reject(world.p.incarnation, world.d.incarnation, refusal), world.p)
    told = [one for one in world.d.events if isinstance(one, events.PeerRefused)]
    assert len(told) == 1, "when it met p, which knew an earlier d"
    said = of_peer(world.d.node, "p")
    assert not isinstance(said, Refusal)
    assert any(
        "it refused a message of ours" in fact and "two daemons" in fact for fact in said.facts
    )


def test_a_node_that_restarts_all_the_time_is_believed_so_often():
    """Each new life costs a sending agent; whoever makes up lives costs no more than few."""
    world = met()
    taken = 0
    for life in range(100, 1100):
        said = says(world, second(world, life, HERE))
        taken += not any(isinstance(one, Reject) for one in said)
    assert taken == NEWS_AT_ONCE
    world.pass_time(2)
    says(world, second(world, 2000, HERE))
    assert holder(world).startswith(incarnation("d", 2000)[:16])


def test_a_hello_that_says_nothing_new_wakes_nobody():
    world = met()
    known = world.p.node.peers.by_name["d"]
    node, woken = world.p.node, []

    class Told(Admission):
        def changed(self, name):
            woken.append(name)

    node.admission = Told(node.settings, node.leases, node.owners, node.out)
    hello = second(world, 50, HERE, source=known.incarnation, generation=known.generation)
    for _ in range(10):
        assert says(world, hello, known.link) == []
    assert woken == []
