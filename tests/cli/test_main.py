"""The command itself: help, usage, and verbs that cannot be loaded."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from kvd import __version__
from kvd.cli import BENCHES, VERBS, kvd
from kvd.cli.lazy import LazyGroup, Verb

PROMISED = (
    *(
        "serve",
        "demo",
        "proxy",
        "status",
        "pools",
        "tiers",
        "tree",
        "locks",
        "rooms",
        "peers",
        "why",
    ),
    *(
        "events",
        "record",
        "replay",
        "flush",
        "epoch",
        "evict",
        "pin",
        "unpin",
        "abort",
        "fence",
        "drop",
        "drain",
        "undrain",
        "reload",
        "audit",
        "config",
        "keygen",
        "systemd",
        "doctor",
        "bench",
        "sim",
    ),
)


def test_help_lists_every_verb_with_its_summary():
    done = CliRunner().invoke(kvd, ["--help"])

    assert done.exit_code == 0
    assert tuple(VERBS) == PROMISED
    for name, verb in VERBS.items():
        assert any(
            line.split(maxsplit=1) == [name, verb.summary] for line in done.stdout.splitlines()
        )


def test_version_is_the_packages():
    assert CliRunner().invoke(kvd, ["--version"]).stdout == f"kvd {__version__}\n"


@pytest.mark.parametrize("arguments", [["statsu"], ["status", "--colour"], ["why", "page"]])
def test_wrong_usage_ends_with_2(arguments):
    done = CliRunner().invoke(kvd, arguments)

    assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.parametrize("given", ["/run/kvd/admin.sock", "tcp://127.0.0.1:7402"])
def test_an_endpoint_that_is_none_is_refused_with_an_example(given):
    done = CliRunner().invoke(kvd, ["status", "--connect", given])

    assert done.exit_code == 2
    assert "ipc:///run/kvd/admin.sock" in done.stderr


def test_a_verb_that_cannot_be_loaded_harms_no_other():
    @click.group(
        cls=LazyGroup,
        verbs={
            "lost": Verb("kvd.nowhere:command", "Not there."),
            "found": Verb("kvd.cli.serve:serve_command", "There."),
        },
    )
    def group() -> None:
        """A group with a hole."""

    assert CliRunner().invoke(group, ["--help"]).exit_code == 0
    assert CliRunner().invoke(group, ["found", "--help"]).exit_code == 0
    lost = CliRunner().invoke(group, ["lost"])
    assert lost.exit_code == 1
    assert "No module named 'kvd.nowhere'" in lost.stderr


@pytest.mark.parametrize("bench", BENCHES)
def test_every_bench_is_there(bench):
    done = CliRunner().invoke(kvd, ["bench", bench, "--help"])

    assert (done.exit_code, done.stdout.split()[0]) == (0, "Usage:")


def test_bench_lists_its_verbs_without_loading_them():
    done = CliRunner().invoke(kvd, ["bench", "--help"])

    assert done.exit_code == 0
    told = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert told[told.index("Benchmarks:") + 1 :] == list(BENCHES)


def test_serve_with_a_wrong_value_ends_with_78():
    done = CliRunner().invoke(kvd, ["serve", "--set", "pool.pages=1", "--set", "pool.layers=0"])

    assert (done.exit_code, done.stdout) == (78, "")
    assert "pool.pages" in done.stderr
    assert "pool.layers" in done.stderr


def test_python_m_kvd_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"kvd {__version__}\n"
