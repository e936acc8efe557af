"""Figures and strings for people. Pure: nothing here prints.

Strings that came from a daemon are hostile: names of clients and peers are chosen by others.
Whoever prints one passes it through ``clean`` first.
"""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvd.wire.snapshot import RoomState

_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("B", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_PLAIN_COUNT = 99_999
_BAR = (("held", "H"), ("cached", "C"), ("quarantined", "Q"))


def clean(text: str) -> str:
    """``text`` with everything that could steer a terminal written out as its escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    """A character that takes up space, or its escape: controls, formats, surrogates, breaks."""
    if char == " " or unicodedata.category(char)[0] not in "CZ":
        return char
    return char.encode("unicode_escape").decode("ascii")


def endpoint_flaw(text: str) -> str | None:
    """Why ``text`` cannot be where operators are heard, and what to write; None if it can."""
    if text.startswith("ipc://") and len(text) > len("ipc://"):
        return None
    return (
        f"{text!r} names no unix socket, and operators are heard on nothing else; write "
        "ipc:///run/kvd/admin.sock (sockets.admin of the daemon), and for a daemon elsewhere run "
        "this command on its host"
    )


def counted(count: float, noun: str) -> str:
    """``1 page``, ``2 pages``: a figure and what it is a figure of; ``noun`` is the one of one."""
    return f"{count:.0f} {noun}" if count == 1 else f"{count:.0f} {noun}s"


def duration(seconds: float) -> str:
    """Seconds as an operator reads them: 0.34s, 12.0s, 3m05s, 2h07m, 4d03h."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 10:
        return f"{seconds:.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest_s:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02}h"


def age(seconds: float) -> str:
    """Seconds so that a column of them stays calm: 0.3s, 12s, 3m05s, 2h07m, 4d03h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0:
        return "0.0s" if seconds > -0.05 else f"-{age(-seconds)}"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    return duration(max(60.0, seconds))


def compact(value: float) -> str:
    """A count in at most five characters up to 999 thousand millions: 812, 99999, 812k, 4.10M."""
    if abs(value) <= _PLAIN_COUNT:
        return str(value) if isinstance(value, int) else f"{value:.3g}"
    return _scaled(value, 1000, _THOUSANDS)


def compact_bytes(value: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1, in six characters: 512B, 2.00Mi."""
    if abs(value) < 1024:
        return f"{value:.0f}B"
    return _scaled(value, 1024, _BINARY)


def bytes_per_second(value: float) -> str:
    """Bytes a second."""
    return f"{compact_bytes(value)}/s"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    scaled, at = float(value), 0
    while abs(scaled) >= step - 0.5 and at < len(units) - 1:
        scaled /= step
        at += 1
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f}{units[at]}"


def thousands(count: int) -> str:
    """A count of pages with its thousands set apart: ``1 015 808``."""
    return f"{count:,}".replace(",", " ")


def percent(part: float, whole: float) -> str:
    """At most four characters; 0 % and 100 % only where it is just that."""
    if whole <= 0:
        return "-"
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1%"
    if share > 100:
        return ">all"
    return f"{int(share + 1e-9)}%"


def lasting(seconds: float) -> str:
    """A duration, down to a hundredth of a millisecond."""
    if seconds < 0.01:
        return f"{1000 * seconds:.2f}ms"
    return f"{1000 * seconds:.0f}ms" if seconds < 1 else duration(seconds)


def room(number: int) -> str:
    """A room, or nothing where there is none."""
    return str(number) if number else "-"


def share(part: int, whole: int) -> str:
    """``part`` of ``whole``, with a percentage where that means something."""
    return f"{part}/{whole} {100 * part / whole:.0f}%" if whole else f"{part}/{whole}"


def progress(part: RoomState) -> str:
    """Pages of a handoff that are on their way or there, of all.

    The decode side posts nothing itself: there the bytes that arrived say how many pages did.
    """
    if part.side != "decode" or not part.total_bytes:
        return share(part.posted_pages, part.total_pages)
    return share(part.moved_bytes * part.total_pages // part.total_bytes, part.total_pages)


def bar(*, held: int, cached: int, quarantined: int, total: int, width: int = 24) -> str:
    """Pages as letters: H held, C cached, Q quarantined, . free. What exists shows."""
    parts = {"held": held, "cached": cached, "quarantined": quarantined}
    cells = ""
    for name, letter in _BAR:
        count = parts[name]
        if count and total:
            cells += letter * max(1, round(width * count / total))
    return cells[:width].ljust(width, ".")


def event_line(event: msgspec.Struct) -> str:
    """One event on one line: number, clock, name, then its fields."""
    fields = msgspec.structs.asdict(event)
    number, at_s = fields.pop("seq"), fields.pop("at_s")
    tag = type(event).__struct_config__.tag
    rest = " ".join(f"{name}={_value(value)}" for name, value in fields.items() if value != "")
    return f"{number:>8} {at_s:>12.3f}  {tag:<18} {rest}"


def _value(value: object) -> str:
    """One field; text with blanks is quoted so that the line can be taken apart again."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = clean(str(value))
    return f'"{text}"' if " " in text else text
