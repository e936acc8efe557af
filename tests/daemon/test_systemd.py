"""What systemd is told, what it keeps, and what it hands over; played by a real notify socket."""

from __future__ import annotations

import os
import socket
import time

import pytest

from kvd.daemon import systemd as module
from kvd.daemon.socket_activation import PassedDescriptors, UnfitConfig, descriptors_passed
from kvd.daemon.systemd import Systemd
from tests.daemon.manager import Manager


@pytest.fixture
def manager(tmp_path):
    with Manager.at(tmp_path, store_max=4) as one:
        yield one


def speaker(manager, **more):
    return Systemd(manager.address, **more)


def said(manager):
    return [one.lines for one in manager.told]


def test_environment_is_taken_so_that_no_child_speaks_for_us():
    environ = {
        "NOTIFY_SOCKET": "/run/notify",
        "WATCHDOG_USEC": "20000000",
        "WATCHDOG_PID": "7",
        "LISTEN_FDNAMES": "x",
        "HOME": "/root",
    }

    one = Systemd.of(environ, 7)

    assert environ == {"HOME": "/root"}
    assert (one.is_there, one.watchdog_s) == (True, 20.0)


def test_watchdog_of_another_process_is_not_fed():
    assert Systemd.of({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "8"}, 7).watchdog_s == 0.0


def test_without_a_manager_nothing_is_said_and_nothing_fails():
    one = Systemd.of({}, os.getpid())

    one.begin("registering")
    one.ready("serving")
    one.feed()
    one.stopping("stopping")
    one.barrier()

    assert not one.is_there


def test_life_of_a_service_is_told_in_order(manager):
    one = speaker(manager)

    one.begin("registering 4.0 GiB")
    one.ready("serving")
    one.feed()
    one.reloading()
    one.ready("serving")
    one.stopping("stopping")
    one.barrier()

    lines = said(manager)
    assert 0 < int(lines[4].pop("MONOTONIC_USEC")) <= time.monotonic_ns() // 1000
    assert lines == [
        {"EXTEND_TIMEOUT_USEC": "60000000"},
        {"STATUS": "registering 4.0 GiB"},
        {"READY": "1", "STATUS": "serving"},
        {"WATCHDOG": "1"},
        {"RELOADING": "1", "STATUS": "reloading"},
        {"READY": "1", "STATUS": "serving"},
        {"STOPPING": "1", "STATUS": "stopping"},
        {"BARRIER": "1"},
    ]


def test_status_is_one_line_told_when_it_changed_and_every_two_seconds_at_most(manager):
    now = [100.0]
    one = speaker(manager, clock=lambda: now[0])

    one.say("a\nb")
    one.say("c")
    now[0] += module.SAY_EVERY_S
    one.say("a\nb")
    one.say("c")
    one.barrier()

    assert said(manager) == [{"STATUS": "a b"}, {"STATUS": "c"}, {"BARRIER": "1"}]


def test_slow_work_that_gets_on_asks_for_time_every_two_seconds(manager):
    now = [100.0]
    one = speaker(manager, clock=lambda: now[0])

    for page in range(5):
        one.advance(f"verifying pages {page}/5")
        now[0] += 1.0
    one.barrier()

    assert said(manager) == [
        *(
            line
            for page in (0, 2, 4)
            for line in (
                {"EXTEND_TIMEOUT_USEC": "60000000"},
                {"STATUS": f"verifying pages {page}/5"},
            )
        ),
        {"BARRIER": "1"},
    ]


def test_abstract_socket_is_spoken_to():
    with Manager(f"@kvd-test-{os.getpid()}") as manager:
        speaker(manager).ready("serving")

        assert manager.expect("READY").lines == {"READY": "1", "STATUS": "serving"}


def test_manager_that_does_not_read_is_not_waited_for(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "notify"))
        one = Systemd(str(tmp_path / "notify"))
        begun_s = time.monotonic()

        for _ in range(2000):
            one.feed()

        assert time.monotonic() - begun_s < 2.0


