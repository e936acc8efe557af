"""Small models of random weights, one of each kind of KV cache that vLLM has on a CPU.

Run by the interpreter of an environment that has vLLM: ``families.py DIRECTORY [NAME...]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

BASE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
}
TWO_OF_THREE = ["sliding_attention", "sliding_attention", "full_attention"] * 2
MIXED = ["sliding_attention", "full_attention"] * 2


def gemma():
    """Windows of 64 tokens in four layers of six: two groups of these, one of the others."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig  # noqa: PLC0415

    more = {"num_hidden_layers": 6, "sliding_window": 64, "layer_types": TWO_OF_THREE}
    more |= {"query_pre_attn_scalar": 64, "tie_word_embeddings": False}
    return Gemma3ForCausalLM(Gemma3TextConfig(**BASE | more))


def gemma4():
    """Its layers of full attention have heads twice as wide: blocks of other sizes."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig  # noqa: PLC0415

    more = {"num_hidden_layers": 6, "sliding_window": 64, "layer_types": TWO_OF_THREE}
    more |= {"global_head_dim": 128, "vocab_size_per_layer_input": 4096}
    more |= {"hidden_size_per_layer_input": 0, "tie_word_embeddings": False}
    return Gemma4ForCausalLM(Gemma4TextConfig(**BASE | more))


def gptoss():
    """Windows in every other layer, attention sinks, experts."""
    from transformers import GptOssConfig, GptOssForCausalLM  # noqa: PLC0415

    more = {"num_hidden_layers": 4, "sliding_window": 64, "layer_types": MIXED}
    more |= {"num_local_experts": 4, "num_experts_per_tok": 2, "initial_context_length": 4096}
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0}
    rope |= {"beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 2048}
    more |= {"rope_parameters": rope}
    return GptOssForCausalLM(GptOssConfig(**BASE | {"intermediate_size": 128} | more))


def sliding():
    """Windows in every layer."""
    from transformers import MistralConfig, MistralForCausalLM  # noqa: PLC0415

    more = {"num_hidden_layers": 4, "sliding_window": 96}
    return MistralForCausalLM(MistralConfig(**BASE | more))


def mla():
    """Of each token one latent, and no heads."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # noqa: PLC0415

    more = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    more |= {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2}
    more |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3}
    more |= {"moe_intermediate_size": 128, "kv_lora_rank": 512, "q_lora_rank": 96}
    more |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    base = {name: value for name, value in BASE.items() if name != "head_dim"}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**base | more))


def llama4():
    """Attention to chunks of 64 tokens in three layers of four; experts."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig  # noqa: PLC0415

    more = {"num_hidden_layers": 4, "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0]}
    more |= {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 512}
    more |= {"interleave_moe_layer_step": 2, "tie_word_embeddings": False}
    return Llama4ForCausalLM(Llama4TextConfig(**BASE | more))


def falcon():
    """A state beside attention, in every layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM  # noqa: PLC0415

    more = {"num_hidden_layers": 2, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32}
    more |= {"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}
    return FalconH1ForCausalLM(FalconH1Config(**BASE | more))


def mamba2():
    """States alone."""
    from transformers import Mamba2Config, Mamba2ForCausalLM  # noqa: PLC0415

    more = {"num_hidden_layers": 2, "state_size": 16, "num_heads": 16, "head_dim": 32}
    more |= {"n_groups": 1, "chunk_size": 64, "vocab_size": 4096, "hidden_size": 256}
    return Mamba2ForCausalLM(Mamba2Config(**more, bos_token_id=1, eos_token_id=None))


def qwen3next():
    """Linear attention in three layers of four. Heads as wide as vLLM's kernel has them, so one of
    each; and attention of as many bytes, since a block of it is at least a state.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM  # noqa: PLC0415

    more = {"num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 1}
    more |= {"num_key_value_heads": 8, "head_dim": 128}
    more |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 4}
    more |= {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
    more |= {"shared_expert_intermediate_size": 128, "decoder_sparse_step": 1}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**BASE | more))


FAMILIES = {
    made.__name__: made
    for made in (
        *(gemma, gemma4, gptoss, sliding, mla, llama4),
        *(falcon, mamba2, qwen3next),
    )
}


def main() -> None:
    """Make those that are named."""
    import torch  # noqa: PLC0415 - of that environment

    root = Path(sys.argv[1])
    for number, name in enumerate(sys.argv[2:] or FAMILIES):
        torch.manual_seed(number)
        model = FAMILIES[name]()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(3)  # logits far enough apart that prompts have tokens of their own
        model.save_pretrained(root / name)


if __name__ == "__main__":
    main()
