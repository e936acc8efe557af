"""Which attention kernel serves a pool, decided once: a table of limits, and nothing else.

``choose`` is a pure function of what the machine has and what is needed of a kernel. It goes from
the best kernel to the plainest, keeps the reason why each better one will not do, and always ends:
``Kernel.TORCH`` can do everything. Nothing here imports torch or a kernel; only ``machine`` looks
at the computer, and asks for names of installed distributions without importing them.

Sources of the limits (none of the CUDA kernels was exercised on hardware by this project):

- flash-attn 4 (``flash_attn.cute``): 16-bit, head_dim <= 256 in steps of 8; pages only on compute
  capability 10 and 11 (its own assertions refuse 8, 9 and 12); latents on 10 and 11 by ``qv``.
- flash-attn 3 (``flash_attn_interface``): Hopper alone, 16-bit, pages of any size; latents by
  ``qv``, a rotated part of up to 64 and a latent of at least 256. No sinks.
- flash-attn 2 (``flash_attn``): capability 8 and above, 16-bit, pages of a multiple of 256 tokens
  ("Paged KV cache block size must be divisible by 256"), K and V of one head_dim. No sinks.
- torch 2.13 ``varlen_attn``: the flash-attn 2 that torch is built with, so the same limits; it
  takes neither softcap nor sinks.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from kvd.core.layout.page_sizes import kernel_flaw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class Kernel(enum.Enum):
    """A way to compute attention, best first. The value is its name in words."""

    FLASH_4 = "flash-attn 4"
    FLASH_3 = "flash-attn 3"
    FLASH_2 = "flash-attn 2"
    VARLEN = "torch varlen_attn"
    TORCH = "torch matmul in blocks"


DISTRIBUTIONS = {
    Kernel.FLASH_4: "flash-attn-4",
    Kernel.FLASH_3: "flash-attn-3",
    Kernel.FLASH_2: "flash-attn",
}
"""What must be installed for a kernel; the others come with torch."""

VARLEN_SINCE = (2, 13)
"""The version of torch whose ``varlen_attn`` takes a block table."""


class Machine(msgspec.Struct, frozen=True):
    """Where attention is to be computed.

    ``device``: "cuda", "cpu", ...; ``capability``: of a CUDA device, (0, 0) elsewhere.
    """

    device: str
    capability: tuple[int, int]
    torch_version: tuple[int, int]
    installed: frozenset[Kernel]


class Need(msgspec.Struct, frozen=True):
    """What a kernel must be able to do.

    ``dtype`` as torch calls it, without the module. ``page_size`` 0: K and V do not lie in pages.
    ``is_latent``: one KV head whose V is the first ``v_dim`` elements of its K (MLA).
    """

    dtype: str
    k_dim: int
    v_dim: int
    page_size: int = 0
    is_latent: bool = False
    has_sinks: bool = False
    has_softcap: bool = False


class Choice(msgspec.Struct, frozen=True):
    """The kernel, and why each better one will not do."""

    kernel: Kernel
    why_not: dict[Kernel, str]

    @override
    def __str__(self) -> str:
        reasons = "; ".join(f"not {kernel.value}: {why}" for kernel, why in self.why_not.items())
        return f"{self.kernel.value} ({reasons})" if reasons else self.kernel.value


def choose(machine: Machine, need: Need) -> Choice:
    """The best kernel that serves ``need`` on ``machine``."""
    why_not: dict[Kernel, str] = {}
    for kernel, limits in LIMITS.items():
        reason = next(limits(machine, need), None)
        if reason is None:
            return Choice(kernel, why_not)
        why_not[kernel] = reason
    return Choice(Kernel.TORCH, why_not)


def machine(device: torch.device) -> Machine:
    """This computer, as far as ``device`` is concerned; imports torch, and no kernel."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - only here

    import torch  # noqa: PLC0415 - the choice itself needs none

    def is_installed(name: str) -> bool:
        try:
            version(name)
        except PackageNotFoundError:
            return False
        return True

    major, minor = torch.__version__.split(".")[:2]
    return Machine(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        torch_version=(int(major), int(minor)),
        installed=frozenset(one for one, name in DISTRIBUTIONS.items() if is_installed(name)),
    )


