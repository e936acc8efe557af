"""One vLLM engine that sleeps while copies of its blocks are under way, and wakes.

vLLM has no sleep where it computes by processors, so here its worker for GPUs does it in their
place (``Worker.sleep`` and ``wake_up``, which call the connector from 0.33 on); what those free and
measure is played: while the memory of the blocks is away it is full of other bytes, and whoever
copies then is counted. Copies are slow here, so that one is under way.

Run by the interpreter of an environment that has such a vLLM: MODEL, ENDPOINT of the daemon. Out:
for each state how often blocks were touched while they were away, and tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time

from vllm_resets import IDS, Engine, is_loading

SLOW_S = 0.05
"""Of each piece of a copy."""

AWAY = 0x55


class Memory:
    """In place of vLLM's backend of sleep: the blocks' memory is away, or there."""

    def __init__(self, caches):
        self.caches = caches
        self.is_away = False
        self.touched = 0

    def suspend(self, level):
        import torch  # noqa: PLC0415

        self.is_away = True
        for cache in self.caches:
            blocks = cache.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(blocks).fill_(AWAY)

    def resume(self, tags=None):
        self.is_away = False

    def watch(self):
        """Copies are slow, and none may touch what is away."""
        from kvd.client.mover import host_lane  # noqa: PLC0415

        copied = host_lane.copy_pieces

        def slow(columns, **how):
            self.touched += self.is_away
            time.sleep(SLOW_S)
            fault = copied(columns, **how)
            self.touched += self.is_away
            return fault

        host_lane.copy_pieces = slow


def sleep_as_on_a_gpu(engine):
    """The worker of this engine sleeps; what it frees is played."""
    import torch  # noqa: PLC0415
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415

    worker = engine.core.model_executor.driver_worker.worker
    memory = Memory(worker.model_runner.kv_caches)
    worker._sleep_mode_backend = memory
    for name in ("sleep", "wake_up"):
        setattr(type(worker), name, getattr(Worker, name))
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.get_memory_info = lambda *_: (1 << 30, 2 << 30)
    memory.watch()
    return memory


def is_copied(engine, name):
    """Something that was ordered is not over."""
    return len(engine.scheduler.connector._scheduler._copies) > 0


STATES = {
    "saving": lambda *of: is_copied(*of) and not is_loading(*of),
    "loading": lambda *of: is_copied(*of) and is_loading(*of),
}


def outcome(engine, memory, holds, ids, *, is_cached):
    """Of a request in whose state the engine goes to sleep; it is asked again behind that."""
    if is_cached:
        engine.end(engine.ask(ids))
        engine.settle()
        assert engine.reset(running=False, connector=False) is True
    name = engine.ask(ids, 16)
    engine.until(lambda: holds(engine, name))
    engine.core.sleep(1)
    is_asleep = memory.is_away
    time.sleep(4 * SLOW_S)
    engine.core.wake_up()
    out = engine.end(engine.ask(ids, 16))
    engine.settle()
    return {
        "slept": is_asleep,
        "touched": memory.touched,
        "cached": out.num_cached_tokens,
        "tokens": list(out.outputs[0].token_ids),
        "held": engine.held,
    }


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model, endpoint = sys.argv[1:3]
    engine = Engine(model, endpoint, {"max_num_batched_tokens": 128})
    told = {"wanted": {}}
    for number, state in enumerate(STATES):
        ids = [number + 5, *IDS]
        told["wanted"][state] = engine.computed(ids, 16)
    memory = sleep_as_on_a_gpu(engine)
    for number, (state, holds) in enumerate(STATES.items()):
        ids = [number + 5, *IDS]
        assert engine.reset() is True
        told[state] = outcome(engine, memory, holds, ids, is_cached=state == "loading")
    answers.write(json.dumps(told) + "\n")
    answers.flush()
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
