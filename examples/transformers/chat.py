"""Three turns of a conversation with transformers; what the node has of each is not computed.

    python chat.py [MODEL]

Without MODEL, a path or a name of the Hugging Face hub, it is a small Llama of random weights, and
what is said are random tokens. ``KVD_SOCKETS__CLIENT`` is the daemon's client socket.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvd.connectors.transformers

TURNS = 3
MESSAGE, ANSWER = 150, 30
"""Tokens."""


def small_model() -> LlamaForCausalLM:
    """The same weights each time: so a second process is served what the first one left."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    """Say what each turn found, and its last tokens."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]) if sys.argv[1:] else small_model()
    said = torch.Generator().manual_seed(2)
    ids = torch.empty((1, 0), dtype=torch.long)
    with kvd.connectors.transformers.node(model) as node:
        for turn in range(1, TURNS + 1):
            message = torch.randint(model.config.vocab_size, (1, MESSAGE), generator=said)
            prompt = torch.cat([ids, message], dim=1)
            before = node.counts.hit_tokens
            ids = model.generate(prompt, max_new_tokens=ANSWER, do_sample=False)
            found = node.counts.hit_tokens - before
            print(f"turn {turn}: {found} of {prompt.shape[1]} tokens found,", ids[0, -4:].tolist())


if __name__ == "__main__":
    main()
