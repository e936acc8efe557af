"""Engines of several ranks that hand over by kvd: equal ones do, unlike ones are told why not.

Each rank is a process with SGLang's queues; they agree by its own collectives (``pd_engine``).
"""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from tests.connectors.sglang.pd_pair import PYTHON, pair_of, prompt
from tests.support.daemons import free_port

pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="set KVD_SGLANG_PYTHON to a Python with SGLang 0.5.23 to run its queues"
    ),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("running"),
]

_seeds = itertools.count(3000)
TWO = {"tp": 2}


def fresh():
    return prompt(6, next(_seeds))


@pytest.fixture
def two(sglang, nodes):
    with pair_of(sglang, nodes, prefill=TWO, decode=TWO) as found:
        yield found
        found.nothing_is_held()


@pytest.mark.parametrize("kv", ["mha", "mla"])
def test_two_ranks_to_two(sglang, nodes, kv):
    """Each rank's part goes to the same rank; of latents both have all."""
    told = TWO | {"kv": kv}
    with pair_of(sglang, nodes, prefill=told, decode=told) as pair:
        for tokens in (prompt(6, 81), prompt(6, 81) + prompt(3, 82), prompt(0, 83, 3)):
            pair.came(tokens)
        pair.nothing_is_held()


@pytest.mark.parametrize("step", ["save", "load"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_while_one_rank_copies(two, role, step, rank):
    """The other rank may have all of it; pages are free when no byte moves."""
    at = (two.prefill if step == "save" else two.decode).ranks[rank]
    at.tell("stop at", step)
    rid = two.add(fresh())
    at.hear("at")
    getattr(two, role).tell("abort", rid)
    at.tell("go")
    for engine in (two.prefill, two.decode):
        for each in engine.ranks:
            told = each.hear("over", rid=rid)
            assert told["over"] in {"sent", "came"} or told["why"]
    two.works_again()


def test_a_rank_that_has_failed_fails_the_request_on_all(two):
    """SGLang's injector, in one rank of each engine."""
    for engine in (two.prefill, two.decode):
        engine.ranks[1].tell("fail", 0.05)
    for _ in range(8):
        rid = two.add(fresh())
        for engine in (two.prefill, two.decode):
            engine.hear("over", rid=rid)
    for engine in (two.prefill, two.decode):
        engine.ranks[1].tell("fail", 0.0)
    two.works_again()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_daemon_that_is_killed_while_one_rank_copies(sglang, nodes, side):
    with pair_of(sglang, nodes, prefill=TWO, decode=TWO) as pair:
        at = (pair.prefill if side == "prefill" else pair.decode).ranks[1]
        at.tell("stop at", "save" if side == "prefill" else "load")
        rid = pair.add(fresh())
        at.hear("at")
        os.kill(pair.daemon(side).pid, signal.SIGKILL)
        at.tell("go")
        for engine in (pair.prefill, pair.decode):
            engine.hear("over", rid=rid)
        pair.daemon(side).kill()
        pair.daemon(side).start()
        pair.daemon(side).wait_ready()
        pair.works_again()
        pair.nothing_is_held()


@pytest.mark.parametrize("kv", ["mha", "mla"])
@pytest.mark.parametrize(("n_prefill", "n_decode"), [(2, 1), (1, 2)])
def test_unlike_ranks_are_told_so_on_both_sides(sglang, nodes, n_prefill, n_decode, kv):
    """Soon, and not by a timeout; also where the prompt comes to the prefill engine later."""
    told = [{"tp": n_ranks, "kv": kv} for n_ranks in (n_prefill, n_decode)]
    with pair_of(sglang, nodes, prefill=told[0], decode=told[1]) as pair:
        rid = pair.add(fresh())
        for role in ("decode", "prefill"):
            assert "give both servers the same --tp-size" in pair.why(role, rid)
        rid = pair.add(fresh(), to=("decode",))
        assert f"({n_prefill}, 1, 1) there and ({n_decode}, 1, 1) here" in pair.why("decode", rid)
        pair.add(fresh(), to=("prefill",), room=int(rid[1:]))
        assert "--tp-size" in pair.why("prefill", rid)
        pair.nothing_is_held()


@pytest.mark.parametrize(("n_prefill", "n_decode"), [(2, 2), (2, 1), (1, 2)])
def test_ranks_with_attention_of_their_own(sglang, nodes, n_prefill, n_decode):
    """``--enable-dp-attention``: a request is of one rank here and of any rank there."""
    here, there = ({"tp": n_ranks, "dp": n_ranks} for n_ranks in (n_prefill, n_decode))
    with pair_of(sglang, nodes, prefill=here, decode=there) as pair:
        for here, there in itertools.product(pair.prefill.ranks, pair.decode.ranks):
            room = next(pair._rooms)
            told = {"rid": f"r{room}", "tokens": fresh(), "room": room, "port": pair.port}
            for rank in (there, here):
                rank.tell("add", told)
            assert here.hear("over", rid=told["rid"])["over"] == "sent"
            assert there.hear("over", rid=told["rid"])["over"] == "came"
        pair.nothing_is_held()


NOT_SERVED = {
    "--pp-size": {"pp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--dcp-size": {"attn_dcp_size": 2},
    "--enable-kv-cache-sharding": {"enable_kv_cache_sharding": True},
}


@pytest.mark.parametrize("switch", NOT_SERVED)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ranks_that_are_not_served(sglang, nodes, role, switch):
    """The engine does not start, and says by which switch."""
    told = {"more": NOT_SERVED[switch]}
    engine = sglang.engine(role, free_port(), told, **{"kvd.endpoint": nodes.decode.client})
    with pytest.raises(AssertionError, match=f"{switch}.*--disaggregation-transfer-backend"):
        engine.hear("ready")
    engine.kill()
