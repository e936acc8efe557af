"""No two engines whose KV differs have one namespace; two that are alike have."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
import time
from types import SimpleNamespace

import pytest

from kvd.client import Code, KvdError, LayerMemory
from kvd.connectors.identity import Indescribable, described
from kvd.connectors.vllm import identity
from kvd.connectors.vllm.identity import (
    BlockPacking,
    agreed,
    identity_of,
    namespace_of,
    packing_of,
    series_of,
)
from kvd.connectors.vllm.layout import EngineLayers, fitting
from kvd.connectors.vllm.options import BadOptions, VllmOptions, options_of
from tests.connectors.vllm.configs import (
    CLASSES,
    RECORDED,
    Dtype,
    Layer,
    block_spec,
    engine_config,
    tensor,
)

PACKING = BlockPacking("vllm 0.32 LBHNC float32 CPU_ATTN/vec", {"scales": "a"})


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "llama-tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights" * 1000)
    return path


def engine(model, change=None, **told):
    """The identity of an engine; ``change`` alters its configuration."""
    config = engine_config(model)
    if change is not None:
        change(config)
    asked = {
        "packing": PACKING,
        "block_specs": [(["layers.0", "layers.1"], block_spec())],
        "version": RECORDED["version"],
        "since_ns": time.time_ns() + 10**9,
        "environment": {},
        "snapshot": lambda *_: None,
        **told,
    }
    options = VllmOptions(**asked.pop("options", {}))
    return identity_of(config, options, asked.pop("packing"), **asked)


def test_engines_that_are_alike_have_one_namespace(model, tmp_path):
    there = tmp_path / "elsewhere" / "llama-tiny"
    shutil.copytree(model, there)
    for file in there.iterdir():
        os.utime(file, (1, 1))
    here = engine(model)
    assert here.namespace == engine(there).namespace
    assert here.namespace.startswith("llama-tiny:float32:")
    assert not here.alone


SECTIONS = {
    "model_config": identity.MODEL_APART,
    "cache_config": identity.CACHE_APART,
    "load_config": identity.LOAD_APART,
    "attention_config": frozenset(),
    "mamba_config": frozenset(),
}

OF_MODEL = {"hf_config", "hf_text_config", "dtype", "quantization", "quantization_config"}
"""Parts of their own."""

OTHERWISE = {
    "hf_config": {"rope_theta": 5.0},
    "hf_text_config": {"rope_theta": 5.0},
    "dtype": Dtype("torch.bfloat16"),
    "load_format": "dummy",
    "model_weights": "s3://bucket",
}

TOLD_APART = {"model", "revision", "model_weights", "multimodal_config", "hf_config_path"}
"""Read in another way than by value."""

FIELDS = [
    (section, type(getattr(engine_config("x"), section)).__name__, apart)
    for section, apart in SECTIONS.items()
]


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (section, field)
        for section, kind, apart in FIELDS
        for field in RECORDED["fields"][kind]
        if field not in apart - OF_MODEL
    ],
)
def test_every_field_that_may_decide_a_value_is_in_the_name(model, section, field):
    def change(config):
        setattr(getattr(config, section), field, OTHERWISE.get(field, "otherwise"))

    assert engine(model, change).namespace != engine(model).namespace


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (section, field)
        for section, kind, apart in FIELDS
        for field in RECORDED["fields"][kind]
        if field in apart - OF_MODEL - TOLD_APART
    ],
)
def test_what_decides_no_value_is_not(model, section, field):
    def change(config):
        setattr(getattr(config, section), field, "otherwise")

    assert engine(model, change).namespace == engine(model).namespace


def test_a_field_that_a_later_version_has_is_in_the_name(model):
    def change(config):
        now = vars(config.cache_config)
        names = [*now, "rotates_keys"]
        later = dataclasses.make_dataclass("CacheConfig", names)
        config.cache_config = later(**now, rotates_keys=True)

    assert engine(model, change).namespace != engine(model).namespace


def overrides(config):
    config.model_config.hf_config.rope_parameters = {"rope_theta": 5.0, "rope_type": "default"}


class Odd:
    """Of a model whose code was loaded with it."""

    def to_dict(self):
        raise ValueError("no")


def an_odd_config(config):
    config.model_config.hf_text_config = Odd()


def a_part_less(config):
    del config.attention_config


def a_function(config):
    config.model_config.model_class_overrides = {"Llama": lambda: None}


UNLIKE = {
    "hf_overrides": {"change": overrides},
    "version": {"version": "0.33.0"},
    "a build of no release": {"version": "0.32.1.dev7+gabc"},
    "packing": {"packing": BlockPacking("vllm 0.32 LBHNC float32 CPU_ATTN/amx", PACKING.details)},
    "scales": {"packing": BlockPacking(PACKING.tag, {"scales": "b"})},
    "namespace": {"options": {"namespace": "blue"}},
    "weights by name": {"options": {"weights": "release-7"}},
    "environment": {"environment": {"VLLM_CPU_INT4_W4A8": "0"}},
    "context ranks": {
        "change": lambda config: setattr(config.parallel_config, "decode_context_parallel_size", 2)
    },
    "a window": {"block_specs": [([], CLASSES["FullAttentionSpec"](sliding_window=64))]},
    "several groups": {"block_specs": [(["layers.0"], block_spec()), (["layers.1"], block_spec())]},
    "further": {"change": lambda config: setattr(config, "additional_config", {"x": 1})},
    "a function": {"change": a_function},
    "an odd configuration": {"change": an_odd_config},
    "what an older version lacks": {"change": a_part_less},
}

UNLIKE["weights that are replaced"] = {
    "change": lambda config: setattr(config, "weight_transfer_config", {"backend": "nccl"})
}

UNLIKE["stages of a pipeline"] = {
    "change": lambda config: setattr(config.parallel_config, "pipeline_parallel_size", 2)
}
UNLIKE["workers that may replace them"] = {
    "change": lambda config: setattr(config.parallel_config, "worker_extension_cls", "rl.Worker")
}

UNKNOWN = {
    "weights that are replaced",
    "workers that may replace them",
    "a function",
    "an odd configuration",
}


@pytest.mark.parametrize("what", UNLIKE)
def test_unlike_engines_have_unlike_names(model, what):
    unlike = engine(model, **UNLIKE[what])
    assert unlike.namespace != engine(model).namespace
    assert bool(unlike.alone) == (what in UNKNOWN)


ALIKE = {
    "a patch": {"version": "0.32.9"},
    "a build for a processor": {"version": "0.32.0+cpu"},
    "ranks": {"change": lambda config: setattr(config.parallel_config, "tensor_parallel_size", 2)},
    "heads of a rank": {
        "block_specs": [
            ([], CLASSES["FullAttentionSpec"](**{**vars(block_spec()), "num_kv_heads": 2}))
        ]
    },
    "no adapters": {"change": lambda config: setattr(config, "lora_config", None)},
    "other variables": {"environment": {"HOME": "/root", "VLLM_LOGGING_LEVEL": "DEBUG"}},
}


@pytest.mark.parametrize("what", ALIKE)
def test_how_and_where_it_is_computed_is_in_no_name(model, what):
    assert engine(model, **ALIKE[what]).namespace == engine(model).namespace


def test_other_weights_of_the_same_size_under_the_same_path(model):
    before = engine(model)
    weights = model / "model.safetensors"
    told = weights.stat()
    weights.write_bytes(b"WEIGHTS" * 1000)
    os.utime(weights, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert engine(model).namespace != before.namespace


@pytest.mark.parametrize(
    "load_format", ["dummy", "tensorizer", "ipc_cache", "modelexpress", "mine"]
)
def test_weights_that_no_file_tells_are_known_to_this_engine_alone(model, load_format):
    def change(config):
        config.load_config.load_format = load_format

    one, other = engine(model, change), engine(model, change)
    assert one.namespace != other.namespace
    assert load_format in one.alone[0]
    assert "kvd.weights" in one.alone[0]
    named = [engine(model, change, options={"weights": "release-7"}) for _ in range(2)]
    assert named[0] == named[1]
    assert not named[0].alone
    assert engine(model, change, options={"weights": "release-8"}) != named[0]


def test_a_model_that_is_nowhere_is_known_to_this_engine_alone(tmp_path):
    found = engine(tmp_path / "nowhere")
    assert found.alone
    assert found.namespace != engine(tmp_path / "nowhere").namespace


COMMIT = "c0ffee" * 6 + "c0de"


@pytest.fixture
def hub(tmp_path):
    """A cache of the hub with one model, at the commit that its main branch is at."""
    home = tmp_path / "models--meta--llama-tiny"
    snapshot = home / "snapshots" / COMMIT
    for directory in (home / "blobs", home / "refs", snapshot):
        directory.mkdir(parents=True)
    blob = home / "blobs" / ("ab" * 32)
    blob.write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(blob)
    (home / "refs" / "main").write_text(COMMIT)
    return snapshot


def named(hub, revision=None, asked=None, **how):
    """An engine that was given the model's name."""

    def change(config):
        config.model_config.revision = revision

    def snapshot(*what):
        if asked is not None:
            asked.append(what)
        return str(hub)

    return engine("meta/llama-tiny", change, snapshot=snapshot, **how)