def test_store_keeps_descriptors_under_their_names(manager):
    memory = os.memfd_create("arena")
    os.write(memory, b"kv")

    speaker(manager).store({"main.kv": memory})
    speaker(manager).barrier()

    assert manager.names() == ["main.kv"]
    assert os.pread(manager.store[0][1], 2, 0) == b"kv"
    assert said(manager)[0] == {"FDSTORE": "1", "FDNAME": "main.kv", "FDPOLL": "0"}
    os.close(memory)


def test_store_that_is_too_small_is_found_out(tmp_path):
    memory = os.memfd_create("arena")
    with (
        Manager.at(tmp_path, store_max=1) as manager,
        pytest.raises(UnfitConfig, match=r"FileDescriptorStoreMax=3 or more"),
    ):
        speaker(manager).store({"a": memory, "b": memory})
    os.close(memory)


def test_store_without_a_manager_is_unfit():
    with pytest.raises(UnfitConfig, match="NOTIFY_SOCKET is not set"):
        Systemd().store({"a": 0})


def test_barrier_of_a_manager_that_does_not_read_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "notify"))
        with pytest.raises(TimeoutError, match="has not read its notify socket"):
            Systemd(str(tmp_path / "notify")).barrier()


def test_what_nobody_claims_is_closed_and_leaves_the_store(manager):
    kept, other = os.memfd_create("kept"), os.memfd_create("other")
    one = speaker(manager, passed=PassedDescriptors({"main.kv": [kept], "old.kv": [other]}))

    assert one.passed.claim("main.kv") == kept
    assert one.drop_unclaimed() == ("old.kv",)
    one.barrier()

    assert said(manager)[0] == {"FDSTOREREMOVE": "1", "FDNAME": "old.kv"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(other)
    os.close(kept)


def passed(names, *descriptors, pid=None):
    """Descriptors where systemd would put them: side by side."""
    first = 200
    for place, one in enumerate(descriptors):
        os.dup2(one, first + place, inheritable=True)
    environ = {
        "LISTEN_PID": str(os.getpid() if pid is None else pid),
        "LISTEN_FDS": str(len(descriptors)),
        "LISTEN_FDNAMES": names,
    }
    return descriptors_passed(environ, os.getpid(), first)


def test_descriptors_have_names_of_which_one_may_come_twice():
    one = passed("a::a", 0, 1, 2)

    assert not os.get_inheritable(200)
    assert (one.claim("a"), one.claim("unknown"), one.claim("a")) == (200, 201, 202)
    assert one.claim("a") is None
    for descriptor in (200, 201, 202):
        os.close(descriptor)


def test_descriptors_for_another_process_are_left_alone():
    assert passed("a", 0, pid=1).close_rest() == ()
    os.close(200)


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.bind(str(tmp_path / "client.sock"))
        one.listen()
        yield one


def test_socket_is_known_by_its_path_whatever_it_is_called(listener, tmp_path):
    one = passed("kvd.socket", listener.fileno())

    found = one.claim_listener("client", str(tmp_path / "client.sock"), socket.SOCK_STREAM)

    assert found == 200
    assert not os.get_blocking(200)
    assert one.close_rest() == ()
    os.close(200)


def test_socket_that_listens_elsewhere_is_unfit(listener, tmp_path):
    one = passed("client", listener.fileno())

    with pytest.raises(
        UnfitConfig, match=r"client.sock as 'client', and the configuration puts it"
    ):
        one.claim_listener("client", "/x", socket.SOCK_STREAM)
    one.close_rest()


def test_socket_of_the_wrong_kind_is_unfit(listener, tmp_path):
    one = passed("attach", listener.fileno())

    with pytest.raises(UnfitConfig, match="must be a ListenSequentialPacket="):
        one.claim_listener("attach", str(tmp_path / "client.sock"), socket.SOCK_SEQPACKET)
    one.close_rest()


def test_memory_under_the_name_of_a_socket_is_none(tmp_path):
    memory = os.memfd_create("arena")
    one = passed("client", memory)

    assert one.claim_listener("client", "/x", socket.SOCK_STREAM) is None
    assert one.close_rest() == ("client",)
    os.close(memory)
