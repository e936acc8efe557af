"""States of leases, handoffs and peers, and what each waits for: the same words everywhere.

What must not live here: tables and sentences made of them (``schema``, ``why``, the console).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.cache.lease import ARRIVAL, COPY, ENGINE, FETCH, FORMER_COPY, MOVING, PIN
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.handoff.kept import told_keeping
from kvd.core.handoff.parts import waits_for_others
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.handoff.sources import TokenSpan, share_words, span_of
from kvd.core.layout.seal import SUM_BYTES
from kvd.core.leases.engine_copies import COPIES_NAMED
from kvd.core.leases.owners import owner_of
from kvd.core.tiers.words import waits_for as tier_waits_for
from kvd.types import count

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.handoff.receive import Decoder
    from kvd.core.handoff.send import Prefiller
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.admission import Admission, Waiter
    from kvd.core.leases.budgets import Budgets
    from kvd.core.leases.mark_waits import MarkWait
    from kvd.core.leases.session_table import Session
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings

SHORT = 0.05
"""A component that can give no more of its pages than this is about to make requests wait."""

_STANDING_WAITS = {
    LeaseStage.SAVING: "its pages to be copied to the saved area",
    LeaseStage.RETRACTED: "its engine to resume or release it",
    LeaseStage.RESUMING: "room in the pool",
    LeaseStage.RESTORING: "its saved pages to be copied back",
}

_DECODE_WAITS = {
    "queued": "room in the pool, or its peer",
    "offered": "the prefill engine to send",
    "receiving": "the rest of the bytes",
    "ready": "the engine to release the lease",
}

_PREFILL_WAITS = {
    "await-engine": "an engine here to send",
    "streaming": "the engine to compute",
    "flushing": "the last post",
    "draining": "posts under way",
    "settled": "the decode side to say Closed",
}


def node_word(node: NodeView) -> str:
    """``serving``, or why it does nothing new: it drains, is drained, stops, or cannot transfer."""
    drainer = node.drainer
    # Asked first: a stop is a drain too.
    if drainer.drain is not None and drainer.drain.is_stop:
        return "stopping"
    if drainer.drain is not None:
        return "drained" if drainer.is_drained else "draining"
    return "serving" if node.peers.generation else "transfer process restarting"


def is_nearly_full(budgets: Budgets, component: str) -> bool:
    """Whether it can give so little that it is among the findings, whoever waits."""
    return budgets.headroom(component) <= SHORT * budgets.capacity(component)


def lease_word(lease: LeaseRecord) -> str:
    """``held``, ``lingering``, ``moving``, ``pinned``, ``quarantined`` or a stage of retraction."""
    if lease.quarantine is not None:
        return "quarantined"
    if lease.state is not LeaseStage.RUNNING:
        word: str = lease.state.value
        return word
    if not lease.holders.isdisjoint(MOVING):
        return "moving"
    if PIN in lease.holders:
        return "pinned"
    is_somebodys = ENGINE in lease.holders or ARRIVAL in lease.holders
    return "held" if is_somebodys else "lingering"


def lease_waits_for(node: NodeView, lease: LeaseRecord) -> str:
    """What would take it further; empty for one that runs."""
    if lease.quarantine is not None:
        return node.decoder.quarantines.waits_for(lease)
    session = node.sessions.by_id.get(lease.session)
    if session is not None and session.hang_up is not None and ENGINE in lease.holders:
        return death_of(node, session)
    if lease.state is LeaseStage.FORMER:
        return _former_waits_for(node, lease)
    if lease.state is not LeaseStage.RUNNING:
        return _STANDING_WAITS[lease.state]
    if not lease.holders.isdisjoint(MOVING):
        return tier_waits_for(node.tiers.moves.of_lease(lease.id))
    return _running_waits_for(node, lease)


def death_of(node: NodeView, session: Session) -> str:
    """What gives back the pages of a session that kvd hung up on, and why it did."""
    assert session.hang_up is not None
    pids = " and ".join([session.told_pid(pid, node.out.at_s) for pid in session.pids])
    return f"{pids} to end, which may still write its pages: {session.hang_up.why.message}"


def _former_waits_for(node: NodeView, lease: LeaseRecord) -> str:
    if lease is node.former_leases.unproven:
        return "the leases of before the restart to end, and their engines to come back"
    session = node.sessions.by_id.get(lease.session)
    if FORMER_COPY in lease.holders and ENGINE not in lease.holders:
        return "each process of its engine to come back or to end, which may still copy its pages"
    is_away = session is not None and session.is_former
    return "its engine to come back or to end" if is_away else "its engine to release it"


def _running_waits_for(node: NodeView, lease: LeaseRecord) -> str:
    if PIN in lease.holders:
        return node.pins.words(lease)
    if ARRIVAL in lease.holders:
        return "the prompt's KV to arrive"
    if ENGINE in lease.holders:
        session = node.sessions.by_id.get(lease.session)
        return session.told_outlived(node.out.at_s) if session is not None else ""
    if FETCH in lease.holders:
        return "the last copy into its device buffer"
    if COPY in lease.holders:
        return "the last copy of its engine"
    # What each of these waits for is told of it: a lease may be read by many, or by nobody yet.
    sends = sorted(holder for holder in lease.holders if holder.startswith("send "))
    return f"{', '.join(some_words(sends, 'sends'))} to be over"


def told_copies(node: NodeView, lease: LeaseRecord) -> list[str]:
    """What its engine copies of it, and what is to be copied and waits for a mark."""
    at_s, copying = node.out.at_s, lease.copying
    said = [copy.told(at_s) for copy in copying.under_way] if copying is not None else []
    said += [mark_words(node, wait) for wait in node.engine_copies.marks.of_lease(lease.id)]
    return some_words(said, "copies") + [
        f"rank {rank} has saved beyond a gap"
        for rank in sorted(copying.ahead if copying is not None else ())
    ]


def mark_words(node: NodeView, wait: MarkWait) -> str:
    """Which mark of which engine an order waits for, since when and until when."""
    session = node.sessions.by_id.get(wait.session)
    engine = session.name if session is not None else f"client {wait.session}"
    return wait.told(engine, node.out.at_s)


def some_words(said: list[str], what: str) -> list[str]:
    """A few of them, and how many more."""
    more = len(said) - COPIES_NAMED
    return [*said[:COPIES_NAMED], *([f"and {more} more {what}"] if more > 0 else [])]


def receive_waits_for(decoder: Decoder, part: ReceivePart) -> str:
    """What would take a receive further."""
    if part.state is Decode.DRAINING and part.lease is not None:
        return decoder.quarantines.waits_for(part.lease)
    if waits_for_others(part):
        late = [other for other in part.attempt.parts if not other.is_verified]
        said = ", ".join([f"{other.peer} ({other.state.value})" for other in late])
        return f"what the other sources send: {said}"
    if part.state is Decode.VERIFYING and not part.sums:
        return "its pages to be copied to the device buffer"
    if part.state is Decode.VERIFYING:
        return f"its pages to be verified ({sum(map(len, part.sums.values())) // SUM_BYTES} pages)"
    return _DECODE_WAITS.get(part.state.value, "")


def send_waits_for(part: SendPart) -> str:
    """What would take a send further."""
    if part.state is Prefill.AWAIT_OFFER:
        return offer_awaited(part)
    return _PREFILL_WAITS.get(part.state.value, "")


def offer_awaited(part: SendPart) -> str:
    """Whose Offer a send waits for, and who has said that it will not come, or was refused."""
    awaited = part.awaited
    waits = f"{awaited.destination or 'the decode side'} to offer pages"
    if part.keeping is not None:
        waits = told_keeping(part, part.keeping)
    gone = ", ".join([f"{name} ({why[:80]})" for name, why in list(awaited.withdrawn.items())[:8]])
    withdrawn = f"; withdrawn by {gone}" if gone else ""
    turned_away = f"; {awaited.turned_away}" if awaited.turned_away else ""
    return f"{waits}{withdrawn}{turned_away}"


def receive_share(settings: Settings, part: ReceivePart) -> str:
    """Which part of its prompt a source sends; empty where it sends all of it."""
    size = settings.spec.components[0].page_size
    span = span_of(part.share, part.prefix_tokens, part.prompt_tokens, size)
    return share_words(part.share, span, size)


def send_share(prefiller: Prefiller, part: SendPart) -> str:
    """The same of a send, in pages of the decode side."""
    span = TokenSpan(part.start_tokens, part.end_tokens)
    return share_words(part.share, span, prefiller.posts.page_tokens(part))


def agent_words(peer: Peer) -> str:
    """The sending agent towards it, and why it is not there."""
    return f"{peer.agent.value}{': ' if peer.agent_why else ''}{peer.agent_why}"


EPOCHS_RECENT_S = 600.0
"""So long it is shown that something was not handed over for its epoch."""


def epochs_words(node: NodeView, peer: Peer) -> str:
    """That it is in another epoch of a model than this node; empty where that may be over."""
    apart = peer.epochs
    is_recent = node.out.at_s - apart.at_s < EPOCHS_RECENT_S
    return apart.why if is_recent and node.epochs.now(apart.base) == apart.epoch else ""


def layout_words(peer: Peer) -> str:
    """``same``, or why pages go in one direction at most."""
    differs = peer.refusal or peer.source_refusal
    return differs.message if differs else "same"


def asked_word(waiter: Waiter) -> str:
    """What was asked for: ``lease``, ``receive``, ``resume``, ``pin``, or ``pull`` by a peer."""
    if waiter.claim.resumes:
        return "resume"
    if waiter.claim.only_cached:
        return "pin" if waiter.claim.holder == PIN else "pull"
    return "receive" if waiter.claim.room else "lease"


def asker_name(node: NodeView, waiter: Waiter) -> str:
    """The session that waits, or the peer."""
    session = waiter.claim.session
    return owner_of(node, session)[0] if session else node.pull_source.puller_of(waiter)


def pulls_waiting(node: NodeView, peer: Peer) -> list[str]:
    """What a peer pulls that waits for a tier here, and since when."""
    said = []
    for ticket in node.pull_source.open_pulls():
        waiter = ticket.waiter
        if waiter is not None and ticket.peer is peer:
            since_s = node.out.at_s - waiter.since_s
            tokens = count(waiter.claim.tokens)
            said.append(
                f"waits for {since_s:.1f} s with a pull of {tokens} tokens: {waiter.blocked()}"
            )
    return some_words(said, "pulls of it wait")


def why_waits(admission: Admission, waiter: Waiter, ahead: int) -> str:
    """For its peer, for pages, or for ``ahead`` others."""
    other = waiter.blocked()
    if other is not None:
        return other
    return admission.shortage(waiter) if waiter.budget else f"its turn: {ahead} before it"
