"""What the wheel compiles can be compiled, and a node made of it can be written down."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOKS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
MODULES = [name.removeprefix("/") for name in HOOKS["wheel"]["hooks"]["mypyc"]["include"]]

NOT_COMPILED = {"Struct", "NamedTuple"}
WITHOUT_INSTANCES = {"Protocol", "Enum", "Exception", "ValueError"}
"""Bases of classes that a node keeps no plain instance of."""


def classes(name: str) -> list[ast.ClassDef]:
    tree = ast.parse((ROOT / name).read_text())
    return [one for one in tree.body if isinstance(one, ast.ClassDef)]


def bases(one: ast.ClassDef) -> set[str]:
    """By name alone: ``abc.Base[T]`` is ``Base``."""
    return {ast.unparse(base).split("[")[0].rsplit(".", 1)[-1] for base in one.bases}


@pytest.mark.parametrize("name", MODULES)
def test_a_compiled_module_has_no_class_whose_annotations_are_looked_up(name):
    wrong = [one.name for one in classes(name) if bases(one) & NOT_COMPILED]
    assert not wrong, f"{name}: {wrong} belong into a module that is not compiled"


@pytest.mark.parametrize("name", MODULES)
def test_a_class_of_a_compiled_module_may_be_made_empty(name):
    """As ``kvd.core.replay`` does; mypyc allows it where it allows interpreted subclasses."""
    wrong = [
        one.name
        for one in classes(name)
        if not bases(one) & WITHOUT_INSTANCES
        and not any(
            "allow_interpreted_subclasses=True" in ast.unparse(d) for d in one.decorator_list
        )
    ]
    assert not wrong, f"{name}: @mypyc_attr(allow_interpreted_subclasses=True) is missing: {wrong}"
