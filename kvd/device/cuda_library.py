"""Where a CUDA runtime is found, and why there is none.

Looked at in this order: the file that ``CUDART_LIBRARY`` names, and then nothing else; what pip
installed (``nvidia-cuda-runtime``, which torch brings); torch's own folder; whatever the loader
knows. The first whose driver answers is taken: a newer runtime than the driver can serve says so,
and the next one may fit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.device.cuda import CudaError, Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLE: Final = "CUDART_LIBRARY"
FIX: Final = (
    "install the NVIDIA driver and nvidia-cuda-runtime (a CUDA build of torch brings it), or name "
    f"the library in {VARIABLE}"
)
_NAME: Final = "libcudart.so*"
_LOADER: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


class NoCuda(msgspec.Struct, frozen=True):
    """There is no CUDA here that could be used; ``why`` says what was tried.

    ``is_installed``: a runtime was found, and it found no driver or device.
    """

    why: str
    is_installed: bool = False

    @property
    def sentence(self) -> str:
        """What was tried, and what to do."""
        return f"{self.why}; {FIX}"


def load(environ: Mapping[str, str] | None = None) -> Runtime | NoCuda:
    """The runtime of this host, with at least one device, or why there is none."""
    tried: dict[str, list[str]] = {}
    installed: set[str] = set()
    for path in candidates(os.environ if environ is None else environ, sys.path):
        found = _open(path)
        if isinstance(found, Runtime):
            return found
        tried.setdefault(found.why, []).append(path)
        if found.is_installed:
            installed.add(found.why)
    told = [f"{', '.join(tried[why])}: {why}" for why in tried if why in installed or not installed]
    return NoCuda(f"no CUDA device can be used here: {'; '.join(told)}", bool(installed))


def candidates(environ: Mapping[str, str], path: list[str]) -> Iterator[str]:
    """What to try to load, in order; ``path`` is where packages lie."""
    named = environ.get(VARIABLE)
    if named is not None:
        yield named
        return
    for place in path:
        here = Path(place)
        for pattern in (f"nvidia/*/lib/{_NAME}", f"torch/lib/{_NAME}"):
            with contextlib.suppress(OSError):  # a place that this user may not look into
                yield from (str(library) for library in sorted(here.glob(pattern), reverse=True))
    yield from _LOADER


def _open(path: str) -> Runtime | NoCuda:
    try:
        runtime = Runtime(ctypes.CDLL(path), path)
    except OSError:
        return NoCuda("cannot be loaded")
    except AttributeError as exc:
        return NoCuda(f"is no CUDA runtime that kvd knows: {exc}")
    try:
        count = runtime.device_count()
    except CudaError as exc:
        return NoCuda(f"{exc}", is_installed=True)
    return runtime if count else NoCuda("finds no device", is_installed=True)
