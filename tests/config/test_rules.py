from __future__ import annotations

import pytest

from kvd.config.rules import NOT_BUILT
from tests.config.pools import findings


@pytest.mark.parametrize(
    "sets",
    [
        ["node.name=a", "pool.name=A-1.b_c"],
        ["sockets.client=ipc:///x/client.sock", "sockets.admin=ipc:///x/admin.sock"],
        ["sockets.mode=0600", "sockets.group=root"],
        ["peers.listen=tcp://[::1]:0"],
        ["peers.listen=tcp://10.0.0.1:7402", "peers.insecure=true"],
        ["peers.listen=tcp://*:1", "peers.insecure=true"],
        ["peers.connect.p=tcp://a-1.example:65535", "peers.insecure=true"],
        ["peers.allow=p,q", "peers.connect.p=tcp://127.0.0.1:1"],
        ["http.listen=off"],
        ["http.listen=[::1]:0"],
        ["pool.pages=2"],
        ["pool.size=64KiB"],
        ["pool.size=3 TiB"],
        ["pool.order=layer_first", "pool.v_dim=32", "pool.huge_pages=off", "radix.policy=priority"],
        ["limits.max_prompt_tokens=1", "limits.max_frame_bytes=69632"],
    ],
)
def test_rules_take(sets: list[str]) -> None:
    assert findings(*sets) == []


@pytest.mark.parametrize(
    "text",
    [
        "node.name=",
        "node.name=-a",
        "node.name=a b",
        "node.name=" + "a" * 65,
        "pool.name=a/b",
        "sockets.client=tcp://127.0.0.1:1",
        "sockets.client=ipc://client.sock",
        "sockets.client=ipc:///run/kvd/",
        "sockets.client=ipc:///" + "a" * 100,
        "sockets.mode=660",
        "sockets.mode=0460",
        "sockets.mode=0668",
        "sockets.group=no-such-group-anywhere",
        "peers.listen=127.0.0.1:7402",
        "peers.listen=tcp://localhost:7402",
        "peers.listen=tcp://127.0.0.1",
        "peers.listen=tcp://127.0.0.1:65536",
        "peers.listen=tcp://127.0.0.256:1",
        "peers.listen=tcp://[127.0.0.1:1",
        "peers.listen=tcp://[:]:1",
        "peers.listen=ipc:///run/kvd/peers.sock",
        "peers.secret_key_file=peer.secret",
        "peers.secret_key_file=/etc/kvd/",
        "peers.keys.p=too-short",
        "peers.keys.p=" + "#" * 40,
        "peers.keys.a b=" + "0" * 40,
        "peers.connect.p=tcp://*:7402",
        "peers.connect.p=tcp://127.0.0.1:0",
        "peers.connect.p=ipc:///x",
        "peers.connect.a b=tcp://127.0.0.1:1",
        "pool.size=64MB",
        "pool.size=64",
        "pool.size=-1MiB",
        "http.listen=0.0.0.0:7480",
        "http.listen=localhost:7480",
        "transfer.ucx.PATH=/",
        "transfer.ucx.UCX_TLS=a\0b",
        "log.format=xml",
    ],
)
def test_rules_refuse(text: str) -> None:
    [(key, rule, fix)] = findings(text)

    assert text.startswith(f"{key}=")
    assert rule
    assert fix


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [(key, value, reason) for key, row in NOT_BUILT.items() for value, reason in row.items()],
)
def test_rules_refuse_what_is_not_built_with_the_reason(key: str, value: str, reason: str) -> None:
    """scenario E11: whatever is not supported is refused by the check, never half done."""
    [(found, rule, fix)] = findings(f"{key}={value}")

    assert (found, rule) == (key, f"is refused: {reason}")
    assert fix.startswith("write ")


def test_rules_refuse_a_pool_of_less_than_two_pages() -> None:
    assert findings("pool.size=63KiB") == [
        (
            "pool.size",
            "must hold at least 2 pages, and one page of this pool takes 32.0 KiB",
            "give at least 64KiB",
        )
    ]


def test_rules_refuse_more_pages_than_ids() -> None:
    tiny = ["pool.layers=1", "pool.heads=1", "pool.head_dim=1", "pool.page_size=1"]
    assert findings("pool.size=1TiB", *tiny) == [
        (
            "pool.size",
            "makes 274877906944 pages, and page ids end at 2147483647",
            "give less memory or a larger pool.page_size",
        )
    ]


def test_rules_refuse_limits_of_silence_that_are_out_of_order() -> None:
    sets = ["peers.heartbeat_s=1", "peers.suspect_s=1.5", "peers.lost_s=1.5"]
    assert findings(*sets) == [
        (
            "peers.suspect_s",
            "must be at least twice peers.heartbeat_s, which is 1.0",
            "give at least 2.0",
        ),
        (
            "peers.lost_s",
            "must be longer than peers.suspect_s, which is 1.5",
            "give 3.0, for example",
        ),
    ]