def test_a_model_of_the_hub_is_known_by_the_names_of_its_blobs(hub):
    asked = []
    by_name = named(hub, asked=asked)
    assert not by_name.alone
    assert asked == [("meta/llama-tiny", None, None)]
    assert by_name.namespace == engine(hub, since_ns=0).namespace
    assert by_name.namespace.startswith("llama-tiny:float32:")
    assert named(hub, environment={"VLLM_USE_MODELSCOPE": "True"}).alone


def test_a_branch_that_moved_while_the_engine_loaded_says_nothing(hub):
    early_ns = time.time_ns() - 10**12
    moved = named(hub, since_ns=early_ns)
    assert "--revision" in moved.alone[0]
    assert named(hub, "v2").alone, "no word of that tag is in the cache"
    assert not named(hub, COMMIT, since_ns=early_ns).alone
    assert not named(hub).alone


def speculates(model, method):
    def change(config):
        draft = copy.deepcopy(config.model_config)
        draft.model = str(model)
        config.speculative_config = CLASSES["SpeculativeConfig"](
            method=method, draft_model_config=draft
        )

    return change


def test_a_model_that_drafts_has_kv_of_its_own(model, tmp_path):
    other = tmp_path / "draft"
    shutil.copytree(model, other)
    plain = engine(model)
    drafted = engine(model, speculates(other, "eagle3"))
    assert drafted.namespace != plain.namespace
    assert drafted.namespace == engine(model, speculates(other, "eagle3")).namespace
    (other / "model.safetensors").write_bytes(b"others")
    assert engine(model, speculates(other, "eagle3")).namespace != drafted.namespace
    assert engine(model, speculates(other, "ngram")).namespace == plain.namespace

    def by_a_class(config):
        config.speculative_config = CLASSES["SpeculativeConfig"](method="custom_class")

    assert engine(model, by_a_class).namespace != plain.namespace


