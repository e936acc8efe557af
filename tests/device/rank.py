"""One rank of ``ranks.Ranks``: ``python -m tests.device.rank RANK RANKS STORE BACKEND``.

Reads one ``Ask`` a line from standard input and answers each with a ``Told``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from tests.device.cases import CASES, Rank
from tests.device.ranks import Ask, Told

TIMEOUT = timedelta(seconds=20)


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    is_nccl = sys.argv[4] == "nccl"
    device = torch.device("cuda", rank) if is_nccl else torch.device("cpu")
    dist.init_process_group(
        sys.argv[4],
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
        device_id=device if is_nccl else None,
    )
    groups = {size: dist.new_group(list(range(size)), TIMEOUT) for size in range(1, ranks + 1)}
    for line in sys.stdin.buffer:
        ask = msgspec.json.decode(line, type=Ask)
        try:
            found = CASES[ask.case](Rank(rank, groups[ask.ranks], device), **ask.arguments)
            told = Told(found=found)
        except Exception as wrong:  # noqa: BLE001 (whatever it is, the test shows it)
            told = Told(error=f"{type(wrong).__name__}: {wrong}")
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
