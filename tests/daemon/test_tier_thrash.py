"""A small disk below a real daemon: full of what nobody asks for, then of what somebody does."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from kvd.cli import kvd as command
from kvd.client import connect_sync as connect
from kvd.core.inspect.quota_states import OTHERS
from kvd.wire import admin
from kvd.wire.cache_events import CacheThrashing
from tests.daemon.conftest import findings
from tests.daemon.kv import PAGE, PAGE_BYTES, tokens_of
from tests.daemon.test_quotas import PROMPT_PAGES, Shared, size
from tests.daemon.test_tiers import OBJECT_BYTES, settings
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.wire.events import Event
    from kvd.wire.snapshot import TierState

CHAT = range(2)
POOL_PAGES = 64
DISK_PAGES = 48
LIMIT_S = 120.0


class Small(Shared):
    """A pool and a disk that fill soon."""

    def __init__(self, tmp_path) -> None:
        sets = {
            "pool.pages": str(POOL_PAGES),
            "tiers.disk.size": size(DISK_PAGES, OBJECT_BYTES),
            "tiers.disk.max_moving": size(6, PAGE_BYTES),
            # Never reached: so what is not batch's is counted apart.
            "quotas.disk.ceiling.batch": size(DISK_PAGES, OBJECT_BYTES),
        }
        self.daemon = Daemon("node", tmp_path, settings(tmp_path, **sets))

    def chat(self) -> None:
        """Chat asks for its prompts, and they are on the disk: a pin is written at once."""
        self.compute("chat", CHAT)
        with connect(self.daemon.client, name="pinner") as node:
            prompts = [tokens_of(PROMPT_PAGES * PAGE, seed) for seed in CHAT]
            pins = [node.pin(prompt, namespace="chat", ttl_s=LIMIT_S) for prompt in prompts]
            self.daemon.wait_for(
                lambda: [pin.tier for pin in self.daemon.snapshot().pins] == ["disk"] * len(CHAT),
                "has not written them",
                LIMIT_S,
            )
            for pin in pins:
                node.unpin(pin)

    def flood(self, seeds: Iterator[int], n_pages: int = 1) -> None:
        """Batch writes until so many pages have left the disk, and all of chat's."""
        upto = self.tier.dropped + n_pages

        def is_written() -> bool:
            self.compute("batch", [next(seeds)])
            return self.tier.dropped >= upto and not self.quotas()[OTHERS, "disk"]

        self.daemon.wait_for(is_written, "does not write so much", LIMIT_S)

    def all_events(self) -> Iterator[Event]:
        """From the first one on that is kept."""
        after_seq = 0
        while (page := self.daemon.ask(admin.ListEvents(1, after_seq), admin.EventPage)).events:
            yield from page.events
            after_seq = page.events[-1].seq

    @property
    def tier(self) -> TierState:
        """As it is now."""
        return self.daemon.snapshot().tiers[0]


@pytest.fixture
def shared(tmp_path):
    site = Small(tmp_path)
    site.start()
    yield site
    assert not findings(site.daemon)
    site.daemon.stop()


def said(daemon, *words: str) -> str:
    found = CliRunner().invoke(command, [*words, "--connect", daemon.admin])
    assert found.exit_code == 0, found.output
    return " ".join(found.stdout.split())


def test_a_disk_thrashes_where_what_was_pushed_out_is_asked_for_again_and_only_then(shared):
    daemon, seeds = shared.daemon, count(100)
    shared.flood(seeds, 3 * DISK_PAGES)
    assert (shared.tier.missed, daemon.snapshot().evictions.thrashing) == (0, ())
    assert 'kvd_tier_thrashing{tier="disk"} 0.0' in daemon.metrics()
    assert "thrashes" not in said(daemon, "tiers")

    for _ in range(3):
        shared.chat()
        shared.flood(seeds)
    shared.chat()

    (pair,) = [one for one in daemon.snapshot().evictions.thrashing if one.place == "disk"]
    assert (pair.needed_by, pair.hurt) == ("batch", "chat")
    assert pair.tokens > 0
    assert pair.last.missed_by.startswith("engine-chat")
    told = [one for one in shared.all_events() if isinstance(one, CacheThrashing)]
    (event,) = [one for one in told if one.tier]
    assert (event.tier, event.namespace, event.need) == ("disk", "chat", "writes of batch")
    assert 'kvd_tier_thrashing{tier="disk"} 1.0' in daemon.metrics()
    for verb in ("tiers", "status", "why evicted"):
        assert "writes of batch push out what chat asks for again" in said(daemon, *verb.split())
    assert "which had been removed from tier disk" in said(daemon, "why", "evicted")
