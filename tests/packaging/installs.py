"""The wheel in environments that have nothing else: ``make test-install``. Needs the registry.

Each Python that ``pyproject.toml`` names and that is on the path installs the client and uses it.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
import zipfile
from configparser import ConfigParser
from email.parser import Parser

import pytest

from kvd import __version__
from kvd.parts import CLIENT, EXTRAS
from tests.packaging.environments import (  # noqa: F401 - fixtures
    ANSWER,
    ROOT,
    SOUND,
    Environment,
    canonical,
    daemon,
    said_right,
    wheel,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = [
    name.rpartition(" ")[2]
    for name in PROJECT["classifiers"]
    if name.startswith("Programming Language :: Python :: 3.")
]


def python_of(version: str) -> str:
    """The interpreter of that version; skips where there is none."""
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-V"], capture_output=True, check=False).returncode:
        pytest.skip(f"python{version} is not on the path")
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory, wheel):  # noqa: F811 - the fixture
    """The client, and nothing else."""
    own = Environment(tmp_path_factory.mktemp("bare") / "venv", python_of("3.11"))
    own.install(str(wheel))
    return own


@pytest.fixture(scope="module")
def content(wheel):  # noqa: F811 - as above
    """The names in the wheel, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        read = {
            name.rpartition("/")[2]: archive.read(name).decode()
            for name in names
            if ".dist-info/" in name
        }
    return names, Parser().parsestr(read["METADATA"]), read["entry_points.txt"]


def test_the_wheel_has_what_it_should_and_no_more(content):
    names, _, scripts = content
    info = f"kvd-{__version__}.dist-info"

    assert {"kvd/py.typed", "tui/py.typed", "tui/kvd.tcss", "kvd/_systemd/kvd.service"} <= set(
        names
    )
    assert f"{info}/licenses/LICENSE" in names
    assert {name.partition("/")[0] for name in names} == {"kvd", "tui", info}
    assert not [name for name in names if "test" in name.lower() or name.endswith(".pyc")]
    entries = ConfigParser()
    entries.read_string(scripts)
    assert {group: dict(entries[group]) for group in entries.sections()} == {
        "console_scripts": PROJECT["scripts"],
        **PROJECT["entry-points"],
    }


def test_its_metadata_asks_engines_for_the_packages_of_the_client(content):
    _, metadata, _ = content
    always = [one for one in metadata.get_all("Requires-Dist") if ";" not in one]

    assert set(map(canonical, always)) == set(map(canonical, PROJECT["dependencies"]))
    assert {canonical(one.partition(">=")[0]) for one in always} == set(map(canonical, CLIENT))
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(EXTRAS) <= set(metadata.get_all("Provides-Extra"))


@pytest.mark.parametrize("version", PYTHONS)
def test_the_client_alone_serves_an_engine(version, wheel, daemon, tmp_path):  # noqa: F811
    own = Environment(tmp_path / "venv", python_of(version))
    own.install(str(wheel))

    said = own.engine(daemon)

    assert set(own.versions()) == {"kvd", *map(canonical, CLIENT)}
    assert own.check() == SOUND
    assert said_right(said), said
    assert (said["dtype"], said["torch"]) == ("uint16", False)
    assert str(said["tensor"]).startswith("not-supported: torch is not installed in ")


def test_the_lowest_versions_that_are_asked_for_serve_too(wheel, daemon, tmp_path):  # noqa: F811
    asked = dict(one.split(">=") for one in PROJECT["dependencies"])
    own = Environment(tmp_path / "venv", python_of("3.11"))
    own.install(str(wheel), *(f"{name}=={version}" for name, version in asked.items()))

    assert own.versions() == {
        "kvd": __version__,
        **own.versions(),
        **{canonical(name): version for name, version in asked.items()},
    }
    assert said_right(own.engine(daemon)), ANSWER


def test_both_scripts_are_there_and_say_what_they_lack(bare, tmp_path):
    *first, last = (one.split(">=")[0] for one in PROJECT["optional-dependencies"]["cli"])
    for script, *arguments in (["kvd", "serve"], ["kvd", "status"], ["kvd-tui"]):
        done = bare.run(script, *arguments, cwd=tmp_path)

        assert (done.returncode, done.stdout) == (78, ""), script
        assert done.stderr.startswith(f"{script}: {', '.join(first)} and {last} are not installed")
        assert len(done.stderr.splitlines()) == 1


def test_verbs_and_console_work_with_their_extras(wheel, daemon, tmp_path):  # noqa: F811
    own = Environment(tmp_path / "venv", python_of("3.11"))
    own.install(f"{wheel}[cli]")

    status = own.run("kvd", "status", "--connect", daemon.admin)
    assert (status.returncode, status.stderr) == (0, "")
    assert "solo" in status.stdout
    assert own.run("kvd", "config", "check").returncode == 0
    lacking = own.run("kvd-tui", "--once", "--connect", daemon.admin)
    assert (lacking.returncode, "textual is not installed" in lacking.stderr) == (78, True)
    no_daemon = own.run("kvd", "serve")
    assert (no_daemon.returncode, "'kvd[daemon]'" in no_daemon.stderr) == (78, True)

    own.install(f"{wheel}[console]")

    shown = own.run("kvd-tui", "--once", "--connect", daemon.admin)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "solo" in shown.stdout
    assert set(own.versions()).isdisjoint({"torch", "nixl", "uvloop", "structlog"})
