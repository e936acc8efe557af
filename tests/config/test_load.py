from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.config import Config, ConfigError, ValueOrigin, ValueSource, load, pool_spec
from kvd.config.host import HostFacts, this_host
from kvd.core.layout.spec import Component, Device, Mha, PageOrder, PoolSpec
from kvd.families import POOLS as FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

HOST = HostFacts(node_name="node-0", runtime="/run/kvd", config_file="/nonexistent/kvd.toml")


def valid(
    file: Path | None = None, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> Config:
    loaded = load(file, environ or {}, sets, host=HOST)
    assert isinstance(loaded, Config), [error.sentence for error in loaded]
    return loaded


def errors(
    file: Path | None = None, environ: Mapping[str, str] | None = None, sets: Sequence[str] = ()
) -> list[ConfigError]:
    loaded = load(file, environ or {}, sets, host=HOST)
    assert isinstance(loaded, list)
    return loaded


def toml(directory: Path, text: str, name: str = "kvd.toml") -> Path:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_load_gives_a_small_cpu_pool_on_loopback_without_any_configuration() -> None:
    config = valid()

    assert pool_spec(config) == PoolSpec(
        name="main",
        family="mha",
        order=PageOrder.PAGE_FIRST,
        components=(
            Component("kv", 4, Mha(2, 64, 64, "bfloat16"), page_size=16, tier=Device("cpu")),
        ),
        pages=(2048,),
        saved_pages=(256,),
    )
    assert config.peers.listen == "tcp://127.0.0.1:7402"
    assert config.http.listen == "127.0.0.1:7480"
    assert config.sockets.client == "ipc:///run/kvd/client.sock"
    assert config.sockets.admin == "ipc:///run/kvd/admin.sock"
    assert config.node.name == "node-0"


def test_load_lets_the_stronger_source_win_and_names_it(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        "[pool]\nlayers = 1\nheads = 1\nhead_dim = 1\n\npage_size = 8\n[log]\nlevel = 'error'\n",
    )
    extra = toml(
        tmp_path, "pool.heads = 2\npool.head_dim = 2\npool.page_size = 32\n", "conf.d/a.toml"
    )
    last = toml(tmp_path, "[pool]\npage_size = 64\n", "conf.d/b.toml")
    environ = {"KVD_POOL__HEAD_DIM": "3", "KVD_POOL__DTYPE": "float32", "OTHER": "x"}

    config = valid(file, environ, ["pool.dtype=float64"])

    pool = config.pool
    assert (pool.layers, pool.heads, pool.head_dim, pool.page_size) == (1, 2, 3, 64)
    assert (pool.dtype, config.log.level) == ("float64", "error")
    origins = {
        key: value.place for key, value in config.origins.items() if value.place != "default"
    }
    assert origins == {
        "pool.layers": f"{file}:2",
        "pool.heads": f"{extra}:1",
        "pool.head_dim": "KVD_POOL__HEAD_DIM",
        "pool.page_size": f"{last}:2",
        "pool.dtype": "--set pool.dtype=float64",
        "log.level": f"{file}:8",
    }
    assert config.origins["pool.page_size"] == ValueOrigin(ValueSource.FILE, str(last), 2)


def test_load_merges_tables_entry_by_entry(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        '[peers.connect]\nprefill-0 = "tcp://127.0.0.1:1"\n"prefill.1" = "tcp://127.0.0.1:2"\n'
        '[transfer]\nucx = { UCX_TLS = "tcp" }\n',
    )
    environ = {
        "KVD_PEERS__CONNECT__prefill-0": "tcp://127.0.0.1:3",
        "KVD_TRANSFER__UCX__UCX_NET_DEVICES": "eth0",
    }

    config = valid(file, environ, ["peers.connect.p.2=tcp://localhost:4"])

    assert config.peers.connect == {
        "prefill-0": "tcp://127.0.0.1:3",
        "prefill.1": "tcp://127.0.0.1:2",
        "p.2": "tcp://localhost:4",
    }
    assert config.transfer.ucx == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
    assert config.origins["peers.connect.prefill-0"].place == "KVD_PEERS__CONNECT__prefill-0"
    assert config.origins["peers.connect.prefill.1"].place == f"{file}:3"
    assert config.origins["transfer.ucx.UCX_TLS"].place == f"{file}:5"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVD_POOLSIZE", "KVD_POOL__SIZE"),
        ("KVD_POOL_SIZE", "KVD_POOL__SIZE"),
        ("KVD_poolpages", "KVD_POOL__PAGES"),
        ("KVD_POOL_PAGE", "KVD_POOL__PAGES"),
        ("KVD_NODE_NAMES", "KVD_NODE__NAME"),
        ("KVD_LOGLEVEL", "KVD_LOG__LEVEL"),
        ("KVD_SOCKETSCLIENT", "KVD_SOCKETS__CLIENT"),
    ],
)
def test_a_variable_that_looks_like_a_key_and_would_not_be_read_is_an_error(
    name: str, meant: str
) -> None:
    (error,) = errors(environ={name: "7"})

    assert error.where == name
    assert error.fix == f"name it {meant}"


