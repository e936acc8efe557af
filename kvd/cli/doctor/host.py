"""Checks of this host: versions, directories, ports, who may do what, limits, clocks.

Each takes the ``Subject`` and returns findings; none changes anything or needs a daemon. Where a
daemon runs, its limits are judged, not those of the shell that asks.

Deadlines, silences and ages are measured by the monotonic clock, which nobody can set. Of two lives
of a daemon a lock file says which is the later one. The time of day is in what is written down:
events, logs, recordings. Peers of before there were homes compare lives by it too.
"""

from __future__ import annotations

import ctypes
import errno
import grp
import os
import pwd
import re
import resource
import shutil
import socket
import stat
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec

from kvd.cli.doctor.finding import (
    DoctorFinding,
    Judged,
    Subject,
    good,
    judged,
    poor,
    status_line,
    wrong,
)
from kvd.cli.exits import Unreachable
from kvd.cli.link import CALL, Target, ask
from kvd.config.address import Address, host_port, ipc_path, tcp_address
from kvd.config.pool import pool_spec
from kvd.core.layout.spec import Buffer, has_bytes, node_page_bytes, shards_of
from kvd.daemon.inherited import files_of
from kvd.parts import CLIENT, EXTRAS
from kvd.text import clean
from kvd.types import amount
from kvd.wire.admin import ShowStatus, Status

PYTHON = (3, 11)
NEEDED = (*CLIENT, *(name for name in EXTRAS["daemon"] if name != "nixl"))
"""Of a daemon; NIXL is looked at by itself, for it may be there and not load."""
ENGINE_ONLY = "torch"
THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
COLLAPSE_SINCE = (6, 1)
ANSWER_S = 0.5
LISTENING = "0A"
"""In /proc/net/tcp."""


