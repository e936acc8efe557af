"""What a store as a tier needs, and what it is refused with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.config.pools import findings

if TYPE_CHECKING:
    from pathlib import Path

HERE = "tiers.store.endpoint=http://127.0.0.1:8333"
WHOLE = (HERE, "tiers.store.bucket=kvd", "cache.epochs_directory=/var/lib/kvd")


def keys(*sets: str) -> list[str]:
    return [key for key, _, _ in findings(*sets)]


def test_a_store_needs_a_bucket_and_epochs_that_outlive_the_host():
    found = findings(HERE)

    assert [key for key, _, _ in found] == ["tiers.store.endpoint"] * 2
    assert "needs tiers.store.bucket" in found[0][1]
    assert "needs cache.epochs_directory: the store outlives a restart of this host" in found[1][1]
    assert findings(*WHOLE) == []


@pytest.mark.parametrize("key", ["bucket=kvd", "credentials_file=/etc/kvd/store"])
def test_without_an_endpoint_the_rest_says_nothing(key):
    ((name, rule, _),) = findings(f"tiers.store.{key}")

    assert name == f"tiers.store.{key.partition('=')[0]}"
    assert rule.startswith("says nothing without tiers.store.endpoint")


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:8333", "s3://kvd", "http://127.0.0.1:8333/", "http://user:key@host", "http://a b"],
)
def test_an_endpoint_is_a_host_and_a_port_and_no_more(endpoint):
    assert keys(f"tiers.store.endpoint={endpoint}", *WHOLE[1:]) == ["tiers.store.endpoint"]


def test_kv_leaves_the_host_in_the_clear_only_if_somebody_says_so():
    there = "tiers.store.endpoint=http://10.0.0.9:8333"

    ((_, rule, fix),) = findings(there, *WHOLE[1:])

    assert "in the clear" in rule
    assert "tiers.store.insecure = true" in fix
    assert findings(there, *WHOLE[1:], "tiers.store.insecure=true") == []
    assert findings("tiers.store.endpoint=https://10.0.0.9", *WHOLE[1:]) == []


def test_a_file_of_keys_that_others_can_read_is_refused(tmp_path: Path):
    path = tmp_path / "keys"
    assert keys(*WHOLE, f"tiers.store.credentials_file={path}") == ["tiers.store.credentials_file"]
    path.write_text("[default]\n")
    os.chmod(path, 0o640)

    ((_, rule, fix),) = findings(*WHOLE, f"tiers.store.credentials_file={path}")

    assert rule == f"{path} has mode 0640, and others can read it"
    assert fix == f"chmod 0600 {path}"
    os.chmod(path, 0o600)
    assert findings(*WHOLE, f"tiers.store.credentials_file={path}") == []


def test_one_page_must_be_able_to_move_and_the_pool_must_have_pages_in_host_memory():
    assert keys(*WHOLE, "tiers.store.max_moving=4KiB") == ["tiers.store.max_moving"]
    assert keys(*WHOLE, "cache.mode=off") == ["tiers.store.endpoint"]


def test_both_tiers_are_told_of_what_neither_can_do():
    disk = ("tiers.disk.directory=/var/lib/kvd/disk", "tiers.disk.size=8GiB")

    assert keys(*WHOLE, *disk) == []
    assert keys(*WHOLE, *disk, "cache.mode=off") == ["tiers.disk.directory", "tiers.store.endpoint"]
