"""Small models of further families, beside those that the demo knows: a row each."""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 512

_TRANSFORMER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_WINDOW = {"sliding_window": 32}
_EVERY_OTHER = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

SERVED = {
    "window alone": ("MistralConfig", _WINDOW),
    "window, Gemma 2": ("Gemma2Config", {**_WINDOW, "query_pre_attn_scalar": 16}),
    "window, Cohere 2": ("Cohere2Config", _EVERY_OTHER),
    "window, Olmo 3": ("Olmo3Config", _EVERY_OTHER),
    "window of chunks": (
        "Llama4TextConfig",
        {"attention_chunk_size": 32, "num_local_experts": 2, "intermediate_size_mlp": 128}
        | {"moe_layers": [], "no_rope_layers": [1, 1, 1, 0]},
    ),
    "window, shared KV": (
        "Gemma3nTextConfig",
        {**_WINDOW, "num_kv_shared_layers": 2, "num_hidden_layers": 6, "laurel_rank": 8}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3, "altup_num_inputs": 2}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
        | {"activation_sparsity_pattern": [0.0] * 6, "intermediate_size": [128] * 6},
    ),
    "convolutions beside KV": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    ),
    "delta rule beside KV": (
        "Qwen3NextConfig",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "Mamba 2 beside KV": ("BambaConfig", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "Mamba 2 and KV in one layer": (
        "FalconH1Config",
        {**_MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 64},
    ),
}
"""By what their layers keep: the name of a configuration, and what it has beyond the others."""

REFUSED = {
    "Mamba 1": (
        ("MambaConfig", {"state_size": 8, "use_mambapy": False}),
        "it does not go on from a state as if it had computed all",
    ),
    "Mamba 1 beside KV": (
        (
            "JambaConfig",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
            | {"expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}
            | {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        ),
        "it does not go on from a state as if it had computed all",
    ),
    "a state in its modules": (
        ("RecurrentGemmaConfig", {"attention_window_size": 32, "lru_width": 64}),
        "it has a state, and its cache holds none",
    ),
    "a cache of its own": (
        ("MiniMaxConfig", {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16}),
        "it does not compute in a DynamicCache",
    ),
    "a cache that is no Cache": (
        ("RwkvConfig", {"attention_hidden_size": 64}),
        "a layer of its cache holds nothing behind a token",
    ),
}
"""And what is said of it."""


def built(row: tuple[str, dict[str, object]]) -> transformers.PreTrainedModel:
    """The model of a row, whose tokens depend on all of their prompt."""
    name, options = row
    torch.manual_seed(1)
    nobody = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, name)(**_TRANSFORMER | options | nobody)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for called, parameter in model.named_parameters():
            if parameter.ndim > 1 and not called.endswith("A_log"):
                parameter.mul_(3.0)
    return model.eval()