def versions(_subject: Subject) -> list[DoctorFinding]:
    """Python and the packages, by their installed versions: nothing is imported."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    out = [good("python", found)]
    if sys.version_info[:2] < PYTHON:
        out = [wrong("python", f"{found} is too old", "use Python 3.11 or newer")]
    there = {name: _version(name) for name in NEEDED}
    if missing := [name for name, version in there.items() if version is None]:
        fix = "pip install -c constraints.txt 'kvd[daemon]'"
        out.append(wrong("packages", f"not installed: {', '.join(missing)}", fix))
    else:
        shown = ", ".join(f"{name} {version}" for name, version in there.items())
        out.append(good("packages", shown))
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


def shared_memory(_subject: Subject) -> list[DoctorFinding]:
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


def huge_pages(subject: Subject) -> list[DoctorFinding]:
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
    if "[deny]" in THP.read_text():
        return [poor("huge pages", "shared memory is denied them", f"echo never > {THP}")]
    return [good("huge pages", f"Linux {release} collapses pages on request")]


def runtime_directory(subject: Subject) -> list[DoctorFinding]:
    """Whether the sockets can be made where the configuration puts them, and by whom else."""
    sockets = subject.config.sockets
    paths = [ipc_path(endpoint) for endpoint in (sockets.client, sockets.admin)]
    folders = dict.fromkeys(Path(path).parent for path in paths if path is not None)
    return [_folder(folder) for folder in folders]


def _folder(folder: Path) -> DoctorFinding:
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


def addresses(subject: Subject) -> list[DoctorFinding]:
    """Whether the configured ports are free, and if not, who answers."""
    config = subject.config
    running = _who_answers(config.sockets.admin)
    out = [running] if running is not None else []
    wanted = {
        "peers.listen": tcp_address(config.peers.listen),
        "http.listen": host_port(config.http.listen),
    }
    if config.kv_events.enabled:
        wanted["kv_events.listen"] = tcp_address(config.kv_events.listen)
        wanted["kv_events.replay"] = tcp_address(config.kv_events.replay)
    for key, address in wanted.items():
        if address is not None and address.port:
            out.append(_port(key, address, running))
    return out


def _who_answers(endpoint: str) -> DoctorFinding | None:
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


def _port(key: str, address: Address, running: DoctorFinding | None) -> DoctorFinding:
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
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    sockets = {
        f"socket:[{words[9]}]"
        for words in lines
        if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port
    }
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and not sockets.isdisjoint(files_of(int(folder.name))):
            return int(folder.name)
    return 0


# ---- who may do what ----------------------------------------------------------------------------


def user(subject: Subject) -> list[DoctorFinding]:
    """Who runs this, and whether the sockets can be given to the configured group."""
    uid = os.geteuid()
    name = _user_name(uid)
    me, group = f"{name} (uid {uid})", subject.config.sockets.group
    if group is None:
        return [good("user", f"{me}; sockets belong to its group {_group_name(os.getegid())}")]
    try:
        entry = grp.getgrnam(group)
    except KeyError:
        what = f"{me}; there is no group {group} to give the sockets to"
        return [wrong("user", what, f"groupadd --system {group}")]
    if uid != 0 and entry.gr_gid not in {os.getegid(), *os.getgroups()}:
        what = f"{me} is not in group {group}, so it cannot give the sockets to it"
        fix = f"usermod -aG {group} {name}, and log in anew; or remove sockets.group"
        return [wrong("user", what, fix)]
    # Users are of a group by its list, or because it is their primary one.
    primary = [user.pw_name for user in pwd.getpwall() if user.pw_gid == entry.gr_gid]
    if members := sorted({*entry.gr_mem, *primary}):
        return [good("user", f"{me}; group {group}: {', '.join(members)}")]
    what = f"nobody is in group {group}: only {name} and root can connect to the sockets"
    return [poor("user", what, f"usermod -aG {group} USER, with the user of the engines")]


def recordings(subject: Subject) -> list[DoctorFinding]:
    """Whether the flight recorder can write where it is to, and has room for one recording."""
    recorder = subject.config.recorder
    if not recorder.enabled:
        return []
    beside = Path(ipc_path(subject.config.sockets.admin) or "/").parent / "recordings"
    folder = Path(recorder.directory) if recorder.directory is not None else beside
    above = visible(folder)
    name = f"recordings in {folder}"
    if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
        fix = f"install -d -m 0700 -o {_user_name(os.geteuid())} {folder}"
        return [poor(name, f"{above} is no directory that this user may write to", fix)]
    free = shutil.disk_usage(above).free
    if free < recorder.max_bytes:
        what = f"{amount(free)} free, one recording takes up to {amount(recorder.max_bytes)}"
        fix = "set recorder.directory to a larger file system, or lower recorder.max_bytes"
        return [poor(name, what, fix)]
    return [good(name, f"{amount(free)} free")]


def visible(path: Path) -> Path:
    """The path if this user can see it, else the nearest of its parents that can be seen."""
    return next(ancestor for ancestor in (path, *path.parents) if os.path.exists(ancestor))


def devices(subject: Subject) -> list[DoctorFinding]:
    """Whether this user may use the RDMA devices and GPUs that the host has."""
    return [*_rdma(subject), *_gpus(subject)]


def _rdma(subject: Subject) -> list[DoctorFinding]:
    found = subject.rdma
    if not found:
        return []
    nodes = [
        node
        for node in subject.entries("dev/infiniband")
        if node.name.startswith("uverbs") or node.name == "rdma_cm"
    ]
    shown = ", ".join(found)
    if not any(node.name.startswith("uverbs") for node in nodes):
        what = f"{shown}, but no /dev/infiniband/uverbs*: UCX goes by TCP"
        fix = "modprobe ib_uverbs rdma_ucm; in a container: --device=/dev/infiniband"
        return [poor("rdma", what, fix)]
    shut = _not_ours(nodes)
    if shut:
        what = f"{shown}: {', '.join(shut)} may not be opened by this user; UCX goes by TCP"
        return [poor("rdma", what, f"chmod 0666 {' '.join(shut)} (rdma-core has a udev rule)")]
    return [good("rdma", f"{shown}: {', '.join(str(node) for node in nodes)} may be opened")]


def _gpus(subject: Subject) -> list[DoctorFinding]:
    """Engines use them; the daemon only once a pool lies there."""
    gpus = [e.name for e in subject.entries("sys/bus/pci/drivers/nvidia") if ":" in e.name]
    nodes = [node for node in subject.entries("dev") if node.name.startswith("nvidia")]
    nodes = [node for node in nodes if not node.is_dir()]
    if not gpus and not nodes:
        return []
    if not nodes:
        what = f"{len(gpus)} NVIDIA GPUs, but no /dev/nvidia*: engines here cannot use them"
        return [poor("gpu", what, "nvidia-modprobe -u -c=0; in a container: --gpus all")]
    shut = _not_ours(nodes)
    if shut:
        what = f"{', '.join(shut)} may not be opened by this user"
        return [poor("gpu", what, f"chmod 0666 {' '.join(shut)}, or join their group: ls -l")]
    return [good("gpu", f"{', '.join(node.name for node in nodes)} may be opened")]


def _not_ours(nodes: list[Path]) -> list[str]:
    return [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]


def credentials(subject: Subject) -> list[DoctorFinding]:
    """What systemd passes to a service: there only inside of one."""
    place = subject.environ.get("CREDENTIALS_DIRECTORY", "")
    if not place:
        return []
    folder = Path(place)
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as exc:
        fix = "systemctl daemon-reload && systemctl restart kvd"
        return [wrong("credentials", f"{place} cannot be read: {exc.strerror}", fix)]
    shut = [name for name in names if not os.access(folder / name, os.R_OK)]
    if shut:
        fix = "see LoadCredential= of the unit: systemctl cat kvd"
        return [wrong("credentials", f"{', '.join(shut)} in {place} cannot be read", fix)]
    return [good("credentials", f"{place}: {', '.join(names) or 'none'}")]


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid-{uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid-{gid}"


# ---- what a daemon may take ---------------------------------------------------------------------


OWN_FILES = 128
"""Descriptors of a daemon without clients and peers: sockets, epoll, regions, recorder."""
FILES_OF_CLIENT = 3
FILES_OF_SHARD = 2
"""Of each beyond the first: a region, and one of saved pages."""
FILES_OF_PEER = 14
"""Its sockets in the daemon, and a sending agent with its connections in the transfer process."""

CAP_IPC_LOCK = 14
CAP_SYS_PTRACE = 19


def locked_memory(subject: Subject) -> list[DoctorFinding]:
    """RLIMIT_MEMLOCK, which counts where an RDMA device pins the pool."""
    who = judged(subject)
    limit = _limit(who, resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else amount(limit)
    devices = subject.rdma
    if not devices:
        return [good("memlock", f"{shown}; no RDMA device, so nothing is pinned")]
    if has_capability(subject, who, CAP_IPC_LOCK):
        return [good("memlock", f"{who.who} has CAP_IPC_LOCK, so its {shown} do not count")]
    spec = pool_spec(subject.config)
    regions = {  # saved pages and device buffers are not pinned
        component.name: node_page_bytes(spec, component) * pages
        for component, pages in zip(spec.components, spec.pages, strict=True)
        if has_bytes(component) and not isinstance(component.extent, Buffer)
    }
    needed = sum(regions.values())
    if limit != resource.RLIM_INFINITY and limit < needed:
        each = ", ".join(f"{name} {amount(size)}" for name, size in regions.items())
        what = f"{shown}, but {', '.join(devices)} would pin {amount(needed)} ({each})"
        fix = "in the unit: LimitMEMLOCK=infinity; in a shell: ulimit -l unlimited"
        return [wrong("memlock", what, fix)]
    return [good("memlock", f"{shown} for {', '.join(devices)}, which pin {amount(needed)}")]


def open_files(subject: Subject) -> list[DoctorFinding]:
    """RLIMIT_NOFILE, against as many clients and peers as the configuration lets in."""
    who = judged(subject)
    limit = _limit(who, resource.RLIMIT_NOFILE)
    clients = subject.config.limits.max_clients
    peers = len({*subject.config.peers.connect, *subject.config.peers.keys})
    shards = len(shards_of(pool_spec(subject.config))) - 1
    needed = OWN_FILES + FILES_OF_SHARD * shards + FILES_OF_CLIENT * clients + FILES_OF_PEER * peers
    take = f"{clients} clients and {peers} peers take {needed:,}"
    if limit == resource.RLIM_INFINITY or limit >= needed:
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
        return [good("open files", f"{shown}; {take}")]
    fix = f"in the unit: LimitNOFILE={max(65_536, needed)}; in a shell: ulimit -n {needed}"
    what = f"{who.who} may open {limit:,}; {take}"
    if limit < OWN_FILES:
        return [wrong("open files", f"{what}, and it alone {OWN_FILES}", fix)]
    return [poor("open files", f"{what}, so the last of them are turned away", fix)]


def direct_copies(subject: Subject) -> list[DoctorFinding]:
    """Whether Yama lets one process copy out of another: how bytes go on one host."""
    scope = subject.text("proc/sys/kernel/yama/ptrace_scope")
    if scope in {"", "0"}:
        said = "kernel.yama.ptrace_scope = 0" if scope else "no Yama here that would forbid them"
        return [good("direct copies", said)]
    who = judged(subject)
    if scope != "3" and has_capability(subject, who, CAP_SYS_PTRACE):
        what = f"kernel.yama.ptrace_scope = {scope}, and {who.who} has CAP_SYS_PTRACE"
        return [good("direct copies", what)]
    what = (
        f"kernel.yama.ptrace_scope = {scope}: between two daemons of this host bytes go through "
        "TCP, at a third of the speed"
    )
    fix = "sysctl -w kernel.yama.ptrace_scope=0"
    if scope == "3":
        fix = "remove kernel.yama.ptrace_scope from /etc/sysctl.d and reboot: 3 cannot be undone"
    return [poor("direct copies", what, fix)]


def has_capability(subject: Subject, who: Judged, number: int) -> bool:
    """Whether the judged process has the capability ``number`` in effect."""
    effective = status_line(subject, who, "CapEff")
    return bool(effective) and bool(int(effective, 16) >> number & 1)


def _limit(who: Judged, kind: int) -> int:
    """The soft limit of the judged process; ours, where another user's is not shown."""
    try:
        return resource.prlimit(who.pid, kind)[0]
    except (PermissionError, ProcessLookupError):
        return resource.getrlimit(kind)[0]


