"""The checks bite: a node that is wrong in one way is found out within a few seeds."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from kvd.cli import sim
from kvd.core.node import NodeState
from kvd.sim.runner import SimPlan, again, run_seed
from tests.sim import mutations
from tests.support.compiled import replaces_methods

SEEDS = 60


def found(make_node, profile, steps=1500):
    """The first seed of which a node is found to be wrong."""
    plan = SimPlan(steps, 0, profile)
    endings = (run_seed(seed, plan, make_node) for seed in range(SEEDS))
    return next((ending for ending in endings if ending.violation), None)


@replaces_methods
@pytest.mark.parametrize(
    ("mutation", "profile", "words"),
    [
        (mutations.frees_a_quarantined_page, "storm", "not held by it"),
        (mutations.drops_an_unlock, "tiny", "lock"),
        (mutations.settles_before_its_posts_are_over, "transfer", "ended"),
        (mutations.trusts_a_host_that_is_not_quiet, "transfer", "ended"),
        (mutations.waits_only_for_what_has_arrived, "transfer", "ended"),
        (mutations.believes_any_claim, "transfer", "ended"),
        (mutations.forgets_that_bytes_were_in_doubt, "away", "ended"),
        (mutations.frees_duplicates_under_a_post, "transfer", "was overwritten while post"),
        (mutations.never_repeats_its_last_word, "lossy", "40 s of calm have not ended"),
        (mutations.keeps_a_dead_engines_receives, "storm", ""),
        (mutations.skips_an_event_number, "calm", "I8: "),
        (mutations.slides_a_page_too_far, "swa", "null page in the window of swa"),
        (mutations.keeps_every_state_as_a_snapshot, "recurrent", "of state holds"),
        (mutations.forgets_what_lies_beside_a_dropped_node, "swa", "has left the tree with"),
        (mutations.drops_a_window_that_is_needed, "swa", ""),
        (mutations.frees_a_quarantined_window_page, "swa", "of swa of handoff"),
        (mutations.reuses_a_slot_under_a_copy, "hisparse", "slots taken"),
        (mutations.forgets_what_a_copy_holds, "copies", "under a copy of lease"),
        (mutations.counts_a_save_when_it_begins, "copies", ""),
        (mutations.ends_copies_at_a_hang_up, "copies", ""),
        (mutations.releases_pages_under_a_copy, "copies", "under a copy of lease"),
        (mutations.believes_what_a_save_still_writes, "copies", "is believed while a save"),
        (mutations.counts_saves_beyond_a_gap, "copies", ""),
        (mutations.says_nothing_of_what_is_saved_anew, "copies", ""),
        (mutations.copies_pages_that_were_swapped, "copies", "are not its own"),
        (mutations.keeps_what_is_saved_from_sends, "copies", "its send knows of"),
        (mutations.awaits_the_copies_of_the_dead, "copies", ""),
        (mutations.believes_ways_of_the_agent_before, "copies", "never said of its agent"),
        (mutations.knows_a_way_twice, "copies", "are known twice"),
        (mutations.finds_what_former_weights_have_cached, "month", ""),
        (mutations.forgets_that_a_mark_has_come, "copies", "are late, or are not"),
        (mutations.forgets_its_flushes_at_a_restart, "tiers", "was flushed at"),
        (mutations.forgets_its_flushes_at_a_restart, "store", "was flushed at"),
        (mutations.stamps_nothing_that_it_writes, "tiers", "was flushed at"),
    ],
)
def test_a_wrong_node_is_found_out(mutation, profile, words):
    ending = found(mutation, profile)

    assert ending is not None, f"{SEEDS} seeds did not see that a node {mutation.__name__}"
    assert words in ending.violation
    assert len(ending.last_inputs) > 10


def test_an_exception_of_the_core_is_a_finding_with_its_place():
    def broken(settings, at_s):
        node = NodeState(settings, at_s)
        node.decoder.quarantines._free_quiet = lambda lease_id: 1 // 0
        return node

    ending = found(broken, "transfer")

    assert "ZeroDivisionError" in ending.violation
    assert "test_findings.py" in ending.violation


def test_an_effect_that_the_simulator_does_not_know_is_named():
    class Strange(msgspec.Struct, frozen=True):
        pass

    class Inventive(NodeState):
        def _tick(self, got):
            self.out.effects.append(Strange())

    assert "does not know the effect Strange" in run_seed(0, SimPlan(400, 2), Inventive).violation


@replaces_methods
def test_a_seed_that_failed_fails_again_with_the_command_that_is_shown():
    plan = SimPlan(steps=1500, profile="mixed")
    ending = next(
        one
        for one in (run_seed(seed, plan, mutations.drops_an_unlock) for seed in range(SEEDS))
        if one.violation
    )

    words = again(ending, plan).split()

    assert words[:2] == ["kvd", "sim"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    same = SimPlan(
        int(options["--steps"]),
        int(options["--nodes"]),
        options["--profile"],
        int(options["--audit-steps"]),
    )
    repeated = run_seed(int(options["--seed"]), same, mutations.drops_an_unlock)
    assert (repeated.violation, repeated.digest) == (ending.violation, ending.digest)


@replaces_methods
def test_the_command_ends_with_1_and_shows_the_seed_and_the_last_inputs(monkeypatch, tmp_path):
    monkeypatch.setattr(
        sim, "run_seed", lambda seed, plan: run_seed(seed, plan, mutations.drops_an_unlock)
    )
    file = tmp_path / "sim.json"

    done = CliRunner().invoke(
        sim.sim_command,
        ["--seed", "3", "--nodes", "2", "--profile", "storm", "--steps", "1500", "--json", file],
    )

    assert done.exit_code == 1
    assert "VIOLATION in seed 3 (storm, 2 nodes) after " in done.stdout
    command = "kvd sim --seed 3 --nodes 2 --steps 1500 --profile storm --audit-steps 250"
    assert f"again: {command}" in done.stdout
    assert "Tick(at_s=" in done.stdout
    [failure] = msgspec.json.decode(file.read_bytes())["failures"]
    assert "lock_ref" in failure["violation"]


def test_the_command_says_how_many_steps_it_took_and_ends_with_0(tmp_path):
    file = tmp_path / "sim.json"

    done = CliRunner().invoke(sim.sim_command, ["--seeds", "4:7", "--steps", "300", "--json", file])

    assert done.exit_code == 0, done.stdout
    tally = msgspec.json.decode(file.read_bytes())
    assert (tally["seeds"], tally["failures"]) == (3, [])
    assert tally["steps"] > 900
    assert "million a minute" in done.stdout


def test_the_command_goes_on_until_so_much_time_was_simulated_and_writes_each_seed(
    tmp_path, monkeypatch
):
    file, seen = tmp_path / "sim.json", []

    def run(seed, plan):
        if file.exists():
            seen.append(msgspec.json.decode(file.read_bytes())["seeds"])
        return run_seed(seed, plan)

    monkeypatch.setattr(sim, "run_seed", run)
    options = ["--seed", "4", "--hours", "0.02", "--steps", "300", "--json", str(file)]
    done = CliRunner().invoke(sim.sim_command, options)

    assert done.exit_code == 0, done.stdout
    tally = msgspec.json.decode(file.read_bytes())
    assert tally["simulated_s"] >= 72.0
    assert tally["seeds"] > 1
    assert seen == list(range(1, tally["seeds"]))


@pytest.mark.parametrize(
    "options", [["--seeds", "5"], ["--seeds", "5:5"], ["--seeds", "0:2", "--seed", "1"]]
)
def test_wrong_seeds_are_wrong_usage(options):
    assert CliRunner().invoke(sim.sim_command, options).exit_code == 2
