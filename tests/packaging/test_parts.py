"""What each extra brings is what the code of its part imports, and a lack of it is said in words.

Other packages are hidden from a fresh interpreter here; ``installs.py`` really leaves them out.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from kvd.parts import CLIENT, EXTRAS
from tests.packaging.only import run_with

REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[([a-z]+)\])?((?:>=[0-9.]+)?)")
FOR_OURSELVES = {"test", "dev", "docs", "stores"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def required(requirements):
    """The packages of a list, and the extras of kvd that it includes."""
    found = [REQUIREMENT.fullmatch(one) for one in requirements]
    assert all(found), f"a lower bound at most, nothing that could disagree: {requirements}"
    packages = {one[1] for one in found if one[1] != "kvd"}
    return packages, {one[2] for one in found if one[1] == "kvd"}


def test_the_tables_are_those_of_the_distribution(project):
    extras = {
        name: required(requirements)[0]
        for name, requirements in project["optional-dependencies"].items()
        if name not in FOR_OURSELVES
    }
    assert required(project["dependencies"]) == (set(CLIENT), set())
    assert extras == {name: set(packages) for name, packages in EXTRAS.items()}


def test_a_node_has_the_verbs_and_the_demo_has_a_node(project):
    included = {
        name: required(requirements)[1]
        for name, requirements in project["optional-dependencies"].items()
    }
    assert included["console"] == included["daemon"] == {"cli"}
    assert included["demo"] == {"daemon"}
    assert included["proxy"] == {"cli"}
    assert included["cli"] == included["flash"] == set()


@pytest.mark.parametrize(
    ("extras", "module"),
    [
        ((), "kvd.client"),
        ((), "kvd.parts"),
        (("cli",), "kvd.cli.look"),
        (("cli",), "kvd.cli.change"),
        (("cli",), "kvd.cli.config"),
        (("cli",), "kvd.cli.serve"),
        (("cli",), "kvd.cli.systemd"),
        (("cli", "console"), "tui.app"),
        (("cli", "console"), "tui.link"),
        (("cli", "daemon"), "kvd.daemon.app"),
        (("cli", "daemon"), "kvd.daemon.serve"),
        (("cli", "daemon"), "kvd.transfer.worker"),
        (("cli", "daemon"), "kvd.cli.doctor.command"),
        (("cli", "daemon"), "kvd.cli.record"),
        (("cli", "daemon"), "kvd.cli.sim"),
        (("cli", "daemon"), "kvd.bench.stream"),
        (("cli", "daemon", "demo"), "kvd.demo.engine"),
        (("cli", "proxy"), "kvd.proxy.server"),
    ],
)
def test_a_part_imports_with_the_packages_of_its_extras(extras, module):
    done = run_with(extras, f"import {module}")

    assert done.returncode == 0, done.stderr


def test_the_verbs_find_a_daemon_by_its_configuration_without_its_packages(tmp_path):
    """An engine's container may have the daemon's configuration, and never its packages."""
    file = tmp_path / "kvd.toml"
    file.write_text(
        f'[sockets]\nadmin = "ipc://{tmp_path}/a.sock"\n[transfer]\nintegrity = "full"\n'
    )
    done = run_with(
        ["cli"],
        "from pathlib import Path\nfrom kvd.cli.link import endpoint\n"
        f"print(endpoint(None, Path({str(file)!r})))",
    )
    assert done.stdout == f"ipc://{tmp_path}/a.sock\n", done.stderr


KVD = "import sys; sys.argv = ['kvd', *{arguments}]; from kvd.__main__ import main; main()"
TUI = "import sys; sys.argv = ['kvd-tui', *{arguments}]; from tui.__main__ import main; main()"


@pytest.mark.parametrize(
    ("extras", "code", "arguments", "said"),
    [
        (
            (),
            KVD,
            ["--help"],
            "kvd: click, rich, typing_extensions and pyzmq are not .* 'kvd[cli]'; on a",
        ),
        (
            (),
            KVD,
            ["status"],
            "kvd: click, rich, typing_extensions and pyzmq are not .* 'kvd[cli]'; on a",
        ),
        ((), TUI, ["--help"], "kvd-tui: click, rich, .* are not .* 'kvd[cli]'"),
        (("cli",), TUI, ["--once"], "kvd-tui: textual is not .* 'kvd[console]'"),
        (("cli",), KVD, ["serve"], "Error: kvd serve needs more .*uvloop, .* 'kvd[daemon]'"),
        (
            ("cli",),
            KVD,
            ["replay", "x"],
            "kvd: uvloop, .* xxhash are not .* 'kvd[daemon]'",
        ),
        (("cli",), KVD, ["keygen", "--out", "."], "kvd: uvloop, pynacl, .* 'kvd[daemon]'"),
        (
            ("cli",),
            KVD,
            ["proxy", "--decode", "http://h"],
            "Error: kvd proxy needs .*aiohttp and prometheus-client .* 'kvd[proxy]'",
        ),
        (("cli",), KVD, ["bench", "control"], "kvd: uvloop, .* 'kvd[daemon]'"),
        (("cli",), KVD, ["demo"], "Error: kvd demo, .*torch, transformers, uvloop.* 'kvd[demo]'"),
        (
            ("cli", "daemon"),
            KVD,
            ["demo"],
            "Error: kvd demo.*torch and transformers .* 'kvd[demo]'",
        ),
    ],
)
def test_what_lacks_is_one_sentence_and_the_status_of_configuration(
    extras, code, arguments, said, tmp_path
):
    done = run_with(
        extras, f"import os; os.chdir({str(tmp_path)!r})\n" + code.format(arguments=arguments)
    )

    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    pattern = said.replace("[", r"\[").replace("]", r"\]")
    assert re.match(pattern, done.stderr), done.stderr
    assert sys.prefix in done.stderr


def test_what_is_broken_is_not_called_missing():
    """A module of kvd itself that is not there is a fault, and must not end in a wrong hint."""
    done = run_with(
        ["cli"], "from kvd.parts import needed\nwith needed('kvd'):\n    import kvd.nowhere"
    )

    assert done.returncode == 1
    assert "No module named 'kvd.nowhere'" in done.stderr


def test_help_needs_no_more_than_the_verbs():
    assert run_with(["cli"], KVD.format(arguments=["--help"])).returncode == 0
    assert run_with(["cli"], TUI.format(arguments=["--help"])).returncode == 0
