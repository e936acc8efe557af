"""The argument, else the environment, else where a daemon would listen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvd import places
from kvd.client.endpoint import attach_path, client_endpoint
from kvd.config.host import this_host
from kvd.errors import KvdError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVD_SOCKETS__CLIENT", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(places, "SYSTEM_RUNTIME", tmp_path / "run/kvd")
    monkeypatch.setattr("os.getuid", lambda: 1000)


def test_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SOCKETS__CLIENT", "ipc:///env/client.sock")
    assert client_endpoint("ipc:///arg/client.sock") == "ipc:///arg/client.sock"


def test_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SOCKETS__CLIENT", "ipc:///env/client.sock")
    assert client_endpoint() == "ipc:///env/client.sock"


def test_then_this_users_own_daemon_then_the_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, system = tmp_path / "user", tmp_path / "run/kvd"
    assert client_endpoint() == "ipc:///tmp/kvd-1000/client.sock"

    own.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert client_endpoint() == f"ipc://{own}/kvd/client.sock"

    system.mkdir(parents=True)
    (system / "client.sock").touch()
    assert client_endpoint() == f"ipc://{system}/client.sock"

    (own / "kvd").mkdir()
    (own / "kvd/client.sock").touch()
    assert client_endpoint() == f"ipc://{own}/kvd/client.sock"


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("has_runtime", [True, False])
def test_a_plain_daemon_of_the_same_user_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uid: int, has_runtime: bool
) -> None:
    monkeypatch.setattr("os.getuid", lambda: uid)
    if has_runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    assert client_endpoint() == f"ipc://{this_host(os.environ).runtime}/client.sock"


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:1", "/run/kvd/client.sock", "ipc://relative"])
def test_anything_else_is_refused_in_words(wrong: str) -> None:
    with pytest.raises(KvdError, match="is no client endpoint: engines reach the daemon of their"):
        client_endpoint(wrong)


def test_the_attach_socket_lies_beside() -> None:
    assert attach_path("ipc:///run/kvd/client.sock") == "/run/kvd/attach.sock"
