"""vLLM imported once; an engine for each line of JSON, in a process that is forked for it.

An engine so starts in a few seconds. Run by the interpreter of an environment that has vLLM. In:
``{"engine": {...}, "asks": [...], "log": PATH}``, with what ``LLM`` takes; an ask has ``ids``, and
may have ``lora``, ``params``, ``reset`` and files to ``copy`` before, ``max_tokens``, prompts that
are asked beside it (``more``), and after how many steps it is taken back (``abort``). Out: the
answers of each ask, or ``{"error": ...}`` if the engine does not start. ``breaks``: every load
fails, in the ``worker`` that should copy it, or before that in the ``scheduler``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_STREAM="ext://sys.stderr",
    HF_HUB_OFFLINE="1",
)


BROKEN = "this load is broken"


def break_loads(where):
    """No load comes to anything; blocks stay as they are."""
    from kvd.connectors.vllm.requests import Requests  # noqa: PLC0415
    from kvd.connectors.vllm.worker import RankCopy  # noqa: PLC0415
    from kvd.errors import Code, KvdError, Refusal  # noqa: PLC0415

    def begin(copy, joined, mark, begin=RankCopy.begin):
        if copy.is_load:
            raise KvdError(Refusal(Code.NO_ROOM, BROKEN))
        begin(copy, joined, mark)

    def load(requests, tracked):
        sys.stderr.write(f"{BROKEN}\n")
        requests.alone(tracked, BROKEN)

    if where == "worker":
        RankCopy.begin = begin
    else:
        Requests.load = load


def answers_of(asked):
    """What one engine says."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - reads the environment
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    how = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 64 << 20,
    }
    if asked.get("breaks"):
        break_loads(asked["breaks"])
    engine = LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        **how | asked["engine"],
    )
    found = []
    for ask in asked["asks"]:
        if ask.get("copy"):
            shutil.copyfile(*ask["copy"])
        if ask.get("reset"):
            engine.reset_prefix_cache(reset_connector=True)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=ask.get("max_tokens", 8),
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": ask["params"]} if ask.get("params") else None,
        )
        if "abort" in ask:
            abort_one(engine.llm_engine, ask, sampling)
            continue
        lora = LoRARequest(*ask["lora"]) if ask.get("lora") else None
        prompts = [{"prompt_token_ids": ids} for ids in (ask["ids"], *ask.get("more", ()))]
        found += [
            {
                "tokens": list(out.outputs[0].token_ids),
                "cached": out.num_cached_tokens,
                "params": out.kv_transfer_params,
            }
            for out in engine.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
        ]
    engine.llm_engine.engine_core.shutdown()
    return found


def abort_one(engine, ask, sampling):
    """Ask, go so many steps, and take it back."""
    engine.add_request("taken-back", {"prompt_token_ids": ask["ids"]}, sampling)
    for _ in range(ask["abort"]):
        engine.step()
    engine.abort_request(["taken-back"])
    while engine.has_unfinished_requests():
        engine.step()


def serve_one(asked, answers):
    """In the forked process; it does not come back."""
    log = os.open(asked["log"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        told = answers_of(asked)
    except BaseException as error:  # noqa: BLE001 - it is the answer
        traceback.print_exc()
        told = {"error": str(error)}
    answers.write(json.dumps(told) + "\n")
    answers.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints is no answer
    import torch  # noqa: PLC0415 - before the fork, once
    import vllm.v1.engine.llm_engine  # noqa: PLC0415
    import vllm.v1.worker.cpu_worker  # noqa: F401, PLC0415

    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            serve_one(json.loads(line), answers)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
