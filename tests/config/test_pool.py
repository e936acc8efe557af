"""How much memory a pool has beside it for the KV of retracted leases."""

from __future__ import annotations

import pytest

from kvd.config import Config, load, pool_spec
from kvd.config.host import Host

HOST = Host(node_name="node-0", runtime="/run/kvd", config_file="/nonexistent/kvd.toml")


@pytest.mark.parametrize(
    ("sets", "saved_pages"),
    [
        (["pool.pages=64"], 8),
        (["pool.size=64GiB"], 2**30 // 32768),
        (["pool.pages=15"], 0),
        (["pool.pages=64", "pool.saved_size=320KiB"], 10),
        (["pool.pages=64", "pool.saved_size=1GiB"], 32768),
        (["pool.saved_size=0KiB"], 0),
        (["pool.saved_size=63KiB"], 0),
    ],
)
def test_saved_pages_are_an_eighth_up_to_a_gib_or_what_is_asked_for(sets, saved_pages) -> None:
    """A page has 32 KiB here; one page alone would be the null page, and of no use."""
    config = load(None, {}, sets, host=HOST)

    assert isinstance(config, Config)
    assert pool_spec(config).saved_pages == (saved_pages,)


def test_a_saved_size_that_is_none_is_refused() -> None:
    (error,) = load(None, {}, ["pool.saved_size=half"], host=HOST)

    assert error.key == "pool.saved_size"
