"""Checks of ``kvd doctor`` that look at the service: is the unit there, and how is it doing?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.cli.doctor.finding import DoctorFinding, Subject, good, poor, wrong
from kvd.cli.exits import Unreachable
from kvd.cli.link import CALL, Target, ask
from kvd.cli.systemd_reach import flaws, user_called
from kvd.config.address import ipc_path
from kvd.text import clean
from kvd.wire.admin import ShowStatus, Status

if TYPE_CHECKING:
    from kvd.wire.snapshot import Snapshot

UNIT = "kvd.service"
SERVICE_USER = "kvd"
ASK_S = 3.0
PROPERTIES = (
    "LoadState,ActiveState,SubState,Result,UnitFileState,User,NeedDaemonReload,WatchdogUSec,"
    "FileDescriptorStoreMax,NFileDescriptorStore,NRestarts,LimitMEMLOCK,LimitNOFILE"
)
ANSWER_S = 0.5
"""For a daemon of this host."""
INFINITE = {"infinity", "18446744073709551615"}
VENV = "/opt/kvd/venv"
_EDIT = "systemctl edit kvd"


def running(subject: Subject) -> Snapshot | None:
    """What the running daemon says of itself; None where none runs."""
    endpoint = subject.config.sockets.admin
    path = ipc_path(endpoint)
    if path is None or not os.path.exists(path):  # or this user cannot look there
        return None
    try:
        return ask(Target(endpoint, ANSWER_S), ShowStatus(CALL), Status).snapshot
    except Unreachable:
        return None


def late_marks(subject: Subject) -> list[DoctorFinding]:
    """Whether copies of engines wait for what those compute first, as the running daemon knows."""
    shot = running(subject)
    if shot is None or not shot.late_marks:
        return []
    oldest = max(shot.late_marks, key=lambda mark: mark.waited_s)
    fix = f"look whether its device computes or hangs; kvd why client {oldest.session} says more"
    return [poor("marks", clean(oldest.words), fix)]


def outlived(subject: Subject) -> list[DoctorFinding]:
    """Engines that are gone and whose pages other processes keep, as the running daemon knows."""
    shot = running(subject)
    return [
        poor(
            "engines",
            clean(f"{client.held_pages} pages of {client.name} are kept by {client.outlived}"),
            f"stop it, unless it still works for {clean(client.name)}; kvd why client "
            f"{client.session} says more",
        )
        for client in (shot.clients if shot is not None else ())
        if client.outlived
    ]


def service(subject: Subject) -> list[DoctorFinding]:
    """What systemd says of the unit, where systemd runs this host."""
    if not subject.has_systemd:
        return [good("systemd", "does not run this host: kvd serve is started by hand")]
    try:
        asked = subprocess.run(
            ["systemctl", "show", UNIT, "--property", PROPERTIES],
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except FileNotFoundError:
        fix = "run kvd doctor on the host itself, outside of a container"
        return [poor("systemd", "runs this host, but there is no systemctl here", fix)]
    except subprocess.TimeoutExpired:
        fix = "see what systemd waits for: systemctl list-jobs"
        return [poor("systemd", f"has not answered within {ASK_S:.0f} s", fix)]
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        return [poor("systemd", f"cannot be asked: {clean(last)}", f"systemctl status {UNIT}")]
    return judge(subject, read_properties(asked.stdout))


def read_properties(text: str) -> dict[str, str]:
    """Lines of ``systemctl show`` as a table."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key: value for key, _, value in pairs if key}


def judge(subject: Subject, unit: dict[str, str]) -> list[DoctorFinding]:
    """What is to be said of a unit with these properties."""
    if unit.get("LoadState") != "loaded":
        state = unit.get("LoadState", "unknown")
        what = f"{UNIT} is not installed ({state}): nothing starts kvd again"
        return [poor("service", what, "kvd systemd install && systemctl enable --now kvd")]
    out = [_state(unit)]
    if unit.get("NeedDaemonReload") == "yes":
        what = "its files have changed since systemd read them"
        out.append(poor("service files", what, "systemctl daemon-reload && systemctl restart kvd"))
    if unit.get("WatchdogUSec", "0") in {"0", "infinity"}:
        what = "off: a daemon that hangs is not restarted"
        out.append(poor("watchdog", what, f"{_EDIT}, and write [Service] WatchdogSec=20s"))
    if unit.get("FileDescriptorStoreMax", "0") == "0":
        what = "no room for descriptors: memory in the store would not outlive the daemon"
        fix = f"{_EDIT}, and write [Service] FileDescriptorStoreMax=512"
        make = wrong if subject.config.pool.backing == "fdstore" else poor
        out.append(make("fd store", what, fix))
    if subject.rdma and unit.get("LimitMEMLOCK") not in INFINITE:
        what = f"LimitMEMLOCK={unit.get('LimitMEMLOCK')}, and an RDMA device pins the pool"
        fix = f"{_EDIT}, and write [Service] LimitMEMLOCK=infinity"
        out.append(poor("service memlock", what, fix))
    return out


def _state(unit: dict[str, str]) -> DoctorFinding:
    state, sub = unit.get("ActiveState", ""), unit.get("SubState", "")
    user = unit.get("User") or "root"
    if state == "failed":
        what = f"{UNIT} has failed: {unit.get('Result', 'no reason given')}"
        return wrong("service", what, "journalctl -u kvd -n 50, then: systemctl restart kvd")
    if state in {"inactive", "deactivating"}:
        what = f"{UNIT} is installed, and {state} ({sub})"
        return poor("service", what, "systemctl enable --now kvd")
    restarts = unit.get("NRestarts", "0")
    kept = f"{unit.get('NFileDescriptorStore', '0')} of {unit.get('FileDescriptorStoreMax', '0')}"
    what = f"{state} ({sub}), user {user}, {restarts} restarts, {kept} stored descriptors"
    if unit.get("UnitFileState") == "disabled":
        fix = "systemctl enable kvd"
        return poor("service", f"{what}; it does not start at boot", fix)
    return good("service", what)


def interpreter(subject: Subject) -> list[DoctorFinding]:
    """Whether a service under a user of its own could start this Python at all."""
    if not subject.has_systemd:
        return []
    found = flaws(Path(sys.executable), user_called(SERVICE_USER))
    if not found:
        what = f"{sys.executable} can be started by a service of user {SERVICE_USER}"
        return [good("interpreter", what)]
    fix = (
        f"/usr/bin/python3 -m venv {VENV} && "
        f"{VENV}/bin/pip install -c constraints.txt '.[daemon]' && {VENV}/bin/kvd systemd install"
    )
    return [poor("interpreter", f"no service: {'; '.join(found)}", fix)]
