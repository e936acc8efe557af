"""Objects of a store that speaks S3, moved by NIXL's OBJ backend; nothing else in kvd speaks to it.

Rules learned by measuring NIXL 1.5.1:
  - A read of an object that is shorter than asked is done as well as any other, and the rest of the
    memory is as it was. Whoever reads must know by what is read that all of it came.
  - A status is one for a request, without a reason: not there, not allowed and out of reach look
    alike. So each object is a request of its own.
  - Nothing is ever taken back: a request that nobody waits for any more goes on reading or writing
    memory. So what moves are slots of memory of our own, and one is used again when its request is
    over, however late that is; the pool is never written by NIXL here.
  - A closed port takes it 26 s, and a server that is silent 70 s: whoever waits has a time of its
    own, and asks the kernel first whether anybody listens.
  - An object is found by its device number, so no two that are registered may have the same.
  - The plugin of the wheel for CUDA 13 wants a library of CUDA's; that for CUDA 12 does not.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from kvd.storage.sizes import HEAD_BYTES
from kvd.transfer.metadata import MemoryKind
from kvd.transfer.nixl import MemorySpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvd.transfer.nixl import Binding

    Bytes = NDArray[np.uint8]

CUDA_MAJOR: Final = 12
"""Of the binding whose plugin loads everywhere."""
LOOK_EVERY_S: Final = 0.0003
CONNECT_S: Final = 1.0
QUIET_S: Final = 1.0
"""So long nobody is asked after it was given up: whatever waits is answered at once."""
ABSENT: Final = "the store has it not, or refuses it"


class StoreSite(NamedTuple):
    """Where the store is; what it wants to be shown NIXL finds where AWS's own tools do."""

    endpoint: str
    bucket: str
    region: str
    ca_file: str | None = None

    def parameters(self, requests: int) -> dict[str, str]:
        """As NIXL's backend has them."""
        found = {
            "endpoint_override": self.endpoint,
            "scheme": urlsplit(self.endpoint).scheme,
            "bucket": self.bucket,
            "region": self.region,
            "use_virtual_addressing": "false",
            "num_threads": str(requests),
        }
        return found | ({"ca_bundle": self.ca_file} if self.ca_file is not None else {})

    def refuses(self) -> str:
        """Why nobody can be reached there, as the kernel says it at once; empty if one listens."""
        found = urlsplit(self.endpoint)
        port = found.port or (443 if found.scheme == "https" else 80)
        try:
            socket.create_connection((found.hostname or "", port), CONNECT_S).close()
        except OSError as exc:
            return f"{self.endpoint}: {exc.strerror or exc}"
        return ""


class ObjectMove(NamedTuple):
    """One object, its bytes, and what is done with its slot: before it is written, or once read.

    ``read`` says what is wrong with what came; empty if nothing is.
    """

    name: str
    n_bytes: int
    fill: Callable[[Bytes], None] | None = None
    read: Callable[[Bytes], str] | None = None


class _Request(NamedTuple):
    """One that was posted. ``at``: of which move."""

    handle: Any
    registered: Any
    slot: int
    at: int


