"""What a pool held before a restart: taken in whole or not at all, and how it ends.

The prompt of 64 tokens is on pages 4 to 7, another end of it behind its first half on 9 and 10, and
works-0 has lease 7 on its first 48 tokens, with pages 11 and 12 of its own.
"""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.audit.invariants import violations
from kvd.core.cache.eviction import Policy
from kvd.core.effects import AnswerEngine, NoteEnded, NoteFreed, NoteHeld
from kvd.core.inputs import Branch, FormerLease, FormerSession
from kvd.core.inspect.snapshot import snapshot
from kvd.core.leases.former_leases import NotAdopted
from kvd.core.node import NodeState
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from kvd.errors import Code
from kvd.types import NO_PAGES, NO_TOKENS, Pages, Tokens, pack_ids, page_ids
from kvd.wire import admin, client, events
from kvd.wire.snapshot import ClientState
from tests.core.keeping import pool_spec
from tests.core.noted import tree_of
from tests.core.sentences import sentence_of
from tests.core.world import settings, tokens

NOW_S = 500.0
POOL = 20
PROMPT = tokens((1, 64))
HALF = tokens((1, 32))
OTHER_END = tokens((900, 32))
BLUE = tokens((1, 16))


WAITS = "the leases of before the restart to end, and their engines to come back"


def ids(*numbers: int) -> Pages:
    return Pages(pack_ids(list(numbers)))


TREE = (
    Branch(-1, "", HALF, ids(4, 5)),
    Branch(0, "", OTHER_END, ids(9, 10)),
    Branch(0, "", Tokens(PROMPT[32 * 4 :]), ids(6, 7)),
    Branch(-1, "blue", BLUE, ids(8)),
)
LEASE = FormerLease(7, "", Tokens(PROMPT[: 48 * 4]), ids(11, 12))
SECOND = FormerLease(9, "blue", NO_TOKENS, ids(13))
WORKS = FormerSession(3, "works-0", (4711, 4712), (LEASE, SECOND))
ADOPTED = inputs.PoolAdopted(NOW_S, 2, TREE, (WORKS,), ids(14, 15), 40)


def changed(**fields: object) -> inputs.PoolAdopted:
    return msgspec.structs.replace(ADOPTED, **fields)


class Daemon:
    """A node in a pool that outlives its process; everything is checked after every step."""

    def __init__(self, **more: object) -> None:
        self.node = NodeState(settings("d", POOL + 1, is_journaled=True, **more), NOW_S)
        self.events: list[events.Event] = []

    def feed(self, happened: inputs.Input) -> list[object]:
        step = self.node.step(happened)
        self.events += step.events
        assert violations(self.node) == []
        return list(step.effects)

    def call(
        self, kind: type[client.Request], toks: bytes = b"", session: int = 3, **fields: object
    ) -> client.Reply:
        message = kind(call=5, **fields)  # type: ignore[call-arg]
        effects = self.feed(inputs.FromClient(NOW_S, session, message, Tokens(toks)))
        (answer,) = [one for one in effects if isinstance(one, AnswerEngine)]
        return answer.message

    def why(self, kind: str, number: int) -> str:
        found = self.feed(inputs.FromOperator(NOW_S + 2.5, b"op", admin.Why(1, kind, number)))
        (report,) = found
        assert isinstance(report.message, admin.Because), report
        return report.message.sentence

    @property
    def free(self) -> list[int]:
        return page_ids(self.node.leases.pool.free_ids())


def adopted(value: inputs.PoolAdopted = ADOPTED, **more: object) -> Daemon:
    daemon = Daemon(**more)
    assert daemon.feed(value) == []
    return daemon


def returned(daemon: Daemon, *leases: int, pid: int = 4711) -> list[object]:
    return daemon.feed(inputs.ClientCameBack(NOW_S, 3, pid, leases))


# ---- taken in ------------------------------------------------------------------------------------


def test_the_tree_is_what_was_proven():
    node = adopted().node
    assert {page: one.before for page, one in tree_of(node).items()} == {
        4: 0, 5: 4, 6: 5, 7: 6, 9: 5, 10: 9, 8: 0,
    }  # fmt: skip
    assert node.leases.tree.probe(PROMPT, "") == 64
    assert node.leases.tree.probe(Tokens(HALF + OTHER_END), "") == 64
    assert node.leases.tree.probe(PROMPT, "blue") == 16


