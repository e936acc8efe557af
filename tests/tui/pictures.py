"""The pictures of the console that the README shows: real daemons, real load, and some trouble.

    python -m tests.tui.pictures [--to tui/pictures] [--seconds 45]

It lives beside the tests, not in ``kvd bench``: it writes into a checkout, and its engines are
theirs. Three daemons run; engines lease, hand over, decode and release. One prefill engine has
stopped in the middle of a prompt, and one decode engine was killed while a child of it keeps its
connection. The console looks at the decode node.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tests.support.daemons import START_S, Daemon
from tests.tui.drill import operator
from tests.tui.engine import engines

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURES = Path(__file__).resolve().parents[2] / "tui" / "pictures"
MAX_BYTES = 300_000
SHAPE = {
    "pool.layers": "8",
    "pool.heads": "4",
    "pool.head_dim": "128",
    "pool.pages": "2049",
    "admission.max_deadline_s": "600",
}
"""256 KiB a page of 16 tokens, 512 MiB a node."""
PAINTED_S = 0.5
"""So long after the last key all is there that it asks for."""
SECONDS = 45.0
"""So long the console has looked before its picture is taken: its charts have something to show."""
STREAMS = 6
STUCK_ROOM = 7_000_000


class Picture(msgspec.Struct, frozen=True):
    """One of them; ``open``: what is open on the page, ``keys``: what is pressed at last."""

    name: str
    page: str
    open: str = ""
    keys: tuple[str, ...] = ()


class Town(msgspec.Struct, frozen=True):
    prefills: tuple[Daemon, ...]
    decode: Daemon


@contextlib.contextmanager
def daemons(directory: Path) -> Iterator[Town]:
    """Two nodes that prefill and one that decodes, for as long as the block lasts."""
    town = Town(
        tuple(Daemon(f"prefill-{at}", directory, SHAPE) for at in range(2)),
        Daemon("decode-0", directory, SHAPE),
    )
    everybody = (*town.prefills, town.decode)
    for one in town.prefills:
        town.decode.knows(one)
        one.knows(town.decode)
    try:
        for one in everybody:
            one.start()
        for one in everybody:
            one.wait_ready()
        town.decode.wait_for(lambda: is_linked(town.decode), "is alone", START_S)
        yield town
    finally:
        for one in everybody:
            one.stop()


def is_linked(daemon: Daemon) -> bool:
    """Whether it can hand over with all its peers."""
    peers = daemon.snapshot().peers
    return len(peers) == 2 and all(one.agent == "loaded" for one in peers)


@contextlib.contextmanager
def load(town: Town) -> Iterator[None]:
    """Engines at work for as long as the block lasts; two of them are in trouble."""
    at = town.decode.client
    with engines() as start:
        for number, source in enumerate(town.prefills):
            first = 1_000_000 * (number + 1)
            start("sends", source.client, f"sglang@{source.name}", first, STREAMS)
            start("receives", at, f"sglang-{number}", first, STREAMS, source.name)
        start("works", at, "router", 500_000, STREAMS)
        start("receives-and-keeps", at, "sglang-2", STUCK_ROOM, 1, town.prefills[1].name)
        start("sends-some", town.prefills[1].client, "vllm@prefill-1", STUCK_ROOM, 3)
        dead = start("forks", at, "notebook", 600_000, 1)
        dead.kill()
        dead.wait()
        yield


async def looked_at(daemon: Daemon, picture: Picture, seconds: float) -> str:
    """What the console shows after so long."""
    async with operator(daemon, {}, picture.page) as person:
        if picture.open:
            await person.app.open(picture.open)
        await asyncio.sleep(seconds)
        await person.presses(*picture.keys)
        await asyncio.sleep(PAINTED_S)
        return re.sub(r"terminal-\d+-", "t-", person.app.export_screenshot(title="kvd"))


def take(daemon: Daemon, picture: Picture, seconds: float, to: Path) -> Path:
    """Have the console make it, and put it in its place."""
    svg = asyncio.run(looked_at(daemon, picture, seconds))
    assert len(svg) < MAX_BYTES, f"{picture.name} has {len(svg)} characters"
    to.mkdir(parents=True, exist_ok=True)
    path = to / f"{picture.name}.svg"
    path.write_text(svg, "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=PICTURES)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvd-pictures-") as directory,
        daemons(Path(directory)) as town,
        load(town),
    ):
        time.sleep(1.0)
        [dead] = [one.session for one in town.decode.snapshot().clients if one.name == "notebook"]
        wanted = (
            (Picture("overview", "overview"), given.seconds),
            (Picture("pools", "pools", f"pages:client:{dead}"), 3.0),
            (Picture("handoffs", "handoffs"), 5.0),
            (Picture("compared", "overview", keys=("c",)), given.seconds),
        )
        for picture, seconds in wanted:
            path = take(town.decode, picture, seconds, given.to)
            sys.stdout.write(f"{path}  {path.stat().st_size / 1e3:.0f} kB\n")


if __name__ == "__main__":
    main()
