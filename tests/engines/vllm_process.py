"""One vLLM engine in a process of its own: a line of JSON for each batch of prompts, in and out.

Run by the interpreter of an environment that has vLLM. In: ``{"prompts": [{"ids": [...],
"max_tokens": n, "params": {...}}], "reset": bool}``. Out: for each its tokens, how many were
cached, what the connector says, and the time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--options", help="JSON of kv_connector_extra_config; left out: no kvd")
    parser.add_argument("--engine", default="{}", help="JSON of further arguments of LLM")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is no answer

    from vllm import LLM, SamplingParams  # noqa: PLC0415 - reads the environment
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    transfer = None
    if asked.options is not None:
        transfer = KVTransferConfig(
            kv_connector="KvdConnector",
            kv_connector_module_path="kvd.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"kvd.any_version": True, **json.loads(asked.options)},
        )
    how = {
        "block_size": 32,
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    }
    how |= json.loads(asked.engine)
    engine = LLM(asked.model, kv_transfer_config=transfer, **how)

    def say(what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    say("ready")
    for line in sys.stdin:
        batch = json.loads(line)
        if batch.get("reset"):
            engine.reset_prefix_cache()
        prompts = batch["prompts"]
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=one["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": one["params"]} if one.get("params") else None,
            )
            for one in prompts
        ]
        began_s = time.perf_counter()
        outputs = engine.generate(
            [{"prompt_token_ids": one["ids"]} for one in prompts], sampling, use_tqdm=False
        )
        took_s = time.perf_counter() - began_s
        say(
            [
                {
                    "tokens": list(out.outputs[0].token_ids),
                    "cached": out.num_cached_tokens,
                    "params": out.kv_transfer_params,
                    "took_s": took_s,
                }
                for out in outputs
            ]
        )
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
