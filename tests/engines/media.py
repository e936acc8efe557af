"""Small models of random weights that take images or sound, each with what vLLM prepares these by.

Run by the interpreter of an environment that has vLLM: ``media.py DIRECTORY [NAME...]``. In a
process that has it: ``given`` makes what a prompt is asked with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

N_WORDS = 4096
FIRST_NAME = 4000
NAMES = ["<image>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|vision_start|>",
         "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<boi>", "<eoi>", "<img>",
         *("\n" * n for n in range(1, 5))]  # fmt: skip
"""Tokens of these names stand for images and sound, and around them; new lines around Gemma's."""

TEXT = {
    "vocab_size": N_WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SIGHT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def token(name):
    """That of a name."""
    return FIRST_NAME + NAMES.index(name)


def words(**more):
    """A tokenizer: words that are numbers, and those names; ``more``: what it calls some."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    named = {name: token(name) for name in NAMES}
    known = {f"w{number}": number for number in range(N_WORDS) if number not in named.values()}
    tokenizer = Tokenizer(models.WordLevel(known | named, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(NAMES)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", extra_special_tokens=more
    )


def llava():
    """An image is 64 tokens of one kind; nothing of it is in their positions."""
    import transformers as t  # noqa: PLC0415

    sight = t.CLIPVisionConfig(image_size=64, patch_size=8, projection_dim=64, **SIGHT)
    config = t.LlavaConfig(
        text_config=t.LlamaConfig(**TEXT),
        vision_config=sight,
        image_token_index=token("<image>"),
    )
    made = t.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    processor = t.LlavaProcessor(
        made,
        words(image_token="<image>"),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    renamed = {"vision_tower.": "vision_tower.vision_model."}
    return t.LlavaForConditionalGeneration(config), processor, renamed


def qwen():
    """Positions of three kinds (M-RoPE), which go by the size of an image, as do its tokens."""
    import transformers as t  # noqa: PLC0415

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    ids = {"image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>")}
    ids |= {"vision_start_token_id": token("<|vision_start|>")}
    ids |= {"vision_end_token_id": token("<|vision_end|>")}
    sight = {"embed_dim": 64, "depth": 2, "num_heads": 2, "hidden_size": 128, "mlp_ratio": 2}
    config = t.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=sight, **ids
    )
    sizes = {"min_pixels": 28 * 28, "max_pixels": 280 * 280}
    processor = t.Qwen2VLProcessor(
        t.Qwen2VLImageProcessor(**sizes), words(), t.Qwen2VLVideoProcessor(**sizes)
    )
    return t.Qwen2VLForConditionalGeneration(config), processor, {}


def gemma():
    """Tokens of an image attend to later ones of the same; windows beside full attention."""
    import transformers as t  # noqa: PLC0415

    layers = ["sliding_attention", "full_attention"] * 2
    text = {**TEXT, "sliding_window": 64, "layer_types": layers, "query_pre_attn_scalar": 32}
    config = t.Gemma3Config(
        text_config=t.Gemma3TextConfig(**text),
        vision_config=t.SiglipVisionConfig(image_size=64, patch_size=8, **SIGHT),
        mm_tokens_per_image=16,
        image_token_index=token("<img>"),
        boi_token_index=token("<boi>"),
        eoi_token_index=token("<eoi>"),
    )
    named = words(image_token="<img>", boi_token="<boi>", eoi_token="<eoi>")
    made = t.Gemma3ImageProcessor(size={"height": 64, "width": 64}, do_pan_and_scan=False)
    renamed = {"vision_tower.": "vision_tower.vision_model."}
    processor = t.Gemma3Processor(made, named, image_seq_length=16)
    return t.Gemma3ForConditionalGeneration(config), processor, renamed


def audio():
    """Sound, of which a second is 25 tokens."""
    import transformers as t  # noqa: PLC0415

    hearing = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
    hearing |= {"encoder_ffn_dim": 128, "num_mel_bins": 80}
    config = t.Qwen2AudioConfig(
        audio_config=t.Qwen2AudioEncoderConfig(**hearing),
        text_config=t.Qwen2Config(**TEXT),
        audio_token_index=token("<|AUDIO|>"),
    )
    processor = t.Qwen2AudioProcessor(t.WhisperFeatureExtractor(feature_size=80), words())
    renamed = {"language_model.model.model.": "language_model.model."}
    return t.Qwen2AudioForConditionalGeneration(config), processor, renamed


def whisper():
    """What the decoder attends to are the states of an encoder."""
    import transformers as t  # noqa: PLC0415

    shape = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "vocab_size": 4096}
    shape |= {"decoder_layers": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 128}
    shape |= {"decoder_ffn_dim": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape |= {"decoder_start_token_id": 3, "num_mel_bins": 80}
    processor = t.WhisperProcessor(t.WhisperFeatureExtractor(feature_size=80), words())
    return t.WhisperForConditionalGeneration(t.WhisperConfig(**shape)), processor, {}


MODELS = {made.__name__: made for made in (llava, qwen, gemma, audio, whisper)}


def given(told):
    """What vLLM takes beside the tokens of a prompt.

    ``image``: of each the number that it is drawn by, or that, width and height; ``audio``: of each
    its number and seconds; ``encoded``: of an image its number, tokens and width. ``uuids``: what
    the user calls them; ``kwargs``: how they are prepared. ``embeds``: in the place of tokens, the
    number that they are drawn by, how many, and their width.
    """
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    def drawn(seed, *shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    if "embeds" in told:
        return {"prompt_embeds": drawn(*told["embeds"])}
    found = {}
    if "encoded" in told:
        seed, *shape = told["encoded"]
        found["image"] = drawn(seed, 1, *shape) * 30
    for one in told.get("image", ()):
        seed, width, height = one if isinstance(one, list) else (one, 64, 64)
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        found.setdefault("image", []).append(Image.fromarray(pixels))
    for seed, seconds in told.get("audio", ()):
        # A tone: noise sounds like any other noise.
        at = np.arange(int(16000 * seconds)) / 16000
        sound = np.sin(2 * np.pi * 300 * seed**2 * at).astype(np.float32)
        found.setdefault("audio", []).append((sound, 16000))
    asked = {"multi_modal_data": found}
    if "uuids" in told:
        asked["multi_modal_uuids"] = told["uuids"]
    if "kwargs" in told:
        asked["mm_processor_kwargs"] = told["kwargs"]
    return asked


def adapter():
    """Of LLaVA's language model."""
    import torch  # noqa: PLC0415

    draw = torch.Generator().manual_seed(9)
    made = {}
    for layer in range(TEXT["num_hidden_layers"]):
        at = f"base_model.model.language_model.model.layers.{layer}.self_attn.v_proj"
        made[f"{at}.lora_A.weight"] = torch.randn(8, 128, generator=draw) * 0.3
        made[f"{at}.lora_B.weight"] = torch.randn(64, 8, generator=draw) * 0.1
    return made


def main() -> None:
    """Make those that are named."""
    import safetensors.torch  # noqa: PLC0415 - of that environment
    import torch  # noqa: PLC0415

    root = Path(sys.argv[1])
    for number, name in enumerate(sys.argv[2:] or MODELS):
        torch.manual_seed(number)
        model, processor, renamed = MODELS[name]()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.dim() > 1:
                    # Logits far enough apart that prompts have tokens of their own, and images.
                    weight.mul_(30 if "projector" in key else 3)
        model.save_pretrained(root / name)
        processor.save_pretrained(root / name)
        # vLLM knows some of them by the names of earlier versions of transformers.
        file = root / name / "model.safetensors"
        weights = safetensors.torch.load_file(file)
        for now, then in renamed.items():
            weights = {
                then + key.removeprefix(now) if key.startswith(now) else key: weight
                for key, weight in weights.items()
            }
        safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    (root / "adapter").mkdir()
    safetensors.torch.save_file(adapter(), root / "adapter" / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj"]}
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
