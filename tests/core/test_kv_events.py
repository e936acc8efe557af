"""KV events: which blocks a router is told of, by which names, in which order.

scenario R11: 96 tokens in pages of 16 are six blocks, each behind the one before it, and the same
six go. The batches with numbers are in ``tests/daemon/test_kv_events.py``.
"""

from __future__ import annotations

import msgspec

from kvd.core import effects, inputs
from kvd.core.cache.radix import hide
from kvd.core.kv_events.block_names import each_name, names_along, root_name
from kvd.core.kv_events.told_namespace import told_namespace
from kvd.core.replay.freeze import freeze
from kvd.core.replay.thaw import thaw
from kvd.core.settings import KvEventSettings
from kvd.types import ID_BYTES, NO_TOKENS, Tokens, pack_ids
from kvd.wire import admin, client
from kvd.wire.page_address import of_keys, with_extra
from tests.core.world import PAGE, World, tokens

TOLD = KvEventSettings("CPU")
PROMPT = tokens((1, 6 * PAGE))
PAGES = pack_ids(range(1, 7))


def side(pages=64, **told):
    return World(p_pages=pages, kv_events=msgspec.structs.replace(TOLD, **told)).p


def cached(at, prompt, namespace=""):
    lease = at.lease(prompt, namespace=namespace)
    at.write(lease.pages, prompt, namespace)
    at.call(client.CommitAndRelease, lease=lease.lease)


def said(at, kind):
    return [one for one in at.effects if isinstance(one, kind)]


def tick(at):
    at.feed(inputs.Tick(at.world.now_s))


def test_six_blocks_are_stored_each_behind_the_one_before_it_and_the_same_six_go():
    at = side()
    cached(at, PROMPT)
    (stored,) = said(at, effects.BlocksStored)
    names = each_name(stored.names)
    assert (len(set(names)), stored.before, stored.medium) == (6, 0, "CPU")
    assert stored.tokens == PROMPT
    befores = [at.router.blocks[name][0] for name in names]
    assert befores == [0, *names[:-1]]

    at.ask(admin.Flush(1))
    (removed,) = said(at, effects.BlocksRemoved)
    assert each_name(removed.names) == names
    assert not at.router.blocks


def test_what_goes_on_is_stored_behind_the_last_block_and_what_is_there_not_again():
    at = side()
    cached(at, PROMPT)
    cached(at, PROMPT)
    longer = tokens((1, 8 * PAGE))
    cached(at, longer)
    first, more = said(at, effects.BlocksStored)
    assert more.before == each_name(first.names)[-1]
    assert more.tokens == longer[len(PROMPT) :]


def test_a_page_is_told_when_it_is_whole_and_committed_and_not_before():
    at = side()
    half = tokens((1, 2 * PAGE + 3))
    lease = at.lease(half, reserve_tokens=4 * PAGE)
    at.write(lease.pages, half)
    assert not said(at, effects.BlocksStored)
    at.call(client.CommitLease, lease=lease.lease)
    (stored,) = said(at, effects.BlocksStored)
    assert stored.tokens == half[: 2 * PAGE * ID_BYTES]


def test_a_name_has_an_upper_half_and_says_namespace_and_all_tokens():
    at = side()
    for namespace in ("", "m", "m#salt=1"):
        cached(at, PROMPT, namespace)
    cached(at, tokens((2, PAGE), (17, 5 * PAGE)))
    assert len(at.router.blocks) == 24
    assert all(name >> 32 for name in at.router.blocks)


def test_small_names_get_an_upper_half(monkeypatch):
    monkeypatch.setattr("kvd.core.kv_events.block_names.xxh3_64_intdigest", lambda *_: 7)
    assert each_name(names_along(1, b"\0" * 8, 4)) == [(1 << 63) + 7] * 2


def test_adapter_and_salt_stand_behind_the_base_as_connectors_put_them():
    digest = "0123456789abcdef01234567"
    found = told_namespace(f"p/llama@r:bf16:d#lora=pirate-{digest};salt=beef")
    assert (found.lora_name, found.salt) == ("pirate", "beef")
    assert told_namespace("llama#lora=a-b").lora_name == "a-b"
    assert told_namespace("llama") == told_namespace("llama")
    assert (told_namespace("llama").lora_name, told_namespace("llama").salt) == ("", "")
    assert told_namespace("llama").root == root_name("llama")


