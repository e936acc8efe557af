"""What leaves the pool of a real daemon is on its disk, and comes back as it was, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import count
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from kvd.client import KvdError
from kvd.client import connect_sync as connect
from kvd.core.tiers.keys import keys_along, root_key
from kvd.core.tiers.tier import parted
from kvd.storage.objects import LONGEST_NAME
from kvd.storage.sizes import HEAD_BYTES, object_bytes
from kvd.types import ID_BYTES
from tests.daemon.conftest import findings
from tests.daemon.kv import PAGE, PAGE_BYTES, SHAPE, digest, tokens_of, write
from tests.support.breakpoints import Breakpoints, Step
from tests.support.daemons import Daemon, two_daemons
from tests.support.disks import small_disk

PROMPT_PAGES = 24
PROMPT_TOKENS = PROMPT_PAGES * PAGE
N_PROMPTS = 14
"""More than the pool has room for."""
OBJECT_BYTES = object_bytes(PAGE_BYTES)
LIMIT_S = 30.0


def settings(tmp_path, **sets) -> dict[str, str]:
    """Of a daemon with a tier."""
    of_tier = {
        "tiers.disk.directory": str(tmp_path / "tier"),
        "tiers.disk.size": "64MiB",
        "tiers.disk.max_moving": "512KiB",
        "tiers.disk.deadline_s": "2",
        "tiers.disk.wait_s": "5",
    }
    return SHAPE | of_tier | sets


class Tiered:
    """A daemon with a tier, and prompts that do not fit into its pool."""

    def __init__(self, daemon, tmp_path, pages: int = PROMPT_PAGES, namespace: str = "") -> None:
        """``pages``: of each prompt."""
        self.directory = tmp_path / "tier"
        self.daemon = daemon
        self.namespace = namespace
        self.prompts = [tokens_of(pages * PAGE, seed) for seed in range(N_PROMPTS)]
        self.digests: dict[int, str] = {}

    def start(self) -> None:
        self.daemon.start()
        self.daemon.wait_ready()

    def compute(self, number: int) -> None:
        """Have a prompt cached, as an engine has."""
        with connect(self.daemon.client, name="engine") as node:
            lease = node.lease(self.prompts[number], namespace=self.namespace)
            write(node, lease, self.prompts[number])
            self.digests[number] = digest(node, lease.pages)
            lease.release(())

    def fill(self, prompts: int = N_PROMPTS) -> None:
        """The first prompts, one after the other: the pool has only the last ones in the end."""
        for number in range(prompts):
            self.compute(number)
            self.settle()

    def settle(self) -> None:
        """Return when nothing has been written for a moment."""
        files, since_s = self.files(), time.monotonic()
        while time.monotonic() < since_s + 0.3:
            time.sleep(0.02)
            if self.files() != files:
                files, since_s = self.files(), time.monotonic()

    def lease(self, number: int) -> int:
        """How many tokens of a prompt are found; with the rest computed it is what it was."""
        with connect(self.daemon.client, name="reader") as node:
            lease = node.lease(self.prompts[number], namespace=self.namespace)
            found = lease.prefix_len
            write(node, lease, self.prompts[number])
            assert digest(node, lease.pages) == self.digests[number]
            lease.release()
        return found

    def match(self, number: int) -> int:
        """What of it is in the pool."""
        with connect(self.daemon.client, name="router") as node:
            return node.match(self.prompts[number], namespace=self.namespace).tokens

    def until_found(self, number: int) -> None:
        """Return when all of it is found again."""
        until_s = time.monotonic() + LIMIT_S
        while self.lease(number) < len(self.prompts[number]):
            assert time.monotonic() < until_s, f"prompt {number} is not found"
            time.sleep(0.1)

    def until(self, is_so, otherwise: str) -> None:
        self.daemon.wait_for(is_so, otherwise, LIMIT_S)

    @property
    def tier(self):
        (state,) = self.daemon.snapshot().tiers
        return state

    def assert_nothing_is_held(self) -> None:
        """Nobody has a page, none is in doubt, and an audit finds nothing.

        Once nothing is on its way to the tier: the next process goes on with what is to be written.
        """

        def is_so():
            now = self.daemon.snapshot()
            (pool,) = now.pools
            return (now.leases, pool.held_pages, pool.quarantined_pages) == ((), 0, 0)

        self.until(is_so, "holds something still")
        assert findings(self.daemon) == ()

    def object_of(self, number: int, page: int) -> Path:
        """The file of one page of a prompt."""
        ((names, layout),) = [
            (path, path.parent.name) for path in self.directory.glob("*/=*") if path.is_dir()
        ]
        namespace, _ = parted(unquote(names.name[1:]))
        before = root_key(bytes.fromhex(layout), namespace)
        keys = keys_along(before, self.prompts[number].tobytes(), PAGE * ID_BYTES)
        name = keys[page].hex()
        return names / name[:2] / name

    def objects(self):
        """The files of objects, the oldest used first."""
        found = []
        for path in self._objects():
            with contextlib.suppress(FileNotFoundError):  # it may go meanwhile
                found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _objects(self) -> list[Path]:
        # By a walk, to which a directory that goes meanwhile is no error.
        every = ((top, name) for top, _, names in os.walk(self.directory) for name in names)
        return [Path(top, name) for top, name in every if len(name) == 40]

    def files(self) -> int:
        """How many objects lie there."""
        return len(self._objects())

    def n_bytes(self) -> int:
        """What lies there takes."""
        done = subprocess.run(
            ["du", "-s", "-B1", "--exclude=lock", self.directory], capture_output=True, check=False
        )
        return int(done.stdout.split()[0])


@pytest.fixture
def make(tmp_path):
    """Makes one that serves."""
    made: list[Tiered] = []

    def one(pages: int = PROMPT_PAGES, namespace: str = "", **sets) -> Tiered:
        daemon = Daemon("solo", tmp_path, settings(tmp_path, **sets))
        made.append(Tiered(daemon, tmp_path, pages, namespace))
        made[-1].start()
        return made[-1]

    yield one
    for tiered in made:
        tiered.daemon.stop()


@pytest.fixture
def tiered(make):
    """One that serves, with all that is cached written but for the last."""
    made = make()
    made.fill()
    return made


def test_what_was_evicted_comes_back_as_it_was_and_outlives_the_daemon(tiered):
    assert tiered.match(0) == 0
    with connect(tiered.daemon.client, name="hurried") as node:
        lease = node.lease(tiered.prompts[0], tiers="now")
        assert (lease.prefix_len, lease.tiers.tokens) == (0, PROMPT_TOKENS)
        lease.release()
    assert tiered.lease(0) == PROMPT_TOKENS
    assert tiered.match(0) == PROMPT_TOKENS
    (tier,) = tiered.daemon.snapshot().tiers
    assert (tier.state, tier.hits, tier.bad) == ("serving", 1, 0)
    assert tier.read == PROMPT_PAGES
    assert tier.read_bytes == PROMPT_PAGES * PAGE_BYTES
    # Others may be on their way there: a file comes before it is told.
    tiered.daemon.wait_for(
        lambda: tiered.daemon.snapshot().tiers[0].objects == tiered.files(),
        "files and objects are not as many",
        LIMIT_S,
    )
    assert 'kvd_tier_requests_total{outcome="hit",tier="disk"} 1.0' in tiered.daemon.metrics()

    tiered.daemon.kill()
    tiered.start()

    tiered.until_found(1)
    assert tiered.lease(2) == PROMPT_TOKENS


def test_a_flush_holds_over_a_kill_of_a_daemon_that_could_remove_nothing(make):
    """Another process has the directory when it is flushed: all of it lies there still."""
    one = make(namespace="llama#a")
    one.fill()
    other = Tiered(one.daemon, one.directory.parent, namespace="other")
    other.fill()
    n_files = one.files()
    one.daemon.kill()
    with open(one.directory / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one.start()
        blocked = one.daemon.directory / "solo.epochs.new"
        blocked.mkdir()  # which no file can take the place of
        with connect(one.daemon.client, name="trainer") as node:
            with pytest.raises(KvdError, match=r"flushes of solo could .*and flush again"):
                node.flush("llama")
            blocked.rmdir()
            node.flush("llama")
        one.daemon.kill()
    assert one.files() == n_files
    one.start()
    # Whichever of them were written before they were evicted.
    one.until(lambda: any(map(other.lease, range(N_PROMPTS))), "finds nothing of the other")
    assert not any(map(one.lease, range(N_PROMPTS)))
    before = one.directory / "*" / "=llama%23a"
    one.until(lambda: not glob(str(before)), "has what was flushed still")

    # What is written since is found by the next one.
    one.fill()
    one.daemon.kill()
    one.start()
    one.until(lambda: any(map(one.lease, range(N_PROMPTS))), "finds nothing of since")
    assert findings(one.daemon) == ()


def test_a_pull_asks_for_nothing_that_lies_in_the_tier(tmp_path):
    with two_daemons(tmp_path, settings(tmp_path), prefill=SHAPE) as pair:
        tiered = Tiered(pair.decode, tmp_path)
        tiered.fill()
        longer = np.concatenate([tiered.prompts[0], tokens_of(8 * PAGE, seed=99)])
        with connect(pair.prefill.client, name="engine") as node:
            lease = node.lease(longer)
            write(node, lease, longer)
            there = digest(node, lease.pages)
            lease.release(())

        assert tiered.match(0) == 0
        with connect(pair.decode.client, name="reader") as node:
            receive = node.receive(longer, source="p")
            receive.done()

            assert receive.prefix_len == PROMPT_TOKENS
            assert receive.lease.kv_len == len(longer)
            assert digest(node, receive.lease.pages) == there


def test_a_pull_for_which_nothing_comes_gets_what_lies_in_the_tier(tmp_path):
    with two_daemons(tmp_path, settings(tmp_path), prefill=SHAPE) as pair:
        tiered = Tiered(pair.decode, tmp_path)
        tiered.fill()
        assert tiered.match(0) == 0
        with connect(pair.decode.client, name="reader") as node:
            receive = node.receive(tiered.prompts[0], source="p")
            receive.done()

            assert receive.prefix_len == receive.lease.kv_len == PROMPT_TOKENS
            assert digest(node, receive.lease.pages) == tiered.digests[0]


def test_a_pull_gets_what_its_source_has_in_its_tier(tmp_path):
    with two_daemons(tmp_path, SHAPE, prefill=settings(tmp_path)) as pair:
        tiered = Tiered(pair.prefill, tmp_path)
        tiered.fill()
        assert tiered.match(0) == 0
        with connect(pair.decode.client, name="reader") as node:
            receive = node.receive(tiered.prompts[0], source="p")
            receive.done()

            assert (receive.prefix_len, receive.lease.kv_len) == (0, PROMPT_TOKENS)
            assert digest(node, receive.lease.pages) == tiered.digests[0]
        (tier,) = pair.prefill.snapshot().tiers
        assert (tier.read, tier.hits, tier.bad) == (PROMPT_PAGES, 1, 0)


def test_a_pull_waits_half_of_its_deadline_for_a_storage_process_that_hangs(tmp_path):
    slow = {"tiers.disk.wait_s": "60", "tiers.disk.deadline_s": "60"}
    with two_daemons(tmp_path, SHAPE, prefill=settings(tmp_path, **slow)) as pair:
        tiered = Tiered(pair.prefill, tmp_path)
        tiered.fill()
        storage = pair.prefill.storage_pid()
        os.kill(storage, signal.SIGSTOP)
        try:
            with connect(pair.decode.client, name="reader") as node:
                pending = node.begin_receive(tiered.prompts[0], source="p", deadline_s=6.0)
                pair.prefill.wait_for(lambda: pair.prefill.snapshot().waiting, "waits", 3.0)
                (row,) = pair.prefill.snapshot().waiting
                receive = pending.wait(10.0)
                receive.done()
        finally:
            os.kill(storage, signal.SIGCONT)

        assert (row.kind, row.owner) == ("pull", "d")
        assert "to be read from tier disk" in row.why
        assert receive.prefix_len == receive.lease.kv_len == 0
        tiered.until_found(0)


def test_what_is_written_makes_way_for_handoffs_and_is_there_in_the_end(tmp_path):
    with two_daemons(tmp_path, settings(tmp_path), prefill=SHAPE) as pair:
        tiered = Tiered(pair.decode, tmp_path)
        handed, is_over = tokens_of(8 * PAGE, seed=99), threading.Event()

        def hand_over() -> None:
            ends = pair.prefill.client, pair.decode.client
            with connect(ends[0], name="p") as p, connect(ends[1], name="d") as d:
                lease = p.lease(handed)
                for room in count(1):
                    if is_over.is_set():
                        return
                    pending = d.begin_receive(room, handed, "p", cache=False)
                    p.hand_over(room, lease=lease)
                    receive = pending.wait(LIMIT_S)
                    receive.done()
                    receive.lease.release()

        with ThreadPoolExecutor(1) as handing:
            handoffs = handing.submit(hand_over)
            try:
                tiered.fill()
                tiered.until(lambda: tiered.tier.gave_way_s > 0, "nothing makes way")
            finally:
                is_over.set()
            handoffs.result(LIMIT_S)

        tiered.until(lambda: tiered.tier.gives_way_s is None, "it makes way for nobody")
        tiered.until_found(0)
        tiered.assert_nothing_is_held()


def test_a_storage_process_that_is_killed_costs_hits_and_no_transfer_process(tiered):
    transfer, storage = tiered.daemon.transfer_pid(), tiered.daemon.storage_pid()

    os.kill(storage, signal.SIGKILL)
    tiered.lease(0)
    tiered.until_found(1)

    assert tiered.daemon.transfer_pid() == transfer
    assert tiered.daemon.storage_pid() != storage


PATIENT = {"tiers.disk.deadline_s": "120", "tiers.disk.wait_s": "120"}
"""What a test waits for comes of the death of a process, and of no clock of the daemon."""


SECOND_READ = Step(
    "of two batches one is read", "storage", "kvd/storage/posix.py:get", "call", nth=2
)
THIRD_NAME = Step(
    "some have their names", "storage", "kvd/storage/posix.py:_named", "return", nth=3
)


@pytest.fixture
def stops(tmp_path):
    """Whoever is started is stopped at one of these, once it is armed."""
    found = Breakpoints(tmp_path / "stops", (SECOND_READ, THIRD_NAME))
    with found.inherited():
        yield found


def test_a_storage_process_that_is_killed_within_a_promotion_costs_the_hit(stops, make):
    """Of 70 pages 64 are in the pool when it stands before the rest."""
    tiered = make(100, **PATIENT, **{"pool.pages": "769", "tiers.disk.max_moving": "4MiB"})
    tiered.fill(9)
    there, storage = tiered.prompts[0][: 30 * PAGE], tiered.daemon.storage_pid()
    with connect(tiered.daemon.client, name="engine") as node:
        lease = node.lease(there, tiers="now")
        write(node, lease, there)
        lease.release(())
    stops.arm(SECOND_READ)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(tiered.lease, 0)
        tiered.until(lambda: stops.stopped() == storage, "reads nothing")
        # Room for what comes back may be made by a demotion meanwhile.
        held = {lease.reason: lease.held_pages for lease in tiered.daemon.snapshot().leases}
        assert held["promotion from disk"] == 70
        assert (tiered.tier.reading, tiered.tier.waiting, found.done()) == (70, 1, False)
        stops.disarm()
        os.kill(storage, signal.SIGKILL)
        assert found.result(LIMIT_S) == len(there)

    tiered.assert_nothing_is_held()
    assert tiered.tier.cut >= 1
    assert (tiered.tier.hits, tiered.tier.bad) == (0, 0)
    tiered.until_found(1)
    assert tiered.daemon.storage_pid() != storage
    tiered.assert_nothing_is_held()


def test_a_storage_process_that_is_killed_within_a_demotion_loses_nothing(stops, make):
    """Some of its objects have their names, and others are drafts."""
    tiered = make(namespace="n" * LONGEST_NAME, **PATIENT)
    tiered.fill(10)
    storage = tiered.daemon.storage_pid()
    stops.arm(THIRD_NAME)

    tiered.compute(10)
    tiered.until(lambda: stops.stopped() == storage, "writes nothing")
    n_drafts, n_writing = len(list(tiered.directory.glob("*/writing/*"))), tiered.tier.writing
    assert 0 < n_drafts <= n_writing
    tiered.compute(11)  # nobody waits for what is being written
    stops.disarm()
    os.kill(storage, signal.SIGKILL)

    tiered.until(lambda: tiered.tier.generation == 2, "there is no next one")
    assert tiered.tier.cut > 0
    tiered.settle()
    for number in (12, 13):
        tiered.compute(number)
        tiered.settle()
    tiered.assert_nothing_is_held()
    assert not list(tiered.directory.glob("*/writing/*"))
    assert tiered.tier.evicted_unwritten == 0
    # What was being written has left the pool since, with what was before and behind it.
    assert [tiered.match(number) for number in range(4)] == [0] * 4
    assert [tiered.lease(number) for number in range(4)] == [PROMPT_TOKENS] * 4
    assert tiered.tier.bad == 0


def test_a_storage_process_that_hangs_is_waited_for_and_replaced(tiered):
    storage = tiered.daemon.storage_pid()
    os.kill(storage, signal.SIGSTOP)

    began_s = time.monotonic()
    tiered.lease(0)  # found or not: what it has is right
    took_s = time.monotonic() - began_s
    tiered.until_found(1)

    assert took_s < 10
    assert tiered.daemon.storage_pid() != storage


def test_an_object_that_was_damaged_is_not_used_and_nothing_behind_it(tiered):
    # Of every tenth, another thing is wrong.
    for number, path in enumerate(tiered.objects()[::10]):
        match number % 3:
            case 0:
                os.truncate(path, OBJECT_BYTES // 2)
            case 1:
                with path.open("r+b") as file:
                    file.seek(HEAD_BYTES + 100)
                    file.write(b"damaged")
            case 2:
                path.write_bytes(tiered.objects()[number * 10 + 1].read_bytes())

    found = [tiered.lease(number) for number in range(4)]

    assert min(found) < PROMPT_TOKENS
    assert all(tokens % PAGE == 0 for tokens in found)


def test_what_lies_there_never_takes_more_than_its_size(make):
    bound = 80 * OBJECT_BYTES
    tiered = make(**{"tiers.disk.size": f"{bound // 1024}KiB"})
    tiered.settle()
    directories = 300 * 4096
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], tiered.files())

    thread = threading.Thread(target=look)
    thread.start()
    tiered.fill()
    over.set()
    thread.join()

    assert 40 <= tiered.files() <= 80
    assert most[0] <= 80
    assert tiered.n_bytes() <= bound + directories
    for number in range(4):
        tiered.lease(number)  # found or not: what it has is right
    assert tiered.files() <= 80


def test_a_directory_that_cannot_be_used_is_told_and_the_daemon_serves(make, tmp_path):
    (tmp_path / "tier").mkdir(mode=0o700)
    (tmp_path / "tier" / "mine").write_text("x")

    tiered = make()

    assert tiered.match(0) == 0
    tiered.daemon.wait_for(
        lambda: "is no tier of kvd" in tiered.daemon.snapshot().tiers[0].why, "says nothing", 20.0
    )
    assert tiered.daemon.snapshot().tiers[0].state == "down"
    tiered.compute(0)
    assert tiered.lease(0) == PROMPT_TOKENS
    assert (tmp_path / "tier" / "mine").read_text() == "x"


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_directory_that_goes_under_the_daemon_is_begun_anew_and_that_is_told(
    tiered, tmp_path, is_moved
):
    moved = tmp_path / "moved"
    tiered.directory.rename(moved)
    n_moved = len(list(moved.rglob("?" * 40)))
    if not is_moved:
        tiered.directory.mkdir(mode=0o755)  # somebody else's, by its mode

    for number in range(4):
        tiered.lease(number)  # found or not: what it has is right
    tiered.until(
        lambda: "tier-down" in tiered.daemon.quoted_log() or tiered.tier.generation > 1,
        "goes on with what is gone",
    )
    if not is_moved:
        tiered.until(lambda: "mode 0755" in tiered.tier.why, "says nothing")
        tiered.directory.chmod(0o700)
    tiered.until(lambda: tiered.tier.state == "serving", "does not serve again")

    tiered.compute(0)
    tiered.until_found(0)
    tiered.assert_nothing_is_held()
    assert len(list(moved.rglob("?" * 40))) == n_moved


def test_a_full_disk_costs_hits_and_nothing_else(make, tmp_path):
    with small_disk(tmp_path / "tier", 60 * OBJECT_BYTES):
        tiered = make()
        tiered.fill()

        found = [tiered.lease(number) for number in range(N_PROMPTS)]
        tiered.daemon.stop()

    assert found.count(PROMPT_TOKENS) > 0


def test_a_prompt_that_is_named_before_is_in_the_pool_when_its_request_comes(tiered):
    with connect(tiered.daemon.client, name="router") as node:
        told = node.prefetch(tiered.prompts[0])
        assert (told.tokens, told.tier_tokens) == (0, PROMPT_TOKENS)
    until_s = time.monotonic() + LIMIT_S
    while tiered.match(0) < PROMPT_TOKENS:
        assert time.monotonic() < until_s
        time.sleep(0.02)

    assert tiered.lease(0) == PROMPT_TOKENS
    (tier,) = tiered.daemon.snapshot().tiers
    assert (tier.waits, tier.bad) == (0, 0)
