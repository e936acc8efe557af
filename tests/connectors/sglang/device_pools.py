"""SGLang's device pools in host memory, as the engines here have them."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

PAGE = 16
TOKENS = 64 * PAGE


def mha_device(layers=3, heads=2, head_dim=32, tokens=TOKENS):
    return MHATokenToKVPool(tokens, PAGE, torch.bfloat16, heads, head_dim, layers, "cpu", False)


def mla_device(layers=3):
    return MLATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=96,
        qk_rope_head_dim=32,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
