"""Engines that end at each step of a request, as by ``kill -9``: ``python -m ... ADAPTER SOCKET``.

For each line that is read, which is the name of a step, an engine in a child process of this one
comes as far as that and is killed. What it ended with is written.
"""

from __future__ import annotations

import os
import signal
import sys

from tests.connectors.contract.cases import Step
from tests.connectors.contract.engine import PROMPT, Happening, adapter


def main(name: str, endpoint: str) -> None:
    kind = adapter(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            end = Happening(Step(line.strip()), lambda: os.kill(os.getpid(), signal.SIGKILL))
            kind(endpoint).answer(PROMPT, end)
            os._exit(0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
