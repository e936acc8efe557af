"""Quotas of namespaces: what cannot hold is refused with the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.config import Config, load
from kvd.config.pool import pool_spec
from kvd.config.render import effective
from kvd.core.layout.quota import Quota
from kvd.daemon.settings_from_config import disk_quotas, pool_quotas
from tests.config.pools import HOST, POOLS, findings

if TYPE_CHECKING:
    from pathlib import Path

TIER = ("tiers.disk.directory=/var/lib/kvd/tiers/disk", "tiers.disk.size=1GiB")
STORE = (
    *("tiers.store.endpoint=http://127.0.0.1:8333", "tiers.store.bucket=kvd"),
    "cache.epochs_directory=/var/lib/kvd",
)
POOL = ("pool.size=64MiB", *POOLS["mha"])


def breaches(*sets: str) -> list[tuple[str, str]]:
    return [(key, rule) for key, rule, _ in findings(*POOL, *sets)]


@pytest.mark.parametrize(
    "sets",
    [
        ("quotas.pool.floor.llama=20MiB", "quotas.pool.ceiling.llama=20MiB"),
        ("quotas.pool.ceiling.batch=0KiB",),
        ("quotas.pool.floor.a/b.c#salt=20MiB",),
        ("quotas.pool.floor.=20MiB",),
        (*TIER, "quotas.disk.floor.llama=700MiB", "quotas.disk.ceiling.x=100GiB"),
        (*STORE, "quotas.store.ceiling.batch=1GiB", "quotas.store.ceiling.x=0KiB"),
    ],
)
def test_what_can_hold_is_taken(sets: tuple[str, ...]) -> None:
    assert breaches(*sets) == []


@pytest.mark.parametrize(
    ("sets", "key", "rule"),
    [
        (
            ("quotas.pool.floor.a=20MiB", "quotas.pool.ceiling.a=10MiB"),
            "quotas.pool.floor.a",
            "must be at most quotas.pool.ceiling of the same namespace, which is 10MiB",
        ),
        (
            ("quotas.pool.floor.a=40MiB", "quotas.pool.floor.b=30MiB"),
            "quotas.pool.floor.b",
            "and the other floors are ",
        ),
        (("quotas.pool.floor.a=1KiB",), "quotas.pool.floor.a", "must be at least one page of this"),
        (("quotas.pool.floor.a=much",), "quotas.pool.floor.a", "must be NAMESPACE = a whole numb"),
        (("quotas.pool.floor.a\x1f1=9MiB",), "quotas.pool.floor.a\x1f1", "must be NAMESPACE ="),
        (
            (*STORE, "quotas.store.floor.a=1GiB"),
            "quotas.store.floor.a",
            "is no key of kvd: it removes nothing from a store, so what is there needs no floor",
        ),
        (("quotas.store.ceiling.a=1GiB",), "quotas.store.ceiling.a", "says nothing without tiers."),
        (("quotas.disk.floor.a=1GiB",), "quotas.disk.floor.a", "says nothing without tiers.disk."),
        (
            (*TIER, "quotas.disk.floor.a=700MiB", "quotas.disk.floor.b=100MiB"),
            "quotas.disk.floor.b",
            "and the other floors are 819200KiB together, tiers.disk.size is 1GiB and 256MiB of it",
        ),
        (
            ("quotas.pool.ceiling.a=1GiB", "cache.mode=off"),
            "quotas.pool.ceiling.a",
            "is refused with cache.mode = off: nothing is cached",
        ),
        (
            tuple(f"quotas.pool.ceiling.n{k}=1GiB" for k in range(65)),
            "quotas.pool.ceiling.n64",
            "is the quota of namespace 65 of 65: at most 64 may have one",
        ),
    ],
)
def test_what_cannot_hold_is_refused_at_its_key(sets: tuple[str, ...], key: str, rule: str) -> None:
    ((found, why),) = breaches(*sets)

    assert found == key
    assert why.startswith(rule)


def test_a_variable_names_a_namespace_too() -> None:
    found = load(None, {"KVD_QUOTAS__POOL__FLOOR__llama": "20MiB"}, POOL, host=HOST)

    assert isinstance(found, Config)
    assert found.quotas_pool.floor == {"llama": "20MiB"}


def test_sizes_are_whole_pages_of_the_pool_and_whole_objects_of_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text(
        '[quotas.pool.floor]\nllama = "20MiB"\n[quotas.pool.ceiling]\n"a b" = "100KiB"\n'
        '[quotas.disk.floor]\nllama = "20MiB"\n'
    )
    config = load(file, {}, (*POOL, *TIER), host=HOST)
    assert isinstance(config, Config)
    spec = pool_spec(config)
    page_bytes = 64 * 2**20 // spec.pages[0]

    assert pool_quotas(config, spec) == (
        Quota("llama", 20 * 2**20 // page_bytes),
        Quota("a b", 0, 100 * 2**10 // page_bytes),
    )
    assert disk_quotas(config, spec) == (Quota("llama", 20 * 2**20 // (page_bytes + 4096)),)
    file.write_text(effective(config))
    again = load(file, {}, (), host=HOST)
    assert isinstance(again, Config)
    assert (again.quotas_pool, again.quotas_disk) == (config.quotas_pool, config.quotas_disk)
