"""Check of ``kvd doctor`` that looks at NUMA: where the pool's memory and its devices lie.

The pool's pages come from the node of the CPU that the daemon starts on, unless it is bound: so
what counts is the binding of the daemon, or of this shell where none runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.cli.finding import Finding, Subject, good, poor, wrong
from kvd.cli.running import Judged, judged
from kvd.config.pool import pool_spec
from kvd.pools.build import reserved_bytes
from kvd.text import amount

if TYPE_CHECKING:
    from pathlib import Path

NODES = "sys/devices/system/node"


class Node(msgspec.Struct, frozen=True):
    """One NUMA node: its memory that is free now, and its CPUs."""

    number: int
    free_bytes: int
    cpus: frozenset[int]


class Near(msgspec.Struct, frozen=True):
    """A device that moves KV, and the node that it is attached to."""

    name: str
    node: int


def numa(subject: Subject) -> list[Finding]:
    """Whether the pool will lie in one node, the one of the devices, and fit there."""
    nodes = _nodes(subject)
    if len(nodes) < 2:
        return [good("numa", "one node: all memory is near")]
    who = judged(subject)
    running = _list(_status(subject, who, "Cpus_allowed_list"))
    allowed = _list(_status(subject, who, "Mems_allowed_list"))
    homes = [node for node in nodes if node.cpus & running] or nodes
    devices = _devices(subject)
    device_nodes = sorted({device.node for device in devices})
    best = device_nodes[0] if device_nodes else homes[0].number
    near = ", ".join(f"{device.name} on node {device.node}" for device in devices)
    bind = _bind(best)
    if len(homes) > 1:
        what = (
            f"{len(nodes)} nodes, and {who.who} may run on {len(homes)} of them: the pool lies "
            f"where it happens to start{f', with {near}' if near else ''}"
        )
        return [poor("numa", what, bind), *_room(subject, homes, must_fit=False)]
    home = homes[0]
    out = [good("numa", f"{who.who} is bound to node {home.number}{f'; {near}' if near else ''}")]
    if device_nodes and home.number not in device_nodes:
        what = (
            f"{who.who} is bound to node {home.number}, but {near}: every transfer crosses "
            "between the nodes"
        )
        out = [poor("numa", what, bind)]
    is_strict = bool(allowed) and allowed <= {home.number}
    return out + _room(subject, [home], must_fit=is_strict)


def _bind(node: int) -> str:
    return (
        f"in the unit: NUMAPolicy=bind, NUMAMask={node}, CPUAffinity=numa; "
        f"in a shell: numactl --cpunodebind={node} --membind={node} kvd serve"
    )


def _room(subject: Subject, homes: list[Node], *, must_fit: bool) -> list[Finding]:
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


def _nodes(subject: Subject) -> list[Node]:
    """Those with memory: a CPU-less expander is one, an offline node is not."""
    out = []
    for entry in subject.entries(NODES):
        number = entry.name.removeprefix("node")
        if number == entry.name or not number.isdecimal():
            continue
        free = _meminfo(subject.text(f"{NODES}/{entry.name}/meminfo"), "MemFree")
        cpus = frozenset(_list(subject.text(f"{NODES}/{entry.name}/cpulist")))
        out.append(Node(int(number), free, cpus))
    return sorted(out, key=lambda node: node.number)


def _meminfo(text: str, name: str) -> int:
    """``Node 0 MemFree:  123 kB`` in bytes."""
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if name in words:
            return int(words[words.index(name) + 1]) * 1024
    return 0


def _status(subject: Subject, who: Judged, name: str) -> str:
    for line in subject.text(f"{who.proc}/status").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


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
    ucx = {**subject.environ, **subject.config.transfer.ucx}.get("UCX_NET_DEVICES", "all")
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
