"""Token ids from whatever an engine holds them in, to one frame of little-endian int32.

Arrays are checked and copied by numpy: 32,768 tokens take about 10 us from int32 and 30 us from
int64; a list takes about 0.4 ms, all of it spent on its Python objects, and one of 2,000 16 us.
"""

from __future__ import annotations

import array
import functools
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from kvd.errors import Code, KvdError, Number, Refusal
from kvd.types import NO_TOKENS, Tokens

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    TokenIds = Sequence[int] | NDArray[np.integer] | torch.Tensor

MAX_TOKEN_ID: Final = 2**31 - 1
"""Token ids are 0 to this: the frame's format, and more than any vocabulary."""

FEW_TOKENS: Final = 64
"""Up to here numpy's fixed cost (some microseconds) exceeds that of looking at each element."""


def token_frame(tokens: TokenIds) -> Tokens:
    """The tokens as one frame; nothing is rounded, wrapped or guessed.

    Args:
        tokens: any sequence of ints, or a one-dimensional integer numpy array or torch tensor.

    Raises:
        KvdError: ``bad-tokens``, with the first position that is none.
    """
    if isinstance(tokens, (list, tuple)):
        return _from_sequence(tokens) if tokens else NO_TOKENS
    if isinstance(tokens, np.ndarray):
        return _from_array(tokens)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tokens, torch.Tensor):
        return _from_tensor(tokens)
    if isinstance(tokens, array.array | memoryview):
        return _from_array(np.asarray(tokens))
    if isinstance(tokens, str | bytes | bytearray) or not isinstance(tokens, Sequence):
        raise _bad(
            f"a {type(tokens).__name__} is no sequence of token ids: pass a list of ints, or an "
            "int32 or int64 array; for raw bytes np.frombuffer(data, '<i4')"
        )
    return _from_sequence(tokens)


def _from_array(ids: NDArray[np.generic]) -> Tokens:
    if ids.dtype.kind not in "iu":
        raise _bad(
            f"an array of {ids.dtype} is none of token ids: convert it to int32 or int64 where it "
            "is made, so that nothing is rounded here"
        )
    if ids.ndim != 1:
        raise _bad(
            f"token ids have one dimension, this array has the shape {ids.shape}: pass one "
            "sequence at a time"
        )
    values = cast("NDArray[np.int64]", ids)
    if not _in_range(values):
        position = int(np.argmax((values < 0) | (values > MAX_TOKEN_ID)))
        raise _out_of_range(position, int(values[position]))
    return Tokens(values.astype("<i4", copy=False).tobytes())


def _in_range(ids: NDArray[np.int64]) -> bool:
    # Any id below 0 makes the sum of all bits negative, any above 31 bits makes it one: one pass.
    return 0 <= int(np.bitwise_or.reduce(ids)) <= MAX_TOKEN_ID


def _from_tensor(ids: torch.Tensor) -> Tokens:
    if ids.is_floating_point() or ids.is_complex():
        raise _bad(f"a tensor of {ids.dtype} is none of token ids: pass torch.int32 or torch.int64")
    return _from_array(ids.detach().cpu().numpy())


def _from_sequence(ids: Sequence[int]) -> Tokens:
    if not ids:
        return NO_TOKENS
    form = _form_of(len(ids))
    try:
        packed = form.pack(*ids)
    except struct.error:
        raise _first_bad(ids) from None
    suspects: Sequence[int] = ()
    if len(ids) <= FEW_TOKENS:
        low = min(form.unpack(packed))
        if low <= 1:
            suspects = range(len(ids))
    else:
        values = np.frombuffer(packed, dtype="<i4")
        low = int(np.minimum.reduce(values))
        if low <= 1:
            suspects = np.flatnonzero(values <= 1).tolist()
    # A bool passes for an int, and its value is 0 or 1: only elements of these values can be one.
    if low < 0 or (suspects and any(isinstance(ids[position], bool) for position in suspects)):
        raise _first_bad(ids)
    return Tokens(packed)


@functools.lru_cache(maxsize=1024)
def _form_of(n_tokens: int) -> struct.Struct:
    # ``struct.pack`` makes a list of format and tokens first: as long again as all else of it.
    return struct.Struct(f"<{n_tokens}i")


def _first_bad(ids: Sequence[int]) -> KvdError:
    """Which element is no token id; called once it is known that one is not."""
    for position, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            return _bad(
                f"token {position} of {len(ids)} is {value!r}, a {type(value).__name__} and no int",
                position=position,
            )
        if not 0 <= value <= MAX_TOKEN_ID:
            return _out_of_range(position, int(value))
    return _bad(f"the {type(ids).__name__} changed while it was read")


def _out_of_range(position: int, value: int) -> KvdError:
    return _bad(
        f"token {position} is {value}; token ids are 0 to {MAX_TOKEN_ID}",
        position=position,
        value=str(value),
    )


def _bad(message: str, **numbers: Number) -> KvdError:
    return KvdError(Refusal(Code.BAD_TOKENS, message, side="client", numbers=numbers))
