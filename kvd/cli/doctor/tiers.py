"""Checks of ``kvd doctor`` that look below the pool: the disk of [tiers.disk], [tiers.store], NIXL.

A tier that cannot be used costs hits and nothing else: what keeps it from ever serving is wrong all
the same, for it was asked for; a store that does not answer now is poor.

Nothing is written. NIXL is loaded by a child process; of a store no object is asked for.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvd.cli.doctor.finding import good, judged, poor, status_line, wrong
from kvd.cli.doctor.host import visible
from kvd.cli.doctor.service import SERVICE_USER
from kvd.cli.doctor.transport import PROBE_S, in_child, last_words
from kvd.cli.systemd_reach import user_called
from kvd.families.budget import size_bytes
from kvd.pools.mounts import mounts
from kvd.storage.nixl_objects import CUDA_MAJOR
from kvd.storage.posix import others_in
from kvd.text import clean
from kvd.types import amount

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.cli.doctor.finding import DoctorFinding, Subject
    from kvd.config.schema import StoreTierSection
    from kvd.pools.mounts import Mount

ANSWER_S: Final = 1.0
COUNTED_S: Final = 1.0
"""To add up what lies in a tier, which may be millions of files."""

MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
LAYERED: Final = frozenset({"overlay", "aufs"})
NETWORK: Final = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "wekafs", "afs"),
        *("glusterfs", "9p", "virtiofs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs"),
    }
)

POSIX: Final = """
from kvd.transfer.nixl import Binding
agent = Binding().agent("doctor", progress_delay_us=0)
agent.createBackend(
    "POSIX", {"use_aio": "true", "ios_pool_size": "256", "kernel_queue_size": "256"}
)
"""
OBJ: Final = f"""
from kvd.transfer.nixl import Binding
Binding({CUDA_MAJOR}).agent("doctor", progress_delay_us=0).getPluginParams("OBJ")
"""


# ---- a disk --------------------------------------------------------------------------------------


def disk(subject: Subject) -> list[DoctorFinding]:
    """The directory of a tier: whose it is, on what it lies, and whether its size fits."""
    section = subject.config.tiers_disk
    if section.directory is None:
        return []
    folder = Path(section.directory)
    out = [
        _directory(subject, folder),
        _file_system(subject, folder),
        _room(folder, size_bytes(section.size or "") or 0),
        _flushes(subject.config.cache.epochs_directory),
        _plugin("tier disk", "nixl_cu13 or nixl_cu12 with its POSIX plugin", POSIX),
    ]
    return [finding for finding in out if finding is not None]


def _user(subject: Subject) -> int:
    """Who runs the daemon: that of the one that runs, or of the service, or who asks."""
    who = judged(subject)
    if not who.pid and subject.has_systemd and not os.geteuid():
        service = user_called(SERVICE_USER).uid
        return max(service, 0)
    words = status_line(subject, who, "Uid").split()
    return int(words[1]) if len(words) > 1 else os.geteuid()


def _directory(subject: Subject, folder: Path) -> DoctorFinding:
    """As the storage process looks at it."""
    check, uid = f"tier disk in {folder}", _user(subject)
    made = f"install -d -m 0700 -o {uid} {folder}"
    if not os.path.exists(folder):
        above = visible(folder)
        if os.access(above, os.W_OK | os.X_OK):
            return good(check, "will be made by the daemon")
        return wrong(check, f"is not there, and {above} is not ours to make it in", made)
    if not folder.is_dir():
        return wrong(check, "is no directory", f"name another one, or remove it and: {made}")
    seen = folder.stat()
    mode = stat.S_IMODE(seen.st_mode)
    if seen.st_uid != uid or mode & 0o077:
        what = (
            f"of user {seen.st_uid} with mode {mode:04o}: pages of prompts are for user {uid}, "
            "who runs the daemon, alone, and the tier is not used"
        )
        return wrong(check, what, f"chown {uid} {folder} && chmod 0700 {folder}")
    return _content(check, folder, f"of user {uid}, mode {mode:04o}")


def _content(check: str, folder: Path, shown: str) -> DoctorFinding:
    """Whether kvd may remove what lies there."""
    try:
        others = others_in(str(folder))
    except PermissionError:
        what = f"{shown}: what lies there cannot be seen by this user"
        return poor(check, what, "run kvd doctor as root")
    if others:
        what = f"has {clean(others[0])} in it and is no tier of kvd, so it is not used"
        return wrong(check, what, "name an empty directory, or one that is not there")
    return good(check, shown)


def _file_system(subject: Subject, folder: Path) -> DoctorFinding | None:
    """Whether it is a disk; None where the kernel does not say."""
    check, path = "tier disk file system", os.path.realpath(folder)
    above: list[Mount] = []
    with contextlib.suppress(OSError):
        above += [
            mount
            for mount in mounts(subject.root)
            if f"{path}/".startswith(f"{mount.point.rstrip('/')}/")
        ]
    if not above:
        return None
    # The longest, and of those the last.
    found = max(reversed(above), key=lambda mount: len(mount.point))
    shown = f"{clean(found.kind)} at {clean(found.point)}"
    if found.kind in MEMORY:
        what = f"{shown} is memory: the pool could have it, and it is gone with the host"
        return poor(check, what, "name a directory on a disk, and give the memory to pool.size")
    if found.kind in NETWORK:
        what = (
            f"{shown} is over the network: kvd was not run on one, and a server that does not "
            "answer keeps the pages that are under way"
        )
        return poor(check, what, "name a directory on a disk of this host, or use [tiers.store]")
    if found.kind in LAYERED:
        what = f"{shown} is the layer of a container: it is slow, and gone with the container"
        return poor(check, what, f"mount a volume of the host at {folder}")
    return good(check, shown)


def _room(folder: Path, size: int) -> DoctorFinding:
    """Free space and what lies there already, against the size."""
    check = "tier disk size"
    free = shutil.disk_usage(visible(folder)).free
    if free >= size:
        return good(check, f"{amount(size)}; {amount(free)} free")
    there, is_all = _taken_bytes(folder)
    known = f"{'' if is_all else 'at least '}{amount(there)} taken by the tier"
    if free + there >= size:
        return good(check, f"{amount(size)}; {amount(free)} free, {known}")
    what = f"{amount(size)}, but {amount(free)} are free, with {known}"
    fits = f"{max(0, (free + there) // 2**20)}MiB"
    if not is_all:
        return poor(check, what, f"look: du -sh {folder}; then lower tiers.disk.size, or make room")
    fix = f"set tiers.disk.size to at most {fits}, or make room: a full disk costs hits"
    return poor(check, what, fix)


def _flushes(directory: str | None) -> DoctorFinding:
    """Where it is kept what was flushed, and the epochs: the disk outlives the host."""
    check = "tier disk after a flush"
    if directory is not None:
        return good(check, f"what was flushed is kept in {directory}")
    return poor(
        check,
        "without cache.epochs_directory a flush and a new epoch hold until this host is started "
        "again: what was on the disk before may be found then",
        'set cache.epochs_directory = "/var/lib/kvd"',
    )


def _taken_bytes(folder: Path) -> tuple[int, bool]:
    """What files there take, and whether all were counted within a second."""
    until_s, found = time.monotonic() + COUNTED_S, 0
    left = [str(folder)]
    while left:
        if time.monotonic() > until_s:
            return found, False
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                else:
                    found += entry.stat(follow_symlinks=False).st_blocks * 512
    return found, True


# ---- a store -------------------------------------------------------------------------------------


def store(subject: Subject) -> list[DoctorFinding]:
    """The store of a tier: whether it answers, who may read its keys, and NIXL's plugin for it."""
    section = subject.config.tiers_store
    if section.endpoint is None:
        return []
    return [
        *_reached(section, section.endpoint),
        _keys(subject, section.credentials_file),
        _plugin("tier store", f"nixl_cu{CUDA_MAJOR} with its OBJ plugin", OBJ),
    ]


