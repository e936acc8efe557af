"""``kvd systemd``: make kvd a service of this host, or no longer.

An install may be repeated: it says of every file what it did, and a second one does nothing. What
somebody else wrote or changed is never lost. Whether a service can work here is ``systemd_reach``.

The files are templates from ``systemd/``, filled in. Every file ends with a checksum of itself, so
that a later install can tell a file of its own from one that somebody has changed or made. Only the
configuration has none: it belongs to the operator from the beginning.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

import kvd
from kvd.cli import systemd_reach
from kvd.cli.doctor.service import VENV
from kvd.cli.exits import VerbFailed
from kvd.cli.lazy import LazyGroup, Verb
from kvd.config import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BOOTED: Final = Path("/run/systemd/system")
"""There only if systemd is the first process, as sd_booted(3) says."""
RUN_S: Final = 60.0
UNIT_PATTERNS: Final = ("kvd.service", "kvd@*.service", "kvd.socket")
EDITED: Final = ".edited"
"""Of a file that was changed by hand: systemd reads none of that name."""

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_LIBRARY = re.compile(r"libsystemd-shared-(\d+)")


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
    "cache.epochs_directory": "/var/lib/kvd",
    "recorder.directory": "/var/lib/kvd/recordings",
}
"""What the configuration of a service says where the defaults suit a daemon started by hand."""


@click.group(
    "systemd",
    cls=LazyGroup,
    verbs={
        "install": Verb("kvd.cli.systemd:install", "Write the units, and what they need."),
        "uninstall": Verb("kvd.cli.systemd:uninstall", "Remove what install wrote."),
    },
)
def systemd_group() -> None:
    """Make kvd a service of this host, or no longer."""


def _where(verb: Callable[..., None]) -> Callable[..., None]:
    """The options that both verbs have."""
    root = click.option(
        "--root",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Of the system in DIR, an image or a container; runs nothing.",
    )
    dry_run = click.option("--dry-run", is_flag=True, help="Only say what would be done.")
    return root(dry_run(verb))


@click.command("install")
@_where
@click.option("--user", default="kvd", show_default=True, help="Whom the daemon runs as.")
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The interpreter that the units run kvd with, if not the one that runs this.",
)
def install(*, root: Path | None, dry_run: bool, user: str, python: Path | None) -> None:
    """Write units, user, directories and a first configuration; repeat it after an upgrade.

    Writes kvd.service, kvd@.service for several daemons on one host, and kvd.socket. Says of every
    file what is done with it. A configuration that is there stays as it is, and a file that was
    changed by hand is kept beside the new one, as FILE.edited. Nothing is enabled or started.
    """
    top = root if root is not None else Path("/")
    choices = Choices(
        python=Path(sys.executable if python is None else python).absolute(),
        user=user,
        systemd=_version(root),
        has_peer_key=_lexists(top, PEER_SECRET),
    )
    wanted = files(choices)
    _refuse([*_flaws(root, choices), *_in_the_way(top, wanted)], is_dry=dry_run)
    changes = _Changes(top, is_dry=dry_run)
    for file in wanted:
        changes.put(file)
    due = {file.path for file in wanted}
    for path in all_paths():
        if path not in due:
            changes.remove(path)
    changes.put_if_missing(configuration())
    if root is None:
        _run(["systemd-sysusers", str(SYSUSERS)], is_dry=dry_run)
        _run(["systemd-tmpfiles", "--create", str(TMPFILES)], is_dry=dry_run)
        _run(["systemctl", "daemon-reload"], is_dry=dry_run)
    click.echo(_next(choices))


@click.command("uninstall")
@_where
def uninstall(*, root: Path | None, dry_run: bool) -> None:
    """Remove what install wrote. Configuration, keys, recordings and the user stay.

    A daemon that runs is not stopped: stop it first. The memory of its pool stays too, until kvd
    drop.
    """
    top = root if root is not None else Path("/")
    if root is None:
        # Units of kvd that have been enabled, or might be.
        units = ["systemctl", "list-unit-files", "--no-legend", "--plain", *UNIT_PATTERNS]
        _refuse([*_cannot_be_here(), *_running()], is_dry=dry_run)
        _run(["systemctl", "disable", *(line.split()[0] for line in _ask(units))], is_dry=dry_run)
    changes = _Changes(top, is_dry=dry_run)
    for path in all_paths():
        changes.remove(path)
    if root is None:
        _run(["systemctl", "daemon-reload"], is_dry=dry_run)
    places = ("/etc/kvd", "/var/lib/kvd", "/run/kvd")
    left = [place for place in places if _lexists(top, Path(place))]
    click.echo(f"left in place: {', '.join([*left, 'the user and its group'])}")


class _Changes:
    """Writes and removes below ``top``, and says so; a dry one only says so."""

    def __init__(self, top: Path, *, is_dry: bool) -> None:
        self._top = top
        self._is_dry = is_dry

    def put(self, file: File) -> None:
        """Make the file what it should be; what somebody changed in it is kept beside it."""
        target = _below(self._top, file.path)
        before = _text(target)
        if before == file.text:
            click.echo(f"unchanged  {target}")
            return
        if before is None:
            click.echo(f"new        {target}")
        else:
            click.echo(f"changed    {target}")
            for line in difflib.unified_diff(
                before.splitlines(), file.text.splitlines(), n=0, lineterm=""
            ):
                if not line.startswith(("---", "+++", "@@")) and "sha256" not in line:
                    click.echo(f"           {line}")
            if origin_of(before) is FileOrigin.EDITED:
                kept = target.with_name(target.name + EDITED)
                click.echo(f"kept       {kept}: the changes made by hand; a drop-in would stay")
                self._write(kept, before)
        self._write(target, file.text)

    def put_if_missing(self, file: File) -> None:
        """Write it only where there is none."""
        target = _below(self._top, file.path)
        if os.path.lexists(target):
            click.echo(f"kept       {target}: yours")
            return
        click.echo(f"new        {target}")
        self._write(target, file.text)

    def remove(self, path: Path) -> None:
        """Remove it if it is as it was written, and its directory if that is empty then."""
        target = _below(self._top, path)
        before = _text(target)
        if before is None:
            return
        if origin_of(before) is not FileOrigin.OURS:
            click.echo(f"left       {target}: not as kvd wrote it; remove it yourself")
            return
        click.echo(f"removed    {target}")
        if not self._is_dry:
            target.unlink()
            with contextlib.suppress(OSError):
                if target.parent.name.endswith(".d") and "systemd" in target.parts:
                    target.parent.rmdir()

    def _write(self, target: Path, text: str) -> None:
        """In one step: a reader sees the old file or the new one."""
        if self._is_dry:
            return
        try:
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            fresh = target.with_name(f".{target.name}.new")
            fresh.write_text(text, "utf-8")
            fresh.chmod(0o644)
            fresh.replace(target)
        except OSError as error:
            raise VerbFailed(f"{target} could not be written: {error.strerror}") from error


def _flaws(root: Path | None, choices: Choices) -> list[str]:
    """Why an install would not work; of another system only what its name tells."""
    found = [] if _USER.fullmatch(choices.user) else [f"{choices.user!r} is no name of a user"]
    if root is not None:
        return found
    user = systemd_reach.user_called(choices.user)
    unreachable = [
        f"{flaw}. Install kvd where a service can reach it: /usr/bin/python3 -m venv {VENV} && "
        f"{VENV}/bin/pip install -c constraints.txt 'kvd[daemon]' && {VENV}/bin/kvd systemd install"
        for flaw in systemd_reach.flaws(choices.python, user)[:1]
    ]
    return [*found, *_cannot_be_here(), *unreachable]


def _cannot_be_here() -> list[str]:
    """Why this process cannot change the services of this host."""
    if not BOOTED.is_dir():
        first = _text(Path("/proc/1/comm")) or "unknown"
        return [
            f"systemd does not run this host: its first process is {first.strip()}; --root DIR "
            "works on the files of another system, and kvd serve runs without any"
        ]
    return [] if os.geteuid() == 0 else ["only root can write to /etc: use sudo"]


def _in_the_way(top: Path, wanted: Iterable[File]) -> list[str]:
    """Files that somebody else has put where ours belong."""
    return [
        f"{target} is not kvd's: move it away"
        for target in (_below(top, file.path) for file in wanted)
        if (text := _text(target)) is not None and origin_of(text) is FileOrigin.FOREIGN
    ]


def _refuse(flaws: list[str], *, is_dry: bool) -> None:
    """End with every flaw, one a line; a dry run only shows them."""
    if not flaws:
        return
    if not is_dry:
        raise VerbFailed("nothing was changed:\n" + "\n".join(flaws))
    for flaw in flaws:
        click.echo(f"would be refused: {flaw}")


def _running() -> list[str]:
    """The units of kvd that are up."""
    states = ("--state=active,activating,reloading,deactivating", "--plain", "--no-legend")
    units = [line.split()[0] for line in _ask(["systemctl", "list-units", *states, *UNIT_PATTERNS])]
    if not units:
        return []
    return [f"still up: {' '.join(units)}: systemctl disable --now {' '.join(units)}"]


def _ask(command: list[str]) -> list[str]:
    """The lines that a command prints."""
    return [line for line in _done(command).stdout.splitlines() if line.strip()]


def _done(command: list[str], advice: str = "") -> subprocess.CompletedProcess[str]:
    """A command that has ended, well or not.

    Raises:
        VerbFailed: it cannot be run.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VerbFailed(f"{' '.join(command)}: {error}{advice}") from error


