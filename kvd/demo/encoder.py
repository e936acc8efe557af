"""The embedding engine: the same encoder on a pool whose KV is written, and on one that has none.

An encoder looks at a text once and never decodes, so nobody ever reads its KV. An engine that
treats it like a generating model writes K and V of every layer into its pool all the same. What it
does is put in the place of the attention that transformers would call, so both ways run the same
model. A batch is attended over without its padding, one text behind the other:

    counted    leases that count tokens; K and V of the batch are attended over and forgotten
    written    K and V are also written to the pages of the leases, as before a decode
    read-back  and attention reads them from there, which shows that they are right
    alone      no lease; text by text, with the attention of transformers: what must come out
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, assert_never

import torch
from transformers import AttentionInterface

from kvd.client import connect_sync
from kvd.demo.messages import (
    DEADLINE_S,
    Connected,
    ConnectEncoder,
    Embed,
    Embedded,
    EngineFailed,
    Keeping,
    Reply,
    Request,
)
from kvd.device.attention import AttentionRule, BatchPages, Packed, prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvd.client import SyncLease, SyncNode
    from kvd.demo.cache import LayerViews

ATTENTION = "kvd-pool"


class PoolAttention:
    """Attention of a batch that may write its K and V into a pool first."""

    def __init__(self, layers: Sequence[LayerViews]) -> None:
        self._layers = layers
        self._texts = torch.zeros(0, 0, dtype=torch.bool)
        self._table: torch.Tensor | None = None
        self._reads_back = False
        self._damaged_page: int | None = None

    def write_nothing(self, mask: torch.Tensor) -> None:
        """From now on K and V are those of a batch alone; ``mask``: (texts, tokens)."""
        self._texts = mask
        self._table = None

    def write_to(
        self,
        rows: Sequence[Sequence[int]],
        mask: torch.Tensor,
        *,
        reads_back: bool,
        damage: bool,
    ) -> None:
        """From now on K and V go to these pages, a row for each text; ``mask``: (texts, tokens).

        With ``damage`` the first page of the first text is zeroed before it is read back.
        """
        self._texts = mask
        self._table = torch.zeros(mask.shape[0], max(map(len, rows)), dtype=torch.int32)
        for number, row in enumerate(rows):
            self._table[number, : len(row)] = torch.tensor(row)
        self._reads_back = reads_back
        self._damaged_page = rows[0][0] if damage else None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it, without a mask; all: (texts, heads, tokens, head_dim)."""
        assert attention_mask is None, "the padding is known already"
        layer = module.layer_idx
        assert isinstance(layer, int)
        lengths = self._texts.sum(1, dtype=torch.int32)
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        q, k, v = (one.transpose(1, 2)[self._texts] for one in (query, key, value))
        kv: Packed | BatchPages = Packed(k, v, starts)
        if self._table is not None:
            pages = BatchPages(*self._layers[layer], self._table, lengths)
            self._write(k, v, pages)
            kv = pages if self._reads_back else kv
        out = torch.zeros_like(query.transpose(1, 2))
        out[self._texts] = prefill(q, kv, AttentionRule(scaling, is_causal=False), starts)
        return out, None

    def _write(self, k: torch.Tensor, v: torch.Tensor, pages: BatchPages) -> None:
        """Write (tokens, heads, head_dim) of all texts into their pages."""
        text, token = self._texts.nonzero(as_tuple=True)
        where = pages.block_table[text, token // pages.page_size], token % pages.page_size
        pages.k[where], pages.v[where] = k, v
        if self._damaged_page is not None:
            pages.k[self._damaged_page] = pages.v[self._damaged_page] = 0


class EncoderEngine:
    """One encoder, and a session with each of the two daemons."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._nodes: dict[Keeping, SyncNode] = {}
        self._attention = PoolAttention(())

    def answer(self, request: Request) -> Reply:
        """Do what ``request`` asks."""
        match request:
            case ConnectEncoder():
                return self._connect(request)
            case Embed():
                return self._embed(request)
            case _:
                return EngineFailed(f"an encoder does not {type(request).__name__.lower()}")

    def _connect(self, order: ConnectEncoder) -> Connected:
        """Attach to both daemons, and map the pool that has bytes."""
        counted = connect_sync(order.counted_endpoint, name=order.name)
        written = connect_sync(order.written_endpoint, name=order.name)
        self._nodes = {Keeping.COUNTED: counted, Keeping.WRITTEN: written}
        self._nodes[Keeping.READ_BACK] = written
        pool = written.pool("main")
        layers: list[LayerViews] = []
        for layer in range(self._model.config.num_hidden_layers):
            k, v = pool.layer(layer)
            layers.append((k, v))
        self._attention = PoolAttention(layers)
        AttentionInterface.register(ATTENTION, self._attention)
        return Connected()

    def _embed(self, order: Embed) -> Embedded:
        """The embeddings of a batch, and how long they took, leases and all."""
        began_s = time.perf_counter()
        if order.keeping is Keeping.ALONE:
            self._model.set_attn_implementation("sdpa")
            vectors = torch.cat([embeddings(self._model, *padded([one])) for one in order.texts])
        else:
            self._model.set_attn_implementation(ATTENTION)
            vectors = self._embed_leased(order, self._nodes[order.keeping])
        took_s = time.perf_counter() - began_s
        packed: bytes = vectors.double().numpy().astype("<f8").tobytes()
        return Embedded(packed, took_s)

    def _embed_leased(self, order: Embed, node: SyncNode) -> torch.Tensor:
        """One lease for each text, all of them at once, given back without keeping anything."""
        leases = [node.lease(text, deadline_s=DEADLINE_S, cache=False) for text in order.texts]
        try:
            tokens, mask = padded(order.texts)
            self._keep(order, leases, mask)
            return embeddings(self._model, tokens, mask)
        finally:
            for lease in leases:
                lease.release()

    def _keep(self, order: Embed, leases: Sequence[SyncLease], mask: torch.Tensor) -> None:
        """Have the attention do with K and V what the batch asks for."""
        match order.keeping:
            case Keeping.COUNTED:
                self._attention.write_nothing(mask)
            case Keeping.WRITTEN | Keeping.READ_BACK:
                self._attention.write_to(
                    [lease.pages.tolist() for lease in leases],
                    mask,
                    reads_back=order.keeping is Keeping.READ_BACK,
                    damage=order.damage,
                )
            case Keeping.ALONE:
                raise AssertionError("nothing is leased then")
            case _:
                assert_never(order.keeping)


def padded(texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (texts, tokens) with zeros behind the shorter ones, and which of them count."""
    longest = max(map(len, texts))
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    for number, text in enumerate(texts):
        tokens[number, : len(text)] = torch.tensor(text)
    counts = torch.tensor([len(text) for text in texts])
    return tokens, torch.arange(longest) < counts[:, None]


@torch.inference_mode()
def embeddings(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of what the last layer says of each token, at length 1: (texts, hidden)."""
    states = model(input_ids=tokens, attention_mask=mask.to(torch.int64)).last_hidden_state
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1)
