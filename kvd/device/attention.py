"""Attention over a pool's pages by block table, and over K and V that lie in no pages.

Two calls: ``decode``, in which every sequence has as many new tokens, and ``prefill``, in which
they have any number. Both take the pages as ``pool.layer(i)`` gives them, page first or layer
first, and none of the pool is copied but by a kernel's own block of work:

    decode(q, BatchPages(k, v, block_table, lengths), rule)  the next token or two of a batch
    prefill(q, BatchPages(...), rule, starts)                new tokens behind a cached prefix
    prefill(q, Packed(k, v, starts), rule, starts)           whole texts, K and V of the batch

What a token sees is counted from the end: the last of a sequence's new tokens is the last of its
K and V, as in flash-attn ("bottom right"), so a chunk behind a prefix needs no offset:

    lengths 6, 3 new tokens        token     0 1 2 3 4 5
                                   query 0   x x x x
                                   query 1   x x x x x
                                   query 2     x x x x x   with a window of 5

Of a latent (MLA) K is the latent and the rotated part, V the latent alone, which is a view of K's
first elements: one KV head, ``v_dim < k_dim``. A query must then be in the latent's space.

Two kernels. flash-attn 2 serves 16-bit K and V on CUDA; ``why_not_flash`` says why it does not
serve some arguments. It is called after its documentation, was **not exercised on hardware**, and
may read what it weighs with zero, such as the null page before a window. Anything else is computed
``in blocks``, in torch alone, on any device: products of matrices and a running softmax.

K and V are read a block at a time, so what is allocated depends neither on the pool nor on the
length of a sequence. A block is copied because a product needs the tokens of a KV head at one
stride, and pages that do not follow each other have none. It stays in the cache of the processor
until it is used, which is why this is faster than gathering a sequence first. Scores and sums are
in float32 for 16-bit types, else in the type of the arguments. Lengths and block tables are read by
the host: on CUDA this waits for the device.

Invariants: ``ceil(length / page_size) <= max_pages``; entries of a block table are looked at only
as far as the window reaches, so those before it may be anything, 0 as a rule.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import msgspec
import torch

from kvd.core.layout.page_sizes import kernel_flaw

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_TOKENS = 1024
"""Tokens of K and V at a time. 512 costs a tenth more in steps, 2,048 leaves the cache."""

QUERY_TOKENS = 64
"""New tokens at a time: with BLOCK_TOKENS, 256 KiB of scores for each head in float32. Not fewer
for more heads: what comes out for a head shall not depend on which others are computed with it."""


class BatchPages(msgspec.Struct, frozen=True, eq=False):
    """K and V of a batch in the pages of a pool.

    ``k``: (pages, page_size, kv_heads, k_dim), ``v``: (pages, page_size, kv_heads, v_dim), with any
    strides but 1 in the last dimension. ``block_table``: (batch, max_pages) int32, page ids in the
    order of tokens. ``lengths``: (batch,) int32, tokens that have KV, the new ones included.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]


class Packed(msgspec.Struct, frozen=True, eq=False):
    """K and V of a batch, one sequence behind the other, in no pages.

    ``k``: (tokens, kv_heads, k_dim), ``v``: (tokens, kv_heads, v_dim). ``starts``: (batch + 1,)
    int32, where each sequence begins, and the end of the last: cu_seqlens.
    """

    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """(batch,) int32, tokens of each sequence."""
        return self.starts.diff()


class AttentionRule(msgspec.Struct, frozen=True, eq=False):
    """What a token sees of the others, and how it weighs them.

    ``scale``: of the product of a query and a key. ``window``: how many tokens are seen, the
    token itself among them; None: all. ``softcap``: scores s become c * tanh(s / c); None: they
    stay. ``sinks``: (heads,) one more score for each head, whose value is zero.
    """

    scale: float
    is_causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def is_latent(kv: BatchPages | Packed) -> bool:
    """Whether V is a view of the first elements of K."""
    return (
        kv.k.data_ptr() == kv.v.data_ptr()
        and kv.k.stride() == kv.v.stride()
        and kv.v.shape[-1] < kv.k.shape[-1]
    )


def decode(
    q: torch.Tensor, pages: BatchPages, rule: AttentionRule, *, by_flash: bool | None = None
) -> torch.Tensor:
    """Attention of the last tokens of every sequence, as many of each; otherwise as ``prefill``.

    ``q`` is (batch, new_tokens, heads, k_dim), the result (batch, new_tokens, heads, v_dim).
    """
    batch, new_tokens = q.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * new_tokens
    done = prefill(q.flatten(0, 1), pages, rule, starts, by_flash=by_flash)
    return done.view(batch, new_tokens, *done.shape[1:])


