"""No circles of imports, those for type checkers counted: a file can be read without its readers.

A circle ends where the type that closes it moves to a place of its own, or where the lower file
says in a Protocol what it asks of the other.
"""

from __future__ import annotations

import pytest

CIRCLES = {
    "kvd.bench.raw_nixl, kvd.bench.stream": "one measures with the figures of the other",
    "kvd.daemon.app, kvd.daemon.reload": "a reload changes the running daemon in eight places",
    "kvd.sim.copying, kvd.sim.engine, kvd.sim.faults, kvd.sim.host, kvd.sim.network, "
    "kvd.sim.receiving, kvd.sim.sending, kvd.sim.storage, kvd.sim.transfer_process, "
    "kvd.sim.worker, "
    "kvd.sim.world": "who lives in a world knows it",
    "tui.actions, tui.app, tui.screens, tui.screens.engines, tui.screens.events, "
    "tui.screens.handoffs, tui.screens.overview, tui.screens.page, tui.screens.peers, "
    "tui.screens.pools, tui.screens.radix, tui.widgets.canvas, tui.widgets.card, "
    "tui.widgets.commandbar, tui.widgets.dialogs, tui.widgets.head, tui.widgets.page_map, "
    "tui.widgets.pools, tui.widgets.problems, "
    "tui.widgets.table": "each widget knows the application that it is of",
    "tui.model.event_log, tui.model.mirror, tui.model.snapshots": "the mirror keeps logs of itself",
}
"""Modules that import each other, and why. This list only gets shorter."""


def test_no_modules_import_each_other_in_a_circle(sources):
    found = {", ".join(circle) for circle in circles(arrows(sources))}
    new, ended = sorted(found - set(CIRCLES)), sorted(set(CIRCLES) - found)
    assert not new, (
        f"these import each other, if only for type checkers: {new}; move the type that both need, "
        "or say in a Protocol what the lower one asks of the other"
    )
    assert not ended, f"take these off the list, they are no circles any more: {ended}"


def arrows(sources) -> dict[str, set[str]]:
    """By module, those that it imports."""
    known = {source.module for source in sources}
    found = {}
    for source in sources:
        named = [one.module for one in source.imports]
        found[source.module] = {
            module if module in known else module.rpartition(".")[0] for module in named
        } & (known - {source.module})
    return found


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules of which each leads to all others, sorted."""
    reached = {module: _reached(module, arrows) for module in arrows}
    found = {
        tuple(sorted(other for other in there if module in reached[other]))
        for module, there in reached.items()
        if module in there
    }
    return [list(circle) for circle in sorted(found)]


def _reached(module: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    line = [module]
    while line:
        for other in arrows[line.pop()] - found:
            found.add(other)
            line.append(other)
    return found


def test_a_circle_is_found(sources, planted):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvd.core.node import {}"
    more = [*planted("kvd/core/planted.py", text.format("NodeState"))]
    others = [source for source in sources if source.name != "kvd/core/engines/engines.py"]
    more += planted("kvd/core/engines/engines.py", "from kvd.core.planted import x")
    with pytest.raises(
        AssertionError, match=r"kvd\.core\.engines\.engines, kvd\.core\.node, .*planted"
    ):
        test_no_modules_import_each_other_in_a_circle([*others, *more])


def test_a_circle_that_has_ended_is_taken_off_the_list(sources):
    without = [source for source in sources if source.name != "kvd/bench/stream.py"]
    with pytest.raises(AssertionError, match=r"take these off the list.*raw_nixl"):
        test_no_modules_import_each_other_in_a_circle(without)
