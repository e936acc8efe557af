"""Which namespaces a peer may pull, as ``peers.allow`` says."""

from __future__ import annotations

import pytest

from kvd.core import inputs
from kvd.core.audit.invariants import faults
from kvd.core.inspect.snapshot import snapshot
from kvd.core.peers.allowed import EVERY, allowed_by_name
from kvd.errors import Code
from kvd.wire import client
from kvd.wire.peer import Offer
from tests.core.test_epochs import PROMPT, begin, cached, pull, received, sent
from tests.core.world import World

NAMES = ("llama", "llama#salt=1", "llama#salt=2", "qwen", "", "#x")


def reads(*entries, epoch=0):
    """The namespaces of which the decode side is sent something."""
    world = World(p_pages=100, d_pages=100)
    world.p.node.peers.allow(entries)
    for namespace in NAMES:
        for side in (world.p, world.d):
            begin(side, namespace, epoch)
        cached(world.p, PROMPT, namespace)
    found = set()
    for namespace in NAMES:
        said = pull(world, namespace)
        if isinstance(said, client.Receiving):
            assert said.prompt_tokens
            found.add(namespace)
        else:
            assert said.refusal.code is Code.NOT_SUPPORTED
            assert f"d may not pull namespace {namespace!r} from p" in said.refusal.message
    # Nothing is locked for who may not have it.
    assert snapshot(world.p.node).rooms == ()
    return found


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_pull_is_of_the_namespaces_that_are_named(epoch):
    every = {*NAMES}
    assert reads(epoch=epoch) == every
    assert reads("d", "e:x", epoch=epoch) == every
    members = {"llama", "llama#salt=1", "llama#salt=2"}
    assert reads("d:llama", epoch=epoch) == members
    assert reads("d:llama", "d:qwen", "e", epoch=epoch) == {*members, "qwen"}
    assert reads("d:llama#salt=1", epoch=epoch) == {"llama#salt=1"}
    assert reads("d:", epoch=epoch) == {"", "#x"}
    assert reads("d:nothing", epoch=epoch) == set()


def test_entries_of_a_name_add_up_and_a_namespace_may_have_any_sign():
    entries = ("a", "b:x", "b:y:z", "c:")
    assert allowed_by_name(entries) == {"a": EVERY, "b": {"x", "y:z"}, "c": {""}}


def test_whoever_is_named_with_a_namespace_may_say_hello_and_take_rooms_of_others():
    world = World(allow=("p:none", "d:none"))
    assert not isinstance(pull(world, "m"), client.Receiving)
    sent(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    assert received(world.d)


def test_it_can_be_changed_while_the_daemon_runs():
    world = World()
    cached(world.p, PROMPT, "m")
    assert pull(world).prompt_tokens
    figures = {"max_queue": 8, "overtakers": 0, "changed": (), "needs_restart": ()}
    world.p.feed(inputs.Reconfigured(world.now_s, allow=("d:other",), **figures))
    cached(world.p, PROMPT, "m#2")
    assert pull(world, "m#2").refusal.code is Code.NOT_SUPPORTED
    world.p.feed(inputs.Reconfigured(world.now_s, allow=("d:m",), **figures))
    assert pull(world, "m#2").prompt_tokens


FIGURES = {"max_queue": 8, "overtakers": 0, "changed": (), "needs_restart": ()}


@pytest.mark.parametrize("entries", [("d:other",), ("e",)])
def test_what_may_not_be_pulled_any_more_ends_with_the_reload(entries):
    world = World()
    cached(world.p, PROMPT, "m")
    cached(world.p, PROMPT, "other")
    world.lost = {Offer}
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), namespace="m")
    world.lost = set()
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), namespace="m")
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), namespace="other")
    assert len(world.p.node.pull_source.open_pulls()) == 3

    world.p.feed(inputs.Reconfigured(world.now_s, allow=entries, **FIGURES))
    world.hold_posts = False
    world.land_posts()
    world.pass_time(3)

    ended = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert len(ended) == (2 if entries[0] == "d:other" else 3)
    words = "may not pull namespace 'm'" if entries[0] == "d:other" else "is not in peers.allow"
    assert all(words in one.refusal.message for one in ended)
    assert not world.p.node.pull_source.open_pulls()
    assert not faults(world.p.node)


def test_who_is_taken_off_the_list_gets_nothing_more_though_its_link_is_up():
    world = World()
    cached(world.p, PROMPT, "m")
    sent(world)
    world.p.feed(inputs.Reconfigured(world.now_s, allow=("e",), **FIGURES))

    assert pull(world).refusal.code is Code.PEER_UNKNOWN
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    (told,) = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert told.refusal.code is Code.PEER_UNKNOWN
    assert "'d' is not in peers.allow of p" in told.refusal.message
