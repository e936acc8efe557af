"""A systemd that really runs, as the first process of a guest of its own, and kvd installed in it.

The guest sees the host's files through an overlay, so what it writes is forgotten with it, and the
interpreter, its packages and this checkout at paths where a service can reach them. Its sockets
and files are seen from here below ``Guest.root``. Its cgroups have no controllers: limits of memory
and processor are accepted and do nothing there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE: Final = Path(__file__).parent
CHECKOUT: Final = HERE.parents[1]
SYSTEMD: Final = Path("/lib/systemd/systemd")
NAMESPACES: Final = ("--mount", "--uts", "--ipc", "--pid", "--net", "--cgroup", "--fork")

HOME: Final = Path("/opt/kvd")
PYTHON: Final = HOME / "venv" / "bin" / "python"
"""Of the guest; has kvd and all that it needs, and lies where user kvd can reach it."""

ENVIRONMENT: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}

BOOT_S: Final = 20.0
DOWN_S: Final = 10.0
RUN_S: Final = 30.0
LOOK_EVERY_S: Final = 0.02
POWER_OFF: Final = signal.SIGRTMIN + 4


def reason_not_to() -> str:
    """Why no guest can be had here; empty if one can."""
    if os.geteuid() != 0:
        return "only root can boot a systemd"
    missing = [one for one in ("unshare", "nsenter", "setpriv", "ip") if shutil.which(one) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not SYSTEMD.exists():
        return f"there is no {SYSTEMD}"
    if "\tcgroup2\n" not in Path("/proc/filesystems").read_text("ascii"):
        return "this kernel has no cgroup2"
    if "\toverlay\n" not in Path("/proc/filesystems").read_text("ascii"):
        return "this kernel has no overlay file system"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class Guest:
    """One booted systemd; ``pid`` is its first process as this host counts."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.root = Path(f"/proc/{pid}/root")

    def path(self, inside: str | Path) -> Path:
        """Where a file of the guest is seen from here."""
        return self.root / Path(inside).relative_to("/")

    def run(
        self, *argv: str | Path, check: bool = True, within_s: float = RUN_S, user: str = "root"
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside; its failure fails the test unless ``check`` is off."""
        done = subprocess.run(
            self._command(argv, user),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
            env=ENVIRONMENT,
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def _command(self, argv: tuple[str | Path, ...], user: str) -> list[str]:
        enter = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        return [*enter, "--", *(become if user != "root" else ()), *map(str, argv)]

    def kvd(
        self, *argv: str, check: bool = True, user: str = "root"
    ) -> subprocess.CompletedProcess[str]:
        """Run the ``kvd`` command inside."""
        return self.run(PYTHON, "-P", "-m", "kvd", *argv, check=check, user=user)

    def engine(self, *argv: str, user: str = "engine") -> Any:
        """What ``tests.systemd.engine`` answers inside."""
        done = self.run(PYTHON, "-P", "-m", "tests.systemd.engine", *argv, user=user)
        return json.loads(done.stdout)

    @contextlib.contextmanager
    def running_engine(self, *argv: str) -> Iterator[Callable[[], Any]]:
        """An engine that lives as long as this, once it is ready; what is given has it answer."""
        command = (PYTHON, "-P", "-m", "tests.systemd.engine", *argv)
        with subprocess.Popen(
            self._command(command, "engine"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            to, answers = process.stdin, process.stdout
            try:
                json.loads(answers.readline())

                def ask() -> Any:
                    to.write("\n")
                    to.flush()
                    return json.loads(answers.readline())

                yield ask
            finally:
                to.close()
                try:
                    process.wait(RUN_S)
                finally:
                    process.kill()

    def systemctl(self, *argv: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *argv, check=check).stdout

    def drop_in(self, unit: str, text: str) -> None:
        """Give a unit a drop-in of its own."""
        file = self.path(f"/run/systemd/system/{unit}.d/test.conf")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.systemctl("daemon-reload")

    def show(self, unit: str, name: str) -> str:
        return self.systemctl("show", "-P", name, unit).strip()

    def journal(self, unit: str) -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout

    def until(self, is_so: Callable[[], bool], what: str, within_s: float = 10.0) -> None:
        """Look until ``is_so()``: for what systemd does on its own."""
        deadline_s = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < deadline_s, f"{what}: not within {within_s:g} s"
            time.sleep(LOOK_EVERY_S)

    def is_up(self) -> bool:
        """Whether it has booted."""
        if not self.path("/run/systemd/private").is_socket():
            return False
        asked = self.run("systemctl", "is-active", "-q", "guest.target", check=False)
        return asked.returncode == 0


@contextlib.contextmanager
def booted(state: Path) -> Iterator[Guest]:
    """A guest, as long as this lasts; ``state`` is an empty directory for it."""
    with _cgroup(state) as cgroup:
        (state / "console").touch()
        process = _launch(state, cgroup)
        try:
            guest = _risen(state, process)
            _furnish(guest)
            yield guest
        finally:
            _end(state, process)


def _launch(state: Path, cgroup: Path) -> subprocess.Popen[bytes]:
    """Start the guest; it ends with this process at the latest."""
    shown = [word for pair in _shown() for word in map(str, pair)]
    enter = f'echo $$ >"{cgroup}/cgroup.procs" && exec "$@"'
    unshare = ["unshare", *NAMESPACES, "--kill-child=SIGKILL", "--propagation", "private"]
    with (state / "console").open("ab") as console:
        return subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "bash", "-c", enter, "guest"),
                *(*unshare, "bash", HERE / "inside.sh", state, *shown),
            ],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _shown() -> list[tuple[Path, Path]]:
    """What the guest sees where a service can reach it: checkout, packages, interpreter."""
    shown = [
        (CHECKOUT, HOME / "checkout"),
        (Path(sysconfig.get_path("purelib")), HOME / "packages"),
    ]
    base = Path(sys.base_prefix)
    return shown if base == Path("/usr") else [*shown, (base, HOME / "python")]


def _risen(state: Path, process: subprocess.Popen[bytes]) -> Guest:
    deadline_s = time.monotonic() + BOOT_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            guest = Guest(int((state / "pid").read_text("ascii")))
            if guest.is_up():
                return guest
        said = (state / "console").read_text(errors="replace")
        assert process.poll() is None, f"the guest has ended\n{said}"
        assert time.monotonic() < deadline_s, f"the guest has not booted\n{said}"
        time.sleep(LOOK_EVERY_S)


def _furnish(guest: Guest) -> None:
    """An environment as ``python -m venv`` makes it, with the packages of this one."""
    base = Path(sys.base_prefix)
    home = (base if base == Path("/usr") else HOME / "python") / "bin"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    inside = guest.path(PYTHON.parent.parent)
    site = inside / "lib" / f"python{version}" / "site-packages"
    site.mkdir(parents=True)
    (inside / "bin").mkdir()
    (inside / "bin" / "python").symlink_to(home / f"python{version}")
    (inside / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    if any((base / "lib").glob("libpython*.so*")):
        # It names the directory that it was built for, which a service may not be able to read.
        guest.path("/etc/ld.so.conf.d/00-kvd.conf").write_text(f"{HOME / 'python' / 'lib'}\n")
        guest.run("ldconfig")
    (site / "kvd.pth").write_text(f"{HOME / 'checkout'}\n{HOME / 'packages'}\n")


def _end(state: Path, process: subprocess.Popen[bytes]) -> None:
    """Power it off; what does not heed that is killed with all that runs in it."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((state / "pid").read_text("ascii")), POWER_OFF)
    try:
        process.wait(DOWN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(DOWN_S)


@contextlib.contextmanager
def _cgroup(state: Path) -> Iterator[Path]:
    """A cgroup of our own, removed in the end; what a killed run has left is removed first."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    places = [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"]
    with contextlib.ExitStack() as undo:
        if not places:
            places = [state / "cgroup2"]
            places[0].mkdir()
            subprocess.run(["mount", "-t", "cgroup2", "cgroup2", places[0]], check=True)
            undo.callback(subprocess.run, ["umount", places[0]], check=True)
        for left in places[0].glob("kvd-guest-*"):
            if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
                _remove(left)
        own = places[0] / f"kvd-guest-{os.getpid()}"
        own.mkdir()
        undo.callback(_remove, own)
        yield own


def _remove(cgroup: Path) -> None:
    """A cgroup can be removed when nobody is in it, children first."""
    deadline_s = time.monotonic() + DOWN_S
    while cgroup.exists():
        for directory, _, _ in os.walk(cgroup, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        if time.monotonic() > deadline_s:
            return
        if cgroup.exists():
            time.sleep(LOOK_EVERY_S)
