"""``python -m tests.explore``: at length what the suite does in small.

    python -m tests.explore --depth 4 --faults 2 --minutes 10 --seed 1 --json FILE

Every start gets an equal part of the time for its sequences, then walks at random fill the rest. A
violation ends it with the way there and status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.explore.case import STARTS
from tests.explore.search import Violated, explore, walk

WALKING = 0.25
"""Of the time, at the end."""


def main() -> int:
    words = argparse.ArgumentParser(description="The real core, every order of a few steps.")
    words.add_argument("--depth", type=int, default=3)
    words.add_argument("--faults", type=int, default=2)
    words.add_argument("--minutes", type=float, default=5.0)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", nargs="*", choices=STARTS)
    words.add_argument("--json", type=Path, help="what was found, for a program")
    chosen = words.parse_args()
    began_s, most_s = time.monotonic(), 60.0 * chosen.minutes
    starts = chosen.only or STARTS
    told: dict[str, object] = {}
    try:
        for nth, name in enumerate(starts, 1):
            until_s = began_s + most_s * (1.0 - WALKING) * nth / len(starts)
            found = explore(name, depth=chosen.depth, faults=chosen.faults, until_s=until_s)
            told[name] = found._asdict()
            _say(f"{name}: {found}")
        seed = chosen.seed * 1_000_000
        while time.monotonic() < began_s + most_s:
            for name in starts:
                walk(name, seed)
            seed += 1
        told["walks"] = (seed - chosen.seed * 1_000_000) * len(starts)
        _say(f"{told['walks']} walks of 25 steps from seed {chosen.seed * 1_000_000} on: fine")
    except Violated as violated:
        told["violated"] = str(violated)
        _say(f"VIOLATED {violated}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(told, indent=1))
    return int("violated" in told)


def _say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
