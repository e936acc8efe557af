"""Proof, before anybody is served, that NIXL reaches the memory of devices: a write there and back.

A NIXL whose UCX has no module for this CUDA takes device memory for the host's, and refuses to
register it if it notices. One that does register it may still not move it: the first post would
tell. So each region on a device is written to from scratch memory, and read, by a sending agent
like any other; its first bytes are zeroed again.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.device.cuda import CudaError
from kvd.transfer.copies import Scattered
from kvd.transfer.device_streams import DeviceStuck
from kvd.transfer.devices import DeviceUnusable
from kvd.transfer.metadata import HOST, MemoryKind
from kvd.transfer.nixl import NixlUnusable, SendingAgent, Sides
from kvd.transfer.sending_agents import SCRATCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.transfer.copies import Area, Bytes
    from kvd.transfer.descriptors import Words
    from kvd.transfer.metadata import MemorySite, Metadata
    from kvd.transfer.nixl import Binding
    from kvd.transfer.sending_agents import OwnMemory

PROOF_BYTES: Final = 4096
WITHIN_S: Final = 10.0
_LOOK_MS: Final = 1


def prove(binding: Binding, mine: OwnMemory, told: Metadata) -> None:
    """Write into every region on a device, and read it, through NIXL.

    Raises:
        NixlUnusable: the bytes did not arrive.
        DeviceUnusable: no copy engine reads them.
    """
    areas = _on_devices(mine)
    if areas:
        sender = SendingAgent(binding, f"{mine.name}-proof", spans=mine.spans(), peer=told)
        for area in areas:
            _prove(sender, area, mine.scratch)
        sender.destroy()


@contextlib.contextmanager
def advised(binding: Binding, mine: OwnMemory) -> Iterator[None]:
    """Say what to install or set, when NIXL fails and regions lie on devices.

    Raises:
        NixlUnusable: what was raised inside, with that advice.
    """
    try:
        yield
    except NixlUnusable as exc:
        if not _on_devices(mine):
            raise
        raise NixlUnusable(
            f"NIXL does not reach the memory of the device: {exc}; install the build of NIXL for "
            f"the CUDA of this driver (nixl-cu12 or nixl-cu13; here: {binding.module}), and look "
            "whether its UCX has cuda_copy and cuda_ipc (UCX_LOG_LEVEL=info says what it loads, "
            "UCX_TLS must not leave them out)"
        ) from exc


def _on_devices(mine: OwnMemory) -> list[Area]:
    return [area for area in mine.regions.values() if not area.is_readable]


def _prove(sender: SendingAgent, area: Area, scratch: int) -> None:
    """There and back: the first half of scratch memory goes out, the second is what comes back."""
    note, size = area.note, min(PROOF_BYTES, area.note.region_bytes)
    assert 2 * size <= SCRATCH_BYTES
    out, back = (
        np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
        for address in (scratch, scratch + size)
    )
    # No byte is 0 and no two neighbours are equal: neither fresh memory nor a shift passes for it.
    out[:] = np.arange(size) % 251 + 1
    _write(
        sender,
        (_row(scratch, size), _row(note.address, size, note.place)),
        Sides(MemoryKind.DRAM, note.place.kind),
    )
    # Read by a copy engine first: both ways through NIXL could be wrong alike, and agree.
    first = Scattered(np.array([note.address], np.uint64), np.array([size], np.uint64))
    try:
        (seen,) = area.reach.stretches(first, size)
    except (CudaError, DeviceStuck) as exc:
        raise DeviceUnusable(
            f"no copy engine brings memory of region {note.name!r} to this host: {exc}"
        ) from exc
    _compare(seen, out, f"written into region {note.name!r}", note.place)
    _write(
        sender,
        (_row(note.address, size, note.place), _row(scratch + size, size)),
        Sides(note.place.kind, MemoryKind.DRAM),
    )
    _compare(back, out, f"read from region {note.name!r}", note.place)
    out[:] = back[:] = 0
    _write(
        sender,
        (_row(scratch, size), _row(note.address, size, note.place)),
        Sides(MemoryKind.DRAM, note.place.kind),
    )


def _row(address: int, size: int, place: MemorySite = HOST) -> Words:
    return np.array([[address, size, place.device]], np.uint64)


def _write(sender: SendingAgent, rows: tuple[Words, Words], sides: Sides) -> None:
    handle = sender.post(*rows, sides)
    until_s = time.monotonic() + WITHIN_S
    news = select.poll()
    for descriptor in sender.polls:
        news.register(descriptor, select.POLLIN)
    while not sender.step(handle):
        if time.monotonic() > until_s:
            raise NixlUnusable(
                f"a write of {PROOF_BYTES} bytes was not done within {WITHIN_S:.0f} s"
            )
        news.poll(_LOOK_MS)


def _compare(seen: Bytes, wanted: Bytes, what: str, place: MemorySite) -> None:
    if not np.array_equal(seen, wanted):
        raise NixlUnusable(
            f"other bytes were {what} ({place.kind.value} of device {place.device}) than were sent"
        )
