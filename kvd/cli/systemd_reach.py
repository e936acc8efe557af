"""Whether a service can run kvd from where it is installed: what would stop it, and the fix.

The unit hides home directories and /tmp, and its user is nobody's friend: an interpreter or a
package that root can run may be out of its reach. Everything here only looks.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
import subprocess
from pathlib import Path
from typing import Final

import msgspec

HIDDEN: Final = {
    "ProtectHome=yes": ("/home", "/root", "/run/user"),
    "PrivateTmp=yes": ("/tmp", "/var/tmp"),
}
"""Directories that the unit hides from the daemon, by the line that does it."""

ASK_S: Final = 20.0

_WHERE = (
    "import sys, json, kvd; "
    "print(json.dumps([sys.executable, sys.base_prefix, sys.prefix, kvd.__file__]))"
)


class User(msgspec.Struct, frozen=True):
    """Whom the service runs as; a user that does not exist yet is in no group of interest."""

    name: str
    uid: int = -1
    groups: frozenset[int] = frozenset()


def user_called(name: str) -> User:
    """The user of that name as this host knows it, or as sysusers will make it."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return User(name)
    member = {group.gr_gid for group in grp.getgrall() if name in group.gr_mem}
    return User(name, entry.pw_uid, frozenset({entry.pw_gid} | member))


def flaws(python: Path, user: User) -> list[str]:
    """Why ``user`` cannot run kvd by ``python`` as a service, a sentence each; empty if they can.

    Asks the interpreter itself, without this process's environment: the service has none of it.
    """
    try:
        asked = subprocess.run(
            [python, "-P", "-c", _WHERE],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
            cwd="/",
            env={"PATH": os.defpath},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{python} cannot be run: {error}"]
    if asked.returncode != 0:
        why = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [
            f"{python} does not find kvd by itself ({why}); a service has no PYTHONPATH: install "
            "kvd into that interpreter's environment"
        ]
    executable, base, prefix, package = json.loads(asked.stdout)
    found = [
        _flaw(what, Path(path), user)
        for what, path in {
            "the interpreter": executable,
            "the environment of the interpreter": prefix,
            "the installation that the interpreter belongs to": base,
            "the package kvd": package,
        }.items()
    ]
    return [flaw for flaw in dict.fromkeys(found) if flaw]


def _flaw(what: str, path: Path, user: User) -> str:
    """Why this path, as it is written or as it resolves, is out of reach; empty if it is not."""
    for spelling in dict.fromkeys((path, path.resolve())):
        for line, places in HIDDEN.items():
            for place in places:
                if spelling.is_relative_to(place):
                    return f"{what}, {spelling}, lies under {place}, which the unit hides ({line})"
        for directory in reversed(spelling.parents):
            if not _may_enter(directory, user):
                mode = stat.S_IMODE(directory.stat().st_mode)
                return (
                    f"{what}, {spelling}, lies under {directory}, which user {user.name} may not "
                    f"enter (mode {mode:04o}): chmod o+x {directory}"
                )
    return ""


def _may_enter(directory: Path, user: User) -> bool:
    """By its mode alone: access lists are not looked at."""
    found = directory.stat()
    if found.st_uid == user.uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid in user.groups:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)
