"""``kvd doctor``: is this host fit for kvd? Needs no daemon and changes nothing.

``CHECKS`` is the table of what is looked at, in the order in which it is shown; a check is a
function from the ``Subject`` to its findings. Ends with 1 if one of them is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.text import Text

from kvd.cli import render
from kvd.cli.doctor import host, memory, peers, service, transport
from kvd.cli.doctor.finding import DoctorFinding, Severity, Subject, good, wrong
from kvd.cli.exits import VerbFailed
from kvd.cli.options import with_config, with_format
from kvd.cli.sheet import TextTable
from kvd.config.load import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.config.origin import ConfigError
    from kvd.config.schema import Config


class HostCheck(msgspec.Struct, frozen=True):
    """One row: what is ``asked``, who answers, and what usually helps where it is not well.

    A finding has its own fix, with the numbers and names of this host.
    """

    name: str
    asked: str
    run: Callable[[Subject], list[DoctorFinding]]
    remedy: str
    is_slow: bool = False
    """Up to three seconds: left out by ``--quick``."""


CHECKS = (
    HostCheck(
        name="packages",
        asked="Are Python and the packages there, and new enough?",
        run=host.versions,
        remedy="install kvd again, with constraints.txt",
    ),
    HostCheck(
        name="memory",
        asked="Does the pool fit, by the rule that the daemon reserves it by?",
        run=memory.memory,
        remedy="lower pool.size, or end who has the memory",
    ),
    HostCheck(
        name="pool memory",
        asked="Can memory of the configured kind be had, and by this user?",
        run=memory.backing,
        remedy="make the directory, enlarge the file system, or set another pool.backing",
    ),
    HostCheck(
        name="/dev/shm",
        asked="Is there room in /dev/shm, where UCX puts its small shared segments?",
        run=host.shared_memory,
        remedy="remove what is left over there, or enlarge it",
    ),
    HostCheck(
        name="huge pages",
        asked="Can the kernel give the pool 2 MiB pages?",
        run=host.huge_pages,
        remedy="use Linux 6.1 or newer, or set pool.huge_pages = 'off'",
    ),
    HostCheck(
        name="numa",
        asked="Will the pool lie in one NUMA node, the one of the devices, and fit there?",
        run=memory.numa,
        remedy="bind the daemon to the node of its devices",
    ),
    HostCheck(
        name="memlock",
        asked="May the daemon lock what an RDMA device would pin?",
        run=host.locked_memory,
        remedy="LimitMEMLOCK=infinity in the unit",
    ),
    HostCheck(
        name="open files",
        asked="May the daemon open as many files as its clients and peers take?",
        run=host.open_files,
        remedy="raise LimitNOFILE in the unit",
    ),
    HostCheck(
        name="clock",
        asked="Is the time of day synchronised, and cheap to read? Did the host sleep?",
        run=host.clock,
        remedy="timedatectl set-ntp true",
    ),
    HostCheck(
        name="user",
        asked="Can the sockets be given to the configured group, and is anybody in it?",
        run=host.user,
        remedy="make the group, or join it",
    ),
    HostCheck(
        name="sockets",
        asked="Can the sockets be made where they belong, and by nobody else?",
        run=host.runtime_directory,
        remedy="install -d the directory for the user that runs kvd",
    ),
    HostCheck(
        name="recordings",
        asked="Can the flight recorder write, and is there room for one recording?",
        run=host.recordings,
        remedy="set recorder.directory, or lower recorder.max_bytes",
    ),
    HostCheck(
        name="devices",
        asked="May this user use the RDMA devices and GPUs that the host has?",
        run=host.devices,
        remedy="load the modules, or give the device nodes to the user",
    ),
    HostCheck(
        name="cuda",
        asked="What is there of CUDA, and does a pool on devices fit there?",
        run=memory.cuda,
        remedy="lower pool.size, or end who has the device's memory",
    ),
    HostCheck(
        name="credentials",
        asked="Can the credentials be read that systemd passes to a service?",
        run=host.credentials,
        remedy="see LoadCredential= of the unit",
    ),
    HostCheck(
        name="interpreter",
        asked="Could a service under a user of its own start this Python at all?",
        run=service.interpreter,
        remedy="install kvd where a service can reach it",
    ),
    HostCheck(
        name="service",
        asked="Is the unit there, and how is it doing?",
        run=service.service,
        remedy="kvd systemd install, and systemctl enable --now kvd",
    ),
    HostCheck(
        name="addresses",
        asked="Are the configured ports free, and if not, who has them?",
        run=host.addresses,
        remedy="end who has the port, or choose another",
    ),
    HostCheck(
        name="keys",
        asked="Do peers prove who they are, and with which files?",
        run=peers.peer_keys,
        remedy="run kvd keygen on every node, and list the public keys",
    ),
    HostCheck(
        name="UCX_*",
        asked="Does a variable of UCX hang or hurt?",
        run=transport.ucx_environment,
        remedy="unset it: kvd sets what it needs",
    ),
    HostCheck(
        name="tcp_retries2",
        asked="How long does the kernel keep trying a peer that has vanished?",
        run=transport.tcp_retries,
        remedy="lower net.ipv4.tcp_retries2",
    ),
    HostCheck(
        name="direct copies",
        asked="May one process copy out of another, as bytes go on one host?",
        run=host.direct_copies,
        remedy="sysctl -w kernel.yama.ptrace_scope=0",
    ),
    HostCheck(
        name="nixl",
        asked="Can NIXL be imported, and has it the plugin for UCX?",
        run=transport.binding,
        remedy="pip install nixl",
    ),
    HostCheck(
        name="peers",
        asked="Is each configured peer there, and is its pool laid out alike?",
        run=peers.neighbours,
        remedy="start kvd there, or make [pool] equal on both",
        is_slow=True,
    ),
    HostCheck(
        name="self-transfer",
        asked="Do bytes get from one transfer process to another, and as fast as they could?",
        run=transport.self_transfer,
        remedy="unset UCX_TLS and UCX_NET_DEVICES",
        is_slow=True,
    ),
)
"""What is looked at, in the order in which it is shown."""

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
    for check in CHECKS:
        if not (quick and check.is_slow):
            findings += check.run(subject)
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
    return defaults, [_config_finding(error) for error in loaded]


def _config_finding(error: ConfigError) -> DoctorFinding:
    subject = f"{error.key} = {error.value}: " if error.key else ""
    return wrong(f"configuration {error.where}", f"{subject}{error.rule}", error.fix)


def table_of(findings: Sequence[DoctorFinding]) -> TextTable:
    """The findings as a table, each fix on a line of its own."""
    out = TextTable("", "CHECK", "FINDING")
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        fix = f"-> {finding.fix}" if finding.fix else ""
        out.row(Text(mark, style), finding.check, finding.what, prose=fix)
    return out
