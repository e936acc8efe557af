"""An hour of frames through the real console, and what it has in memory before and after.

    python -m tests.tui.hour [--frames 3600]

A node that works lives in a process of its own, where a second passes with each frame,
however fast they come; its memory is not counted. The console runs without a terminal at 132x40,
goes from page to page, opens what is there and closes it again. What it has in memory when all that
is kept for a quarter of an hour is there is what it may have at the end, and 5 % more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvd.core.cache.lease import ENGINE
from kvd.wire import client
from kvd.wire.admin import Frame, Look
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS
from tests.tui.fake import FakeLink
from tui.app import KvdTui, Options
from tui.model.commands import PAGES
from tui.model.mirror import Mirror

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.wire.admin import AdminReply, AdminRequest
    from tests.tui.town import Resident
    from tui.model.mirror import Subscription

SIZE = (132, 40)
BEAT_S = 1.0
FRAMES = 3_600
FRAMES_OF_A_PAGE = 50
FULL = 3
"""After so many tenths of the frames everything that is bounded is as large as it gets."""
GROWTH = 0.05
LEASES = 12
LEASES_A_BEAT = 5
"""So many events come that logs are full by then, too."""
TURN_S = 0.001
"""After each frame, for what it has set off."""
KEYS = ("down", "enter", "down", "escape", "space", "space", "end", "t", "s", "s")
"""Pressed on each page, a few frames apart."""

_HEAD = struct.Struct("<BI")
GO, ASK = range(2)


# ---- the node ------------------------------------------------------------------------------------


class Worked(FakeLink):
    """A node of the town, with engines that lease, commit, release and hand over all the time."""

    def __init__(self, seed: int) -> None:
        super().__init__("normal", seed)
        self.town.hold_posts = False
        self._chance = random.Random(seed)
        self._beats = 0

    def beat(self) -> None:
        """As long as a frame."""
        self._beats += 1
        town, side, chance = self.town, self.side, self._chance
        session = 1 + self._beats % 2
        if self._beats % 7 == 0:
            source = town.sides[chance.choice(("prefill0", "prefill1"))]
            town.deliver_prompt(source, town.prompt(chance.randrange(2, 20)), session)
        else:
            for _ in range(LEASES_A_BEAT):
                side.lease(town.prompt(chance.randrange(1, 12)), session=session)
        town.pass_time(BEAT_S)
        for one in town.sides.values():
            self._release(one, LEASES if one is side else 1)
            one.take()
        self._desk.turn(town.now_s)

    def _release(self, side: Resident, kept: int) -> None:
        """Whoever has too many leases commits some and lets them go."""
        held = [one for one in side.node.leases.leases.values() if ENGINE in one.holders]
        for lease in self._chance.sample(held, max(0, len(held) - kept)):
            side.call(client.CommitAndRelease, session=lease.session, lease=lease.id)


def serve(seed: int) -> None:
    """Answer what comes in, until it is closed."""
    node, out = Worked(seed), sys.stdout.buffer
    while (message := _read(sys.stdin.buffer)) is not None:
        kind, payload = message
        if kind == GO:
            node.beat()
        request = ADMIN_REQUESTS.decode(payload)
        _write(out, kind, ADMIN_REPLIES.encode(node.answer(request)))


def _read(file: IO[bytes]) -> tuple[int, bytes] | None:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack(head)
    return kind, file.read(length)


def _write(file: IO[bytes], kind: int, payload: bytes) -> None:
    file.write(_HEAD.pack(kind, len(payload)) + payload)
    file.flush()


# ---- the console ---------------------------------------------------------------------------------


class PipeLink:
    """A link to that process; a frame comes when ``frame`` is called, or somebody is in a hurry."""

    fps = 1 / BEAT_S
    interval_s = BEAT_S

    def __init__(self, node: subprocess.Popen[bytes]) -> None:
        self.frames = self.received_bytes = 0
        self._node = node
        self._hurry = asyncio.Event()

    def connect(self, mirror: Mirror, wanted: Callable[[], Subscription]) -> PipeLink:
        """Whom the frames are for, and who says what they shall have."""
        self._mirror, self._wanted = mirror, wanted
        return self

    def clock(self) -> float:
        """Seconds that have passed there."""
        return self.frames * BEAT_S

    async def run(self) -> None:
        """Frames come by ``frame``; here only those that cannot wait for it."""
        while True:
            await self._hurry.wait()
            self._hurry.clear()
            self.frame()

    async def ask(self, request: AdminRequest, limit_s: float = 5.0) -> AdminReply:
        """What the node says, at once."""
        return ADMIN_REPLIES.decode(self._told(ASK, request))

    def hurry(self) -> None:
        """Something else is wanted."""
        self._hurry.set()

    def painted(self, took_s: float) -> None:
        """Frames come as fast as they are painted."""

    def frame(self) -> None:
        """A second, and what is to be seen then."""
        self.frames += 1
        look: Look = self._mirror.look(self.frames, self._wanted())
        reply = ADMIN_REPLIES.decode(self._told(GO, look))
        assert isinstance(reply, Frame), reply
        self._mirror.take(reply, self.clock())

    def _told(self, kind: int, request: AdminRequest) -> bytes:
        there, back = self._node.stdin, self._node.stdout
        assert there is not None
        assert back is not None
        _write(there, kind, ADMIN_REQUESTS.encode(request))
        answer = _read(back)
        assert answer is not None, "the node has ended"
        self.received_bytes += len(answer[1])
        return answer[1]


def resident_bytes() -> int:
    """Of this process, without garbage."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


async def run(link: PipeLink, frames: int) -> int:
    """So many frames; the exit status."""
    app = KvdTui(Mirror(), link.connect, Options(), link.clock)
    marks = {max(1, round(frames * tenth / 10)): tenth for tenth in range(1, 11)}
    sizes: dict[int, int] = {}
    busy_s, begun_s = time.process_time(), time.monotonic()
    async with app.run_test(size=SIZE):
        for frame in range(frames):
            at = frame % FRAMES_OF_A_PAGE
            if at == 0:
                page = PAGES[frame // FRAMES_OF_A_PAGE % len(PAGES)]
                app.simulate_key(str(PAGES.index(page) + 1))
            elif at % 4 == 0 and at // 4 <= len(KEYS):
                app.simulate_key(KEYS[at // 4 - 1])
            link.frame()
            app.tick()
            await asyncio.sleep(TURN_S)
            if frame + 1 in marks:
                sizes[marks[frame + 1]] = resident_bytes()
                spent_s, passed_s = time.process_time() - busy_s, time.monotonic() - begun_s
                _say(
                    f"{frame + 1:>6} frames  {sizes[marks[frame + 1]] / 2**20:6.1f} MiB  "
                    f"{1e3 * spent_s / (frame + 1):5.2f} ms of CPU a frame, {passed_s:6.1f} s, "
                    f"{link.received_bytes / link.frames / 1e3:.1f} kB a frame, now {app.page.NAME}"
                )
    growth = sizes[10] / sizes[FULL] - 1
    _say(f"{100 * growth:+.1f} % from {FULL} tenths to its end; {100 * GROWTH:g} % are allowed")
    return 0 if growth < GROWTH else 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """The node in another process, the console in this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.seed)
        return 0
    words = [sys.executable, "-m", "tests.tui.hour", "--serve", "--seed", str(given.seed)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        return asyncio.run(run(PipeLink(node), given.frames))


if __name__ == "__main__":
    sys.exit(main())
