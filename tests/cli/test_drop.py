"""``kvd drop``: what a stopped daemon left goes, what a running one has stays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from kvd.cli import kvd
from kvd.pools.location import own_name
from tests.pools.keeping import at, opened, shm_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result

MIB2 = 2 * 2**20


@pytest.fixture
def directory() -> Iterator[Path]:
    """One with a pool in it that nobody uses."""
    with shm_directory() as path:
        with opened(at(path)):
            pass
        yield path


def drop(*arguments: str) -> Result:
    return CliRunner().invoke(kvd, ["drop", *arguments])


def chosen(directory: Path) -> list[str]:
    return ["--set", "pool.backing=shm", "--set", f"pool.directory={directory}"]


def test_drop_frees_what_is_left_and_says_how_much(directory: Path) -> None:
    (directory / "notes").touch()

    done = drop(*chosen(directory))

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "FILE          MEMORY",
        "kvd.journal  2.0 MiB",
        "kvd.kv       2.0 MiB",
        f"4.0 MiB in {directory} freed",
    ]
    assert [path.name for path in directory.iterdir()] == ["notes"]


def test_drop_says_what_it_would_free_and_changes_nothing(directory: Path) -> None:
    before = sorted(directory.iterdir())

    done = drop(*chosen(directory), "--dry-run", "--format", "json")

    assert json.loads(done.stdout) == {
        "directory": str(directory),
        "files": {"kvd.journal": MIB2, "kvd.kv": MIB2},
        "dry_run": True,
    }
    assert sorted(directory.iterdir()) == before


def test_drop_finds_nothing_a_second_time(directory: Path) -> None:
    drop(*chosen(directory))

    done = drop(*chosen(directory))

    assert (done.exit_code, done.stdout) == (0, f"there is no pool in {directory}\n")
    assert list(directory.iterdir()) == []


def test_drop_leaves_the_pool_of_a_daemon_that_runs(directory: Path) -> None:
    with opened(at(directory)) as memory:
        done = drop(*chosen(directory))

        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(
            f"Error: {directory} is in use by a daemon that runs (pid {os.getpid()}): stop it, or "
        )
        assert (directory / "kvd.kv").stat().st_ino == os.fstat(memory.placed[0].arena.fd).st_ino


def test_drop_removes_a_directory_that_nobody_chose(tmp_path: Path) -> None:
    """It is found by the directory of the client socket alone."""
    own = Path("/dev/shm") / own_name(str(tmp_path))
    own.mkdir(mode=0o700)
    with opened(at(own)):
        pass

    sockets = f"sockets.client=ipc://{tmp_path}/client.sock"
    done = drop("--set", "pool.backing=shm", "--set", sockets)

    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, f"4.0 MiB in {own} freed")
    assert not own.exists()


@pytest.mark.parametrize(
    ("backing", "why"),
    [
        ("anon", "its memory is free when the last process that maps it has ended"),
        ("fdstore", "systemd frees its memory when the unit is stopped"),
    ],
)
def test_drop_says_where_nothing_is_left_and_how_to_drop_what_was(backing: str, why: str) -> None:
    done = drop("--set", f"pool.backing={backing}")

    assert (done.exit_code, done.stderr) == (
        1,
        f"Error: pool.backing = {backing} leaves no files behind: {why}; for files of an earlier "
        "configuration add --set pool.backing=shm, or hugetlbfs\n",
    )
