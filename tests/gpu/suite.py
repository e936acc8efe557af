"""The tests of a GPU and the demo, as parts of a run: what passed, what failed, what was skipped.

Plugins of pytest that a GPU machine happens to have are left out (one of them makes a warning of
the presence of another, and warnings are errors here); those that the tests need are named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most
from kvd.demo.report import DemoReport
from tests.gpu.engine import device_runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.bench.report import Measured
    from tests.gpu.results import Setting

HERE: Final = Path(__file__).parent
RULES: Final = HERE / "test_rules.py"
PLUGINS: Final = ("pytest_asyncio.plugin", "pytest_timeout")
NAMED: Final = 12
"""Tests that failed, by name; the others are counted."""

TEST_COLUMNS = (
    ResultColumn("what", "tests"),
    ResultColumn("passed", "passed"),
    ResultColumn("failed", "failed"),
    ResultColumn("skipped", "skipped"),
)
DEMO_COLUMNS = (
    ResultColumn("conversation", "conversation"),
    ResultColumn("turn", "turn"),
    ResultColumn("prompt_tokens", "prompt"),
    ResultColumn("decode_prefix_len", "prefix"),
    ResultColumn("loaded_bytes", "loaded", ","),
    ResultColumn("saved_bytes", "saved", ","),
    ResultColumn("ttft_ms", "first token, ms", ".0f"),
    ResultColumn("is_equal", "tokens equal"),
)


def rules(setting: Setting) -> BenchmarkResult:
    """What the runtime does, rule by rule."""
    device_runtime()
    return _tested("rules of the CUDA runtime", [str(RULES)], setting.of(50.0, 100.0))


def everything(setting: Setting) -> BenchmarkResult:
    """All other tests that need a GPU."""
    device_runtime()
    chosen = [str(HERE), f"--ignore={RULES}"]
    return _tested("tests that need a GPU", chosen, setting.of(140.0, 280.0))


def _tested(what: str, chosen: Sequence[str], within_s: float) -> BenchmarkResult:
    with tempfile.TemporaryDirectory(prefix="kvd-gpu-") as directory:
        report = Path(directory) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
        for plugin in PLUGINS:
            command += ["-p", plugin]
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [*command, "-m", "gpu", f"--junitxml={report}", *chosen],
            cwd=HERE.parents[1],
            env=environment,
            stdout=sys.stderr,
            timeout=within_s,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and wrote no report")
        return read_report(what, report.read_text("utf-8"))


def read_report(what: str, junit: str) -> BenchmarkResult:
    """What pytest says in its report."""
    failed: list[str] = []
    skipped: Counter[str] = Counter()
    passed = 0
    for case in ElementTree.fromstring(junit).iter("testcase"):
        kinds = {child.tag: child for child in case}
        if "failure" in kinds or "error" in kinds:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skip := kinds.get("skipped")) is not None:
            skipped[skip.get("message") or "?"] += 1
        else:
            passed += 1
    row: Measured = {
        "what": what,
        "passed": passed,
        "failed": len(failed),
        "skipped": sum(skipped.values()),
    }
    more = [f"and {len(failed) - NAMED} more"] if len(failed) > NAMED else []
    return BenchmarkResult(
        tables=(ResultTable(what, TEST_COLUMNS, (row,)),),
        notes=tuple(f"{count} skipped: {why}" for why, count in sorted(skipped.items())),
        wrong=(*failed[:NAMED], *more) if passed else (*failed[:NAMED], f"{what}: none passed"),
    )


def demo(setting: Setting) -> BenchmarkResult:
    """Engines that compute on the device, their KV copied to and from pools in host memory."""
    device = setting.of("cuda:0", "cpu")
    if not setting.is_rehearsal:
        device_runtime()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvd-gpu-") as directory:
        file = Path(directory) / "demo.json"
        command = [sys.executable, "-m", "kvd", "demo", "--device", device, "--json", str(file)]
        done = subprocess.run(
            [*command, "--turns", "3"], capture_output=True, text=True, timeout=70, check=False
        )
        if not file.exists():
            raise RuntimeError(f"kvd demo ended with {done.returncode}: {done.stderr[-2000:]}")
        report = msgspec.json.decode(file.read_bytes(), type=DemoReport)
    rows: list[Measured] = []
    for turn in report.turns:
        assert turn.copied is not None, "--device was given"
        rows.append(
            {
                "conversation": turn.conversation,
                "turn": turn.turn,
                "prompt_tokens": turn.prompt_tokens,
                "decode_prefix_len": turn.decode_prefix_len,
                "loaded_bytes": turn.copied.loaded_bytes,
                "saved_bytes": turn.copied.saved_bytes,
                "ttft_ms": turn.ttft_ms,
                "is_equal": turn.tokens_equal,
            }
        )
    control = report.control.max_logit_difference
    return BenchmarkResult(
        tables=(ResultTable(f"kvd demo --device {device}", DEMO_COLUMNS, tuple(rows)),),
        goals=(at_most("seconds of the demo", 70.0, time.monotonic() - began_s),),
        notes=(
            "a page that was damaged on purpose was noticed"
            if control > 0.05
            else "a page that was damaged on purpose changed nothing",
        ),
        wrong=report.problems,
    )
