"""The tables of the handoff protocol: complete, connected, and loud about what they do not know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvd.core.handoff
from kvd.core.handoff.protocol import (
    DECODE,
    PREFILL,
    Decode,
    DecodeTrigger,
    IllegalTransition,
    Prefill,
    PrefillTrigger,
    decode_next,
    prefill_next,
)

ENDS = (Decode.CLOSED, Prefill.CLOSED, Prefill.FORGOTTEN)
EDGES: list[tuple[Decode | Prefill, Decode | Prefill]] = [
    *((here, after) for (here, _), after in DECODE.items()),
    *((here, after) for (here, _), after in PREFILL.items()),
]
STARTS = (Decode.QUEUED, Prefill.AWAIT_ENGINE, Prefill.AWAIT_OFFER)


NAMED_EDGE = re.compile(r"_?(?P<befores>[a-z_]+)_to_(?P<after>[a-z_]+)")


def named_edges() -> set[tuple[str, str]]:
    """From which state to which: of every method of the handoff room that is called so."""
    found = set()
    for path in Path(kvd.core.handoff.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match = isinstance(node, ast.FunctionDef) and NAMED_EDGE.fullmatch(node.name)
            if match:
                befores = match["befores"].split("_or_")
                found |= {(before, match["after"]) for before in befores}
    return found


def test_each_edge_to_another_state_has_a_method_of_its_name_and_no_other_method_has() -> None:
    wanted = {
        (here.value.replace("-", "_"), after.value.replace("-", "_"))
        for here, after in EDGES
        if here is not after
    }

    assert named_edges() == wanted


@pytest.mark.parametrize("state", [*Decode, *Prefill], ids=str)
def test_state_has_rows_unless_it_is_an_end(state: Decode | Prefill) -> None:
    leaves = {here for here, _ in (*DECODE, *PREFILL)}

    assert (state in leaves) == (state not in ENDS)


@pytest.mark.parametrize("trigger", [*DecodeTrigger, *PrefillTrigger], ids=str)
def test_trigger_appears_in_a_row(trigger: DecodeTrigger | PrefillTrigger) -> None:
    assert trigger in {fires for _, fires in (*DECODE, *PREFILL)}


def test_states_are_all_reachable_from_the_starts() -> None:
    reached: set[Decode | Prefill] = set(STARTS)

    for _ in EDGES:
        reached |= {after for here, after in EDGES if here in reached}

    assert reached == {*Decode, *Prefill}


def test_states_all_lead_to_an_end() -> None:
    ending: set[Decode | Prefill] = set(ENDS)

    for _ in EDGES:
        ending |= {here for here, after in EDGES if after in ending}

    assert ending == {*Decode, *Prefill}


def test_quarantine_ends_by_the_last_word_or_by_proof_only() -> None:
    closing = {
        trigger
        for (here, trigger), after in DECODE.items()
        if here is Decode.DRAINING and after is Decode.CLOSED
    }

    assert closing == {
        DecodeTrigger.DELIVERED,
        DecodeTrigger.SETTLED,
        DecodeTrigger.WRITER_GONE,
        DecodeTrigger.FENCED,
    }


@pytest.mark.parametrize("state", Decode, ids=str)
def test_decode_next_raises_with_both_names_where_there_is_no_row(state: Decode) -> None:
    for trigger in DecodeTrigger:
        if (state, trigger) not in DECODE:
            with pytest.raises(IllegalTransition) as raised:
                decode_next(state, trigger)
            assert str(raised.value) == (
                f"decode side: no row for {trigger.value} in {state.value}"
            )
        else:
            assert decode_next(state, trigger) is DECODE[state, trigger]


@pytest.mark.parametrize("state", Prefill, ids=str)
def test_prefill_next_raises_with_both_names_where_there_is_no_row(state: Prefill) -> None:
    for trigger in PrefillTrigger:
        if (state, trigger) not in PREFILL:
            with pytest.raises(IllegalTransition) as raised:
                prefill_next(state, trigger)
            assert str(raised.value) == (
                f"prefill side: no row for {trigger.value} in {state.value}"
            )
        else:
            assert prefill_next(state, trigger) is PREFILL[state, trigger]
