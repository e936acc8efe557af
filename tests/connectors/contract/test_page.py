"""The page and the suite have the same rows."""

from __future__ import annotations

import re
from pathlib import Path

from tests.connectors.contract.cases import CASES, HANDOFFS

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "contract.md"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]*)\|([^|]*)\| `(\w+)` \|$", re.M)


def test_each_row_of_the_table_is_a_case_and_each_case_has_a_row():
    rows = ROW.findall(PAGE.read_text("utf-8"))
    named = [(state, deed) for state, _, _, deed in rows]
    assert named == [(case.state, case.deed) for case in (*CASES, *HANDOFFS)]
    assert all(never.strip() and given.strip() for _, never, given, _ in rows)
