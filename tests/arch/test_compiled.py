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
DECORATORS = {"property", "staticmethod", "classmethod", "override", "abc.abstractmethod"}
"""What mypyc makes of a method as Python does, setters of properties aside."""


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


def test_a_class_of_the_core_is_compiled_where_what_it_is_based_on_is():
    """Else neither of the two ways to make one empty is right for it."""
    compiled = {one.name for name in MODULES for one in classes(name)}
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "kvd/core").rglob("*.py")]
    wrong = [
        f"{name}: {one.name}"
        for name in modules
        if name not in MODULES
        for one in classes(name)
        if bases(one) & compiled and not bases(one) & WITHOUT_INSTANCES
    ]
    assert not wrong, f"add these to what pyproject.toml has compiled: {wrong}"


@pytest.mark.parametrize("name", MODULES)
def test_a_method_of_a_compiled_module_has_no_decorator_that_the_compiler_drops(name):
    """``functools.cached_property`` becomes a property there that keeps nothing: what is counted
    once for a look is then counted for each thing that the look meets, and nothing says so.
    """
    wrong = [
        f"{one.name}.{method.name}: @{ast.unparse(decorator)}"
        for one in classes(name)
        for method in one.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in method.decorator_list
        if ast.unparse(decorator) not in {*DECORATORS, f"{method.name}.setter"}
    ]
    assert not wrong, f"{name}: keep it by hand: {wrong}"


@pytest.mark.parametrize("name", MODULES)
def test_a_class_of_a_compiled_module_shares_nothing_that_changes(name):
    """What its body makes is made once in Python, and for each instance where it is compiled."""
    shared = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)
    wrong = [
        f"{one.name}: {ast.unparse(line)}"
        for one in classes(name)
        if not bases(one) & WITHOUT_INSTANCES
        for line in one.body
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, shared)
    ]
    assert not wrong, f"{name}: make it in __init__: {wrong}"