def test_rules_want_peers_to_be_others_each_once_and_let_in() -> None:
    sets = [
        "peers.connect.node-0=tcp://127.0.0.1:1",
        "peers.connect.a=tcp://127.0.0.1:7402",
        "peers.connect.b=tcp://127.0.0.1:2",
        "peers.connect.c=tcp://127.0.0.1:2",
        "peers.allow=node-0,a,b",
    ]
    assert findings(*sets) == [
        (
            "peers.connect.node-0",
            "is the name of this node, which is no peer of itself",
            "remove it, or set node.name",
        ),
        ("peers.connect.a", "is the address of this node", "give the address of the peer"),
        ("peers.connect.c", "is the address of b already", "give each peer its own address"),
        ("peers.connect.c", "is not in peers.allow", "add c to peers.allow"),
    ]


def test_a_peer_is_let_in_with_the_namespaces_that_it_may_pull() -> None:
    sets = ["peers.connect.b=tcp://127.0.0.1:2", "peers.connect.c=tcp://127.0.0.1:3"]
    assert findings(*sets, "peers.allow=b:llama,b:qwen#salt=1,c:") == []
    assert findings(*sets, "peers.allow=b:llama,c,b") == [
        (
            "peers.allow",
            "names b alone, which lets it pull everything, and with namespaces",
            "remove b, or what names a namespace of it",
        )
    ]


@pytest.mark.parametrize("entry", ["b:a\tb", "b:\x1f7", ":llama", "b c:llama", f"b:{'x' * 257}"])
def test_an_entry_with_a_namespace_that_nobody_can_have_is_refused(entry: str) -> None:
    (found,) = findings(f"peers.allow={entry}")
    assert found[0] == "peers.allow"
    assert "decode-0:llama" in found[2]


def test_rules_want_three_sockets_at_three_paths() -> None:
    assert findings(
        "sockets.client=ipc:///x/attach.sock", "sockets.admin=ipc:///x/attach.sock"
    ) == [
        (
            "sockets.client",
            "is the path of the attach socket, which lies beside it",
            "name the file client.sock",
        ),
        (
            "sockets.admin",
            "is taken: engines use ipc:///x/attach.sock and /x/attach.sock",
            "name the file admin.sock",
        ),
    ]
    assert findings(f"sockets.client=ipc:///{'d' * 97}/c") == [
        (
            "sockets.client",
            "puts attach.sock at a path of 110 bytes, above 107",
            "choose a shorter directory",
        )
    ]


def test_rules_want_sizes_that_hold_each_other() -> None:
    assert findings("limits.max_frame_bytes=65536") == [
        (
            "limits.max_frame_bytes",
            "must hold limits.max_prompt_tokens at 4 B each and 64.0 KiB more",
            "give at least 4259840",
        ),
        (
            "limits.max_frame_bytes",
            "must hold limits.max_aux_bytes and 4096 more",
            "give at least 69632",
        ),
    ]


def test_rules_want_two_listeners_on_two_ports() -> None:
    assert findings("http.listen=127.0.0.1:7402") == [
        ("http.listen", "uses port 7402 as peers.listen does", "choose another port")
    ]
    assert findings("http.listen=127.0.0.1:0", "peers.listen=tcp://127.0.0.1:0") == []


KV_EVENTS = ("kv_events.enabled=true", "kv_events.model=llama-70b")


def test_kv_events_need_a_model_and_a_cache_and_ports_of_their_own() -> None:
    assert findings(*KV_EVENTS) == []
    assert findings("kv_events.replay=tcp://127.0.0.1:7402") == []
    assert [key for key, _, _ in findings("kv_events.enabled=true")] == ["kv_events.model"]
    assert [key for key, _, _ in findings(*KV_EVENTS, "cache.mode=off")] == ["kv_events.enabled"]
    assert findings(*KV_EVENTS, "kv_events.replay=tcp://127.0.0.1:7403") == [
        ("kv_events.replay", "uses port 7403 as kv_events.listen does", "choose another port")
    ]
    for wrong in ("kv_events.model=a@b", "kv_events.model=", 'kv_events.namespaces=["a#lora=b"]'):
        assert [key for key, _, _ in findings(wrong)] == [wrong.partition("=")[0]]


def test_kv_events_stay_on_the_host_unless_all_hosts_are_trusted() -> None:
    outside = ("kv_events.listen=tcp://*:7403", "kv_events.replay=tcp://10.0.0.1:7404")
    found = findings(*KV_EVENTS, *outside)
    assert [key for key, _, _ in found] == ["kv_events.listen", "kv_events.replay"]
    assert found[0][1].startswith("leaves this host")
    assert findings(*KV_EVENTS, *outside, "kv_events.insecure=true") == []
