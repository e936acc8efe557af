"""transformers' connector: a model of random weights, whose tokens are those that it says alone."""

from __future__ import annotations

import functools
import logging
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import StoppingCriteria, StoppingCriteriaList  # noqa: E402

from kvd.client import connect_sync  # noqa: E402
from kvd.connectors.transformers import generate, node  # noqa: E402
from kvd.connectors.transformers.cache_link import CacheLink  # noqa: E402
from kvd.connectors.transformers.copies import PageCopies  # noqa: E402
from kvd.demo.models import ARCHITECTURES, build_model  # noqa: E402
from tests.connectors.contract.cases import Step  # noqa: E402
from tests.connectors.contract.engine import (  # noqa: E402
    LINK_HURRIES,
    LINK_WAITS,
    NOTHING,
    Aborted,
    PlayedEngine,
)
from tests.connectors.transformers.world import settings_for  # noqa: E402

GENERATED = 20


class AtToken(StoppingCriteria):
    """Something happens when so many tokens were said; it stops nothing."""

    def __init__(self, token, act):
        self._left, self._act = token, act

    def __call__(self, input_ids, scores, **_):
        self._left -= 1
        if self._left == 0:
            self._act()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@functools.cache
def model_of(seed):
    torch.set_num_threads(1)
    return build_model(ARCHITECTURES["llama"], seed=seed)


@functools.cache
def alone(tokens, seed):
    """What the model says without kvd."""
    ids = torch.tensor([tokens])
    return model_of(seed).generate(ids, max_new_tokens=GENERATED, do_sample=False)


class Patches(pytest.MonkeyPatch):
    """Where a ``generate`` passes its steps."""

    def before(self, kind, method, act, *, call=1):
        """``act`` in front of that call of a method."""
        plain, calls = getattr(kind, method), []

        def wrapped(*args, **how):
            calls.append(method)
            if len(calls) == call:
                act()
            return plain(*args, **how)

        self.setattr(kind, method, wrapped)


class ScriptEngine(PlayedEngine):
    """A script that calls ``generate``: copies are over when it goes on, and nobody preempts it."""

    steps = tuple(step for step in Step if step is not Step.PREEMPTED)
    pool: ClassVar = {
        **{k: v for k, v in settings_for(model_of(1)).items() if k != "pool.size"},
        "pool.pages": "48",
    }
    unlike: ClassVar = {
        "dtype": ({"pool.dtype": "bfloat16"}, "a layer is"),
        "layers": ({"pool.layers": "3"}, "fewer layers than the model"),
        "heads": ({"pool.heads": "1"}, "a layer is"),
        "family": (
            {"pool.family": "raw", "pool.page_bytes": "1024", "pool.layers": "4"}
            | {"pool.pages": "48"},
            "is not for this model",
        ),
    }
    waits = LINK_WAITS
    hurries = LINK_HURRIES

    def __init__(self, endpoint, *, model=""):
        self._endpoint = endpoint
        self._seed = 2 if model else 1
        self._model = build_model(ARCHITECTURES["llama"], seed=self._seed)
        self._node = node(self._model, endpoint, name="script").__enter__()

    def answer(self, tokens, happening=NOTHING):
        wanted = alone(tuple(tokens), self._seed)
        before = self._node.counts.hit_tokens
        how = {}
        with Patches.context() as patches:
            act = functools.partial(happening, happening.at)
            match happening.at:
                case Step.LOOKING_UP:
                    patches.before(CacheLink, "load", act)
                case Step.HELD:
                    patches.before(PageCopies, "load", act)
                case Step.LOADING:
                    patches.before(PageCopies, "_load_kv", act, call=2)
                case Step.COMPUTING:
                    how["stopping_criteria"] = StoppingCriteriaList([AtToken(3, act)])
                case Step.SAVING:
                    patches.before(PageCopies, "_save_kv", act, call=2)
            try:
                out = self._model.generate(
                    torch.tensor([tokens]), max_new_tokens=GENERATED, do_sample=False, **how
                )
                happening(Step.RELEASED)
            except Aborted:
                return None
        assert torch.equal(out, wanted), "a token is not the one that the model says alone"
        return self._node.counts.hit_tokens - before

    def settle(self):
        """Nothing is under way between two of them."""

    @property
    def namespace(self):
        return self._node.namespace

    def reset(self):
        base = self.namespace.partition("#")[0]
        with connect_sync(self._endpoint, name="weights") as told:
            told.new_epoch(base)

    def close(self):
        self._node.__exit__()

    @classmethod
    def with_other_version(cls, endpoint, patch):
        # Where it is read: the library makes itself anew in ``sys.modules`` as models are built.
        patch.setattr(f"{generate.__name__}.transformers.__version__", "6.1.0")
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("kvd.connectors.transformers").addHandler(handler)
        engine = cls(endpoint)
        try:
            engine.answer(range(1, 40))
            assert engine._node.counts.saved_tokens == 0
            assert engine._node.counts.prompts == 0
        finally:
            logging.getLogger("kvd.connectors.transformers").removeHandler(handler)
            engine.close()
        return "\n".join(lines)
