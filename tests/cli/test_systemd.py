"""``kvd systemd`` on the files of another system: what it writes, keeps, removes and refuses."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli import kvd, systemd_reach
from kvd.config import Config, load

PYTHON = "/opt/kvd/venv/bin/python"
UNITS = "etc/systemd/system"
ALWAYS = [
    f"{UNITS}/kvd.service",
    f"{UNITS}/kvd@.service",
    f"{UNITS}/kvd.socket",
    f"{UNITS}/kvd.service.d/cma.conf.example",
    "etc/sysusers.d/kvd.conf",
    "etc/tmpfiles.d/kvd.conf",
]
CONFIG = "etc/kvd/kvd.toml"
LEFT = "left in place: /etc/kvd, the user and its group"


def run(verb, top, *arguments):
    python = ["--python", PYTHON] if verb == "install" else []
    words = ["systemd", verb, "--root", str(top), *python, *arguments]
    done = CliRunner().invoke(kvd, words)
    return done.exit_code, done.stdout.splitlines(), done.stderr


def lines(said, *words):
    """The lines that are about files, and of those the ones that begin with one of ``words``."""
    return [line for line in said if line.startswith(words)]


def there(top):
    return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())


def test_install_writes_every_file_and_says_each(tmp_path):
    status, said, err = run("install", tmp_path)

    assert (status, err) == (0, "")
    assert said[:-3] == [f"new        {tmp_path / name}" for name in [*ALWAYS, CONFIG]]
    assert there(tmp_path) == sorted([*ALWAYS, CONFIG])
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ALWAYS}
    assert modes == {0o644}


def test_a_second_install_changes_nothing(tmp_path):
    run("install", tmp_path)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in there(tmp_path)}

    _, said, _ = run("install", tmp_path)

    assert said[:-3] == [
        *(f"unchanged  {tmp_path / name}" for name in ALWAYS),
        f"kept       {tmp_path / CONFIG}: yours",
    ]
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in there(tmp_path)} == before


def test_the_units_run_this_interpreter_as_that_user(tmp_path):
    run("install", tmp_path, "--user", "cache")

    for name, arguments in (
        ("kvd.service", "serve"),
        ("kvd@.service", "serve --config /etc/kvd/%i.toml"),
    ):
        unit = (tmp_path / UNITS / name).read_text().splitlines()
        assert f"ExecStart={PYTHON} -P -m kvd {arguments}" in unit
        assert [line for line in unit if line.startswith(("User=", "Group="))] == [
            "User=cache",
            "Group=cache",
        ]
    text = "".join((tmp_path / name).read_text() for name in ALWAYS)
    assert "@USER@" not in text
    assert "@COMMON@" not in text
    assert "User=kvd" not in text


def test_a_file_that_is_due_to_change_shows_its_difference(tmp_path):
    run("install", tmp_path)

    _, said, _ = run("install", tmp_path, "--user", "cache")

    at = said.index(f"changed    {tmp_path / 'etc/sysusers.d/kvd.conf'}")
    assert said[at + 1 : at + 3] == [
        '           -u kvd - "KV transfer daemon" / /usr/sbin/nologin',
        '           +u cache - "KV transfer daemon" / /usr/sbin/nologin',
    ]


def test_the_configuration_is_valid_and_keeps_the_pool(tmp_path):
    run("install", tmp_path)

    config = load(tmp_path / CONFIG, {}, ())

    assert isinstance(config, Config), [error.sentence for error in config]
    assert (config.pool.backing, config.pool.directory) == ("shm", None)
    assert config.sockets.client == "ipc:///run/kvd/client.sock"
    assert config.recorder.directory == "/var/lib/kvd/recordings"


def test_a_configuration_that_is_there_is_kept(tmp_path):
    (tmp_path / "etc/kvd").mkdir(parents=True)
    (tmp_path / CONFIG).write_text("mine\n")

    run("install", tmp_path)

    assert (tmp_path / CONFIG).read_text() == "mine\n"


def test_what_was_changed_by_hand_is_kept_beside_the_new_file(tmp_path):
    run("install", tmp_path)
    unit = tmp_path / UNITS / "kvd.service"
    as_written = unit.read_text()
    mine = as_written.replace("WatchdogSec=20s", "WatchdogSec=7s")
    unit.write_text(mine)

    _, said, _ = run("install", tmp_path)

    kept = tmp_path / UNITS / "kvd.service.edited"
    assert lines(said, "changed", " ", "kept")[:4] == [
        f"changed    {unit}",
        "           -WatchdogSec=7s",
        "           +WatchdogSec=20s",
        f"kept       {kept}: the changes made by hand; a drop-in would stay",
    ]
    assert (unit.read_text(), kept.read_text()) == (as_written, mine)


def test_a_file_of_somebody_else_stops_the_install_before_anything_is_written(tmp_path):
    foreign = tmp_path / UNITS / "kvd.service"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("[Service]\n")

    status, _, err = run("install", tmp_path)

    assert status == 1
    assert err == f"Error: nothing was changed:\n{foreign} is not kvd's: move it away\n"
    assert there(tmp_path) == [f"{UNITS}/kvd.service"]


def test_the_key_of_the_node_is_passed_where_there_is_one_and_only_there(tmp_path):
    secret = tmp_path / "etc/kvd/peer.secret"
    secret.parent.mkdir(parents=True)
    secret.touch()
    drop_in = tmp_path / UNITS / "kvd.service.d/10-peer-key.conf"

    _, said, _ = run("install", tmp_path)
    assert f"new        {drop_in}" in said
    assert "LoadCredential=peer.secret:/etc/kvd/peer.secret" in drop_in.read_text().splitlines()

    secret.unlink()
    _, said, _ = run("install", tmp_path)
    assert f"removed    {drop_in}" in said
    assert not drop_in.exists()


@pytest.mark.parametrize(("version", "is_there"), [(252, False), (254, True)])
def test_newer_keys_are_written_only_where_systemd_knows_them(tmp_path, version, is_there):
    library = tmp_path / f"usr/lib/x86_64-linux-gnu/systemd/libsystemd-shared-{version}.so"
    library.parent.mkdir(parents=True)
    library.touch()

    run("install", tmp_path)

    for unit in ("kvd.service.d", "kvd@.service.d"):
        assert (tmp_path / UNITS / unit / "10-systemd-254.conf").exists() is is_there


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path):
    status, said, _ = run("install", tmp_path, "--dry-run")

    assert status == 0
    assert lines(said, "new") == [f"new        {tmp_path / name}" for name in [*ALWAYS, CONFIG]]
    assert there(tmp_path) == []


def test_uninstall_removes_what_was_written_and_leaves_the_configuration(tmp_path):
    run("install", tmp_path)

    status, said, _ = run("uninstall", tmp_path)

    assert status == 0
    assert sorted(said) == sorted([*(f"removed    {tmp_path / name}" for name in ALWAYS), LEFT])
    assert there(tmp_path) == [CONFIG]
    assert not (tmp_path / UNITS / "kvd.service.d").exists()
    assert run("uninstall", tmp_path)[:2] == (0, [LEFT])


def test_uninstall_leaves_what_was_changed_or_made_by_hand(tmp_path):
    run("install", tmp_path)
    unit, drop_in = tmp_path / UNITS / "kvd.service", tmp_path / UNITS / "kvd.service.d/my.conf"
    unit.write_text(f"# mine\n{unit.read_text()}")
    drop_in.write_text("[Service]\n")

    _, said, _ = run("uninstall", tmp_path)

    assert f"left       {unit}: not as kvd wrote it; remove it yourself" in said
    assert there(tmp_path) == [CONFIG, f"{UNITS}/kvd.service", f"{UNITS}/kvd.service.d/my.conf"]


def test_a_user_that_could_be_something_else_is_refused(tmp_path):
    status, _, err = run("install", tmp_path, "--user", "kvd\nUser=root")

    assert status == 1
    assert "is no name of a user" in err
    assert there(tmp_path) == []


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs this host")
def test_a_host_without_systemd_is_told_what_there_is_instead():
    for verb in ("install", "uninstall"):
        done = CliRunner().invoke(kvd, ["systemd", verb])

        assert done.exit_code == 1
        assert "systemd does not run this host: its first process is " in done.stderr
        assert "kvd serve runs without any" in done.stderr


def test_an_interpreter_that_does_not_find_kvd_by_itself_is_told(tmp_path):
    """As when kvd was found through PYTHONPATH."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(Path(sys.executable).resolve())
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")

    flaws = systemd_reach.flaws(python, systemd_reach.User("kvd"))

    assert flaws == [
        f"{python} does not find kvd by itself (ModuleNotFoundError: No module named 'kvd'); a "
        "service has no PYTHONPATH: install kvd into that interpreter's environment"
    ]
