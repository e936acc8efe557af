"""One vLLM engine of another interpreter: prompts in, tokens out."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROCESS: Final = Path(__file__).with_name("vllm_process.py")
END_S: Final = 30.0
KVD: Final = {
    "kv_connector": "KvdConnector",
    "kv_connector_module_path": "kvd.connectors.vllm",
    "kv_role": "kv_both",
}


def transfer_of(options: Mapping[str, object], beside: Sequence[object] = ()) -> dict[str, object]:
    """VLLM's ``kv_transfer_config``.

    Args:
        options: kvd's.
        beside: connectors in their order, as vLLM takes them, with ``"kvd"`` for kvd's; none: kvd
            is alone.
    """
    # Which version there is was looked at before.
    kvd = {**KVD, "kv_connector_extra_config": {"kvd.any_version": True, **options}}
    how: dict[str, object] = kvd
    if beside:
        several = [kvd if one == "kvd" else one for one in beside]
        how = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": several},
        }
    return how | {"kv_load_failure_policy": "recompute"}


TO_DECODE: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What routers ask of an engine whose prompt another one will decode."""


class VllmEngine:
    """A process of vLLM, started at once; ``ready`` says when it serves."""

    def __init__(
        self,
        python: str,
        model: Path,
        log: Path,
        *,
        options: Mapping[str, object] | None = None,
        beside: Sequence[object] = (),
        engine: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            python: of the environment with vLLM.
            model: its folder.
            log: where it writes.
            options: the connector's; None: an engine without kvd.
            beside: as ``transfer_of`` has it.
            engine: what ``LLM`` takes.
            environment: left out, this process' own.
        """
        self.log = log
        command = [python, str(PROCESS), str(model), "--engine", json.dumps(engine or {})]
        if options is not None:
            command += ["--transfer", json.dumps(transfer_of(options, beside))]
        with log.open("w") as target:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=target,
                text=True,
                cwd=model.parent,
                env=environment,
            )

    def ready(self) -> None:
        """Return when it serves."""
        assert self._read() == "ready"

    def ask(
        self,
        ids: Sequence[int],
        max_tokens: int = 12,
        params: Mapping[str, object] | None = None,
        *,
        reset: bool = False,
    ) -> dict[str, Any]:
        """The answer to one prompt; ``reset``: after vLLM's own cache was dropped."""
        (answer,) = self.ask_all([ids], max_tokens, params, reset=reset)
        return answer

    def ask_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 12,
        params: Mapping[str, object] | None = None,
        *,
        reset: bool = False,
    ) -> list[dict[str, Any]]:
        """The answers to prompts that are asked at once."""
        asked = [{"ids": ids, "max_tokens": max_tokens, "params": params} for ids in prompts]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": asked, "reset": reset}) + "\n")
        self._process.stdin.flush()
        answers: list[dict[str, Any]] = self._read()
        return answers

    @property
    def namespace(self) -> str:
        """What it says that its KV is of."""
        (found,) = set(re.findall(r"kvd namespace (\S+) is of", self.log.read_text()))
        return found

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self.log.read_text(errors="replace").splitlines()[-20:]
            raise RuntimeError("the engine has ended:\n" + "\n".join(said))
        return json.loads(line)

    def close(self) -> None:
        """Have it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
