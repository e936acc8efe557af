"""Checks of memory: whether the pool fits, where it is to lie, NUMA, and devices.

Nothing is made: a directory that is not there yet is judged by the one that it would be made in.
The pool's pages come from the NUMA node of the CPU that the daemon starts on, unless it is bound:
so what counts is the binding of the daemon, or of this shell where none runs.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

import msgspec

from kvd.cli.doctor.finding import (
    DoctorFinding,
    Subject,
    good,
    judged,
    poor,
    status_line,
    wrong,
)
from kvd.config.pool import pool_spec
from kvd.daemon.warm_restart import place_of
from kvd.device.cuda import CudaError, Runtime
from kvd.device.cuda_library import load
from kvd.device.presence import absent
from kvd.journal.layout import size_bytes
from kvd.pools.arena import HUGE_PAGE_BYTES, NotReserved, check_free
from kvd.pools.build import device_bytes, pool_regions, reserved_bytes, saved_regions, sizes
from kvd.pools.host_memory import Free, free_memory
from kvd.pools.location import Backing
from kvd.pools.mounts import free_huge_bytes, kind_of
from kvd.types import amount

if TYPE_CHECKING:
    from pathlib import Path

_CHECK = "pool memory"


def memory(subject: Subject) -> list[DoctorFinding]:
    """Whether the pool fits, by the rule that the daemon reserves it by."""
    who = judged(subject)
    if who.pid:
        return [good("memory", f"{who.who} has its pool")]
    free = free_memory()
    kept = kept_bytes(subject)
    free = Free(free.free_bytes + kept, free.limited_by)
    spec = pool_spec(subject.config)
    try:
        regions = reserved_bytes(spec)
        if _backing(subject) is Backing.HUGETLBFS:
            regions = sizes(list(saved_regions(spec)))
        check_free(regions, free)
    except NotReserved as exc:
        what, _, fix = str(exc).rpartition(": ")
        return [wrong("memory", what, fix)]
    what = f"the pool takes {amount(sum(regions.values()))} of {amount(free.free_bytes)} free"
    found = f", {amount(kept)} of it in a pool that is there already" if kept else ""
    return [good("memory", f"{what} ({free.limited_by}){found}")]


def backing(subject: Subject) -> list[DoctorFinding]:
    """Whether memory of the configured kind can be had, and by this user."""
    match _backing(subject):
        case Backing.ANON:
            return [good(_CHECK, "anon: the cache ends with the daemon (shm would keep it)")]
        case Backing.FDSTORE if subject.has_systemd:
            return [good(_CHECK, "fdstore: systemd holds it while the daemon restarts")]
        case Backing.FDSTORE:
            what = "fdstore leaves the pool to systemd, which does not run this host"
            fix = "set pool.backing = 'shm', or start kvd as a unit of systemd"
            return [wrong(_CHECK, what, fix)]
        case Backing.SHM | Backing.HUGETLBFS:
            return _files(subject)


def kept_bytes(subject: Subject) -> int:
    """What files of a pool that is there already take of this host's ordinary memory."""
    return _taken(place_of(subject.config).path()) if _backing(subject) is Backing.SHM else 0


def _backing(subject: Subject) -> Backing:
    return Backing(subject.config.pool.backing)


def _taken(folder: Path) -> int:
    try:
        return sum(entry.stat().st_blocks * 512 for entry in folder.iterdir())
    except OSError:
        return 0


def _files(subject: Subject) -> list[DoctorFinding]:
    kind = _backing(subject)
    try:
        path = place_of(subject.config).path()
    except NotReserved as exc:
        what, _, fix = str(exc).partition(": ")
        return [wrong(_CHECK, what, fix)]
    above = path if os.path.lexists(path) else path.parent
    try:
        seen = os.lstat(above)
    except OSError as exc:
        fix = f"install -d -m 0700 {path}, for the user that runs kvd"
        return [wrong(_CHECK, f"{above}: {exc.strerror}", fix)]
    if stat.S_ISLNK(seen.st_mode) and above == path:
        what = f"{path} is a symbolic link: somebody else could have put a pool there"
        return [wrong(_CHECK, what, f"rm {path}, or set pool.directory to another one")]
    found = kind_of(os.stat(above).st_dev)
    if found != kind.file_system:
        what = f"{path} lies on {found}, and pool.backing = {kind.value} wants {kind.file_system}"
        fix = "leave pool.directory out, which takes one below /dev/shm, or name one on a tmpfs"
        if kind is Backing.HUGETLBFS:
            mount = "mount -t hugetlbfs -o mode=1777 none /dev/hugepages"
            fix = f"{mount}, and leave pool.directory out"
        return [wrong(_CHECK, what, fix)]
    flaw = _rights(subject, path, os.stat(above), is_there=above == path)
    return [flaw] if flaw is not None else _room(subject, kind, path, above)


