"""``kvd doctor``: is this host fit for kvd? Needs no daemon and changes nothing.

``CHECKS`` is the table of what is looked at, in the order in which it is shown; a check is a
function from the ``Subject`` to its findings. Ends with 1 if one of them is wrong.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from kvd.cli import render
from kvd.cli.doctor import devices, host, memory, peers, service, tiers, transport
from kvd.cli.doctor.finding import DoctorFinding, Severity, Subject, good, wrong
from kvd.cli.exits import VerbFailed
from kvd.cli.options import with_config, with_format
from kvd.cli.render import TextTable
from kvd.config.load import load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.config.schema import Config


CHECKS: tuple[Callable[[Subject], list[DoctorFinding]], ...] = (
    *(host.versions, memory.memory, memory.backing, host.shared_memory, host.huge_pages),
    *(memory.numa, host.locked_memory, host.open_files, host.clock, host.user),
    *(host.runtime_directory, host.recordings, host.devices, memory.cuda, host.credentials),
    *(service.interpreter, service.service, service.late_marks, service.outlived),
    *(host.addresses, peers.peer_keys),
    *(transport.ucx_environment, transport.tcp_retries, host.direct_copies, transport.binding),
    *(tiers.disk, tiers.store),
    *(peers.neighbours, transport.self_transfer, devices.device_transfer),
)
"""What is looked at, in the order in which it is shown: what is asked is said by each function, in
the first line of its documentation. A finding has its own fix, with the numbers of this host."""

SLOW = frozenset({peers.neighbours, transport.self_transfer, devices.device_transfer})
"""Up to three seconds each: left out by ``--quick``."""

_MARKS = {
    Severity.GOOD: ("ok", "green"),
    Severity.POOR: ("poor", "yellow"),
    Severity.WRONG: ("WRONG", "bold red"),
}


@click.command()
@with_config("Check for this file instead of /etc/kvd/kvd.toml.")
@click.option("--quick", is_flag=True, help="Leave out the peers and the transfer: seconds.")
@with_format
def doctor_command(config_file: Path | None, quick: bool, form: str) -> None:
    """Check this host: memory, NUMA, limits, clock, rights, ports, peers, NIXL, a real transfer.

    Every finding that is not good comes with what to do about it.
    """
    config, findings = effective(config_file)
    subject = Subject(config, dict(os.environ))
    # In the order of the table: what a later check needs of the host an earlier one has judged, so
    # its fix may say "see nixl above".
    for check in CHECKS:
        if not (quick and check in SLOW):
            findings += check(subject)
    bad = sum(finding.severity is Severity.WRONG for finding in findings)
    render.answer(form, {"fit": not bad, "findings": findings}, table_of(findings))
    if bad:
        raise VerbFailed(f"{bad} of {len(findings)} findings are wrong; each one names its fix")


def effective(config_file: Path | None) -> tuple[Config, list[DoctorFinding]]:
    """The configuration to check for, and what is wrong with it; the defaults if anything is."""
    loaded = load(config_file, os.environ, ())
    if not isinstance(loaded, list):
        return loaded, [good("configuration", "valid")]
    defaults = load(Path(os.devnull), {}, ())
    assert not isinstance(defaults, list), "the defaults are valid"
    findings = []
    for error in loaded:
        subject = f"{error.key} = {error.value}: " if error.key else ""
        check = f"configuration {error.where}"
        findings.append(wrong(check, f"{subject}{error.rule}", error.fix))
    return defaults, findings


def table_of(findings: Sequence[DoctorFinding]) -> TextTable:
    """The findings as a table, each fix on a line of its own."""
    out = TextTable("", "CHECK", "FINDING")
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        fix = f"-> {finding.fix}" if finding.fix else ""
        out.row(Text(mark, style), finding.check, finding.what, prose=fix)
    return out
