"""Each test that failed in the suite once more, alone: ``python -m tests.support.second_look``.

The suite runs two files at a time, beside whatever else the host does. A test that waits for real
processes can miss its time for that alone. If it passes here it is named as unsteady: a fault of
the test, to be mended. A test that waits for nobody gets no second look, and neither does a run
with more failures than a busy host explains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
WAITS_FOR_PROCESSES = frozenset(
    {"bench", "cli", "client", "connectors", "console", "cuda", "daemon", "demo", "engines"}
    | {"examples", "fault", "integration", "proxy", "recorder", "security", "storage", "systemd"}
    | {"transfer", "tui", "zmtp"}
)
"""Rooms of tests that start daemons, engines or terminals."""
MOST = 3
"""More than this is not the host."""


def without_a_second_look(failed: Iterable[str]) -> list[str]:
    """Those that count as they are."""
    failed = sorted(failed)
    steady = [one for one in failed if Path(one).parts[1] not in WAITS_FOR_PROCESSES]
    return steady or (failed if len(failed) > MOST else [])


def passes_alone(test: str) -> bool:
    """Whether it passes with the host to itself."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", test], check=False).returncode == 0


def main() -> int:
    """The exit status of the suite, after a second look."""
    failed = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.exists() else {}
    if not failed or (final := without_a_second_look(failed)):
        said = f"no second look: {', '.join(final) if failed else 'no test failed'}"
        sys.stdout.write(f"{said}\n")
        return 1
    again = [test for test in failed if not passes_alone(test)]
    for test in failed:
        verdict = "failed again" if test in again else "UNSTEADY, passed alone"
        sys.stdout.write(f"{verdict}: {test}\n")
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(main())
