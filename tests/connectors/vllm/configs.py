"""vLLM's configuration as it was recorded from the real classes, for tests that have no vLLM."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from types import SimpleNamespace

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())

CLASSES = {
    name: dataclasses.make_dataclass(name, [(one, object, None) for one in names])
    for name, names in RECORDED["fields"].items()
}
"""By name: with all fields of the real one, and no value but None."""


class Dtype:
    """As torch's: known by its text alone."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


Dtype.__name__ = "dtype"
Dtype.__module__ = "torch"


class Transformers:
    """A configuration of transformers: it has more than fields, and says what."""

    def __init__(self, found):
        self.__dict__.update(found)

    def to_dict(self):
        return dict(vars(self), transformers_version="9.9")


def decoded(told):
    if isinstance(told, list):
        return [decoded(one) for one in told]
    if not isinstance(told, dict):
        return told
    ((kind, what),) = told.items()
    match kind:
        case "dict":
            return {key: decoded(one) for key, one in what.items()}
        case "enum":
            return enum.Enum(what[0], [what[1]])[what[1]]
        case "text":
            return Dtype(what[1])
        case "transformers":
            return Transformers({key: decoded(one) for key, one in what.items()})
        case _:
            name, fields = what
            return CLASSES[name](**{key: decoded(one) for key, one in fields.items()})


def block_spec():
    return decoded(RECORDED["block_spec"])


def engine_config(model):
    """That of an engine whose model is at this path."""
    sections = {name: decoded(told) for name, told in RECORDED["config"].items()}
    config = CLASSES["VllmConfig"](**sections, parallel_config=CLASSES["ParallelConfig"]())
    config.model_config.model = str(model)
    config.additional_config = {}
    return config


def tensor(*shape, dtype="torch.float32"):
    return SimpleNamespace(shape=shape, dtype=Dtype(dtype))


class Scale:
    def __init__(self, *values):
        self.values = values

    def flatten(self):
        return self

    def tolist(self):
        return list(self.values)


class Layer:
    """An attention layer, as far as it is asked."""

    def __init__(self, backend="CPU_ATTN", isa=None, scales=(1.0, 1.0)):
        self.backend = backend
        if isa is not None:
            self.isa = isa
        self._k_scale, self._v_scale = Scale(scales[0]), Scale(scales[1])

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: self.backend)
