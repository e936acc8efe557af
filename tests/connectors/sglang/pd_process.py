"""SGLang, imported once: ``... SOCKET``. For each connection it forks an engine (``pd_engine``).

It ends with its standard input.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys

from tests.connectors.sglang.absent import stand_in


def main():
    stand_in()
    for name in (
        "disaggregation.prefill",
        "disaggregation.decode",
        "mem_cache.unified_radix_cache",
    ):
        importlib.import_module(f"sglang.srt.{name}")
    engine = importlib.import_module("tests.connectors.sglang.pd_engine")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                engine.serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
