"""An encoder over a pool whose KV is written, and over one that has none: the same embeddings.

An encoder looks at a text once and never decodes, so nobody reads its KV. Its attention takes the
place of the one that transformers would call; a batch goes without its padding, one text behind the
other. Real daemons: one holds the pool that a generating model would need, the other only counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AttentionInterface, AutoModel, BertConfig

from kvd.client import connect_sync
from kvd.demo.models import SEED
from kvd.device.attention import AttentionRule, BatchPages, Packed, prefill
from kvd.errors import KvdError
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvd.client import SyncNode

pytestmark = pytest.mark.slow

LAYERS, HEADS, HEAD_DIM, PAGE, PAGES = 4, 8, 32, 16, 97
TEXTS = [tuple(range(5, 75)), tuple(range(100, 117)), (9, 8, 7)]
TOLERANCE = 1e-5
POOL = {
    "pool.layers": str(LAYERS),
    "pool.heads": str(HEADS),
    "pool.head_dim": str(HEAD_DIM),
    "pool.dtype": "float32",
    "pool.page_size": str(PAGE),
    "pool.pages": str(PAGES),
    "engine.workload": "embedding",
}
COUNTED = POOL | {"cache.mode": "prefill-only", "engine.attention": "varlen"}
WRITTEN = POOL | {"cache.mode": "off"}


class PoolAttention:
    """Attention of a batch that may write its K and V to pages first, and read them from there."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._layers = layers
        self.table: torch.Tensor | None = None
        self.reads_back = False
        self.damaged: int | None = None

    def __call__(self, module, query, key, value, attention_mask, scaling, **_):
        """As transformers calls it, all (texts, heads, tokens, head_dim)."""
        _, mask = padded()
        lengths = mask.sum(1, dtype=torch.int32)
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        q, k, v = (one.transpose(1, 2)[mask] for one in (query, key, value))
        kv = Packed(k, v, starts)
        if self.table is not None:
            pages = BatchPages(*self._layers[module.layer_idx], self.table, lengths)
            text, token = mask.nonzero(as_tuple=True)
            where = self.table[text, token // PAGE], token % PAGE
            pages.k[where], pages.v[where] = k, v
            if self.damaged is not None:
                pages.k[self.damaged] = pages.v[self.damaged] = 0
            kv = pages if self.reads_back else kv
        out = torch.zeros_like(query.transpose(1, 2))
        out[mask] = prefill(q, kv, AttentionRule(scaling, is_causal=False), starts)
        return out, None


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (texts, tokens) with zeros behind the shorter ones, and which of them count."""
    longest = max(map(len, TEXTS))
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in TEXTS])
    return tokens, tokens > 0


class Encoder:
    """The model, its attention over the pool of ``written``, and leases of either node."""

    def __init__(self, counted: SyncNode, written: SyncNode) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        config = BertConfig(
            vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )  # fmt: skip
        self._model = AutoModel.from_config(config).eval()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(4 if parameter.ndim > 1 else 1)
        self.counted, self.written = counted, written
        self.layers = [tuple(written.pool("main").layer(layer)) for layer in range(LAYERS)]
        self.attention = PoolAttention(self.layers)
        AttentionInterface.register("kvd-encoder", self.attention)

    def embed(self, node: SyncNode, *, reads_back: bool = False, damages: bool = False):
        """(texts, hidden) with a lease for each text, and their pages."""
        leases = [node.lease(text, cache=False) for text in TEXTS]
        rows = [lease.pages.tolist() for lease in leases]
        self.attention.table = None
        if node is self.written:
            width = max(map(len, rows))
            table = [row + [0] * (width - len(row)) for row in rows]
            self.attention.table = torch.tensor(table, dtype=torch.int32)
        self.attention.reads_back = reads_back
        self.attention.damaged = rows[0][0] if damages else None
        found = self._run("kvd-encoder", *padded())
        for lease in leases:
            lease.release()
        return found, rows

    def alone(self) -> torch.Tensor:
        """Text by text, with the attention of transformers: what must come out."""
        texts = [torch.tensor([text]) for text in TEXTS]
        return torch.cat([self._run("sdpa", one, torch.ones_like(one).bool()) for one in texts])

    @torch.inference_mode()
    def _run(self, attention: str, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self._model.set_attn_implementation(attention)
        states = self._model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoder]:
    directory: Path = tmp_path_factory.mktemp("daemons")
    with (
        one_daemon(directory, COUNTED, name="counting") as counting,
        one_daemon(directory, WRITTEN, name="writing") as writing,
        connect_sync(counting.client, name="encoder") as counted,
        connect_sync(writing.client, name="encoder") as written,
    ):
        yield Encoder(counted, written)


def test_embeddings_are_the_same_with_kv_written_read_back_and_without(encoder: Encoder) -> None:
    """scenario D1, scenario D10, scenario D13: the same bits, and no byte of KV."""
    without, _ = encoder.embed(encoder.counted)
    for k, _ in encoder.layers:
        assert not k.any(), "nothing was written"

    written, rows = encoder.embed(encoder.written)
    used = {page for row in rows for page in row}
    for tensor in (one for layer in encoder.layers for one in layer):
        slots = tensor.any(-1).any(-1).sum(1)
        assert set(slots.nonzero()[:, 0].tolist()) == used
        lengths = [int(slots[row].sum()) for row in rows]
        assert lengths == [len(text) for text in TEXTS]
    read_back, _ = encoder.embed(encoder.written, reads_back=True)

    assert torch.equal(without, written)
    assert torch.equal(without, read_back)
    assert (encoder.alone() - without).abs().max().item() <= TOLERANCE


def test_a_damaged_page_changes_the_embedding_of_its_text_alone(encoder: Encoder) -> None:
    good, _ = encoder.embed(encoder.written, reads_back=True)
    bad, _ = encoder.embed(encoder.written, reads_back=True, damages=True)

    assert [one > 1e-3 for one in (good - bad).abs().amax(-1).tolist()] == [True, False, False]


def test_a_pool_without_kv_counts_as_many_pages_in_no_bytes(encoder: Encoder) -> None:
    """scenario D1: 8 heads in 4 layers, and none of it; an engine may need one page of tensors."""
    encoder.embed(encoder.counted)
    encoder.embed(encoder.written)
    counted, written = (node.snapshot().pools[0] for node in (encoder.counted, encoder.written))
    page_bytes = LAYERS * 2 * PAGE * HEADS * HEAD_DIM * 4

    assert (counted.total_pages, written.total_pages) == (PAGES, PAGES)
    assert (counted.page_bytes, written.page_bytes) == (0, page_bytes)
    assert counted.placeholder_bytes == page_bytes
    assert counted.held_pages == written.held_pages == 0


def test_a_node_without_kv_refuses_whatever_needs_some(encoder: Encoder) -> None:
    """scenario D10, scenario D13"""
    node, prompt = encoder.counted, [1, 2, 3]
    lease = node.lease(prompt, cache=False)
    attempts = {
        "map": lambda: node.pool("main").layer(0),
        "commit": lambda: lease.commit(()),
        "send": lambda: node.send(1, prompt, lease=lease),
        "receive": lambda: node.receive(1, prompt, source="nobody"),
        "match": lambda: node.match(prompt),
    }
    for name, attempt in attempts.items():
        with pytest.raises(KvdError) as refusal:
            attempt()
        assert refusal.value.code == "not-supported", name
    lease.release()
