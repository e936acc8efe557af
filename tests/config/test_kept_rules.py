"""Which pools may outlive their daemon, and what is said of the others."""

from __future__ import annotations

import pytest

from tests.config.pools import POOLS, PREFILL_ONLY, config_of, findings

KEPT = ["shm", "fdstore", "hugetlbfs"]
ANON = 'or set pool.backing = "anon"'


@pytest.mark.parametrize("backing", KEPT)
@pytest.mark.parametrize("family", ["mha", "mla", "raw"])
def test_a_pool_with_one_whole_component_may_outlive_its_daemon(backing: str, family: str) -> None:
    config = config_of(f"pool.backing={backing}", *POOLS[family])

    assert (config.pool.backing, config.pool.directory, config.pool.verify) == (
        backing,
        None,
        "sampled",
    )


@pytest.mark.parametrize("backing", KEPT)
@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("swa", "the window of a sequence has pages of its own, and slides"),
        ("hisparse", "the buffer on the device is filled for one daemon's requests"),
        ("recurrent", "a state has no tokens of its own by which it could be found again"),
    ],
)
def test_other_families_are_refused_with_the_reason(backing: str, family: str, why: str) -> None:
    assert findings(f"pool.backing={backing}", *POOLS[family]) == [
        (
            "pool.family",
            f"is refused with pool.backing = {backing}: {why}; only pools with one whole component "
            "can be adopted",
            f"write mha or mla or raw, {ANON}",
        )
    ]


@pytest.mark.parametrize(
    "text", ["pool.index_dim=128", "pool.scale_dtype=float32", "pool.components.scale=64"]
)
def test_a_component_beside_kv_is_refused(text: str) -> None:
    key = text.partition("=")[0]
    family = "raw" if "components" in key else "mha"
    assert findings("pool.backing=shm", *POOLS[family], text) == [
        (
            key,
            "is refused with pool.backing = shm: it makes a component beside kv, of which no "
            "checksums are kept; only pools with one whole component can be adopted",
            f"remove it, {ANON}",
        )
    ]


@pytest.mark.parametrize(
    ("sets", "rule"),
    [
        (
            ["cache.mode=off"],
            "is refused with cache.mode = off: nothing is cached, so there is nothing to adopt",
        ),
        (
            PREFILL_ONLY,
            "is refused with cache.mode = prefill-only: there is no KV, so there is nothing to "
            "adopt",
        ),
    ],
)
def test_what_caches_nothing_has_nothing_to_keep(sets: list[str], rule: str) -> None:
    assert findings("pool.backing=shm", *sets) == [
        ("pool.backing", rule, 'set "anon", or set cache.mode = "radix"')
    ]


@pytest.mark.parametrize("backing", ["anon", "fdstore"])
def test_a_directory_says_nothing_where_there_are_no_files(backing: str) -> None:
    assert findings(f"pool.backing={backing}", "pool.directory=/dev/shm/kvd") == [
        (
            "pool.directory",
            f"says nothing with pool.backing = {backing}, which has no files",
            'remove it, or set pool.backing = "shm"',
        )
    ]


@pytest.mark.parametrize("text", ["shm", "/", "/dev/shm/", "/dev//shm", "/dev/shm/../etc", "/a\0b"])
def test_a_directory_is_an_absolute_path_that_leads_one_way(text: str) -> None:
    assert findings("pool.backing=shm", f"pool.directory={text}") == [
        ("pool.directory", "must be an absolute path", "write for example /dev/shm/kvd")
    ]


@pytest.mark.parametrize("family", ["swa", "hisparse", "recurrent"])
def test_every_family_may_end_with_its_daemon(family: str) -> None:
    assert findings("pool.backing=anon", *POOLS[family]) == []