def test_everything_else_is_free_and_goes_out_in_the_old_order():
    assert adopted().free == [1, 2, 3, 16, 17, 18, 19, 20]


def test_a_former_lease_keeps_its_number_its_path_and_its_pages():
    lease = adopted().node.leases.leases[7]
    assert page_ids(lease.page_table) == [4, 5, 6, 11, 12]
    assert page_ids(lease.held) == [11, 12]
    assert lease.anchor is not None
    assert lease.anchor.end_tokens == 48
    assert lease.session == 3


def test_a_new_lease_has_a_number_above_all_former_ones():
    daemon = adopted()
    daemon.feed(inputs.ClientJoined(NOW_S, 8, "works-1", 5000))
    reply = daemon.call(client.OpenLease, tokens((1, 16)), session=8)
    assert isinstance(reply, client.Leased)
    assert reply.lease == 42
    assert reply.pages == ids(4)


def test_pages_that_were_not_proven_are_a_lease_of_the_node_itself():
    node = adopted().node
    assert node.former_leases.unproven is node.leases.leases[41]
    assert page_ids(node.leases.leases[41].held) == [14, 15]


def test_what_was_not_proven_is_free_and_noted_so_where_nobody_may_read_it():
    daemon = Daemon()
    assert daemon.feed(changed(sessions=())) == [NoteFreed(ids(14, 15))]
    assert daemon.node.former_leases.unproven is None
    assert daemon.free == [1, 2, 3, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def test_it_is_told_in_one_event():
    daemon = adopted()
    assert daemon.events == [
        events.Adopted(
            1,
            NOW_S,
            generation=2,
            pages=7,
            nodes=5,
            sessions=1,
            leases=2,
            held_pages=3,
            unproven_pages=2,
        )
    ]


def test_nothing_at_all_can_be_adopted():
    daemon = adopted(inputs.PoolAdopted(NOW_S, 1, (), (), NO_PAGES, 6))
    assert daemon.free == list(range(1, POOL + 1))
    assert daemon.node.leases.number_above == 6


@pytest.mark.parametrize("policy", Policy, ids=str)
def test_branches_are_evicted_in_the_order_of_the_list(policy):
    daemon = adopted(changed(sessions=(), unproven=NO_PAGES), policy=policy)
    gone = []
    for _ in range(4):
        (note, _) = daemon.feed(inputs.FromOperator(NOW_S, b"op", admin.Evict(1, 1)))
        gone.append(page_ids(note.pages))
    assert gone == [[9, 10], [6, 7], [4, 5], [8]]


def test_a_node_that_adopted_is_frozen_and_thawed_as_it_is():
    daemon = adopted()
    again = thaw(freeze(daemon.node))
    assert state_hash(again) == state_hash(daemon.node)
    for node in (again, daemon.node):
        node.step(inputs.ClientCameBack(NOW_S, 3, 4711, (9,)))
        node.step(inputs.ClientHungUp(NOW_S, 3))
    assert state_hash(again) == state_hash(daemon.node)
    assert again.former_leases.leases == {}


# ---- refused -------------------------------------------------------------------------------------


def with_branch(number: int, **fields: object) -> inputs.PoolAdopted:
    branches = list(TREE)
    branches[number] = msgspec.structs.replace(branches[number], **fields)
    return changed(branches=tuple(branches))


def with_lease(**fields: object) -> inputs.PoolAdopted:
    lease = msgspec.structs.replace(LEASE, **fields)
    return changed(sessions=(FormerSession(3, "works-0", (4711,), (lease, SECOND)),))


BAD = {
    "page 21 is none of this pool, which has pages 1 to 20": with_branch(3, pages=ids(21)),
    "page 0 is none of this pool": with_lease(held=ids(0)),
    "page -1 is none of this pool": changed(unproven=ids(-1)),
    "page 4 is named 2 times": with_branch(3, pages=ids(4)),
    "page 11 is named 2 times": changed(unproven=ids(11)),
    "branch 3 has 16 tokens on 2 pages of 16": with_branch(3, pages=ids(8, 16)),
    "branch 3 has 0 tokens on 0 pages of 16": with_branch(3, pages=NO_PAGES, tokens=NO_TOKENS),
    "branch 1 is behind branch 1, which is not before it": with_branch(1, parent=1),
    "branch 1 is behind branch -2": with_branch(1, parent=-2),
    "branch 1 is of another namespace than branch 0 above it": with_branch(1, namespace="x"),
    "branch 2 begins with the same page of tokens as one beside it": with_branch(
        2, tokens=OTHER_END
    ),
    "lease 7 keeps 48 tokens, the branches have 32 of them": changed(
        branches=(TREE[0], TREE[1], TREE[3])
    ),
    "lease 7 keeps 40 tokens": with_lease(prefix=Tokens(PROMPT[: 40 * 4])),
    "lease 7 keeps 48 tokens, the branches have 0 of them": with_lease(namespace="green"),
    "lease numbers are 9, 9: each must be its own": with_lease(id=9),
    "lease 41 is above 40": with_lease(id=41),
    "session numbers are 3, 3": changed(
        sessions=(WORKS, FormerSession(3, "works-1", (), ())),
    ),
    "session numbers are 0": changed(sessions=(FormerSession(0, "works-1", (), ()),)),
}


@pytest.mark.parametrize("why", BAD)
def test_what_cannot_be_is_refused_before_anything_is_changed(why):
    node = Daemon().node
    before = state_hash(node)
    with pytest.raises(NotAdopted) as told:
        node.former_leases.take_over(BAD[why])
    assert why in str(told.value)
    assert state_hash(node) == before


def test_a_node_that_serves_already_adopts_nothing():
    daemon = Daemon()
    daemon.feed(inputs.ClientJoined(NOW_S, 1, "early", 7))
    with pytest.raises(NotAdopted, match="this node is not new"):
        daemon.node.step(ADOPTED)


def test_a_pool_with_windows_adopts_nothing():
    config = msgspec.structs.replace(
        settings("d", POOL + 1), spec=pool_spec(16, POOL, window=32, swa=10)
    )
    with pytest.raises(NotAdopted, match="pages of swa beside kv, which are not kept"):
        NodeState(config, NOW_S).step(ADOPTED)


# ---- how they end --------------------------------------------------------------------------------


def test_an_engine_that_returns_keeps_what_it_names_and_the_rest_is_free():
    daemon = adopted()
    assert returned(daemon, 7) == [NoteEnded(9), NoteFreed(ids(13))]
    assert daemon.events[-1] == events.ClientReturned(
        3, NOW_S, session=3, name="works-0", pid=4711, kept=1, ended=1
    )
    assert list(daemon.node.former_leases.leases) == [7]
    assert not daemon.node.sessions.by_id[3].is_former


def test_what_was_not_proven_is_free_after_the_last_former_lease():
    daemon = adopted()
    assert returned(daemon) == [
        NoteEnded(7),
        NoteFreed(ids(11, 12)),
        NoteEnded(9),
        NoteFreed(ids(13)),
        NoteFreed(ids(14, 15)),
    ]
    assert daemon.node.former_leases.unproven is None
    assert daemon.node.leases.tree.evictable_pages == 7


def test_what_was_not_proven_waits_for_an_engine_whose_leases_nobody_knows():
    daemon = adopted(changed(sessions=(FormerSession(3, "works-0", (4711,), ()),)))
    assert daemon.why("page", 14) == sentence_of(
        "what was not proven waits for an engine whose leases nobody knows"
    )
    assert returned(daemon) == [NoteFreed(ids(14, 15))]


def test_what_was_not_proven_is_free_when_the_last_engine_has_died():
    daemon = adopted(changed(sessions=(FormerSession(3, "works-0", (4711,), ()),)))
    assert daemon.feed(inputs.ClientHungUp(NOW_S, 3)) == [NoteFreed(ids(14, 15))]


def test_a_log_that_begins_with_what_was_adopted_replays():
    daemon = adopted()
    log = [
        ADOPTED,
        inputs.ClientCameBack(NOW_S, 3, 4711, (7,)),
        inputs.FromClient(NOW_S, 3, client.OpenLease(5), PROMPT),
        inputs.FromClient(NOW_S, 3, client.CommitAndRelease(6, 42)),
        inputs.FromClient(NOW_S, 3, client.ReleaseLease(7, 7)),
    ]
    for happened in log[1:]:
        daemon.feed(happened)
    again = Daemon()
    for happened in msgspec.msgpack.decode(msgspec.msgpack.encode(log), type=list[inputs.Input]):
        again.feed(happened)
    assert state_hash(again.node) == state_hash(daemon.node)
    assert again.events == daemon.events


def test_an_engine_that_has_died_gives_all_of_it_back():
    daemon = adopted()
    assert daemon.feed(inputs.ClientHungUp(NOW_S, 3))[-1] == NoteFreed(ids(14, 15))
    assert daemon.node.leases.leases == {}
    assert daemon.events[-1] == events.ClientGone(
        5, NOW_S, session=3, name="works-0", leases=2, handoffs=0
    )


def test_a_worker_that_joins_first_does_not_speak_for_its_engine():
    daemon = adopted()
    daemon.feed(inputs.ClientJoined(NOW_S, 3, "works-0", 4712))
    assert daemon.node.sessions.by_id[3].is_former
    assert daemon.node.sessions.by_id[3].pids == [4711, 4712]


def test_an_engine_that_returns_twice_keeps_its_new_leases():
    daemon = adopted()
    returned(daemon, 7, 9)
    opened = daemon.call(client.OpenLease, tokens((1, 16)))
    assert returned(daemon, 9) == [NoteEnded(7), NoteFreed(ids(11, 12))]
    assert set(daemon.node.leases.leases) == {9, 41, opened.lease}


def test_the_return_of_a_session_that_is_gone_changes_nothing():
    daemon = adopted()
    assert daemon.feed(inputs.ClientCameBack(NOW_S, 8, 4711, (7,))) == []
    assert len(daemon.events) == 1


@pytest.mark.parametrize("kind", [client.ReleaseLease, client.CommitAndRelease])
def test_a_former_lease_can_be_released(kind):
    daemon = adopted()
    returned(daemon, 7, 9)
    effects = daemon.feed(inputs.FromClient(NOW_S, 3, kind(5, 7)))
    assert effects == [NoteEnded(7), NoteFreed(ids(11, 12)), AnswerEngine(3, client.Done(5))]


def test_a_former_lease_shares_nothing_that_its_engine_says_now():
    daemon = adopted()
    returned(daemon, 7, 9)
    cached = daemon.node.leases.tree.cached_pages
    daemon.feed(inputs.FromClient(NOW_S, 3, client.ReleaseUpTo(5, 7, 64)))
    assert (7 in daemon.node.leases.leases, daemon.node.leases.tree.cached_pages) == (False, cached)


def test_who_waits_has_what_a_former_lease_gave_back():
    daemon = adopted()
    returned(daemon, 7, 9)
    toks = tokens((5000, 13 * 16))
    asked = client.OpenLease(6, deadline_s=9.0)
    assert daemon.feed(inputs.FromClient(NOW_S, 3, asked, toks)) == []
    made = daemon.feed(inputs.FromClient(NOW_S, 3, client.ReleaseLease(7, 7)))
    assert [type(one) for one in made] == [
        NoteEnded,
        NoteFreed,
        AnswerEngine,
        NoteFreed,
        NoteHeld,
        AnswerEngine,
    ]


@pytest.mark.parametrize(
    ("kind", "toks", "fields"),
    [
        (client.ExtendLease, b"", {"n_tokens": 16}),
        (client.CommitLease, b"", {}),
        (client.CommitAndRelease, tokens((70, 1)), {}),
        (client.CommitUpTo, b"", {"upto_tokens": 16}),
        (client.ReleaseUpTo, tokens((70, 1)), {"upto_tokens": 16}),
        (client.SayWritten, b"", {"upto_tokens": 16}),
        (client.SlideLease, b"", {"upto_tokens": 0}),
        (client.RetractLease, b"", {}),
        (client.ResumeLease, b"", {}),
        (client.FetchPages, b"", {"pages": b""}),
        (client.SendRequest, PROMPT, {"room": 9}),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)
def test_a_former_lease_can_be_used_for_nothing_else(kind, toks, fields):
    daemon = adopted()
    returned(daemon, 7, 9)
    reply = daemon.call(kind, toks, lease=7, **fields)
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BEFORE_RESTART
    assert reply.refusal.message == sentence_of("a former lease can be used for nothing else")
    assert not reply.refusal.is_retryable


def test_a_former_lease_of_another_session_is_unknown():
    daemon = adopted()
    daemon.feed(inputs.ClientJoined(NOW_S, 8, "works-1", 5000))
    for kind in (client.ReleaseLease, client.CommitAndRelease):
        reply = daemon.call(kind, session=8, lease=7)
        assert isinstance(reply, client.Failed)
        assert reply.refusal.code is Code.UNKNOWN_LEASE


def test_the_path_of_a_former_lease_is_not_evicted():
    daemon = adopted()
    daemon.feed(inputs.FromOperator(NOW_S, b"op", admin.Flush(1)))
    assert daemon.node.leases.tree.probe(PROMPT, "") == 48


# ---- what is said of them ------------------------------------------------------------------------


def test_why_names_the_engine_that_has_not_come_back():
    daemon = adopted()
    assert daemon.why("page", 11) == sentence_of("why names the engine that has not come back")


def test_why_says_that_the_engine_is_back():
    daemon = adopted()
    returned(daemon, 7)
    assert daemon.why("page", 11) == sentence_of("why says that the engine is back")


def test_why_says_who_may_read_what_was_not_proven():
    assert adopted().why("page", 14) == sentence_of("why says who may read what was not proven")


def test_why_of_a_lease_says_what_it_waits_for_and_nothing_of_saved_bytes():
    daemon = adopted()
    (report,) = daemon.feed(inputs.FromOperator(NOW_S, b"op", admin.Why(1, "lease", 7)))
    assert report.message == admin.Because(
        1,
        "lease 7 of works-0 (pid 4711), from before the restart: it has not come back yet, for "
        "0.0 s: former, 2 pages held, 0 in quarantine, prefix of 48 tokens locked",
        ("holders: engine", "waits for its engine to come back or to end"),
        ("client:3", "node:7"),
    )


def test_why_of_a_client_says_that_it_has_not_come_back():
    assert adopted().why("client", 3) == sentence_of(
        "why of a client says that it has not come back"
    )


def test_the_pages_that_were_not_proven_lead_to_no_client():
    daemon = adopted()
    for kind, number in (("page", 14), ("lease", 41)):
        (report,) = daemon.feed(inputs.FromOperator(NOW_S, b"op", admin.Why(1, kind, number)))
        assert "client:0" not in report.message.links


def test_a_refusal_for_want_of_room_names_those_who_have_not_come_back():
    daemon = adopted()
    daemon.feed(inputs.ClientJoined(NOW_S, 8, "works-1", 5000))
    lease = daemon.call(client.OpenLease, tokens((7000, 16)), session=8)
    reply = daemon.call(client.ExtendLease, session=8, lease=lease.lease, n_tokens=18 * 16)
    assert isinstance(reply, client.Failed)
    assert (
        "lease 7 of works-0 (pid 4711), from before the restart: it has not come back yet, for "
        "0.0 s (2 pages, locks 3 cached)"
    ) in reply.refusal.message


def test_the_audit_finds_nothing_wrong_with_what_was_adopted():
    daemon = adopted()
    for turn in range(20):
        daemon.feed(inputs.AuditTurn(NOW_S + turn, 10_000))
    assert daemon.node.audit.sweeps > 3
    assert daemon.node.audit.findings.broken == 0


def test_the_audit_finds_pages_that_are_kept_for_nobody():
    node = adopted().node
    node.former_leases.leases.clear()
    node.sessions.by_id.clear()
    node.leases.holders.release(node.leases.leases[7], "engine", "forced")
    node.leases.holders.release(node.leases.leases[9], "engine", "forced")
    assert violations(node) == [
        "I9: lease 41 is held for unproven, which is gone",
        "I9: lease 41 keeps pages that nobody of before the restart reads",
    ]


def test_the_snapshot_says_who_has_not_come_back():
    daemon = adopted()
    before = snapshot(daemon.node).clients
    returned(daemon, 7)
    after = snapshot(daemon.node).clients
    assert before == (ClientState(3, "works-0", (4711, 4712), 0.0, 2, 3, 0, 0, "awaited", 2),)
    assert after == (ClientState(3, "works-0", (4711, 4712), 0.0, 1, 2, 0, 0, "attached", 1),)


def test_the_snapshot_says_what_stands_where():
    shot = snapshot(adopted().node)
    assert [(one.id, one.state, one.owner, one.waiting_for) for one in shot.leases] == [
        (7, "former", "works-0", "its engine to come back or to end"),
        (9, "former", "works-0", "its engine to come back or to end"),
        (41, "former", "kvd", WAITS),
    ]
    assert shot.pools[0].held_pages == 5
    assert shot.pools[0].cached_pages == 7
