"""Checks of ``kvd doctor`` that look at who may do what: user, group, directories, device nodes."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
from pathlib import Path

from kvd.cli.finding import Finding, Subject, good, poor, wrong
from kvd.config.address import ipc_path
from kvd.text import amount


def user(subject: Subject) -> list[Finding]:
    """Who runs this, and whether the sockets can be given to the configured group."""
    uid = os.geteuid()
    name = _user_name(uid)
    group = subject.config.sockets.group
    if group is None:
        own = _group_name(os.getegid())
        return [good("user", f"{name} (uid {uid}); sockets belong to its group {own}")]
    try:
        entry = grp.getgrnam(group)
    except KeyError:
        what = f"{name} (uid {uid}); there is no group {group} to give the sockets to"
        return [wrong("user", what, f"groupadd --system {group}")]
    if uid != 0 and entry.gr_gid not in {os.getegid(), *os.getgroups()}:
        what = f"{name} (uid {uid}) is not in group {group}, so it cannot give the sockets to it"
        fix = f"usermod -aG {group} {name}, and log in anew; or remove sockets.group"
        return [wrong("user", what, fix)]
    members = _members(entry)
    if not members:
        what = f"nobody is in group {group}: only {name} and root can connect to the sockets"
        return [poor("user", what, f"usermod -aG {group} USER, with the user of the engines")]
    return [good("user", f"{name} (uid {uid}); group {group}: {', '.join(members)}")]


def _members(entry: grp.struct_group) -> list[str]:
    """Users of the group, by list and by primary group."""
    own = [one.pw_name for one in pwd.getpwall() if one.pw_gid == entry.gr_gid]
    return sorted({*entry.gr_mem, *own})


def recordings(subject: Subject) -> list[Finding]:
    """Whether the flight recorder can write where it is to, and has room for one recording."""
    recorder = subject.config.recorder
    if not recorder.enabled:
        return []
    beside = Path(ipc_path(subject.config.sockets.admin) or "/").parent / "recordings"
    folder = Path(recorder.directory) if recorder.directory is not None else beside
    above = visible(folder)
    name = f"recordings in {folder}"
    if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
        fix = f"install -d -m 0700 -o {_user_name(os.geteuid())} {folder}"
        return [poor(name, f"{above} is no directory that this user may write to", fix)]
    free = shutil.disk_usage(above).free
    if free < recorder.max_bytes:
        what = f"{amount(free)} free, one recording takes up to {amount(recorder.max_bytes)}"
        fix = "set recorder.directory to a larger file system, or lower recorder.max_bytes"
        return [poor(name, what, fix)]
    return [good(name, f"{amount(free)} free")]


def visible(path: Path) -> Path:
    """The path if this user can see it, else the nearest of its parents that can be seen."""
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def devices(subject: Subject) -> list[Finding]:
    """Whether this user may use the RDMA devices and GPUs that the host has."""
    return [*_rdma(subject), *_gpus(subject)]


def _rdma(subject: Subject) -> list[Finding]:
    found = [entry.name for entry in subject.entries("sys/class/infiniband")]
    if not found:
        return []
    nodes = [
        node
        for node in subject.entries("dev/infiniband")
        if node.name.startswith("uverbs") or node.name == "rdma_cm"
    ]
    shown = ", ".join(found)
    if not any(node.name.startswith("uverbs") for node in nodes):
        what = f"{shown}, but no /dev/infiniband/uverbs*: UCX goes by TCP"
        fix = "modprobe ib_uverbs rdma_ucm; in a container: --device=/dev/infiniband"
        return [poor("rdma", what, fix)]
    shut = _not_ours(nodes)
    if shut:
        what = f"{shown}: {', '.join(shut)} may not be opened by this user; UCX goes by TCP"
        return [poor("rdma", what, f"chmod 0666 {' '.join(shut)} (rdma-core has a udev rule)")]
    return [good("rdma", f"{shown}: {', '.join(str(node) for node in nodes)} may be opened")]


def _gpus(subject: Subject) -> list[Finding]:
    """Engines use them; the daemon only once a pool lies there."""
    gpus = [e.name for e in subject.entries("sys/bus/pci/drivers/nvidia") if ":" in e.name]
    nodes = [node for node in subject.entries("dev") if node.name.startswith("nvidia")]
    nodes = [node for node in nodes if not node.is_dir()]
    if not gpus and not nodes:
        return []
    if not nodes:
        what = f"{len(gpus)} NVIDIA GPUs, but no /dev/nvidia*: engines here cannot use them"
        return [poor("gpu", what, "nvidia-modprobe -u -c=0; in a container: --gpus all")]
    shut = _not_ours(nodes)
    if shut:
        what = f"{', '.join(shut)} may not be opened by this user"
        return [poor("gpu", what, f"chmod 0666 {' '.join(shut)}, or join their group: ls -l")]
    return [good("gpu", f"{', '.join(node.name for node in nodes)} may be opened")]


def _not_ours(nodes: list[Path]) -> list[str]:
    return [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]


def credentials(subject: Subject) -> list[Finding]:
    """What systemd passes to a service: there only inside of one."""
    place = subject.environ.get("CREDENTIALS_DIRECTORY", "")
    if not place:
        return []
    folder = Path(place)
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as exc:
        fix = "systemctl daemon-reload && systemctl restart kvd"
        return [wrong("credentials", f"{place} cannot be read: {exc.strerror}", fix)]
    shut = [name for name in names if not os.access(folder / name, os.R_OK)]
    if shut:
        fix = "see LoadCredential= of the unit: systemctl cat kvd"
        return [wrong("credentials", f"{', '.join(shut)} in {place} cannot be read", fix)]
    return [good("credentials", f"{place}: {', '.join(names) or 'none'}")]


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid-{uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid-{gid}"