def test_variables_of_others_that_begin_so_are_left_alone() -> None:
    mine = {"KVD_SEEDS": "7", "KVD_MODEL": "x", "KVD_VLLM_PYTHON": "y", "KVD_": "z", "KVD": "a"}

    valid(environ=mine)


def test_load_reports_every_error_of_every_source_at_once(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        "[pool]\npage_size = 0\nfamily = 'prefill-only'\npags = 3\n"
        "[peers]\nlisten = 'tcp://10.0.0.1:7402'\nlost_s = 1.0\n[nodes]\nname = 'x'\n",
    )
    toml(tmp_path, "[pool\n", "conf.d/broken.toml")

    found = errors(
        file, {"KVD_LOG__LEVEL": "loud", "KVD_POOL_PAGES": "7"}, ["http.listen", "log.x=1"]
    )

    assert [error.sentence.replace(str(tmp_path), "") for error in found] == [
        "/kvd.toml:2: pool.page_size = 0: must be a whole number from 1 to 65536; "
        "the default is 16",
        '/kvd.toml:3: pool.family = "prefill-only": is refused: to have KV nowhere is a mode of '
        f'the cache: set cache.mode = "prefill-only"; write {" or ".join(FAMILIES)}',
        "/kvd.toml:4: pool.pags = 3: is no key of kvd; did you mean pool.pages?",
        '/kvd.toml:9: nodes.name = "x": is no key of kvd; did you mean node.name?',
        "/conf.d/broken.toml:1: is not TOML: Expected ']' at the end of a table declaration; "
        "correct the syntax",
        "KVD_POOL_PAGES: pool.pages = 7: two underscores part section and key; "
        "name it KVD_POOL__PAGES",
        "KVD_LOG__LEVEL: log.level = loud: must be one of debug, info, warning, error; "
        'the default is "info"',
        "--set http.listen: has the form section.key=value; "
        "write for example --set pool.pages=1024",
        "--set log.x=1: log.x = 1: is no key of kvd; remove it; kvd config explain lists every key",
        "/kvd.toml:7: peers.lost_s = 1.0: must be longer than peers.suspect_s, which is 1.25; "
        "give 2.5, for example",
        '/kvd.toml:6: peers.listen = "tcp://10.0.0.1:7402": leaves this host, and '
        "peers.secret_key_file is not set: nothing would be encrypted, and anyone could speak as "
        "any node; run kvd keygen and set peers.secret_key_file and peers.keys; or stay on "
        "loopback; or set peers.insecure = true if every host of that network is trusted",
    ]
    assert found[0] == ConfigError(
        where=f"{file}:2",
        key="pool.page_size",
        value="0",
        rule="must be a whole number from 1 to 65536",
        fix="the default is 16",
    )


def test_load_reports_a_missing_file_when_one_was_named(tmp_path: Path) -> None:
    missing = tmp_path / "kvd.toml"

    assert errors(missing) == [
        ConfigError(
            where=str(missing),
            rule="cannot be read: No such file or directory",
            fix="give the path of a readable TOML file",
        )
    ]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"\xff\xfe", "is not UTF-8: byte 0 is out of place"),
        (b"a = " + b"[" * 20_000, "is nested too deeply"),
        (b"a = " + b"9" * 5_000, "is not TOML: Exceeds the limit"),
        (b"[pool]\nlayers = 1\nlayers = 2\n", "is not TOML: Cannot overwrite a value"),
        (b"\0", "is not TOML: "),
    ],
)
def test_load_reports_a_file_that_is_no_toml(tmp_path: Path, content: bytes, rule: str) -> None:
    file = tmp_path / "kvd.toml"
    file.write_bytes(content)

    [error] = errors(file)

    assert error.where.startswith(str(file))
    assert error.rule.startswith(rule)


