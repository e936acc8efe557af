"""Check of ``kvd doctor`` that looks at the clocks.

Deadlines, silences and ages are measured by the monotonic clock, which nobody can set. The time of
day counts in one place: it is the beginning of a daemon's incarnation, by which peers tell a
restarted daemon from the one before it. The lock file keeps it growing until the host is booted
anew; from then on it is the clock's word alone.
"""

from __future__ import annotations

import ctypes
import time

import msgspec

from kvd.cli.finding import Finding, Subject, good, poor, wrong

STA_UNSYNC = 0x40
TIME_ERROR = 5
EARLIEST_S = 1_735_689_600
"""The beginning of 2025, before kvd was: a clock that says less was never set."""
ASLEEP_S = 1.0
SLOW_SOURCES = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})
_SYNC = "timedatectl set-ntp true (or: systemctl enable --now chronyd)"


class Clocks(msgspec.Struct, frozen=True):
    """What the kernel says: ``is_synchronised`` None if it does not.

    ``slept_s``: for how long the monotonic clock has stood still since boot.
    """

    now_s: float
    is_synchronised: bool | None
    max_error_s: float
    slept_s: float


class _Timex(ctypes.Structure):
    """The beginning of the kernel's ``struct timex``, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clocks() -> Clocks:
    """Ask the kernel; changes nothing and needs no right."""
    timex = _Timex()
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    is_synchronised = None
    if state >= 0:
        is_synchronised = state != TIME_ERROR and not timex.status & STA_UNSYNC
    return Clocks(
        now_s=time.time(),
        is_synchronised=is_synchronised,
        max_error_s=timex.maxerror / 1e6,
        slept_s=time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC),
    )


def clock(subject: Subject) -> list[Finding]:
    """Whether the clocks are what kvd takes them for."""
    return [*judge(read_clocks()), *_source(subject)]


def judge(clocks: Clocks) -> list[Finding]:
    """What is to be said of them."""
    out = [_time_of_day(clocks)]
    if clocks.slept_s > ASLEEP_S:
        what = (
            f"this host slept for {clocks.slept_s:.0f} s since it was booted: deadlines stand "
            "still meanwhile, and peers lose it"
        )
        fix = "systemctl mask sleep.target suspend.target hibernate.target"
        out.append(poor("suspend", what, fix))
    return out


def _time_of_day(clocks: Clocks) -> Finding:
    shown = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clocks.now_s))
    if clocks.now_s < EARLIEST_S:
        what = f"says {shown}: peers that knew this node before refuse it as older (peer-stale)"
        return wrong("clock", what, f"date -s '2026-01-31 12:00' with the right time, then {_SYNC}")
    if clocks.is_synchronised is None:
        what = "whether it is synchronised cannot be asked: the system call is not allowed here"
        return poor("clock", what, "look outside of this container: timedatectl")
    if not clocks.is_synchronised:
        what = (
            "not synchronised: set back over a reboot, it makes this node look older than it was, "
            "and peers refuse it (peer-stale); times of two nodes' events do not compare"
        )
        return poor("clock", what, _SYNC)
    return good("clock", f"synchronised, at most {clocks.max_error_s * 1e3:.0f} ms off")


def _source(subject: Subject) -> list[Finding]:
    """Every step of a daemon reads the time: some sources make that a slow access to a device."""
    place = "sys/devices/system/clocksource/clocksource0"
    source = subject.text(f"{place}/current_clocksource")
    if source not in SLOW_SOURCES:
        return []
    others = subject.text(f"{place}/available_clocksource").split()
    better = next((one for one in others if one not in SLOW_SOURCES), "")
    fix = f"echo {better} > /{place}/current_clocksource"
    if not better:
        fix = "look for why the kernel distrusts the TSC: dmesg | grep -i tsc"
    return [poor("clock source", f"{source}: reading the time takes about a microsecond", fix)]
