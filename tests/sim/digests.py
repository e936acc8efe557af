"""What the simulator and its operators see, as hashes that a rebuild must leave equal.

    python -m tests.sim.digests                      every profile, all seeds written down
    python -m tests.sim.digests --profile store      one of them
    python -m tests.sim.digests --seeds 25           the first 25 of each
    python -m tests.sim.digests --write --seeds 500  write them down anew, and say why they changed

``steps`` are hashes over every effect and event of ``BLOCK`` seeds, ``told`` over what an operator
is told after a storm: status, tree, ``why`` of everything, rehearsed verbs, the metrics page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
from pathlib import Path

import msgspec

from kvd.core.inputs import FromOperator
from kvd.observe.exposition import Build, Exposition
from kvd.observe.metrics import Metrics
from kvd.sim.profile import PROFILES
from kvd.sim.runner import SimPlan, run_seed
from kvd.sim.world import World
from kvd.wire import admin

FILE = Path(__file__).parent / "digests.json"

BLOCK = 25
"""Seeds behind one hash."""

FEW_SEEDS, FEW_STEPS = 2, 500
TOLD_SEEDS = 3
TOLD_STEPS = 400
PROFILE_NAMES = (*PROFILES, "mixed")
ROOMS, PARTS, LEASES, NODES, PAGES = range(1, 60, 7), range(1, 40, 5), range(1, 40, 5), 12, 12
"""What ``why`` is asked of, whether there is such a thing or not."""


class _Watched(World):
    """A world that counts what its nodes tell, as a daemon does."""

    metrics: dict[str, Metrics]

    def watch(self, host, step):
        super().watch(host, step)
        if "metrics" not in vars(self):
            self.metrics = {}
        metrics = self.metrics.setdefault(host.name, Metrics(host.name))
        for event in step.events:
            metrics.take(event)


def steps_digest(plan: SimPlan, seeds: range) -> str:
    """Of every effect and event of those seeds, and of how each ended."""
    digest = hashlib.sha256()
    for seed in seeds:
        ending = run_seed(seed, plan)
        digest.update(f"{ending.digest} {ending.steps} {ending.violation}\n".encode())
    return digest.hexdigest()[:24]


def few_steps_digest(profile: str) -> str:
    """The same of two short seeds, for the test suite."""
    return steps_digest(SimPlan(profile=profile, steps=FEW_STEPS), range(FEW_SEEDS))


def told_digests(profile: str) -> dict[str, str]:
    """By what was asked: a hash of all answers of all nodes after some storms."""
    found = {}
    for seed in range(TOLD_SEEDS):
        world = _Watched(seed, PROFILES[profile], 4)
        while world.steps < TOLD_STEPS:
            world.agenda.step()
        for host in world.hosts:
            if not host.is_up:
                continue
            for name, request in questions(host.node.leases):
                answer = _answer(host.node, request)
                found.setdefault(name, hashlib.sha256()).update(answer)
            metrics = world.metrics.get(host.name, Metrics(host.name))
            found.setdefault("metrics", hashlib.sha256()).update(_page(metrics, host.node))
    return {name: digest.hexdigest()[:24] for name, digest in sorted(found.items())}


def questions(leases) -> list[tuple[str, admin.AdminRequest]]:
    """Everything that an operator may ask and that changes nothing."""
    verbs = (
        admin.Flush(1),
        admin.Flush(1, "strict"),
        admin.Evict(1, 7),
        *[admin.AbortRoom(1, room, "told") for room in ROOMS],
        admin.Fence(1),
        admin.Drain(1, "ops", "kernel"),
        admin.Undrain(1),
    )
    nodes = [node.id for node in leases.tree.nodes()][:NODES]
    kinds = [("node", nodes), ("page", range(PAGES)), ("room", ROOMS), ("lease", LEASES)]
    kinds += [("receive", PARTS), ("send", PARTS), ("client", range(3))]
    asked: list[tuple[str, admin.AdminRequest]] = [
        ("status", admin.ShowStatus(1)),
        ("tree", admin.ShowTree(1, 50)),
        *[("rehearse", admin.Rehearse(1, verb)) for verb in verbs],
        *[("why", admin.Why(1, kind, number)) for kind, numbers in kinds for number in numbers],
        *[("why", admin.Why(1, "peer", 0, "", name)) for name in ("p0", "p1", "d0", "d1")],
    ]
    for keeper in leases.components.each:
        name = keeper.component.name
        asked += [("why", admin.Why(1, "page", page, name)) for page in range(PAGES)]
    return asked


def _answer(node, request: admin.AdminRequest) -> bytes:
    step = node.step(FromOperator(node.out.at_s, b"", request))
    return b"".join(msgspec.json.encode(effect) for effect in step.effects)


def _page(metrics: Metrics, node) -> bytes:
    status = node.step(FromOperator(node.out.at_s, b"", admin.ShowStatus(1))).effects[0].message
    page = Exposition(metrics, Build("1", "1", "1"), lambda: status.snapshot).render()
    lines = [line for line in page.splitlines() if b" process_" not in line[:20]]
    return b"\n".join(line for line in lines if not line.startswith(b"process_"))


def _work(job: tuple[str, int, int]) -> object:
    profile, first, n_seeds = job
    if first < 0:
        return told_digests(profile)
    return steps_digest(SimPlan(profile=profile), range(first, first + n_seeds))


def _whole_blocks(text: str) -> int:
    """A number of seeds for which there are hashes: fewer than a block have none of their own."""
    seeds = int(text)
    if seeds < 0 or seeds % BLOCK:
        near = BLOCK * max(1, round(seeds / BLOCK))
        raise argparse.ArgumentTypeError(f"one hash is of {BLOCK} seeds: give {near}, not {seeds}")
    return seeds


def main() -> int:
    """Compare, or write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=_whole_blocks, default=0, help="of each profile; 0: all written down"
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--profile", choices=PROFILE_NAMES, help="that one alone")
    parser.add_argument("--processes", type=int, default=2)
    got = parser.parse_args()
    kept = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    names = (got.profile,) if got.profile else PROFILE_NAMES
    n_kept = len(kept["calm"]["steps"]) if kept else 1
    n_blocks = got.seeds // BLOCK or n_kept
    if n_blocks > n_kept and not got.write:
        parser.error(f"of {n_blocks * BLOCK} seeds only {n_kept * BLOCK} are written down")
    jobs = [(name, block * BLOCK, BLOCK) for name in names for block in range(n_blocks)]
    jobs += [(name, -1, 0) for name in names if name in PROFILES]
    found = {name: {"steps": [], "few_steps": few_steps_digest(name), "told": {}} for name in names}
    with multiprocessing.Pool(got.processes) as pool:
        for (name, first, _), result in zip(jobs, pool.imap(_work, jobs), strict=True):
            if first < 0:
                found[name]["told"] = result
            else:
                found[name]["steps"].append(result)
    if got.write:
        FILE.write_text(json.dumps(kept | found, indent=1) + "\n", encoding="utf-8")
        return 0
    wrong = [
        f"{name}: {what}"
        for name in names
        for what in (*_other_blocks(kept, found, name), *_other_answers(kept, found, name))
    ]
    equal = f"equal: {n_blocks * BLOCK} seeds of {len(names)} profiles"
    sys.stdout.write("\n".join(wrong or [equal]) + "\n")
    return 1 if wrong else 0


def _other_blocks(kept, found, name: str) -> list[str]:
    pairs = zip(found[name]["steps"], kept[name]["steps"], strict=False)
    return [
        f"seeds {k * BLOCK} to {k * BLOCK + BLOCK - 1}" for k, (a, b) in enumerate(pairs) if a != b
    ]


def _other_answers(kept, found, name: str) -> list[str]:
    return [ask for ask, one in kept[name]["told"].items() if found[name]["told"].get(ask) != one]


if __name__ == "__main__":
    sys.exit(main())
