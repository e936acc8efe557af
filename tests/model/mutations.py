"""The protocol with one sentence negated, and the smallest world that shows why it is there."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.protocol import Cause, Rules
from tests.model.world import Scope

C = Cause


class Mutation(NamedTuple):
    """One broken protocol. ``faults`` is all that is needed to break it, each at most once."""

    sentence: str
    """The field of ``Rules`` that is negated."""
    found: str
    """What the violation says."""
    faults: tuple[Cause, ...] = ()
    posts: int = 2

    def rules(self) -> Rules:
        return Rules(**{self.sentence: False})

    def scope(self) -> Scope:
        return Scope(posts=self.posts, faults=frozenset(self.faults), budget=len(self.faults))


LATE = "late bytes of handoff 0 may land in pages that are FREE"
FREE, SOURCE, STUCK = "pages that are FREE", "source pages that are free", "stuck"

MUTATIONS = (
    Mutation("quarantines_when_giving_up", FREE),
    Mutation("quarantine_ignores_the_clock", FREE),
    Mutation("lost_peer_may_still_write", FREE),
    Mutation("repeats_offer", STUCK, (C.LOSS,)),
    Mutation("repeats_offer_when_accepted", STUCK, (C.LOSS,)),
    Mutation("repeats_abort", STUCK, (C.LOSS,)),
    Mutation("commits_what_is_verified", "committed with a page that is not what was sent"),
    Mutation("asks_the_next_process", STUCK, (C.FENCE,)),
    Mutation("takes_delivered_unaccepted", STUCK, posts=0),
    Mutation("takes_aux_once", "aux of handoff 0 is delivered 2 times"),
    Mutation("answers_settled_when_closed", STUCK, (C.LOSS,)),
    Mutation("waits_for_ends", LATE),
    Mutation("waits_for_ends", LATE, (C.PREFILL_CRASH,)),
    Mutation("tells_doubt", LATE),
    Mutation("fence_starts_new_generation", FREE, (C.FENCE,)),
    Mutation("decode_reaps_before_hello", FREE, (C.DECODE_CRASH,)),
    Mutation("settles_when_drained", SOURCE),
    Mutation("failed_post_is_outstanding", SOURCE, (C.POST_FAILURE,)),
    Mutation("failed_post_has_not_landed", "committed with 1 of its posts", (C.POST_FAILURE,)),
    Mutation("flushes_after_last_post", SOURCE),
    Mutation("repeats_settled", STUCK, (C.LOSS,)),
    Mutation("answers_again", STUCK, (C.LOSS,)),
    Mutation("keeps_tombstone", FREE),
    Mutation("keeps_floor", FREE),
    Mutation("refusal_leaves_tombstone", FREE),
    Mutation("abort_leaves_tombstone", FREE),
    Mutation("posts_by_named_generation", FREE, (C.FENCE,)),
    Mutation("newer_decode_ends_settled", STUCK, (C.DECODE_CRASH,)),
    Mutation("send_holds_source", SOURCE),
    Mutation("prefill_reaps_before_hello", FREE, (C.PREFILL_CRASH,)),
    Mutation("checks_addressee", FREE, (C.PREFILL_CRASH,)),
    Mutation("checks_sender", STUCK, (C.DECODE_CRASH,)),
    Mutation("orders_incarnations", FREE, (C.DECODE_CRASH, C.PREFILL_CRASH)),
)

COURTESIES = (
    Rules(answers_settled_when_forgotten=False),
    Rules(one_handoff_per_room=False),
    Rules(refuses_older_generation=False),
    Rules(closed_ends_unsettled=False),
    Rules(orders_generations=False),
    Rules(fence_is_remembered=True),
)
"""Variants that are as safe: the sentence saves time or answers sooner, and guards nothing."""
