"""An environment that cannot run these tests is told apart in words, and not by seven errors."""

from __future__ import annotations

import sys

import pytest

from tests.engines.environment import RECIPE, flaw


@pytest.fixture
def with_modules(tmp_path, monkeypatch):
    """Our own interpreter, with modules beside those that it has."""

    def make(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
        flaw.cache_clear()
        return flaw(sys.executable)

    yield make
    flaw.cache_clear()


def test_no_interpreter_is_answered_with_how_to_make_one():
    assert RECIPE in flaw("")
    assert "cannot be run" in flaw("/nowhere/python")


def test_an_environment_without_vllm(with_modules):
    assert with_modules().endswith("vLLM is not in that environment")


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_one_beside_it_that_cannot_be_loaded(with_modules, name):
    told = with_modules(**{name: "raise RuntimeError('operator torchvision::nms does not exist')"})
    assert f"pip uninstall {name}" in told
    assert "RuntimeError" in told
