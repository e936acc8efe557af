"""``kvd doctor``: what lies below the pool, a disk and a store."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.cli.doctor import tiers
from kvd.cli.doctor.finding import DoctorFinding, Severity
from kvd.cli.systemd_reach import User
from tests.cli.inchild import in_child, nobody, subject, write

if TYPE_CHECKING:
    from collections.abc import Iterator

GOOD, POOR, WRONG = Severity.GOOD, Severity.POOR, Severity.WRONG
DISK = "tier disk in {}"
REAL = {"POSIX": tiers.POSIX, "OBJ": tiers.OBJ}

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def of_disk(folder: Path, *sets: str, size: str = "1GiB", root: Path | None = None):
    """What is said of a tier there, by check."""
    keys = [f"tiers.disk.directory={folder}", f"tiers.disk.size={size}", *sets]
    about = subject(*keys) if root is None else subject(*keys, root=root)
    return {one.check: one for one in tiers.disk(about)}


@pytest.fixture(autouse=True)
def no_nixl(monkeypatch):
    """A child that begins at once, as if NIXL were there."""
    monkeypatch.setattr(tiers, "POSIX", "")
    monkeypatch.setattr(tiers, "OBJ", "")


def test_without_tiers_nothing_is_said():
    assert tiers.disk(subject()) == tiers.store(subject()) == []


# ---- a disk --------------------------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_made_by_the_daemon_and_not_by_the_doctor(tmp_path):
    found = of_disk(tmp_path / "deep" / "tier")

    assert found[DISK.format(tmp_path / "deep" / "tier")].severity is GOOD
    assert not (tmp_path / "deep").exists()


def test_a_directory_that_others_may_read_is_wrong_and_says_what_to_type(tmp_path):
    tmp_path.chmod(0o755)

    finding = of_disk(tmp_path)[DISK.format(tmp_path)]

    assert finding.severity is WRONG
    assert "with mode 0755" in finding.what
    assert finding.fix == f"chown {os.geteuid()} {tmp_path} && chmod 0700 {tmp_path}"


@root_only
def test_a_directory_of_another_user_is_wrong(tmp_path):
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 65534, 65534)

    assert of_disk(tmp_path)[DISK.format(tmp_path)].severity is WRONG


@root_only
def test_for_a_service_it_is_the_user_of_the_service_that_counts(tmp_path, monkeypatch):
    """Root asks, and nothing runs yet."""
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    tier = tmp_path / "tier"
    tier.mkdir(mode=0o700)
    os.chown(tier, 4711, 4711)
    monkeypatch.setattr(tiers, "user_called", lambda name: User(name, 4711))

    for_service = of_disk(tier, root=tmp_path)[DISK.format(tier)]
    by_hand = of_disk(tier)[DISK.format(tier)]

    assert (for_service.severity, by_hand.severity) == (GOOD, WRONG)


def test_a_directory_with_things_of_others_is_wrong_and_one_of_a_tier_is_not(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "thesis").write_text("x")
    before = of_disk(tmp_path)[DISK.format(tmp_path)]
    (tmp_path / "kvd-tier").write_text("x")
    after = of_disk(tmp_path)[DISK.format(tmp_path)]

    assert (before.severity, after.severity) == (WRONG, GOOD)
    assert before.what.startswith("has thesis in it")


@pytest.mark.parametrize(
    ("kind", "severity", "word"),
    [
        ("ext4", GOOD, "ext4 at /var/lib/kvd tiers"),
        ("tmpfs", POOR, "is memory"),
        ("nfs4", POOR, "is over the network"),
        ("overlay", POOR, "gone with the container"),
    ],
)
def test_memory_network_and_layers_of_containers_are_poor(tmp_path, kind, severity, word):
    """Of two mounts the longer one counts, and of one place the later; a blank is escaped."""
    write(
        tmp_path,
        proc__self__mountinfo="\n".join(
            [
                "22 1 0:21 / / rw - xfs /dev/a rw",
                r"23 22 0:22 / /var/lib/kvd\040tiers rw - squashfs /dev/b rw",
                rf"24 22 0:23 / /var/lib/kvd\040tiers rw shared:1 - {kind} /dev/c rw",
                "25 22 0:24 / /var/lib/kvd rw - btrfs /dev/d rw",
            ]
        ),
    )
    there = Path("/var/lib/kvd tiers/disk")

    found = of_disk(there, root=tmp_path)["tier disk file system"]

    assert found.severity is severity
    assert word in found.what


def test_a_size_that_does_not_fit_is_poor_with_the_one_that_does(tmp_path):
    tmp_path.chmod(0o700)
    free = shutil.disk_usage(tmp_path).free

    finding = of_disk(tmp_path, size=f"{2 * free // 2**30 + 1}GiB")["tier disk size"]

    assert finding.severity is POOR
    fits = int(finding.fix.split("at most ")[1].split("MiB")[0])
    assert 0.9 * free < fits * 2**20 < 1.1 * free
    assert of_disk(tmp_path, size="1GiB")["tier disk size"].severity is GOOD


def test_a_disk_whose_flushes_are_forgotten_with_the_host_is_poor(tmp_path):
    check = "tier disk after a flush"
    found = of_disk(tmp_path)[check]
    assert (found.severity, found.fix[:27]) == (POOR, "set cache.epochs_directory ")
    kept = of_disk(tmp_path, f"cache.epochs_directory={tmp_path}")[check]
    assert (kept.severity, str(tmp_path) in kept.what) == (GOOD, True)


def test_what_the_tier_has_taken_already_counts_as_its_own(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    (tmp_path / "kvd-tier").write_text("x")
    (tmp_path / "object").write_bytes(bytes(2**20))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(tiers.shutil, "disk_usage", lambda _: usage._replace(free=2**30 - 2**20))

    finding = of_disk(tmp_path, size="1GiB")["tier disk size"]

    assert finding.severity is GOOD
    assert "1.0 MiB taken by the tier" in finding.what


def test_a_storage_process_that_could_not_begin_is_wrong_with_the_words_of_nixl(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tiers, "POSIX", "raise RuntimeError('no libaio here')")

    finding = of_disk(tmp_path)["tier disk by nixl"]

    assert finding.severity is WRONG
    assert finding.what.endswith("RuntimeError: no libaio here")
    assert "fs.aio-max-nr" in finding.fix


def test_what_a_storage_process_begins_with_is_there(tmp_path, monkeypatch):
    for name, program in REAL.items():
        monkeypatch.setattr(tiers, name, program)

    by_disk = of_disk(tmp_path)["tier disk by nixl"]
    by_store = of_store("http://127.0.0.1:1", tmp_path)[-1]

    assert (by_disk.severity, by_store.severity) == (GOOD, GOOD), (by_disk, by_store)


# ---- a store -------------------------------------------------------------------------------------


class Refusing(http.server.BaseHTTPRequestHandler):
    """A store that wants keys."""

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def answering(certificate: Path | None = None) -> Iterator[int]:
    """The port of one."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def of_store(endpoint: str, tmp_path: Path, *sets: str) -> list[DoctorFinding]:
    return tiers.store(
        subject(
            f"tiers.store.endpoint={endpoint}",
            "tiers.store.bucket=kvd",
            f"cache.epochs_directory={tmp_path}",
            *sets,
        )
    )


