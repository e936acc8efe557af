"""Engines that are forked from one process of another interpreter: each starts in seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np

from tests.connectors.vllm.stand_ins import COMES_S, WAITS
from tests.engines.engine import TO_DECODE, transfer_of
from tests.engines.environment import PYTHON

HERE = Path(__file__).parent
IDS = np.random.default_rng(7).integers(1, 4000, 300).tolist()

PATIENT = {"kvd.probe_wait_s": 0.25}
"""Several engines and daemons share this machine: what moves is looked at, not how soon. So no
other wait of the connector ends before what it waits for either."""

WARM = {"ids": [9] * 20}
"""The first step joins the session, and a load waits for that 50 ms at most: this is no load."""


def prompt(n_tokens, seed=1):
    return np.random.default_rng([n_tokens, seed]).integers(1, 4000, n_tokens).tolist()


def tokens_of(answers):
    return [answer["tokens"] for answer in answers]


def handed_over(prefill, decode, ids, **how):
    """The answer of an engine that decodes what the other one has prefilled."""
    told = prefill.ask(ids, max_tokens=1, params=TO_DECODE)["params"]
    assert told["kvd"]["peer"]
    return decode.ask(ids, params=told, **how)


def cache_of(python):
    """Where vLLM keeps what it has found out of a model: that takes it a process, which reads all
    of vLLM, and two versions in one folder overwrite each other's.
    """
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm")
    return root / python.strip("/").replace("/", "-")


class Forks:
    """Engines that are forked from one process."""

    def __init__(self, directory, python=PYTHON, beside=()):
        """``beside``: folders with what they import that the environment has not."""
        self._directory = directory
        own = {"VLLM_CACHE_ROOT": str(cache_of(python))}
        with (directory / "forks.log").open("w") as log:
            self._process = subprocess.Popen(
                [python, str(HERE / "vllm_forks.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment(beside) | own,
            )
        self.started = 0
        self._log = directory

    @staticmethod
    def environment(beside=()):
        """This process' own, with those folders, and the one with a connector of these tests."""
        found = [str(HERE), *map(str, beside), os.environ.get("PYTHONPATH")]
        return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}

    def run(self, model, daemon=None, asks=({},), options=None, beside=None, breaks="", **engine):
        """What one engine answers, and its log."""
        asks = [{"ids": IDS, **ask} for ask in asks]
        log = self._tell(model, daemon, options, beside, engine, asks=asks, breaks=breaks)
        return json.loads(self._process.stdout.readline()), log.read_text()

    def beside(self, model, daemon=None, options=None, **engine):
        """An engine that goes on beside others, once it is ``ready``."""
        pipes = [str(self._directory / f"{name}-{self.started}") for name in ("asks", "answers")]
        for pipe in pipes:
            os.mkfifo(pipe)
        log = self._tell(model, daemon, options, None, engine, pipes=pipes)
        return ForkedEngine(*pipes, log)

    def _tell(self, model, daemon, options, beside, engine, **asked):
        """Have one forked; its log."""
        self.started += 1
        self._log = log = self._directory / f"engine-{self.started}.log"
        engine["model"] = str(model)
        asked["environment"] = engine.pop("environment", {})
        asked["waits"] = dict.fromkeys(WAITS, COMES_S)
        if daemon is not None:
            told = {"kvd.endpoint": daemon.client, **(options or {})}
            engine["kv_transfer_config"] = transfer_of(told, beside or ())
        told = {"engine": engine, "log": str(log), **asked}
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return log

    def answers(self, *where, **how):
        found, log = self.run(*where, **how)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        return found

    @property
    def told(self):
        """What the last engine has said of kvd: why it has not done what was wanted."""
        lines = self._log.read_text().splitlines()
        return "\n".join(line[:400] for line in lines if "kvd" in line or "daemon" in line)

    def close(self):
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()


class ForkedEngine:
    """One that goes on beside others: it answers each ask when that comes."""

    def __init__(self, asks, answers, log):
        self.log = log
        self._asks = open(asks, "w")  # noqa: SIM115
        self._answers = open(answers)  # noqa: SIM115

    def ready(self):
        assert self._read() == "ready"

    def _read(self):
        line = self._answers.readline()
        assert line, f"the engine has ended:\n{self.log.read_text()[-3000:]}"
        return json.loads(line)

    def ask(self, ids, **how):
        """The answer of one prompt."""
        return self.ask_all([ids], **how)[-1]

    def ask_all(self, prompts, **how):
        """The answers of prompts that are asked at once."""
        ask = {"ids": prompts[0], "more": prompts[1:], **how}
        self._asks.write(json.dumps(ask) + "\n")
        self._asks.flush()
        found = self._read()
        assert isinstance(found, list), f"{found}\n{self.log.read_text()[-3000:]}"
        return found

    def close(self):
        """Have it end; what it says last is awaited."""
        self._asks.close()
        self._answers.read()
        self._answers.close()


@contextlib.contextmanager
def engines_at(forks, model, *of_engines):
    """An engine for each daemon and what ``LLM`` takes, side by side."""
    with contextlib.ExitStack() as stack:
        made = []
        for daemon, engine in of_engines:
            made.append(forks.beside(model, daemon, PATIENT, **engine))
            stack.callback(made[-1].close)
        for engine in made:
            engine.ready()
            engine.ask(**WARM)
        yield made
