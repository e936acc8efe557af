"""``python -m benchmarks``: one command for each benchmark."""

from __future__ import annotations

import click

from kvd.cli.lazy import LazyGroup, Verb

SHORT_HELP = {
    "radix": "The prefix tree on a trace.",
    "shards": "Pages between differently sharded pools.",
    "integrity": "What verifying costs.",
    "multiturn": "Conversations with the decode tree on and off.",
    "decode_radix": "A long shared start over a narrow link.",
    "cp": "Who gathers and who sends, of ranks.",
    "families": "What a request of each pool family takes.",
    "gather": "Gathers beside the bare collective.",
    "recorder": "What the flight recorder takes.",
    "keys": "What a hit costs by tokens and by keys.",
    "copies": "An engine's own blocks, saved and loaded.",
    "connector": "What vLLM's scheduler waits for kvd.",
    "lmcache": "LMCache's calls of a tier, kvd's beside its own files.",
    "transformers": "A prompt at transformers' generate, found or saved.",
    "sglang": "Pages of SGLang's, beside its own files.",
    "vllm_costs": "What kvd takes of a vLLM: a hit, a prompt, an answer.",
    "first_token": "From a prompt at one vLLM to the first token at another.",
    "tiers": "A tier on disk beside bare NIXL.",
    "tier_peers": "A tier on disk beside those of LMCache and vLLM.",
    "tier_day": "A load's prefixes through kvd's disk and those of others.",
    "tier_trace": "A recorded load through pools with disks.",
    "tier_beside": "Handoffs beside a tier that has all it can do.",
    "pull": "A cached prefix, pulled and handed over.",
    "console": "What consoles cost.",
    "compare": "This checkout beside another one.",
    "store": "Keep a result for the documentation.",
}
BENCHMARKS = {
    name: Verb(f"benchmarks.{'context' if name == 'cp' else name}:command", said, "Benchmarks")
    for name, said in SHORT_HELP.items()
}


@click.group(cls=LazyGroup, verbs=BENCHMARKS)
def main() -> None:
    """What proves the claims of the documentation, beside references of the same run."""


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
