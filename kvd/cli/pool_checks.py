"""Checks of ``kvd doctor`` that look at where the pool's memory is to lie, and whether it can.

Nothing is made: a directory that is not there yet is judged by the one that it would be made in.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.cli.finding import Finding, Subject, good, poor, wrong
from kvd.cli.running import judged
from kvd.config.address import ipc_path
from kvd.config.pool import pool_spec
from kvd.journal.layout import size_bytes
from kvd.pools.arena import HUGE_PAGE_BYTES, NotReserved, check_free
from kvd.pools.build import pool_regions, reserved_bytes, saved_regions, sizes
from kvd.pools.host_memory import Free, free_memory
from kvd.pools.location import Backing, PoolLocation
from kvd.pools.mounts import free_huge_bytes, kind_of
from kvd.text import amount

if TYPE_CHECKING:
    from kvd.core.spec import PoolSpec

_CHECK = "pool memory"


def memory(subject: Subject) -> list[Finding]:
    """Whether the pool fits, by the rule that the daemon reserves it by."""
    who = judged(subject)
    if who.pid:
        return [good("memory", f"{who.who} has its pool")]
    free = free_memory()
    kept = kept_bytes(subject)
    free = Free(free.free_bytes + kept, free.limited_by)
    spec = pool_spec(subject.config)
    try:
        regions = reserved_bytes(spec)
        if _backing(subject) is Backing.HUGETLBFS:
            regions = sizes(list(saved_regions(spec)))
        check_free(regions, free)
    except NotReserved as exc:
        what, _, fix = str(exc).rpartition(": ")
        return [wrong("memory", what, fix)]
    what = f"the pool takes {amount(sum(regions.values()))} of {amount(free.free_bytes)} free"
    found = f", {amount(kept)} of it in a pool that is there already" if kept else ""
    return [good("memory", f"{what} ({free.limited_by}){found}")]


def backing(subject: Subject) -> list[Finding]:
    """Whether memory of the configured kind can be had, and by this user."""
    match _backing(subject):
        case Backing.ANON:
            return [good(_CHECK, "anon: the cache ends with the daemon (shm would keep it)")]
        case Backing.FDSTORE:
            return _store(subject)
        case Backing.SHM | Backing.HUGETLBFS:
            return _files(subject)


def kept_bytes(subject: Subject) -> int:
    """What files of a pool that is there already take of this host's ordinary memory."""
    return _taken(_path(subject)) if _backing(subject) is Backing.SHM else 0


def _backing(subject: Subject) -> Backing:
    return Backing(subject.config.pool.backing)


def _place(subject: Subject) -> PoolLocation:
    config = subject.config
    runtime = str(Path(ipc_path(config.sockets.client) or "/").parent)
    return PoolLocation(_backing(subject), config.pool.directory, runtime)


def _path(subject: Subject) -> Path:
    return _place(subject).path()


def _journal(spec: PoolSpec) -> int:
    """Bytes of the table beside a pool that outlives its daemon."""
    return size_bytes(spec.pages[0], spec.components[0].page_size)


def _taken(folder: Path) -> int:
    try:
        return sum(entry.stat().st_blocks * 512 for entry in folder.iterdir())
    except OSError:
        return 0


def _store(subject: Subject) -> list[Finding]:
    if (subject.root / "run/systemd/system").is_dir():
        return [good(_CHECK, "fdstore: systemd holds it while the daemon restarts")]
    what = "fdstore leaves the pool to systemd, which does not run this host"
    return [wrong(_CHECK, what, "set pool.backing = 'shm', or start kvd as a unit of systemd")]


def _files(subject: Subject) -> list[Finding]:
    kind = _backing(subject)
    try:
        path = _path(subject)
    except NotReserved as exc:
        what, _, fix = str(exc).partition(": ")
        return [wrong(_CHECK, what, fix)]
    above = path if os.path.lexists(path) else path.parent
    try:
        seen = os.lstat(above)
    except OSError as exc:
        fix = f"install -d -m 0700 {path}, for the user that runs kvd"
        return [wrong(_CHECK, f"{above}: {exc.strerror}", fix)]
    if stat.S_ISLNK(seen.st_mode) and above == path:
        what = f"{path} is a symbolic link: somebody else could have put a pool there"
        return [wrong(_CHECK, what, f"rm {path}, or set pool.directory to another one")]
    found = kind_of(os.stat(above).st_dev)
    if found != kind.file_system:
        what = f"{path} lies on {found}, and pool.backing = {kind.value} wants {kind.file_system}"
        return [wrong(_CHECK, what, _other_place(kind))]
    flaw = _rights(subject, path, os.stat(above), is_there=above == path)
    return [flaw] if flaw is not None else _room(subject, kind, path, above)


def _other_place(kind: Backing) -> str:
    if kind is Backing.HUGETLBFS:
        return "mount -t hugetlbfs -o mode=1777 none /dev/hugepages, and leave pool.directory out"
    return "leave pool.directory out, which takes one below /dev/shm, or name one on a tmpfs"


def _rights(
    subject: Subject, path: Path, seen: os.stat_result, *, is_there: bool
) -> Finding | None:
    """What keeps a daemon of this user from using the directory, or from making it."""
    if judged(subject).pid:
        return None
    uid = os.geteuid()
    if not is_there:
        if os.access(path.parent, os.W_OK | os.X_OK):
            return None
        what = f"{path} is not there, and uid {uid} may not make it in {path.parent}"
        return wrong(_CHECK, what, f"install -d -m 0700 -o {uid} {path}")
    if seen.st_uid != uid:
        what = f"{path} belongs to uid {seen.st_uid}, and this is uid {uid}"
        return wrong(_CHECK, what, f"chown {uid} {path}, or set pool.directory to another one")
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = f"{path} has mode {stat.S_IMODE(seen.st_mode):04o}: others could put files there"
        return wrong(_CHECK, what, f"chmod 0700 {path}")
    return None


def _room(subject: Subject, kind: Backing, path: Path, above: Path) -> list[Finding]:
    """Whether the file system holds the pool, with what a pool that is there already takes."""
    shape = os.statvfs(above)
    grain = max(HUGE_PAGE_BYTES, shape.f_bsize) if kind is Backing.HUGETLBFS else HUGE_PAGE_BYTES
    spec = pool_spec(subject.config)
    wanted = [*sizes(list(pool_regions(spec))).values(), _journal(spec)]
    needed = sum(-(-size // grain) * grain for size in wanted)
    kept = _taken(path)
    if kind is Backing.HUGETLBFS:
        free = free_huge_bytes(grain) + kept
        fix = f"sysctl -w vm.nr_hugepages={-(-needed // grain)}, or lower pool.size"
    else:
        free = (shape.f_bavail * shape.f_frsize if shape.f_blocks else needed) + kept
        mount = "/dev/shm" if str(path).startswith("/dev/shm") else str(above)
        size = -(-(needed + shape.f_blocks * shape.f_frsize) // 2**30)
        fix = f"mount -o remount,size={size}G {mount} (in a container: --shm-size={size}g)"
    have = f", {amount(kept)} of it taken by a pool that is there" if kept else ""
    said = f"{kind.value} in {path}: {amount(needed)} of {amount(free)} free{have}"
    if needed > free:
        return [wrong(_CHECK, said, fix)]
    if kind is Backing.SHM and needed > 0.9 * free:
        what = f"{said}: nothing is left for anything else there"
        return [poor(_CHECK, what, fix)]
    return [good(_CHECK, said)]
