"""One vLLM engine whose weights change, and whose caches are reset, in chosen states of a request.

Run by the interpreter of an environment that has vLLM: MODEL, ENDPOINT of the daemon, and what
``LLM`` takes as JSON. Out: for each state what the reset said, the tokens, how many were cached,
and the tokens that the same weights give when all is computed.
"""

from __future__ import annotations

import json
import os
import sys
import time

from vllm_plays import overlap_batches

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_STREAM="ext://sys.stderr",
    HF_HUB_OFFLINE="1",
)

IDS = list(range(100, 400))
MOST_STEPS = 5000
SETTLED_S = 10.0


class Engine:
    """Stepped by hand."""

    def __init__(self, model, endpoint, more):
        from vllm import LLM  # noqa: PLC0415 - reads the environment

        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=True,
            distributed_executor_backend="uni",
            **{"dtype": "float32", "block_size": 32, "max_model_len": 2048}
            | {"kv_cache_memory_bytes": 64 << 20}
            | more,
            kv_transfer_config={
                "kv_connector": "KvdConnector",
                "kv_connector_module_path": "kvd.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                # The weights that change here are in no file.
                "kv_connector_extra_config": {
                    "kvd.endpoint": endpoint,
                    "kvd.weights": "drawn",
                    # Others are at work on this machine: what is found counts, not how soon.
                    "kvd.probe_wait_s": 0.25,
                    "kvd.any_version": True,
                },
            },
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.n_asked = 0
        self.done = {}

    def ask(self, ids=IDS, n_tokens=8):
        from vllm import SamplingParams  # noqa: PLC0415

        self.n_asked += 1
        name = f"q{self.n_asked}"
        how = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(ids)}, how)
        return name

    def step(self):
        for out in self.llm.llm_engine.step():
            if out.finished:
                self.done[out.request_id.split("-")[0]] = out

    def request(self, name):
        """As the scheduler has it; its number has more behind the name."""
        for number, request in self.scheduler.requests.items():
            if number.split("-")[0] == name:
                return request
        return None

    def until(self, holds):
        for _ in range(MOST_STEPS):
            if holds():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def end(self, name):
        self.until(lambda: name in self.done)
        return self.done.pop(name)

    @property
    def held(self):
        """Blocks that somebody needs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def settle(self):
        """Until what is saved is saved, were it not soon."""
        end_s = time.monotonic() + SETTLED_S
        while self.held and time.monotonic() < end_s:
            self.step()
            time.sleep(0.002)

    def change_weights(self, by):
        def scale(model):
            for name, weight in model.named_parameters():
                # What a processor multiplies by was packed elsewhere; norms are read as they are.
                if "layernorm" in name:
                    weight.data[::by] *= -1

        self.llm.apply_model(scale)

    def reset(self, *, running=True, connector=True):
        try:
            return self.core.reset_prefix_cache(running, connector)
        except RuntimeError as error:
            return str(error)

    def computed(self, ids, n_tokens):
        """What the weights of now give, whatever is cached."""
        assert self.reset() is True
        out = self.end(self.ask(ids, n_tokens))
        assert out.num_cached_tokens == 0
        return list(out.outputs[0].token_ids)


def is_loading(engine, name):
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    request = engine.request(name)
    return request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS


def is_filled(engine, name):
    """vLLM has heard that its blocks are filled, and has not looked at it since."""
    request = engine.request(name)
    return (
        request is not None and request.request_id in engine.scheduler.finished_recving_kv_req_ids
    )


def is_running(engine, name):
    request = engine.request(name)
    # Where batches overlap, while one is under way.
    queue = engine.core.batch_queue
    is_under_way = queue is None or len(queue) > 0
    return request is not None and request.num_output_tokens >= 3 and is_under_way


STATES = {"loading": is_loading, "filled": is_filled, "running": is_running}


def outcome(engine, holds, by):
    """Of a request for what is cached in kvd, in whose state the weights change."""
    engine.end(engine.ask())
    engine.settle()
    assert engine.reset(running=False, connector=False) is True
    name = engine.ask(n_tokens=16)
    engine.until(lambda: holds(engine, name))
    in_flight = -1 if engine.core.batch_queue is None else len(engine.core.batch_queue)
    engine.change_weights(by)
    said = engine.reset()
    n_before = engine.request(name).num_output_tokens
    tokens = list(engine.end(name).outputs[0].token_ids)
    engine.settle()
    held = engine.held
    return {
        "said": said,
        "in_flight": in_flight,
        "before": n_before,
        "tokens": tokens[n_before:],
        "computed": engine.computed([*IDS, *tokens[:n_before]], 16 - n_before),
        "held": held,
    }


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model, endpoint, more = sys.argv[1:4]
    how = json.loads(more)
    if how.pop("overlaps", False):
        overlap_batches()
    engine = Engine(model, endpoint, how)
    told = {}
    for by, state in enumerate(STATES, 2):
        told[state] = outcome(engine, STATES[state], by)
    answers.write(json.dumps(told) + "\n")
    answers.flush()
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
