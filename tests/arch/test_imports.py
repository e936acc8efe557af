"""Dependencies point one way, and heavy or impure modules stay where they belong.

    types, errors <- wire <- core <- {config, pools, transfer, observe, console} <- daemon <- cli
    types, errors <- wire <- client <- tui

Imports for type checkers count: a layer that must name another's types depends on it.
"""

from __future__ import annotations

import re
import sys

import pytest

from kvd.parts import CLIENT, EXTRAS

BOTTOM = {"kvd.types", "kvd.errors"}
WIRE = BOTTOM | {"kvd.wire"}
CORE = WIRE | {"kvd.core"}
MIDDLE = CORE | {"kvd.sockets", "kvd.places", "kvd.curve"}
ENGINE_SIDE = WIRE | {"kvd.sockets", "kvd.places", "kvd.zmtp", "kvd.client"}
NODE = MIDDLE | {
    *("kvd.config", "kvd.pools", "kvd.device", "kvd.transfer", "kvd.observe", "kvd.recorder"),
    "kvd.storage",
    *("kvd.console", "kvd.families", "kvd.journal", "kvd.zmtp"),
}
WHOLE = NODE | {"kvd.daemon", "kvd.client", "kvd.text", "kvd.filters", "kvd.parts"}

MAY_IMPORT = {
    "kvd.types": set(),
    "kvd.errors": set(),
    "kvd.parts": set(),
    "kvd.places": set(),
    "kvd.sockets": BOTTOM,
    "kvd.curve": BOTTOM,
    "kvd.zmtp": BOTTOM | {"kvd.zmtp"},
    "kvd.text": WIRE,
    "kvd.filters": WIRE,
    "kvd.trace": BOTTOM,
    "kvd.wire": WIRE,
    "kvd.core": CORE,
    "kvd.families": CORE | {"kvd.families"},
    "kvd.config": MIDDLE | {"kvd.families", "kvd.config"},
    "kvd.pools": MIDDLE | {"kvd.pools"},
    "kvd.device": MIDDLE | {"kvd.pools", "kvd.device"},
    "kvd.transfer": MIDDLE | {"kvd.device", "kvd.transfer"},
    "kvd.storage": MIDDLE | {"kvd.transfer", "kvd.storage"},
    "kvd.observe": MIDDLE | {"kvd.observe"},
    "kvd.recorder": CORE | {"kvd.recorder"},
    "kvd.console": CORE | {"kvd.filters", "kvd.text", "kvd.console"},
    "kvd.journal": CORE | {"kvd.journal"},
    "kvd.daemon": NODE | {"kvd.daemon"},
    "kvd.client": ENGINE_SIDE,
    "kvd.connectors": ENGINE_SIDE | {"kvd.connectors"},
    "kvd.proxy": ENGINE_SIDE | {"kvd.proxy"},
    "kvd.cli": WHOLE | {"kvd.trace", "kvd.sim", "kvd.proxy", "kvd.cli"},
    "kvd.harness": ENGINE_SIDE | {"kvd.curve", "kvd.harness"},
    "kvd.demo": WHOLE | {"kvd.cli", "kvd.harness", "kvd.connectors", "kvd.demo"},
    "kvd.bench": WHOLE | {"kvd.trace", "kvd.cli", "kvd.harness", "kvd.bench"},
    "benchmarks": WHOLE
    | {"kvd.trace", "kvd.cli", "kvd.harness", "kvd.demo", "kvd.bench", "benchmarks"}
    | {"kvd.connectors"},
    "kvd.sim": CORE | {"kvd.trace", "kvd.sim"},
    "kvd.__main__": {"kvd.cli", "kvd.parts"},
    "kvd": set(),
    "tui": ENGINE_SIDE | {"kvd.text", "kvd.filters", "kvd.parts", "tui"},
}
"""What each package may import of the project."""

EXCEPTIONS = {
    (
        "kvd/client/device_mapping.py",
        "kvd.device",
    ): "opens memory of a device, where a pool has any",
    (
        "kvd/client/mover/device_lane.py",
        "kvd.device",
    ): "copies by the copy engine, where an engine's blocks lie on a device",
    ("tui/cli.py", "kvd.config"): "finds the daemon where its own configuration puts it",
}
"""(file, module) that the table would forbid, and why it is right all the same."""

