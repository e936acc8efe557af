"""vLLM imported once; an engine for each line of JSON, in a process that is forked for it.

An engine so starts in a few seconds. Run by the interpreter of an environment that has vLLM. In:
``{"engine": {...}, "asks": [...], "log": PATH, "environment": {...}, "waits": {...}}``, with what
``LLM`` takes, variables for this engine alone, and how long the connector waits for what. An ask
has ``ids``, and may have ``lora``, ``params``, ``reset`` (``drop``: of vLLM's own cache alone) and
files to ``copy`` before, ``max_tokens`` and what else ``SamplingParams`` takes (``sampling``),
prompts that are asked beside it (``more``), the priority of each (``priority``), images or sound of
each (``media``: see ``media.given``), after how many steps it is taken back (``abort``), what is
called of all workers before (``call``; of ``sleep``: it sleeps, and wakes), whether the caches are
reset ``amid`` it, after so many ``steps``, and ``bytes``: then its answer has a digest of each
block that vLLM can find again, by what vLLM finds it by. In its place there may be a ``play`` of
several requests, see ``vllm_plays``. Out: the answers of each ask, or ``{"error": ...}`` if the
engine does not start. ``breaks``: every load fails, in the ``worker`` that should copy it, or
before that in the ``scheduler``; or images count for nothing (``media``).

With ``"pipes": [ASKS, ANSWERS]`` in the place of asks the engine goes on beside others, and has a
line for each ask in the first, and one for the answers of each in the second.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import traceback

from media import given
from vllm_plays import Play, flip, overlap_batches

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_STREAM="ext://sys.stderr",
    HF_HUB_OFFLINE="1",
    PYTHONHASHSEED="0",  # what blocks are found by is the same in each engine
)


BROKEN = "this load is broken"


def break_loads(where):
    """No load comes to anything; blocks stay as they are."""
    from kvd.connectors.vllm.media import MediaKeys  # noqa: PLC0415
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
    elif where == "media":
        MediaKeys.of = lambda keys, request, page_size: {}
    else:
        Requests.load = load


PREEMPTED: list[str] = []
ENCODED: list[str] = []
DRAFTED: list[tuple[int, int]] = []


def started(asked):
    """One engine."""
    from vllm import LLM  # noqa: PLC0415 - reads the environment

    how = {
        "distributed_executor_backend": "uni",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 64 << 20,
    }
    for wait, within_s in asked["waits"].items():
        module, _, name = wait.rpartition(".")
        setattr(importlib.import_module(module), name, within_s)
    if asked.get("breaks"):
        break_loads(asked["breaks"])
    note_preemptions()
    note_encoders()
    note_drafts()
    fork_ranks()
    if asked["engine"].pop("overlaps", False):
        overlap_batches()
    return LLM(enforce_eager=True, disable_log_stats=True, **how | asked["engine"])


def fork_ranks():
    """Ranks in processes of their own (``mp``) are forked too: vLLM has all of them read it anew.

    On a GPU that is needed; here no thread computes before the fork.
    """
    from vllm.v1.executor import multiproc_executor  # noqa: PLC0415

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def answers_of(engine, ask):
    """What it says, of each prompt of an ask."""
    from vllm import SamplingParams  # noqa: PLC0415 - as above
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    if "play" in ask:
        return [Play(engine.llm_engine).of(ask["play"])]
    if ask.get("copy"):
        shutil.copyfile(*ask["copy"])
    if ask.get("reset") or ask.get("drop"):
        engine.reset_prefix_cache(reset_connector=bool(ask.get("reset")))
    if "call" in ask:
        call_workers(engine, *ask["call"])
    sampling = SamplingParams(
        temperature=0,
        max_tokens=ask.get("max_tokens", 8),
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": ask["params"]} if ask.get("params") else None,
        **sampling_of(ask.get("sampling", {})),
    )
    if "abort" in ask:
        abort_one(engine.llm_engine, ask, sampling)
        return []
    lora = LoRARequest(*ask["lora"]) if ask.get("lora") else None
    if "amid" in ask:
        return [reset_beside(engine.llm_engine, ask, sampling)]
    found = [
        {
            "tokens": list(out.outputs[0].token_ids),
            "cached": out.num_cached_tokens,
            "params": out.kv_transfer_params,
            "of_prompt": logprobs_of(out.prompt_logprobs),
            "preempted": sorted(PREEMPTED),
            "encoded": list(ENCODED),
            "drafted": list(DRAFTED),
        }
        for out in engine.generate(
            prompts_of(ask),
            sampling,
            use_tqdm=False,
            lora_request=lora,
            priority=ask.get("priority"),
        )
    ]
    if ask.get("bytes"):
        found[-1]["bytes"] = digests_of(engine.llm_engine.engine_core.engine_core)
    return found


def prompts_of(ask):
    """Their tokens, and what stands in them beside these."""
    prompts = [{"prompt_token_ids": ids} for ids in (ask["ids"], *ask.get("more", ()))]
    if "media" in ask:
        found = [one | given(told) for one, told in zip(prompts, ask["media"], strict=True)]
        return [
            {"prompt_embeds": one["prompt_embeds"]} if "prompt_embeds" in one else one
            for one in found
        ]
    return prompts


def settle(engine):
    """Go on as an engine in a process of its own does, until what was generated is copied."""
    connector = engine.engine_core.engine_core.scheduler.connector
    while connector is not None and connector.has_pending_push_work():
        engine.step()


def digests_of(core):
    """By what a block is found: a digest of what its group's layers have there."""
    pool = core.scheduler.kv_cache_manager.block_pool
    runner = core.model_executor.driver_worker.worker.model_runner
    config = runner.kv_cache_config
    layers = runner.compilation_config.static_forward_context
    found = {}
    for key, blocks in pool.cached_block_hash_to_block._cache.items():
        for block in blocks.values() if isinstance(blocks, dict) else [blocks]:
            group = config.kv_cache_groups[int.from_bytes(key[-4:], "big")]
            digest = hashlib.sha256()
            for name in group.layer_names:
                kv = layers[name].kv_cache
                for tensor in kv if isinstance(kv, tuple) else (kv,):
                    parts = tensor.shape[0] // config.num_blocks
                    mine = tensor[block.block_id * parts : (block.block_id + 1) * parts]
                    digest.update(mine.contiguous().flatten().view(dtype=uint8()).numpy())
            found.setdefault(key.hex(), []).append(digest.hexdigest())
    return found


