"""Nodes that are wrong in one way each: what the simulator must see.

Each is a real node with one rule of the core left out, as a careless change might leave it out.
"""

from __future__ import annotations

import functools

import msgspec

from kvd.core import inputs
from kvd.core.cache.lease import COPY, ENGINE
from kvd.core.effects import Doubt
from kvd.core.leases.epochs import Epochs
from kvd.core.leases.flushes import Flushes
from kvd.core.node import NodeState
from kvd.types import NO_PAGES


def frees_a_quarantined_page(settings, at_s):
    """Giving up frees the pages at once, while the writer may still write them."""
    node = NodeState(settings, at_s)
    quarantine = node.leases.ends.quarantine

    def at_once(lease, why):
        quarantine(lease, why)
        node.leases.pool.return_pages(lease.page_table)
        lease.page_table = NO_PAGES

    node.leases.ends.quarantine = at_once
    return node


class DeafEpochs(Epochs):
    """Epochs are answered, and every request is taken in the one before the first."""

    __slots__ = ()

    def internal(self, namespace):
        return namespace


def finds_what_former_weights_have_cached(settings, at_s):
    """New weights of a namespace change nothing of what is found."""
    node = NodeState(settings, at_s)
    node.epochs.__class__ = DeafEpochs
    return node


def drops_an_unlock(settings, at_s):
    """One unlock in twenty is forgotten."""
    node = NodeState(settings, at_s)
    unlock = node.leases.ends.unlock
    calls = 0

    def forgetful(lease):
        nonlocal calls
        calls += 1
        if calls % 20:
            unlock(lease)
        else:
            lease.anchor = None

    node.leases.ends.unlock = forgetful
    return node


def settles_before_its_posts_are_over(settings, at_s):
    """The last word is said while an agent may still write."""
    node = NodeState(settings, at_s)
    prefiller = node.prefiller
    settle_if_drained = prefiller._settle_if_drained

    def hasty(part):
        for post in list(part.outstanding):
            prefiller.posts.end_post(post, 0)
        settle_if_drained(part)

    prefiller._settle_if_drained = hasty
    return node


def trusts_a_host_that_is_not_quiet(settings, at_s):
    """Bytes in doubt are taken for landed."""
    node = NodeState(settings, at_s)
    quarantines = node.decoder.quarantines
    quarantines._await_quiet = lambda lease, _: node.leases.ends.end_quarantine(lease, "hasty")
    return node


def forgets_that_bytes_were_in_doubt(settings, at_s):
    """A peer that was silent for long is forgotten, and its handoffs with all that they knew."""
    node = NodeState(settings, at_s)
    node.prefiller.settled_sends.forget_peer = node.prefiller.settled_sends.fold_tombstones
    return node


def waits_only_for_what_has_arrived(settings, at_s):
    """What a writer that is over has sent, and is still on its way, is not waited for."""
    node = NodeState(settings, at_s)
    await_quiet = node.decoder.quarantines._await_quiet
    node.decoder.quarantines._await_quiet = lambda lease, _: await_quiet(lease, Doubt.ARRIVED)
    return node


def believes_any_claim(settings, at_s):
    """What a peer called its own before it could know of the end is believed."""
    node = NodeState(settings, at_s)
    quarantines = node.decoder.quarantines
    awaiting = quarantines.awaiting

    def credulous(got):
        awaiting(got)
        for lease_id in got.leases:
            if lease_id in quarantines.awaited:
                known = quarantines.awaited[lease_id]
                quarantines.awaited[lease_id] = msgspec.structs.replace(known, last_ping=-1)

    node._handlers[inputs.Awaiting] = credulous
    return node


def frees_duplicates_under_a_post(settings, at_s):
    """A commit gives replaced pages back although a post reads them."""
    node = NodeState(settings, at_s)

    def at_once(_, duplicates):
        node.leases.pool.return_pages(duplicates)
        node.leases.releases += 1

    node.leases.commits.give_back = at_once
    return node


def posts_through_a_newer_generation(settings, at_s):
    """What was granted through a dead transfer process is posted through its successor."""
    node = NodeState(settings, at_s)
    push = node.prefiller.posts.push_part

    def newest(part):
        peer = node.peers.by_incarnation.get(part.incarnation)
        if peer is not None:
            part.generation = peer.generation
        push(part)

    node.prefiller.posts.push_part = newest
    node.transfers.generation_changed = lambda peer: None
    return node


def never_repeats_its_last_word(settings, at_s):
    """Settled is said once; a lost one is never said again."""
    node = NodeState(settings, at_s)
    node.prefiller.settled_sends.tick = lambda: None
    return node


def keeps_a_dead_engines_receives(settings, at_s):
    """A hang-up releases leases, and forgets the handoffs under way."""
    node = NodeState(settings, at_s)
    cancel = node.decoder.cancel_attempt

    def not_for_the_dead(part, refusal):
        if refusal.code.value != "client-gone":
            cancel(part, refusal)

    node.decoder.cancel_attempt = not_for_the_dead
    return node


