"""The operator's client: an answer, or why there is none, in time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from kvd import __version__
from kvd.client.admin import AdminClient
from kvd.errors import Code, KvdError, Refusal
from kvd.sockets import open_router
from kvd.wire.admin import AdminFailed, AdminReply, Audit, Evict, Report
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield own
    own.term()


def serve(
    router: zmq.Socket[bytes], requests: int, answer: Callable[[int], list[bytes]]
) -> threading.Thread:
    """Answer so many requests in a thread; ``answer`` takes the call, gives the messages."""

    def run() -> None:
        for _ in range(requests):
            sender, header = router.recv_multipart()
            request = ADMIN_REQUESTS.decode(header)
            assert not isinstance(request, Refusal)
            for message in answer(request.call):
                router.send_multipart([sender, message])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def encoded(reply: AdminReply) -> bytes:
    return ADMIN_REPLIES.encode(reply)


def test_each_request_gets_its_own_answer_and_a_late_one_is_skipped(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """The second answer to the first request must not pass for that to the second."""
    endpoint = f"ipc://{tmp_path}/admin.sock"
    router = open_router(context)
    router.bind(endpoint)
    thread = serve(router, 2, lambda call: [encoded(Report(call, {"pages": call * 10}, ()))] * 2)

    with AdminClient(endpoint) as client:
        first = client.request(Evict(7, 10), timeout_s=5)
        second = client.request(Evict(7, 10), timeout_s=5)

    thread.join()
    router.close(linger=0)
    assert (first, second) == (Report(1, {"pages": 10}, ()), Report(2, {"pages": 20}, ()))


def test_a_refusal_is_an_answer(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/admin.sock"
    router = open_router(context)
    router.bind(endpoint)
    refusal = Refusal(Code.BAD_REQUEST, "no such page")
    thread = serve(router, 1, lambda call: [encoded(AdminFailed(-1, refusal))])

    with AdminClient(endpoint) as client:
        assert client.request(Audit(0), timeout_s=5) == AdminFailed(-1, refusal)

    thread.join()
    router.close(linger=0)


def test_garbage_from_the_other_side_is_an_error(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/admin.sock"
    router = open_router(context)
    router.bind(endpoint)
    thread = serve(router, 1, lambda call: [b"\xc1"])

    with (
        AdminClient(endpoint) as client,
        pytest.raises(
            KvdError,
            match=f"bad-request: kvd {__version__} cannot .*use the version of its daemon",
        ),
    ):
        client.request(Audit(0), timeout_s=5)

    thread.join()
    router.close(linger=0)


def test_a_daemon_that_is_not_there_is_known_at_once(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/admin.sock"
    began_s = time.monotonic()
    with AdminClient(endpoint) as client, pytest.raises(KvdError, match="there is no socket at"):
        client.request(Audit(0), timeout_s=30)

    (tmp_path / "admin.sock").touch()
    with AdminClient(endpoint) as client, pytest.raises(KvdError, match="nobody listens on") as no:
        client.request(Audit(0), timeout_s=30)

    assert no.value.code == "unreachable"
    assert time.monotonic() - began_s < 5


def test_a_daemon_that_does_not_answer_is_unreachable_in_time(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/admin.sock"
    router = open_router(context)
    router.bind(endpoint)

    with AdminClient(endpoint) as client, pytest.raises(KvdError) as silent:
        client.request(Audit(0), timeout_s=0.05)

    router.close(linger=0)
    assert str(silent.value) == f"unreachable: no answer from {endpoint} within 0.05 s"
