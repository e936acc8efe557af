"""Checks of ``kvd doctor`` that look at what a daemon may take: locked memory, descriptors, CMA.

Where the daemon runs, its limits are judged, not those of the shell that asks.
"""

from __future__ import annotations

import resource

from kvd.cli.finding import Finding, Subject, good, poor, wrong
from kvd.cli.running import Judged, judged
from kvd.config.pool import pool_spec
from kvd.core.layout.spec import Buffer, has_bytes, node_page_bytes, shards_of
from kvd.text import amount

OWN_FILES = 128
"""Descriptors of a daemon without clients and peers: sockets, epoll, regions, recorder."""
FILES_OF_CLIENT = 3
FILES_OF_SHARD = 2
FILES_OF_PEER = 14
"""Its sockets in the daemon, and a sending agent with its connections in the transfer process."""

CAP_IPC_LOCK = 14
CAP_SYS_PTRACE = 19


def registered_bytes(subject: Subject) -> dict[str, int]:
    """What an RDMA device would pin, by region: saved pages and device buffers are not."""
    spec = pool_spec(subject.config)
    return {
        component.name: node_page_bytes(spec, component) * pages
        for component, pages in zip(spec.components, spec.pages, strict=True)
        if has_bytes(component) and not isinstance(component.extent, Buffer)
    }


def locked_memory(subject: Subject) -> list[Finding]:
    """RLIMIT_MEMLOCK, which counts where an RDMA device pins the pool."""
    who = judged(subject)
    limit = _limit(who, resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else amount(limit)
    devices = [entry.name for entry in subject.entries("sys/class/infiniband")]
    if not devices:
        return [good("memlock", f"{shown}; no RDMA device, so nothing is pinned")]
    if has_capability(subject, who, CAP_IPC_LOCK):
        return [good("memlock", f"{who.who} has CAP_IPC_LOCK, so its {shown} do not count")]
    regions = registered_bytes(subject)
    needed = sum(regions.values())
    if limit != resource.RLIM_INFINITY and limit < needed:
        each = ", ".join(f"{name} {amount(size)}" for name, size in regions.items())
        what = f"{shown}, but {', '.join(devices)} would pin {amount(needed)} ({each})"
        fix = "in the unit: LimitMEMLOCK=infinity; in a shell: ulimit -l unlimited"
        return [wrong("memlock", what, fix)]
    return [good("memlock", f"{shown} for {', '.join(devices)}, which pin {amount(needed)}")]


def open_files(subject: Subject) -> list[Finding]:
    """RLIMIT_NOFILE, against as many clients and peers as the configuration lets in."""
    who = judged(subject)
    limit = _limit(who, resource.RLIMIT_NOFILE)
    clients = subject.config.limits.max_clients
    peers = len({*subject.config.peers.connect, *subject.config.peers.keys})
    needed = (
        OWN_FILES + _files_of_shards(subject) + FILES_OF_CLIENT * clients + FILES_OF_PEER * peers
    )
    if limit == resource.RLIM_INFINITY or limit >= needed:
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
        return [good("open files", f"{shown}; {clients} clients and {peers} peers take {needed:,}")]
    fix = f"in the unit: LimitNOFILE={max(65_536, needed)}; in a shell: ulimit -n {needed}"
    what = f"{who.who} may open {limit:,}; {clients} clients and {peers} peers take {needed:,}"
    if limit < OWN_FILES:
        return [wrong("open files", f"{what}, and it alone {OWN_FILES}", fix)]
    return [poor("open files", f"{what}, so the last of them are turned away", fix)]


def _files_of_shards(subject: Subject) -> int:
    """Memory beyond that of the first shard: each has a region and one of saved pages."""
    return FILES_OF_SHARD * (len(shards_of(pool_spec(subject.config))) - 1)


def direct_copies(subject: Subject) -> list[Finding]:
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
    if scope == "3":
        fix = "remove kernel.yama.ptrace_scope from /etc/sysctl.d and reboot: 3 cannot be undone"
        return [poor("direct copies", what, fix)]
    return [poor("direct copies", what, "sysctl -w kernel.yama.ptrace_scope=0")]


def has_capability(subject: Subject, who: Judged, number: int) -> bool:
    """Whether the judged process has the capability ``number`` in effect."""
    for line in subject.text(f"{who.proc}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False


def _limit(who: Judged, kind: int) -> int:
    """The soft limit of the judged process; ours, where another user's is not shown."""
    try:
        return resource.prlimit(who.pid, kind)[0]
    except (PermissionError, ProcessLookupError):
        return resource.getrlimit(kind)[0]
