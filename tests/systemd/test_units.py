"""The units as installed, as ``systemd-analyze`` judges them; nothing is started."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.cli import systemd
from kvd.cli.systemd import UNITS, Choices

ANALYZE = shutil.which("systemd-analyze")
WORST = 24
"""Exposure, in tenths, of 0 (none) to 100."""

pytestmark = pytest.mark.skipif(ANALYZE is None, reason="there is no systemd-analyze")


def analyze(*arguments):
    command = [ANALYZE, "--no-pager", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture(scope="module")
def units(tmp_path_factory):
    """A directory with every unit and drop-in that this systemd would get."""
    top = tmp_path_factory.mktemp("units")
    found = re.match(r"systemd (\d+)", analyze("--version").stdout)
    version = int(found[1])
    choices = Choices(Path(sys.executable), user="root", systemd=version, has_peer_key=True)
    for file in systemd.files(choices):
        if file.path.is_relative_to(UNITS):
            target = top / file.path.relative_to(UNITS)
            target.parent.mkdir(exist_ok=True)
            target.write_text(file.text)
    return top


@pytest.mark.parametrize("name", ["kvd.service", "kvd@.service", "kvd.socket"])
def test_systemd_has_nothing_to_say_against_a_unit(units, name):
    """It ends with 0 for keys that it does not know, so what counts is what it says."""
    done = analyze("verify", "--man=no", units / name)

    assert (done.returncode, done.stderr) == (0, "")


def test_verify_sees_a_key_that_does_not_exist(units, tmp_path):
    text = (units / "kvd.service").read_text()
    (tmp_path / "kvd.service").write_text(text.replace("KillMode=", "KilMode="))

    assert "KilMode" in analyze("verify", "--man=no", tmp_path / "kvd.service").stderr


@pytest.mark.parametrize("name", ["kvd.service", "kvd@.service"])
def test_the_daemon_is_exposed_no_more_than_it_must_be(units, tmp_path, name):
    text = (units / name).read_text().replace("User=root", "User=kvd")
    (tmp_path / name).write_text(text)

    done = analyze("security", "--offline=true", f"--threshold={WORST}", tmp_path / name)

    assert done.returncode == 0, done.stdout
