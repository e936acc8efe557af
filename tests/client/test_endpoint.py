"""The argument, else the environment, else where a daemon would listen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.client import endpoint
from kvd.client.endpoint import attach_path, client_endpoint
from kvd.errors import KvdError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVD_SOCKETS__CLIENT", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(endpoint, "SYSTEM_ENDPOINT", f"ipc://{tmp_path}/run/kvd/client.sock")


def test_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SOCKETS__CLIENT", "ipc:///env/client.sock")
    assert client_endpoint("ipc:///arg/client.sock") == "ipc:///arg/client.sock"


def test_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVD_SOCKETS__CLIENT", "ipc:///env/client.sock")
    assert client_endpoint() == "ipc:///env/client.sock"


def test_then_the_system_daemon_then_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert client_endpoint() == f"ipc://{tmp_path}/run/kvd/client.sock"

    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert client_endpoint() == "ipc:///run/user/1000/kvd/client.sock"

    (tmp_path / "run/kvd").mkdir(parents=True)
    (tmp_path / "run/kvd/client.sock").touch()
    assert client_endpoint() == f"ipc://{tmp_path}/run/kvd/client.sock"


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:1", "/run/kvd/client.sock", "ipc://relative"])
def test_anything_else_is_refused_in_words(wrong: str) -> None:
    with pytest.raises(KvdError, match="is no client endpoint: engines reach the daemon of their"):
        client_endpoint(wrong)


def test_the_attach_socket_lies_beside() -> None:
    assert attach_path("ipc:///run/kvd/client.sock") == "/run/kvd/attach.sock"
