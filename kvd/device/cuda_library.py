"""Where a CUDA runtime is found, and why there is none.

Looked at in this order: the file that ``KVD_CUDART`` names, and then nothing else; what pip
installed (``nvidia-cuda-runtime``, which torch brings); torch's own folder; whatever the loader
knows. The first whose driver answers is taken: a newer runtime than the driver can serve says so,
and the next one may fit.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.device.cuda import CudaError, Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLE: Final = "KVD_CUDART"
_NAME: Final = "libcudart.so*"
_LOADER: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


class NoCuda(msgspec.Struct, frozen=True):
    """There is no CUDA here that could be used; ``why`` is a sentence that says what was tried."""

    why: str


def load(environ: Mapping[str, str] | None = None) -> Runtime | NoCuda:
    """The runtime of this host, with at least one device, or why there is none."""
    tried = []
    for path in candidates(os.environ if environ is None else environ, sys.path):
        found = _open(path)
        if isinstance(found, Runtime):
            return found
        tried.append(found.why)
    what = "; ".join(tried) or "no libcudart"
    return NoCuda(
        f"no CUDA device can be used here: {what}; install the NVIDIA driver and "
        f"nvidia-cuda-runtime (a CUDA build of torch brings it), or name the library in {VARIABLE}"
    )


def candidates(environ: Mapping[str, str], path: list[str]) -> Iterator[str]:
    """What to try to load, in order; ``path`` is where packages lie."""
    named = environ.get(VARIABLE)
    if named is not None:
        yield named
        return
    for place in path:
        here = Path(place)
        for pattern in (f"nvidia/*/lib/{_NAME}", f"torch/lib/{_NAME}"):
            yield from (str(one) for one in sorted(here.glob(pattern), reverse=True))
    yield from _LOADER


def _open(path: str) -> Runtime | NoCuda:
    try:
        runtime = Runtime(ctypes.CDLL(path), path)
    except OSError as exc:
        return NoCuda(str(exc))
    except AttributeError as exc:
        return NoCuda(f"{path} is no CUDA runtime that kvd knows: {exc}")
    try:
        count = runtime.device_count()
    except CudaError as exc:
        return NoCuda(f"{path}: {exc}")
    return runtime if count else NoCuda(f"{path} finds no device")
