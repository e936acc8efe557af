"""Namespaces that are flushed, and those whose weights have changed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.cache.namespaces import (
    SEPARATOR,
    bad_name,
    base_of,
    epoch_in,
    key_of,
    name_in,
    quoted,
    told,
)
from kvd.core.handoff.protocol import Prefill
from kvd.core.inspect.snapshot import snapshot
from kvd.core.inspect.words import EPOCHS_RECENT_S
from kvd.core.leases.epochs import FORMER_MARK, MAX_EPOCH, MOST_EPOCHS, Epochs
from kvd.core.leases.kept_answers import KEEP_WITHIN_S
from kvd.errors import Code, Refusal
from kvd.types import NO_PAGES, Pages, Tokens, pack_ids
from kvd.wire import admin, client, events
from kvd.wire.peer import AskPrefix, Hello, Offer, PrefixFound
from kvd.wire.pins import PinPrefix, PrefetchPrompt
from tests.core.test_prompts import about
from tests.core.world import PAGE, World, tokens

PROMPT = tokens((1, 6 * PAGE))
MEMBERS = ("m", "m#salt=1", "m#lora=a;salt=2")
OTHERS = ("", "m ", "mm", "m2#salt=1")


def cached(side, prompt, namespace):
    lease = side.lease(prompt, namespace=namespace)
    side.write(lease.pages, prompt, namespace)
    side.call(client.CommitAndRelease, lease=lease.lease)


def found(side, namespace):
    return side.call(client.MatchPrefix, PROMPT, namespace=namespace).tokens


def begin(side, namespace="m", epoch=None):
    return side.call(client.BeginEpoch, namespace=namespace, epoch=epoch)


def pull(world, namespace="m"):
    return world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), namespace=namespace)


def received(side):
    return [one for one in side.answers if isinstance(one, client.Received)]


def failed(side):
    kinds = client.ReceiveFailed | client.SendFailed
    return [one.refusal for one in side.answers if isinstance(one, kinds)]


# ---- flush -------------------------------------------------------------------------------------


def test_a_flush_is_of_one_namespace_and_names_who_locks_what_stays():
    side = World().d
    for namespace in ("a", "b"):
        cached(side, PROMPT, namespace)
    held = side.lease(Tokens(PROMPT[: 8 * PAGE]), namespace="a")

    report = side.call(client.FlushNamespace, namespace="a")

    assert (report.freed_pages, report.kept_pages) == (4, 2)
    (kept,) = report.kept
    assert f"lease {held.lease}" in kept
    assert (found(side, "a"), found(side, "b")) == (2 * PAGE, 6 * PAGE)
    assert not violations(side.node)


@pytest.mark.parametrize("of_operator", [False, True])
def test_a_flush_of_a_base_takes_its_members_and_one_of_a_member_takes_that_alone(of_operator):
    side = World(d_pages=100).d
    for namespace in (*MEMBERS, *OTHERS):
        cached(side, PROMPT, namespace)

    def flush(namespace):
        if of_operator:
            return side.ask(admin.Flush(1, namespace=namespace)).changed["freed_pages"]
        return side.call(client.FlushNamespace, namespace=namespace).freed_pages

    assert flush("m#salt=1") == 6
    assert [found(side, name) for name in MEMBERS] == [6 * PAGE, 0, 6 * PAGE]
    assert flush("m") == 12
    assert [found(side, name) for name in MEMBERS] == [0, 0, 0]
    assert [found(side, name) for name in OTHERS] == [6 * PAGE] * 4
    # A namespace of which there is nothing is not all of them.
    assert flush("nobody") == 0
    assert not violations(side.node)


# ---- a new epoch -------------------------------------------------------------------------------


def test_nothing_of_before_is_found_in_a_new_epoch_and_leases_of_before_go_on():
    world = World()
    side = world.d
    cached(side, PROMPT, "m")
    running = side.lease(Tokens(PROMPT + tokens((900, PAGE))), namespace="m")

    report = begin(side, epoch=3)
    assert (report.freed_pages, report.kept_pages, report.epoch) == (0, 6, 3)
    assert found(side, "m") == 0
    # What the old weights have computed is committed, and found by nobody.
    assert isinstance(side.call(client.CommitAndRelease, lease=running.lease), client.Done)
    assert found(side, "m") == 0

    cached(side, PROMPT, "m")
    assert found(side, "m") == 6 * PAGE
    assert snapshot(side.node).epochs == {"m": 3}
    (began,) = [one for one in world.d.events if isinstance(one, events.EpochBegan)]
    assert (began.namespace, began.epoch) == ("m", 3)
    assert not violations(side.node)


@pytest.mark.parametrize("said_of", ["m", "m#salt=1"])
def test_an_epoch_is_of_the_base_whichever_member_is_named(said_of):
    side = World(d_pages=100).d
    for namespace in (*MEMBERS, *OTHERS):
        cached(side, PROMPT, namespace)
    running = [side.lease(PROMPT, namespace=name) for name in MEMBERS]

    assert begin(side, said_of).epoch == 1

    assert [found(side, name) for name in MEMBERS] == [0, 0, 0]
    for lease in running:
        side.call(client.CommitAndRelease, lease=lease.lease)
    assert [found(side, name) for name in MEMBERS] == [0, 0, 0]
    assert [found(side, name) for name in OTHERS] == [6 * PAGE] * 4
    assert snapshot(side.node).epochs == {"m": 1}


def test_without_a_number_it_is_the_next_one_and_each_drops_what_is_left_of_all_before():
    side = World().d
    for epoch in range(1, 4):
        cached(side, PROMPT, "m")
        report = begin(side)
        assert (report.epoch, report.freed_pages, found(side, "m")) == (epoch, 6, 0)
    held = side.lease(PROMPT, namespace="m")
    side.call(client.CommitLease, lease=held.lease)
    assert begin(side).kept_pages == 6
    side.call(client.ReleaseLease, lease=held.lease)
    # Of two epochs ago, and nobody's since.
    assert begin(side).freed_pages == 6
    assert snapshot(side.node).pools[0].cached_pages == 0


def test_the_same_epoch_is_no_news_and_an_earlier_one_is_refused():
    side = World().d
    begin(side, epoch=5)
    cached(side, PROMPT, "m")
    again = begin(side, epoch=5)
    back = begin(side, "m#salt=1", epoch=4)
    assert (again.freed_pages, again.epoch, found(side, "m")) == (0, 5, 6 * PAGE)
    assert (back.refusal.code, back.refusal.numbers) == (
        Code.WRONG_STATE,
        {"epoch": 4, "now": 5},
    )
    begin(side, epoch=MAX_EPOCH)
    assert begin(side).refusal.code is Code.WRONG_STATE


def test_a_prompt_with_a_number_is_asked_about_in_the_epoch_of_now():
    side = World().d
    cached(side, PROMPT, "m")
    # Held, so that it is there all along.
    side.lease(PROMPT, namespace="m")
    assert about(side, client.MatchPrefix, 1, 0, PROMPT, namespace="m").tokens == 6 * PAGE
    begin(side)
    assert about(side, client.MatchPrefix, 1, 6 * PAGE, namespace="m").tokens == 0
    leased = about(side, client.OpenLease, 1, 6 * PAGE, namespace="m")
    assert leased.prefix_tokens == 0
    assert side.node.leases.leases[leased.lease].namespace == key_of("m", 1)


def test_a_lease_of_before_is_not_sent_under_the_new_weights():
    side = World().p
    lease = side.lease(PROMPT, namespace="m")
    begin(side)
    said = side.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, namespace="m")
    assert said.refusal.code is Code.PROMPT_MISMATCH
    assert said.refusal.numbers == {"lease_epoch": 0, "epoch": 1}
    assert "which began in epoch 0: open another" in said.refusal.message


def test_an_operator_says_it_too_and_rehearses_it_first():
    side = World().d
    for name in MEMBERS[:2]:
        cached(side, PROMPT, name)
    verb = admin.RaiseEpoch(1, "m", 2)
    rehearsed = side.ask(admin.Rehearse(1, verb))
    assert found(side, "m") == 6 * PAGE
    report = side.ask(verb)
    assert (rehearsed.changed, report.changed) == ({"freed_pages": 12, "locked_pages": 0},) * 2
    assert rehearsed.notes == report.notes
    assert found(side, "m") == 0
    side.ask(admin.RaiseEpoch(1, "m#x"))
    assert snapshot(side.node).epochs == {"m": 3}


def test_what_is_shown_names_the_epoch_in_words():
    side = World().d
    begin(side, epoch=7)
    cached(side, PROMPT, "m#salt=1")
    lease = side.lease(PROMPT, namespace="m#salt=1")
    shown = snapshot(side.node)
    (row,) = shown.leases
    (node,) = side.ask(admin.ShowTree(1)).nodes
    assert {row.namespace, node.namespace} == {"m#salt=1, epoch 7"}
    said = side.ask(admin.Why(1, "node", node.id))
    assert "of namespace 'm#salt=1', epoch 7, 6 pages" in said.sentence
    (edge,) = side.node.leases.tree.nodes()
    assert "'m#salt=1', epoch 7" in edge.describe()
    refused = side.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, namespace="x")
    everything = f"{shown}{said}{refused}{side.events}"
    assert SEPARATOR not in everything
    assert repr(SEPARATOR)[1:-1] not in everything


# ---- names -------------------------------------------------------------------------------------

BAD_NAMES = (key_of("m", 7), "m\0", "m\n7", "\x7f", "m\x85", "\x1f7")


@pytest.mark.parametrize("namespace", BAD_NAMES)
@pytest.mark.parametrize("after", [None, 7])
def test_no_request_names_an_epoch_or_any_control_character(namespace, after):
    """Not even before there is an epoch, and not of a prompt with a number."""
    side = World().d
    if after is not None:
        begin(side, epoch=after)
    fields = {
        client.OpenLease: {},
        client.HoldPrefix: {},
        client.MatchPrefix: {},
        PrefetchPrompt: {},
        PinPrefix: {"ttl_s": 1.0},
        client.ReceiveRequest: {"room": 7, "source": ("p",)},
        client.SendRequest: {"room": 7, "lease": 1},
        client.HandOver: {"room": 7, "lease": 1},
    }
    assert {*fields} == {*client.ABOUT_PROMPTS.__args__}
    said = [side.call(kind, PROMPT, namespace=namespace, **more) for kind, more in fields.items()]
    said += [
        about(side, kind, 1, 0, PROMPT, namespace=namespace, **more)
        for kind, more in fields.items()
    ]
    said.append(side.call(client.FlushNamespace, namespace=namespace))
    said.append(side.call(client.BeginEpoch, namespace=namespace, epoch=9))
    said.append(side.ask(admin.Flush(1, namespace=namespace)))
    said.append(side.ask(admin.RaiseEpoch(1, namespace, 9)))
    assert [one.refusal.code for one in said] == [Code.BAD_REQUEST] * len(said)
    assert not violations(side.node)


def test_what_was_cached_under_a_name_like_an_epoch_is_not_found_in_it():
    side = World().d
    for name in (f"m{FORMER_MARK}7", "m, epoch 7", "m 7", "m#7", "m7"):
        cached(side, PROMPT, name)
    begin(side, epoch=7)
    assert found(side, "m") == 0
    assert found(side, f"m{FORMER_MARK}7") == 6 * PAGE


@given(st.text(max_size=20), st.integers(0, MAX_EPOCH))
def test_a_key_leads_back_and_is_nobody_elses(namespace, epoch):
    if bad_name(namespace, "n") is not None:
        return
    key = key_of(namespace, epoch)
    assert (name_in(key), epoch_in(key)) == (namespace, epoch)
    assert base_of(key) == base_of(namespace)
    assert (bad_name(key, "n") is None) is (epoch == 0)
    assert SEPARATOR not in told(key) + quoted(key)


def test_the_namespace_without_a_name_is_shown_with_its_epoch():
    assert [told(key_of("", n)) for n in (0, 2)] == ["", "(no namespace), epoch 2"]


def test_there_are_only_so_many_and_members_do_not_count():
    epochs = Epochs("n")
    for number in range(MOST_EPOCHS):
        epochs.begin(f"n{number}#salt={number}", 1)
    assert epochs.flaw("one more", 1).code is Code.TOO_LARGE
    assert epochs.flaw("n7#x", 2) is None


def test_names_that_are_known_to_be_good_are_bounded():
    epochs = Epochs("n")
    for number in range(10_000):
        assert epochs.internal(f"n{number}") == f"n{number}"
    assert len(epochs.plain) <= 4096


# ---- it is on disk before it is answered -------------------------------------------------------


def test_it_counts_at_once_and_is_answered_when_it_is_on_disk():
    side = World().d
    cached(side, PROMPT, "m")
    side.hold_disk = True
    assert begin(side) is None
    call = side.calls
    # Behind it in the same breath: an engine that has said so need not wait before it looks.
    assert found(side, "m") == 0
    side.let_disk_go()
    assert side.answer(call).epoch == 1
    assert side.disk == {"m": 1}


def test_what_is_said_while_the_disk_is_busy_is_written_behind_it():
    side = World().d
    side.hold_disk = True
    assert [begin(side, name) for name in ("m", "n", "m#x")] == [None] * 3
    assert len(side.unkept) == 1
    same = side.call(client.BeginEpoch, namespace="n", epoch=1)
    assert same is None  # it is in that epoch, which is on no disk yet
    last = side.calls
    side.let_disk_go()
    assert side.disk == {"m": 2, "n": 1}
    assert [side.answer(call).epoch for call in range(last - 3, last + 1)] == [1, 1, 2, 1]


def test_what_cannot_be_written_is_refused_and_nothing_of_before_is_found():
    side = World().d
    cached(side, PROMPT, "m")
    side.disk_fails = "No space left on device"
    said = begin(side, epoch=3)
    assert said.refusal.code is Code.ABORTED
    assert "No space left on device" in said.refusal.message
    assert found(side, "m") == 0
    assert isinstance(side.ask(admin.RaiseEpoch(1, "m", 3)), admin.AdminFailed)

    side.disk_fails = ""
    assert begin(side, epoch=3).epoch == 3
    assert side.disk == {"m": 3}


def test_whoever_waits_too_long_for_the_disk_hears_so_and_the_epoch_counts():
    world = World()
    side = world.d
    side.hold_disk = True
    begin(side)
    call = side.calls
    side.feed(inputs.FromOperator(world.now_s, b"op", admin.RaiseEpoch(5, "n")))
    world.pass_time(KEEP_WITHIN_S + 0.2)
    assert f"not written after {KEEP_WITHIN_S:g} s" in side.answer(call).refusal.message
    assert isinstance(side.reports[-1], admin.AdminFailed)
    side.let_disk_go()
    assert side.disk == {"m": 1, "n": 1}
    assert begin(side, epoch=1).epoch == 1


def test_a_rehearsal_writes_nothing():
    side = World().d
    side.ask(admin.Rehearse(1, admin.RaiseEpoch(1, "m", 2)))
    assert not any(isinstance(one, effects.KeepEpochs) for one in side.effects)


# ---- over a restart ----------------------------------------------------------------------------


def test_the_next_daemon_begins_in_the_epoch_though_its_pool_is_lost():
    world = World()
    begin(world.p, epoch=7)
    world.restart(world.p)
    assert snapshot(world.p.node).epochs == {"m": 7}
    session = world.p.attach()
    back = world.p.call(client.BeginEpoch, namespace="m", epoch=6, session=session)
    assert back.refusal.numbers == {"epoch": 6, "now": 7}
    # It is on disk: nothing is written for it.
    again = world.p.call(client.BeginEpoch, namespace="m", epoch=7, session=session)
    assert again.epoch == 7
    assert not any(isinstance(one, effects.KeepEpochs) for one in world.p.effects)


def adopting(by_base, *keys, is_first=False):
    """A new node that finds the epochs of the one before, and a page cached under each key."""
    side = World().d
    side.life += 1
    side.begin()
    side.feed(inputs.EpochsFound(1.0, by_base, is_first))
    branches = tuple(
        inputs.Branch(-1, key, tokens((1, PAGE)), Pages(pack_ids([page])))
        for page, key in enumerate(keys, start=1)
    )
    adopted = inputs.PoolAdopted(1.0, 1, branches, (), NO_PAGES, 0)
    side.feed(adopted)
    side.attach()
    return side


@pytest.mark.parametrize("order", [1, -1])
def test_the_highest_that_the_pool_says_counts_where_the_file_is_lost(order):
    keys = [key_of("m", 2), key_of("m#x", 10), key_of("m", 9), "m", key_of("", 4)][::order]
    side = adopting({}, *keys)
    assert snapshot(side.node).epochs == {"": 4, "m": 10}
    assert (found(side, "m"), found(side, "m#x"), found(side, "")) == (0, PAGE, PAGE)
    # What nobody can ask for is dropped, and what was learned is on disk again.
    assert snapshot(side.node).pools[0].cached_pages == 2
    side.world.run()
    assert side.disk == {"": 4, "m": 10}
    assert not violations(side.node)


def test_what_is_on_disk_counts_where_it_is_higher():
    side = adopting({"m": 7}, key_of("m", 3), "m", key_of("m#x", 7))
    assert snapshot(side.node).epochs == {"m": 7}
    assert (found(side, "m"), found(side, "m#x")) == (0, PAGE)


@pytest.mark.parametrize(
    "key", [f"m{SEPARATOR}{2**60}", f"m{SEPARATOR}x", f"m{SEPARATOR}\u0663", f"m{SEPARATOR}-1"]
)
def test_what_no_daemon_has_written_is_not_learned(key):
    side = adopting({}, key)
    assert snapshot(side.node).epochs == {}


def test_names_with_the_former_mark_say_that_there_was_an_epoch_and_not_which():
    """A pool that an earlier version left; anybody could have called a namespace so."""
    side = adopting({}, f"m{FORMER_MARK}{MAX_EPOCH}", "m", "x", is_first=True)
    assert snapshot(side.node).epochs == {"m": 1}
    assert (found(side, "m"), found(side, "x")) == (0, PAGE)
    assert found(side, f"m{FORMER_MARK}{MAX_EPOCH}") == 0
    # Of this version it is a name like any other.
    side = adopting({}, f"m{FORMER_MARK}{MAX_EPOCH}", "m")
    assert snapshot(side.node).epochs == {}
    assert found(side, "m") == PAGE


# ---- between nodes -----------------------------------------------------------------------------


def both_say(world, of_p, of_d, fix=""):
    """Who asks either node what is wrong reads both epochs, and what to run where."""
    for side, peer, words in ((world.p, "d", of_p), (world.d, "p", of_d)):
        explained = side.ask(admin.Why(1, "peer", 0, name=peer))
        assert [fact for fact in explained.facts if fact.startswith(words) and fix in fact]
        (state,) = [one for one in snapshot(side.node).peers if one.name == peer]
        assert state.epochs.startswith(words)
        told = [one.why for one in side.events if isinstance(one, events.MessageRefused)]
        assert len([why for why in told if why.startswith(words)]) == 1


@pytest.mark.parametrize("how", ["ours", "theirs", "rooms"])
def test_that_epochs_differ_is_shown_until_they_do_not(how):
    world = World()
    begin(world.p, epoch=2)
    if how == "ours":
        begin(world.d, epoch=1)
    assert isinstance(pull(world), client.Failed)
    shown = [snapshot(side.node).peers[0].epochs for side in (world.p, world.d)]
    assert all("run on d: kvd epoch m 2" in one for one in shown)

    begin(world.d, epoch=2)
    assert snapshot(world.d.node).peers[0].epochs == ""
    if how == "rooms":
        lease = world.p.lease(PROMPT, namespace="m")
        world.p.call(client.HandOver, PROMPT, room=7, lease=lease.lease, namespace="m")
        world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    else:
        assert isinstance(pull(world), client.Receiving)
    assert snapshot(world.p.node).peers[0].epochs == ""


def test_a_peer_puts_no_words_of_its_own_into_what_is_to_be_run():
    world = World()
    lied = Refusal(
        Code.PROMPT_MISMATCH, "run: kvd drop", side="p", numbers={"epoch": 3, "peer_epoch": 0}
    )
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), namespace="m y")
    world.d.node.peers.heard_epochs(world.d.node.peers.by_name["p"], "m y", lied)
    (state,) = snapshot(world.d.node).peers
    assert state.epochs.endswith("run on d: kvd epoch 'm y' 3")
    world.pass_time(EPOCHS_RECENT_S, tick_s=10.0)
    (state,) = snapshot(world.d.node).peers
    assert state.epochs == ""


@pytest.mark.parametrize(("p_epoch", "d_epoch"), [(7, 0), (0, 7), (7, 8), (8, 7)])
@pytest.mark.parametrize("namespace", ["m", "m#salt=1"])
def test_nodes_in_different_epochs_pull_nothing_and_say_both(p_epoch, d_epoch, namespace):
    world = World()
    for side, epoch in ((world.p, p_epoch), (world.d, d_epoch)):
        cached(side, Tokens(PROMPT[: 4 * PAGE]), namespace)
        begin(side, epoch=epoch)
    cached(world.p, PROMPT, namespace)
    said = pull(world, namespace)
    assert said.refusal.code is Code.PROMPT_MISMATCH
    assert said.refusal.numbers == {
        "epoch": p_epoch,
        "peer_epoch": d_epoch,
        "base": "m",
    }
    assert snapshot(world.p.node).rooms == ()
    behind = "p" if p_epoch < d_epoch else "d"
    fix = f"run on {behind}: kvd epoch m {max(p_epoch, d_epoch)}"
    of_p = f"p is in epoch {p_epoch} of 'm', d in {d_epoch}: "
    both_say(world, of_p, f"d is in epoch {d_epoch} of 'm', p in {p_epoch}: ", fix)
    # Another base is none of it.
    cached(world.p, PROMPT, "x")
    assert isinstance(pull(world, "x"), client.Receiving)


def test_in_the_same_epoch_they_do_and_leases_of_before_give_nothing():
    world = World()
    old = world.p.lease(PROMPT, namespace="m")
    world.p.call(client.CommitLease, lease=old.lease)
    for side in (world.p, world.d):
        begin(side, epoch=7)
    none = pull(world)
    assert none.prompt_tokens == 0
    cached(world.p, PROMPT, "m")
    assert pull(world).prompt_tokens == 6 * PAGE
    assert found(world.d, "m") == 6 * PAGE
    assert not violations(world.p.node)


def test_a_pull_of_a_peer_that_says_no_epoch_is_one_in_epoch_0():
    world = World()
    begin(world.p, epoch=7)
    cached(world.p, PROMPT, "m")
    mine = world.d.incarnation
    old = AskPrefix(mine, world.p.incarnation, 1, "m", PROMPT, have_tokens=0, deadline_s=5.0)
    world.inject(world.p, old, world.d)
    told = next(
        one.message
        for one in reversed(world.p.effects)
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, PrefixFound)
    )
    assert told.refusal.numbers == {"epoch": 7, "peer_epoch": 0, "base": "m"}
    # What that version called its epochs is the name of another base here.
    named = msgspec.structs.replace(old, ask=2, namespace=f"m{FORMER_MARK}7")
    world.inject(world.p, named, world.d)
    assert snapshot(world.p.node).rooms == ()


@pytest.mark.parametrize("namespace", BAD_NAMES)
def test_a_peer_names_no_epoch_either(namespace):
    world = World()
    begin(world.p, epoch=7)
    cached(world.p, PROMPT, "m")
    for epoch in (0, 7):
        ask = AskPrefix(
            world.d.incarnation,
            world.p.incarnation,
            epoch + 1,
            namespace,
            PROMPT,
            have_tokens=0,
            deadline_s=5.0,
            epoch=epoch,
        )
        world.inject(world.p, ask, world.d)
    assert snapshot(world.p.node).rooms == ()


def test_a_source_that_knows_no_epochs_is_asked_in_epoch_0_alone():
    world = World()
    for side in (world.p, world.d):
        begin(side, epoch=7)
        cached(side, Tokens(PROMPT[: 4 * PAGE]), "m")
    cached(world.p, PROMPT, "x")
    world.d.node.peers.by_name["p"].knows_epochs = False
    assert pull(world).refusal.code is Code.NOT_SUPPORTED
    assert isinstance(pull(world, "x"), client.Receiving)


def test_a_hello_says_that_epochs_are_read():
    world = World()
    hellos = [
        one.message
        for one in world.p.effects
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, Hello)
    ]
    assert hellos
    assert all(one.knows_epochs for one in hellos)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("engine_first", [False, True])
def test_nodes_in_different_epochs_hand_nothing_over_and_say_both(kept, engine_first):
    world = World()
    begin(world.p, epoch=7)
    begin(world.d, epoch=8)
    lease = world.p.lease(PROMPT, namespace="m")
    fields = {"room": 7, "lease": lease.lease, "namespace": "m", "ttl_s": 5.0 if kept else 0.0}
    if engine_first:
        world.p.call(client.HandOver, PROMPT, **fields)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    if not engine_first:
        world.p.call(client.HandOver, PROMPT, **fields)
    (refusal,) = failed(world.d)
    assert refusal.code is Code.PROMPT_MISMATCH
    assert (refusal.numbers["epoch"], refusal.numbers["peer_epoch"]) == (7, 8)
    words = (
        "p is in epoch 7 of 'm', d in 8: KV of other weights is not handed over; once both have "
        "the same weights, run on p: kvd epoch m 8"
    )
    assert words in refusal.message
    both_say(world, words, "d is in epoch 8 of 'm', p in 7: ")


def test_an_offer_says_its_epoch_and_covers_it_by_its_digest():
    world = World()
    world.hold_wire = True
    offers = []
    for epoch in (0, 1, 2):
        begin(world.d, epoch=epoch)
        world.d.call(client.ReceiveRequest, PROMPT, room=7 + epoch, source=("p",), namespace="m")
        offers.append(world.held(Offer)[-1].message)
    assert [one.epoch for one in offers] == [0, 1, 2]
    assert len({one.digest for one in offers}) == 3
    # In epoch 0 it is what it was before nodes told each other their epochs.
    assert offers[0].digest == xxh3_128_digest(b"0\0m\0" + PROMPT)


# ---- what was sent, kept or received before ----------------------------------------------------


def sent(world, room=7, namespace="m", **fields):
    lease = world.p.lease(PROMPT, namespace=namespace)
    world.p.write(lease.pages, PROMPT, namespace)
    fields = {"lease": lease.lease, "room": room, "namespace": namespace, **fields}
    return world.p.call(client.HandOver, PROMPT, ends_lease=True, **fields)


@pytest.mark.parametrize("namespace", MEMBERS)
@pytest.mark.parametrize("ttl_s", [0.0, 5.0])
def test_what_nobody_has_come_for_is_ended_by_a_new_epoch(namespace, ttl_s):
    world = World()
    sent(world, namespace=namespace, ttl_s=ttl_s)
    call = world.p.calls
    begin(world.p)
    assert snapshot(world.p.node).rooms == ()
    assert snapshot(world.p.node).leases == ()
    if not ttl_s:
        refusal = world.p.answer(call).failure or world.p.answer(call).refusal
        assert refusal.numbers == {"epoch": 1, "sent_in_epoch": 0}
    # Whoever comes in the epoch of then hears why, and both numbers.
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace=namespace)
    (refusal,) = failed(world.d)
    assert (refusal.numbers["epoch"], refusal.numbers["sent_in_epoch"]) == (1, 0)
    assert not received(world.d)
    assert not violations(world.p.node)


def test_a_send_of_an_arena_ends_by_the_namespace_that_was_said_with_it():
    world = World()
    arena = world.p.call(client.OpenArena, n_pages=6)
    fields = {"lease": arena.lease, "pages": arena.pages, "namespace": "m#a"}
    world.p.call(client.SendRequest, PROMPT, room=7, **fields)
    begin(world.p, "x")
    assert snapshot(world.p.node).rooms
    begin(world.p, "m")
    assert not snapshot(world.p.node).rooms
    # What it sends from now on is of the epoch of now.
    world.p.write(arena.pages, PROMPT, "m#a")
    begin(world.d, "m")
    world.p.call(client.HandOver, PROMPT, room=8, **fields)
    world.d.call(client.ReceiveRequest, PROMPT, room=8, source=("p",), namespace="m#a")
    assert received(world.d)


def test_sends_of_other_namespaces_go_on():
    world = World()
    sent(world, namespace="mm")
    begin(world.p)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="mm")
    assert received(world.d)


def test_who_receives_a_kept_room_already_goes_on_and_nobody_comes_after():
    world = World(names=("d", "e"))
    sent(world, ttl_s=5.0)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    begin(world.p)
    world.sides["e"].call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    world.hold_posts = False
    world.land_posts()
    assert received(world.d)
    assert not received(world.sides["e"])
    world.pass_time(6.0)
    assert snapshot(world.p.node).rooms == ()
    assert not violations(world.p.node)


def written_in_a_room(world):
    """A kept room of a prompt that its engine still writes; whoever receives it already."""
    lease = world.p.lease(PROMPT, namespace="m")
    world.p.write(lease.pages, PROMPT, "m")
    fields = {"lease": lease.lease, "room": 7, "namespace": "m", "ttl_s": 5.0}
    send = world.p.call(client.SendRequest, PROMPT, **fields).send
    world.p.call(client.Advance, send=send, upto_tokens=2 * PAGE)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    begin(world.p)
    return send


def test_who_receives_a_kept_room_that_is_still_written_gets_all_of_it_and_nobody_comes_after():
    world = World(names=("d", "e"))
    send = written_in_a_room(world)
    world.sides["e"].call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    (refusal,) = failed(world.sides["e"])
    assert "over when its engine has written it" in str(snapshot(world.p.node).rooms)
    assert refusal.numbers == {"epoch": 1, "sent_in_epoch": 0}
    finished = world.p.call(client.Finish, send=send)
    assert finished.failure == refusal
    assert world.d.holds(received(world.d)[0].pages, PROMPT, "m")
    # The room is over with what its engine had to write for them, not with its time.
    assert snapshot(world.p.node).rooms == ()
    assert not violations(world.p.node)


@pytest.mark.parametrize("how", ["finish", "abort", "deadline"])
def test_such_a_room_ends_also_where_nobody_receives_it_any_more(how):
    world = World(names=("d", "e"))
    send = written_in_a_room(world)
    (receive,) = world.d.node.decoder.open.attempts
    world.d.call(client.CancelReceive, receive=receive)
    assert snapshot(world.p.node).rooms
    if how == "finish":
        world.p.call(client.Finish, send=send)
    elif how == "abort":
        world.p.call(client.AbortSend, send=send, reason="no use")
    else:
        world.pass_time(31.0)
    assert snapshot(world.p.node).rooms == ()
    assert not received(world.d)
    assert not violations(world.p.node)


def test_a_room_that_a_pull_has_opened_is_ended_and_its_answer_is_not_repeated():
    world = World()
    cached(world.p, PROMPT, "m")
    world.hold_wire = True
    pull(world)
    (ask,) = world.held(AskPrefix)
    world.wire.clear()
    world.deliver(ask)
    assert snapshot(world.p.node).rooms
    begin(world.p)
    assert snapshot(world.p.node).rooms == ()
    world.wire.clear()
    world.deliver(ask)
    (told,) = world.held(PrefixFound)
    assert told.message.refusal.numbers == {"epoch": 1, "peer_epoch": 0, "base": "m"}


def test_what_was_asked_for_before_is_had_and_shared_with_nobody():
    world = World()
    sent(world)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    begin(world.d)
    begin(world.p)
    world.hold_posts = False
    world.land_posts()
    (got,) = received(world.d)
    assert world.d.holds(got.pages, PROMPT, "m")
    assert found(world.d, "m") == 0
    world.d.call(client.CommitAndRelease, lease=got.lease)
    assert (found(world.d, "m"), found(world.p, "m")) == (0, 0)
    assert not violations(world.d.node)


def test_a_streaming_send_goes_on():
    world = World()
    lease = world.p.lease(PROMPT, namespace="m")
    world.p.write(lease.pages, PROMPT, "m")
    send = world.p.call(client.SendRequest, room=7, lease=lease.lease, namespace="m")
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="m")
    (part,) = world.p.node.prefiller.rooms.live()
    assert part.state is Prefill.STREAMING
    begin(world.p)
    world.p.call(client.Finish, send=send.send)
    assert received(world.d)
