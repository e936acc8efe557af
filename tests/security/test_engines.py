"""The sockets on this host: who can open them, and what a session can do to another."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import urllib.request

import msgspec
import pytest

import kvd.client
from kvd.client.blocking import attach
from kvd.daemon.listeners import own_directory
from kvd.daemon.socket_activation import UnfitConfig
from kvd.errors import Code
from kvd.wire import admin, client
from kvd.wire.attach import Attach
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS
from tests.daemon.conftest import until
from tests.daemon.intruder import RawSession, Wire

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
PROMPT = [1_234_567_891, 1_098_765_432, 1_122_334_455] * 20
SALT = "salt-of-a-tenant"

CONNECT = """
import os, socket, sys
path, kind, group = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgroups([])
os.setgid(group)
os.setuid({nobody})
assert os.stat(path), "the way to it is open"
with socket.socket(socket.AF_UNIX, kind) as probe:
    try:
        probe.connect(path)
        print("connected")
    except PermissionError:
        print("refused")
"""


def connect_as_nobody(path, kind, group):
    """What becomes of a connection to a socket file from another user with this one group."""
    done = subprocess.run(
        [sys.executable, "-c", CONNECT.format(nobody=NOBODY), path, str(int(kind)), str(group)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def socket_files(daemon):
    """Path and kind of every unix socket of a daemon."""
    return [
        (daemon.client.removeprefix("ipc://"), socket.SOCK_STREAM),
        (daemon.attach, socket.SOCK_SEQPACKET),
        (daemon.admin.removeprefix("ipc://"), socket.SOCK_STREAM),
    ]


# ---- who can open them ---------------------------------------------------------------------------


def test_socket_files_are_for_the_user_and_the_group(keyed):
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path, _ in socket_files(keyed.pair.prefill)]
    assert modes == [0o660] * 3


@needs_root
def test_another_user_outside_the_group_cannot_connect(keyed):
    group = os.stat(keyed.pair.prefill.attach).st_gid
    for path, kind in socket_files(keyed.pair.prefill):
        assert connect_as_nobody(path, kind, NOBODY) == "refused"
        assert connect_as_nobody(path, kind, group) == "connected", "or the refusal proves nothing"


def test_a_directory_that_anyone_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(UnfitConfig, match=f"chmod o-w {tmp_path}"):
        own_directory(tmp_path, None)

    tmp_path.chmod(0o1777)  # as /tmp: only its owner may remove a file
    own_directory(tmp_path, None)


@needs_root
def test_a_directory_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, NOBODY, -1)
    with pytest.raises(UnfitConfig, match=f"belongs to uid {NOBODY}"):
        own_directory(tmp_path, None)


def test_a_session_shows_the_process_that_the_kernel_names(keyed):
    daemon = keyed.pair.prefill
    with contextlib.closing(attach(daemon.client, Attach("whoever"))):
        (found,) = [one for one in daemon.snapshot().clients if one.name == "whoever"]
    assert found.pids == (os.getpid(),)


JOIN = """
import os, sys
import kvd.client
endpoint, group, user, key, wait_s = sys.argv[1:]
os.setgroups([])
os.setgid(int(group))
os.setuid(int(user))
try:
    worker = kvd.client.join(endpoint, key=key, wait_s=float(wait_s))
    print("joined", worker.session)
    worker.close()
except kvd.client.KvdError as error:
    print(error.code, error.refusal.numbers.get("uid"))
