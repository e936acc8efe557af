"""Which kernel is chosen, for every machine and every need, and why not a better one."""

from __future__ import annotations

import itertools
from importlib.metadata import version

import msgspec
import pytest
import torch

from kvd.device.kernels import LIMITS, Kernel, Machine, Need, choose, machine

EVERY = frozenset({Kernel.FLASH_4, Kernel.FLASH_3, Kernel.FLASH_2})
H100 = Machine("cuda", (9, 0), (2, 13), EVERY)
B200 = Machine("cuda", (10, 0), (2, 13), EVERY)
A100 = Machine("cuda", (8, 0), (2, 13), EVERY)
RTX = Machine("cuda", (12, 0), (2, 13), EVERY)
CPU = Machine("cpu", (0, 0), (2, 13), frozenset())
LLAMA = Need("bfloat16", 128, 128, page_size=16)
MLA = Need("bfloat16", 576, 512, page_size=64, is_latent=True)
WITH = msgspec.structs.replace


def serves(kernel: Kernel, on: Machine, what: Need) -> bool:
    """The limits again, written the other way round."""
    generation = on.capability[0]
    if kernel is Kernel.TORCH:
        return True
    if on.device != "cuda" or what.dtype not in ("bfloat16", "float16"):
        return False
    is_there = on.torch_version >= (2, 13) if kernel is Kernel.VARLEN else kernel in on.installed
    if not is_there or (kernel is Kernel.VARLEN and what.has_softcap):
        return False
    if what.is_latent:
        return serves_latents(kernel, on, what)
    if max(what.k_dim, what.v_dim) > 256 or what.k_dim % 8 or what.v_dim % 8:
        return False
    if kernel is Kernel.FLASH_4:
        return generation in ((10, 11) if what.page_size else (9, 10, 11))
    if what.has_sinks:
        return False
    if kernel is Kernel.FLASH_3:
        return generation == 9
    return generation >= 8 and what.k_dim == what.v_dim and what.page_size % 256 == 0


def serves_latents(kernel: Kernel, on: Machine, what: Need) -> bool:
    """The same, of latents."""
    fitting = {
        Kernel.FLASH_4: on.capability[0] in (10, 11) and (what.v_dim, what.k_dim) == (512, 576),
        Kernel.FLASH_3: on.capability[0] == 9
        and what.v_dim >= 256
        and what.k_dim <= what.v_dim + 64
        and not what.has_sinks,
    }
    return fitting.get(kernel, False)


def test_the_first_kernel_that_serves_is_chosen_for_every_machine_and_need() -> None:
    """93,312 combinations; each better kernel has one reason against it, the others none."""
    machines = [
        Machine(device, capability if device == "cuda" else (0, 0), torch_version, installed)
        for device in ("cuda", "cpu")
        for capability in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0))
        for torch_version in ((2, 12), (2, 13), (3, 0))
        for size in range(4)
        for installed in map(frozenset, itertools.combinations(EVERY, size))
        if device == "cuda" or capability == (7, 5)
    ]
    dims = [(64, 64), (128, 128), (256, 256), (260, 260), (60, 60), (192, 128), (512, 512)]
    latents = [(576, 512), (320, 256), (80, 64), (640, 512)]
    needs = [
        Need(dtype, *sizes, page_size, sizes in latents, has_sinks, has_softcap)
        for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn")
        for sizes in (*dims, *latents)
        for page_size in (0, 1, 16, 256, 512, 384)
        for has_sinks in (False, True)
        for has_softcap in (False, True)
    ]
    order = list(Kernel)

    for on, what in itertools.product(machines, needs):
        choice = choose(on, what)
        best = next(one for one in order if serves(one, on, what))
        assert choice.kernel is best, (on, what, choice)
        assert list(choice.why_not) == order[: order.index(best)], (on, what)
        assert all(choice.why_not.values())


@pytest.mark.parametrize(
    ("on", "what", "kernel"),
    [
        (B200, LLAMA, Kernel.FLASH_4),
        (B200, MLA, Kernel.FLASH_4),
        (B200, WITH(LLAMA, has_sinks=True), Kernel.FLASH_4),
        (H100, LLAMA, Kernel.FLASH_3),
        (H100, WITH(LLAMA, page_size=0), Kernel.FLASH_4),
        (H100, MLA, Kernel.FLASH_3),
        (H100, WITH(LLAMA, has_sinks=True), Kernel.TORCH),
        (A100, LLAMA, Kernel.TORCH),
        (A100, WITH(LLAMA, page_size=256), Kernel.FLASH_2),
        (A100, MLA, Kernel.TORCH),
        (RTX, WITH(LLAMA, page_size=256), Kernel.FLASH_2),
        (WITH(A100, installed=frozenset()), WITH(LLAMA, page_size=256), Kernel.VARLEN),
        (WITH(H100, installed=frozenset()), WITH(LLAMA, page_size=0), Kernel.VARLEN),
        (WITH(A100, installed=frozenset()), WITH(LLAMA, dtype="float32"), Kernel.TORCH),
        (CPU, LLAMA, Kernel.TORCH),
    ],
)
def test_what_known_machines_get(on: Machine, what: Need, kernel: Kernel) -> None:
    assert choose(on, what).kernel is kernel


def test_the_reasons_are_plain() -> None:
    bare = WITH(A100, installed=frozenset())

    assert str(choose(B200, LLAMA)) == "flash-attn 4"
    assert str(choose(bare, LLAMA)) == (
        "torch matmul in blocks (not flash-attn 4: flash-attn-4 is not installed; "
        "not flash-attn 3: flash-attn-3 is not installed; "
        "not flash-attn 2: flash-attn is not installed; "
        "not torch varlen_attn: page_size 16 is no multiple of 256)"
    )
    assert choose(CPU, LLAMA).why_not[Kernel.FLASH_2] == "it needs a CUDA device, this is cpu"
    assert choose(RTX, LLAMA).why_not[Kernel.FLASH_4] == (
        "it needs capability 9 or 10 or 11, this is 12.0"
    )
    assert choose(H100, WITH(MLA, k_dim=640)).why_not[Kernel.FLASH_3] == (
        "its latents are at least 256 + at most 64, these 512 + 128"
    )


def test_this_machine_is_seen_as_it_is() -> None:
    found = machine(torch.device("cpu"))

    assert (found.device, found.capability) == ("cpu", (0, 0))
    assert ".".join(map(str, found.torch_version)) == version("torch").rsplit(".", 1)[0]
    assert choose(found, LLAMA).kernel is Kernel.TORCH


def test_every_kernel_but_the_last_has_limits() -> None:
    assert [*LIMITS, Kernel.TORCH] == list(Kernel)
