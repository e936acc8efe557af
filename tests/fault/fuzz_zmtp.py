"""Besiege ZMTP itself, without a library: ``python -m tests.fault.fuzz_zmtp --cases 20000``.

What speaks ZMQ through a library cannot say everything that a hostile program can: names that the
library's own numbers will have, frames before the handshake, messages that never end. Each siege
takes one socket of a running daemon, and goes through the kinds of cases one after the other, while
a healthy engine works with the same daemon and hands prompts over between it and an honest peer.

After each kind the daemon must be the same process, and the healthy engine must have seen nothing;
at the end, with all connections gone, its memory must be back. Whatever is found is said with its
kind, and the siege goes on against a new daemon. A run is repeated by its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from zmq.utils import z85

from kvd import curve
from tests.fault.fuzz_target import Target, besieged, percentile
from tests.fault.table import Figures, say, show
from tests.fault.zmtp_raw import (
    COMMAND,
    LONG,
    MORE,
    Curve,
    Keys,
    Sodium,
    announced,
    command,
    connected,
    frame,
    greeting,
    hear,
    properties,
    ready,
    reset,
    shaken,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

MOST_GROWTH_BYTES = 64 * 2**20
GIVEN_BACK_WITHIN_S = 5.0
HELD_OPEN = 40
"""Connections that stay open while others come: as many numbers of a library are taken."""
LIBRARY_NUMBERS = (0x6B8B4567, 0xF4B0DC51, 0xE43C9869, 0x2AE8944A, 0xA38E1F29, 0xBD1B58BA)
"""Where libzmq 4.3.5 begins to number clients without a name, in the order of its sockets: what an
unseeded ``rand`` says."""
BIG = 4 * 2**20
COSTLY = ("message without end in large frames",)
"""Of these a fifth as many: a case is megabytes."""
SENT_S = 1.0
"""Longest wait to be read: a daemon may well stop reading."""


class Row(msgspec.Struct):
    """One siege, as the table shows it."""

    socket: str
    cases: int = 0
    seconds: float = 0.0
    before_bytes: int = 0
    peak_bytes: int = 0
    after_bytes: int = 0
    calls_ms: list[float] = []
    handoffs: int = 0
    troubles: list[str] = []


class Siege:
    """Cases against one socket; a kind is a method that does one case."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self._endpoint = endpoint
        self._open: list[socket.socket] = []
        self._n_named = 0

    def kinds(self) -> list[Callable[[], None]]:
        """In the order in which they are tried: first what a used daemon may be proof against."""
        return [
            self.names_of_the_library,
            self.greeting_goes_wrong,
            self.greeting_byte_by_byte,
            self.silence,
            self.handshake_goes_wrong,
            self.commands_out_of_place,
            self.names_that_repeat,
            self.message_cut_short,
            self.frame_announced,
            self.long_frame_before_the_handshake,
            self.message_without_end,
            self.message_without_end_in_large_frames,
        ]

    def calm(self) -> None:
        """Hang up on everything."""
        for one in self._open:
            self._end(one)
        self._open.clear()

    # ---- before the handshake ----------------------------------------------------------------

    def greeting_goes_wrong(self) -> None:
        """Other signatures, versions, mechanisms; cut anywhere."""
        rng = self.rng
        said = bytearray(
            greeting(
                rng.choice((b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"", b"null", b"\xff" * 20)),
                bytes([rng.choice((0, 1, 2, 3, 255)), rng.choice((0, 1, 255))]),
                as_server=rng.random() < 0.3,
            )
        )
        for _ in range(rng.randrange(3)):
            said[rng.randrange(len(said))] = rng.randrange(256)
        with self._once() as raw:
            raw.sendall(said[: rng.randrange(1, 65)] if rng.random() < 0.5 else said + ready())
            if rng.random() < 0.2:
                hear(raw, within_s=0.02)

    def greeting_byte_by_byte(self) -> None:
        """As slowly as one can, up to some byte."""
        whole = greeting() + ready()
        with self._once() as raw:
            for at in range(self.rng.randrange(len(whole))):
                raw.sendall(whole[at : at + 1])

    def silence(self) -> None:
        """A connection that does nothing, for as long as the kind lasts."""
        self._keep(connected(self._endpoint))

    def long_frame_before_the_handshake(self) -> None:
        """Megabytes in the place of READY or HELLO, and no end of it."""
        rng = self.rng
        raw = connected(self._endpoint)
        self._keep(raw)
        flags = rng.choice((0, COMMAND, COMMAND, COMMAND, MORE, COMMAND | MORE))
        length = rng.choice((BIG, 4 * BIG, 4 * BIG))
        self._send(raw, greeting(self.mechanism) + announced(length, flags))
        self._send(raw, bytes(length - rng.choice((1, BIG // 2))))

    @property
    def mechanism(self) -> bytes:
        """What the socket asks for."""
        return b"NULL"

    # ---- the handshake -----------------------------------------------------------------------

    def handshake_goes_wrong(self) -> None:
        """READY with properties that are odd, huge, repeated, cut; and other commands for it."""
        rng = self.rng
        pairs = [
            (b"Socket-Type", rng.choice((b"DEALER", b"ROUTER", b"PUB", b"", b"\0" * 9))),
            (b"Identity", rng.randbytes(rng.choice((0, 1, 255, 256, 4096)))),
            (rng.randbytes(rng.randrange(256)), rng.randbytes(rng.choice((0, 9, 70_000)))),
            (b"", b""),
        ]
        told = properties(*rng.choices(pairs, k=rng.randrange(12)))
        if rng.random() < 0.4 and told:
            cut = rng.randrange(len(told))
            told = told[:cut] + struct.pack(">I", rng.choice((2**31, 2**32 - 1))) + told[cut:]
        name = rng.choice((b"READY", b"READY", b"ERROR", b"PING", b"HELLO", b"", b"X" * 255))
        with self._once() as raw:
            raw.sendall(greeting() + command(name, told))
            if rng.random() < 0.2:
                hear(raw, within_s=0.02)

    def commands_out_of_place(self) -> None:
        """Commands inside a message, and messages where a command must be."""
        rng = self.rng
        bits = [
            frame(b"part", MORE),
            command(b"PING", bytes(rng.randrange(40))),
            command(b"PONG"),
            command(b"SUBSCRIBE", b"x"),
            command(b"READY", properties((b"Identity", b"other"))),
            frame(b"", COMMAND | MORE),
            frame(rng.randbytes(9), rng.randrange(256) & ~LONG),
            frame(b"last"),
        ]
        with self._shaken() as raw:
            raw.sendall(b"".join(self.wrap(one) for one in rng.choices(bits, k=20)))

    # ---- names -------------------------------------------------------------------------------

    def names_that_repeat(self) -> None:
        """Names of every length, with zeros before, and of somebody who is here already."""
        rng = self.rng
        name = rng.choice((b"", b"\0", bytes(5), b"\0" + rng.randbytes(4), b"n" * 255, b"taken"))
        raw = self._greeted(name)
        if raw is not None:
            self._send(raw, self.wrap(frame(b"\xc1")))
            if len(self._open) < HELD_OPEN:
                self._keep(raw)
            else:
                self._end(raw)

    def names_of_the_library(self) -> None:
        """The numbers that a library would give to the next clients without a name."""
        start = LIBRARY_NUMBERS[self._n_named % len(LIBRARY_NUMBERS)]
        self._n_named += 1
        numbers = [start + step for step in range(HELD_OPEN)]
        for number in numbers:
            raw = self._greeted(b"\0" + struct.pack(">I", number & 0xFFFFFFFF))
            if raw is not None:
                self._keep(raw)
        for _ in range(4):
            raw = self._greeted(b"")
            if raw is not None:
                hear(raw, 100, 0.05)  # it is not let in before that
            self._end(raw)
        self.calm()

    # ---- messages ----------------------------------------------------------------------------

    def message_cut_short(self) -> None:
        """Half a frame, then nothing, a reset, or an end."""
        raw = self._greeted(b"")
        if raw is None:
            return
        whole = self.wrap(frame(self.rng.randbytes(self.rng.choice((3, 300, 70_000)))))
        self._send(raw, whole[: self.rng.randrange(len(whole))])
        self._keep(raw)

    def frame_announced(self) -> None:
        """A frame that is said to have up to 2^64-1 bytes, and some of them."""
        length = self.rng.choice((2**63 - 1, 2**64 - 1, 2**63, 2**32, 2**31, 17 * 2**20))
        raw = self._greeted(b"")
        if raw is not None:
            self._send(raw, announced(length, self.rng.choice((0, MORE, COMMAND))) + bytes(1000))
            self._keep(raw)

    def message_without_end(self) -> None:
        """A frame that says MORE, and another, and so on."""
        raw = self._greeted(b"")
        if raw is not None:
            self._send(raw, self.wrap(frame(b"x" * self.rng.choice((0, 1, 255)), MORE)) * 5000)
            self._keep(raw)

    def message_without_end_in_large_frames(self) -> None:
        """The same, megabytes at a time."""
        raw = self._greeted(b"")
        if raw is not None:
            self._keep(raw)
            body = bytes(BIG if self.mechanism == b"NULL" else 2**16)
            for _ in range(4):
                if not self._send(raw, self.wrap(frame(body, MORE))):
                    return

    # ---- means -------------------------------------------------------------------------------

    def wrap(self, framed: bytes) -> bytes:
        """A frame as it is sent behind the handshake."""
        return framed

    def _greeted(self, name: bytes | None) -> socket.socket | None:
        """A connection that is through the handshake as far as it is let; None: it was refused."""
        raw = connected(self._endpoint)
        if self._send(raw, greeting() + ready(name)):
            return raw
        return None

    def _keep(self, raw: socket.socket) -> None:
        self._open.append(raw)
        if len(self._open) > HELD_OPEN:
            self._end(self._open.pop(0))

    def _end(self, raw: socket.socket | None) -> None:
        if raw is None:
            return
        if self.rng.random() < 0.5:
            reset(raw)
        else:
            raw.close()

    def _send(self, raw: socket.socket, what: bytes) -> bool:
        """Whether all of it was taken."""
        raw.settimeout(SENT_S)
        try:
            raw.sendall(what)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def _once(self) -> Iterator[socket.socket]:
        raw = connected(self._endpoint)
        try:
            with contextlib.suppress(OSError):
                yield raw
        finally:
            self._end(raw)

    @contextlib.contextmanager
    def _shaken(self) -> Iterator[socket.socket]:
        raw = self._greeted(b"")
        try:
            with contextlib.suppress(OSError):
                yield raw or connected(self._endpoint)
        finally:
            self._end(raw)


class Keyless(Siege):
    """Against a socket that asks for CURVE keys, by somebody who has none that is listed."""

    def __init__(self, endpoint: str, seed: int, server: bytes, own: Keys | None = None) -> None:
        super().__init__(endpoint, seed)
        self.sodium = Sodium()
        self._server = server
        self._own = own or self.sodium.pair()
        self._replayed = self._curve().hello()

    @property
    def mechanism(self) -> bytes:
        return b"CURVE"

    def kinds(self) -> list[Callable[[], None]]:
        return [*super().kinds(), self.curve_out_of_order]

    def curve_out_of_order(self) -> None:
        """HELLO and INITIATE of wrong lengths, replayed, in the wrong order, with garbage."""
        rng = self.rng
        hello = rng.choice((self._curve().hello(), self._replayed, rng.randbytes(194)))
        if rng.random() < 0.5:
            hello = hello[: rng.randrange(len(hello))] + bytes(rng.randrange(3) * 200)
        first, second = command(b"HELLO", hello), command(b"INITIATE", rng.randbytes(257))
        if rng.random() < 0.3:
            first, second = second, first
        with self._once() as raw:
            raw.sendall(greeting(b"CURVE") + first)
            curve = self._curve()
            if rng.random() < 0.5:
                hear(raw, 64, 0.02)
                raw.sendall(second)
            elif self._welcomed(raw, curve):
                whole = curve.initiate(properties((b"Socket-Type", b"DEALER")))
                raw.sendall(command(b"INITIATE", whole[: rng.randrange(len(whole))]) * 2)

    def _welcomed(self, raw: socket.socket, curve: Curve) -> bool:
        raw.sendall(command(b"HELLO", curve.hello()))
        said = hear(raw, 234, 0.1)
        if len(said) < 234 or b"\x07WELCOME" not in said:
            return False
        with contextlib.suppress(ValueError):
            curve.take_welcome(said[74:][:160])
            return True
        return False

    def _curve(self) -> Curve:
        return Curve(self.sodium, self._server, self._own)


class Listed(Keyless):
    """The same by somebody whose key is listed: everything behind the handshake, too."""

    def _greeted(self, name: bytes | None) -> socket.socket | None:
        raw, self._now = connected(self._endpoint), self._curve()
        with contextlib.suppress(OSError, ValueError):
            if shaken(raw, self._now, name or b""):
                return raw
        self._end(raw)
        return None

    def wrap(self, framed: bytes) -> bytes:
        """In a MESSAGE; its flags are inside the box."""
        at = 9 if framed[0] & LONG else 2
        return command_or_long(self._now.message(framed[at:], framed[0] & MORE))


def command_or_long(body: bytes) -> bytes:
    """A MESSAGE is a frame, not a command, that begins with a name."""
    return frame(b"\x07MESSAGE" + body)


# ---- sieges --------------------------------------------------------------------------------------

SOCKETS = ("peers", "peers, no key", "peers, listed key", "client", "admin")


@contextlib.contextmanager
def against(name: str, directory: Path, seed: int) -> Iterator[tuple[Target, Siege]]:
    """A pair of daemons, the healthy engine, and somebody who besieges one socket of ``d``."""
    mallory = curve.new_pair()
    with_keys = "key" in name
    settings = {"peers.keys.mallory": mallory.public} if with_keys else {}
    with besieged(directory, settings, with_keys=with_keys) as target:
        daemon = target.daemon
        own = Keys(z85.decode(mallory.public), z85.decode(mallory.secret))
        match name:
            case "peers":
                siege = Siege(daemon.peers, seed)
            case "client":
                siege = Siege(daemon.client, seed)
            case "admin":
                siege = Siege(daemon.admin, seed)
            case _:
                server = z85.decode((daemon.directory / curve.PUBLIC_FILE).read_text().strip())
                kind, keys = (Keyless, None) if "no key" in name else (Listed, own)
                siege = kind(daemon.peers, seed, server, keys)
        try:
            yield target, siege
        finally:
            siege.calm()


def besiege(name: str, directory: Path, cases: int, seed: int) -> Row:
    """All kinds against one socket; after one that ended the daemon, on with the next."""
    row = Row(name)
    began_s = time.monotonic()
    done, attempt = 0, 0
    while True:
        place = directory / f"{name.replace(', ', '-').replace(' ', '-')}-{attempt}"
        place.mkdir()
        with against(name, place, seed + attempt) as (target, siege):
            left = siege.kinds()[done:]
            n_each = max(1, cases // len(siege.kinds()))
            done += _storm(row, target, siege, left, n_each)
            if done == len(siege.kinds()):
                break
        attempt += 1
    row.seconds = time.monotonic() - began_s
    return row


def _storm(
    row: Row, target: Target, siege: Siege, kinds: list[Callable[[], None]], n_each: int
) -> int:
    """How many kinds were tried: all, or up to the one that ended the daemon."""
    target.healthy()
    before = rss(target.daemon.pid)
    row.before_bytes = row.before_bytes or before
    pid = target.daemon.pid
    for number, kind in enumerate(kinds, 1):
        what = kind.__name__.replace("_", " ")
        peak = before
        for _ in range(max(2, n_each // 5) if what in COSTLY else n_each):
            if not target.daemon.is_running:
                break
            with contextlib.suppress(OSError):
                kind()
            row.cases += 1
            peak = max(peak, rss(pid))
        siege.calm()
        seen = target.healthy() if target.daemon.is_running else None
        row.peak_bytes = max(row.peak_bytes, peak)
        if seen is None or not target.daemon.is_running:
            status = target.daemon._process.wait()
            row.troubles.append(f"{what}: the daemon has ended, exit status {status}")
            return number
        row.calls_ms += seen.calls_ms
        row.handoffs += len(seen.handoffs_ms)
        row.troubles += [f"{what}: {one}" for one in seen.troubles + seen.retried]
        after = given_back(pid, before + MOST_GROWTH_BYTES)
        if after > before + MOST_GROWTH_BYTES:
            grown = (after - before) / 2**20
            row.troubles.append(f"{what}: the daemon keeps {grown:.0f} MB, at most 64 are its due")
            before = after
    row.after_bytes = rss(pid)
    if not row.handoffs:
        seen = target.healthy_until_handoff()
        row.handoffs += len(seen.handoffs_ms)
        row.troubles += seen.troubles
    row.troubles += target.faults()
    if not row.handoffs:
        row.troubles.append("no handoff between the daemons was delivered meanwhile")
    return len(kinds)


def rss(pid: int) -> int:
    """Resident bytes without what is shared; 0 of one that has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return 1024 * int(line.split()[1])
    return 0


def given_back(pid: int, at_most: int) -> int:
    """Its resident bytes, once they are few enough or time is up."""
    deadline_s = time.monotonic() + GIVEN_BACK_WITHIN_S
    while (now := rss(pid)) > at_most and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return now


def table(rows: list[Row], seed: int) -> str:
    """What was sent, what the daemon took for it, how the healthy engine fared."""
    head = ("socket", "cases", "s", "RSS MB", "peak", "after", "p50 ms", "p99 ms", "handoffs", "")
    lines = [
        (
            row.socket,
            f"{row.cases:,}",
            f"{row.seconds:.0f}",
            *(f"{one / 2**20:.0f}" for one in (row.before_bytes, row.peak_bytes, row.after_bytes)),
            *(f"{percentile(row.calls_ms, share):.2f}" for share in (0.5, 0.99)),
            str(row.handoffs),
            "FAILED" if row.troubles else "ok",
        )
        for row in rows
    ]
    found = [f"{row.socket}: {what}" for row in rows for what in row.troubles]
    return show(Figures(f"ZMTP besieged, seed {seed}", head, lines, found))


def main() -> int:
    parser = argparse.ArgumentParser(description="Besiege ZMTP itself on every socket.")
    parser.add_argument("--cases", type=int, default=3000, help="for each socket")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--socket", default="", help="only those whose name begins so")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    chosen = parser.parse_args()
    say(f"seed {chosen.seed}")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in SOCKETS:
            if name.startswith(chosen.socket):
                rows.append(besiege(name, Path(directory), chosen.cases, chosen.seed))
                say(f"{name}: {'FAILED' if rows[-1].troubles else 'ok'}")
    say(table(rows, chosen.seed))
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.encode(rows))
    return int(any(row.troubles for row in rows))


if __name__ == "__main__":
    sys.exit(main())