def test_where_a_configuration_was_read_is_in_no_name(model):
    def change(config):
        inner = {"hidden_size": 7, "_name_or_path": "/a", "transformers_version": "1"}
        config.model_config.hf_config.vision_config = inner
        config.model_config.hf_config._name_or_path = "/a"

    def elsewhere(config):
        change(config)
        config.model_config.hf_config.vision_config["_name_or_path"] = "/b"
        config.model_config.hf_config._name_or_path = "/b"

    assert engine(model, change).namespace == engine(model, elsewhere).namespace


def test_how_a_picture_is_made_an_embedding_of(model):
    def sees(**fields):
        def change(config):
            config.model_config.multimodal_config = CLASSES["MultiModalConfig"](**fields)

        return engine(model, change).namespace

    assert sees(mm_processor_kwargs={"max_pixels": 7}) != sees()
    assert sees(mm_processor_cache_gb=7) == sees()


def test_how_a_models_files_say_that_pictures_are_prepared_counts_beside_named_weights(model, hub):
    def engine_of(path, **how):
        def change(config):
            config.model_config.multimodal_config = CLASSES["MultiModalConfig"]()

        return engine(path, change, options={"weights": "release-7"}, **how)

    for path, how in ((model, {}), ("meta/llama-tiny", {"snapshot": lambda *_: str(hub)})):
        place = model if path == model else hub
        before = [engine_of(path, **how).namespace]
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            for text in ("{}", '{"size": 7}'):
                (place / name).write_text(text)
                before.append(engine_of(path, **how).namespace)
        assert len(set(before)) == 5
        assert engine_of(path, **how).namespace == before[-1]
    nowhere = engine_of("nowhere/llama-tiny")
    assert not nowhere.alone
    assert engine_of(model, since_ns=0).alone, "they may have been others when they were read"


