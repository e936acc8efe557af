"""``kvd doctor``: each check on this host, and on hosts that have what it looks for."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli import kvd
from kvd.cli.doctor import command, host, memory, transport
from kvd.cli.doctor.finding import Severity, Subject
from kvd.config import load
from kvd.core.inputs import WritePath as Route
from kvd.pools.arena import SPARE_BYTES
from kvd.pools.host_memory import Free
from tests.cli.sentences import sentence_of

GOOD, POOR, WRONG = Severity.GOOD, Severity.POOR, Severity.WRONG


def subject(*sets: str, **environ: str) -> Subject:
    """The defaults, with some values and variables of a test's own."""
    config = load(Path(os.devnull), {}, sets)
    assert not isinstance(config, list), config
    return Subject(config, environ)


def severities(findings):
    return {finding.check: finding.severity for finding in findings}


def test_every_finding_that_is_not_good_has_a_fix(tmp_path):
    done = CliRunner().invoke(kvd, ["doctor", "--quick", "--format", "json"])

    diagnosis = json.loads(done.stdout)
    assert diagnosis["fit"] == (done.exit_code == 0)
    assert [
        one for one in diagnosis["findings"] if one["severity"] != "good" and not one["fix"]
    ] == []
    assert {"python", "packages", "memory", "nixl", "UCX_*"} <= {
        one["check"] for one in diagnosis["findings"]
    }


def test_a_wrong_configuration_is_a_finding_and_the_rest_is_checked(tmp_path):
    file = tmp_path / "kvd.toml"
    file.write_text("[pool]\nlayers = 0\n")

    done = CliRunner().invoke(kvd, ["doctor", "--quick", "--config", str(file)])

    assert done.exit_code == 1
    assert f"configuration {file}:2" in done.stdout
    assert "nixl" in done.stdout


def test_a_pool_larger_than_memory_is_wrong():
    [finding] = memory.memory(subject("pool.size=50TiB"))

    assert finding.severity is WRONG
    assert finding.what.startswith(
        "the pool needs 52,429,824 MiB (kv 52,428,800 MiB, kv.saved 1,024 MiB)"
    )
    assert finding.fix.startswith("lower pool.pages or pool.size to at most ")


def test_memory_is_judged_by_the_rule_that_the_daemon_reserves_by(monkeypatch):
    """What fits only without the spare that is left to the host is wrong here as it is there."""
    free = Free(SPARE_BYTES + 2**30 - 1, "memory.max of control group /x")
    monkeypatch.setattr(memory, "free_memory", lambda: free)

    assert severities(memory.memory(subject("pool.size=1GiB"))) == {"memory": WRONG}
    [fits] = memory.memory(subject("pool.size=512MiB"))  # and an eighth for retracted leases
    assert (fits.severity, fits.what) == (
        GOOD,
        "the pool takes 576.0 MiB of 1.2 GiB free (memory.max of control group /x)",
    )


def test_a_directory_that_anyone_may_write_to_is_wrong(tmp_path):
    tmp_path.chmod(0o777)

    [finding] = host.runtime_directory(
        subject(f"sockets.admin=ipc://{tmp_path}/a", f"sockets.client=ipc://{tmp_path}/c")
    )

    assert (finding.severity, finding.fix) == (WRONG, f"chmod o-w {tmp_path}")


def test_a_directory_that_the_daemon_can_make_is_good(tmp_path):
    place = tmp_path / "run"

    [finding] = host.runtime_directory(
        subject(f"sockets.admin=ipc://{place}/a", f"sockets.client=ipc://{place}/c")
    )

    assert (finding.severity, finding.what) == (GOOD, "will be made by the daemon")


def test_a_taken_port_is_wrong_and_a_free_one_good():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = host.addresses(
            subject(f"peers.listen=tcp://127.0.0.1:{port}", "http.listen=127.0.0.1:0")
        )
    free = host.addresses(subject(f"peers.listen=tcp://127.0.0.1:{port}", "http.listen=off"))

    assert severities(taken) == {"peers.listen": WRONG}
    assert severities(free) == {"peers.listen": GOOD}


