"""Shapes of models that are measured."""

from __future__ import annotations

from typing import Final

MODEL_8B: Final = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
"""Llama 3 8B, but for its weights."""