def test_no_secret_is_in_a_part(model):
    def change(config):
        config.model_config.hf_token = "hf_secret"

    found = engine(model, change)
    assert "hf_secret" not in str(found)
    assert "hunter2" not in namespace_of(found.namespace, None, "hunter2")


def test_parts_that_differ_can_be_seen(model):
    one, other = engine(model), engine(model, overrides)
    words = [dict(part.split("=", 1) for part in found.in_words().split(", ") if "=" in part)
             for found in (one, other)]  # fmt: skip
    differ = {name for name in words[0] if words[0][name] != words[1][name]}
    assert differ == {"config"}
    assert "by content, 2 files" in one.in_words()


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama", "a#b", "x @epoch 7", "tab\there", "ünïcode", "#" * 300, "m" * 300, ".."]
)
def test_whatever_things_are_called_a_name_is_one(tmp_path, name):
    model = tmp_path / name[:200]
    model.mkdir() if name != ".." else None
    (model / "model.safetensors").write_bytes(b"w")
    config = {"namespace": name, "weights": "w"}

    def change(made):
        made.model_config.revision = name
        made.cache_config.cache_dtype = name

    base = engine(model, change, options=config).namespace
    assert base.isascii()
    assert base.isprintable()
    assert not set(base) & {"#", " "}
    member = namespace_of(base, f"{name[:16]}-{'0' * 24}", name)
    assert member.split("#")[0] == base
    assert member.count("#") == 1
    assert len(member) <= 200
    # The wire takes 256, an epoch behind it counted.
    assert " " not in member
    # What is cut, or cannot be written, is told apart all the same.
    assert namespace_of(base, f"{name} 1", None) != namespace_of(base, f"{name}_1", None)


def test_members_of_a_base():
    names = {
        namespace_of("f", adapter, salt)
        for adapter in (None, "a-1", "a-2", "b-1")
        for salt in (None, "x", "y")
    }
    assert len(names) == 12
    assert {name.split("#")[0] for name in names} == {"f"}
    assert namespace_of("f", None, None) == "f"
    assert namespace_of("f", "", "") == "f"


@pytest.mark.parametrize(
    ("version", "series"),
    [
        ("0.32.0", "0.32"),
        ("0.32.1+cu129", "0.32"),
        ("0.32.0rc1", "0.32.0rc1"),
        ("0.33.1.dev4+g12", "0.33.1.dev4+g12"),
        ("1.2", "1.2"),
    ],
)
def test_a_series_of_releases_packs_alike(version, series):
    assert series_of(version) == series


# ---- values --------------------------------------------------------------------------------------


def test_equal_values_have_one_description():
    assert described({"b": 1, "a": {3, 1, 2}}) == described({"a": {2, 3, 1}, "b": 1})
    assert described((1, 2)) == [1, 2]
    assert described(Dtype("torch.float16")) == "torch.float16"
    assert described(b"\x01") == "01"
    assert described(dict) == "builtins.dict"


