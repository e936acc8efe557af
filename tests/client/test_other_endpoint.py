"""The attach socket is found by its directory: whose it is is said, and compared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import kvd.client
from kvd.client import KvdError
from kvd.wire import client as wire

if TYPE_CHECKING:
    from pathlib import Path

    Daemon = Any
    """``conftest.Daemon``."""


def script(request: Any, _: bytes) -> list[wire.Reply]:
    match request:
        case wire.MatchPrefix(call):
            return [wire.MatchReply(call, 8, 0, 0)]
    return []


@pytest.fixture
def path(daemon: Daemon) -> str:
    daemon.script = script
    return str(daemon.endpoint).removeprefix("ipc://")


async def test_the_daemon_of_another_socket_of_the_directory_is_refused_by_name(
    daemon: Daemon, path: str, tmp_path: Path
) -> None:
    wrong = f"ipc://{tmp_path}/b.sock"
    words = rf"^unreachable: nobody listens at {wrong}: .* of node-a, .* {daemon.endpoint}; name"
    with pytest.raises(KvdError, match=words):
        kvd.client.connect_sync(wrong, name="a")
    with pytest.raises(KvdError, match=words):
        await kvd.client.connect(wrong, name="a")
    with kvd.client.connect_sync(daemon.endpoint, name="a") as node:
        with pytest.raises(KvdError, match=words):
            kvd.client.join(wrong, token=node.token)
        assert node.match([1]).tokens == 8


async def test_a_socket_file_that_somebody_else_left_there_is_not_the_daemons(
    daemon: Daemon, path: str, tmp_path: Path
) -> None:
    import socket  # noqa: PLC0415

    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "b.sock"))
        with pytest.raises(KvdError, match="nobody listens at"):
            await kvd.client.connect(f"ipc://{tmp_path}/b.sock", name="a")


def test_the_same_socket_by_other_paths_is_the_same_daemon(
    daemon: Daemon, path: str, tmp_path: Path
) -> None:
    links = tmp_path / "links"
    links.symlink_to(tmp_path, target_is_directory=True)
    beside = tmp_path / "beside.sock"
    beside.symlink_to(path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far.sock").symlink_to(path)
    os.link(path, tmp_path / "hard.sock")
    ways = [
        f"{links}/client.sock",
        str(beside),
        f"{elsewhere}/far.sock",
        f"{tmp_path}/hard.sock",
        f"{elsewhere}/../client.sock",
        f"{tmp_path}//client.sock",
    ]
    for way in ways:
        with kvd.client.connect_sync(f"ipc://{way}", name="a") as node:
            assert node.match([1]).tokens == 8, way


def test_the_daemon_that_is_back_at_another_socket_is_not_gone_on_with(
    daemon: Daemon, path: str
) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="a", return_within_s=0.2) as node:
        assert node.match([1]).tokens == 8
        daemon.hang_up()
        daemon.said_endpoint = daemon.endpoint.replace("client.sock", "b.sock")
        daemon.restart()
        os.rename(path, path.replace("client.sock", "b.sock"))
        with pytest.raises(KvdError, match=r"^unreachable"):
            node.match([1])
        os.rename(path.replace("client.sock", "b.sock"), path)
        daemon.hang_up()
        daemon.said_endpoint = daemon.endpoint
        daemon.restart()
        assert node.match([1]).tokens == 8


def test_a_daemon_that_does_not_say_is_believed(daemon: Daemon, path: str) -> None:
    daemon.hang_up()
    daemon.said_endpoint = ""
    daemon.restart()
    with kvd.client.connect_sync(daemon.endpoint, name="a") as node:
        assert node.match([1]).tokens == 8