def _rights(
    subject: Subject, path: Path, seen: os.stat_result, *, is_there: bool
) -> DoctorFinding | None:
    """What keeps a daemon of this user from using the directory, or from making it."""
    if judged(subject).pid:
        return None
    uid = os.geteuid()
    if not is_there:
        if os.access(path.parent, os.W_OK | os.X_OK):
            return None
        what = f"{path} is not there, and uid {uid} may not make it in {path.parent}"
        return wrong(_CHECK, what, f"install -d -m 0700 -o {uid} {path}")
    if seen.st_uid != uid:
        what = f"{path} belongs to uid {seen.st_uid}, and this is uid {uid}"
        return wrong(_CHECK, what, f"chown {uid} {path}, or set pool.directory to another one")
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = f"{path} has mode {stat.S_IMODE(seen.st_mode):04o}: others could put files there"
        return wrong(_CHECK, what, f"chmod 0700 {path}")
    return None


def _room(subject: Subject, kind: Backing, path: Path, above: Path) -> list[DoctorFinding]:
    """Whether the file system holds the pool, with what a pool that is there already takes."""
    shape = os.statvfs(above)
    grain = max(HUGE_PAGE_BYTES, shape.f_bsize) if kind is Backing.HUGETLBFS else HUGE_PAGE_BYTES
    spec = pool_spec(subject.config)
    journal = size_bytes(spec.pages[0], spec.components[0].page_size)
    wanted = [*sizes(list(pool_regions(spec))).values(), journal]
    needed = sum(-(-size // grain) * grain for size in wanted)
    kept = _taken(path)
    if kind is Backing.HUGETLBFS:
        free = free_huge_bytes(grain) + kept
        fix = f"sysctl -w vm.nr_hugepages={-(-needed // grain)}, or lower pool.size"
    else:
        free = (shape.f_bavail * shape.f_frsize if shape.f_blocks else needed) + kept
        mount = "/dev/shm" if str(path).startswith("/dev/shm") else str(above)
        size = -(-(needed + shape.f_blocks * shape.f_frsize) // 2**30)
        fix = f"mount -o remount,size={size}G {mount} (in a container: --shm-size={size}g)"
    have = f", {amount(kept)} of it taken by a pool that is there" if kept else ""
    said = f"{kind.value} in {path}: {amount(needed)} of {amount(free)} free{have}"
    if needed > free:
        return [wrong(_CHECK, said, fix)]
    if kind is Backing.SHM and needed > 0.9 * free:
        what = f"{said}: nothing is left for anything else there"
        return [poor(_CHECK, what, fix)]
    return [good(_CHECK, said)]


# ---- NUMA ---------------------------------------------------------------------------------------


NODES = "sys/devices/system/node"


class NumaNode(msgspec.Struct, frozen=True):
    """One NUMA node: its memory that is free now, and its CPUs."""

    number: int
    free_bytes: int
    cpus: frozenset[int]


class Near(msgspec.Struct, frozen=True):
    """A device that moves KV, and the node that it is attached to."""

    name: str
    node: int


def numa(subject: Subject) -> list[DoctorFinding]:
    """Whether the pool will lie in one node, the one of the devices, and fit there."""
    nodes = _nodes(subject)
    if len(nodes) < 2:
        return [good("numa", "one node: all memory is near")]
    who = judged(subject)
    running = _list(status_line(subject, who, "Cpus_allowed_list"))
    allowed = _list(status_line(subject, who, "Mems_allowed_list"))
    homes = [node for node in nodes if node.cpus & running] or nodes
    devices = _devices(subject)
    device_nodes = sorted({device.node for device in devices})
    best = device_nodes[0] if device_nodes else homes[0].number
    near = ", ".join(f"{device.name} on node {device.node}" for device in devices)
    bind = (
        f"in the unit: NUMAPolicy=bind, NUMAMask={best}, CPUAffinity=numa; "
        f"in a shell: numactl --cpunodebind={best} --membind={best} kvd serve"
    )
    if len(homes) > 1:
        what = (
            f"{len(nodes)} nodes, and {who.who} may run on {len(homes)} of them: the pool lies "
            f"where it happens to start{f', with {near}' if near else ''}"
        )
        return [poor("numa", what, bind), *_node_room(subject, homes, must_fit=False)]
    home = homes[0]
    out = [good("numa", f"{who.who} is bound to node {home.number}{f'; {near}' if near else ''}")]
    if device_nodes and home.number not in device_nodes:
        what = (
            f"{who.who} is bound to node {home.number}, but {near}: every transfer crosses "
            "between the nodes"
        )
        out = [poor("numa", what, bind)]
    is_strict = bool(allowed) and allowed <= {home.number}
    return out + _node_room(subject, [home], must_fit=is_strict)


def _node_room(subject: Subject, homes: list[NumaNode], *, must_fit: bool) -> list[DoctorFinding]:
    """Whether the pool fits into the free memory of one of these nodes."""
    needed = sum(reserved_bytes(pool_spec(subject.config)).values())
    roomiest = max(homes, key=lambda node: node.free_bytes)
    if needed <= roomiest.free_bytes:
        return []
    what = (
        f"the pool takes {amount(needed)}, node {roomiest.number} has "
        f"{amount(roomiest.free_bytes)} free"
    )
    fix = f"set pool.size to at most {roomiest.free_bytes // 2**20}MiB"
    if must_fit:
        return [wrong("numa memory", f"{what}, and no other node may be used", fix)]
    return [poor("numa memory", f"{what}: part of it will lie on another node", fix)]


def _nodes(subject: Subject) -> list[NumaNode]:
    """Those with memory: a CPU-less expander is one, an offline node is not."""
    out = []
    for entry in subject.entries(NODES):
        number = entry.name.removeprefix("node")
        if number == entry.name or not number.isdecimal():
            continue
        # A line is like: Node 0 MemFree:  123 kB
        free = re.search(r"MemFree:\s*(\d+)", subject.text(f"{NODES}/{entry.name}/meminfo"))
        cpus = frozenset(_list(subject.text(f"{NODES}/{entry.name}/cpulist")))
        out.append(NumaNode(int(number), int(free[1]) * 1024 if free else 0, cpus))
    return sorted(out, key=lambda node: node.number)


def _list(text: str) -> set[int]:
    """``0-3,8`` as numbers."""
    out: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            out |= set(range(int(first), int(last or first) + 1))
    return out


def _devices(subject: Subject) -> list[Near]:
    """RDMA devices, else the network devices with hardware, and GPUs: those with a known node.

    Only those that UCX_NET_DEVICES names, where it does.
    """
    ucx = subject.ucx.get("UCX_NET_DEVICES", "all")
    named = {part.strip().partition(":")[0] for part in ucx.split(",")} - {"all", ""}
    rdma = subject.entries("sys/class/infiniband")
    network = rdma or subject.entries("sys/class/net")
    if named:
        network = [
            entry for entry in (*rdma, *subject.entries("sys/class/net")) if entry.name in named
        ]
    gpus = [entry for entry in subject.entries("sys/bus/pci/drivers/nvidia") if ":" in entry.name]
    found = [_near(entry, entry / "device/numa_node") for entry in network]
    found += [_near(entry, entry / "numa_node", "GPU ") for entry in gpus]
    return [near for near in found if near is not None]


def _near(entry: Path, file: Path, prefix: str = "") -> Near | None:
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    return Near(prefix + entry.name, node) if node >= 0 else None


# ---- CUDA ---------------------------------------------------------------------------------------


def cuda(subject: Subject) -> list[DoctorFinding]:
    """What there is of CUDA, and whether a pool that is to lie on devices can."""
    wanted = device_bytes(pool_spec(subject.config))
    missing = absent(wanted)
    if missing is not None:
        return [wrong("cuda", f"pool.device: {missing.why}", missing.fix)]
    runtime = load()
    if not isinstance(runtime, Runtime):
        return [good("cuda", f"{runtime.why}; the pool needs none")]
    try:
        # A daemon that runs has its pool there already.
        return _found(runtime, {} if judged(subject).pid else wanted)
    except CudaError as exc:
        return [poor("cuda", str(exc), "nvidia-smi says what is wrong with the device")]


def _found(runtime: Runtime, wanted: dict[int, int]) -> list[DoctorFinding]:
    """The devices, and whether what is wanted of each is free there."""
    places = [runtime.bus_id(device) for device in range(runtime.device_count())]
    devices = ", ".join(f"cuda:{number} at {place}" for number, place in enumerate(places))
    what = f"runtime {runtime.version()}, driver for {runtime.driver_version()}; {devices}"
    out = [good("cuda", f"{what} ({runtime.path})")]
    for device, needed in wanted.items():
        room = runtime.room(device)
        what = f"the pool takes {amount(needed)} of {amount(room.free_bytes)} free"
        if needed <= room.free_bytes:
            out.append(good(f"memory of cuda:{device}", what))
        else:
            fix = f"set pool.size to at most {room.free_bytes // 2**20}MiB, or end who has it"
            out.append(wrong(f"memory of cuda:{device}", what, fix))
    return out
