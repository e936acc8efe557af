"""A check of ``kvd doctor`` in a child process that was made worse off: limits, user, clock.

The child is a fork, so that it needs nothing of the file system to begin, and this process keeps
what it has.
"""

from __future__ import annotations

import codecs
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd.cli.doctor.finding import DoctorFinding, Subject
from kvd.config import load

if TYPE_CHECKING:
    from collections.abc import Callable

NOBODY = 65534


def subject(*sets: str, root: Path = Path("/"), **environ: str) -> Subject:
    """The defaults, with some values and variables of a test's own."""
    config = load(Path(os.devnull), {}, sets)
    assert not isinstance(config, list), config
    return Subject(config, environ, root)


def in_child(
    spoil: Callable[[], object], check: Callable[[Subject], list[DoctorFinding]], about: Subject
) -> dict[str, DoctorFinding]:
    """What ``check`` finds after ``spoil``, by check; neither reaches this process."""
    there, here = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            spoil()
            os.write(here, msgspec.json.encode(check(about)))
        except BaseException:  # noqa: BLE001 - a fork must not go on as pytest
            os.write(here, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(here)
    with os.fdopen(there, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    assert text.startswith(b"["), text.decode() or "the child died"
    return {one.check: one for one in msgspec.json.decode(text, type=list[DoctorFinding])}


def nobody() -> None:
    """Be a user without rights, and without any group."""
    # A name of a host takes this codec, whose file such a user may not be able to read.
    codecs.lookup("idna")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def write(root: Path, **files: str) -> None:
    """Files below ``root``; ``__`` in a name is a ``/``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
