"""``kvd doctor``: limits and rights, each in a process that really has too few."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import tempfile
import time
from pathlib import Path

import pytest

from kvd.cli.doctor import command, host, transport
from kvd.cli.doctor.finding import DoctorFinding, Severity, Subject, judged
from kvd.cli.doctor.host import Clocks
from tests.cli.inchild import in_child, nobody, subject, write
from tests.cli.sentences import sentence_of

GOOD, POOR, WRONG = Severity.GOOD, Severity.POOR, Severity.WRONG
CLONE_NEWTIME = 0x80
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


def limit(kind: int, soft: int):
    return lambda: resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def rdma(root) -> None:
    """A host with one RDMA device; this process has no capability."""
    write(root, sys__class__infiniband__mlx5_0__node_type="1: CA", proc__self__status="CapEff:\t0")


def test_too_few_open_files_for_the_clients_is_poor_and_far_too_few_wrong():
    few = in_child(limit(resource.RLIMIT_NOFILE, 300), host.open_files, subject())
    none = in_child(limit(resource.RLIMIT_NOFILE, 64), host.open_files, subject())

    assert few["open files"].severity is POOR
    assert few["open files"].what == sentence_of(
        "too few open files for the clients is poor and far too few wrong 1"
    )
    assert few["open files"].fix == sentence_of(
        "too few open files for the clients is poor and far too few wrong 2"
    )
    assert none["open files"].severity is WRONG


def test_each_shard_takes_open_files_and_locked_memory(tmp_path):
    rdma(tmp_path)
    few = limit(resource.RLIMIT_NOFILE, 300)
    sets = ("pool.heads=8", "pool.tp_size=4", "pool.replicas=2")
    found = in_child(few, host.open_files, subject(*sets))
    spoil = limit(resource.RLIMIT_MEMLOCK, 65_536)
    pinned = in_child(spoil, host.locked_memory, subject(*sets, root=tmp_path))

    assert found["open files"].fix.endswith(f"ulimit -n {896 + 7 * 2}")
    assert "would pin 64.0 MiB (kv 64.0 MiB)" in pinned["memlock"].what


def test_locked_memory_counts_only_where_a_device_pins_the_pool(tmp_path):
    spoil = limit(resource.RLIMIT_MEMLOCK, 65_536)
    bare = in_child(spoil, host.locked_memory, subject(root=tmp_path))
    rdma(tmp_path)
    pinned = in_child(spoil, host.locked_memory, subject(root=tmp_path))

    assert bare["memlock"].severity is GOOD
    assert pinned["memlock"].severity is WRONG
    assert pinned["memlock"].what == sentence_of(
        "locked memory counts only where a device pins the pool"
    )
    assert "LimitMEMLOCK=infinity" in pinned["memlock"].fix


def test_locked_memory_is_not_limited_for_whom_the_kernel_does_not_limit_it(tmp_path):
    rdma(tmp_path)
    write(tmp_path, proc__self__status=f"Name:\tkvd\nCapEff:\t{1 << 14:016x}")
    spoil = limit(resource.RLIMIT_MEMLOCK, 65_536)

    found = in_child(spoil, host.locked_memory, subject(root=tmp_path))

    assert found["memlock"].severity is GOOD
    assert "CAP_IPC_LOCK" in found["memlock"].what


def test_limits_are_those_of_the_daemon_where_one_holds_the_lock(tmp_path):
    """The shell that asks has other limits than the service."""
    about = subject(f"sockets.client=ipc://{tmp_path}/c.sock")
    assert judged(about).pid == 0
    told, tell = os.pipe()
    ready, is_ready = os.pipe()
    pid = os.fork()
    if not pid:
        # What other tests of this process have open would count among the 77.
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in {told, tell, is_ready}:
                with contextlib.suppress(OSError):
                    os.close(number)
        limit(resource.RLIMIT_NOFILE, 77)()
        lock = os.open(tmp_path / "c.sock.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, f"{os.getpid()} 1\n".encode())
        os.write(is_ready, b"x")
        os.close(tell)
        os.read(told, 1)
        os._exit(0)
    os.read(ready, 1)
    [finding] = host.open_files(about)
    os.close(tell)
    os.waitpid(pid, 0)

    assert finding.severity is WRONG
    assert finding.what.startswith(f"the running daemon (pid {pid}) may open 77;")
    assert judged(about).pid == 0, "the lock of a daemon that ended is nobody's"


@pytest.mark.parametrize(
    ("scope", "caps", "severity", "fix"),
    [
        ("0", 0, GOOD, ""),
        ("1", 0, POOR, "sysctl -w kernel.yama.ptrace_scope=0"),
        ("1", 1 << 19, GOOD, ""),
        ("3", 1 << 19, POOR, "reboot"),
    ],
)
def test_yama_takes_direct_copies_from_whom_it_does(tmp_path, scope, caps, severity, fix):
    write(
        tmp_path,
        proc__sys__kernel__yama__ptrace_scope=scope,
        proc__self__status=f"CapEff:\t{caps:016x}",
    )

    [finding] = host.direct_copies(subject(root=tmp_path))

    assert finding.severity is severity
    assert fix in finding.fix


def clocks(**changes) -> Clocks:
    return Clocks(**{"now_s": 1.8e9, "is_synchronised": True, "max_error_s": 0.02, **changes})


def test_a_synchronised_clock_is_good_and_another_poor_or_wrong():
    judged = [
        host.judge_clocks(one)
        for one in (
            clocks(slept_s=0.0),
            clocks(slept_s=0.0, is_synchronised=False),
            clocks(slept_s=0.0, is_synchronised=None),
            clocks(slept_s=0.0, now_s=1000.0),
        )
    ]

    assert [[one.severity for one in found] for found in judged] == [
        [GOOD],
        [POOR],
        [POOR],
        [WRONG],
    ]
    assert judged[0][0].what == sentence_of(
        "a synchronised clock is good and another poor or wrong"
    )
    assert judged[3][0].what.startswith("says 1970-01-01T00:16:40Z: times in events")


def test_the_kernel_says_whether_the_clock_is_synchronised():
    found = host.read_clocks()

    assert found.is_synchronised in {True, False}
    assert abs(found.now_s - time.time()) < 5
    assert found.slept_s > -0.1


def fall_asleep() -> None:
    """Go on in a time namespace whose clock since boot is 100 s ahead, as after a sleep."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWTIME) == 0, os.strerror(ctypes.get_errno())
    Path("/proc/self/timens_offsets").write_text("boottime 100 0\n")
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)


