"""Sizes, and the constructs that this code base does without. Each message says why."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

FUNCTION_LINES = 60

CATCH_ALLS = {
    "kvd/client/mover/mover.py": "who waits for an order hears of a bug in the thread that has it",
    "kvd/connectors/lmcache/tasks.py": "a mistake is logged, and its task has failed",
    "kvd/connectors/vllm/beside.py": "raised again where the outcome of the work is taken",
    "kvd/connectors/vllm/scheduler.py": "a mistake is logged; it must not end the engine's step",
    "kvd/connectors/vllm/worker.py": "as in the scheduler's half: the request is computed",
    "kvd/daemon/reactor.py": "a bug of the core costs the request that met it, not the whole node",
    "kvd/sim/runner.py": "whatever the core raises is a finding, reported with its seed",
    "kvd/recorder/player.py": "a step that raised in the daemon raises here, and costs the same",
}
"""Files that may catch everything, with the reason; elsewhere catch what you can name."""

SLEEPERS = {
    "kvd/client/returning.py": "a thread of its own for a node that is closed: nobody waits for it",
    "kvd/connectors/vllm/resets.py": "a reset waits a moment for its answer, in no step",
    "kvd/connectors/vllm/sessions.py": "a step waits less than epoll can count: a millisecond",
    "kvd/daemon/lock.py": "runs before the loop does, and flock knows no time limit",
    "kvd/pools/file_memory.py": "runs before anybody is served, and flock knows no time limit",
    "kvd/storage/lane.py": "a thread that nobody waits for, which keeps to the rate of its tier",
    "kvd/storage/nixl_objects.py": "a thread that nobody waits for; NIXL tells only who asks",
    "kvd/storage/nixl_files.py": "a thread that nobody waits for; NIXL tells only who asks",
    "kvd/storage/posix.py": "before anybody is served, and flock knows no time limit",
    "kvd/transfer/device_streams.py": "threads of their own, for a device that only tells",
    "kvd/transfer/mapping.py": "the collapser is a thread of its own that gives way to transfers",
}
"""Other files that may sleep, with the reason."""

OUTSIDE = ("kvd/harness/", "kvd/bench/", "kvd/demo/", "benchmarks/")
"""They look at daemons from outside, where some things are only seen by looking again."""

PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal"}
PICKLING_CALLS = {"send_pyobj", "recv_pyobj"}
VAGUE_CLASS = re.compile(r"(Manager|Mixin|Helper|Utils?|Base)$")
VAGUE_FILE = re.compile(r"(^|/)(utils?|helpers?|managers?|misc|common)\.py$")
FOREIGN_PATHS = ("/" + "work/", "/tmp" + "/lab")


def test_functions_fit_on_a_screen(sources):
    wrong = [
        f"{source.at(node)} {node.name} has {lines} lines, at most {FUNCTION_LINES}: name its parts"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES
    ]
    assert not wrong, "\n".join(wrong)


def test_no_attribute_is_guessed(sources):
    wrong = [
        f"{source.at(node)} {ast.unparse(node)[:60]}: a typo becomes a default; declare the field "
        "in a struct and read it"
        for source in sources
        for node in _calls(source.tree)
        if _is_called(node, "hasattr") or (_is_called(node, "getattr") and len(node.args) > 2)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_what_can_be_named_is_caught(sources):
    wrong = [
        f"{source.at(node)} catches everything: a bug becomes a warning; name the exceptions, "
        "re-raise as the last statement, or give the file a reason in CATCH_ALLS"
        for source in sources
        if source.name not in CATCH_ALLS
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and _takes_all(node) and not _raises_again(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_lists_of_exceptions_hold_no_dead_rows(sources):
    names = {source.name for source in sources}
    dead = (set(CATCH_ALLS) | set(SLEEPERS)) - names
    assert not dead, f"these files are gone, take them off the lists: {sorted(dead)}"


def test_nothing_is_pickled(sources):
    wrong = [
        f"{source.name}:{one.line} imports {one.module}: reading a pickle runs what it says; "
        "use a msgspec struct"
        for source in sources
        for one in source.imports
        if one.module.partition(".")[0] in PICKLES
    ]
    wrong += [
        f"{source.at(node)} {node.func.attr}: pickles; send a msgspec struct"
        for source in sources
        for node in _calls(source.tree)
        if isinstance(node.func, ast.Attribute) and node.func.attr in PICKLING_CALLS
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_sleeps_where_an_event_exists(sources):
    wrong = [
        f"{source.at(node)} sleeps: the loop stops for that long; wait for the event itself"
        for source in sources
        if not source.name.startswith(OUTSIDE) and source.name not in SLEEPERS
        for node in _calls(source.tree)
        if ast.unparse(node.func) in {"time.sleep", "sleep"}
    ]
    assert not wrong, "\n".join(wrong)


def test_names_say_what_a_thing_is(sources):
    wrong = [
        f"{source} is named after nothing in particular: name it after its noun"
        for source in sources
        if VAGUE_FILE.search(source.name)
    ]
    wrong += [
        f"{source.at(node)} class {node.name}: name it after the noun it keeps the invariant of"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and VAGUE_CLASS.search(node.name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_dictionary_of_anything(sources):
    wrong = [
        f"{source.at(node)} {ast.unparse(node)}: a struct says which keys there are"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node) == "dict[str, Any]"
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_says_what_lives_there(sources):
    wrong = [
        f"{source} has no docstring: say what lives here, and what must not"
        for source in sources
        if not ast.get_docstring(source.tree)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_names_a_place_of_one_machine(root):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else _walk(root)
    wrong = []
    for name in names:
        if not (root / name).is_file():
            continue
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        wrong += [
            f"{name}:{number} names {path}: nothing here may need a place of one machine"
            for number, line in enumerate(text.splitlines(), start=1)
            for path in FOREIGN_PATHS
            if path in line
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (test_functions_fit_on_a_screen, "def f():" + "\n    x = 1" * FUNCTION_LINES),
        (test_no_attribute_is_guessed, "hasattr(a, 'b')"),
        (test_no_attribute_is_guessed, "getattr(a, 'b', None)"),
        (test_only_what_can_be_named_is_caught, "try: f()\nexcept Exception: g()"),
        (test_only_what_can_be_named_is_caught, "try: f()\nexcept (OSError, Exception): g()"),
        (test_only_what_can_be_named_is_caught, "try: f()\nexcept: g()"),
        (test_nothing_is_pickled, "def f():\n    from pickle import loads"),
        (test_nothing_is_pickled, "socket.send_pyobj(1)"),
        (test_nothing_sleeps_where_an_event_exists, "import time\ntime.sleep(1)"),
        (test_names_say_what_a_thing_is, "class LeaseManager: pass"),
        (test_no_dictionary_of_anything, "def f(a: dict[str, Any]): pass"),
        (test_every_file_says_what_lives_there, "x = 1"),
    ],
)
def test_rules_bite(planted, rule, text):
    with pytest.raises(AssertionError, match=r"kvd/core/planted\.py"):
        rule(planted("kvd/core/planted.py", text))


def test_a_catch_all_that_raises_again_is_no_catch_all(planted):
    text = "try: f()\nexcept BaseException:\n    g()\n    raise"
    test_only_what_can_be_named_is_caught(planted("kvd/core/planted.py", text))


def _walk(root):
    """The files of a tree that is no checkout."""
    return [
        str(path.relative_to(root))
        for top in ("kvd", "tui", "benchmarks", "tests")
        for path in (root / top).rglob("*.py")
    ]


def _calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _is_called(node, name):
    return isinstance(node.func, ast.Name) and node.func.id == name


def _takes_all(node):
    if node.type is None:
        return True
    named = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(
        isinstance(one, ast.Name) and one.id in {"Exception", "BaseException"} for one in named
    )


def _raises_again(node):
    last = node.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None