def uint8():
    """Of torch."""
    import torch  # noqa: PLC0415

    return torch.uint8


def sampling_of(asked):
    """As it is said in JSON."""
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

    if "structured_outputs" in asked:
        return asked | {
            "structured_outputs": StructuredOutputsParams(**asked["structured_outputs"])
        }
    return asked


def note_preemptions():
    """Have ``PREEMPTED`` name the requests whose blocks vLLM takes back, as it comes."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    preempt = Scheduler._preempt_request

    def noted(scheduler, request, *args, **more):
        PREEMPTED.append(request.request_id)
        preempt(scheduler, request, *args, **more)

    Scheduler._preempt_request = noted


def note_encoders():
    """Have ``ENCODED`` name each image that an encoder is run for."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager  # noqa: PLC0415

    allocate = EncoderCacheManager.allocate

    def noted(manager, request, number):
        ENCODED.append(request.mm_features[number].identifier)
        allocate(manager, request, number)

    EncoderCacheManager.allocate = noted


def note_drafts():
    """Have ``DRAFTED`` say of each step that verifies how many tokens are drafted, and kept."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    stats = Scheduler.make_spec_decoding_stats

    def noted(scheduler, *args, **told):
        DRAFTED.append((told["num_draft_tokens"], told["num_accepted_tokens"]))
        return stats(scheduler, *args, **told)

    Scheduler.make_spec_decoding_stats = noted


def logprobs_of(prompt):
    """Of each token of a prompt behind the first."""
    return [round(max(one.logprob for one in found.values()), 3) for found in prompt or () if found]


def abort_one(engine, ask, sampling):
    """Ask, go so many steps, and take it back."""
    engine.add_request("taken-back", {"prompt_token_ids": ask["ids"]}, sampling)
    for _ in range(ask["abort"]):
        engine.step()
    engine.abort_request(["taken-back"])
    while engine.has_unfinished_requests():
        engine.step()


def call_workers(engine, method, how):
    """By which the weights of the model may be changed."""
    if method == "apply_model":
        engine.apply_model(flip)
    elif method == "a function":
        engine.collective_rpc(lambda worker: flip(worker.get_model()))
    elif method == "sleep":
        engine.sleep(**how)
        engine.wake_up()
    else:
        engine.collective_rpc(method, kwargs=how)


def reset_beside(engine, ask, sampling):
    """Ask, go so many steps, and have both caches reset, as far as vLLM does it then."""
    engine.add_request("beside", {"prompt_token_ids": ask["ids"]}, sampling)
    for _ in range(ask["steps"]):
        engine.step()
    said = engine.reset_prefix_cache(reset_running_requests=False, reset_connector=True)
    while engine.has_unfinished_requests():
        engine.step()
    return {"said": said}


def serve_one(asked, answers):
    """In the forked process; it does not come back."""
    log = os.open(asked["log"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(asked["environment"])
    if "pipes" in asked:
        asks, answers = (open(path, how) for path, how in zip(asked["pipes"], "rw", strict=True))  # noqa: SIM115

    def say(told):
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    try:
        engine = started(asked)
        if "pipes" in asked:
            say("ready")
            for line in asks:
                found = answers_of(engine, json.loads(line))
                settle(engine.llm_engine)
                say(found)
        else:
            found = []
            for ask in asked["asks"]:
                found += answers_of(engine, ask)
                # Else a prompt that follows at once may come before what it begins with is saved.
                settle(engine.llm_engine)
            say(found)
        engine.llm_engine.engine_core.shutdown()
    except BaseException as error:  # noqa: BLE001 - it is the answer
        traceback.print_exc()
        say({"error": str(error)})
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
    beside = []
    while line := sys.stdin.readline():
        asked = json.loads(line)
        child = os.fork()
        if not child:
            serve_one(asked, answers)
        if "pipes" in asked:
            beside.append(child)
        else:
            os.waitpid(child, 0)
    for child in beside:
        os.waitpid(child, 0)
    os._exit(0)  # to take vLLM apart takes seconds


if __name__ == "__main__":
    main()