"""


def join_as(daemon, user, key, wait_s):
    """What becomes of a process of that user, in the group of the sockets, that joins by a key."""
    group = os.stat(daemon.attach).st_gid
    done = subprocess.run(
        [sys.executable, "-c", JOIN, daemon.client, *map(str, (group, user, key, wait_s))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_root
def test_a_key_lets_in_processes_of_its_user_alone(keyed):
    daemon = keyed.pair.prefill
    with kvd.client.connect_sync(daemon.client, name="keyed", key="not secret") as node:
        mine = join_as(daemon, os.geteuid(), "not secret", 5)
        theirs = join_as(daemon, NOBODY, "not secret", 0.2)
        with kvd.client.connect_sync(daemon.client, name="other", key="other") as other:
            assert join_as(daemon, os.geteuid(), "other", 5) == f"joined {other.session}"

        assert mine == f"joined {node.session}"
        assert theirs == f"deadline {NOBODY}"


# ---- what one session can do to another ----------------------------------------------------------


@pytest.fixture
def session(keyed):
    one = RawSession(keyed.pair.prefill)
    yield one
    one.close()


def test_a_guessed_identity_is_of_no_session(keyed):
    wire = Wire(keyed.pair.prefill.client, CLIENT_REPLIES, b"S" + bytes(16))
    try:
        answer = wire.asked(CLIENT_REQUESTS.encode(client.GetSnapshot(1)))
    finally:
        wire.close()
    assert answer.refusal.code is Code.UNKNOWN_SESSION


def test_a_stolen_identity_gets_nothing_while_its_owner_is_connected(keyed, session):
    ask = CLIENT_REQUESTS.encode(client.GetSnapshot(1))
    assert isinstance(session.asked(ask), client.Snapshotted)
    thief = Wire(keyed.pair.prefill.client, CLIENT_REPLIES, session.attachment.attached.token)
    try:
        thief.say(ask)
        assert not thief._socket.poll(200)
        assert isinstance(session.asked(ask), client.Snapshotted)
        assert not thief._socket.poll(0)
    finally:
        thief.close()


def test_an_identity_dies_with_its_last_process(keyed):
    daemon = keyed.pair.prefill
    attachment = attach(daemon.client, Attach("short"))
    token = attachment.attached.token
    attachment.close()
    until(lambda: "short" not in {one.name for one in daemon.snapshot().clients})

    wire = Wire(daemon.client, CLIENT_REPLIES, token)
    try:
        answer = wire.asked(CLIENT_REQUESTS.encode(client.GetSnapshot(1)))
    finally:
        wire.close()
    assert answer.refusal.code is Code.UNKNOWN_SESSION


def test_a_session_cannot_release_the_lease_of_another(keyed, session):
    with kvd.client.connect_sync(keyed.pair.prefill.client, name="owner") as node:
        lease = node.lease(PROMPT, cache=False)
        code = session.request(client.ReleaseLease(1, lease.id))
        assert code is Code.UNKNOWN_LEASE
        lease.release(())


def test_an_engine_can_read_and_write_every_page(keyed):
    """Not a promise: what mapping the pool means, and why only trusted engines are in the group."""
    daemon = keyed.pair.prefill
    with (
        kvd.client.connect_sync(daemon.client, name="one") as one,
        kvd.client.connect_sync(daemon.client, name="other") as other,
    ):
        lease = one.lease(PROMPT, cache=False)
        page = int(lease.pages[0])
        mine, _ = one.pool("main").layer(0)
        theirs, _ = other.pool("main").layer(0)
        mine[page] = 3.0
        assert float(theirs[page, 0, 0, 0]) == 3.0
        theirs[page] = 4.0
        assert float(mine[page, 0, 0, 0]) == 4.0
        lease.release(())


# ---- HTTP ----------------------------------------------------------------------------------------


def page_of(daemon, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/{name}") as page:
        return page.read().decode()


def test_http_shows_no_tokens_of_prompts_no_salts_and_no_session_tokens(keyed, session):
    daemon = keyed.pair.prefill
    with kvd.client.connect_sync(daemon.client, name="engine") as node:
        lease = node.lease(PROMPT, namespace=SALT)
        pages = {name: page_of(daemon, name) for name in ("status", "info", "metrics")}
        lease.release()

    secret_token = session.attachment.attached.token
    hidden = [str(token) for token in set(PROMPT)] + [SALT, secret_token.hex()]
    shown = {name: [one for one in hidden if one in text] for name, text in pages.items()}
    assert shown == {"status": [], "info": [], "metrics": []}
    (held,) = json.loads(pages["status"])["leases"]
    assert (held["owner"], held["namespace"], held["pid"]) == ("engine", "(set)", os.getpid())


def test_an_operator_sees_the_first_tokens_of_a_prompt_and_no_more(keyed):
    daemon = keyed.pair.prefill
    prompt = [1_500_000_000 + number for number in range(64)]
    with kvd.client.connect_sync(daemon.client, name="engine") as node:
        lease = node.lease(prompt)
        lease.release(())

    tree = msgspec.json.encode(daemon.ask(admin.ShowTree(1), admin.Tree)).decode()

    assert [number for number in range(64) if str(prompt[number]) in tree] == list(range(8))
    daemon.ask(admin.Flush(1), admin.Report)


def test_http_listens_on_loopback_only(keyed):
    daemon = keyed.pair.prefill
    with open(f"/proc/{daemon.pid}/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    port = f"{daemon.http_port:04X}"
    local = {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")}
    assert local == {f"0100007F:{port}"}
