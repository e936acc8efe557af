from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvd.config import Config, load
from kvd.config.keys import KEYS, KeyKind
from kvd.config.pool import BELONGS
from kvd.config.render import EXAMPLE_HOST, effective, example, explanations, toml_value
from kvd.curve import is_key
from tests.config.pools import POOLS

HOST = msgspec.structs.replace(EXAMPLE_HOST, config_file="/nonexistent/kvd.toml")
SHIPPED = Path(__file__).parents[2] / "systemd" / "kvd.toml"


def loaded(file: Path | None, *sets: str) -> Config:
    config = load(file, {}, sets, host=HOST)
    assert isinstance(config, Config), [error.sentence for error in config]
    return config


def without_origins(config: Config) -> Config:
    return msgspec.structs.replace(config, origins={})


def test_the_shipped_file_is_the_example() -> None:
    """To renew it: ``kvd config show --example > systemd/kvd.toml``."""
    assert SHIPPED.read_text() == example()


def test_the_shipped_file_gives_the_defaults_as_it_is_and_with_every_line_enabled(
    tmp_path: Path,
) -> None:
    defaults = loaded(None)
    enabled = tmp_path / "kvd.toml"
    enabled.write_text(re.sub(r"^#(?! |$)", "", SHIPPED.read_text(), flags=re.MULTILINE))

    assert loaded(SHIPPED) == defaults
    assert without_origins(loaded(enabled)) == without_origins(defaults)
    unset = {key.path for key in KEYS.values() if key.default is None} - {
        "node.name",
        "sockets.client",
        "sockets.admin",
        "pool.pages",  # left out because of the line that gives pool.size
    }
    tables = {key.path for key in KEYS.values() if key.kind is KeyKind.TABLE}
    origins = loaded(enabled).origins
    assert {key for key in origins if origins[key].place == "default"} == unset | tables


_CUT = ("pool.layers=32", "pool.heads=8", "pool.tp_size=8")
_DISK = ("tiers.disk.directory=/var/lib/kvd/tiers/disk", "tiers.disk.size=1TiB")
_STORE = (
    *("tiers.store.endpoint=http://127.0.0.1:8333", "tiers.store.bucket=kvd"),
    "cache.epochs_directory=/var/lib/kvd",
)
BESIDE = {
    "pool.directory": ("pool.backing=shm",),
    "pool.tp_ranks": _CUT,
    "pool.stage": _CUT,
    "quotas.pool.floor": ("pool.pages=1000000",),
    "quotas.disk.floor": _DISK,
    "quotas.disk.ceiling": _DISK,
    "quotas.store.ceiling": _STORE,
    "tiers.disk.directory": ("tiers.disk.size=8GiB",),
    "tiers.disk.size": ("tiers.disk.directory=/var/lib/kvd/tiers/disk",),
    "tiers.store.endpoint": ("tiers.store.bucket=kvd", "cache.epochs_directory=/var/lib/kvd"),
    "tiers.store.bucket": (
        "tiers.store.endpoint=http://127.0.0.1:8333",
        "cache.epochs_directory=/var/lib/kvd",
    ),
}
"""What an example needs beside it, by key."""


def test_every_example_of_the_schema_is_a_valid_value() -> None:
    """In a pool of the family that its key belongs to."""
    for key in KEYS.values():
        if key.path in {
            *("sockets.group", "peers.secret_key_file", "peers.keys"),
            *("tiers.store.credentials_file", "tiers.store.ca_file"),
        }:
            continue  # the group, the files and the key exist only where kvd was installed
        match key.example:
            case None:
                continue
            case dict() as table:
                sets = [f"{key.path}.{name}={value}" for name, value in table.items()]
            case list() as items:
                sets = [f"{key.path}={','.join(items)}"]
            case value:
                sets = [f"{key.path}={value}"]
        base: list[str] = []
        if key.section == "pool" and key.name in BELONGS:
            families, _ = BELONGS[key.name]
            base = ["pool.size=8GiB", *POOLS[next(one for one in POOLS if one in families)]]
        if key.path.startswith("pool.index"):
            base = [*base, "pool.index_dim=128"]
        base = [*base, *BESIDE.get(key.path, ())]
        loaded(None, *base, *sets)


def test_the_rule_of_a_key_names_a_bound_that_is_itself_no_value() -> None:
    assert KEYS["console.budget"].rule == "a number above 0, at most 0.5"


def test_every_key_is_documented() -> None:
    assert all(key.doc.endswith(".") for key in KEYS.values())


def test_the_example_of_a_public_key_is_one() -> None:
    match KEYS["peers.keys"].example:
        case dict() as table:
            assert [is_key(key) for key in table.values()] == [True]
        case other:
            raise AssertionError(other)


def test_effective_gives_the_same_configuration_again(tmp_path: Path) -> None:
    config = loaded(
        None,
        "peers.connect.a.b=tcp://10.0.0.1:1",
        "peers.insecure=true",
        "peers.allow=a.b,c",
        'transfer.ucx.UCX_TLS=t"c\\p é',
        "pool.pages=5",
        "pool.v_dim=3",
    )
    again = tmp_path / "kvd.toml"
    again.write_text(effective(config))

    assert without_origins(loaded(again)) == without_origins(config)


def test_toml_value_escapes_what_a_basic_string_may_not_hold() -> None:
    assert toml_value('a"\\\n\x7fé') == '"a\\"\\\\\\n\\u007fé"'
    assert toml_value(()) == "[]"
    assert toml_value({"a": "b", "c.d": "e"}) == '{ a = "b", "c.d" = "e" }'


def test_explanations_give_each_key_its_value_and_origin() -> None:
    rows = {row.key: row for row in explanations(loaded(None, "transfer.ucx.UCX_TLS=tcp"))}

    assert list(rows)[:3] == ["node.name", "sockets.client", "sockets.admin"]
    assert len(rows) == len(KEYS) + 1
    assert (rows["pool.v_dim"].value, rows["pool.v_dim"].shown) == (None, "(left out)")
    assert rows["transfer.ucx.UCX_TLS"].shown == '"tcp"'
    assert rows["transfer.ucx.UCX_TLS"].origin == "--set transfer.ucx.UCX_TLS=tcp"
    assert rows["radix.policy"].rule == "lru, lfu, slru, fifo, priority"
