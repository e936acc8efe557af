"""Context-parallel ranks bring their tokens together: gathers, in logical order, without padding.

A gather of one tensor goes::

    rows of this rank     (counts[rank], heads, dim)
      | copied into the block's send part, padded with zeros to max_len rows
      | one collective of bytes: gloo knows no fp8, and no backend needs to know types here
    receive part          ranks * max_len rows
      | one read through Sharding.order, which names no row of padding
    the batch             (tokens, heads, dim), logical order

Both parts are one block of the arena: symmetric kernels run only if the send buffer and the receive
buffer are in the window, and with just one of them nothing is gained (sglang issue 37337).

On a CUDA device all of it is enqueued on the gather's own stream; blocks are reused in the order of
that stream. On the host the collective runs in threads of its library, and ``wait`` does the rest.
The CUDA path and NCCL were written after their documentation and have not run on hardware yet.

All ranks of a group must start the same gathers in the same order, as with any collective.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from kvd.device.arena import IN_FLIGHT, aligned

try:
    from torch.distributed import all_gather_single
except ImportError:  # its name before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.device.arena import ArenaBlock, DeviceArena
    from kvd.device.sequence import Sharding

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Rows are put in order in the widest of these, in bytes, that they are a multiple of."""


class GatherFailed(Exception):
    """A collective did not end: a rank is gone, or does something else. The group is lost."""


class Disagreement(Exception):
    """Ranks that must have the same number have not; ``values`` has that of each rank."""

    def __init__(self, what: str, values: dict[int, int]) -> None:
        each = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
        super().__init__(f"the ranks disagree on {what}: {each}; all of them must have the same")
        self.what = what
        self.values = values


class _Route(NamedTuple):
    """A sharding as the device needs it: kept while gathers come with the same one."""

    sharding: Sharding
    counts: tuple[int, ...]
    max_len: int
    order: torch.Tensor


class _Call(NamedTuple):
    """A collective under way.

    ``received``: uint8, (ranks * max_len, bytes of a row); ``out``: (tokens, ...), or (0, ...) on a
    rank that receives nothing.
    """

    group: dist.ProcessGroup
    work: dist.Work
    block: ArenaBlock
    received: torch.Tensor
    order: torch.Tensor
    out: torch.Tensor


class Pending:
    """A gather that was started; without a ``call`` there was nothing to move."""

    def __init__(self, result: torch.Tensor, call: _Call | None = None) -> None:
        self._result = result
        self._call = call
        self._event: torch.cuda.Event | None = None

    def finish(self) -> None:
        """Let the memory of the gather go, on the host by waiting for it. Twice is once."""
        call = self._call
        if call is None:
            return
        with _telling_of_loss(call.group, "a gather"):
            call.work.wait()
        if call.out.shape[0]:
            with torch.inference_mode():
                _put_in_order(call.received, call.order, call.out)
        call.block.release()
        self._call = None

    def enqueue(self, stream: torch.cuda.Stream) -> None:
        """Put the rest on ``stream`` as well; nothing is waited for."""
        self.finish()
        self._event = stream.record_event()

    def wait(self) -> torch.Tensor:
        """The result; on CUDA whatever the current stream does next comes after the gather.

        Raises:
            GatherFailed: a rank is gone.
        """
        self.finish()
        if self._event is not None:
            stream = torch.cuda.current_stream(self._result.device)
            stream.wait_event(self._event)
            self._result.record_stream(stream)
        return self._result


