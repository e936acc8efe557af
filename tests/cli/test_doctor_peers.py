"""``kvd doctor``: what the configured peers are, asked of a running daemon or of themselves."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import msgspec
import pytest
import zmq
from click.testing import CliRunner

from kvd import curve
from kvd.cli import kvd
from kvd.cli.doctor import host, peers
from kvd.cli.doctor.finding import Severity
from kvd.cli.doctor.peers import neighbours
from kvd.config import pool_spec
from kvd.core.inputs import PathSide, WritePath
from kvd.core.layout.spec import fingerprint
from kvd.core.peers.peer import PeerWay
from kvd.wire import admin
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import Hello, Ping
from tests.cli.admin_peer import SNAPSHOT
from tests.cli.inchild import subject
from tests.cli.sentences import sentence_of
from tests.support.daemons import free_port, one_daemon

GOOD, POOR, WRONG = Severity.GOOD, Severity.POOR, Severity.WRONG
POOL = {"pool.layers": "1", "pool.heads": "1", "pool.pages": "65"}
SMALL = {**POOL, "log.level": "error"}
SETS = [f"{key}={value}" for key, value in POOL.items()]


@pytest.fixture(scope="module")
def prefill(tmp_path_factory):
    """A real daemon to ask."""
    with one_daemon(tmp_path_factory.mktemp("p"), SMALL, name="p") as daemon:
        yield daemon


def about(address, *sets, name="p", **environ):
    return subject(
        "node.name=d",
        "sockets.admin=ipc:///nowhere/admin.sock",
        f"peers.connect.{name}={address}",
        *sets,
        **environ,
    )


class Answerer:
    """A peer of the protocol, in a thread: answers the first message with a Hello of its own."""

    def __init__(self, **changes) -> None:
        spec = pool_spec(subject().config)
        mine = Hello(f"{time.time_ns():016x}{'0' * 16}", "", "p", fingerprint(spec), 1, b"", 1, 1)
        self._hello = msgspec.structs.replace(mine, **changes)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self.heard = None
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        if self._router.poll(5000):
            sender, frame = self._router.recv_multipart()
            self.heard = PEER_MESSAGES.decode(frame)
            self._router.send_multipart([sender, PEER_MESSAGES.encode(self._hello)])

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_exc) -> None:
        self._thread.join()
        self._router.close(linger=500)
        self._context.term()


def test_nobody_is_asked_where_nobody_is_configured():
    assert neighbours(subject()) == []


def test_a_peer_with_the_same_pool_is_good_and_keeps_nothing_of_the_question(prefill):
    [finding] = neighbours(about(prefill.peers, *SETS))

    assert (finding.check, finding.severity) == ("peer p", GOOD)
    assert finding.what == sentence_of(
        "a peer with the same pool is good and keeps nothing of the question"
    )
    assert prefill.snapshot().peers == ()


def test_a_peer_with_another_pool_is_wrong_with_the_difference(prefill):
    [finding] = neighbours(about(prefill.peers, *SETS, "pool.layers=2"))

    assert finding.severity is WRONG
    assert "d and p lay out their pools differently" in finding.what
    assert "layers: ours 2, theirs 1" in finding.what
    assert "kvd config show" in finding.fix


def test_a_peer_under_another_name_is_wrong_with_both_names(prefill):
    [finding] = neighbours(about(prefill.peers, *SETS, name="prefill-0"))

    assert finding.severity is WRONG
    assert "calls itself p" in finding.what
    assert "rename peers.connect.prefill-0" in finding.fix


def test_a_daemon_that_runs_here_is_asked_for_what_it_knows(prefill, tmp_path):
    settings = {**SMALL, "pool.layers": "2", f"peers.connect.{prefill.name}": prefill.peers}
    with one_daemon(tmp_path, settings, name="d") as decode:
        decode.wait_for(lambda: decode.snapshot().peers[0].state == "up", "no peer", 10.0)
        here = subject(
            "node.name=d",
            f"sockets.admin={decode.admin}",
            f"peers.connect.p={prefill.peers}",
            "peers.connect.q=tcp://127.0.0.1:1",
            *SETS,
        )
        found = {one.check: one for one in neighbours(here)}

    assert (found["peer p"].severity, found["peer q"].severity) == (WRONG, POOR)
    assert "d and p lay out their pools differently" in found["peer p"].what
    assert found["peer p"].what.endswith("(asked the running daemon)")
    assert found["peer q"].what.startswith("the running daemon does not know it")


def test_a_peer_that_is_lost_says_why(daemon, snapshot):
    [peer, *_] = SNAPSHOT.peers
    lost = msgspec.structs.replace(peer, state="lost", trouble="keys differ")
    daemon.answer = lambda _: admin.Status(0, msgspec.structs.replace(snapshot, peers=(lost,)))

    [finding] = neighbours(
        subject(
            f"sockets.admin={daemon.endpoint}",
            f"peers.connect.{peer.name}={peer.address}",
            "peers.listen=tcp://127.0.0.1:7409",
        )
    )

    assert finding.severity is POOR
    assert "is lost: keys differ" in finding.what


def test_a_peer_that_bytes_of_a_device_reach_by_emulation_is_poor(daemon, snapshot):
    [peer, *_] = SNAPSHOT.peers
    way = PeerWay(
        source=PathSide.DEVICE, destination=PathSide.HOST, path=WritePath.EMULATED, bytes_s=9e8
    )
    slow = msgspec.structs.replace(
        peer, state="up", layout="same", slow_path=f"{way.words}: {way.advice}"
    )
    daemon.answer = lambda _: admin.Status(0, msgspec.structs.replace(snapshot, peers=(slow,)))

    [finding] = neighbours(
        subject(
            f"sockets.admin={daemon.endpoint}",
            f"peers.connect.{peer.name}={peer.address}",
            "peers.listen=tcp://127.0.0.1:7409",
        )
    )

    assert finding.severity is POOR
    assert finding.what.startswith("device to host: emulated, 0.9 GB/s: UCX has no way of its own")
    assert finding.what.endswith("at about 1 GB/s (asked the running daemon)")
    assert finding.fix.startswith("keep the pool in host memory (no pool.device)")


def test_nobody_at_the_address_is_poor_with_the_reason():
    started_s = time.monotonic()
    [finding] = neighbours(about(f"tcp://127.0.0.1:{free_port()}"))

    assert finding.severity is POOR
    assert finding.what.endswith("cannot be reached: Connection refused")
    assert time.monotonic() - started_s < 3 * peers.CONNECT_S


def test_something_else_at_the_address_is_wrong():
    with socket.create_server(("127.0.0.1", 0)) as other:
        [finding] = neighbours(about(f"tcp://127.0.0.1:{other.getsockname()[1]}"))

    assert finding.severity is WRONG
    assert "takes connections and says no Hello within 2.5 s" in finding.what


@pytest.mark.slow
def test_a_peer_that_wants_keys_and_does_not_list_ours_is_wrong(tmp_path):
    """The key of this node is real, and unknown there."""
    curve.create_files(tmp_path, curve.new_pair())
    (tmp_path / "there").mkdir()
    theirs = curve.new_pair()
    curve.create_files(tmp_path / "there", theirs)
    settings = {
        **SMALL,
        "peers.secret_key_file": f"{tmp_path}/there/peer.secret",
        "peers.keys.other": curve.new_pair().public,
    }
    with one_daemon(tmp_path, settings, name="p") as daemon:
        [finding] = neighbours(
            about(
                daemon.peers,
                *SETS,
                f"peers.secret_key_file={tmp_path}/peer.secret",
                f"peers.keys.p={theirs.public}",
            )
        )

    assert finding.severity is WRONG
    assert finding.what.endswith(": the keys differ, or it has none")
    assert "peers.keys.p" in finding.fix


def test_a_peer_that_lists_our_key_answers_by_it(tmp_path):
    ours, theirs = curve.new_pair(), curve.new_pair()
    curve.create_files(tmp_path, ours)
    (tmp_path / "there").mkdir()
    curve.create_files(tmp_path / "there", theirs)
    settings = {
        **SMALL,
        "peers.secret_key_file": f"{tmp_path}/there/peer.secret",
        "peers.keys.d": ours.public,
    }
    with one_daemon(tmp_path, settings, name="p") as daemon:
        [finding] = neighbours(
            about(
                daemon.peers,
                *SETS,
                f"peers.secret_key_file={tmp_path}/peer.secret",
                f"peers.keys.p={theirs.public}",
            )
        )

    assert finding.severity is GOOD, finding.what


def test_a_question_is_never_a_hello_in_the_name_of_this_node():
    with Answerer() as peer:
        [finding] = neighbours(about(peer.address))

    assert finding.severity is GOOD
    assert isinstance(peer.heard, Ping)
    assert peer.heard.source.startswith("0" * 16)


def test_a_peer_of_another_protocol_is_wrong_with_both_versions():
    with Answerer(protocol=9) as peer:
        [finding] = neighbours(about(peer.address))

    assert finding.severity is WRONG
    assert "speaks peer protocol 9, this kvd speaks 1" in finding.what


@pytest.mark.parametrize(
    ("ours", "theirs", "severity", "said"),
    [
        (32, 16, POOR, "pages of d have 32 tokens, those of p only 16: ours can be cut"),
        (16, 32, WRONG, "pages of p have 32 tokens, those of d 16: they are cut only where"),
    ],
)
def test_page_sizes_that_differ_are_poor_where_pages_can_still_go_one_way(
    ours, theirs, severity, said
):
    spec = pool_spec(subject(f"pool.page_size={theirs}").config)
    with Answerer(layout=fingerprint(spec)) as peer:
        [finding] = neighbours(about(peer.address, f"pool.page_size={ours}"))

    assert finding.severity is severity
    assert said in finding.what


def test_a_peer_born_in_the_future_has_another_clock():
    ahead = f"{time.time_ns() + 3600 * 10**9:016x}{'0' * 16}"
    with Answerer(source=ahead) as peer:
        layout, clock = neighbours(about(peer.address))

    assert (layout.severity, clock.severity) == (GOOD, POOR)
    assert clock.what.startswith(("it was started 3600 s from now", "it was started 3599 s"))


def test_a_taken_port_names_who_has_it():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        [finding] = host.addresses(
            subject(
                "sockets.admin=ipc:///nowhere/a",
                f"peers.listen=tcp://127.0.0.1:{port}",
                "http.listen=off",
            )
        )

    assert finding.severity is WRONG
    assert f"127.0.0.1:{port} is taken by " in finding.what
    assert host.listener(port) == 0


def test_a_descriptor_that_closes_meanwhile_hides_no_process(monkeypatch):
    readlink, gone = os.readlink, []

    def once_gone(path):
        if str(path).startswith(f"/proc/{os.getpid()}/fd/") and not gone:
            gone.append(path)
            raise FileNotFoundError(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", once_gone)
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert host.listener(other.getsockname()[1]) == os.getpid()
    assert gone


def test_beside_a_running_daemon_its_own_pool_and_ports_are_no_trouble(prefill, tmp_path):
    """From the command line, as an operator would: another process, another file."""
    file = tmp_path / "kvd.toml"
    file.write_text(
        f'[node]\nname = "p"\n[pool]\nlayers = 1\nheads = 1\npages = 65\n'
        f'[sockets]\nclient = "{prefill.client}"\nadmin = "{prefill.admin}"\n'
        f'[peers]\nlisten = "{prefill.peers}"\n[http]\nlisten = "127.0.0.1:{prefill.http_port}"\n'
    )
    done = CliRunner().invoke(kvd, ["doctor", "--quick", "--format", "json", "--config", str(file)])

    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert findings["memory"]["what"] == f"the running daemon (pid {prefill.pid}) has its pool"
    assert findings["daemon"]["what"].startswith("p answers at ")
    assert "by the running daemon" in findings["peers.listen"]["what"]
    assert "by the running daemon" in findings["http.listen"]["what"]
