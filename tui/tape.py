r"""What a console saw, as a file: every look and its frame, and when it was heard.

    kvd-tui tape 1\n        the first line, so that ``head -1`` tells what it is
    kind, heard_s, length   13 bytes, little endian: u8, f64, u32
    payload                 MessagePack: ``RecordingHead`` first, then ``LookAndFrame``

Frames are changes to what was there. So every ``KEY_S`` all that the console has is written as if
it had just come (kind ``KEY``, then ``MORE`` until all is told): a player begins there. A file that
was cut off is good up to its last whole record. Nothing is read into memory but one record at a
time; of the file only the places of the keys are kept.

What must not live here: how fast it is played (``replay``).
"""

from __future__ import annotations

import math
import struct
import time
from typing import IO, TYPE_CHECKING

import msgspec

from kvd.wire.admin import Frame, Look
from kvd.wire.console import MAX_ROWS, EventQuery, MapQuery, Query
from tui.model.mirror import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tui.model.mirror import Mirror
    from tui.model.snapshots import DaemonSnapshot

VERSION = 1
TITLE = b"kvd-tui tape "
MAX_TAPE_BYTES = 256 * 2**20
MAX_RECORD_BYTES = 64 * 2**20
KEY_S = 15.0
EVERYTHING_S = 1.0
"""How often all tables are asked for while it is recorded, whatever is on the screen."""
MAP_CELLS = 4096

TABLES = (
    *("pools", "leases", "rooms", "peers", "clients", "waiting", "concerns"),
    *("tree", "locked", "orphans", "eviction"),
)
AT_ONCE = 4
"""Tables of one look: the daemon's loop is not kept longer than by a page."""

_RECORD = struct.Struct("<BdI")
HEAD, SHOT, KEY, MORE = range(4)
KINDS = (HEAD, SHOT, KEY, MORE)


class RecordingHead(msgspec.Struct, frozen=True):
    """Of what and when. ``wall_s`` is Unix time, ``heard_s`` our clock then."""

    node: str
    incarnation: str
    version: str
    wall_s: float
    heard_s: float


class LookAndFrame(msgspec.Struct, frozen=True, array_like=True):
    """What was asked and what came."""

    look: Look
    frame: Frame


_ENCODE = msgspec.msgpack.Encoder().encode
_SHOTS = msgspec.msgpack.Decoder(LookAndFrame)
_HEADS = msgspec.msgpack.Decoder(RecordingHead)


class BadRecording(msgspec.Struct, frozen=True):
    """Why a file cannot be written or played, in a sentence."""

    why: str


