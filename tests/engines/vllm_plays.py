"""What is done with one engine, step by step: requests that wait while files and adapters change.

A play is a list of acts, each of them a name and what it takes: see ``Play``. Run by the
interpreter of an environment that has vLLM.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

MOST_STEPS = 3000


class Play:
    """One engine, and the requests that are asked of it by name."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._is_held = False
        self.told: dict[str, dict[str, Any]] = {}

    def of(self, acts: list[list[Any]]) -> dict[str, dict[str, Any]]:
        """What each request was answered by the end of these."""
        for act, *how in acts:
            getattr(self, act)(*how)
        self.end()
        return self.told

    def ask(self, name: str, ids: list[int], lora: Any, how: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams  # noqa: PLC0415 - reads the environment
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - as above

        sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        sampling |= {"detokenize": False} | (how or {})
        params, priority = sampling.pop("params", None), sampling.pop("priority", 0)
        if params:
            sampling["extra_args"] = {"kv_transfer_params": params}
        self._engine.add_request(
            name,
            {"prompt_token_ids": ids},
            SamplingParams(**sampling),
            lora_request=LoRARequest(*lora) if lora else None,
            priority=priority,
        )

    def steps(self, n: int) -> None:
        for _ in range(n):
            for out in self._engine.step():
                if out.finished:
                    self.told[out.request_id.split("-")[0]] = {
                        "tokens": list(out.outputs[0].token_ids),
                        "cached": out.num_cached_tokens,
                        "params": out.kv_transfer_params,
                    }

    def until(self, state: str, name: str) -> None:
        """``loading``; ``filled``: its load is over; ``waits``: and its turn has come, and gone."""
        holds = {"loading": is_loading, "filled": is_filled, "waits": waits, "runs": runs}[state]
        for _ in range(MOST_STEPS):
            request = self._request(name)
            if request is not None and holds(self._scheduler, request):
                return
            self.steps(1)
        raise AssertionError(f"{name} is never in that state: {state}")

    def _request(self, name: str) -> Any:
        """As the scheduler has it; its number has more behind the name."""
        found = self._scheduler.requests.items()
        return next((one for number, one in found if number.split("-")[0] == name), None)

    def end(self) -> None:
        while self._engine.has_unfinished_requests():
            self.steps(1)

    def hold(self) -> None:
        """No load is over from now on."""
        from kvd.connectors.vllm.worker import RankCopy  # noqa: PLC0415 - as above

        is_over = RankCopy.is_over
        self._is_held = True

        def held(copy: Any) -> bool:
            return is_over(copy) and not (copy.is_load and self._is_held)

        RankCopy.is_over = held

    def release(self) -> None:
        self._is_held = False

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def replace(self, how: str, at: str, by: str) -> None:
        """The files at one path have the bytes of another one's from now on."""
        name = "adapter_model.safetensors"
        if how == "in place":
            with open(f"{by}/{name}", "rb") as source, open(f"{at}/{name}", "r+b") as target:
                shutil.copyfileobj(source, target)
        elif how == "renamed":
            shutil.copyfile(f"{by}/{name}", f"{at}/new")
            os.replace(f"{at}/new", f"{at}/{name}")
        else:
            assert how == "linked"
            os.rename(at, f"{at}.former")
            os.symlink(by, at)

    def load(self, lora: Any, **how: Any) -> None:
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - as above

        assert self._engine.add_lora(LoRARequest(*lora, **how))

    def load_in_place(self, lora: Any) -> None:
        self.load(lora, load_inplace=True)

    def remove(self, number: int) -> None:
        assert self._engine.remove_lora(number)

    def settle(self) -> None:
        """As an engine in a process of its own goes on, until nothing is to be said or copied."""
        connector = self._scheduler.connector
        while connector is not None and connector.has_pending_push_work():
            self.steps(1)

    def flip(self) -> None:
        """The weights of the model are other ones."""
        self._engine.apply_model(flip)

    def reset(self) -> None:
        """Both caches, as far as vLLM does it while requests have blocks."""
        self._engine.reset_prefix_cache(reset_running_requests=False, reset_connector=True)


def overlap_batches() -> None:
    """Asynchronous scheduling, which vLLM turns off where it computes by processors."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415 - reads the environment

    check = CpuPlatform.check_and_update_config

    def checked(_platform: Any, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


def flip(model: Any) -> None:
    """Change its weights."""
    for name, weight in model.named_parameters():
        # What a processor multiplies by was packed elsewhere; norms are read as they are.
        if "layernorm" in name:
            weight.data[::2] *= -1


def is_loading(_scheduler: Any, request: Any) -> bool:
    return str(request.status).endswith("WAITING_FOR_REMOTE_KVS")


def is_filled(scheduler: Any, request: Any) -> bool:
    return request.request_id in scheduler.finished_recving_kv_req_ids


def waits(_scheduler: Any, request: Any) -> bool:
    return request.status.name == "WAITING" and request.num_computed_tokens > 0


def runs(_scheduler: Any, request: Any) -> bool:
    return request.status.name == "RUNNING" and request.num_output_tokens > 0
