"""A small Llama with random weights, and its tokenizer: ``python model.py FOLDER``.

Run by the interpreter of an environment that has vLLM. No weights can be fetched for a demo that
must run anywhere, so the model says nothing: its answers are words of kvd's documentation, as they
come. They depend on each token of the prompt all the same, which is what counts here.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"

HIDDEN, HEADS, KV_HEADS, LAYERS = 256, 8, 4, 8
SCALE = 3.0
"""Weights as they are drawn give the same few words whatever was asked."""

CHAT = (
    "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def words() -> list[str]:
    """The words and signs that the tokenizer knows, most frequent first.

    What it splits a text into is what it joins with blanks, so an answer that is sent back in the
    next turn has the tokens that it had.
    """
    counts = Counter[str]()
    for page in sorted(DOCS.rglob("*.md")):
        counts.update(re.findall(r"\w+|[^\w\s]+", page.read_text("utf-8")))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return list(dict.fromkeys(["<unk>", "system", "user", "assistant", ":", *ranked]))


def make(folder: Path) -> None:
    """Write model and tokenizer there."""
    # Here, for a test that only wants the words has none of these.
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    known = {word: number for number, word in enumerate(words())}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(known),
        hidden_size=HIDDEN,
        intermediate_size=688,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(shape)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(SCALE)
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
