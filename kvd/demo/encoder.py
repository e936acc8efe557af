"""The embedding engine: the same encoder on a pool whose KV is written, and on one that has none.

An encoder looks at a text once and never decodes, so nobody ever reads its KV. An engine that
treats it like a generating model writes K and V of every layer into its pool all the same. What it
does is put in the place of the attention that transformers would call, so both ways run the same
model:

    counted    leases that count tokens; K and V of the batch are attended over and forgotten
    written    K and V are also written to the pages of the leases, as before a decode
    read-back  and attention reads them from there, which shows that they are right
    alone      no lease; text by text, with the attention of transformers: what must come out
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, assert_never

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvd.client import connect_sync
from kvd.demo.messages import (
    Connected,
    ConnectEncoder,
    Embed,
    Embedded,
    Failed,
    Keeping,
    Reply,
    Request,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvd.client import SyncLease, SyncNode
    from kvd.demo.cache import LayerViews

ATTENTION = "kvd-pool"
DEADLINE_S = 30.0


class PoolAttention:
    """Attention of a batch that may write its K and V into a pool first."""

    def __init__(self, layers: Sequence[LayerViews]) -> None:
        self._layers = layers
        self._place: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._reads_back = False
        self._damaged_page: int | None = None

    def write_nothing(self) -> None:
        """From now on K and V are those of the batch alone."""
        self._place = None

    def write_to(
        self,
        rows: Sequence[Sequence[int]],
        mask: torch.Tensor,
        *,
        page_size: int,
        reads_back: bool,
        damage: bool,
    ) -> None:
        """From now on K and V go to these pages, a row for each text; ``mask``: (texts, tokens).

        With ``damage`` the first page of the first text is zeroed before it is read back.
        """
        table = torch.zeros(mask.shape[0], max(map(len, rows)), dtype=torch.int64)
        for number, row in enumerate(rows):
            table[number, : len(row)] = torch.tensor(row)
        text, token = mask.nonzero(as_tuple=True)
        self._place = mask, table[text, token // page_size], token % page_size
        self._reads_back = reads_back
        self._damaged_page = rows[0][0] if damage else None

    def __call__(  # noqa: PLR0913, PLR0917 - as transformers calls it
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it; key and value: (texts, heads, tokens, head_dim)."""
        if self._place is not None:
            layer = module.layer_idx
            assert isinstance(layer, int)
            key, value = (
                self._through(view, states)
                for view, states in zip(self._layers[layer], (key, value), strict=True)
            )
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling
        )
        return attended

    def _through(self, view: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write ``states`` into the pages, and read them from there if that is asked for."""
        assert self._place is not None
        mask, pages, slots = self._place
        view[pages, slots] = states.transpose(1, 2)[mask]
        if not self._reads_back:
            return states
        if self._damaged_page is not None:
            view[self._damaged_page] = 0
        read = torch.zeros_like(states.transpose(1, 2))
        read[mask] = view[pages, slots]
        return read.transpose(1, 2)


class EncoderEngine:
    """One encoder, and a session with each of the two daemons."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._nodes: dict[Keeping, SyncNode] = {}
        self._attention = PoolAttention(())
        self._page_size = 0

    def answer(self, request: Request) -> Reply:
        """Do what ``request`` asks."""
        match request:
            case ConnectEncoder():
                return self._connect(request)
            case Embed():
                return self._embed(request)
            case _:
                return Failed(f"an encoder does not {type(request).__name__.lower()}")

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
        self._page_size = pool.page_size
        AttentionInterface.register(ATTENTION, self._attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
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
                self._attention.write_nothing()
            case Keeping.WRITTEN | Keeping.READ_BACK:
                self._attention.write_to(
                    [lease.pages.tolist() for lease in leases],
                    mask,
                    page_size=self._page_size,
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