def test_a_daemon_that_answers_is_named_and_owns_its_ports(daemon):
    with socket.create_server(("127.0.0.1", 0)) as its:
        found = host.addresses(
            subject(
                f"sockets.admin={daemon.endpoint}",
                f"peers.listen=tcp://127.0.0.1:{its.getsockname()[1]}",
                "http.listen=off",
            )
        )

    assert severities(found) == {"daemon": GOOD, "peers.listen": GOOD}
    assert found[0].what.startswith("decode-node answers at ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UCX_TCP_CONN_NB", "n"),
        ("UCX_KEEPALIVE_INTERVAL", "2s"),
        ("UCX_MEM_MMAP_HOOK_MODE", "bistro"),
        ("UCX_TLS", "sm,self"),
        ("UCX_NET_DEVICES", "eth77"),
        ("UCX_LOG_LEVEL", "trace"),
        ("UCX_ERROR_HANDLING", "none"),
    ],
)
def test_a_variable_that_hurts_is_found_wherever_it_is_set(name, value):
    from_environ = transport.ucx_environment(subject(**{name: value}))
    from_config = transport.ucx_environment(subject(f"transfer.ucx.{name}={value}"))

    assert severities(from_environ) == {name: POOR}
    assert from_config == from_environ


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UCX_TLS", "all"),
        ("UCX_TLS", "tcp,cma"),
        ("UCX_TLS", "^ib"),
        ("UCX_NET_DEVICES", "lo"),
        ("UCX_LOG_LEVEL", "warn"),
    ],
)
def test_a_variable_that_is_harmless_is_only_listed(name, value):
    [finding] = transport.ucx_environment(subject(**{name: value}))

    assert (finding.severity, finding.what) == (GOOD, name)


@pytest.mark.slow
def test_self_transfer_moves_the_bytes_of_two_real_processes_by_both_ways():
    here, network = transport.self_transfer(subject())

    assert (here.severity, network.severity) == (GOOD, GOOD), (here.what, network.what)
    assert "64.0 MiB at " in here.what
    assert "by same-host (cma/memory)" in here.what
    assert "by network (" in network.what
    assert "tcp/" in network.what


UCX_SAYS = """\
[1.0] [vm:1:0]      ucp_worker.c:1997 UCX  INFO    from self cfg#0 rma_am(tcp/lo)  am(tcp/lo)
[1.0] [vm:1:0]   | from self cfg#0                                        |
[1.0] [vm:1:0]   | remote memory write by ucp_put* from host memory       |
[1.0] [vm:1:0]   | 0..inf | zero-copy   | cma/memory                      |
[1.0] [vm:1:0]   | from inter-node cfg#1                                  |
[1.0] [vm:1:0]   | remote memory write by ucp_put* from host memory       |
[1.0] [vm:1:0]   | 0..64  | short       | tcp/lo                          |
[1.0] [vm:1:0]   | 65..inf | zero-copy  | 52% on tcp/lo and 48% on tcp/eth0 |
[1.0] [vm:1:0]   | from inter-node cfg#1                                  |
[1.0] [vm:1:0]   | active message by ucp_am_send* from host memory        |
[1.0] [vm:1:0]   | 0..inf | multi-frag  | tcp/docker0                     |
"""


def test_lanes_are_those_of_long_writes_to_the_last_connection():
    assert transport.lanes_of(UCX_SAYS) == sentence_of(
        "lanes are those of long writes to the last connection"
    )
    assert transport.lanes_of("nothing of the kind") == ""


@pytest.mark.slow
def test_a_transfer_without_direct_copies_is_poor_and_names_what_it_went_by():
    [finding] = transport.self_transfer(subject("transfer.ucx.UCX_TLS=tcp"))

    assert finding.severity is POOR
    assert "by network (" in finding.what
    assert "tcp/" in finding.what


@pytest.mark.parametrize(
    ("tls", "without"),
    [
        ("all", "^sm"),
        ("^ib", "^ib,sm"),
        ("tcp,cma", "tcp"),
        ("rc,sm,cuda_copy", "rc,cuda_copy"),
        ("sm", "^sm"),
    ],
)
def test_the_network_is_tried_with_the_transports_that_were_chosen_for_it(tls, without):
    assert transport.without_host(tls) == without


def network(about, lanes):
    measured = transport.Measured(64 * 2**20, 0.01, Route.NETWORK, bytes_equal=True, lanes=lanes)
    return transport.judge_network(about, measured)


def test_a_device_of_containers_is_poor_where_peers_are_elsewhere():
    lanes = "50% on tcp/eth0 and 50% on tcp/docker0"
    alone = network(subject(), lanes)
    peered = network(subject("peers.connect.p=tcp://127.0.0.1:7412"), lanes)

    assert (alone.severity, peered.severity) == (GOOD, POOR)
    assert "docker* leads to no other host" in peered.what
    assert "UCX_NET_DEVICES" in peered.fix


def test_tcp_is_poor_where_there_is_an_rdma_device(tmp_path):
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    about = Subject(subject().config, {}, tmp_path)

    assert network(about, "tcp/eth0").severity is POOR
    assert "although there is mlx5_0" in network(about, "tcp/eth0").what
    assert network(about, "rc_mlx5/mlx5_0:1").severity is GOOD


def test_each_check_of_the_table_says_what_is_asked() -> None:
    assert len(set(command.CHECKS)) == len(command.CHECKS)
    assert all((check.__doc__ or "").splitlines()[0] for check in command.CHECKS)
    assert [check.__name__ for check in command.CHECKS if check in command.SLOW] == [
        "neighbours",
        "self_transfer",
        "device_transfer",
    ]
