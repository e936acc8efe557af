"""Two namespaces at a real daemon: one floods, the other keeps its floor, over a restart too."""

from __future__ import annotations

import pytest

from kvd.client import connect_sync as connect
from kvd.wire import admin
from kvd.wire.cache_events import FloorBroken
from tests.daemon.conftest import findings
from tests.daemon.kv import PAGE, PAGE_BYTES, tokens_of
from tests.daemon.test_tiers import OBJECT_BYTES, settings
from tests.support.daemons import Daemon

POOL_PAGES = 128
"""As ``SHAPE`` has it, the null page among them."""
PROMPT_PAGES = 8
POOL_FLOOR = 2 * PROMPT_PAGES
DISK_FLOOR = 3 * PROMPT_PAGES
LIMIT_S = 30.0


def size(n_pages: int, page_bytes: int) -> str:
    return f"{-(-n_pages * page_bytes // 1024)}KiB"


class Shared:
    """A daemon whose pool and disk two namespaces share."""

    def __init__(self, tmp_path, **sets: str) -> None:
        disk_bytes = 4 * DISK_FLOOR * OBJECT_BYTES
        self.daemon = Daemon(
            "node",
            tmp_path,
            settings(
                tmp_path,
                **{
                    "pool.pages": str(POOL_PAGES),
                    "tiers.disk.size": f"{disk_bytes // 1024}KiB",
                    "tiers.disk.max_moving": size(8, PAGE_BYTES),
                },
                **sets,
            ),
        )

    def start(self) -> None:
        self.daemon.start()
        self.daemon.wait_ready()

    def compute(self, namespace: str, seeds: range) -> None:
        """Have these prompts cached; what is in their pages does not matter here."""
        with connect(self.daemon.client, name=f"engine-{namespace}") as node:
            for seed in seeds:
                tokens = tokens_of(PROMPT_PAGES * PAGE, seed)
                lease = node.lease(tokens, namespace=namespace)
                lease.release(())

    def flood(self, seeds: range) -> None:
        """Until the disk is full, and more: what is evicted before it is written is lost to it."""

        def is_full() -> bool:
            self.compute("batch", seeds)
            return self.daemon.snapshot().tiers[0].dropped > DISK_FLOOR

        self.daemon.wait_for(is_full, "is not full", LIMIT_S)

    def cached(self, namespace: str, seeds: range) -> int:
        """Pages of these prompts in the pool."""
        with connect(self.daemon.client, name="router") as node:
            found = [
                node.match(tokens_of(PROMPT_PAGES * PAGE, seed), namespace=namespace).tokens
                for seed in seeds
            ]
        return sum(found) // PAGE

    def quotas(self) -> dict[tuple[str, str], int]:
        rows = self.daemon.snapshot().quotas
        return {(row.namespace, row.place): row.pages for row in rows}

    def events(self, kind: type) -> list:
        page = self.daemon.ask(admin.ListEvents(1, 0), admin.EventPage)
        return [event for event in page.events if isinstance(event, kind)]


CHAT = range(7)
FLOOD = range(100, 140)


@pytest.fixture
def shared(tmp_path):
    site = Shared(
        tmp_path,
        **{
            "quotas.pool.floor.chat": size(POOL_FLOOR, PAGE_BYTES),
            "quotas.disk.floor.chat": size(DISK_FLOOR, OBJECT_BYTES),
        },
    )
    site.start()
    yield site
    assert not findings(site.daemon)
    site.daemon.stop()


def test_who_floods_leaves_the_others_floor_in_the_pool_and_on_the_disk(shared):
    daemon = shared.daemon
    shared.compute("chat", CHAT)
    shared.compute("batch", FLOOD[:8])
    # What is of the floor of the pool leaves it last, so only the rest is written.
    daemon.wait_for(
        lambda: shared.quotas()["chat", "disk"] >= DISK_FLOOR, "it is not on the disk", LIMIT_S
    )
    shared.flood(FLOOD)

    assert shared.quotas()["chat", "pool"] == POOL_FLOOR
    assert shared.cached("chat", CHAT[-2:]) == POOL_FLOOR
    assert shared.quotas()["chat", "disk"] == DISK_FLOOR
    assert not shared.events(FloorBroken)

    daemon.stop()
    shared.start()
    daemon.wait_for(
        lambda: shared.quotas().get(("chat", "disk")) == DISK_FLOOR, "it is not found", LIMIT_S
    )
    shared.flood(range(1000, 1000 + len(FLOOD)))

    assert shared.quotas()["chat", "disk"] == DISK_FLOOR