class Gather:
    """Gathers of one group: for one thread, and in the same order on all ranks.

    Args:
        group: the context-parallel ranks.
        arena: memory for these gathers alone; ``symmetric.open_arena`` makes it.
        stream: where the work goes on a CUDA device; by default a stream of its own.
    """

    def __init__(
        self, group: dist.ProcessGroup, arena: DeviceArena, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.ranks = group.size()
        self.rank = group.rank()
        self._group = group
        self._arena = arena
        self._stream = stream
        if stream is None and arena.device.type == "cuda" and self.ranks > 1:
            self._stream = torch.cuda.Stream(arena.device)  # type: ignore[no-untyped-call]
        self._last: _Route | None = None

    def start(
        self,
        x: torch.Tensor,
        sharding: Sharding,
        *,
        out: torch.Tensor | None = None,
        to: int | None = None,
    ) -> Pending:
        """Gather the rows of all ranks on all ranks. One rank alone gets ``x`` itself back.

        Args:
            x: (sharding.counts[rank], ...), any type; not to be written before ``wait``.
            sharding: the same on all ranks; make it once per batch.
            out: (sharding.tokens, ...), contiguous; by default it is allocated.
            to: the only rank that gets them, for KV that it then sends; the others get (0, ...).

        Returns:
            What gives (sharding.tokens, ...) in logical order.

        Raises:
            ValueError: shapes, types or devices do not fit together; nothing was sent.
            GatherFailed: a rank is gone.
        """
        route = self._routed(sharding)
        tokens = sharding.tokens if to in {None, self.rank} else 0
        self._check(x, route, out, tokens)
        if self.ranks == 1:
            return Pending(x if out is None else out.copy_(x))
        with self._working(x, out):
            into = out if out is not None and tokens else _empty(tokens, x)
            if not sharding.tokens or not _row_bytes(x):
                return Pending(into)
            return self._begun(x, route, into, to)

    def warm_up(self, sharding: Sharding, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Have connections and memory made that gathers of up to this size need. On all ranks.

        ``sharding`` is that of the largest batch, ``shape`` of one row of the largest tensor, such
        as (heads, dim).
        """
        rows = sharding.counts[self.rank]
        x = torch.zeros((rows, *shape), dtype=dtype, device=self._arena.device)
        for pending in [self.start(x, sharding) for _ in range(IN_FLIGHT)]:
            pending.wait()
        self.start(x, sharding, to=0).wait()

    def _routed(self, sharding: Sharding) -> _Route:
        if self._last is None or self._last.sharding != sharding:
            if sharding.ranks != self.ranks:
                msg = f"a sharding for {sharding.ranks} ranks in a group of {self.ranks}"
                raise ValueError(msg)
            with self._working():
                order = torch.from_numpy(sharding.order()).to(self._arena.device)
            counts = sharding.counts
            self._last = _Route(sharding, counts, max(counts), order)
        return self._last

    def _check(self, x: torch.Tensor, route: _Route, out: torch.Tensor | None, tokens: int) -> None:
        rows = route.counts[self.rank]
        if x.dim() < 1 or x.shape[0] != rows or x.device != self._arena.device:
            msg = (
                f"rank {self.rank} of {self.ranks} has {rows} rows on {self._arena.device}, but "
                f"the tensor is {tuple(x.shape)} on {x.device}"
            )
            raise ValueError(msg)
        if out is None or not tokens:
            return
        wanted = (tokens, *x.shape[1:])
        fits = tuple(out.shape) == wanted and out.dtype == x.dtype and out.device == x.device
        if not fits or not out.is_contiguous():
            msg = (
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}, strides {out.stride()}; "
                f"the result needs {wanted} {x.dtype} on {x.device}, contiguous"
            )
            raise ValueError(msg)

    def _begun(self, x: torch.Tensor, route: _Route, out: torch.Tensor, to: int | None) -> Pending:
        row_bytes = _row_bytes(x)
        send_bytes = route.max_len * row_bytes
        # A function of the sharding and the row: every rank takes as much, whatever it has itself.
        block = self._arena.take(aligned(send_bytes) + self.ranks * send_bytes)
        send = _padded(x, block, send_bytes)
        received = block.memory[aligned(send_bytes) :]
        with _telling_of_loss(self._group, "a gather"):
            if to is None:
                work = collect(received, send, self._group)
            else:
                parts = list(received.view(self.ranks, -1)) if to == self.rank else None
                work = dist.gather(send, parts, group=self._group, async_op=True, group_dst=to)
        call = _Call(
            group=self._group,
            work=work,
            block=block,
            received=received.view(-1, row_bytes),
            order=route.order,
            out=out,
        )
        pending = Pending(out, call)
        block.hold(pending.finish)
        if self._stream is not None:
            pending.enqueue(self._stream)
        return pending

    @contextlib.contextmanager
    def _working(self, *tensors: torch.Tensor | None) -> Iterator[None]:
        """What is done inside goes on the gather's stream, after what made these tensors."""
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.current_stream(self._arena.device))
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                yield


@contextlib.contextmanager
def _telling_of_loss(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Say of a collective that did not end what it means, and what to do."""
    try:
        yield
    except RuntimeError as broken:
        raise GatherFailed(
            f"rank {group.rank()} of {group.size()}: {what} did not end ({broken}); a rank is gone "
            "or started something else: make a new group, compute the prompt again"
        ) from broken


def agree(what: str, value: int, group: dist.ProcessGroup) -> int:
    """The number of 64 bits, if all ranks have the same one. To be called by all of them.

    ``what`` is its name in the error, such as ``decode_prefix_len``; over gloo or NCCL.

    Raises:
        Disagreement: on every rank alike, with the number of each rank of the group.
        GatherFailed: a rank is gone.
    """
    if group.size() == 1:
        return value
    is_host = "gloo" in dist.get_backend(group)
    device = torch.device("cpu") if is_host else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    every = torch.empty(group.size(), dtype=torch.int64, device=device)
    with _telling_of_loss(group, f"comparing {what}"):
        collect(every, mine, group).wait()
    values = every.tolist()
    if len(set(values)) > 1:
        raise Disagreement(what, dict(enumerate(values)))
    return value


def collect(received: torch.Tensor, send: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the bare collective: as much of every rank, in the order of the ranks.

    ``received`` is (ranks * n,), contiguous, ``send`` (n,) of the same type; neither is to be
    touched before ``wait`` of what is returned.
    """
    work: dist.Work | None = all_gather_single(received, send, group=group, async_op=True)
    assert work is not None
    return work


def _row_bytes(x: torch.Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


def _empty(tokens: int, x: torch.Tensor) -> torch.Tensor:
    # What is made in inference mode could not be written outside it later.
    with torch.inference_mode(mode=False):
        return torch.empty((tokens, *x.shape[1:]), dtype=x.dtype, device=x.device)


def _padded(x: torch.Tensor, block: ArenaBlock, send_bytes: int) -> torch.Tensor:
    """The bytes of ``x``, with zeros to ``send_bytes``: uint8, (send_bytes,).

    In place where no symmetric memory asks for a copy and no row of padding is missing.
    """
    if not block.is_symmetric and x.is_contiguous() and x.nbytes == send_bytes:
        return x.detach().view(-1).view(torch.uint8)
    send = block.memory[:send_bytes]
    send[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    send[x.nbytes :].zero_()
    return send


def _put_in_order(received: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> None:
    """Read the rows that ``order`` names, and no others, into ``out``."""
    row_bytes = received.shape[1]
    word = WORDS[math.gcd(row_bytes, out.storage_offset() * out.element_size(), max(WORDS))]
    into = out.view(-1).view(torch.uint8).view(-1, row_bytes)
    torch.index_select(received.view(word), 0, order, out=into.view(word))
