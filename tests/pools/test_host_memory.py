"""The tightest limit wins, wherever it is mounted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.pools.host_memory import Free, free_memory

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8192 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def group(name: str, *, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{name}/memory.max": f"{limit}\n",
        f"{name}/memory.current": f"{used}\n",
        f"{name}/memory.stat": f"anon 1\ninactive_file {cached}\nactive_file 0\n",
    }


def test_the_host_limits_when_no_group_does(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert free_memory(tmp_path) == Free(8 * MIB, "MemAvailable of this host")


def test_a_group_above_ours_limits_when_it_is_the_tightest(tmp_path: Path) -> None:
    """systemd sets MemoryMax on a slice as readily as on the service."""
    top = "sys/fs/cgroup/system.slice"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/kvd.service\n",
            **group(top, limit=str(6 * MIB), used=5 * MIB, cached=2 * MIB),
            **group(f"{top}/kvd.service", limit="max", used=5 * MIB),
        },
    )
    assert free_memory(tmp_path) == Free(
        3 * MIB, f"memory.max of control group {tmp_path}/sys/fs/cgroup/system.slice"
    )


def test_version_one_groups_are_read_too(tmp_path: Path) -> None:
    own = "sys/fs/cgroup/memory/box"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n0::/\n",
            f"{own}/memory.limit_in_bytes": f"{4 * MIB}\n",
            f"{own}/memory.usage_in_bytes": f"{5 * MIB}\n",
            f"{own}/memory.stat": "inactive_file 0\n",
        },
    )
    assert free_memory(tmp_path).free_bytes == 0


def test_a_group_outside_our_namespace_is_no_endless_walk(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/../../elsewhere\n"})
    assert free_memory(tmp_path) == Free(8 * MIB, "MemAvailable of this host")


def test_this_host_has_some() -> None:
    assert free_memory().free_bytes > 0
