"""The explorer catches the bugs that it is there for: each planted in the real core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from kvd.core.engines.engines import Engines
from kvd.core.handoff import offered as prefill
from kvd.core.handoff.offered import OfferReader
from kvd.core.handoff.posts import Posts
from kvd.core.handoff.protocol import Decode
from kvd.core.handoff.receive import Decoder
from kvd.core.handoff.send import Prefiller
from kvd.core.handoff.settled import SettledSends
from kvd.core.leases.lease_ends import LeaseEnds
from kvd.wire.attach import CopyBegins
from tests.explore.search import Violated, explore, walks

if TYPE_CHECKING:
    from collections.abc import Callable

    Plant = Callable[[pytest.MonkeyPatch], None]


def frees_when_giving_up(patch: pytest.MonkeyPatch) -> None:
    """The pages of an attempt that is given up are free at once: no quarantine."""
    patch.setattr(LeaseEnds, "quarantine", lambda self, lease, _: self.end_lease(lease, "given up"))


def never_repeats_settled(patch: pytest.MonkeyPatch) -> None:
    """A Settled, or the Closed that answers it, is lost for good."""
    settle = SettledSends.settle_part

    def once(self, part, refusal):
        settle(self, part, refusal)
        part.resend_s = float("inf")

    patch.setattr(SettledSends, "settle_part", once)


def forgets_an_unknown_abort(patch: pytest.MonkeyPatch) -> None:
    """It is answered, and leaves no tombstone for the Offer that comes after it."""
    aborted = OfferReader.aborted

    def answered(self, peer, message):
        settled_sends = self._sends.settled_sends
        if settled_sends.find_part(peer.incarnation, message.handoff) is not None:
            aborted(self, peer, message)
        else:
            settled_sends.answer_below_floor(peer, message.handoff)

    patch.setattr(OfferReader, "aborted", answered)


def forgets_that_bytes_were_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """With the handoffs of a peer that was silent for long."""
    patch.setattr(SettledSends, "forget_peer", SettledSends.fold_tombstones)


def serves_an_older_generation(patch: pytest.MonkeyPatch) -> None:
    """An Offer for a transfer process that is gone is taken, and posted by what agent there is."""
    outdated, push = prefill.outdated, Posts.push_part

    def lenient(offer, peer, *rest):
        return outdated(replace(offer, generation=peer.generation), peer, *rest)

    def by_any(self, part):
        peers = self._peers
        self._peers = SimpleNamespace(current=lambda owner, _: peers.by_incarnation.get(owner))
        push(self, part)
        self._peers = peers

    patch.setattr(prefill, "outdated", lenient)
    patch.setattr(Posts, "push_part", by_any)


def hears_delivered_only_when_accepted(patch: pytest.MonkeyPatch) -> None:
    """Settled that comes without an Accept before it is dropped."""
    settled = Decoder.settled

    def deaf(self, peer, message):
        part = self.by_handoff.get(message.handoff)
        if part is None or part.state is not Decode.OFFERED:
            settled(self, peer, message)

    patch.setattr(Decoder, "settled", deaf)


def lets_go_when_finished(patch: pytest.MonkeyPatch) -> None:
    """The send holds its source until the engine has finished, and not until its posts are over."""
    finish = Prefiller.streaming_to_flushing

    def early(self, part):
        engine, finished = part.engine, finish(self, part)
        if part.engine is engine:
            self._leases.holders.release(engine.lease, f"send {part.id}", "early")
        return finished

    patch.setattr(Prefiller, "streaming_to_flushing", early)


def counts_a_save_when_it_begins(patch: pytest.MonkeyPatch) -> None:
    """What an engine is about to save is written, and sent."""
    copies = Engines.worker_copies

    def hasty(self, got):
        copies(self, got)
        if isinstance(got.message, CopyBegins):
            of_all, lease = self._node.engine_copies, self._leases.leases[got.message.lease]
            *before, copy = lease.copying.under_way
            lease.copying.under_way = before
            of_all._saved(copy, lease, lease.copying)
            lease.copying.under_way = [*before, copy]
            self._sends.lease_written(lease)

    patch.setattr(Engines, "worker_copies", hasty)


@pytest.mark.parametrize(
    ("plant", "start", "depth", "faults"),
    [
        (frees_when_giving_up, "streaming", 1, 1),
        (never_repeats_settled, "settled", 2, 1),
        (forgets_an_unknown_abort, "offered", 2, 2),
        (forgets_that_bytes_were_in_doubt, "forgotten", 3, 0),
        (serves_an_older_generation, "offered", 2, 2),
        (hears_delivered_only_when_accepted, "hit", 1, 0),
        (lets_go_when_finished, "computed", 3, 0),
        (counts_a_save_when_it_begins, "saving", 1, 0),
    ],
)
def test_planted_bug_is_found(plant, start, depth, faults, monkeypatch):
    explore(start, depth=1, faults=1)  # sound as it is
    plant(monkeypatch)

    with pytest.raises(Violated, match=f"^from {start}: ") as found:
        explore(start, depth=depth, faults=faults)

    assert str(found.value).count(": ") >= 2, "with the way there"


def test_walks_find_a_planted_bug_and_say_their_seed(monkeypatch):
    frees_when_giving_up(monkeypatch)

    with pytest.raises(Violated, match=r"^from streaming, seed \d+: "):
        walks("streaming", range(20))
