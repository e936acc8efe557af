"""The files that make kvd a service: templates from ``systemd/``, filled in and signed.

What lives here: which file goes where and what is in it, as data. What must not: writing any of
them.

Every file ends with a checksum of itself, so that a later install can tell a file of its own from
one that somebody has changed or made. Only the configuration has none: it belongs to the operator
from the beginning.
"""

from __future__ import annotations

import enum
import hashlib
import re
from pathlib import Path
from typing import Final

import msgspec

import kvd
from kvd.config import render

UNITS: Final = Path("/etc/systemd/system")
CONFIG: Final = Path("/etc/kvd/kvd.toml")
PEER_SECRET: Final = Path("/etc/kvd/peer.secret")
SYSUSERS: Final = Path("/etc/sysusers.d/kvd.conf")
TMPFILES: Final = Path("/etc/tmpfiles.d/kvd.conf")

NEWER: Final = 254
"""The version of systemd whose keys go into a drop-in of their own: older ones warn of them."""

_SIGNATURE = re.compile(r"# kvd systemd install wrote this; sha256 ([0-9a-f]{64})\n\Z")

SERVICE_VALUES: Final[dict[str, str]] = {
    "sockets.client": "ipc:///run/kvd/client.sock",
    "sockets.admin": "ipc:///run/kvd/admin.sock",
    "pool.backing": "shm",
    "recorder.directory": "/var/lib/kvd/recordings",
}
"""What the configuration of a service says where the defaults suit a daemon started by hand."""


class Choices(msgspec.Struct, frozen=True):
    """What differs between hosts; ``systemd`` is its version, 0 if that is not known."""

    python: Path
    user: str
    systemd: int
    has_peer_key: bool


class File(msgspec.Struct, frozen=True):
    """One file to be written; ``path`` is where it lies on the host that it is for."""

    path: Path
    text: str


class FileOrigin(enum.Enum):
    """Whose a file is."""

    OURS = "ours"
    EDITED = "edited"
    """Written by an install and changed since."""
    FOREIGN = "foreign"


def origin_of(text: str) -> FileOrigin:
    """Whose text this is, by its last line."""
    found = _SIGNATURE.search(text)
    if found is None:
        return (
            FileOrigin.FOREIGN
            if "kvd systemd install wrote this" not in text
            else FileOrigin.EDITED
        )
    return FileOrigin.OURS if _sum(text[: found.start()]) == found[1] else FileOrigin.EDITED


def files(choices: Choices) -> tuple[File, ...]:
    """Everything that is kvd's on such a host, but for the configuration."""
    where = {
        UNITS / "kvd.service": _unit("kvd.service", "kvd", "kvd"),
        UNITS / "kvd@.service": _unit("kvd@.service", "kvd-%i", "kvd@%i"),
        UNITS / "kvd.socket": _template("kvd.socket"),
        UNITS / "kvd.service.d" / "cma.conf.example": _template("cma.conf"),
        SYSUSERS: _template("sysusers.conf"),
        TMPFILES: _template("tmpfiles.conf"),
    }
    if choices.has_peer_key:
        where[UNITS / "kvd.service.d" / "10-peer-key.conf"] = _template("peer-key.conf")
    if choices.systemd >= NEWER:
        for unit in ("kvd.service.d", "kvd@.service.d"):
            where[UNITS / unit / "10-systemd-254.conf"] = _template("systemd-254.conf")
    marks = {"@PYTHON@": _in_a_unit(choices.python), "@USER@": choices.user}
    return tuple(File(path, signed(_filled(text, marks))) for path, text in where.items())


def all_paths() -> tuple[Path, ...]:
    """Every file that any install writes, but for the configuration."""
    most = Choices(Path("/python"), user="kvd", systemd=NEWER, has_peer_key=True)
    return tuple(file.path for file in files(most))


def configuration() -> File:
    """The configuration of a service: the commented example, with what suits a service."""
    return File(CONFIG, render.example(SERVICE_VALUES))


def signed(text: str) -> str:
    """With the line that ``origin_of`` reads."""
    body = f"{text}\n"
    return f"{body}# kvd systemd install wrote this; sha256 {_sum(body)}\n"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unit(name: str, runtime: str, unit: str) -> str:
    """A service with what all of them share."""
    common = _filled(_template("common.conf"), {"@NAME@": runtime, "@UNIT@": unit})
    return _template(name).replace("@COMMON@\n", common)


def _filled(text: str, marks: dict[str, str]) -> str:
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def _in_a_unit(path: Path) -> str:
    """A path as ExecStart= takes it: % and $ are special there."""
    return str(path).replace("%", "%%").replace("$", "$$")


def _template(name: str) -> str:
    return (_templates() / name).read_text("utf-8")


def _templates() -> Path:
    """Inside the installed package, or beside it in a checkout."""
    package = Path(kvd.__file__).parent
    inside = package / "_systemd"
    return inside if inside.is_dir() else package.parent / "systemd"
