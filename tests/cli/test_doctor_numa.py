"""``kvd doctor``: where the pool's memory and the devices lie, on hosts with several nodes."""

from __future__ import annotations

import os

import pytest

from kvd.cli.doctor.finding import Severity
from kvd.cli.doctor.memory import numa
from tests.cli.inchild import subject, write
from tests.cli.sentences import sentence_of

GOOD, POOR, WRONG = Severity.GOOD, Severity.POOR, Severity.WRONG
NODES = "sys/devices/system/node"


@pytest.fixture
def host(tmp_path):
    """Two nodes of four CPUs and 1 GiB free, a NIC on the second one, and no binding."""
    place = NODES.replace("/", "__")
    for node in (0, 1):
        write(
            tmp_path,
            **{
                f"{place}__node{node}__cpulist": f"{4 * node}-{4 * node + 3}\n",
                f"{place}__node{node}__meminfo": (
                    f"Node {node} MemTotal:  2097152 kB\nNode {node} MemFree:   1048576 kB\n"
                ),
            },
        )
    write(tmp_path, sys__class__net__eth0__device__numa_node="1\n")
    bind(tmp_path, "0-7", "0-1")
    return tmp_path


def bind(root, cpus, memory) -> None:
    write(root, proc__self__status=f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}\n")


def test_this_host_is_read_as_it_is():
    n_nodes = sum(name.startswith("node") for name in os.listdir(f"/{NODES}"))

    found = numa(subject())

    assert found[0].check == "numa"
    assert (found[0].what == "one node: all memory is near") == (n_nodes == 1)


def test_a_daemon_that_may_run_anywhere_is_told_to_bind_itself_to_the_node_of_the_nic(host):
    [finding] = numa(subject(root=host))

    assert finding.severity is POOR
    assert finding.what == sentence_of(
        "a daemon that may run anywhere is told to bind itself to the node of the nic 1"
    )
    assert finding.fix == sentence_of(
        "a daemon that may run anywhere is told to bind itself to the node of the nic 2"
    )


def test_a_daemon_bound_beside_its_nic_is_good(host):
    bind(host, "4-7", "1")

    [finding] = numa(subject(root=host))

    assert (finding.severity, finding.what) == (
        GOOD,
        "a daemon started from here is bound to node 1; eth0 on node 1",
    )


def test_a_daemon_bound_away_from_its_nic_crosses_between_nodes(host):
    bind(host, "0-3", "0")

    [finding] = numa(subject(root=host))

    assert finding.severity is POOR
    assert "is bound to node 0, but eth0 on node 1: every transfer crosses" in finding.what
    assert "NUMAMask=1" in finding.fix


def test_only_the_devices_that_ucx_may_use_count(host):
    write(host, sys__class__net__eth9__device__numa_node="0\n")
    bind(host, "4-7", "1")

    [both] = numa(subject(root=host, UCX_NET_DEVICES="eth0"))
    [other] = numa(subject("transfer.ucx.UCX_NET_DEVICES=eth9", root=host))

    assert (both.severity, other.severity) == (GOOD, POOR)
    assert "NUMAMask=0" in other.fix


def test_rdma_devices_count_before_network_devices(host):
    write(host, sys__class__infiniband__mlx5_0__device__numa_node="0\n")

    [finding] = numa(subject(root=host))

    assert "mlx5_0 on node 0" in finding.what
    assert "eth0" not in finding.what


def test_a_pool_larger_than_its_node_is_wrong_where_no_other_may_be_used(host):
    bind(host, "4-7", "1")
    strict = numa(subject("pool.size=1GiB", root=host))
    bind(host, "4-7", "0-1")
    soft = numa(subject("pool.size=1GiB", root=host))

    assert [one.severity for one in strict] == [GOOD, WRONG]
    assert strict[1].what == sentence_of(
        "a pool larger than its node is wrong where no other may be used 1"
    )
    assert [one.severity for one in soft] == [GOOD, POOR]
    assert soft[1].fix == sentence_of(
        "a pool larger than its node is wrong where no other may be used 2"
    )
