"""The rule that bounds a store: what it is about, and that it removes nothing too early."""

from __future__ import annotations

import pytest

from kvd.config import Config, load
from kvd.config.render import lifecycle
from tests.config.pools import HOST

STORE = ("tiers.store.endpoint=http://127.0.0.1:8333", "tiers.store.bucket=kvd")


def rule(*sets: str) -> dict[str, object]:
    found = load(None, {}, (*STORE, "cache.epochs_directory=/var/lib/kvd", *sets), host=HOST)
    assert isinstance(found, Config), found
    (only,) = lifecycle(found)["Rules"]  # type: ignore[misc]
    return only


@pytest.mark.parametrize(("ttl_s", "days"), [(60, 1), (86400, 1), (86401, 2), (31536000, 365)])
def test_days_are_no_fewer_than_what_the_node_counts_on(ttl_s, days):
    assert rule(f"tiers.store.ttl_s={ttl_s}")["Expiration"] == {"Days": days}


@pytest.mark.parametrize(("sets", "prefix"), [((), ""), (("tiers.store.prefix=kv/a",), "kv/a/")])
def test_it_is_about_what_lies_below_the_prefix(sets, prefix):
    """And not about kv/ab beside it."""
    assert rule(*sets)["Filter"] == {"Prefix": prefix}
