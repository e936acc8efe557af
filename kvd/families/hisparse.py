"""hisparse: KV in host memory, and a buffer of some of its pages on the device.

Sparse attention reads few tokens a step: an index on the device says which, and their pages are
fetched into the buffer of their request: see ``kvd.core.components.device_buffer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from kvd.core.layout.page_sizes import buffer_flaw
from kvd.core.layout.spec import Buffer, Component, Device, Host, page_bytes
from kvd.families.budget import block_bytes, pages_of_request, pool_bytes, size_bytes
from kvd.families.components import companions, kv
from kvd.families.family import ELEMENTS, HEADS, INDEX, LATENT, Breach, PoolFamily, RefusedKey
from kvd.families.keys import PageCount, PoolSection, Tokens, example, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.layout.spec import PoolSpec
    from kvd.families.family import PlanRequest, Value
    from kvd.families.model import Model


class HostPool(PoolSection, frozen=True):
    """[pool] of this family."""

    buffer_tokens: Annotated[Tokens | None, rule("a multiple of pool.page_size"), example(4096)] = (
        None
    )
    """hisparse: tokens of one request that the device holds at a time."""
    buffer_pages: Annotated[PageCount | None, example(2048)] = None
    """hisparse: pages of the device buffer, the null page included. Left out: as many buffers as
    usual requests fit into the host memory."""


def _components(pool: HostPool) -> tuple[Component, ...]:
    first = kv(pool, Host())
    buffer = Component(
        "buffer",
        layers=first.layers,
        layout=first.layout,
        page_size=first.page_size,
        extent=Buffer(pool.buffer_tokens or 0),
        tier=Device(pool.device),
    )
    return (first, *companions(pool, first), buffer)


def _divide(pool: HostPool, parts: tuple[Component, ...]) -> tuple[int, int]:
    """``pool.size`` is host memory, all of it for kv: the device is another one."""
    first = pool_bytes(pool) // page_bytes(parts[0]) if pool.pages is None else pool.pages
    if pool.buffer_pages is not None:
        return first, pool.buffer_pages
    n = pages_of_request(parts[0], pool.typical_tokens)
    b = pages_of_request(parts[-1], pool.typical_tokens)
    return first, max(1, (first - 1) // n) * b + 1


def _flaws(pool: HostPool) -> Iterator[Breach]:
    tokens, page = pool.buffer_tokens, pool.page_size
    if tokens is not None and (why := buffer_flaw(page, tokens)):
        fix = f"give {-(-tokens // page) * page}"
        yield Breach("pool.buffer_tokens", f"must be whole pages: {why}", fix)


def _unsuited(model: Model, _asked: str | None) -> str | None:
    if model.without_kv:
        return model.without_kv
    return None if model.index_dim else "every token is read at every step: there is no index"


def _plan_keys(_model: Model, wanted: PlanRequest) -> dict[str, Value]:
    page = wanted.page_size
    buffer_tokens = -(-wanted.buffer_tokens // page) * page
    return {"buffer_tokens": buffer_tokens, "typical_tokens": wanted.context_tokens}


def _plan_sizes(pool: HostPool, wanted: PlanRequest) -> dict[str, Value]:
    """Host memory for kv; the device has the index of all of it, and a buffer for each request.

    As many requests as both memories hold; what is left of the device are more buffers.
    """
    parts = _components(pool)
    kv_part, buffer = parts[0], parts[-1]
    device = size_bytes(wanted.memory) or 0
    host_pages = (size_bytes(wanted.host_memory) or 0) // page_bytes(kv_part)
    n = pages_of_request(kv_part, wanted.context_tokens)
    b = pages_of_request(buffer, wanted.context_tokens)
    beside = block_bytes(parts[:-1]) - page_bytes(kv_part)
    room_bytes = n * beside + b * page_bytes(buffer)
    rooms = min((host_pages - 1) // n, (device - beside - page_bytes(buffer)) // room_bytes)
    pages = host_pages
    if beside:
        left = device - (rooms * b + 1) * page_bytes(buffer)
        pages = min(host_pages, left // beside)
    buffers = (device - pages * beside) // page_bytes(buffer)
    return {"pages": max(2, pages), "buffer_pages": max(2, min(buffers, pages * b // n + b + 1))}


def _note(model: Model, spec: PoolSpec) -> str:
    pages = pages_of_request(spec.components[-1], 2**28)
    return (
        f"KV in host memory; of each request {pages} pages on the device, which reads "
        f"{model.index_topk} tokens a step"
    )


FAMILY = PoolFamily(
    name="hisparse",
    owns="KV in host memory and a buffer of it on the device",
    section=HostPool,
    components=_components,
    divide=_divide,
    groups=(ELEMENTS, HEADS, LATENT, INDEX),
    alone="KV in host memory and a buffer of it on the device",
    needs={
        "buffer_tokens": "what the device holds of one request, like 4096: without it there is "
        "nowhere to compute on",
    },
    second="buffer_pages",
    flaws=_flaws,
    refuses=(
        RefusedKey(
            key="engine.mixed_chunk",
            why="a prompt's KV goes to host memory, a decoding request's to its device buffer, so "
            "one batch cannot write both",
            fix="set it to false",
            allowed=(False,),
        ),
    ),
    unkept="the buffer on the device is filled for one daemon's requests",
    untiered="its index lies on the device, which storage cannot read or write",
    unsharded="its host memory and its device buffer are those of one device",
    uncounted="its KV lies in host memory, from where it is fetched, and there is none",
    unsuited=_unsuited,
    plan_keys=_plan_keys,
    plan_sizes=_plan_sizes,
    plan_note=_note,
    shape={"layers": 2, "latent_dim": 32, "index_dim": 8, "buffer_tokens": 64},
)