def skips_an_event_number(settings, at_s):
    """Every hundredth event number is left out."""
    node = NodeState(settings, at_s)

    class Skipping(type(node.out)):
        __slots__ = ()

        def emit(self, event):
            self.seq += self.seq % 100 == 99
            super().emit(event)

    node.out.__class__ = Skipping
    return node


def slides_a_page_too_far(settings, at_s):
    """What is behind a window is forgotten a page before it is."""
    node = NodeState(settings, at_s)
    for windows in node.leases.components.each:

        def eager(lease, upto_tokens, verb, windows=windows):
            windows._window -= 16
            refusal = verb(lease, upto_tokens)
            windows._window += 16
            return refusal

        windows.unslidable = functools.partial(eager, verb=windows.unslidable)
        windows.slide = functools.partial(eager, verb=windows.slide)
    return node


def keeps_every_state_as_a_snapshot(settings, at_s):
    """Also one that stands for more tokens than are cached at its node."""
    node = NodeState(settings, at_s)
    for states in node.leases.components.each:
        end = states.end_lease

        def careless(lease, end=end):
            tokens, lease.is_whole = lease.tokens, True
            if lease.anchor is not None:
                lease.tokens = tokens[: 4 * lease.anchor.end_tokens]
            end(lease)
            lease.tokens = tokens

        states.end_lease = careless
    return node


def forgets_what_lies_beside_a_dropped_node(settings, at_s):
    """The tree does not say that a node is gone."""
    node = NodeState(settings, at_s)
    for keeper in node.leases.components.each:
        keeper.dropped = lambda nodes: None
    return node


def drops_a_window_that_is_needed(settings, at_s):
    """Room is made without a look at the locks."""
    node = NodeState(settings, at_s)
    for windows in node.leases.components.each:
        lock = windows.lock

        def loose(anchor, claim, lock=lock, windows=windows):
            lock(anchor, claim)
            for edge, window in windows.at.items():
                if window.locks and edge not in windows.unlocked:
                    windows.unlocked[edge] = None

        windows.lock = loose
    return node


def frees_a_quarantined_window_page(settings, at_s):
    """Giving up frees window pages at once, while the writer may still write them."""
    node = NodeState(settings, at_s)
    for windows in node.leases.components.each:
        quarantine = windows.quarantine_lease

        def at_once(lease, quarantine=quarantine, windows=windows):
            quarantine(lease)
            windows.pool.return_pages(windows.own_pages(lease))
            windows.held[lease.id].spare = NO_PAGES

        windows.quarantine_lease = at_once
    return node


def reuses_a_slot_under_a_copy(settings, at_s):
    """A page of the device buffer is given away while a copy may still write it."""
    node = NodeState(settings, at_s)
    for buffers in node.leases.components.each:
        begin_copy = buffers.begin_copy

        def at_once(lease, pages, ticket, begin_copy=begin_copy, buffers=buffers):
            begin_copy(lease, pages, ticket)
            resident = buffers.resident[lease.id]
            resident.slots.move_to_end(pages[0], last=False)
            resident._free.append(resident.slots[pages[0]])

        buffers.begin_copy = at_once
    return node


def forgets_what_a_copy_holds(settings, at_s):
    """A lease is not held by the copies of its engine."""
    node = NodeState(settings, at_s)
    begin = node.engine_copies.begin

    def loose(got, message):
        refusal = begin(got, message)
        if refusal is None:
            node.leases.leases[message.lease].holders.discard(COPY)
        return refusal

    node.engine_copies.begin = loose
    return node


def counts_a_save_when_it_begins(settings, at_s):
    """What a save is about to write is written, where nothing before it is lacking."""
    node = NodeState(settings, at_s)
    copies = node.engine_copies
    begin = copies.begin

    def hasty(got, message):
        refusal = begin(got, message)
        if refusal is None and message.to_pages:
            lease = node.leases.leases[message.lease]
            copy = copies.by_worker[got.worker][message.call]
            if lease.said[copy.rank] >= copy.from_token:
                said = [*lease.said]
                said[copy.rank] = copy.upto_tokens
                lease.said, lease.written_tokens = tuple(said), max(lease.written_tokens, min(said))
                node.engines._sends.lease_written(lease)
        return refusal

    copies.begin = hasty
    return node


def ends_copies_at_a_hang_up(settings, at_s):
    """Whoever has no connection any more is taken for dead."""
    node = NodeState(settings, at_s)
    copies = node.engine_copies
    rank_left, hung_up_on = node._handlers[inputs.RankLeft], node._handlers[inputs.HungUpOn]

    def left(got):
        of_rank = (got.session, got.rank)
        copies._cut([copy for copy in copies if (copy.session, copy.rank) == of_rank])
        rank_left(got)

    def deaf(got):
        hung_up_on(got)
        copies.session_gone(got.session)

    node._handlers[inputs.RankLeft] = left
    node._handlers[inputs.HungUpOn] = deaf
    return node