def prefill(
    q: torch.Tensor,
    kv: BatchPages | Packed,
    rule: AttentionRule,
    starts: torch.Tensor,
    *,
    by_flash: bool | None = None,
) -> torch.Tensor:
    """Attention of new tokens, any number in each sequence.

    Args:
        q: (tokens, heads, k_dim), one sequence behind the other; heads is a multiple of kv_heads.
        kv: where K and V are, of the new tokens too: in pages, or in none.
        rule: what a token sees.
        starts: (batch + 1,) int32, where the new tokens of each sequence begin: cu_seqlens.
        by_flash: whether flash-attn computes it; left out: if it serves these arguments.

    Returns:
        (tokens, heads, v_dim) in the dtype of ``q``; zeros for a token that sees none.

    Raises:
        ValueError: shapes do not fit together; the message has both.
    """
    _check(q, kv, rule, starts)
    if by_flash is None:
        by_flash = why_not_flash(q, kv, rule) is None
    return _by_flash(q, kv, rule, starts) if by_flash else _in_blocks(q, kv, rule, starts.tolist())


def _check(
    q: torch.Tensor, kv: BatchPages | Packed, rule: AttentionRule, starts: torch.Tensor
) -> None:
    """Refuse what no kernel could make sense of."""
    heads, kv_heads = q.shape[-2], kv.k.shape[-2]
    tables = (kv.block_table.shape[0],) if isinstance(kv, BatchPages) else ()
    _same("sequences", starts.shape[0] - 1, *tables, kv.lengths.shape[0])
    _same("elements of a key", q.shape[-1], kv.k.shape[-1])
    _same("KV heads", kv_heads, kv.v.shape[-2])
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    if rule.window is not None and not (rule.is_causal and rule.window > 0):
        raise ValueError(
            f"a window of {rule.window} tokens: it has at least one, and ends at the token itself, "
            "so the rule must be causal"
        )


def _same(what: str, *counts: int) -> None:
    """Refuse arguments that differ in a number they must share."""
    if len(set(counts)) != 1:
        raise ValueError(f"the arguments differ in their number of {what}: {counts}")


# ---- flash-attn --------------------------------------------------------------------------------


class FlashDevice(msgspec.Struct, frozen=True):
    """What flash-attn finds: a kind of device, its compute capability, and whether it is there."""

    kind: str
    capability: tuple[int, int] = (0, 0)
    is_installed: bool = False


@functools.cache
def flash_device(device: torch.device) -> FlashDevice:
    """This computer, as far as ``device`` is concerned; imports no kernel."""
    if device.type != "cuda":
        return FlashDevice(device.type)
    is_installed = importlib.util.find_spec("flash_attn") is not None
    return FlashDevice(device.type, torch.cuda.get_device_capability(device), is_installed)


def why_not_flash(
    q: torch.Tensor,
    kv: BatchPages | Packed,
    rule: AttentionRule,
    device: FlashDevice | None = None,
) -> str | None:
    """Why flash-attn 2 does not serve these arguments; None if it does."""
    return next(_flaws(q, kv, rule, device or flash_device(q.device)), None)


def _flaws(
    q: torch.Tensor, kv: BatchPages | Packed, rule: AttentionRule, device: FlashDevice
) -> Iterator[str]:
    """One reason after the other."""
    k_dim, v_dim = kv.k.shape[-1], kv.v.shape[-1]
    if device.kind != "cuda":
        yield f"it needs a CUDA device, this is {device.kind}"
    if q.dtype not in {torch.float16, torch.bfloat16}:
        yield f"it computes float16 and bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if not device.is_installed:
        yield "flash-attn is not installed"
    if device.capability < (8, 0):
        yield f"it needs capability 8.0, this is {'.'.join(map(str, device.capability))}"
    if rule.sinks is not None:
        yield "it knows no sinks"
    if k_dim != v_dim:
        yield f"K and V must have one head_dim, these {k_dim} and {v_dim}"
    if k_dim > 256 or k_dim % 8:
        yield f"head_dim {k_dim} is above 256 or no multiple of 8"
    if isinstance(kv, BatchPages) and (why := kernel_flaw(kv.page_size)):
        yield why


