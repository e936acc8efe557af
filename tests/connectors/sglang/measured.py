"""How fast pages go from SGLang's host pool to a store and back; run by SGLang's Python.

    python -m tests.connectors.sglang.measured SOCKET PID PAGES ROUNDS

The calls are those of SGLang's controller, with its own functions for each backend: pages that
nobody has are stored, asked for, and read. Files lie in a directory of memory, which is the best
that a file can have. Its last line has what ``benchmarks sglang`` shows.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.connectors.sglang.engine import (
    PAGE,
    HiCacheStorageExtraInfo,
    hits_of,
    mha_device,
    say,
    scheduler,
)
from tests.connectors.sglang.world_names import names_of

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
PAGE_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2 * PAGE
TICKS = os.sysconf("SC_CLK_TCK")


class NotEnded:
    """What a read asks of the operation that it is a part of."""

    request_id = "r"

    def is_terminated(self):
        return False


def busy_s(pid):
    """Processor time of this process, and of the daemon."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / TICKS


def timed(pid, act):
    began_s, busy = time.perf_counter(), busy_s(pid)
    found = act()
    return found, time.perf_counter() - began_s, busy_s(pid) - busy


def measured(rank, pid, names, before):
    """Of one round: seconds of the wall and of processors, by what was done."""
    indices = rank.host.alloc(len(names) * rank.controller.page_size)
    info = HiCacheStorageExtraInfo(prefix_keys=before)
    controller, found = rank.controller, {}
    acts = {
        "stored": lambda: controller.page_set_func(names, indices, info),
        "asked": lambda: rank.storage.batch_exists(names, info) == len(names),
        "read": lambda: controller.page_get_func(NotEnded(), names, indices, info) == len(names),
    }
    for what, act in acts.items():
        is_right, wall_s, processor_s = timed(pid, act)
        assert is_right, what
        found[what] = wall_s, processor_s
    rank.host.free(indices)
    return found


def in_turns(ranks, pid, layout, pages, rounds, files):
    """Of each backend and of what it was asked, the times."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds):
        for name, rank in ranks.items():
            names = names_of(pages, f"{layout} {number}")
            for what, took in measured(rank, pid, names, []).items():
                found.setdefault((name, what), []).append(took)
        for path in Path(files).iterdir():
            path.unlink()
    return found


def rows_of(socket, pid, layout, pages, rounds):
    """Both backends beside each other, each with a host pool of its own."""
    how = {"kvd": {"extra": {"kvd.partition": layout}}, "file": {"backend": "file"}}
    with ExitStack() as stack:
        files = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        ranks = {}
        for name, more in how.items():
            device = mha_device(LAYERS, HEADS, HEAD_DIM, pages * PAGE)
            ranks[name] = stack.enter_context(
                scheduler(socket, device=device, layout=layout, **more)
            )
        ranks["file"].storage.file_path = files
        for (name, what), times in in_turns(ranks, pid, layout, pages, rounds, files).items():
            walls, busy = zip(*times, strict=True)
            yield {
                "backend": name,
                "layout": layout,
                "what": what,
                "gb_per_s": pages * PAGE_BYTES / min(walls) / 1e9 if what != "asked" else None,
                "ms": statistics.median(walls) * 1e3,
                "processor_us": statistics.median(busy) / pages * 1e6,
            }


def hits(socket, backend):
    """Of each prompt of some conversations, how many pages were found."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as files,
        scheduler(socket, device=mha_device(LAYERS, HEADS, HEAD_DIM), backend=backend) as rank,
    ):
        if backend == "file":
            rank.storage.file_path = files
        return hits_of(rank)


def main(socket, pid, pages, rounds):
    """All of it."""
    torch.set_num_threads(1)
    rows = [
        row
        for layout in ("page_first", "layer_first")
        for row in rows_of(socket, pid, layout, int(pages), int(rounds))
    ]
    say({"rows": rows, "hits": {"kvd": hits(socket, "dynamic"), "file": hits(socket, "file")}})
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