def test_load_takes_pages_or_size_but_not_both_from_one_source(tmp_path: Path) -> None:
    file = toml(tmp_path, "[pool]\npages = 10\nsize = '1MiB'\n")

    assert errors(file) == [
        ConfigError(
            where=f"{file}:3",
            key="pool.size",
            value='"1MiB"',
            rule=f"excludes pool.pages, which {file}:2 gives",
            fix="keep one of them",
        )
    ]


def test_load_lets_a_stronger_source_replace_size_by_pages_and_back(tmp_path: Path) -> None:
    file = toml(tmp_path, "[pool]\nsize = '1MiB'\n")

    by_pages = valid(file, sets=["pool.pages=77"])
    by_size = valid(file, {"KVD_POOL__PAGES": "77"}, ["pool.size=2MiB"])

    assert (by_pages.pool.pages, by_pages.pool.size) == (77, None)
    assert (by_size.pool.pages, by_size.pool.size) == (None, "2MiB")
    assert pool_spec(by_pages).pages == (77,)
    assert pool_spec(by_size).pages == (64,)


def test_load_reads_each_kind_from_text() -> None:
    config = valid(
        environ={
            "KVD_PEERS__INSECURE": "true",
            "KVD_PEERS__ALLOW": "a, b",
            "KVD_PEERS__LOST_S": "9",
            "KVD_LIMITS__MAX_CLIENTS": "1_000",
        }
    )

    assert (config.peers.insecure, config.peers.allow) == (True, ("a", "b"))
    assert (config.peers.lost_s, config.limits.max_clients) == (9.0, 1000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[pool]\nlayers = true\n", "true"),
        ("[pool]\nlayers = '4'\n", '"4"'),
        ("[pool]\nlayers = 4.5\n", "4.5"),
        ("[pool]\nlayers = [4]\n", "[4]"),
        ("[pool]\nlayers = { a = 1 }\n", "{ a = 1 }"),
        ("[pool]\nlayers = 1979-05-27\n", "1979-05-27"),
        ("[peers]\nlost_s = nan\n", "nan"),
        ("[peers]\nlost_s = inf\n", "inf"),
        ("[peers]\nlost_s = -1e400\n", "-inf"),
        ("[peers]\nallow = ['a', 3]\n", '["a", 3]'),
        ("[peers]\nallow = 'a'\n", '"a"'),
        ("[peers]\nconnect = 'a'\n", '"a"'),
        ("[peers.connect]\na = 3\n", "3"),
        ("[peers.connect]\na.b = 'tcp://127.0.0.1:1'\n", '{ b = "tcp://127.0.0.1:1" }'),
        ("[peers]\ninsecure = 1\n", "1"),
        ("pool = 3\n", "3"),
        ("[[pool]]\nlayers = 3\n", "[{ layers = 3 }]"),
        ("[pool.more]\nlayers = 3\n", "{ layers = 3 }"),
    ],
)
def test_load_refuses_a_value_of_the_wrong_type(tmp_path: Path, text: str, value: str) -> None:
    [error] = errors(toml(tmp_path, text))

    assert error.value == value
    assert error.fix


def test_load_reports_a_text_that_no_terminal_takes_readably() -> None:
    [error] = errors(environ={"KVD_NODE__NAME": "bad\udcff" + "x" * 500})

    assert error.value == "bad\\udcff" + "x" * 108 + "..."


def test_this_host_keeps_sockets_in_the_runtime_directory(tmp_path: Path) -> None:
    host = this_host({"XDG_RUNTIME_DIR": str(tmp_path)})

    assert host.runtime in {"/run/kvd", f"{tmp_path}/kvd"}
    assert isinstance(load(None, {}, [], host=host), Config | list)
