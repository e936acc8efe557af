"""Checks of ``kvd doctor`` that look at the transport: NIXL, UCX's environment, a real transfer.

NIXL is loaded by child processes only. ``ucx_environment`` knows the variables that were measured
to hang or to hurt. The transfer is between two processes of this host, without a daemon::

    here: two regions of memory --> sender process ==Post==> receiver process --> compare

Two real children are started on fresh memory, the receiver's metadata goes to the sender as it
would over a peer link, and the same pages are written a few times. Everything is gone afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.cli.doctor.finding import DoctorFinding, Subject, good, poor, wrong
from kvd.core.effects import LoadAgent, Post
from kvd.core.inputs import AgentLoaded, PostDone
from kvd.core.inputs import WritePath as Route
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.text import clean
from kvd.transfer.orders import RegionPlan
from kvd.transfer.process import ReportQueue, TransferProcess, TransportDown
from kvd.types import Pages, amount, pack_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping


PLUGINS = """
import json
from kvd.transfer.nixl import Binding
binding = Binding()
agent = binding.agent("doctor", progress_delay_us=0)
print(json.dumps([binding.module, sorted(agent.getAvailPlugins())]))
"""
PROBE_S = 20.0
NETWORKS = Path("/sys/class/net")
RETRIES = Path("/proc/sys/net/ipv4/tcp_retries2")
TCP_RETRIES = 5
SHARED = "sm"
NEED_ONE_HOST = frozenset({SHARED, "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"})
"""UCX's names for transports between two processes of one kernel."""
SIDE_DEVICES = ("docker", "virbr", "br-", "veth", "cni", "podman", "lxc")
"""Devices that lead to containers of this host. UCX takes them like any other."""


def in_child(program: str) -> subprocess.CompletedProcess[str]:
    """Run that by this interpreter, in a process of its own: what it loads may hang or crash.

    Raises:
        subprocess.TimeoutExpired: it takes more than ``PROBE_S``.
        OSError: it cannot be started.
    """
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=PROBE_S,
        check=False,
    )


def last_words(tried: subprocess.CompletedProcess[str]) -> str:
    """Of one that failed."""
    return clean((tried.stderr.strip().splitlines() or ["no message"])[-1])


def binding(_subject: Subject) -> list[DoctorFinding]:
    """Whether NIXL can be imported, and which plugins it finds."""
    fix = "pip install 'kvd[daemon]'; kvd needs nixl_cu13 or nixl_cu12 to be importable"
    try:
        probe = in_child(PLUGINS)
    except subprocess.TimeoutExpired:
        return [wrong("nixl", f"its import takes more than {PROBE_S:.0f} s", fix)]
    if probe.returncode:
        return [wrong("nixl", f"does not load: {last_words(probe)}", fix)]
    module, plugins = msgspec.json.decode(probe.stdout, type=tuple[str, list[str]])
    if "UCX" not in plugins:
        return [wrong("nixl", f"{module} has no UCX plugin, only {', '.join(plugins)}", fix)]
    return [good("nixl", f"{module} with {', '.join(plugins)}")]


class Trap(NamedTuple):
    """A variable, what it must not be, and what it then does."""

    name: str
    is_bad: Callable[[str], bool]
    harm: str
    fix: str


def _is_no(value: str) -> bool:
    return value.lower() in {"n", "no", "off", "0", "false"}


def _lacks_tcp(value: str) -> bool:
    allowed = {part.strip() for part in value.split(",")}
    return not value.startswith("^") and not allowed & {"all", "tcp", "rc", "ud", "dc", "ib"}


def _lacks_device(value: str) -> bool:
    names = {part.strip().partition(":")[0] for part in value.split(",")} - {"all"}
    known = {entry.name for entry in NETWORKS.iterdir()} if NETWORKS.is_dir() else names
    rdma = Path("/sys/class/infiniband")
    known |= {entry.name for entry in rdma.iterdir()} if rdma.is_dir() else set()
    return bool(names - known)


TRAPS = (
    Trap(
        "UCX_TCP_CONN_NB",
        _is_no,
        "a peer that swallows packets blocks the transfer process for two minutes",
        "unset it; kvd sets y",
    ),
    Trap(
        "UCX_KEEPALIVE_INTERVAL",
        lambda value: value.strip().lower() not in {"20s", "20", "auto"},
        "UCX's own pings keep TCP from noticing that a peer is unreachable",
        "unset it; kvd relies on TCP keepalive",
    ),
    Trap(
        "UCX_MEM_MMAP_HOOK_MODE",
        lambda value: value.lower() != "none",
        "starting takes 0.4 s longer, for hooks that kvd does not need",
        "unset it; kvd sets none",
    ),
    Trap(
        "UCX_TLS",
        _lacks_tcp,
        "no transport to other hosts is left",
        "unset it, or add tcp",
    ),
    Trap(
        "UCX_NET_DEVICES",
        _lacks_device,
        "it names a device that this host does not have",
        "unset it, or name one of ip link",
    ),
    Trap(
        "UCX_LOG_LEVEL",
        lambda value: value.lower() in {"debug", "trace", "req", "data", "async", "func", "poll"},
        "every transfer writes log lines",
        "unset it",
    ),
    Trap(
        "UCX_ERROR_HANDLING",
        lambda value: value.lower() in {"none", "n"},
        "the death of a peer goes unnoticed",
        "unset it",
    ),
)