class ObjectQueue:
    """Requests over slots of its own memory, at most one each; for one thread."""

    def __init__(
        self, binding: Binding, name: str, site: StoreSite, slots: int, slot_bytes: int
    ) -> None:
        """Begin; nobody is asked yet.

        Raises:
            NixlUnusable: the backend does not begin.
        """
        self._binding, self._api = binding, binding.api
        self._name, self._site = name, site
        self._memory = np.zeros((slots, slot_bytes), np.uint8)
        self._free = list(range(slots))
        self._stuck: list[_Request] = []
        """Nobody waits for them any more, and their slots are not ours yet."""
        self._devices = 0
        self._failing = False
        """Whether the last request that was over had failed or was given up."""
        self._quiet = (0.0, "")
        """Until when nobody is asked, and why."""
        with binding.translating(f"creating the object queue {name!r}"):
            self._agent: Any = binding.agent(name, progress_delay_us=0)
            self._agent.createBackend("OBJ", site.parameters(slots))
            span = MemorySpan(self._memory.ctypes.data, self._memory.nbytes)
            binding.register(self._agent, [span])

    def write(self, moves: Sequence[ObjectMove], silent_s: float, whole_s: float) -> list[str]:
        """Write these; of each why it is not there, empty if it is.

        Those without an answer are given up once none has answered for ``silent_s``, or when all
        together have taken ``whole_s``.
        """
        return self._move(self._api.NIXL_WRITE, moves, silent_s, whole_s)

    def read(self, moves: Sequence[ObjectMove], silent_s: float, whole_s: float) -> list[str]:
        """Read them; as ``write``."""
        return self._move(self._api.NIXL_READ, moves, silent_s, whole_s)

    def _move(
        self, operation: Any, moves: Sequence[ObjectMove], silent_s: float, whole_s: float
    ) -> list[str]:
        self._reap()
        until_s, why = self._quiet
        if time.monotonic() > until_s:
            why = self._site.refuses() if self._failing and moves else ""
        if why:
            return [why] * len(moves)
        silence = f"{self._site.endpoint}: no answer within {silent_s:g} s"
        outcomes = [silence] * len(moves)
        under_way: list[_Request] = []
        began_s = heard_s = time.monotonic()
        following = 0
        while following < len(moves) or under_way:
            while self._free and following < len(moves):
                under_way.append(self._post(operation, moves[following], following))
                following += 1
            over = [(request, why) for request in under_way if (why := self._outcome(request))]
            now_s = time.monotonic()
            for request, said in over:
                under_way.remove(request)
                outcomes[request.at] = self._taken(moves[request.at], request, said)
                heard_s = now_s
            if now_s > heard_s + silent_s or now_s > began_s + whole_s:
                self._failing, self._quiet = True, (now_s + QUIET_S, silence)
                break
            if not over:
                time.sleep(LOOK_EVERY_S)
                self._reap()
        self._stuck += under_way
        return outcomes

    def _post(self, operation: Any, move: ObjectMove, at: int) -> _Request:
        api, slot = self._api, self._free.pop()
        memory = self._memory[slot]
        if move.fill is not None:
            move.fill(memory[: move.n_bytes])
        else:
            # An object that is shorter leaves what is here: no head that anybody would believe.
            memory[: min(move.n_bytes, HEAD_BYTES)] = 0
        self._devices += 1
        registered = api.nixlRegDList(api.OBJ_SEG, [(0, move.n_bytes, self._devices, move.name)])
        self._agent.registerMem(registered)
        handle = self._agent.createXferReq(
            operation,
            api.nixlXferDList(
                self._binding.segments[MemoryKind.DRAM], [(memory.ctypes.data, move.n_bytes, 0)]
            ),
            api.nixlXferDList(api.OBJ_SEG, [(0, move.n_bytes, self._devices)]),
            self._name,
        )
        # One that is refused at once says so as all others do, when it is asked.
        with contextlib.suppress(*self._binding.errors):
            self._agent.postXferReq(handle)
        return _Request(handle, registered, slot, at)

    def _outcome(self, request: _Request) -> str:
        """``done`` or ``failed``; empty as long as it is neither."""
        try:
            status = self._agent.getXferStatus(request.handle)
        except self._binding.errors:
            return "failed"
        return "" if status == self._api.NIXL_IN_PROG else "done"

    def _taken(self, move: ObjectMove, request: _Request, said: str) -> str:
        """What has come of a request that is over; its slot is free again."""
        why = "" if said == "done" else ABSENT
        self._failing = bool(why)
        if not why and move.read is not None:
            why = move.read(self._memory[request.slot, : move.n_bytes])
        self._release(request)
        return why

    def _release(self, request: _Request) -> None:
        self._agent.releaseXferReq(request.handle)
        self._agent.deregisterMem(request.registered)
        self._free.append(request.slot)

    def _reap(self) -> None:
        """Have back the slots of requests that are over at last."""
        for request in [stuck for stuck in self._stuck if self._outcome(stuck)]:
            self._stuck.remove(request)
            self._release(request)
