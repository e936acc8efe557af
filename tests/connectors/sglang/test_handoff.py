"""Prefill and decode engines of SGLang's own queues, with kvd as their backend of transfers.

Each engine is a process of SGLang's (``pd_engine``), run by the Python that ``KVD_SGLANG_PYTHON``
names; without it everything here is skipped. Whatever happens, what came is the prompt's KV, what
did not come has failed with a reason, nothing is held, and nobody wrote into a page that was free.
Aborts, and daemons and engines that go, at each step, are in ``tests/connectors/contract``
(``test_handoffs``), for other connectors too.
"""

from __future__ import annotations

import itertools
import re

import pytest

from tests.connectors.sglang.pd_pair import (
    IMPATIENT,
    MHA_BYTES,
    PYTHON,
    nodes_for,
    pair_of,
    prompt,
)

pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="set KVD_SGLANG_PYTHON to a Python with SGLang 0.5.23 to run its queues"
    ),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("running"),
]

_seeds = itertools.count(1000)


def fresh():
    """A prompt that nobody has had: all of it is copied, and sent."""
    return prompt(6, next(_seeds))


@pytest.fixture
def pair(sglang, nodes):
    with pair_of(sglang, nodes) as found:
        yield found
        found.nothing_is_held()


# ---- it works ------------------------------------------------------------------------------------


def test_prompts_come_with_their_kv(pair):
    """Of one page that is begun, of whole pages, of several chunks; again, and longer."""
    for pages, rest in ((0, 3), (1, 0), (5, 5), (9, 0), (12, 7)):
        pair.came(prompt(pages, pages, rest))
        pair.came(prompt(pages, pages, rest))
        pair.came(prompt(pages, pages, rest) + prompt(2, 50 + pages))


def test_pages_that_the_node_of_the_decode_engine_has_are_not_sent(pair):
    pair.came(prompt(9, 71, 0))
    before = _sent_pages(pair)
    pair.came(prompt(9, 71, 0) + prompt(1, 72, 0))
    assert _sent_pages(pair) - before == 1


def _sent_pages(pair):
    return pair.daemons.prefill.snapshot().totals.sent_bytes // MHA_BYTES


@pytest.mark.parametrize("how", ["mla", "radix", "optimistic"])
def test_other_engines(sglang, nodes, how):
    """Latents; a tree in the decode engine; a prefill engine that computes before it is met."""
    told = {"mla": {"kv": "mla"}, "radix": {"radix": 1}, "optimistic": {"optimistic": 2}}[how]
    with pair_of(sglang, nodes, prefill=dict(told), decode=dict(told)) as pair:
        pair.came(prompt(6, 61))
        pair.came(prompt(6, 61) + prompt(3, 62))
        pair.came(prompt(6, 61, 0))
        pair.nothing_is_held()


def test_requests_of_one_time(pair):
    rids = [pair.add(prompt(4 + turn % 3, turn)) for turn in range(6)]
    for rid in rids:
        assert pair.prefill.hear("over", rid=rid)["over"] == "sent"
        assert pair.decode.hear("over", rid=rid)["over"] == "came"


def test_tokens_that_do_not_say_all_are_shared_by_nobody(pair):
    pair.came(prompt(5, 73), salt="a")
    pair.came(prompt(5, 73), salt="b")
    before = _sent_pages(pair)
    for _ in range(2):
        pair.came(prompt(5, 74), unshared=1)
    assert _sent_pages(pair) - before == 12


# ---- one of them is given up ---------------------------------------------------------------------


def test_an_abort_is_told_to_who_comes_later(pair):
    """The prefill engine had given it up before the decode engine asked for it."""
    rid = pair.add(fresh(), to=("prefill",))
    pair.prefill.tell("abort", rid)
    pair.prefill.hear("over", rid=rid)
    pair.add(fresh(), to=("decode",), room=int(rid[1:]))
    assert "prefill engine" in pair.why("decode", rid)


def test_injected_faults(pair):
    """SGLang's own: any look at a request may say that it has failed."""
    for rank in (pair.prefill, pair.decode):
        rank.tell("fail", 0.05)
    n_came = 0
    for turn in range(12):
        rid = pair.add(prompt(6, turn))
        pair.prefill.hear("over", rid=rid)
        n_came += pair.decode.hear("over", rid=rid)["over"] == "came"
    for rank in (pair.prefill, pair.decode):
        rank.tell("fail", 0.0)
    pair.works_again()


