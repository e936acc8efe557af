"""The window of an arena: memory at the same place on every rank, which peers reach by themselves.

With both buffers of a gather in such memory, registered with the communicator, NCCL runs its
symmetric kernels over NVLink. It is allocated and registered once, at the start: registering is a
collective, and one in the middle of a request hangs if the ranks do not come alike.

Everything here that needs a GPU goes through ``NcclWindows`` and nothing else. It is written after
the documentation of torch and **has not run on hardware**.

Where there is no such memory an arena has no window: its gathers go through plain memory, and their
results are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from kvd.device.arena import DeviceArena, plain_arena
from kvd.device.collectives import Disagreement, agree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WINDOW_BYTES = 4 * 2**30
"""Of each rank. A layer of 128k tokens with 8 heads of 128 in bf16 is 256 MiB on every rank."""


class NcclWindows:
    """Memory that NCCL allocates and registers as a window; not exercised on hardware.

    The communicator must exist before: give ``init_process_group`` its ``device_id``. NCCL 2.27 or
    later, all ranks in one NVLink domain; otherwise NCCL uses its other kernels without a word.
    Look for ``[Symmetric]`` in what ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING`` prints.
    """

    def are_available(self, device: torch.device, group: ProcessGroup) -> bool:
        """Whether there is such memory: the same on all ranks, found out without asking them."""
        # enable_symm_mem_for_group raises nothing on a CPU: it is no test of what is there.
        has_backend = symmetric.get_backend(device) is not None
        return has_backend and "nccl" in dist.get_backend(group)

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """By ncclMemAlloc: uint8, shape (size,). RuntimeError: there is not so much."""
        symmetric.set_backend("NCCL")
        return symmetric.empty(size, dtype=torch.uint8, device=device)

    def register(self, memory: torch.Tensor, group: ProcessGroup) -> None:
        """By ncclCommWindowRegister of all of it, a collective: all blocks are in the window."""
        symmetric.rendezvous(memory, group)


def open_arena(
    group: ProcessGroup,
    device: torch.device,
    *,
    window_bytes: int = WINDOW_BYTES,
    windows: NcclWindows | None = None,
) -> DeviceArena:
    """An arena for the gathers of a group, with a window if there can be one.

    To be called by all ranks with the same size. Without a collective if the size is 0, for one
    rank alone and where the device has no such memory. If one rank cannot allocate its window, none
    has one.

    ``window_bytes`` are of this rank. ``windows`` is how the memory is had, by default from NCCL.
    """
    windows = windows or NcclWindows()
    if not window_bytes or group.size() == 1 or not windows.are_available(device, group):
        return plain_arena(device)
    try:
        with torch.inference_mode(mode=False):
            memory = windows.allocate(window_bytes, device)
    except RuntimeError:  # out of memory is one
        memory = torch.empty(0, dtype=torch.uint8, device=device)
    try:
        agree("the bytes of their symmetric memory", memory.numel(), group)
    except Disagreement:
        return plain_arena(device)
    if memory.numel():
        windows.register(memory, group)
    return DeviceArena(memory)
