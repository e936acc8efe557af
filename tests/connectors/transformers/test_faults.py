"""Daemons that end, hang, are full or refuse, at each step: the same tokens, and nothing held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvd.client import KvdError, connect_sync
from kvd.connectors.transformers import daemon_link
from kvd.connectors.transformers.copies import PageCopies
from tests.connectors.transformers.world import (
    answered,
    daemon_for,
    model_of,
    nothing_is_held,
    prompt,
    served,
)

ROOT = Path(__file__).parents[3]
IDS = prompt(100)


class AtToken(StoppingCriteria):
    """Does something when so many tokens were said; stops nothing."""

    def __init__(self, token: int, act) -> None:
        self._left, self._act = token, act

    def __call__(self, input_ids, scores, **_):
        self._left -= 1
        if self._left == 0:
            self._act()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A daemon that is back is found at once."""
    monkeypatch.setattr(daemon_link, "RETRY_S", 0.0)
    monkeypatch.setattr(daemon_link, "SILENT_S", 0.0)


def killed(daemon):
    daemon.kill()


def stopped(daemon):
    os.kill(daemon.pid, signal.SIGSTOP)


def restarted(daemon):
    daemon.kill()
    daemon.start()
    daemon.wait_ready()


class Once:
    """Something that happens the first time that it may."""

    def __init__(self, act) -> None:
        self.has_happened = False
        self._act = act

    def __call__(self):
        if not self.has_happened:
            self.has_happened = True
            self._act()


def at(step, act, monkeypatch):
    """Have it happen at that step of the next ``generate``; what to give that."""
    names = {"loading": "load", "loaded": "load", "saving": "save", "saved": "save"}
    if step == "before":
        act()
    elif step == "computing":
        return {"stopping_criteria": StoppingCriteriaList([AtToken(3, act)])}
    else:
        plain = getattr(PageCopies, names[step])

        def wrapped(self, *args):
            if step.endswith("ing"):
                act()
            found = plain(self, *args)
            act()
            return found

        monkeypatch.setattr(PageCopies, names[step], wrapped)
    return {}


@pytest.mark.parametrize("fault", [killed, stopped, restarted])
@pytest.mark.parametrize("step", ["before", "loading", "loaded", "computing", "saving", "saved"])
def test_a_fault_of_the_daemon_costs_no_token(fault, step, monkeypatch) -> None:
    """In a prompt that is cached, and an answer that is not; what comes behind it is right too."""
    model = model_of("llama")
    alone = answered(model, IDS)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        assert torch.equal(answered(model, IDS, max_new_tokens=2), alone[:, :102])
        act = Once(lambda: fault(daemon))
        how = at(step, act, monkeypatch)

        assert torch.equal(answered(model, IDS, **how), alone)
        assert act.has_happened
        assert torch.equal(answered(model, IDS), alone)

        if fault is stopped:
            os.kill(daemon.pid, signal.SIGCONT)
        if fault is killed:
            daemon.start()
            daemon.wait_ready()
        # Whatever session that is, it finds what it saved, or saves it.
        for _ in range(3):
            assert torch.equal(answered(model, IDS), alone)
        before = node.counts.hit_tokens
        assert torch.equal(answered(model, IDS), alone)
        assert node.counts.hit_tokens == before + 96
        nothing_is_held(daemon)


def test_no_daemon_at_all_is_as_without_kvd(tmp_path) -> None:
    model = model_of("llama")
    alone = answered(model, IDS)
    with served(model, _Nowhere(tmp_path)) as node:
        assert torch.equal(answered(model, IDS), alone)
        assert node.counts.prompts == 0
        assert list(node.counts.alone) == ["unreachable"]


class _Nowhere:
    def __init__(self, path) -> None:
        self.client = f"ipc://{path}/client.sock"


def test_a_full_pool_serves_hits_and_saves_nothing() -> None:
    model = model_of("llama")
    other = prompt(300, seed=9)
    alone, other_alone = answered(model, IDS), answered(model, other)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        answered(model, IDS, max_new_tokens=2)
        with connect_sync(daemon.client, name="greedy") as greedy:
            pages = greedy.pool("main").memory.components[0].pages
            greedy.lease([1], reserve_tokens=(pages - 1 - 8) * 16)
            assert torch.equal(answered(model, IDS), alone)
            assert node.counts.hit_tokens == 96
            saved = node.counts.saved_tokens
            assert torch.equal(answered(model, other), other_alone)
            assert node.counts.saved_tokens == saved
        assert torch.equal(answered(model, other), other_alone)
        assert node.counts.saved_tokens > saved
        nothing_is_held(daemon)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_script_that_is_interrupted_holds_nothing(error) -> None:
    model = model_of("llama")
    alone = answered(model, IDS)

    def interrupt():
        raise error

    with daemon_for(model) as daemon, served(model, daemon) as node:
        with pytest.raises(error):
            answered(model, IDS, stopping_criteria=StoppingCriteriaList([AtToken(5, interrupt)]))
        nothing_is_held(daemon)
        assert torch.equal(answered(model, IDS), alone)
        assert node.counts.hit_tokens == 96, "its prompt was saved when it was computed"


def test_a_copy_that_fails_is_not_committed(monkeypatch) -> None:
    """What was half written is nobody's."""
    model = model_of("llama")
    alone = answered(model, IDS)
    plain = PageCopies.save

    def fails(self, lease, cache, n_tokens):
        plain(self, lease, cache, n_tokens // 2 // 16 * 16)
        raise RuntimeError("out of memory")

    with daemon_for(model) as daemon, served(model, daemon) as node:
        monkeypatch.setattr(PageCopies, "save", fails)
        assert torch.equal(answered(model, IDS), alone)
        monkeypatch.undo()
        assert torch.equal(answered(model, IDS), alone)
        assert node.counts.hit_tokens == 0
        nothing_is_held(daemon)


KILLED = """
import os, signal, sys
from transformers import StoppingCriteriaList
from kvd.connectors.transformers import node
from tests.connectors.transformers.test_faults import IDS, AtToken
from tests.connectors.transformers.world import answered, model_of
model = model_of("llama")
end = lambda: os.kill(os.getpid(), signal.SIGKILL)
with node(model, sys.argv[1]):
    answered(model, IDS, stopping_criteria=StoppingCriteriaList([AtToken(3, end)]))
"""


def test_a_script_that_is_killed_holds_nothing_and_leaves_its_prompt() -> None:
    model = model_of("llama")
    alone = answered(model, IDS)
    with daemon_for(model) as daemon:
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, daemon.client], cwd=ROOT, check=False, timeout=300
        )
        assert ended.returncode == -signal.SIGKILL
        nothing_is_held(daemon)
        with served(model, daemon) as node:
            assert torch.equal(answered(model, IDS), alone)
            assert node.counts.hit_tokens == 96


def test_a_pool_of_another_model_is_refused_with_the_section_that_fits() -> None:
    model, other = model_of("llama"), model_of("qwen")
    with daemon_for(other) as daemon, pytest.raises(KvdError) as refused:
        served(model, daemon)
    assert refused.value.code == "layout-mismatch"
    assert '[pool]\nfamily = "mha"\nlayers = 4' in str(refused.value)
    assert "heads = 2" in str(refused.value)