# ---- clocks -------------------------------------------------------------------------------------


STA_UNSYNC = 0x40
TIME_ERROR = 5
EARLIEST_S = 1_735_689_600
"""The beginning of 2025, before kvd was: a clock that says less was never set."""
ASLEEP_S = 1.0
SLOW_SOURCES = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})
_SYNC = "timedatectl set-ntp true (or: systemctl enable --now chronyd)"


class Clocks(msgspec.Struct, frozen=True):
    """What the kernel says: ``is_synchronised`` None if it does not.

    ``slept_s``: for how long the monotonic clock has stood still since boot.
    """

    now_s: float
    is_synchronised: bool | None
    max_error_s: float
    slept_s: float


class _Timex(ctypes.Structure):
    """The beginning of the kernel's ``struct timex``, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clocks() -> Clocks:
    """Ask the kernel; changes nothing and needs no right."""
    timex = _Timex()
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    is_synchronised = None
    if state >= 0:
        is_synchronised = state != TIME_ERROR and not timex.status & STA_UNSYNC
    return Clocks(
        now_s=time.time(),
        is_synchronised=is_synchronised,
        max_error_s=timex.maxerror / 1e6,
        slept_s=time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC),
    )


def clock(subject: Subject) -> list[DoctorFinding]:
    """Whether the clocks are what kvd takes them for."""
    return [*judge_clocks(read_clocks()), *_source(subject)]


def judge_clocks(clocks: Clocks) -> list[DoctorFinding]:
    """What is to be said of them."""
    out = [_time_of_day(clocks)]
    if clocks.slept_s > ASLEEP_S:
        what = (
            f"this host slept for {clocks.slept_s:.0f} s since it was booted: deadlines stand "
            "still meanwhile, and peers lose it"
        )
        fix = "systemctl mask sleep.target suspend.target hibernate.target"
        out.append(poor("suspend", what, fix))
    return out


def _time_of_day(clocks: Clocks) -> DoctorFinding:
    shown = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clocks.now_s))
    if clocks.now_s < EARLIEST_S:
        what = f"says {shown}: times in events, logs and recordings of this node are wrong"
        return wrong("clock", what, f"date -s '2026-01-31 12:00' with the right time, then {_SYNC}")
    if clocks.is_synchronised is None:
        what = "whether it is synchronised cannot be asked: the system call is not allowed here"
        return poor("clock", what, "look outside of this container: timedatectl")
    if not clocks.is_synchronised:
        what = (
            "not synchronised: times of two nodes' events do not compare; a peer with a kvd that "
            "has no homes yet refuses this node when it was set back over a reboot (peer-stale)"
        )
        return poor("clock", what, _SYNC)
    return good("clock", f"synchronised, at most {clocks.max_error_s * 1e3:.0f} ms off")


def _source(subject: Subject) -> list[DoctorFinding]:
    """Every step of a daemon reads the time: some sources make that a slow access to a device."""
    place = "sys/devices/system/clocksource/clocksource0"
    source = subject.text(f"{place}/current_clocksource")
    if source not in SLOW_SOURCES:
        return []
    others = subject.text(f"{place}/available_clocksource").split()
    better = next((source for source in others if source not in SLOW_SOURCES), "")
    fix = f"echo {better} > /{place}/current_clocksource"
    if not better:
        fix = "look for why the kernel distrusts the TSC: dmesg | grep -i tsc"
    return [poor("clock source", f"{source}: reading the time takes about a microsecond", fix)]