def test_memory_that_is_released(pair):
    """To the device, as SGLang does between rollouts: what comes then fails, and later works."""
    tokens = fresh()
    pair.came(tokens)
    pair.decode.tell("release memory")
    rid = pair.add(fresh())
    assert "released its memory" in pair.why("decode", rid)
    pair.prefill.hear("over", rid=rid)
    pair.decode.tell("resume memory")
    pair.came(tokens)


# ---- one field is wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["tokens", "their number", "salt", "shared"])
def test_other_prompts(pair, what):
    """Each is refused in both engines, and nothing of the one comes for the other."""
    tokens = fresh()
    other = [*tokens[:-1], tokens[-1] + 1] if what == "tokens" else tokens
    other = other[:-1] if what == "their number" else other
    more = {"salt": {"salt": "b"}, "shared": {"unshared": 1}}.get(what, {})
    rid = pair.add(tokens, to=("decode",))
    pair.add(other, to=("prefill",), room=int(rid[1:]), **more)
    for role in ("prefill", "decode"):
        assert re.search("do not mean the same|prompt-mismatch|prompt", pair.why(role, rid))
    pair.works_again()


def test_a_room_that_another_request_has(pair):
    pair.prefill.tell("stop at", "save")
    rid = pair.add(fresh())
    pair.prefill.hear("at")
    pair.add(fresh(), room=int(rid[1:]))
    for role in ("prefill", "decode"):
        assert "another request" in pair.why(role, rid)
    pair.prefill.tell("go")
    assert pair.prefill.hear("over", rid=rid)["over"] == "sent"
    assert pair.decode.hear("over", rid=rid)["over"] == "came"
    pair.works_again()


WRONG = {
    "RoomWanted": [
        ("room", 1),
        ("kvd_room", 1),
        ("life", "x"),
        *(("host", host) for host in ("127.0.0.2", "", "[::", "a b")),
        *(("port", port) for port in (9, 0, -1, 70_000)),
        ("node", "nobody"),
        ("namespace", "other"),
        ("n_tokens", 1),
        ("is_shared", False),
    ],
    "RoomOpen": [("room", 1), ("life", "x"), ("node", "nobody")],
    "RoomHeard": [("room", 1), ("life", "x"), ("is_over", True), ("engine", "other")],
}
"""Letters, and values that a field of theirs has in place of its own."""


@pytest.mark.timeout(600)
def test_letters_with_one_wrong_field(sglang, nodes):
    """What came is its own, what did not has failed on both sides; and behind it all is well."""
    told = {"env": IMPATIENT}
    with pair_of(sglang, nodes, prefill=told, decode=told) as pair:
        for kind, fields in WRONG.items():
            writer = pair.decode if kind == "RoomWanted" else pair.prefill
            for field, value in fields:
                writer.tell("spoil", kind, {field: value})
                rid = pair.add(fresh())
                ends = [rank.hear("over", rid=rid) for rank in (pair.prefill, pair.decode)]
                writer.tell("spoil", "", {})
                is_well = [told["over"] for told in ends] == ["sent", "came"]
                is_refused = all(told["over"] == "aborted" and told["why"] for told in ends)
                assert is_well or is_refused, (kind, field, ends)
        pair.works_again()
        pair.nothing_is_held()


@pytest.mark.parametrize(
    ("told", "why"), [({"settings": {"kvd.nothing": 1}}, "kvd.nothing"), ({"lora": 1}, "adapters")]
)
def test_an_engine_that_is_not_served(sglang, nodes, told, why):
    with pytest.raises(AssertionError, match=why), pair_of(sglang, nodes, decode=told):
        pass


def test_a_pool_that_does_not_fit(sglang):
    """The engine does not start, and says which pool would."""
    with (
        nodes_for(MHA_BYTES // 2) as small,
        pytest.raises(AssertionError, match=f"page_bytes = {MHA_BYTES}"),
        pair_of(sglang, small),
    ):
        pass


# ---- engines that go -----------------------------------------------------------------------------


def test_a_prefill_engine_that_is_started_anew(sglang, nodes):
    """What the one before had heard, and died with, is no request of the new one's."""
    with pair_of(sglang, nodes) as pair:
        pair.decode.tell("stop at", "heard")
        rid = pair.add(fresh(), to=("decode",))
        pair.decode.hear("at")
        pair.prefill.kill()
        pair.prefill = pair.engine("prefill", {})
        pair.prefill.hear("ready")
        pair.decode.tell("go")
        assert pair.why("decode", rid)
        pair.works_again()
        pair.nothing_is_held()