def releases_pages_under_a_copy(settings, at_s):
    """The engine has let go, so nobody needs them."""
    node = NodeState(settings, at_s)
    release = node.leases.holders.release

    def at_once(lease, holder, cause):
        if holder == ENGINE:
            lease.holders.discard(COPY)
        if lease.id in node.leases.leases:
            release(lease, holder, cause)

    node.leases.holders.release = at_once
    return node


def believes_what_a_save_still_writes(settings, at_s):
    """A word of an engine counts, whatever is saved."""
    node = NodeState(settings, at_s)
    copies, first = node.engine_copies, {}
    begin, end = copies.begin, copies.end

    def begins(got, message):
        refusal = begin(got, message)
        if refusal is None:
            copy = copies.by_worker[got.worker][message.call]
            first[got.worker, message.call], copy.from_token = copy.from_token, -1
        return refusal

    def ends(got, message):
        copy = copies.by_worker.get(got.worker, {}).get(message.copy)
        if copy is not None:
            copy.from_token = first.pop((got.worker, message.copy))
        return end(got, message)

    copies.begin, copies.end = begins, ends
    return node


def counts_saves_beyond_a_gap(settings, at_s):
    """What is saved is written, whatever is lacking before it."""
    node = NodeState(settings, at_s)
    copies = node.engine_copies
    saved = copies._saved

    def careless(copy, lease, copying):
        copy.from_token = 0
        saved(copy, lease, copying)

    copies._saved = careless
    return node


def says_nothing_of_what_is_saved_anew(settings, at_s):
    """What was written before a save stays so under it, and where nothing was said all of it is."""
    node = NodeState(settings, at_s)
    node.engine_copies._say_no_more = lambda lease, copy: None
    return node


def copies_pages_that_were_swapped(settings, at_s):
    """Nobody looks whether an order names the pages that the lease has now."""
    node = NodeState(settings, at_s)
    node.engine_copies._not_in_row = lambda lease, part, row: None
    return node


def keeps_what_is_saved_from_sends(settings, at_s):
    """A send does not hear that more of its prompt is saved."""
    node = NodeState(settings, at_s)
    node.engines._sends.lease_written = lambda lease: None
    return node


def awaits_the_copies_of_the_dead(settings, at_s):
    """What a process copied when it died is never over."""
    node = NodeState(settings, at_s)
    node._handlers[inputs.WorkerGone] = lambda got: None
    return node


MUTATIONS = (
    frees_a_quarantined_page,
    drops_an_unlock,
    settles_before_its_posts_are_over,
    trusts_a_host_that_is_not_quiet,
    waits_only_for_what_has_arrived,
    believes_any_claim,
    frees_duplicates_under_a_post,
    posts_through_a_newer_generation,
    never_repeats_its_last_word,
    keeps_a_dead_engines_receives,
    skips_an_event_number,
    slides_a_page_too_far,
    keeps_every_state_as_a_snapshot,
    forgets_what_lies_beside_a_dropped_node,
    drops_a_window_that_is_needed,
    frees_a_quarantined_window_page,
    reuses_a_slot_under_a_copy,
    forgets_what_a_copy_holds,
    counts_a_save_when_it_begins,
    ends_copies_at_a_hang_up,
    releases_pages_under_a_copy,
    believes_what_a_save_still_writes,
    counts_saves_beyond_a_gap,
    says_nothing_of_what_is_saved_anew,
    copies_pages_that_were_swapped,
    keeps_what_is_saved_from_sends,
    awaits_the_copies_of_the_dead,
)


def believes_ways_of_the_agent_before(settings, at_s):
    """How bytes of a device travelled is believed of the next agent too."""
    node = NodeState(settings, at_s)
    found, loaded, known = node.ways.found, node.ways.loaded, {}

    def finds(peer, got):
        found(peer, got)
        known[peer.name] = peer.ways[1:]

    def careless(peer, got):
        loaded(peer, got)
        peer.ways = (*peer.ways, *known.get(peer.name, ()))

    node.ways.found, node.ways.loaded = finds, careless
    return node


def knows_a_way_twice(settings, at_s):
    """The last word on a way stands beside the ones before."""
    node = NodeState(settings, at_s)
    found = node.ways.found

    def careless(peer, got):
        before = peer.ways
        found(peer, got)
        peer.ways = (*before, peer.ways[-1])

    node.ways.found = careless
    return node


def forgets_that_a_mark_has_come(settings, at_s):
    """An order is said to wait after it has begun."""
    node = NodeState(settings, at_s)
    node.engine_copies.marks.over = lambda worker, call: None
    return node


def forgets_its_flushes_at_a_restart(settings, at_s):
    """The daemon after a flush finds below its pool what the one before had flushed."""
    node = NodeState(settings, at_s)
    find = node._handlers[inputs.EpochsFound]
    node._handlers[inputs.EpochsFound] = lambda got: find(msgspec.structs.replace(got, flushes=()))
    return node


class _UnstampedFlushes(Flushes):
    __slots__ = ()

    def stamp_of(self, namespace):
        return ""


def stamps_nothing_that_it_writes(settings, at_s):
    """What lies on a disk from before a flush looks like what was written since."""
    node = NodeState(settings, at_s)
    node.flushes.__class__ = _UnstampedFlushes
    return node