@root_only
@pytest.mark.skipif(not Path("/proc/self/timens_offsets").exists(), reason="no time namespaces")
def test_a_host_that_slept_is_poor():
    finding = in_child(fall_asleep, host.clock, subject())["suspend"]

    assert finding.severity is POOR
    assert finding.what.startswith("this host slept for 100 s since it was booted")


def test_a_slow_clock_source_is_poor_with_the_one_to_choose(tmp_path):
    place = "sys__devices__system__clocksource__clocksource0__"
    write(tmp_path, **{f"{place}current_clocksource": "hpet\n"})
    write(tmp_path, **{f"{place}available_clocksource": "hpet tsc acpi_pm\n"})

    finding = host.clock(subject(root=tmp_path))[-1]

    assert (finding.check, finding.severity) == ("clock source", POOR)
    assert finding.fix.startswith("echo tsc > /sys/devices/system/clocksource/")


@root_only
def test_a_group_that_the_user_is_not_in_is_wrong():
    about = subject("sockets.group=adm")

    found = in_child(nobody, host.user, about)

    assert found["user"].severity is WRONG
    assert found["user"].what == sentence_of("a group that the user is not in is wrong")
    assert found["user"].fix.startswith("usermod -aG adm nobody")


def test_recordings_need_a_directory_and_room(tmp_path):
    folder = tmp_path / "deep" / "recordings"
    there = host.recordings(subject(f"recorder.directory={folder}"))
    huge = host.recordings(subject(f"recorder.directory={folder}", f"recorder.max_bytes={2**36}"))
    off = host.recordings(subject("recorder.enabled=false"))

    assert [one.severity for one in there] == [GOOD]
    assert huge[0].severity in {GOOD, POOR}
    assert off == []
    assert not folder.exists()


