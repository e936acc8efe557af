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
from kvd.cli.render import TextTable
from kvd.config.load import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.config.origin import ConfigError
    from kvd.config.schema import Config


class HostCheck(msgspec.Struct, frozen=True):
    """One row: its ``name``, the function that answers, and what usually helps.

    What is asked is said by the function itself, in the first line of its documentation. A finding
    has its own fix, with the numbers and names of this host.
    """

    name: str
    run: Callable[[Subject], list[DoctorFinding]]
    remedy: str
    is_slow: bool = False
    """Up to three seconds: left out by ``--quick``."""


CHECKS = (
    HostCheck("packages", host.versions, "install kvd again, with constraints.txt"),
    HostCheck("memory", memory.memory, "lower pool.size, or end who has the memory"),
    HostCheck(
        "pool memory",
        memory.backing,
        "make the directory, enlarge the file system, or set another pool.backing",
    ),
    HostCheck("/dev/shm", host.shared_memory, "remove what is left over there, or enlarge it"),
    HostCheck(
        "huge pages", host.huge_pages, "use Linux 6.1 or newer, or set pool.huge_pages = 'off'"
    ),
    HostCheck("numa", memory.numa, "bind the daemon to the node of its devices"),
    HostCheck("memlock", host.locked_memory, "LimitMEMLOCK=infinity in the unit"),
    HostCheck("open files", host.open_files, "raise LimitNOFILE in the unit"),
    HostCheck("clock", host.clock, "timedatectl set-ntp true"),
    HostCheck("user", host.user, "make the group, or join it"),
    HostCheck(
        "sockets", host.runtime_directory, "install -d the directory for the user that runs kvd"
    ),
    HostCheck("recordings", host.recordings, "set recorder.directory, or lower recorder.max_bytes"),
    HostCheck("devices", host.devices, "load the modules, or give the device nodes to the user"),
    HostCheck("cuda", memory.cuda, "lower pool.size, or end who has the device's memory"),
    HostCheck("credentials", host.credentials, "see LoadCredential= of the unit"),
    HostCheck("interpreter", service.interpreter, "install kvd where a service can reach it"),
    HostCheck("service", service.service, "kvd systemd install, and systemctl enable --now kvd"),
    HostCheck("addresses", host.addresses, "end who has the port, or choose another"),
    HostCheck("keys", peers.peer_keys, "run kvd keygen on every node, and list the public keys"),
    HostCheck("UCX_*", transport.ucx_environment, "unset it: kvd sets what it needs"),
    HostCheck("tcp_retries2", transport.tcp_retries, "lower net.ipv4.tcp_retries2"),
    HostCheck("direct copies", host.direct_copies, "sysctl -w kernel.yama.ptrace_scope=0"),
    HostCheck("nixl", transport.binding, "pip install nixl"),
    HostCheck(
        "peers", peers.neighbours, "start kvd there, or make [pool] equal on both", is_slow=True
    ),
    HostCheck(
        "self-transfer", transport.self_transfer, "unset UCX_TLS and UCX_NET_DEVICES", is_slow=True
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
    # In the order of the table: what a later check needs of the host an earlier one has judged, so
    # its fix may say "see nixl above".
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
