"""The ``kvd`` command: which verbs there are, and where each one lives.

Nothing is imported before a verb runs, so that ``kvd --help`` answers at once and a broken
optional package breaks only the verb that needs it. One file a group of verbs; what they share is
``link`` (finding and asking the daemon), ``render`` (tables) and ``exits`` (exit statuses).
"""

from __future__ import annotations

import click

from kvd import __version__
from kvd.cli.lazy import LazyGroup, Verb

RUN, LOOK, CHANGE, CHECK = "Run", "Look", "Change", "Check and measure"

VERBS = {
    "serve": Verb("kvd.cli.serve:serve_command", "The daemon, in the foreground.", RUN),
    "demo": Verb("kvd.demo.command:demo_command", "The main job end to end, here and now.", RUN),
    "proxy": Verb("kvd.cli.proxy:proxy_command", "One address for many engines.", RUN),
    "status": Verb("kvd.cli.look:status_command", "The whole node on one screen.", LOOK),
    "pools": Verb("kvd.cli.look:pools_command", "Pages by state, and whether they add up.", LOOK),
    "tiers": Verb("kvd.cli.tiers:tiers_command", "What lies below the pool, and its use.", LOOK),
    "tree": Verb("kvd.cli.look:tree_command", "The radix tree, and who locks it.", LOOK),
    "locks": Verb("kvd.cli.look:locks_command", "Leases: who holds what, why, how long.", LOOK),
    "rooms": Verb("kvd.cli.look:rooms_command", "Handoffs under way on this side.", LOOK),
    "peers": Verb("kvd.cli.look:peers_command", "Other daemons as this one knows them.", LOOK),
    "why": Verb(
        "kvd.cli.look:why_command", "Who holds a page, node, room or lease, and why.", LOOK
    ),
    "events": Verb("kvd.cli.look:events_command", "What happened, and what happens.", LOOK),
    "record": Verb("kvd.cli.record:record_command", "Save the last minutes of inputs.", LOOK),
    "replay": Verb("kvd.cli.record:replay_command", "Replay a recording, step by step.", LOOK),
    "flush": Verb("kvd.cli.change:flush_command", "Drop cached pages that nobody locks.", CHANGE),
    "epoch": Verb("kvd.cli.change:epoch_command", "Forget what old weights have cached.", CHANGE),
    "evict": Verb("kvd.cli.change:evict_command", "Evict a number of cached pages.", CHANGE),
    "pin": Verb("kvd.cli.pin:pin_command", "Keep a cached prefix, softly; show pins.", CHANGE),
    "unpin": Verb("kvd.cli.pin:unpin_command", "Keep it no more.", CHANGE),
    "abort": Verb("kvd.cli.change:abort_command", "Give up a room on this node.", CHANGE),
    "fence": Verb("kvd.cli.change:fence_command", "Restart the transfer process.", CHANGE),
    "drop": Verb("kvd.cli.drop:drop_command", "Free the pool that a stopped daemon left.", CHANGE),
    "drain": Verb("kvd.cli.change:drain_command", "Begin nothing new; end what runs.", CHANGE),
    "undrain": Verb("kvd.cli.change:undrain_command", "Serve again, after a drain.", CHANGE),
    "reload": Verb("kvd.cli.change:reload_command", "Read the configuration again.", CHANGE),
    "audit": Verb("kvd.cli.change:audit_command", "Check every invariant now.", CHECK),
    "config": Verb("kvd.cli.config:config_group", "Check, explain or show settings; plan.", CHECK),
    "keygen": Verb("kvd.cli.keygen:keygen_command", "Make this node's keys for its peers.", CHECK),
    "systemd": Verb("kvd.cli.systemd:systemd_group", "Make kvd a service of this host.", CHECK),
    "doctor": Verb("kvd.cli.doctor.command:doctor_command", "Is this host fit for kvd?", CHECK),
    "bench": Verb("kvd.cli:bench_group", "Measure, beside a reference.", CHECK),
    "sim": Verb("kvd.cli.sim:sim_command", "Many nodes under faults, or on a trace.", CHECK),
}


BENCHES = {
    "stream": Verb("kvd.bench.stream:command", "Goodput of one handoff.", "Benchmarks"),
    "control": Verb("kvd.bench.control:command", "Round trips of the verbs.", "Benchmarks"),
    "restart": Verb("kvd.bench.restart:command", "What a restart costs.", "Benchmarks"),
    "footprint": Verb("kvd.bench.footprint:command", "What a daemon costs at rest.", "Benchmarks"),
}
"""What operators run on hosts of their own; what proves our claims is in ``benchmarks``."""


@click.group(cls=LazyGroup, verbs=BENCHES)
def bench_group() -> None:
    """Measure kvd, beside a reference measured in the same run."""


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 done, 1 failed, 2 usage, 3 daemon not reachable, 78 configuration "
    "or a package that is not installed.",
)
@click.version_option(__version__, message="kvd %(version)s")
def kvd() -> None:
    """The KV transfer daemon: prefill-to-decode handoffs, with a named owner for every page."""


def main() -> None:
    """Entry point of the ``kvd`` command."""
    kvd.main(prog_name="kvd")
