"""The listening socket's file, and what a client checks before it believes an answer."""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from kvd.client.attachment import dial, take_answer
from kvd.core.layout.spec import Component, PageOrder, PoolSpec, Raw
from kvd.daemon.listeners import AddressInUse, listen_at
from kvd.errors import KvdError
from kvd.pools.build import pool_memory
from kvd.wire.attach import Attached
from kvd.wire.codec import ATTACH_REPLIES
from tests.support.garbage import collect_of_others

if TYPE_CHECKING:
    from pathlib import Path

KV = Component("kv", 2, Raw(64), 4)
POOL = pool_memory(PoolSpec("main", "raw", PageOrder.PAGE_FIRST, (KV,), (8,)))


def test_listen_sets_the_mode_and_replaces_a_dead_daemons_file(tmp_path: Path) -> None:
    path = str(tmp_path / "attach.sock")
    listen_at(path, socket.SOCK_SEQPACKET, mode=0o660, group=None).close()

    second = listen_at(path, socket.SOCK_SEQPACKET, mode=0o640, group=None)

    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    second.close()


def test_listen_refuses_a_path_that_is_in_use(tmp_path: Path) -> None:
    path = str(tmp_path / "attach.sock")
    first = listen_at(path, socket.SOCK_SEQPACKET, mode=0o660, group=None)
    plain = tmp_path / "plain"
    plain.write_text("precious")

    with pytest.raises(AddressInUse, match=r"^a process listens on .*/attach.sock: another kvd"):
        listen_at(path, socket.SOCK_SEQPACKET, mode=0o660, group=None)
    with pytest.raises(AddressInUse, match="exists and is no socket"):
        listen_at(str(plain), socket.SOCK_SEQPACKET, mode=0o660, group=None)

    assert plain.read_text() == "precious"
    first.close()


def test_dial_says_what_to_do_when_there_is_no_daemon(tmp_path: Path) -> None:
    path = str(tmp_path / "attach.sock")
    with pytest.raises(KvdError, match=r"^unreachable: no daemon at .*: start it"):
        dial(path)

    listen_at(path, socket.SOCK_SEQPACKET, mode=0o660, group=None).close()

    with pytest.raises(KvdError, match=r"^unreachable: nobody listens on .* any more"):
        dial(path)


def test_a_client_refuses_memory_smaller_than_described(tmp_path: Path) -> None:
    """The peer's word is checked before anything is mapped, and the descriptors are closed."""
    listener = listen_at(str(tmp_path / "s"), socket.SOCK_SEQPACKET, mode=0o600, group=None)
    sock = dial(str(tmp_path / "s"))
    assert sock is not None
    server, _ = listener.accept()
    collect_of_others()  # what other tests have left must not be closed between the two looks
    before = set(os.listdir("/proc/self/fd"))
    small = os.memfd_create("small")
    answer = ATTACH_REPLIES.encode(Attached(1, b"S", "node-a", "", (POOL,)))
    for passed, words in ([small], "passed 0 bytes for kv"), ([], "described 1 .* passed 0"):
        server.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _ints(passed))])
        with pytest.raises(KvdError, match=words):
            take_answer(sock)
    os.close(small)

    assert set(os.listdir("/proc/self/fd")) == before
    for one in (sock, server, listener):
        one.close()


def _ints(fds: list[int]) -> bytes:
    return b"".join(fd.to_bytes(4, "little") for fd in fds)