def _run(command: list[str], *, is_dry: bool) -> None:
    """Run it and say so.

    Raises:
        VerbFailed: it failed; the message quotes it.
    """
    shown = " ".join(command)
    click.echo(f"{'would run' if is_dry else 'run':<10} {shown}")
    if is_dry:
        return
    done = _done(command, "; the files are in place, run it yourself")
    if done.returncode != 0:
        raise VerbFailed(f"{shown} ended with {done.returncode}: {done.stderr.strip()}")


def _version(root: Path | None) -> int:
    """Of systemd here, or of the one installed in ``root``; 0 if there is none to be seen."""
    if root is not None:
        places = ("lib/systemd", "usr/lib/systemd", "usr/lib/*/systemd")
        names = (
            found.name for place in places for found in root.glob(f"{place}/libsystemd-shared-*")
        )
        return max((int(match[1]) for name in names if (match := _LIBRARY.match(name))), default=0)
    with contextlib.suppress(VerbFailed):
        for line in _ask(["systemctl", "--version"])[:1]:
            found = re.match(r"systemd (\d+)", line)
            return int(found[1]) if found is not None else 0
    return 0


def _next(choices: Choices) -> str:
    """What is for the operator to do now."""
    lines = [
        f"next: edit {CONFIG}, kvd config check, systemctl enable --now kvd",
        f"engines and operators join the group {choices.user}: usermod -aG {choices.user} NAME",
    ]
    if not choices.has_peer_key:
        lines.append("for peers on other hosts: kvd keygen, then kvd systemd install again")
    return "\n".join(lines)


def _below(top: Path, path: Path) -> Path:
    return top / path.relative_to("/")


def _lexists(top: Path, path: Path) -> bool:
    return os.path.lexists(_below(top, path))


def _text(path: Path) -> str | None:
    """What the file says; None if there is none."""
    try:
        return path.read_text("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


# ---- the files -----------------------------------------------------------------------------------


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
    """Who wrote what stands in a file that ``install`` would write."""

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
    # As ExecStart= takes it: % and $ are special there.
    python = str(choices.python).replace("%", "%%").replace("$", "$$")
    marks = {"@PYTHON@": python, "@USER@": choices.user}
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


def _template(name: str) -> str:
    """Inside the installed package, or beside it in a checkout."""
    package = Path(kvd.__file__).parent
    inside = package / "_systemd"
    folder = inside if inside.is_dir() else package.parent / "systemd"
    return (folder / name).read_text("utf-8")