def _keys(subject: Subject, path: str | None) -> DoctorFinding:
    """Its mode is a rule of the configuration; here whose it is."""
    check = "tier store keys"
    if path is None:
        what = "no credentials_file: AWS's chain is asked (environment, ~/.aws, role of the host)"
        return good(check, what)
    uid = _user(subject)
    try:
        seen = os.stat(path)
    except OSError as exc:
        what = f"{path} cannot be seen by this user: {exc.strerror}"
        return poor(check, what, "run kvd doctor as root, or as the user of the daemon")
    mode = stat.S_IMODE(seen.st_mode)
    if uid not in {0, seen.st_uid} or not mode & stat.S_IRUSR:
        what = f"{path} is of user {seen.st_uid} with mode {mode:04o}, and user {uid} cannot read"
        return wrong(check, f"{what} it", f"chown {uid} {path} && chmod 0600 {path}")
    return good(check, f"{path}, of user {seen.st_uid}, mode {mode:04o}")


def _reached(section: StoreTierSection, endpoint: str) -> list[DoctorFinding]:
    """Resolve, connect, and ask who is there: a second each."""
    check, url = f"tier store {endpoint}", urlsplit(endpoint)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    try:
        _within(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError as exc:
        fix = f"look: getent hosts {host}; correct tiers.store.endpoint, or the resolver"
        return [poor(check, f"{host} has no address: {exc.strerror or exc}", fix)]
    began_s = time.monotonic()
    try:
        _ask(url.scheme, host, port, section.ca_file)
    except ssl.SSLCertVerificationError as exc:
        fix = "set tiers.store.ca_file to the certificate of who signed the store's"
        return [wrong(check, f"its certificate is not believed: {exc.verify_message}", fix)]
    except http.client.HTTPException as exc:
        what = f"does not speak HTTP: {type(exc).__name__} {clean(str(exc))}"
        return [wrong(check, what, "correct tiers.store.endpoint: S3 is at another port")]
    except OSError as exc:
        what = f"does not answer within {ANSWER_S:g} s: {clean(exc.strerror or str(exc))}"
        fix = "start it, or correct tiers.store.endpoint; until then the tier is away"
        return [poor(check, what, fix)]
    return [good(check, f"answered within {(time.monotonic() - began_s) * 1e3:.0f} ms")]


def _ask(scheme: str, host: str, port: int, ca_file: str | None) -> None:
    """Any answer will do: without keys a store that is there refuses.

    Raises:
        OSError: nobody answers, or its certificate is not believed.
        http.client.HTTPException: what answers does not speak HTTP.
    """
    link = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    if scheme == "https":
        context = ssl.create_default_context(cafile=ca_file)
        link = http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=context)
    try:
        link.request("GET", "/")
        link.getresponse()
    finally:
        link.close()