@root_only
def test_recordings_in_a_directory_of_somebody_else_are_poor(tmp_path):
    tmp_path.chmod(0o700)
    about = subject(f"recorder.directory={tmp_path}/recordings")

    found = in_child(nobody, host.recordings, about)

    [finding] = found.values()
    assert finding.severity is POOR
    assert finding.fix == f"install -d -m 0700 -o nobody {tmp_path}/recordings"


@root_only
def test_devices_that_the_user_may_not_open_are_poor():
    """Real files with real modes, under a root of their own."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        write(
            root,
            sys__class__infiniband__mlx5_0__node_type="1: CA",
            dev__infiniband__uverbs0="",
            dev__infiniband__rdma_cm="",
            dev__nvidia0="",
        )
        (root / "dev/infiniband/uverbs0").chmod(0o600)
        (root / "dev/infiniband/rdma_cm").chmod(0o666)
        (root / "dev/nvidia0").chmod(0o660)
        about = subject(root=root)

        shut = in_child(nobody, host.devices, about)
        own = in_child(lambda: None, host.devices, about)

    assert {check: one.severity for check, one in shut.items()} == {"rdma": POOR, "gpu": POOR}
    assert f"{root}/dev/infiniband/uverbs0 may not be opened" in shut["rdma"].what
    assert shut["gpu"].fix.startswith(f"chmod 0666 {root}/dev/nvidia0")
    assert {check: one.severity for check, one in own.items()} == {"rdma": GOOD, "gpu": GOOD}


def test_a_host_without_devices_says_nothing_of_them(tmp_path):
    assert host.devices(subject(root=tmp_path)) == []


def test_an_rdma_device_without_its_node_is_poor(tmp_path):
    write(tmp_path, sys__class__infiniband__mlx5_0__node_type="1: CA")

    [finding] = host.devices(subject(root=tmp_path))

    assert (finding.check, finding.severity) == ("rdma", POOR)
    assert "--device=/dev/infiniband" in finding.fix


def test_credentials_that_are_not_there_are_wrong(tmp_path):
    (tmp_path / "peer.secret").write_text("x")

    there = host.credentials(subject(CREDENTIALS_DIRECTORY=str(tmp_path)))
    gone = host.credentials(subject(CREDENTIALS_DIRECTORY=f"{tmp_path}/no"))

    assert [(one.severity, one.what) for one in there] == [(GOOD, f"{tmp_path}: peer.secret")]
    assert [one.severity for one in gone] == [WRONG]
    assert host.credentials(subject()) == []


@root_only
def test_a_user_without_any_right_gets_findings_and_no_traceback(tmp_path):
    """Every check is run as nobody, in directories that are shut."""
    tmp_path.chmod(0o700)
    about = subject(
        f"sockets.client=ipc://{tmp_path}/run/c.sock",
        f"sockets.admin=ipc://{tmp_path}/run/a.sock",
        f"pool.directory={tmp_path}/pool",
        "pool.backing=shm",
        "http.listen=127.0.0.1:80",
    )

    def all_but_nixl(one: Subject) -> list[DoctorFinding]:
        checks = [one for one in command.CHECKS if one is not transport.binding]
        return [finding for check in checks for finding in check(one)]

    found = in_child(nobody, all_but_nixl, about)

    wrong = {check for check, one in found.items() if one.severity is WRONG}
    assert {f"sockets in {tmp_path}/run", "pool memory"} <= wrong
    assert all(one.fix for one in found.values() if one.severity is not GOOD)