def test_a_store_that_answers_anything_is_good(tmp_path):
    with answering() as port:
        findings = of_store(f"http://127.0.0.1:{port}", tmp_path)

    assert [one.severity for one in findings] == [GOOD] * 3
    assert findings[0].what.startswith("answered within")


def test_one_that_is_not_there_is_silent_or_has_no_address_is_poor_within_its_time(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        began_s = time.monotonic()
        found = [
            of_store(f"http://{where}", tmp_path, "tiers.store.insecure=true")[0]
            for where in (
                f"127.0.0.1:{silent.getsockname()[1]}",
                f"127.0.0.1:{closed.getsockname()[1]}",
                "no-such-host.invalid:9000",
            )
        ]
        took_s = time.monotonic() - began_s

    assert [one.severity for one in found] == [POOR] * 3
    assert found[0].what == "does not answer within 1 s: timed out"
    assert found[1].what == "does not answer within 1 s: Connection refused"
    assert "has no address" in found[2].what
    assert took_s < 15


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_certificate_that_nobody_believes_is_wrong_and_good_with_its_file(tmp_path):
    both, key = tmp_path / "both.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(both)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text(both.read_text() + key.read_text())
    with answering(both) as port:
        endpoint = f"https://localhost:{port}"
        bare = of_store(endpoint, tmp_path)[0]
        believed = of_store(endpoint, tmp_path, f"tiers.store.ca_file={both}")[0]

    assert (bare.severity, believed.severity) == (WRONG, GOOD)
    assert "tiers.store.ca_file" in bare.fix


@root_only
def test_keys_that_the_daemon_cannot_read_are_wrong(tmp_path):
    # Beside other workers there is one directory more.
    for above in (tmp_path, *tmp_path.parents):
        if above.name.startswith(("test_", "popen-", "pytest-")):
            above.chmod(0o755)
    keys = tmp_path / "keys"
    keys.write_text("[default]\n")
    keys.chmod(0o600)
    about = subject(
        "tiers.store.endpoint=http://127.0.0.1:1",
        "tiers.store.bucket=kvd",
        f"tiers.store.credentials_file={keys}",
        f"cache.epochs_directory={tmp_path}",
    )

    own = in_child(lambda: None, tiers.store, about)["tier store keys"]
    others = in_child(nobody, tiers.store, about)["tier store keys"]

    assert (own.severity, others.severity) == (GOOD, WRONG)
    assert others.fix == f"chown 65534 {keys} && chmod 0600 {keys}"