def ucx_environment(subject: Subject) -> list[DoctorFinding]:
    """Variables of UCX, from the environment or ``transfer.ucx``, that would hang or hurt."""
    values = subject.ucx
    found = [
        poor(trap.name, f"{clean(values[trap.name])}: {trap.harm}", trap.fix)
        for trap in TRAPS
        if trap.name in values and trap.is_bad(values[trap.name])
    ]
    names = sorted(name for name in values if name.startswith("UCX_"))
    return found or [good("UCX_*", ", ".join(names) if names else "none set")]


def tcp_retries(subject: Subject) -> list[DoctorFinding]:
    """How long the kernel keeps trying a peer that has vanished in the middle of a write."""
    if not subject.config.peers.connect or not RETRIES.is_file():
        return []
    retries = int(RETRIES.read_text())
    if retries <= TCP_RETRIES:
        return [good("tcp_retries2", str(retries))]
    what = f"{retries}: a write to a vanished peer hangs for up to 15 minutes in the kernel"
    return [poor("tcp_retries2", what, f"sysctl -w net.ipv4.tcp_retries2={TCP_RETRIES}")]


def self_transfer(subject: Subject) -> list[DoctorFinding]:
    """Move bytes between two real transfer processes, and compare them."""
    name = "self-transfer"
    fix = "see nixl and UCX_* above; try without UCX_TLS and UCX_NET_DEVICES"
    try:
        measured = asyncio.run(measure(subject.config.transfer.ucx))
    except (TransportDown, TimeoutError) as exc:
        return [wrong(name, clean(str(exc) or "no end within its time limit"), fix)]
    if not measured.bytes_equal:
        return [wrong(name, "the bytes that arrived are not those that were sent", fix)]
    if measured.route is Route.NETWORK:
        fix = "unset UCX_TLS, or add cma to it; and: sysctl -w kernel.yama.ptrace_scope=0"
        return [poor(name, f"{_speed(measured)}, over the network although on one host", fix)]
    return [good(name, _speed(measured)), _over_network(subject)]


def _over_network(subject: Subject) -> DoctorFinding:
    """The same transfer without what only works on one host: what a peer elsewhere would get."""
    name = "network transfer"
    fix = "see UCX_TLS and UCX_NET_DEVICES above, and ip -brief link"
    chosen = subject.ucx.get("UCX_TLS", "all")
    environment = {**subject.config.transfer.ucx, "UCX_TLS": without_host(chosen)}
    try:
        measured = asyncio.run(measure(environment))
    except (TransportDown, TimeoutError) as exc:
        return poor(name, clean(str(exc) or "no end within its time limit"), fix)
    if not measured.bytes_equal:
        return wrong(name, "the bytes that arrived are not those that were sent", fix)
    return judge_network(subject, measured)


def judge_network(subject: Subject, measured: Measured) -> DoctorFinding:
    """Whether what UCX chose is what leads to other hosts, and the best that this one has."""
    name = "network transfer"
    rdma = subject.rdma
    if rdma and measured.lanes and not any(f"/{device}" in measured.lanes for device in rdma):
        what = f"{_speed(measured)}, although there is {', '.join(rdma)}"
        fix = "see rdma and memlock above; unset UCX_TLS and UCX_NET_DEVICES; ibv_devinfo"
        return poor(name, what, fix)
    strange = [device for device in SIDE_DEVICES if f"/{device}" in measured.lanes]
    if strange and subject.config.peers.connect:
        what = f"{_speed(measured)}: {', '.join(strange)}* leads to no other host"
        fix = "kvd.toml, [transfer.ucx]: UCX_NET_DEVICES = the device of ip route get PEER"
        return poor(name, what, fix)
    return good(name, f"{_speed(measured)}, looped on this host: no wire was in it")


def without_host(tls: str) -> str:
    """A value of UCX_TLS without the transports that need a shared kernel."""
    if tls.startswith("^"):
        return f"{tls},{SHARED}"
    rest = [transport for transport in tls.split(",") if transport.strip() not in NEED_ONE_HOST]
    return f"^{SHARED}" if "all" in rest or not rest else ",".join(rest)


def _speed(measured: Measured) -> str:
    rate = measured.moved_bytes / measured.best_s / 1e9
    lanes = f" ({clean(measured.lanes)})" if measured.lanes else ""
    return f"{amount(measured.moved_bytes)} at {rate:.1f} GB/s by {measured.route.value}{lanes}"


