"""A small model, and what drafts for it: right almost always, as long as it sees what was before.

Of ``target`` the first layer alone counts. ``eagle`` has that layer too, and its input is the next
token's, so it says what the target will, but for the prompt's first token, which it never sees.
``other`` is of other weights, and ``eagle3`` of random ones, which say nothing. Run by the
interpreter of an environment that has vLLM: ``drafts.py DIRECTORY``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def main() -> None:
    """Make them all."""
    import safetensors.torch  # noqa: PLC0415 - of that environment
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    root = Path(sys.argv[1])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **SHAPE))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)
        # Without a norm before its first layer a draft has the same input.
        embeds = model.model.embed_tokens.weight
        embeds.div_(embeds.pow(2).mean(-1, keepdim=True).sqrt())
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(root / "target")
    first = dict(model.model.layers[0].named_parameters(prefix="layers.0"))
    first.pop("layers.0.input_layernorm.weight")
    none = torch.zeros(256, 256)
    eagle = {**first, "fc.weight": torch.cat((torch.eye(256), none), 1)}
    heads = {"lm_head.weight": torch.randn(4096, 256), "norm.weight": torch.ones(256)}
    wide = {f"midlayer.{name.removeprefix('layers.0.')}": told for name, told in first.items()}
    for name in "qkv":
        key = f"midlayer.self_attn.{name}_proj.weight"
        wide[key] = torch.cat((wide[key], torch.zeros_like(wide[key])), 1)
    norms = {
        f"midlayer.{name}.weight": torch.ones(256) for name in ("input_layernorm", "hidden_norm")
    }
    three = {**wide, **heads, **norms, "fc.weight": torch.randn(256, 768)}
    made = {
        "eagle": (eagle, "LlamaForCausalLM"),
        "other": ({name: -told for name, told in eagle.items()}, "LlamaForCausalLM"),
        "eagle3": (three, "LlamaForCausalLMEagle3"),
    }
    for name, (weights, kind) in made.items():
        (root / name).mkdir()
        whole = {key: told.detach().contiguous() for key, told in weights.items()}
        safetensors.torch.save_file(whole, root / name / "model.safetensors", {"format": "pt"})
        told = LlamaConfig(num_hidden_layers=1, architectures=[kind], **SHAPE).to_dict()
        told |= {"model_type": "llama", "dtype": "float32", "draft_vocab_size": 4096}
        told |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        (root / name / "config.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