def _by_flash(
    q: torch.Tensor, kv: BatchPages | Packed, rule: AttentionRule, starts: torch.Tensor
) -> torch.Tensor:
    """By ``flash_attn`` 2.8, which wants the ends of sequences in pages as a running sum.

    Of pages the longest sequence is taken to be what a block table can hold, which asks no device.
    """
    from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - optional

    table, ends = None, torch.nn.functional.pad(kv.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    if isinstance(kv, BatchPages):
        table, most = kv.block_table, kv.block_table.shape[1] * kv.page_size
    else:
        most = _longest(ends)
    done: torch.Tensor = flash_attn_varlen_func(
        q,
        kv.k,
        kv.v,
        starts,
        ends,
        _longest(starts),
        most,
        softmax_scale=rule.scale,
        causal=rule.is_causal,
        window_size=(-1, -1) if rule.window is None else (rule.window - 1, 0),
        softcap=rule.softcap or 0.0,
        block_table=table,
    )
    return done


def _longest(starts: torch.Tensor) -> int:
    """Tokens of the longest sequence; asks the device."""
    return int(starts.diff().max()) if len(starts) > 1 else 0


# ---- in blocks ---------------------------------------------------------------------------------


class _Softmax:
    """A softmax over scores that come block by block, and the values that it weighs.

    Its rows are (kv_heads, group * tokens): the queries that share a KV head, side by side. ``top``
    is the largest score so far and never -inf, so a row that sees nothing of a block, whose scores
    are all -inf, leaves no NaN. A sink is one more score, whose value is zero.
    """

    def __init__(self, rows: torch.Tensor, v_dim: int, sinks: torch.Tensor | None) -> None:
        top = rows.new_full((*rows.shape[:2], 1), torch.finfo(rows.dtype).min)
        self._top = top if sinks is None else sinks.clone()
        self._sum = torch.zeros_like(top) if sinks is None else torch.ones_like(top)
        self._weighed = rows.new_zeros((*rows.shape[:2], v_dim))

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Take in a block: (kv_heads, rows, tokens), used up, and (kv_heads, tokens, v_dim)."""
        top = torch.maximum(self._top, scores.amax(-1, keepdim=True))
        weights = scores.sub_(top).exp_()
        fading = self._top.sub_(top).exp_()
        self._sum.mul_(fading).add_(weights.sum(-1, keepdim=True))
        self._weighed.mul_(fading).baddbmm_(weights, values)
        self._top = top

    def result(self) -> torch.Tensor:
        """(kv_heads, rows, v_dim); zeros in a row that saw nothing."""
        return self._weighed.div_(self._sum.masked_fill_(self._sum == 0, 1))


def _in_blocks(
    q: torch.Tensor, kv: BatchPages | Packed, rule: AttentionRule, starts: list[int]
) -> torch.Tensor:
    """Attention on any device, a few tokens of one sequence at a time."""
    dtype = q.dtype if q.dtype.itemsize > 2 else torch.float32
    lengths: list[int] = kv.lengths.tolist()
    kv_heads, v_dim = kv.v.shape[-2:]
    out = q.new_empty((*q.shape[:2], v_dim))
    sinks = None if rule.sinks is None else rule.sinks.to(dtype).view(kv_heads, -1, 1)
    for sequence, length in enumerate(lengths):
        # The last query is the last token: the position of the query in row r of q is r + ahead.
        ahead = length - starts[sequence + 1]
        for first in range(starts[sequence], starts[sequence + 1], QUERY_TOKENS):
            stop = min(first + QUERY_TOKENS, starts[sequence + 1])
            here = range(first + ahead, stop + ahead)
            queries = (q[first:stop].to(dtype) * rule.scale).view(
                len(here), kv_heads, -1, q.shape[-1]
            )
            rows = queries.permute(1, 2, 0, 3).flatten(1, 2)
            own = None if sinks is None else sinks.repeat_interleave(len(here), dim=1)
            softmax = _Softmax(rows, v_dim, own)
            begin = 0 if rule.window is None else max(0, here.start - rule.window + 1)
            end = min(length, here.stop) if rule.is_causal else length
            for at in range(begin, end, BLOCK_TOKENS):
                keys = range(at, min(at + BLOCK_TOKENS, end))
                k, v = _read(kv, sequence, keys, dtype)
                scores = _scores(rows, here, k, keys, rule)
                softmax.add(scores, v.transpose(0, 1))
                del k, v, scores  # before the next block is made
            done = softmax.result().view(kv_heads, -1, len(here), v_dim)
            out[first:stop] = done.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _read(
    kv: BatchPages | Packed, sequence: int, keys: range, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K (tokens, kv_heads, k_dim) and V of these tokens of a sequence."""
    if isinstance(kv, Packed):
        here = slice(int(kv.starts[sequence]) + keys.start, int(kv.starts[sequence]) + keys.stop)
        return kv.k[here].to(dtype), kv.v[here].to(dtype)
    size = kv.page_size
    ids = kv.block_table[sequence, keys.start // size : -(-keys.stop // size)]
    here = slice(keys.start % size, keys.start % size + len(keys))
    k = kv.k.index_select(0, ids).to(dtype).flatten(0, 1)[here]
    if is_latent(kv):
        return k, k[..., : kv.v.shape[-1]]
    return k, kv.v.index_select(0, ids).to(dtype).flatten(0, 1)[here]


def _scores(
    rows: torch.Tensor, queries: range, k: torch.Tensor, keys: range, rule: AttentionRule
) -> torch.Tensor:
    """(kv_heads, group * queries, keys): -inf of a key that a query does not see."""
    scores = torch.bmm(rows, k.permute(1, 2, 0))
    if rule.softcap is not None:
        scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    ahead = rule.is_causal and keys.stop - 1 > queries.start
    behind = rule.window is not None and keys.start <= queries.stop - 1 - rule.window
    if ahead or behind:
        at, of = (
            torch.arange(span.start, span.stop, dtype=torch.int32, device=rows.device)
            for span in (queries, keys)
        )
        distance = at[:, None] - of
        hidden = distance < 0
        if rule.window is not None:
            hidden |= distance >= rule.window
        scores.view(len(scores), -1, *hidden.shape).masked_fill_(hidden, -torch.inf)
    return scores
