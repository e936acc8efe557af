"""One noun a room: names that occur once, files that live where they are used, arrows one way.

    layout <- effects, outbox, inputs <- cache <- settings <- components <- leases <- tiers
           <- peers <- handoff <- inspect <- audit <- node_parts <- engines, operators, rest <- node
           <- replay

That is ``kvd/core``; imports for type checkers count, so that a function below the node cannot take
the whole of it.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

import pytest

ROOMS = (
    ("layout",),
    ("effects", "outbox", "inputs"),
    ("cache",),
    ("settings",),
    ("components",),
    ("leases",),
    ("kv_events",),
    ("tiers",),
    ("peers",),
    ("handoff",),
    ("inspect",),
    ("audit",),
    ("recorded", "node_parts"),
    ("engines", "operators", "rest"),
    ("node",),
    ("replay",),
)
"""The rooms of the core, lowest first: each may import those before it, and its own row."""

RANKS = {room: rank for rank, row in enumerate(ROOMS) for room in row}

SMALL_LINES = 80
SMALL_FILES: dict[str, str] = {
    "kvd/recorder/shadow_node.py": "it loads the core, its importer only when it has to",
}
"""Files under ``SMALL_LINES`` that one other file imports, and why they are files all the same."""

MOST_BY_POSITION = 3


def room_of(module: str) -> str | None:
    """The room of the core that a module lives in; None for any other module."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["kvd", "core"] and len(parts) > 2 else None


def test_arrows_between_the_rooms_of_the_core_go_one_way(sources):
    wrong = []
    for source in sources:
        mine = room_of(source.module)
        if mine is None:
            continue
        for one in source.imports:
            theirs = room_of(one.module)
            if theirs in RANKS and RANKS[theirs] > RANKS[mine]:
                wrong.append(
                    f"{source.name}:{one.line} imports {one.module}: {mine} lies below {theirs}; "
                    "take the part that is read, or move what both need to the lower room"
                )
    assert not wrong, "\n".join(wrong)


def test_every_room_of_the_core_has_a_place_in_the_table(sources):
    rooms = {room_of(source.module) for source in sources} - {None}
    assert rooms == set(RANKS), f"say in ROOMS where these lie: {rooms ^ set(RANKS)}"


def test_a_room_of_the_core_says_what_lives_there(sources):
    wrong = [
        f"{source.name}: its docstring is the map of the room: what lives here, what must not, "
        "which names to read first"
        for source in sources
        if source.name.endswith("__init__.py")
        and source.name.startswith("kvd/core/")
        and len((ast.get_docstring(source.tree) or "").splitlines()) < 5
    ]
    assert not wrong, "\n".join(wrong)


def test_a_class_name_occurs_once(sources):
    """A grep or a walk through the code stops at a name that means two things."""
    places = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(source.at(node))
    wrong = [f"class {name} in {', '.join(at)}" for name, at in places.items() if len(at) > 1]
    assert not wrong, "name each after its own noun:\n" + "\n".join(wrong)


def test_a_small_file_that_one_other_imports_goes_home(sources):
    importers = defaultdict(set)
    for source in sources:
        for one in source.imports:
            importers[one.module].add(source.name)
            importers[one.module.rpartition(".")[0]].add(source.name)
    lone = {
        source.name: next(iter(importers[source.module]))
        for source in sources
        if not source.name.endswith(("__init__.py", "__main__.py"))
        and source.text.count("\n") < SMALL_LINES
        and len(importers[source.module]) == 1
    }
    wrong = [f"{name}: only {by} imports it, write it there" for name, by in lone.items()]
    assert set(lone) == set(SMALL_FILES), "\n".join(wrong) or f"dead rows: {SMALL_FILES}"


FOR_EVERY_REQUEST = {
    "kvd/core/cache/radix.py": {"Extension"},
    "kvd/core/components/component_pages.py": {"Evicted"},
    "kvd/core/engines/lease_verbs.py": {"Claim", "Leased"},
    "kvd/core/handoff/transitions.py": {"HandoffEnded", "Moved"},
    "kvd/core/leases/lease_events.py": {"LeaseOpened", "LeaseCommitted", "LeaseReleased"},
}
"""Made once in these files, by position: by keyword each takes 0.2 to 0.5 us more. That the fields
are in order is held by the digests of the simulator, which see every effect and event."""


def test_structs_of_many_fields_are_made_by_keyword(sources):
    """A swap of two numbers is invisible to a type checker, and to who reads the call."""
    structs = _structs(sources)
    wrong = []
    quick = Counter()
    for source in sources:
        known = {one.module.rpartition(".")[2]: one.module for one in source.imports}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and len(node.args) > MOST_BY_POSITION:
                module, name = _maker(node.func, known, source.module)
                if name in FOR_EVERY_REQUEST.get(source.name, ()):
                    quick[source.name, name] += 1
                elif (module, name) in structs:
                    wrong.append(f"{source.at(node)} makes {name} of {len(node.args)} by position")
    assert not wrong, "name the fields:\n" + "\n".join(wrong)
    allowed = [(file, name) for file, names in FOR_EVERY_REQUEST.items() for name in names]
    assert quick == Counter(allowed), "each in one place"


def _structs(sources) -> set[tuple[str, str]]:
    """Module and name of every struct, those that go on from another one too."""
    bases = {
        (source.module, node.name): {ast.unparse(base) for base in node.bases}
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    names = {"msgspec.Struct"}
    found: set[tuple[str, str]] = set()
    while more := {one for one, of in bases.items() if of & names} - found:
        found |= more
        names |= {name for _, name in more}
    return found


def _maker(func: ast.expr, known: dict[str, str], module: str) -> tuple[str, str]:
    """Module and name of what is called, where the file's imports say it."""
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
        return known.get(func.value.id, ""), func.attr
    if not isinstance(func, ast.Name):
        return "", ""
    return known.get(func.id, f"{module}.{func.id}").rpartition(".")[0], func.id


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (
            test_arrows_between_the_rooms_of_the_core_go_one_way,
            "kvd/core/cache/planted.py",
            "if TYPE_CHECKING:\n    from kvd.core.node import Node",
        ),
        (
            test_arrows_between_the_rooms_of_the_core_go_one_way,
            "kvd/core/inspect/planted.py",
            "def f():\n    from kvd.core.audit import rules",
        ),
        (
            test_every_room_of_the_core_has_a_place_in_the_table,
            "kvd/core/planted/planted.py",
            "x = 1",
        ),
        (
            test_a_room_of_the_core_says_what_lives_there,
            "kvd/core/cache/__init__.py",
            '"""cache."""',
        ),
        (test_a_class_name_occurs_once, "kvd/planted.py", "class Lease: pass"),
        (
            test_structs_of_many_fields_are_made_by_keyword,
            "kvd/planted.py",
            "from kvd.wire import peer\npeer.Abort('a', 'b', 3, 4, 'why')",
        ),
    ],
)
def test_a_broken_rule_is_found(sources, planted, rule, name, text):
    others = [source for source in sources if source.name != name]
    with pytest.raises(AssertionError, match=r"planted|kvd/core/cache/__init__"):
        rule([*others, *planted(name, text)])


def test_a_small_file_of_one_importer_is_found(sources, planted):
    more = [*planted("kvd/small.py", "x = 1"), *planted("kvd/big.py", "from kvd.small import x")]
    with pytest.raises(AssertionError, match=r"kvd/small\.py: only kvd/big\.py imports it"):
        test_a_small_file_that_one_other_imports_goes_home([*sources, *more])
