"""Whose pages an engine stores: what decides their bytes is in the name, and nothing else is."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest

from kvd.connectors.sglang.chains import RestorablePages
from kvd.connectors.sglang.host_pages import HostPages
from kvd.connectors.sglang.identity import identity_of_pages
from kvd.connectors.sglang.options import storage_options
from tests.connectors.sglang.world import PlayedHostPool

RANK = {"tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "dp_rank": 0}
CONTEXTS = {"attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1}
CONFIG = {"model_name": "org/model", "is_mla_model": False, **RANK, **CONTEXTS}


@pytest.fixture
def model(tmp_path):
    """Files of weights that were there before the engine began."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def named(
    model, *, layout="page_first", pool="kv", server=(), extra=(), version="0.5.23", **config
):
    """The identity of an engine that differs in some things."""
    given = {"model_path": str(model), "dtype": "bfloat16", **dict(server)}
    options = storage_options({"interface_v1": 1, **dict(extra)})
    # The files of these tests are younger than their process.
    options = msgspec.structs.replace(options, since_ns=time.time_ns() + 10**9)
    return identity_of_pages(
        SimpleNamespace(**{**CONFIG, **config}),
        SimpleNamespace(**given),
        HostPages(pool, PlayedHostPool(layout)),
        options,
        version=version,
    )


def test_equal_engines_have_one_name(model) -> None:
    one, two = named(model), named(model, dp_rank=1)
    assert one.namespace == two.namespace
    assert one.namespace.startswith("model:bfloat16:")
    assert not one.alone


@pytest.mark.parametrize(
    "unlike",
    [
        {"tp_rank": 1},
        {"tp_size": 4},
        {"pp_size": 2},
        {"attn_cp_size": 2},
        {"model_name": "org/other"},
        {"layout": "layer_first"},
        {"pool": "draft"},
        {"version": "0.6.0"},
        {"server": {"dtype": "float16"}},
        {"server": {"kv_cache_dtype": "fp8_e4m3"}},
        {"server": {"quantization": "awq"}},
        {"server": {"json_model_override_args": '{"rope_theta": 1}'}},
        {"extra": {"kvd.partition": "mine"}},
        {"extra": {"kvd.weights": "v2"}},
    ],
)
def test_an_unlike_engine_has_another_name(model, unlike) -> None:
    assert named(model, **unlike).namespace != named(model).namespace


def test_other_weights_are_another_name(model) -> None:
    before = named(model).namespace
    (model / "model.safetensors").write_bytes(b"others!")
    assert named(model).namespace != before


def test_ranks_that_have_all_of_a_model_share(model) -> None:
    ranks = {named(model, is_mla_model=True, tp_rank=rank).namespace for rank in range(2)}
    assert len(ranks) == 1


def test_weights_that_nobody_knows_are_shared_with_nobody(model) -> None:
    unknown = {"server": {"model_path": "org/on-a-hub"}}
    one, two = named(model, **unknown), named(model, **unknown)
    assert one.namespace != two.namespace
    assert "name the weights" in one.alone[0]
    assert not named(model, **unknown, extra={"kvd.weights": "v1"}).alone


def test_a_prompt_can_be_gone_on_from_where_every_pool_allows_it() -> None:
    restorable = RestorablePages(6)
    restorable.whole("indexer", 5)
    restorable.trailing("swa", [False, True, True, False, True, True], 2)
    assert restorable.lengths == [3]
    assert restorable.most == 3
    assert restorable.by_pool("kv") == {"kv": 6, "indexer": 5, "swa": 6}


def test_a_window_that_is_longer_than_the_prompt_is_there_from_its_start() -> None:
    restorable = RestorablePages(3)
    restorable.trailing("swa", [True, True, True], 2)
    assert restorable.lengths == [1, 2, 3]
