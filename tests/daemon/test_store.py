"""Two daemons and one store: what one has computed the other finds, and a bad store costs hits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvd.client import connect_sync as connect
from kvd.harness.store import ABSENT, SECRET, SeaweedStore, weed
from tests.daemon.kv import PAGE, PAGE_BYTES, SHAPE, digest, tokens_of, write
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(weed() is None, reason=ABSENT)

PROMPT_PAGES = 16
PROMPT_TOKENS = PROMPT_PAGES * PAGE
FILLERS = 16
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory) -> Iterator[SeaweedStore]:
    """Two volume servers, and each object on both."""
    found = SeaweedStore(tmp_path_factory.mktemp("store"), volumes=2, copies=1)
    found.start()
    yield found
    found.stop()


class StoreNode:
    """A daemon with the store below its pool."""

    def __init__(self, name: str, tmp_path, store: SeaweedStore, **sets: str) -> None:
        of_tier = {
            "tiers.store.max_moving": "2MiB",
            "tiers.store.demote": "always",
            "tiers.store.min_tokens": str(PAGE),
            "tiers.store.prefix": tmp_path.name,
            "tiers.store.answer_s": "2",
            "tiers.store.wait_s": "20",
            "tiers.store.probe_s": "10",
            "tiers.store.absent_s": "0.5",
        }
        self.daemon = Daemon(name, tmp_path, SHAPE | store.settings() | of_tier | sets)

    def start(self) -> None:
        self.daemon.start()
        self.daemon.wait_ready()
        self.daemon.wait_for(lambda: self.tier.state == "serving", "no store", 30.0)

    @property
    def tier(self):
        return self.daemon.snapshot().tiers[-1]

    def compute(self, tokens) -> str:
        """Have a prompt cached, as an engine has; what its pages hold."""
        with connect(self.daemon.client, name="engine") as node:
            lease = node.lease(tokens)
            write(node, lease, tokens)
            there = digest(node, lease.pages)
            lease.release(())
        return there

    def push_out(self) -> None:
        """What was cached before is written, and leaves the pool."""
        for seed in range(1000, 1000 + FILLERS):
            self.compute(tokens_of(PROMPT_TOKENS, seed))
            self.settle()

    def settle(self) -> None:
        """Return when nothing is being written, to the disk above it either."""

        def is_settled() -> bool:
            return not any(tier.writing for tier in self.daemon.snapshot().tiers)

        self.daemon.wait_for(is_settled, "it writes for ever", LIMIT_S)

    def found(self, tokens) -> tuple[int, str]:
        """How many tokens are found, and what the pages hold once the rest is computed."""
        with connect(self.daemon.client, name="reader") as node:
            lease = node.lease(tokens)
            prefix = lease.prefix_len
            write(node, lease, tokens)
            there = digest(node, lease.pages)
            lease.release()
        return prefix, there


@pytest.fixture
def make(tmp_path, seaweed) -> Iterator:
    made: list[StoreNode] = []

    def one(name: str, **sets: str) -> StoreNode:
        made.append(StoreNode(name, tmp_path, seaweed, **sets))
        made[-1].start()
        return made[-1]

    yield one
    for node in made:
        node.daemon.stop()


def test_what_one_node_computed_another_finds_and_its_bytes_are_equal(make, seaweed):
    a, b = make("a"), make("b")
    prompt = tokens_of(PROMPT_TOKENS, seed=1)
    there = a.compute(prompt)
    a.push_out()

    assert b.found(prompt) == (PROMPT_TOKENS, there)
    tier = b.tier
    assert (tier.probes, tier.probe_hits, tier.hits, tier.bad) == (1, 1, 1, 0)
    assert tier.read_bytes == PROMPT_PAGES * PAGE_BYTES
    assert b.found(tokens_of(PROMPT_TOKENS, seed=2))[0] == 0
    for node in (a, b):
        shown = (node.daemon.metrics(), repr(node.daemon.snapshot()), node.daemon.quoted_log())
        assert not [text for text in shown if SECRET in text]


def test_a_store_that_dies_and_comes_back_costs_hits_and_is_told(make, seaweed):
    node = make("solo", **{"tiers.store.wait_s": "3", "tiers.store.probe_s": "1"})
    prompt = tokens_of(PROMPT_TOKENS, seed=3)
    there = node.compute(prompt)
    node.push_out()
    seaweed.kill("s3")
    try:
        for seed in range(4):
            began_s = time.monotonic()
            assert node.found(tokens_of(PROMPT_TOKENS, seed=400 + seed))[0] == 0
            assert time.monotonic() - began_s < 10
        node.daemon.wait_for(lambda: node.tier.state == "away", "is not away", LIMIT_S)
        assert seaweed.endpoint in node.tier.why
        assert 'kvd_tier_up{tier="store"} 0.0' in node.daemon.metrics()
        assert "tier-away" in node.daemon.quoted_log()
        began_s = time.monotonic()
        assert node.found(prompt)[1] == there
        assert time.monotonic() - began_s < 10
    finally:
        seaweed.start_process("s3")
    until_s = time.monotonic() + 3 * LIMIT_S
    seed, written = 500, node.tier.written
    while node.tier.written == written:
        assert time.monotonic() < until_s, node.tier
        seed += 1
        node.compute(tokens_of(PROMPT_TOKENS, seed))
        time.sleep(0.5)
    node.push_out()
    # One order that fails while the store gets going sends the tier away again for a while.
    until_s = time.monotonic() + LIMIT_S
    while (found := node.found(prompt)) != (PROMPT_TOKENS, there):
        assert found[1] == there
        assert time.monotonic() < until_s, node.tier
        time.sleep(0.5)


def test_what_the_disk_has_not_comes_from_the_store(make, seaweed, tmp_path):
    a = make("a")
    both = make(
        "both",
        **{
            "tiers.disk.directory": str(tmp_path / "disk"),
            "tiers.disk.size": "64MiB",
            "tiers.disk.max_moving": "512KiB",
            "tiers.disk.wait_s": "20",
        },
    )
    prompt = tokens_of(PROMPT_TOKENS, seed=7)
    half = prompt[: PROMPT_TOKENS // 2]
    both.compute(half)
    both.push_out()
    there = a.compute(prompt)
    a.push_out()

    assert both.found(prompt) == (PROMPT_TOKENS, there)

    disk, store = both.daemon.snapshot().tiers
    assert (disk.tier, store.tier) == ("disk", "store")
    assert disk.read == PROMPT_PAGES // 2
    assert store.read == PROMPT_PAGES // 2


def test_what_is_pinned_outlives_what_is_not_and_the_daemon(make, seaweed, tmp_path):
    """The store itself removes what is a minute old: nothing below that is offered."""
    below = f"{tmp_path.name}/"
    seaweed.shell(f"fs.configure -locationPrefix=/buckets/kvd/{below} -ttl=1m -apply")
    # A stop writes what is cached, as young as can be.
    sets = {
        "tiers.store.ttl_s": "60",
        "tiers.store.demote": "second-use",
        "tiers.store.stop_s": "0",
    }
    node = make("pins", **sets)
    daemon = node.daemon
    kept, other = tokens_of(PROMPT_TOKENS, seed=21), tokens_of(PROMPT_TOKENS, seed=22)

    def names() -> set[str]:
        return {name for name in seaweed.names() if name.startswith(below)}

    def keeps(number: int) -> bool:
        pins = {pin.pin: pin for pin in daemon.snapshot().pins}
        return pins[number].tier == "store"

    there = node.compute(kept)
    node.compute(other)
    with connect(daemon.client, name="pins") as engine:
        mine = engine.pin(kept, ttl_s=600, owner="kept")
        daemon.wait_for(lambda: keeps(mine.pin), "is not written", LIMIT_S)
        of_kept = names()
        unpinned = engine.pin(other, ttl_s=600, owner="not for long")
        daemon.wait_for(lambda: keeps(unpinned.pin), "is not written", LIMIT_S)
        engine.unpin(unpinned)
        of_other = names() - of_kept
        assert (len(of_kept), len(of_other)) == (PROMPT_PAGES, PROMPT_PAGES)
        daemon.wait_for(lambda: not names() & of_other, "the store removes nothing", 3 * LIMIT_S)
        assert of_kept <= names()
        # The next daemon finds it as long as it lies there: not at the end of its time.
        daemon.wait_for(
            lambda: daemon.snapshot().pins[0].kept[0].left_s > 40, "is not written again", LIMIT_S
        )
    daemon.stop()
    node.start()

    assert daemon.snapshot().pins == ()
    assert node.found(other)[0] == 0
    assert node.found(kept) == (PROMPT_TOKENS, there)


def test_a_bucket_that_is_full_by_its_quota_is_read_and_not_written(make, seaweed):
    a = make("a")
    prompt = tokens_of(PROMPT_TOKENS, seed=31)
    there = a.compute(prompt)
    a.push_out()

    def is_enforced() -> bool:
        seaweed.shell("s3.bucket.quota.enforce -apply")
        return '"readOnly":  true' in seaweed.shell("fs.configure")

    seaweed.shell("s3.bucket.quota -name=kvd -op=set -sizeMB=1")
    try:
        a.daemon.wait_for(
            is_enforced,
            "the quota is not enforced",
            LIMIT_S,
        )
        seed = 600
        while "nothing is written" not in a.tier.why:
            seed += 1
            assert seed < 660, a.tier
            a.compute(tokens_of(PROMPT_TOKENS, seed))
            a.settle()
        assert a.tier.state == "serving"
        assert 'kvd_tier_written{tier="store"} 0.0' in a.daemon.metrics()
        assert make("b").found(prompt) == (PROMPT_TOKENS, there)
    finally:
        said = seaweed.shell("s3.bucket.quota -name=kvd -op=remove")
    assert "cleared read-only" in said
    until_s, written = time.monotonic() + 3 * LIMIT_S, a.tier.written
    while a.tier.written == written or a.tier.why:
        assert time.monotonic() < until_s, a.tier
        seed += 1
        a.compute(tokens_of(PROMPT_TOKENS, seed))
        time.sleep(0.5)
