"""Keys of peers in the configuration: what is refused, with value, rule and fix."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvd.config import Config, load
from kvd.config.host import HostFacts
from kvd.config.render import effective, explanations
from kvd.curve import SECRET_FILE, create_files, new_pair
from tests.config.pools import findings

if TYPE_CHECKING:
    from pathlib import Path

HOST = HostFacts(node_name="node-0", runtime="/run/kvd", config_file="/nonexistent/kvd.toml")
OWN, OTHER, THIRD = new_pair(), new_pair(), new_pair()
LEAVES = (
    "leaves this host, and peers.secret_key_file is not set: nothing would be encrypted, and "
    "anyone could speak as any node"
)
ACCEPT = (
    "run kvd keygen and set peers.secret_key_file and peers.keys; or stay on loopback; or set "
    "peers.insecure = true if every host of that network is trusted"
)

PRINTED = "write the key that kvd keygen printed on "


@pytest.fixture
def secret(tmp_path: Path) -> str:
    create_files(tmp_path, OWN)
    return str(tmp_path / SECRET_FILE)


def test_nothing_leaves_the_host_without_keys_unless_that_is_said() -> None:
    sets = ["peers.connect.p=tcp://10.0.0.2:1", "peers.connect.q=tcp://host.example:1"]

    assert findings("peers.listen=tcp://10.0.0.1:1", *sets) == [
        ("peers.listen", LEAVES, ACCEPT),
        ("peers.connect.p", LEAVES, ACCEPT),
        ("peers.connect.q", LEAVES, ACCEPT),
    ]
    assert findings("peers.listen=tcp://*:1") == [("peers.listen", LEAVES, ACCEPT)]
    assert findings("peers.listen=tcp://10.0.0.1:1", *sets, "peers.insecure=true") == []


def test_with_keys_any_address_will_do(secret: str) -> None:
    assert (
        findings(
            "peers.listen=tcp://*:7402",
            "peers.connect.p=tcp://10.0.0.2:7402",
            f"peers.secret_key_file={secret}",
            f"peers.keys.p={OTHER.public}",
            f"peers.keys.node-0={OWN.public}",
            "peers.allow=p",
        )
        == []
    )


def test_every_dialed_and_every_allowed_peer_needs_a_key(secret: str) -> None:
    rule = "has no key in peers.keys, so it cannot be told from anyone else"

    assert findings(
        f"peers.secret_key_file={secret}",
        "peers.connect.p=tcp://127.0.0.1:1",
        "peers.allow=p,q",
        f"peers.keys.q={OTHER.public}",
    ) == [
        ("peers.connect.p", rule, "set peers.keys.p to its public key"),
        ("peers.allow", f"names p, which {rule}", "set peers.keys.p, or remove it"),
    ]


def test_a_key_is_of_one_node_and_our_own_of_this_one(secret: str) -> None:
    assert findings(
        f"peers.secret_key_file={secret}",
        f"peers.keys.a={OWN.public}",
        f"peers.keys.node-0={THIRD.public}",
        f"peers.keys.b={OTHER.public}",
        f"peers.keys.c={OTHER.public}",
    ) == [
        ("peers.keys.a", "is the key of this node itself", f"{PRINTED}a"),
        (
            "peers.keys.node-0",
            "is this node, and not the public key of peers.secret_key_file",
            f"write {OWN.public} or remove it",
        ),
        (
            "peers.keys.c",
            "is the key of b already, and a key is of one node",
            "run kvd keygen on c too",
        ),
    ]


def test_keys_of_others_want_a_key_of_our_own() -> None:
    assert findings(f"peers.keys.p={OTHER.public}", f"peers.keys.q={THIRD.public}") == [
        (
            "peers.keys.p",
            "is of no use without peers.secret_key_file, this node's own key",
            "make one with kvd keygen and set peers.secret_key_file",
        )
    ]


def test_keys_and_insecure_contradict_each_other(secret: str) -> None:
    assert findings(f"peers.secret_key_file={secret}", "peers.insecure=true") == [
        (
            "peers.insecure",
            "contradicts peers.secret_key_file, with which every peer must prove its key",
            "remove one of the two",
        )
    ]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604, 0o602])
def test_a_secret_file_that_others_can_open_is_refused_with_the_fix(
    tmp_path: Path, secret: str, mode: int
) -> None:
    if os.geteuid() == 0:
        os.chown(secret, 0, 12345)  # members of group 0 are root's own
    os.chmod(secret, mode)

    assert findings(f"peers.secret_key_file={secret}") == [
        (
            "peers.secret_key_file",
            f"has mode {mode:04o}, so others can read the key",
            f"chmod 0600 {secret}",
        )
    ]


def test_a_secret_file_that_is_none_is_refused(tmp_path: Path) -> None:
    directory, pipe, text = tmp_path / "d", tmp_path / "pipe", tmp_path / "text"
    directory.mkdir(mode=0o700)
    os.mkfifo(pipe, 0o600)
    text.write_text("not a key\n")
    text.chmod(0o600)

    found = [
        findings(f"peers.secret_key_file={path}")
        for path in (directory, pipe, text, tmp_path / "missing")
    ]

    fix = "name the secret file that kvd keygen made"
    assert found == [
        [("peers.secret_key_file", "is no file", fix)],
        [("peers.secret_key_file", "is no file", fix)],
        [
            (
                "peers.secret_key_file",
                "holds no key of 40 characters of Z85 and nothing else",
                fix,
            )
        ],
        [
            (
                "peers.secret_key_file",
                "does not exist",
                f"make it with: kvd keygen --out {tmp_path}",
            )
        ],
    ]


def test_no_secret_is_shown_where_the_configuration_is(secret: str) -> None:
    config = load(None, {}, [f"peers.secret_key_file={secret}"], host=HOST)

    assert isinstance(config, Config)
    shown = [repr(explanations(config)), effective(config), repr(config)]
    assert [secret in text for text in shown] == [True, True, True]
    assert [OWN.secret in text for text in shown] == [False, False, False]


@pytest.mark.parametrize("source", ["file", "environment", "set"])
def test_a_key_in_the_place_of_its_file_is_refused_and_not_shown(
    tmp_path: Path, source: str
) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text(f'[peers]\nsecret_key_file = "{OWN.secret}"\n' if source == "file" else "")
    environ = {"KVD_PEERS__SECRET_KEY_FILE": OWN.secret} if source == "environment" else {}
    sets = [f"peers.secret_key_file={OWN.secret}"] if source == "set" else []

    found = load(file, environ, sets, host=HOST)

    assert not isinstance(found, Config)
    assert [error.value for error in found] == ["(a key, not shown)"]
    assert OWN.secret not in repr(found)
