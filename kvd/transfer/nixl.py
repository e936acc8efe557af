"""NIXL, and nothing else: the only file that imports the binding, and drives its UCX backend.

Its POSIX backend is driven by ``kvd.storage.nixl_files``, through ``Binding``.

A ``ReceivingAgent`` is the one passive agent of a process: it registers regions and serves whoever
holds its metadata, on NIXL's own progress thread. A ``SendingAgent`` is the agent for one transport
generation of one peer: no thread of its own, driven by the worker's loop through ``descriptors``.

Rules learned by measuring NIXL 1.5.1 with UCX 1.23:
  - The progress thread must be event driven (a delay above 0): the default burns a core while idle.
  - A receiver without progress lets nobody finish; a sender sharing the receiver's agent starves.
  - Destroying a sender is the only abort. Releasing a running handle stops nothing.
  - A handle must never be released after its agent is gone, so handles in flight die with it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import socket
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd.transfer.metadata import HOST, MemoryKind
from kvd.transfer.streams import event_polls, outward, sent_bytes, sockets_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from kvd.transfer.descriptors import Words
    from kvd.transfer.metadata import MemorySite, Metadata

DEFAULT_ENVIRONMENT: Final = {
    "UCX_MEM_MMAP_HOOK_MODE": "none",  # saves 0.4 s; regions stay mapped until the process ends
    "UCX_TCP_CONN_NB": "y",  # a blackholed peer must not block the loop for two minutes
    "UCX_TCP_TX_SEG_SIZE": "64k",
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_DEBUG_SIGNO": "0",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "NIXL_LOG_LEVEL": "ERROR",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""Set before the binding is imported, unless the operator set them."""

PROGRESS_DELAY_US: Final = 500_000
"""A safety tick; the thread wakes by event, so it costs no latency (85 us for 4 KiB either way).
At rest its wakes are most of what the process does: 12 a second with 100 ms, 4 with this."""

SPARE_DESCRIPTORS: Final = 24
"""UCX takes so many for one agent, measured: with 24 in all of a process it fails in the middle."""

_BINDINGS: Final = ("nixl_cu13", "nixl_cu12")
_LINGER_NONE: Final = struct.pack("ii", 1, 0)


class NixlUnusable(Exception):
    """NIXL is not installed, or refuses to do what was asked; the message is its own."""


class MemorySpan(NamedTuple):
    """Memory in a row that NIXL is to know before it writes there."""

    address: int
    size: int
    place: MemorySite = HOST


class Sides(NamedTuple):
    """Of which kind the memory is that is read, and the memory that is written."""

    source: MemoryKind
    destination: MemoryKind


BOTH_HOST: Final = Sides(MemoryKind.DRAM, MemoryKind.DRAM)


class Binding:
    """The imported binding: ``api`` is its C++ module (Any: it has no types)."""

    def __init__(self, cuda_major: int = 0) -> None:
        """``cuda_major`` is of the CUDA driver, where device memory is to be registered."""
        for name, value in DEFAULT_ENVIRONMENT.items():
            # What the operator has set wins.
            os.environ.setdefault(name, value)
        if cuda_major:
            os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")  # allocated before UCX, it looks host
        module = _import_first(cuda_major)
        self.module = module.__name__.partition(".")[0]
        self.api: Any = module.nixlBind
        self.errors: tuple[type[Exception], ...] = tuple(
            value
            for name, value in vars(self.api).items()
            if name.startswith("nixl") and name.endswith("Error")
        )
        self.segments = {MemoryKind.DRAM: self.api.DRAM_SEG, MemoryKind.VRAM: self.api.VRAM_SEG}

    def agent(self, name: str, *, progress_delay_us: int) -> Any:
        """A bare agent; a delay of 0 means that it has no progress thread."""
        config = self.api.nixlAgentConfig()
        config.useProgThread = progress_delay_us > 0
        config.pthrDelay = progress_delay_us
        config.useListenThread = False
        config.syncMode = self.api.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = False
        return self.api.nixlAgent(name, config)

    def register(self, agent: Any, spans: list[MemorySpan]) -> None:
        """Register memory with ``agent``, kind by kind."""
        for kind, segment in self.segments.items():
            rows = [(*span[:2], span.place.device, "") for span in spans if span.place.kind is kind]
            if rows:
                agent.registerMem(self.api.nixlRegDList(segment, rows))

    @contextlib.contextmanager
    def translating(self, doing: str) -> Iterator[None]:
        """Turn the binding's exceptions, each derived straight from Exception, into ours."""
        try:
            yield
        except self.errors as exc:
            msg = f"{doing}: {type(exc).__name__} {exc}".strip()
            raise NixlUnusable(msg) from exc