def test_only_namespaces_of_the_model_are_told():
    at = side(bases=("llama",))
    for namespace in ("llama@1#salt=2", "qwen", ""):
        at.node.leases.tree.extend(at.node.leases.tree.match(PROMPT, namespace), PROMPT, PAGES)
    (stored,) = at.node.out.drain().effects
    assert stored.salt == "2"


def test_what_has_keys_or_extra_keys_is_not_told_nor_what_is_behind_it():
    at = side()
    keyed = of_keys([bytes([k]) * 32 for k in range(4)], PAGE)
    cached(at, keyed)
    assert not at.router.blocks
    extra = with_extra(PROMPT, {2: b"an image"}, PAGE)
    cached(at, extra)
    (stored,) = said(at, effects.BlocksStored)
    assert stored.tokens == PROMPT[: 2 * PAGE * ID_BYTES]
    cached(at, Tokens(extra + tokens((500, PAGE))))
    assert len(at.router.blocks) == 2


def test_what_the_audit_hides_from_prompts_is_removed_and_not_told_again():
    at = side()
    cached(at, PROMPT)
    tree = at.node.leases.tree
    hide(tree, next(tree.nodes()))
    (removed,) = at.node.out.drain().effects
    assert len(each_name(removed.names)) == 6
    at.router.hear(removed)
    at.feed(inputs.BlocksMissed(at.world.now_s))
    tick(at)
    assert not at.router.blocks


def test_an_epoch_ends_all_of_its_namespace_what_is_locked_too_and_a_flush_does_not():
    at = side()
    cached(at, PROMPT, "m")
    lease = at.lease(PROMPT, namespace="m")
    at.call(client.FlushNamespace, namespace="m")
    assert len(at.router.blocks) == 6
    at.call(client.BeginEpoch, namespace="m", epoch=None)
    assert not at.router.blocks
    # What a lease of before commits is found by nobody.
    more = tokens((97, PAGE))
    at.call(client.ExtendLease, lease=lease.lease, n_tokens=PAGE)
    at.call(client.CommitLease, more, lease=lease.lease)
    assert not at.router.blocks
    cached(at, PROMPT, "m")
    assert len(at.router.blocks) == 6


def test_all_is_told_once_more_when_somebody_has_missed_some():
    at = side()
    cached(at, PROMPT)
    cached(at, tokens((1, 3 * PAGE), (700, 2 * PAGE)))
    before = dict(at.router.blocks)
    at.feed(inputs.BlocksMissed(at.world.now_s))
    assert not at.router.blocks
    tick(at)
    assert at.router.blocks == before
    assert at.node.announcer.snapshots == 1


def test_no_more_is_told_from_tick_to_tick_than_the_loop_has_time_for():
    at = side(most_tokens=2 * PAGE)
    cached(at, PROMPT)
    assert len(at.router.blocks) == 2
    tick(at)
    assert len(at.router.blocks) == 4
    cached(at, tokens((1, 6 * PAGE), (900, 2 * PAGE)))
    tick(at)
    tick(at)
    assert len(at.router.blocks) == 8
    tick(at)
    assert not at.node.announcer.is_pending


def test_a_node_that_was_written_down_while_it_told_everything_goes_on_with_that():
    at = side(most_tokens=2 * PAGE)
    cached(at, PROMPT)
    tick(at)
    at.node = thaw(freeze(at.node))
    while at.node.announcer.is_pending:
        tick(at)
    assert len(at.router.blocks) == 6
    at.ask(admin.Flush(1))
    assert not at.router.blocks


def test_a_node_that_tells_nobody_says_nothing_more():
    quiet = World(p_pages=64).p
    cached(quiet, PROMPT)
    quiet.feed(inputs.BlocksMissed(quiet.world.now_s))
    assert quiet.node.announcer is None
    assert quiet.node.leases.tree.watch is None
    assert NO_TOKENS == b""
