"""Real ranks: processes that share a gloo group, started once and asked for many cases.

Groups of 1 to 4 ranks are made of the same four processes, since starting one costs seconds. Every
answer is waited for at most ``ANSWER_S``; a rank that is silent is stopped with all the others.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 30.0


class Ask(msgspec.Struct):
    """Run a case of ``cases.CASES`` in the group of ranks ``0 .. ranks``."""

    case: str
    ranks: int
    arguments: dict[str, Any]


class Told(msgspec.Struct):
    """What the case returned, or what it raised."""

    found: Any = None
    error: str = ""


class Ranks:
    """``count`` processes; over ``nccl`` each has a GPU."""

    def __init__(self, count: int, directory: Path, backend: str = "gloo") -> None:
        given = [str(count), str(directory / "store"), backend]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.device.rank", str(rank), *given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                cwd=ROOT,
            )
            for rank in range(count)
        ]

    def run(self, case: str, ranks: int, **arguments: Any) -> list[Told]:
        """The answers of the ranks, in their order."""
        self.tell(range(ranks), case, ranks, **arguments)
        return [self.hear(rank) for rank in range(ranks)]

    def tell(self, who: range | list[int], case: str, ranks: int, **arguments: Any) -> None:
        """Ask these ranks; ``hear`` each of them once."""
        line = msgspec.json.encode(Ask(case, ranks, arguments)) + b"\n"
        for rank in who:
            self._processes[rank].stdin.write(line)
            self._processes[rank].stdin.flush()

    def hear(self, rank: int) -> Told:
        """The next answer of this rank."""
        output = self._processes[rank].stdout
        deadline_s = time.monotonic() + ANSWER_S
        line = b""
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([output], [], [], left_s)[0]:
                self.stop()
                raise TimeoutError(f"rank {rank} is silent after {ANSWER_S} s: {line!r}")
            part = os.read(output.fileno(), 65536)
            if not part:
                raise EOFError(f"rank {rank} ended: {self._processes[rank].wait()}")
            line += part
        return msgspec.json.decode(line, type=Told)

    def kill(self, rank: int) -> None:
        """End one rank as a crash would."""
        self._processes[rank].kill()
        self._processes[rank].wait()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