# ---- one transfer between two processes ----------------------------------------------------------


PAGE_BYTES = 2 * 2**20
PAGES = 33
POSTS = 4
LIMIT_S = 30.0
REGION = "doctor"
TELL_LANES = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}


class Measured(msgspec.Struct, frozen=True):
    """What came of it: ``best_s`` is the fastest of the posts, each of ``moved_bytes``.

    ``lanes``: what UCX says that writes went by, like ``cma/memory``; empty if it did not say.
    """

    moved_bytes: int
    best_s: float
    route: Route
    bytes_equal: bool
    lanes: str = ""


async def measure(environment: Mapping[str, str]) -> Measured:
    """Run it.

    Raises:
        TransportDown: a process ended, or refused; the message says why.
        TimeoutError: no end within ``LIMIT_S``.
    """
    async with asyncio.timeout(LIMIT_S), contextlib.AsyncExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-doctor-"))) / "ucx"
        telling = {**environment, **TELL_LANES, "UCX_LOG_FILE": str(log)}
        source, target = stack.enter_context(memory()), stack.enter_context(memory())
        receiver = await stack.enter_async_context(end_of("to", [of_host(target)], environment))
        sender = await stack.enter_async_context(end_of("from", [of_host(source)], telling))
        payload = os.urandom(PAGE_BYTES)
        fill(source, payload)
        measured = await _send(sender, receiver.metadata, lambda: holds(target, payload))
        with contextlib.suppress(OSError):  # it is for people, and may change
            measured = msgspec.structs.replace(
                measured, lanes=lanes_of(log.read_text(errors="replace"))
            )
        return measured


def lanes_of(log: str) -> str:
    """What UCX's log says of long writes to the last connection that it made.

    It is a table for each connection and operation; the row of a write that has no end counts.
    """
    found, is_write = "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("]   |")[2].split("|")]
        if "cfg#" in line:
            is_write = False
        if "remote memory write" in line:
            is_write = True
        elif is_write and len(cells) >= 3 and cells[0].endswith("..inf"):
            found = cells[2]
    return found


async def _send(sender: TransferEnd, metadata: bytes, is_equal: Callable[[], bool]) -> Measured:
    """Write every page but the null page a few times."""
    sender.process.order(LoadAgent("to", 1, metadata))
    route = (await sender.reports.next(AgentLoaded)).path
    pages = Pages(pack_ids(list(range(1, PAGES))))
    times: list[float] = []
    for number in range(POSTS):
        sender.process.order(
            Post(
                post=number,
                incarnation="to",
                generation=1,
                component=REGION,
                source=pages,
                destination=pages,
            )
        )
        times.append((await sender.reports.next(PostDone)).active_s)
    return Measured(
        moved_bytes=PAGE_BYTES * (PAGES - 1), best_s=min(times), route=route, bytes_equal=is_equal()
    )


class TransferEnd(NamedTuple):
    """One transfer process that serves, and what it reports."""

    process: TransferProcess
    reports: ReportQueue
    metadata: bytes


SHAPE = Geometry(
    pages=PAGES,
    page_bytes=PAGE_BYTES,
    rows=(PieceRow(0, PAGE_BYTES, PAGE_BYTES),),
    tensors=(),
)


def of_host(fd: int, name: str = REGION) -> RegionPlan:
    """A region in that file."""
    return RegionPlan(name, fd, SHAPE)


@contextlib.asynccontextmanager
async def end_of(
    name: str, regions: list[RegionPlan], environment: Mapping[str, str]
) -> AsyncIterator[TransferEnd]:
    """A transfer process over these regions, for as long as the block lasts."""
    process = TransferProcess(f"doctor-{os.getpid()}-{name}", regions, environment=environment)
    reports = ReportQueue()
    try:
        ready = await reports.start(process)
        yield TransferEnd(process, reports, ready.metadata)
    finally:
        await process.stop()


@contextlib.contextmanager
def memory() -> Iterator[int]:
    """A file in memory for one region."""
    fd = os.memfd_create("kvd-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, PAGE_BYTES * PAGES)
        yield fd
    finally:
        os.close(fd)


def fill(fd: int, payload: bytes) -> None:
    """Give every page its own bytes: the payload, beginning with the page's number."""
    with mmap.mmap(fd, 0) as memory:
        memory[PAGE_BYTES:] = _pages(payload)


def holds(fd: int, payload: bytes) -> bool:
    """Whether every page has arrived."""
    with mmap.mmap(fd, 0) as memory:
        return memory[PAGE_BYTES:] == _pages(payload)


def _pages(payload: bytes) -> bytes:
    """All but the null page."""
    return b"".join(page.to_bytes(4, "little") + payload[4:] for page in range(1, PAGES))
