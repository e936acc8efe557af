"""Engines killed at every point of every call: within a second nothing is held for them.

    python -m tests.fault.deaths --repeats 2 --seed 1

What they had committed stays, the engine on the other side of a handoff is told, no page is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import kvd.client
from kvd.client import KvdError
from kvd.wire import admin
from tests.fault.doomed import ATTACH, MOMENTS, RECEIVES, SENDS, VERBS, prompt
from tests.fault.load import Broken
from tests.fault.prompts import SHAPE
from tests.fault.table import Figures, percentile, say, show
from tests.support.daemons import two_daemons

if TYPE_CHECKING:
    from kvd.client import Node
    from kvd.wire.snapshot import Snapshot
    from tests.support.daemons import Daemon, Pair

LIMIT_S = 1.0
GIVE_UP_S = 5.0
LOOK_EVERY_S = 0.003
KEPT_TOKENS = 96

_numbers = itertools.count(1)


class Death(msgspec.Struct, frozen=True):
    """Where one died, and how long its daemon held anything for it."""

    verb: str
    moment: str
    released_s: float


def cases() -> list[tuple[str, str]]:
    """Every verb at every moment."""
    return list(itertools.product((ATTACH, *VERBS), MOMENTS))


class Deaths:
    """One pair of daemons, and the engine that outlives all others."""

    def __init__(self, pair: Pair, p: Node, d: Node) -> None:
        self._pair = pair
        self._p = p
        self._d = d

    async def one(self, verb: str, moment: str, seed: int) -> Death:
        """Kill one engine there.

        Raises:
            Broken: something was held for more than a second, was lost, or stayed untold.
        """
        number = next(_numbers)
        what = f"{verb}, {moment}, seed {seed}"
        daemon = self._pair.prefill if verb in SENDS else self._pair.decode
        name = f"doomed-{number}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fault.doomed", verb, moment),
            *(daemon.client, name, str(number), str(seed)),
            stdout=asyncio.subprocess.PIPE,
        )
        other = asyncio.create_task(self._other_side(verb, number))
        assert process.stdout is not None
        words = (await process.stdout.readline()).split()
        await process.wait()
        if not words:
            raise Broken(f"{what}: it ended with status {process.returncode} before its time")
        session, died_s = int(words[0]), float(words[1])
        released_s = await self._released(daemon, name, session, died_s, what)
        if not await other:
            raise Broken(f"{what}: the other engine was not told within its deadline")
        if verb != ATTACH:
            await self._check_kept(daemon, number, what)
        for one in (self._pair.prefill, self._pair.decode):
            found = (await asyncio.to_thread(one.ask, admin.Audit(1), admin.Report)).refused
            if found:
                raise Broken(f"{what}: the audit of {one.name} finds {'; '.join(found)}")
        return Death(verb, moment, released_s)

    async def at_rest(self) -> None:
        """Nobody but us is there, and nothing is held.

        Raises:
            Broken: something is.
        """
        for daemon in (self._pair.prefill, self._pair.decode):
            end_s = time.monotonic() + GIVE_UP_S
            while (now := await _snapshot(daemon)).leases or now.rooms or now.waiting:
                if time.monotonic() > end_s:
                    raise Broken(f"{daemon.name} still holds {now.leases} {now.rooms}")
                await asyncio.sleep(LOOK_EVERY_S)
            state = now.pools[0]
            left = [one.name for one in now.clients if one.name.startswith("doomed")]
            assert not left, left
            assert (state.held_pages, state.locked_pages, state.quarantined_pages) == (0, 0, 0)
            assert 1 + state.free_pages + state.cached_pages == state.total_pages, state

    async def _released(
        self, daemon: Daemon, name: str, session: int, died_s: float, what: str
    ) -> float:
        while True:
            now = await _snapshot(daemon)
            seen_s = time.monotonic() - died_s
            left = [one for one in now.leases if one.session == session]
            clients = [one for one in now.clients if one.name == name]
            if not left and not clients and not any(one.owner == name for one in now.waiting):
                break
            if seen_s > GIVE_UP_S:
                raise Broken(f"{what}: after {seen_s:.1f} s there are {left} {clients}")
            await asyncio.sleep(LOOK_EVERY_S)
        if seen_s > LIMIT_S:
            raise Broken(f"{what}: it took {seen_s:.2f} s")
        return seen_s

    async def _check_kept(self, daemon: Daemon, number: int, what: str) -> None:
        node = self._p if daemon is self._pair.prefill else self._d
        kept = (await node.match(prompt(number, "kept"))).tokens
        if kept != KEPT_TOKENS:
            raise Broken(f"{what}: {kept} of {KEPT_TOKENS} committed tokens are still cached")

    async def _other_side(self, verb: str, room: int) -> bool:
        """The engine at the other end: whether it was told something, whatever it is."""
        tokens = prompt(room, "held")
        try:
            async with asyncio.timeout(GIVE_UP_S + 2):
                if verb in RECEIVES:
                    await self._send(room, tokens)
                elif verb in SENDS:
                    receive = await self._d.receive(room, tokens, "p", deadline_s=GIVE_UP_S)
                    await receive.done()
                    await receive.lease.release()
        except KvdError as told:
            return bool(told.refusal.message)
        except TimeoutError:
            return False
        return True

    async def _send(self, room: int, tokens: object) -> None:
        lease = await self._p.lease(tokens)
        try:
            send = await self._p.send(room, tokens, lease=lease, deadline_s=GIVE_UP_S)
            await send.accepted()
            await send.finish()
        finally:
            await lease.release(())


async def _snapshot(daemon: Daemon) -> Snapshot:
    return (await asyncio.to_thread(daemon.ask, admin.ShowStatus(1), admin.Status)).snapshot


async def run(pair: Pair, chosen: list[tuple[str, str]], seed: int) -> list[Death]:
    """Kill one engine for each of ``chosen``.

    Raises:
        Broken: something was held for more than a second, was lost, or stayed untold.
    """
    source = random.Random(seed)
    async with (
        kvd.client.connect(pair.prefill.client, name="prefill") as p,
        kvd.client.connect(pair.decode.client, name="decode") as d,
    ):
        deaths = Deaths(pair, p, d)
        found = [await deaths.one(*case, source.randrange(2**31)) for case in chosen]
        await deaths.at_rest()
    return found


def figures(found: list[Death], seed: int) -> Figures:
    rows = []
    for verb in dict.fromkeys(one.verb for one in found):
        took = [1e3 * one.released_s for one in found if one.verb == verb]
        rows.append((verb, str(len(took)), f"{percentile(took, 50):.0f}", f"{max(took):.0f}"))
    every = [1e3 * one.released_s for one in found]
    return Figures(
        title=f"{len(found)} engines killed, seed {seed}: from the kill until nothing is held",
        headers=("in the call", "count", "p50 ms", "max ms"),
        rows=rows,
        notes=[f"all: p50 {percentile(every, 50):.0f} ms, max {max(every):.0f} ms"],
    )


def main() -> int:
    words = argparse.ArgumentParser(description="Engines killed at every point of every call.")
    words.add_argument("--repeats", type=int, default=1)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--json", type=Path)
    chosen = words.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvd-deaths-"))
    try:
        with two_daemons(directory, SHAPE) as pair:
            found = asyncio.run(run(pair, cases() * chosen.repeats, chosen.seed))
    except Broken as why:
        say(f"seed {chosen.seed}: {why}\n  logs: {directory}")
        return 1
    shutil.rmtree(directory)
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    say(show(figures(found, chosen.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