def everything(snapshot: DaemonSnapshot) -> list[Subscription]:
    """What shows every page: all tables, and the map of each component by state."""
    tables = [Query(name, limit=MAX_ROWS) for name in TABLES]
    made = [Subscription(tuple(tables[at : at + AT_ONCE])) for at in range(0, len(tables), AT_ONCE)]
    pools = snapshot.table(Query("pools", limit=MAX_ROWS))
    maps: list[MapQuery] = []
    for key in pools.order if pools is not None else ():
        assert pools is not None
        component, total = pools.cell(key, "component"), pools.cell(key, "total")
        if isinstance(component, str) and isinstance(total, int) and 0 < total < 2**40:
            each = max(1, -(-total // MAP_CELLS))
            maps.append(MapQuery(component, "state", pages_each=each, cells=MAP_CELLS))
    return [*made, Subscription(tuple(maps[:AT_ONCE]), EventQuery(0, limit=MAX_ROWS))]


class RecordingWriter:
    """Writes what a link hears. When the file is full, or cannot be written, it stops and says so.

    The file must not be there yet; only its owner may read it.
    """

    def __init__(
        self,
        file: IO[bytes],
        *,
        max_bytes: int = MAX_TAPE_BYTES,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.written_bytes = 0
        self.is_running = True
        self._file = file
        self._max_bytes = max_bytes
        self._wall_clock = wall_clock
        self._due: list[Subscription] = []
        self._asked_s = self._key_s = -math.inf
        self._flushed_s = -math.inf

    @classmethod
    def open(cls, path: Path, *, max_bytes: int = MAX_TAPE_BYTES) -> RecordingWriter | BadRecording:
        """Begin a file; why there can be none."""
        try:
            path.touch(mode=0o600, exist_ok=False)
            return cls(path.open("wb"), max_bytes=max_bytes)
        except OSError as exc:
            return BadRecording(f"nothing can be recorded to {path}: {exc.strerror}")

    def wants(self, mirror: Mirror, now_s: float) -> Subscription | None:
        """Once a second, one look after the other, all that any page may show."""
        if not self.is_running:
            return None
        if not self._due and now_s - self._asked_s >= EVERYTHING_S and mirror.vitals is not None:
            self._asked_s = now_s
            self._due = everything(mirror.snapshot())
        return self._due.pop(0) if self._due else None

    def write(self, look: Look, frame: bytes, heard_s: float, mirror: Mirror) -> None:
        """A frame has been taken by the mirror."""
        if not self.is_running:
            return
        try:
            self._write(look, frame, heard_s, mirror)
        except OSError as exc:
            self._stop(mirror, heard_s, f"it cannot be written: {exc.strerror}")

    def close(self) -> None:
        """End the file; repeatable. What could not be written is not there."""
        self.is_running = False
        try:
            self._file.close()
        except OSError:
            return

    def _write(self, look: Look, frame: bytes, heard_s: float, mirror: Mirror) -> None:
        if self.written_bytes:
            self._put(SHOT, heard_s, _ENCODE((look, msgspec.Raw(frame))))
        else:
            self._file.write(TITLE + f"{VERSION}\n".encode())
            self._put(HEAD, heard_s, _ENCODE(self._head(heard_s, mirror)))
        if heard_s - self._key_s >= KEY_S:
            self._key_s = heard_s
            for at, (asked, told) in enumerate(mirror.whole()):
                self._put(MORE if at else KEY, heard_s, _ENCODE(LookAndFrame(asked, told)))
        if heard_s - self._flushed_s >= 1.0:
            self._flushed_s = heard_s
            self._file.flush()
        if self.written_bytes >= self._max_bytes:
            self._stop(mirror, heard_s, f"it has {self.written_bytes >> 20} MiB, and gets no more")

    def _put(self, kind: int, heard_s: float, payload: bytes) -> None:
        self._file.write(_RECORD.pack(kind, heard_s, len(payload)))
        self._file.write(payload)
        self.written_bytes += _RECORD.size + len(payload)

    def _head(self, heard_s: float, mirror: Mirror) -> RecordingHead:
        seen = mirror.vitals
        assert seen is not None  # written after the mirror took a frame
        return RecordingHead(
            node=seen.node,
            incarnation=seen.incarnation,
            version=seen.version,
            wall_s=self._wall_clock(),
            heard_s=heard_s,
        )

    def _stop(self, mirror: Mirror, heard_s: float, why: str) -> None:
        self.close()
        mirror.note(heard_s, "tape", f"the recording has ended: {why}")


class RecordedFrame(msgspec.Struct, frozen=True):
    """One frame of a file. ``kind`` is ``SHOT``, ``KEY`` or ``MORE``."""

    kind: int
    heard_s: float
    shot: LookAndFrame


class RecordingFile:
    """A file to be played. ``trouble`` says what is wrong with its end; empty where nothing is."""

    def __init__(self, file: IO[bytes], head: RecordingHead, first: int) -> None:
        self.head = head
        self.trouble = ""
        self.end_s = head.heard_s
        self._file = file
        self._keys: list[tuple[float, int]] = []
        self._end = first
        self._index(first)
        file.seek(first)

    @classmethod
    def open(cls, path: Path) -> RecordingFile | BadRecording:
        """Find the keys of a file; why it cannot be played. Never raises."""
        try:
            file = path.open("rb")
        except OSError as exc:
            return BadRecording(f"{path} cannot be read: {exc.strerror}")
        try:
            made = cls._read(file, path)
        except OSError as exc:
            made = BadRecording(f"{path} cannot be read: {exc.strerror}")
        if isinstance(made, BadRecording):
            file.close()
        return made

    @classmethod
    def _read(cls, file: IO[bytes], path: Path) -> RecordingFile | BadRecording:
        title = file.readline(64)
        if not title.startswith(TITLE):
            return BadRecording(f"{path} was not written by kvd-tui --record")
        version = title[len(TITLE) :].strip()
        if version != str(VERSION).encode():
            told = version.decode("ascii", errors="replace")
            return BadRecording(
                f"{path} is a tape of version {told}, and this kvd-tui plays {VERSION}"
            )
        found = _record(file)
        try:
            head = _HEADS.decode(found[2]) if found is not None and found[0] == HEAD else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            head = None
        if head is None or not math.isfinite(head.heard_s):
            return BadRecording(f"{path} does not say what it is a tape of")
        made = cls(file, head, file.tell())
        return made if made._keys else BadRecording(f"{path} has no whole frame")

    @property
    def length_s(self) -> float:
        """From the first frame to the last."""
        return self.end_s - self.head.heard_s

    def seek(self, heard_s: float) -> None:
        """Go to the last key at or before a moment, or to the first one."""
        before = [place for at_s, place in self._keys if at_s <= heard_s]
        self._file.seek(before[-1] if before else self._keys[0][1])

    def next(self) -> RecordedFrame | None:
        """The next frame that can be read; None at the end. Never raises."""
        while self._file.tell() < self._end:
            found = _record(self._file)
            if found is None:
                break
            kind, heard_s, payload = found
            try:
                return RecordedFrame(kind, heard_s, _SHOTS.decode(payload))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self.trouble = f"the frame at {heard_s - self.head.heard_s:.1f} s cannot be read"
        return None

    def close(self) -> None:
        """Let go of the file; repeatable."""
        self._file.close()

    def _index(self, first: int) -> None:
        """Walk over the heads of all records; what cannot be one is the end."""
        place, size = first, self._file.seek(0, 2)
        last_s = self.head.heard_s
        while place + _RECORD.size <= size:
            self._file.seek(place)
            kind, heard_s, length = _RECORD.unpack(self._file.read(_RECORD.size))
            after = place + _RECORD.size + length
            if kind not in KINDS or not last_s <= heard_s < math.inf or after > size:
                break
            if kind == KEY:
                self._keys.append((heard_s, place))
            place, last_s = after, heard_s
        self._end, self.end_s = place, last_s
        if place < size:
            self.trouble = f"it breaks off after {self.length_s:.1f} s"


def _record(file: IO[bytes]) -> tuple[int, float, bytes] | None:
    """The next record; None where the file ends before it does."""
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    kind, heard_s, length = _RECORD.unpack(head)
    payload = file.read(length) if length <= MAX_RECORD_BYTES else b""
    return (kind, heard_s, payload) if len(payload) == length else None
