"""Where a received prompt shall lie: the engine's choice for each request, in pools that have one.

A pool with a device buffer receives into host memory always. With ``device`` the prompt is copied
to the buffer before the engine hears of it, which takes a prompt that fits; with ``host``, and
where nothing is said, pages are copied when they are fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.layout.spec import Buffer
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.layout.spec import PoolSpec

HOST, DEVICE = "host", "device"


def bad_tier(tier: str | None, prompt_tokens: int, spec: PoolSpec, side: str) -> Refusal | None:
    """Why a prompt cannot be received so."""
    if tier is None:
        return None
    buffer = next(
        (component for component in spec.components if isinstance(component.extent, Buffer)), None
    )
    if buffer is None or not isinstance(buffer.extent, Buffer):
        return Refusal(
            Code.NOT_SUPPORTED,
            f"tier={tier!r} needs the hisparse family, this pool is {spec.family}",
            side,
        )
    if tier not in (HOST, DEVICE):
        return Refusal(Code.BAD_REQUEST, f"tier={tier!r} is none of {HOST!r} and {DEVICE!r}", side)
    prompt_pages = -(-prompt_tokens // buffer.page_size)
    buffer_pages = -(-buffer.extent.tokens // buffer.page_size)
    if tier == HOST or prompt_pages <= buffer_pages:
        return None
    return Refusal(
        code=Code.TOO_LARGE,
        message=f"a prompt of {prompt_tokens} tokens takes {prompt_pages} pages, and a request has "
        f"{buffer_pages} of {buffer.name}: receive it with tier={HOST!r} and fetch what is "
        "wanted, or raise pool.buffer_tokens",
        side=side,
        numbers={"prompt_pages": prompt_pages, "buffer_pages": buffer_pages},
    )