@pytest.mark.parametrize("value", [lambda: None, object(), iter([]), {"deep": [object()]}])
def test_what_has_no_description_is_refused(value):
    with pytest.raises(Indescribable):
        described(value)


# ---- what workers pack ---------------------------------------------------------------------------


def packed(layers=None, dtype="torch.float32", cache_dtype="auto", **layer):
    names = layers or ["model.layers.0.attn", "model.layers.1.attn"]
    return packing_of(
        {name: tensor(9, 4, 32, 64, dtype=dtype) for name in names},
        {name: Layer(**layer) for name in names},
        version="0.32.0",
        layout="LBHNC",
        cache_dtype=cache_dtype,
    )


def test_a_tag_says_who_packs():
    assert packed(isa="vec").tag == "vllm 0.32 LBHNC float32 CPU_ATTN/vec"
    assert packed(backend="FLASH_ATTN", dtype="torch.uint8", cache_dtype="fp8").tag == (
        "vllm 0.32 LBHNC fp8/uint8 FLASH_ATTN"
    )


def test_packings_that_differ():
    found = [
        packed(),
        packed(isa="amx"),
        packed(dtype="torch.bfloat16"),
        packed(dtype="torch.float16"),
        packed(cache_dtype="fp8_e5m2"),
        packed(scales=(0.5, 1.0)),
        packed(scales=(1.0, 0.5)),
        packed(layers=["model.layers.1.attn", "model.layers.0.attn"]),
        packed(layers=["model.layers.0.attn"]),
    ]
    assert all(one != other for k, one in enumerate(found) for other in found[:k])
    assert packed() == packed()


def test_ranks_agree_or_nothing_is_known():
    assert agreed([]) is None
    assert agreed([packed(), packed()]) == packed()
    assert agreed([packed(), packed(isa="amx")]) is None


def test_ranks_with_other_layers_or_scales_are_known_by_those_of_all_of_them():
    first, other = packed(), packed(layers=["model.layers.9.attn"])
    found = [agreed([first, first]), agreed([first, other]), agreed([other, first])]
    assert len({str(one) for one in found}) == 3
    assert agreed([first, first, other]) != agreed([first, other, other])


def pool_of(tag):
    place = SimpleNamespace(layer=0, page_shape=(64,))
    component = SimpleNamespace(name="kv", tensors=[place], pages=10, page_bytes=64)
    memory = SimpleNamespace(family="raw", tag=tag, components=[component])
    return SimpleNamespace(name="main", page_size=32, shards=(), memory=memory)


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        ("", True),
        ("vllm 0.32 LBHNC float32 CPU_ATTN/vec", True),
        ("vllm 0.32 LBHNC float32", True),
        ("vllm", True),
        ("vllm 0.32 LBHNC float16", False),
        ("vllm 0.32 LBHNC float", False),
        ("vllm 0.32 LBHNC float32 CPU_ATTN/amx", False),
        ("vllm 0.32 LBHNC float32 CPU_ATTN/vec and more", False),
        ("release-7", False),
    ],
)
def test_a_pool_may_say_less_of_who_packs_it_and_nothing_else(tag, fits):
    layers = EngineLayers({"a": LayerMemory(0, (9, 64), (64, 1), 1)})
    asked = {"block_size": 32, "ranks": 1, "tag": "vllm 0.32 LBHNC float32 CPU_ATTN/vec"}
    if fits:
        fitting(pool_of(tag), layers, **asked)
        return
    with pytest.raises(KvdError, match=r"tag = 'vllm 0\.32 LBHNC float32 CPU_ATTN/vec'") as refused:
        fitting(pool_of(tag), layers, **asked)
    assert refused.value.code == Code.LAYOUT_MISMATCH.value
    assert repr(tag) in str(refused.value)


@pytest.mark.parametrize("extra", [{"kvd.adapters": "name"}, {"kvd.save": "some"}])
def test_options_that_are_none(extra):
    with pytest.raises(BadOptions, match="it is one of"):
        options_of(extra)
