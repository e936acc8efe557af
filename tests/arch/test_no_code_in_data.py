"""Nothing that comes from outside can become code: no call that would make it so exists here."""

from __future__ import annotations

import ast

import pytest

RUNS_DATA = {
    "eval": "runs its argument",
    "exec": "runs its argument",
    "compile": "makes code of its argument",
    "__import__": "imports what its argument names",
}
"""Builtins, by their bare name."""

READS_CODE = {
    "yaml.load": "makes any object that the text names; use tomllib or msgspec",
    "yaml.unsafe_load": "makes any object that the text names; use tomllib or msgspec",
    "torch.load": "unpickles; carry tensors as bytes",
    "torch.package": "unpickles; carry tensors as bytes",
    "numpy.load": "may unpickle; use numpy.frombuffer",
    "np.load": "may unpickle; use numpy.frombuffer",
    "joblib.load": "unpickles",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "jsonpickle.decode": "unpickles",
}
"""Functions, by the name they are called by."""


def test_nothing_runs_or_unpickles_what_it_reads(sources):
    wrong = [
        f"{source.at(node)} {name}: {reason}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        for name in [ast.unparse(node.func)]
        for reason in [RUNS_DATA.get(name) or READS_CODE.get(name)]
        if reason
    ]
    assert not wrong, "\n".join(wrong)


def test_no_process_is_started_by_a_shell(sources):
    wrong = [
        f"{source.at(node)} shell=True: pass the words of the command as a list"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.keyword) and node.arg == "shell"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (test_nothing_runs_or_unpickles_what_it_reads, "eval(x)"),
        (test_nothing_runs_or_unpickles_what_it_reads, "def f():\n    exec(frame)"),
        (test_nothing_runs_or_unpickles_what_it_reads, "yaml.load(text)"),
        (test_nothing_runs_or_unpickles_what_it_reads, "torch.load(file)"),
        (test_no_process_is_started_by_a_shell, "subprocess.run(text, shell=True)"),
    ],
)
def test_rules_bite(planted, rule, text):
    with pytest.raises(AssertionError, match=r"kvd/core/planted\.py"):
        rule(planted("kvd/core/planted.py", text))


def test_a_regular_expression_may_be_compiled(planted):
    text = "import re\nPATTERN = re.compile('a')"
    test_nothing_runs_or_unpickles_what_it_reads(planted("kvd/core/planted.py", text))
