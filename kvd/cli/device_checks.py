"""The check of ``kvd doctor`` that looks at CUDA: the runtime, its devices, and a pool on them."""

from __future__ import annotations

from kvd.cli.finding import Finding, Subject, good, poor, wrong
from kvd.cli.running import judged
from kvd.config.pool import pool_spec
from kvd.device.cuda import CudaError, Runtime
from kvd.device.cuda_library import load
from kvd.device.presence import absent
from kvd.pools.build import device_bytes
from kvd.text import amount


def cuda(subject: Subject) -> list[Finding]:
    """What there is of CUDA, and whether a pool that is to lie on devices can."""
    wanted = device_bytes(pool_spec(subject.config))
    missing = absent(wanted)
    if missing is not None:
        return [wrong("cuda", f"pool.device: {missing.why}", missing.fix)]
    runtime = load()
    if not isinstance(runtime, Runtime):
        return [good("cuda", f"{runtime.why}; the pool needs none")]
    try:
        return [_found(runtime), *_room(runtime, wanted, is_free=not judged(subject).pid)]
    except CudaError as exc:
        return [poor("cuda", str(exc), "nvidia-smi says what is wrong with the device")]


def _found(runtime: Runtime) -> Finding:
    places = [runtime.bus_id(device) for device in range(runtime.device_count())]
    devices = ", ".join(f"cuda:{number} at {place}" for number, place in enumerate(places))
    what = f"runtime {runtime.version()}, driver for {runtime.driver_version()}; {devices}"
    return good("cuda", f"{what} ({runtime.path})")


def _room(runtime: Runtime, wanted: dict[int, int], *, is_free: bool) -> list[Finding]:
    """Whether the pool fits on its devices; a daemon that runs has it there already."""
    out = []
    for device, needed in wanted.items() if is_free else ():
        room = runtime.room(device)
        what = f"the pool takes {amount(needed)} of {amount(room.free_bytes)} free"
        if needed <= room.free_bytes:
            out.append(good(f"memory of cuda:{device}", what))
        else:
            fix = f"set pool.size to at most {room.free_bytes // 2**20}MiB, or end who has it"
            out.append(wrong(f"memory of cuda:{device}", what, fix))
    return out