NOT_IN_THE_CORE = {
    "asyncio": "a core function returns effects; the shell awaits",
    "datetime": "every input carries its time",
    "logging": "what deserves a line is an event",
    "nixl": "the core knows page ids, never memory",
    "random": "a recorded input log must replay to the same state",
    "secrets": "a recorded input log must replay to the same state",
    "socket": "the shell does the input and output",
    "structlog": "what deserves a line is an event",
    "subprocess": "the shell does the input and output",
    "threading": "one mutator, no locks",
    "time": "every input carries its time",
    "torch": "the core knows page ids, never memory",
    "uuid": "a recorded input log must replay to the same state",
    "zmq": "the shell does the input and output",
}

HOMES = {
    "torch": (
        *("kvd/pools/", "kvd/device/", "kvd/demo/", "kvd/connectors/transformers/", "benchmarks/"),
        *("kvd/client/mapping.py", "kvd/client/device_mapping.py"),
        *("kvd/connectors/sglang/host_pages.py", "kvd/connectors/sglang/linker.py"),
    ),
    "transformers": ("kvd/demo/", "kvd/connectors/transformers/", "benchmarks/transformers.py"),
    "flash_attn": ("kvd/device/attention.py",),
    "nixl": ("kvd/transfer/nixl.py",),
    "nixl_cu12": ("kvd/transfer/nixl.py",),
    "nixl_cu13": ("kvd/transfer/nixl.py",),
    "textual": ("tui/",),
    "click": ("kvd/cli/", "kvd/demo/", "kvd/bench/", "benchmarks/", "tui/"),
    "rich": ("kvd/cli/", "kvd/demo/", "kvd/bench/", "benchmarks/", "tui/"),
    "structlog": ("kvd/observe/",),
    "prometheus_client": (
        *("kvd/observe/", "kvd/proxy/metrics.py"),
        "kvd/connectors/vllm/stats.py",
    ),
    "vllm": (
        *(f"kvd/connectors/vllm/{name}.py" for name in ("connector", "stats", "versions")),
        "benchmarks/peer_calls.py",
    ),
    "sglang": (
        "kvd/connectors/sglang/backend.py",
        "kvd/connectors/sglang/linker.py",
        "kvd/connectors/sglang/disaggregation.py",
        "kvd/connectors/sglang/__init__.py",
    ),
    "lmcache": (
        "kvd/connectors/lmcache/adapter.py",
        "benchmarks/lmcache_calls.py",
        "benchmarks/peer_calls.py",
    ),
    "aiohttp": ("kvd/proxy/",),
    "h11": ("kvd/observe/",),
    "nacl": ("kvd/zmtp/", "kvd/curve.py"),
}
"""The only places where a module may be imported, other than for type checkers."""

LAZY_TORCH = ("kvd/client/mapping.py", "kvd/client/device_mapping.py")

OURS = {"kvd", "tui", "benchmarks"}

HOSTS = {"vllm", "sglang", "lmcache"}
"""Engines that load a connector of ours: nobody installs them for kvd."""

OPTIONAL = ("flash_attn",)
"""Packages that need not be installed: imported inside the function that needs them."""


def package_of(module: str) -> str:
    """The package that the table has a row for."""
    parts = module.split(".")
    if parts[0] in {"tui", "benchmarks"} or len(parts) == 1:
        return parts[0]
    return ".".join(parts[:2])


def is_excepted(name: str, module: str) -> bool:
    """Whether the file may import this module although the table forbids it."""
    return any(
        name == file and f"{module}.".startswith(f"{allowed}.") for file, allowed in EXCEPTIONS
    )


def test_packages_import_only_what_lies_below_them(sources):
    known = {package_of(source.module) for source in sources}
    wrong = []
    for source in sources:
        mine = package_of(source.module)
        for one in source.imports:
            theirs = package_of(one.module)
            if theirs not in known or theirs in MAY_IMPORT[mine] or theirs == "kvd":
                continue
            if not is_excepted(source.name, one.module):
                wrong.append(
                    f"{source.name}:{one.line} imports {one.module}: {mine} may know "
                    f"{', '.join(sorted(MAY_IMPORT[mine])) or 'nothing'}; pass the value in, or "
                    "move what both need to a lower layer"
                )
    assert not wrong, "\n".join(wrong)


def test_every_package_has_a_row_in_the_table(sources):
    missing = {package_of(source.module) for source in sources} - set(MAY_IMPORT)
    assert not missing, f"say in MAY_IMPORT what these may import: {sorted(missing)}"


MEASURES = re.compile(r"^\s*(from|import) (kvd\.bench|benchmarks)\b", re.MULTILINE)


def test_no_test_borrows_from_a_benchmark(root):
    """What several tests need is in ``tests/support``, so that a benchmark can be changed.

    ``tests/gpu`` measures itself, and writes the files that benchmarks do.
    """
    wrong = [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("*.py"))
        if path.parent.name not in {"bench", "gpu"} and MEASURES.search(path.read_text("utf-8"))
    ]
    assert not wrong, f"import from tests/support, not from a benchmark: {wrong}"


