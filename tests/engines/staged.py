"""A worker of vLLM's for stages of a pipeline on a CPU, by the name ``staged.StagedWorker``.

What a stage gets from the one before it lies in tensors that vLLM makes with a first batch, which
it computes to compile the model, and so never with ``enforce_eager``: it ends in an error then.
"""

from __future__ import annotations

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StagedWorker(CPUWorker):
    def load_model(self, *args, **more):
        super().load_model(*args, **more)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