def _within(ask: Callable[[], object]) -> None:
    """Ask the resolver, which has no limit of its own.

    Raises:
        OSError: it refuses, or takes longer than a second.
    """
    failed: list[OSError] = []

    def run() -> None:
        try:
            ask()
        except OSError as exc:
            failed.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if thread.is_alive():
        raise TimeoutError(f"the resolver did not answer within {ANSWER_S:g} s")
    if failed:
        raise failed[0]


# ---- NIXL ----------------------------------------------------------------------------------------


def _plugin(tier: str, wanted: str, program: str) -> DoctorFinding:
    """Whether a storage process can begin, as a child tries it."""
    check = f"{tier} by nixl"
    fix = f"pip install 'kvd[daemon]': it needs {wanted}"
    if program is POSIX:
        fix += "; where that is there, raise fs.aio-max-nr: sysctl -w fs.aio-max-nr=1048576"
    try:
        tried = in_child(program)
    except subprocess.TimeoutExpired:
        return wrong(check, f"takes more than {PROBE_S:.0f} s to begin", fix)
    except OSError as exc:
        return wrong(check, f"{sys.executable} cannot be started: {exc.strerror}", fix)
    if tried.returncode:
        return wrong(check, f"does not begin: {last_words(tried)}", fix)
    return good(check, wanted)
