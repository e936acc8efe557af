"""``kvd doctor``: is this host fit for kvd? Needs no daemon and changes nothing.

``CHECKS`` is the list of what is looked at, in the order in which it is shown; a check is a
function from the ``Subject`` to its findings. Ends with 1 if one of them is wrong.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.text import Text

from kvd.cli import (
    clock_checks,
    device_checks,
    host_checks,
    key_checks,
    limit_checks,
    neighbour_checks,
    numa_checks,
    permission_checks,
    pool_checks,
    render,
    service_checks,
    transport_checks,
)
from kvd.cli.exits import Failed
from kvd.cli.finding import Finding, Severity, Subject, good, wrong
from kvd.cli.link import with_format
from kvd.cli.sheet import Sheet
from kvd.config.load import load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.config.origin import ConfigError
    from kvd.config.schema import Config

CHECKS: tuple[Callable[[Subject], list[Finding]], ...] = (
    host_checks.versions,
    pool_checks.memory,
    pool_checks.backing,
    host_checks.shared_memory,
    host_checks.huge_pages,
    numa_checks.numa,
    limit_checks.locked_memory,
    limit_checks.open_files,
    clock_checks.clock,
    permission_checks.user,
    host_checks.runtime_directory,
    permission_checks.recordings,
    permission_checks.devices,
    device_checks.cuda,
    permission_checks.credentials,
    service_checks.interpreter,
    service_checks.service,
    host_checks.addresses,
    key_checks.peer_keys,
    transport_checks.ucx_environment,
    transport_checks.tcp_retries,
    limit_checks.direct_copies,
    transport_checks.binding,
)
SLOW: tuple[Callable[[Subject], list[Finding]], ...] = (
    neighbour_checks.neighbours,
    transport_checks.self_transfer,
)
"""Left out by ``--quick``: up to three seconds each."""

_MARKS = {
    Severity.GOOD: ("ok", "green"),
    Severity.POOR: ("poor", "yellow"),
    Severity.WRONG: ("WRONG", "bold red"),
}


class Diagnosis(msgspec.Struct, frozen=True):
    """What ``kvd doctor --format json`` prints."""

    fit: bool
    findings: tuple[Finding, ...]


@click.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Check for this file instead of /etc/kvd/kvd.toml.",
)
@click.option("--quick", is_flag=True, help="Leave out the peers and the transfer: seconds.")
@with_format
def doctor_command(config_file: Path | None, quick: bool, form: str) -> None:
    """Check this host: memory, NUMA, limits, clock, rights, ports, peers, NIXL, a real transfer.

    Every finding that is not good comes with what to do about it.
    """
    config, findings = effective(config_file)
    subject = Subject(config, dict(os.environ))
    for check in CHECKS if quick else (*CHECKS, *SLOW):
        findings += check(subject)
    bad = sum(finding.severity is Severity.WRONG for finding in findings)
    if form == "json":
        render.print_json(Diagnosis(not bad, tuple(findings)))
    else:
        show(findings)
    if bad:
        raise Failed(f"{bad} of {len(findings)} findings are wrong; each one names its fix")


def effective(config_file: Path | None) -> tuple[Config, list[Finding]]:
    """The configuration to check for, and what is wrong with it; the defaults if anything is."""
    loaded = load(config_file, os.environ, ())
    if not isinstance(loaded, list):
        return loaded, [good("configuration", "valid")]
    defaults = load(Path(os.devnull), {}, ())
    assert not isinstance(defaults, list), "the defaults are valid"
    return defaults, [_config_finding(error) for error in loaded]


def _config_finding(error: ConfigError) -> Finding:
    subject = f"{error.key} = {error.value}: " if error.key else ""
    return wrong(f"configuration {error.where}", f"{subject}{error.rule}", error.fix)


def show(findings: Sequence[Finding]) -> None:
    """Print the findings as a table, each fix on a line of its own."""
    out = Sheet("", "CHECK", "FINDING")
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        fix = f"-> {finding.fix}" if finding.fix else ""
        out.row(Text(mark, style), finding.check, finding.what, prose=fix)
    render.show(out)