def no_backend() -> str:
    """What keeps UCX from beginning, as far as this process can see it, and what to do."""
    open_now = len(os.listdir("/proc/self/fd"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit - open_now < SPARE_DESCRIPTORS:
        return (
            f"{open_now} of {limit} descriptors are open, and it needs {SPARE_DESCRIPTORS}: raise "
            "LimitNOFILE of the unit, or ulimit -n"
        )
    devices = {*_listed("/sys/class/net"), *_listed("/sys/class/infiniband")}
    chosen = os.environ.get("UCX_NET_DEVICES", "all").split(",")
    # As UCX writes them: mlx5_0:1 is a port, ^eth0 is all but that.
    named = {device.strip().partition(":")[0] for device in chosen if not device.startswith("^")}
    missing = sorted(named - devices - {"", "all"})
    if missing:
        return (
            f"UCX_NET_DEVICES names {', '.join(missing)}, and this host has "
            f"{', '.join(sorted(devices))}: correct it in [transfer.ucx] or in the environment"
        )
    tls = os.environ.get("UCX_TLS")
    if tls is not None:
        return f"UCX_TLS is {tls!r}: try without it, and see kvd doctor"
    return "see what UCX says above, and kvd doctor"


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


class ReceivingAgent:
    """The passive agent: registered regions that peers write into."""

    def __init__(self, binding: Binding, name: str, spans: list[MemorySpan]) -> None:
        threads = _threads()
        with binding.translating(f"creating the receiving agent {name!r}"):
            self._agent = binding.agent(name, progress_delay_us=PROGRESS_DELAY_US)
            try:
                self._agent.createBackend("UCX", {})
            except binding.errors as exc:
                # NIXL says that its backend failed, and UCX why, in lines of their own or not.
                msg = f"UCX does not begin for the receiving agent {name!r}: {exc}; {no_backend()}"
                raise NixlUnusable(msg) from exc
            binding.register(self._agent, spans)
            self.blob: bytes = self._agent.getLocalMD()
        # NIXL does not say which thread is its own; ``quiescence`` has to watch it.
        self.thread = max(_threads() - threads)


class SendingAgent:
    """The sending agent for one generation of one peer.

    Made by any one thread, then used by one. ``polls`` are level-triggered descriptors that become
    readable when ``step`` has something to find; empty where the network gives none.
    """

    def __init__(
        self, binding: Binding, name: str, *, spans: list[MemorySpan], peer: Metadata
    ) -> None:
        self._binding = binding
        self._api = binding.api
        self._peer = peer.agent
        # What is new after the agent was made is its own: UCX does not say which descriptors are.
        before = event_polls()
        with binding.translating(f"creating a sending agent for {peer.agent!r}"):
            self._agent: Any = binding.agent(name, progress_delay_us=0)
            self._agent.createBackend("UCX", {})
            binding.register(self._agent, spans)
            loaded = self._agent.loadRemoteMD(peer.blob)
        # The name in the blob is what NIXL goes by: of another agent it would be that one's memory.
        if loaded.decode() != peer.agent:
            raise NixlUnusable(
                f"the metadata of {peer.agent!r} holds an agent named {loaded.decode()!r}"
            )
        self.polls = sorted(event_polls() - before)

    def post(self, source: Words, destination: Words, sides: Sides = BOTH_HOST) -> int:
        """Start a write and return its handle; of host memory on one host this call copies.

        Raises:
            NixlUnusable: the peer is gone or refuses; over a network, part may have been sent.
        """
        api, segments = self._api, self._binding.segments
        try:
            handle: int = self._agent.createXferReq(
                api.NIXL_WRITE,
                api.nixlXferDList(segments[sides.source], source),
                api.nixlXferDList(segments[sides.destination], destination),
                self._peer,
            )
            self._agent.postXferReq(handle)
        except self._binding.errors as exc:
            raise self._failed(exc) from exc
        return handle

    def step(self, handle: int) -> bool:
        """Make progress; whether ``handle`` is done, which releases it.

        Raises:
            NixlUnusable: it failed.
        """
        try:
            status = self._agent.getXferStatus(handle)
            if status == self._api.NIXL_IN_PROG:
                return False
            # While its agent is there: after that it must not be touched.
            self._agent.releaseXferReq(handle)
        except self._binding.errors as exc:
            raise self._failed(exc) from exc
        if status != self._api.NIXL_SUCCESS:
            raise NixlUnusable(f"writing to {self._peer!r}: {status}")
        return True

    def progress(self) -> None:
        """Let an idle agent handle what its peer did."""
        with contextlib.suppress(*self._binding.errors):
            self._agent.getNotifs({})

    def socket_bytes(self) -> int:
        """Payload bytes its sockets have sent so far, acknowledged or not."""
        return sent_bytes(self.polls)

    def streams(self) -> tuple[str, ...]:
        """Its connections with the peer; they stay the same once a write has arrived."""
        return outward(self.polls)

    def _failed(self, exc: Exception) -> NixlUnusable:
        return NixlUnusable(f"writing to {self._peer!r}: {type(exc).__name__} {exc}".strip())

    def destroy(self) -> None:
        """Abort everything in flight: after this no byte leaves this process through it.

        Its sockets are reset, not closed: a plain close would go on sending what they still hold.
        """
        # Before the agent goes: after that nothing leads to its sockets any more.
        for descriptor in sockets_of(self.polls):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as tcp:
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
        # The last reference: this is what destroys it.
        del self._agent


def _import_first(cuda_major: int) -> ModuleType:
    """The first binding that imports: two of them in one process clash.

    One that was built for a newer CUDA than the driver knows imports all the same, and then takes
    device memory for the host's.
    """
    missing = []
    for name in sorted(_BINDINGS, key=lambda binding: binding != f"nixl_cu{cuda_major}"):
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as exc:
            missing.append(f"{name}: {exc}")
    raise NixlUnusable(
        f"no NIXL binding can be imported ({'; '.join(missing)}); pip install 'kvd[daemon]'"
    )


def _threads() -> set[int]:
    """This process's threads, without those of no agent: one that UCX shares, and CUDA's."""
    found = set()
    for entry in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{entry}/comm", encoding="ascii") as name:
            if not name.read().startswith(("async\n", "cuda")):
                found.add(int(entry))
    return found