@pytest.mark.parametrize("place", ["kvd/core/", "kvd/wire/", "kvd/types.py", "kvd/errors.py"])
def test_the_core_is_pure(sources, place):
    wrong = [
        f"{source.name}:{one.line} imports {one.module}: "
        f"{NOT_IN_THE_CORE[one.module.partition('.')[0]]}"
        for source in sources
        if source.name.startswith(place)
        for one in source.imports
        if one.module.partition(".")[0] in NOT_IN_THE_CORE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", ["tui/model/", "tui/draw/"])
def test_what_a_console_knows_and_draws_is_pure(sources, place):
    """Time comes in, and lines go out: so a recording shows what was seen, in a test too."""
    forbidden = {*NOT_IN_THE_CORE, "textual", "click"}
    wrong = [
        f"{source.name}:{one.line} imports {one.module}: the console's shell does that"
        for source in sources
        if source.name.startswith(place)
        for one in source.imports
        if one.module.partition(".")[0] in forbidden
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", sorted(HOMES))
def test_a_heavy_module_is_imported_at_home_only(sources, module):
    wrong = [
        f"{source.name}:{one.line} imports {one.module}: only {', '.join(HOMES[module])} may; "
        "whoever imports this file would load it too"
        for source in sources
        if not source.name.startswith(HOMES[module])
        for one in source.imports
        if one.module.partition(".")[0] == module and one.when != "types"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_client_loads_torch_only_when_memory_is_mapped(sources):
    wrong = [
        f"{source.name}:{one.line} imports {one.module} when it is itself imported: engines need "
        "torch only to map memory; import it inside the function that makes a view"
        for source in sources
        if source.name in LAZY_TORCH
        for one in source.imports
        if one.module.partition(".")[0] == "torch" and one.when == "import"
    ]
    assert not wrong, "\n".join(wrong)


def test_what_need_not_be_installed_is_imported_when_it_is_called(sources):
    wrong = [
        f"{source.name}:{one.line} imports {one.module} when it is itself imported, which fails "
        "wherever that is not installed: import it inside the function that needs it"
        for source in sources
        for one in source.imports
        if one.module.partition(".")[0] in OPTIONAL and one.when != "call"
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_imported_is_of_the_client_or_of_an_extra(sources):
    """A package that no extra has would be there by chance: another one may bring it today."""
    known = {*OURS, *HOSTS, *sys.stdlib_module_names}
    for packages in (CLIENT, *EXTRAS.values()):
        known.update(*packages.values())
    wrong = [
        f"{source.name}:{one.line} imports {one.module}: name its package in pyproject.toml and in "
        "kvd.parts"
        for source in sources
        for one in source.imports
        if one.when != "types" and one.module.partition(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_a_package_that_no_extra_has_is_found(planted):
    with pytest.raises(AssertionError, match="name its package in pyproject"):
        test_what_is_imported_is_of_the_client_or_of_an_extra(
            planted("kvd/daemon/planted.py", "def f():\n    import requests")
        )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kvd/core/planted.py", "import kvd.daemon"),
        ("kvd/client/planted.py", "def f():\n    from kvd.core.cache.pages import PagePool"),
        ("kvd/wire/planted.py", "from kvd import core"),
    ],
)
def test_an_upward_import_is_found(sources, planted, name, text):
    with pytest.raises(AssertionError, match=f"{name}:[12] imports"):
        test_packages_import_only_what_lies_below_them([*sources, *planted(name, text)])


def test_an_optional_package_at_the_top_of_a_file_is_found(planted):
    with pytest.raises(AssertionError, match="fails wherever that is not installed"):
        test_what_need_not_be_installed_is_imported_when_it_is_called(
            planted("kvd/device/attention.py", "from flash_attn import flash_attn_varlen_func")
        )


@pytest.mark.parametrize("text", ["import time", "from time import monotonic"])
def test_a_clock_in_the_core_is_found(planted, text):
    with pytest.raises(AssertionError, match="every input carries its time"):
        test_the_core_is_pure(planted("kvd/core/planted.py", text), "kvd/core/")


@pytest.mark.parametrize(
    "text", ["import time", "from textual.app import App", "import zmq.asyncio"]
)
def test_a_clock_or_a_screen_in_the_consoles_model_is_found(planted, text):
    with pytest.raises(AssertionError, match=r"planted\.py:1 imports"):
        test_what_a_console_knows_and_draws_is_pure(
            planted("tui/model/planted.py", text), "tui/model/"
        )
