"""What the pools of a model hold: its shape, their configuration, and where each layer's KV is.

Worked out from the shape alone, so that the figures of the daemons can be held against it. Nothing
here knows of torch, transformers or a daemon.

A pool has parts. Each has pages of its own size in bytes, and holds some layers of the model:

    kv      the layers that look at every token: a page for every page_size tokens
    swa     the layers that look back a window: a page only for the tail of a prompt
    state   the recurrent layers: one page, whatever the length of the prompt
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE_SIZE = 16
ELEMENT_BYTES = {"float32": 4, "float64": 8}


class ModelShape(msgspec.Struct, frozen=True):
    """The size of a model, by the names of the field; what an architecture lacks is 0."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    latent_dim: int = 0
    rope_dim: int = 0
    """With ``latent_dim``: one latent per token instead of K and V per head."""
    window_tokens: int = 0
    full_every: int = 1
    """With ``window_tokens``: every so many layers one looks at all tokens, the others slide."""
    state_dim: int = 0
    groups: int = 0
    conv_tokens: int = 0
    """With ``state_dim``: every layer is recurrent, and also keeps the last tokens' inputs."""


class PoolPart(enum.Enum):
    """A component of a pool, by its name there."""

    KV = "kv"
    WINDOW = "swa"
    STATE = "state"


class LayerPlace(msgspec.Struct, frozen=True):
    """Where a layer of the model has its KV: the ``layer`` th of those in ``part``."""

    part: PoolPart
    layer: int


def places(shape: ModelShape) -> tuple[LayerPlace, ...]:
    """The place of every layer of the model, in its order."""
    counts = dict.fromkeys(PoolPart, 0)
    found: list[LayerPlace] = []
    for number in range(1, shape.layers + 1):
        part = PoolPart.KV
        if shape.state_dim:
            part = PoolPart.STATE
        elif shape.window_tokens and number % shape.full_every:
            part = PoolPart.WINDOW
        found.append(LayerPlace(part, counts[part]))
        counts[part] += 1
    return tuple(found)


def layers_in(shape: ModelShape, part: PoolPart) -> int:
    """How many layers of the model have their KV in ``part``."""
    return sum(place.part is part for place in places(shape))


def state_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """What one recurrent layer keeps of one sequence: the shape of each tensor, by name."""
    inner = shape.heads * shape.head_dim
    return {
        "conv": (inner + 2 * shape.groups * shape.state_dim, shape.conv_tokens),
        "ssm": (shape.heads, shape.head_dim, shape.state_dim),
    }


class PoolLayout(msgspec.Struct, frozen=True):
    """What a daemon's pool must hold for a model, in its ``family`` of pools."""

    family: str
    shape: ModelShape
    dtype: str = "float32"
    """16 bits would not do: the order of sums decides close calls there, and two correct runs with
    another chunking may give other tokens."""
    order: str = "page_first"

    @property
    def page_size(self) -> int:
        """Tokens per page; where no layer keeps KV of tokens, a page is a single one."""
        return PAGE_SIZE if layers_in(self.shape, PoolPart.KV) else 1

    @property
    def parts(self) -> tuple[PoolPart, ...]:
        """Those that have bytes."""
        return tuple(part for part in PoolPart if layers_in(self.shape, part))

    def page_bytes(self, part: PoolPart) -> int:
        """Bytes of one page of ``part`` over its layers; 0 for what the pool does not have."""
        shape = self.shape
        if part is PoolPart.STATE:
            each = sum(math.prod(sizes) for sizes in state_tensors(shape).values())
        elif shape.latent_dim:
            each = self.page_size * (shape.latent_dim + shape.rope_dim)
        else:
            each = self.page_size * 2 * shape.kv_heads * shape.head_dim
        return layers_in(shape, part) * each * ELEMENT_BYTES[self.dtype]

    def settings(self, pages: Mapping[PoolPart, int]) -> dict[str, str]:
        """The keys of its ``[pool]`` section, with so many pages of each of its parts."""
        shape = self.shape
        keys: dict[str, object] = {
            "family": self.family,
            "order": self.order,
            "layers": layers_in(shape, PoolPart.KV),
            "pages": pages[PoolPart.KV],
        }
        if PoolPart.KV in self.parts:
            keys |= {"dtype": self.dtype, "page_size": self.page_size}
            if shape.latent_dim:
                keys |= {"latent_dim": shape.latent_dim, "rope_dim": shape.rope_dim}
            else:
                keys |= {"heads": shape.kv_heads, "head_dim": shape.head_dim}
        if PoolPart.WINDOW in self.parts:
            keys["window_tokens"] = shape.window_tokens
            keys["window_layers"] = layers_in(shape, PoolPart.WINDOW)
            keys["window_pages"] = pages[PoolPart.WINDOW]
        if PoolPart.STATE in self.parts:
            keys["state_layers"] = layers_in(shape, PoolPart.STATE)
            keys["states"] = pages[PoolPart.STATE]
            for name, dims in state_tensors(shape).items():
                keys[f"state.{name}"] = f"{self.dtype}[{','.join(map(str, dims))}]"
        return {f"pool.{name}": str(value) for name, value in keys.items()}

    def due_pages(self, prompt_tokens: int, prefix_tokens: int) -> dict[PoolPart, int]:
        """Pages that must cross when the decode side has the first ``prefix_tokens``."""
        end = -(-prompt_tokens // self.page_size)
        starts = {
            PoolPart.KV: prefix_tokens // self.page_size,
            PoolPart.WINDOW: self.window_start(prompt_tokens) // self.page_size,
        }
        return {part: 1 if part is PoolPart.STATE else end - starts[part] for part in self.parts}

    def full_pages(self, prompt_tokens: int) -> dict[PoolPart, int]:
        """Pages that would cross with nothing cached and all layers treated alike."""
        end = -(-prompt_tokens // self.page_size)
        return {part: 1 if part is PoolPart.STATE else end for part in self.parts}

    def bytes_of(self, pages: dict[PoolPart, int]) -> int:
        """Bytes of so many pages of each part."""
        return sum(self.page_bytes(part) * count for part, count in pages.items())

    def usable_prefix(self, prompt_tokens: int, cached_tokens: int) -> int:
        """How much of what a decode node has cached it need not be sent.

        A window is always sent, and what is sent with it is the prompt from there on.
        """
        if PoolPart.WINDOW in self.parts:
            return min(cached_tokens, self.window_start(prompt_tokens))
        return cached_tokens

    def window_start(self, prompt_tokens: int) -> int:
        """The first token of a prompt whose window page crosses.

        The tail is cached in whole pages afterwards, so up to a page of it is cut off; a complete
        window (or page, if that is longer) must be left before the cut, and the token after it.
        """
        behind = prompt_tokens - 1 - max(self.shape.window_tokens, self.page_size)
        return max(0, behind) // self.page_size * self.page_size

    def most_window_pages(self, step_tokens: int) -> int:
        """Window pages that are mapped at once when ``step_tokens`` are computed between slides.

        A window and a step, and a page for where they begin in the middle of one.
        """
        window = -(-max(self.shape.window_tokens, self.page_size) // self.page_size)
        return -(-(window * self.page_size + step_tokens) // self.page_size) + 1