def _flash_4(machine: Machine, need: Need) -> Iterator[str]:
    """Why flash-attn 4 will not do, one reason after the other."""
    yield from _flash(Kernel.FLASH_4, machine, need)
    yield from _capability(machine, (9, 10, 11))
    if need.page_size and machine.capability[0] == 9:
        yield "it reads pages on capability 10 and 11 alone, this is 9"
    if need.is_latent:
        if machine.capability[0] == 9:
            yield "it knows latents on capability 10 and 11 alone, this is 9"
        if (need.v_dim, need.k_dim - need.v_dim) != (512, 64):
            yield f"its latents are 512 + 64, these {need.v_dim} + {need.k_dim - need.v_dim}"
    else:
        yield from _dims(need)


def _flash_3(machine: Machine, need: Need) -> Iterator[str]:
    """Why flash-attn 3 will not do."""
    yield from _flash(Kernel.FLASH_3, machine, need)
    yield from _capability(machine, (9,))
    if need.has_sinks:
        yield "it knows no sinks"
    if need.is_latent:
        rope = need.k_dim - need.v_dim
        if rope > 64 or need.v_dim < 256:
            yield f"its latents are at least 256 + at most 64, these {need.v_dim} + {rope}"
    else:
        yield from _dims(need)


def _flash_2(machine: Machine, need: Need) -> Iterator[str]:
    """Why flash-attn 2 will not do."""
    yield from _flash(Kernel.FLASH_2, machine, need)
    yield from _second_generation(machine, need)


def _varlen(machine: Machine, need: Need) -> Iterator[str]:
    """Why the kernel within torch will not do."""
    if machine.torch_version < VARLEN_SINCE:
        wanted, found = (".".join(map(str, one)) for one in (VARLEN_SINCE, machine.torch_version))
        yield f"it takes block tables since torch {wanted}, this is {found}"
    yield from _sixteen_bits(machine, need)
    yield from _second_generation(machine, need)
    if need.has_softcap:
        yield "it knows no softcap"


def _second_generation(machine: Machine, need: Need) -> Iterator[str]:
    """What holds for flash-attn 2, wherever it was built."""
    if machine.capability < (8, 0):
        yield f"it needs capability 8.0, this is {_dotted(machine)}"
    if need.has_sinks:
        yield "it knows no sinks"
    if need.k_dim != need.v_dim:
        yield f"K and V must have one head_dim, these {need.k_dim} and {need.v_dim}"
    yield from _dims(need)
    if why := kernel_flaw(need.page_size):
        yield why


def _flash(kernel: Kernel, machine: Machine, need: Need) -> Iterator[str]:
    """What holds for every flash-attn."""
    yield from _sixteen_bits(machine, need)
    if kernel not in machine.installed:
        yield f"{DISTRIBUTIONS[kernel]} is not installed"


def _sixteen_bits(machine: Machine, need: Need) -> Iterator[str]:
    """What holds for every kernel on CUDA."""
    if machine.device != "cuda":
        yield f"it needs a CUDA device, this is {machine.device}"
    if need.dtype not in {"float16", "bfloat16"}:
        yield f"it computes float16 and bfloat16, not {need.dtype}"


def _capability(machine: Machine, majors: tuple[int, ...]) -> Iterator[str]:
    """The generations of GPUs that a kernel was written for."""
    if machine.capability[0] not in majors:
        yield f"it needs capability {' or '.join(map(str, majors))}, this is {_dotted(machine)}"


def _dims(need: Need) -> Iterator[str]:
    """Sizes of heads."""
    for dim in (need.k_dim, need.v_dim):
        if dim > 256 or dim % 8:
            yield f"head_dim {dim} is above 256 or no multiple of 8"


def _dotted(machine: Machine) -> str:
    """A capability as it is written."""
    return ".".join(map(str, machine.capability))


LIMITS: dict[Kernel, Callable[[Machine, Need], Iterator[str]]] = {
    Kernel.FLASH_4: _flash_4,
    Kernel.FLASH_3: _flash_3,
    Kernel.FLASH_2: _flash_2,
    Kernel.VARLEN: _varlen,
}
"""Best first: each gives the reasons against a kernel, none if it will do. TORCH has no limits."""
