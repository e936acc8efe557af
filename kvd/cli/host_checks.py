"""Checks of ``kvd doctor`` that look at this host: versions, memory, directories, addresses.

Each takes the ``Subject`` and returns findings; none changes anything or needs a daemon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import sys
from importlib import metadata
from pathlib import Path

from kvd.cli.exits import Unreachable
from kvd.cli.finding import Finding, Subject, good, poor, wrong
from kvd.cli.link import CALL, Target, ask
from kvd.cli.permission_checks import visible
from kvd.config.address import Address, host_port, ipc_path, tcp_address
from kvd.text import amount, clean
from kvd.wire.admin import ShowStatus, Status

PYTHON = (3, 11)
NEEDED = ("pyzmq", "pynacl", "msgspec", "numpy", "uvloop", "structlog", "h11", "xxhash")
ENGINE_ONLY = "torch"
THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
COLLAPSE_SINCE = (6, 1)
ANSWER_S = 0.5
LISTENING = "0A"
"""In /proc/net/tcp."""


def versions(_subject: Subject) -> list[Finding]:
    """Python and the packages, by their installed versions: nothing is imported."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    out = [good("python", found)]
    if sys.version_info[:2] < PYTHON:
        out = [wrong("python", f"{found} is too old", "use Python 3.11 or newer")]
    missing = [name for name in NEEDED if _version(name) is None]
    if missing:
        fix = "install kvd again: pip install -c constraints.txt kvd"
        out.append(wrong("packages", f"not installed: {', '.join(missing)}", fix))
    else:
        out.append(good("packages", ", ".join(f"{name} {_version(name)}" for name in NEEDED)))
    torch = _version(ENGINE_ONLY)
    if torch is None:
        fix = "pip install torch where engines map the pool; the daemon needs none"
        out.append(poor("torch", "not installed", fix))
    else:
        out.append(good("torch", f"{torch} (for engines; the daemon loads none)"))
    return out


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def shared_memory(_subject: Subject) -> list[Finding]:
    """Room in /dev/shm: UCX puts its small shared segments there."""
    here = Path("/dev/shm")
    if not here.is_dir():
        fix = "mount -t tmpfs tmpfs /dev/shm (in a container: --ipc=host or --shm-size)"
        return [poor("/dev/shm", "there is none", fix)]
    free = shutil.disk_usage(here).free
    if free < 64 * 2**20:
        fix = "remove what is left over there, or enlarge it: mount -o remount,size=1G /dev/shm"
        return [poor("/dev/shm", f"only {amount(free)} free", fix)]
    return [good("/dev/shm", f"{amount(free)} free")]


def huge_pages(subject: Subject) -> list[Finding]:
    """Whether the kernel can give the pool 2 MiB pages: about twice the bandwidth on one host."""
    if subject.config.pool.huge_pages == "off":
        return [good("huge pages", "switched off by pool.huge_pages")]
    if subject.config.pool.backing == "hugetlbfs":
        return [good("huge pages", "pool.backing = hugetlbfs is made of them")]
    release = os.uname().release
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else COLLAPSE_SINCE
    if not THP.is_file():
        fix = "use a kernel with transparent huge pages, or set pool.huge_pages = 'off'"
        return [poor("huge pages", "this kernel has none for shared memory", fix)]
    if version < COLLAPSE_SINCE:
        fix = f"echo advise > {THP}, or use Linux 6.1 or newer"
        return [poor("huge pages", f"Linux {release} cannot collapse pages on request", fix)]
    chosen = re.search(r"\[(\w+)\]", THP.read_text())
    if chosen is not None and chosen[1] == "deny":
        return [poor("huge pages", "shared memory is denied them", f"echo never > {THP}")]
    return [good("huge pages", f"Linux {release} collapses pages on request")]


def runtime_directory(subject: Subject) -> list[Finding]:
    """Whether the sockets can be made where the configuration puts them, and by whom else."""
    sockets = subject.config.sockets
    paths = [ipc_path(endpoint) for endpoint in (sockets.client, sockets.admin)]
    folders = dict.fromkeys(Path(path).parent for path in paths if path is not None)
    return [_folder(folder) for folder in folders]


def _folder(folder: Path) -> Finding:
    name = f"sockets in {folder}"
    fix = f"install -d -m 0750 {folder}, owned by the user that runs kvd"
    if not os.path.exists(folder):
        above = visible(folder)
        if os.access(above, os.W_OK | os.X_OK):
            return good(name, "will be made by the daemon")
        return wrong(name, f"does not exist, and {above} is not ours to make it in", fix)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return wrong(name, "is no directory that this user may write to", fix)
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        what = f"mode {stat.S_IMODE(mode):04o} lets anyone replace the sockets"
        return wrong(name, what, f"chmod o-w {folder}")
    return good(name, f"mode {stat.S_IMODE(mode):04o}")


def addresses(subject: Subject) -> list[Finding]:
    """Whether the configured ports are free, and if not, who answers."""
    config = subject.config
    running = _who_answers(config.sockets.admin)
    out = [running] if running is not None else []
    wanted = {
        "peers.listen": tcp_address(config.peers.listen),
        "http.listen": host_port(config.http.listen),
    }
    for key, address in wanted.items():
        if address is not None and address.port:
            out.append(_port(key, address, running))
    return out


def _who_answers(endpoint: str) -> Finding | None:
    """The daemon on the configured admin socket, if one is there."""
    path = ipc_path(endpoint)
    if path is None:
        return None
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return None
    except PermissionError:
        what = f"{Path(path).parent} is closed to this user: whether a daemon runs cannot be seen"
        return poor("daemon", what, "run kvd doctor as root, or: usermod -aG kvd $USER")
    except OSError:
        return None
    try:
        shot = ask(Target(endpoint, ANSWER_S), ShowStatus(CALL), Status).snapshot
    except Unreachable:
        fix = f"start kvd, which replaces it, or remove {path}"
        return poor("daemon", f"{path} is there, but nobody answers", fix)
    return good("daemon", f"{clean(shot.node)} answers at {path}, kvd {clean(shot.version)}")


def _port(key: str, address: Address, running: Finding | None) -> Finding:
    """Try to bind it, as the daemon will."""
    host = "" if address.host == "*" else address.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    shown = f"{address.host}:{address.port}"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, address.port))
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                fix = f"give {key} an address of this host and a port above 1023"
                if exc.errno == errno.EADDRNOTAVAIL:
                    fix = f"give {key} one of the addresses of this host: ip -brief address"
                return wrong(key, f"{shown} cannot be bound: {exc.strerror}", fix)
            if running is not None and not running.fix:
                return good(key, f"{shown} is taken, by the running daemon as it seems")
            fix = f"see who has it (ss -ltnp 'sport = :{address.port}'), or change {key}"
            return wrong(key, f"{shown} is taken{_by(listener(address.port))}", fix)
    return good(key, f"{shown} is free")


def _by(pid: int) -> str:
    if not pid:
        return ", by a process that this user may not see"
    name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return f" by {clean(name)} (pid {pid})"


def listener(port: int) -> int:
    """The process that listens on a TCP port of this host; 0 where it cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(entry) in sockets for entry in (folder / "fd").iterdir()):
                return int(folder.name)
    return 0


def _listening(port: int) -> list[str]:
    """Inodes of the sockets that listen on it."""
    inodes = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                inodes.append(words[9])
    return inodes
