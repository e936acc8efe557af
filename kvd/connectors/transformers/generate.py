"""What a script sees: a model whose ``generate`` uses the node's prefix cache.

Within ``with node(model):`` each ``generate`` of one sequence goes like this::

    generate(ids)   load: a cache with what the node has of ids       a lease, while it is copied
                    transformers computes the rest, and the first new token
                    save: the prompt's whole pages                    another one
                    transformers goes on until it stops
                    save: those of the answer                         another one

What cannot be served goes the way that it would go without kvd, and is told by its reason once:
several sequences, beams, an assistant, padding, images, hooks, a cache of the script's own.

A model with states is taken to the last whole page of its prompt first, and its state saved there,
since a state can be gone on from only where it stands; the rest is ``generate``'s.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
import transformers
from transformers import GenerationConfig
from typing_extensions import override

from kvd.connectors.refusals import refused_here
from kvd.connectors.transformers.cache import KvdCache
from kvd.connectors.transformers.cache_link import AnswerCounts, CacheLink
from kvd.connectors.transformers.layout import ARGUMENTS, compute, shape_of
from kvd.connectors.transformers.weights import (
    NamedWeights,
    WeightWatch,
    foreign_part_of,
    identity_of_model,
    series_of,
)
from kvd.errors import Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PreTrainedModel

    from kvd.connectors.transformers.batches import ServedBatches

logger = logging.getLogger("kvd.connectors.transformers")

TESTED: Final = ("5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24")
"""Series that were run, as the how-to says."""

BATCHED: Final = ("5.21", "5.22", "5.23", "5.24")
"""Those whose continuous batching was: its classes are private, and others before that."""

ONE_BY_ONE: Final = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "num_beam_groups": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "hybrid"),
    "penalty_alpha": (None,),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "token_healing": (None, False),
    "constraints": (None,),
    "force_words_ids": (None,),
    "output_hidden_states": (None, False),
    "output_attentions": (None, False),
}
"""What must be so that one sequence is computed, token by token, in the cache that is given, and
nothing is told of tokens that are not computed. ``hybrid`` stands in Gemma's published settings,
and means nothing to transformers any more."""

REFUSED: Final = ("assistant_model", "custom_generate", *ARGUMENTS)
"""Arguments of ``generate`` that bring another way, or another cache."""

TAKEN: Final = frozenset({"input_ids", "attention_mask", "tokenizer"})
"""Of what else the model may be given."""

SETTINGS: Final = frozenset(vars(GenerationConfig()))  # type: ignore[no-untyped-call]
"""Of how tokens are chosen, and when to stop."""

BY_POSITION: Final = 4
"""Arguments of ``generate`` behind the configuration that change nothing here; then come others."""

AWAY: Final = "the daemon is not there"

COPY: Final = "it is a copy of the model that node was called with"

LEFT: Final = "its node was left"


class _Taken(NamedTuple):
    """Of which model a node has taken the place of what, by name; None: of its class's."""

    model: PreTrainedModel
    before: dict[str, Callable[..., Any] | None]


_TAKEN: Final[list[_Taken]] = []
"""By those that are entered now, in that order: one that is left need not be the last."""


def _give_back(before: dict[str, Callable[..., Any] | None]) -> None:
    """The model has it again; or the node has it that took the place of this one since."""
    at = next(index for index, taken in enumerate(_TAKEN) if taken.before is before)
    model = _TAKEN.pop(at).model
    behind = [taken.before for taken in _TAKEN[at:] if taken.model is model]
    for name, what in before.items():
        later = next((taken for taken in behind if name in taken), None)
        if later is not None:
            later[name] = what
            continue
        vars(model).pop(name, None)
        if what is not None:
            vars(model)[name] = what


def node(
    model: PreTrainedModel,
    endpoint: str | None = None,
    *,
    pool: str = "main",
    name: str = "",
    partition: str = "",
    weights: str = "",
    save: str = "all",
    any_version: bool = False,
) -> GenerateNode:
    """Have ``model.generate`` use the prefix cache of this node, within a ``with``.

    Args:
        model: one of transformers', as it was loaded.
        endpoint: ``ipc:///...``; left out: KVD_SOCKETS__CLIENT, else where a daemon would listen.
        pool: the name of the daemon's pool.
        name: what its tables call this process; left out: the model's, and the process's number.
        partition: scripts with unlike ones share nothing.
        weights: a name for the weights, in place of the digest of what is in memory.
        save: ``all``, ``prompt``: answers are not cached, or ``none``.
        any_version: go on with a transformers that was not tested. Else such a one computes
            without kvd.

    Raises:
        KvdError: ``not-supported`` for a model whose cache no pool can hold; ``layout-mismatch``
            where the daemon's pool is not for it, with the section that is; ``bad-request`` where
            there is no such pool, or the endpoint or the name is none.
        ValueError: ``save`` is something else.
    """
    if save not in {"all", "prompt", "none"}:
        raise ValueError(f"save is {save!r}: it is 'all', 'prompt' or 'none'")
    untested = _untested()
    if untested:
        and_so = (
            "used all the same" if any_version else "computing without it; try any_version=True"
        )
        logger.warning("kvd: %s: %s", untested, and_so)
    why_alone = "" if any_version else untested
    shape = None if why_alone else shape_of(model)
    link = None
    if shape is not None:
        called = name or f"{type(model).__name__}-{os.getpid()}"
        link = CacheLink(endpoint, name=called, pool=pool, config=model.config, shape=shape)
        link.open()
    return GenerateNode(
        model, link, why_alone=why_alone, partition=partition, weights=weights, save=save
    )


def _untested() -> str:
    """What there is to say of this transformers; empty: it was run."""
    version = transformers.__version__
    if series_of(version) in TESTED:
        return ""
    return f"transformers {version}: kvd's connector was tested with {', '.join(TESTED)}"


def _held_as(model: PreTrainedModel) -> str:
    """In which type, and where: so the pool was looked at for it."""
    return f"{model.dtype} on {model.device}"


def _of_copy(model: PreTrainedModel) -> GenerateNode:
    """What takes its place in a copy of the model, which is not served."""
    return GenerateNode(model, None, why_alone=COPY, partition="", weights="", save="none")


class GenerateNode:
    """A model whose ``generate`` is served while this is entered. ``node`` makes it.

    Args:
        model: of transformers.
        link: to the daemon; None: it computes without kvd.
        why_alone: then, why.
        partition: as in ``node``.
        weights: as in ``node``.
        save: as in ``node``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        link: CacheLink | None,
        *,
        why_alone: str,
        partition: str,
        weights: str,
        save: str,
    ) -> None:
        self._model, self._link, self._why_alone = model, link, why_alone
        self._class: Any = type(model)
        self._partition, self._weights, self._save = partition, weights, save
        self._watch = WeightWatch(model)
        self._lock = threading.Lock()
        self._named_at = 0
        self._held_as = "" if link is None else _held_as(model)
        self._before: dict[str, Callable[..., Any] | None] = {}
        self._is_entered = False
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self.namespace = ""
        """Whose KV the model computes, as of the last ``generate``; empty before the first."""
        self.counts = AnswerCounts()
        self._batches = self._batches_of(link)

    def __enter__(self) -> Self:
        if self._is_entered:
            why = f"this node of {type(self._model).__name__} is entered already"
            raise refused_here(Code.WRONG_STATE, f"{why}: make another one with node(model)")
        self._is_entered = True
        # Of the instance, so that whoever has the model, a pipeline too, calls this one.
        ours: dict[str, Callable[..., Any]] = {"generate": self.generate}
        if self._link is not None and not self._link.shape.has_kv:
            # A cache of states alone does not say how far it is.
            ours["prepare_inputs_for_generation"] = self._prepare
        if self._batches is not None:
            ours["init_continuous_batching"] = self._init_batches
        of_instance = vars(self._model)
        self._before = {name: of_instance.pop(name, None) for name in ours}
        of_instance.update(ours)
        _TAKEN.append(_Taken(self._model, self._before))
        self._hook = self._model.register_forward_pre_hook(self._given, with_kwargs=True)
        if self._link is not None:
            self._link.begin()
        if self._batches is not None:
            self._batches.begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self._batches is not None:
            self._batches.end()
        self._is_entered = False
        if self._before:
            _give_back(self._before)
        self._before = {}
        if self._hook is not None:
            self._hook.remove()
        if self._link is not None:
            self._link.close()

    @override
    def __reduce__(self) -> tuple[Callable[..., GenerateNode], tuple[PreTrainedModel]]:
        """What a copy of the model has of it, also where it is sent to."""
        return _of_copy, (self._model,)

    def reread(self) -> None:
        """The weights were changed in a way that torch does not count: digest them anew."""
        self.namespace = ""

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As transformers' ``generate``, of whose prompt the node may have a part."""
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        why = self._why_alone or ("" if self._is_entered else LEFT)
        why = why or self._why_not(ids, generation_config, args, kwargs)
        cache, named = None, None
        if not why and ids is not None and self._link is not None:
            why, named = self._name_weights(self._link)
            if named is not None:
                why, cache = self._begun(self._link, ids.detach(), named)
        plain = self._before.get("generate") or partial(self._class.generate, self._model)
        if cache is None or named is None or self._link is None:
            self._alone(why)
            return plain(inputs, generation_config, *args, **kwargs)
        kwargs[self._link.shape.argument] = cache
        configs = [self._model.generation_config, *filter(None, [generation_config])]
        kinds = [config.cache_implementation for config in configs]
        if "dynamic" in (*kinds, kwargs.get("cache_implementation")):
            # It is one; but of its name and a cache transformers takes one alone.
            kwargs["cache_implementation"] = None
        try:
            out = plain(inputs, generation_config, *args, **kwargs)
            if self._save == "all":
                self._saved(self._link, cache, named)
            elif self._save == "prompt":
                cache.tell()
        finally:
            cache.forget()
        return out

    def _batches_of(self, link: CacheLink | None) -> ServedBatches | None:
        if link is None:
            return None
        version = transformers.__version__
        if series_of(version) not in BATCHED:
            logger.info(
                "kvd: each generate_batch goes without it: transformers %s, it was tested with %s",
                version,
                ", ".join(BATCHED),
            )
            return None
        # The others may have no such module to import.
        batches = importlib.import_module("kvd.connectors.transformers.batches")

        served: ServedBatches = batches.ServedBatches(
            self._model,
            link,
            named=lambda: self._name_weights(link),
            counts=self.counts,
            saves=self._save == "all",
        )
        return served

    def _init_batches(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own; of the prompts of this manager the node may have a part."""
        plain = self._before["init_continuous_batching"] or partial(
            self._class.init_continuous_batching, self._model
        )
        manager = plain(*args, **kwargs)
        if self._batches is not None:
            self._batches.serve(manager)
        return manager

    # ---- around it -------------------------------------------------------------------------------

    def _begun(
        self, link: CacheLink, ids: torch.Tensor, named: NamedWeights
    ) -> tuple[str, KvdCache | None]:
        """A cache with what the node has of the prompt; or why there is none."""
        n_tokens = ids.shape[1]
        cache = link.load(ids, named.namespace)
        if cache is None:
            return link.why_away or AWAY, None
        cache.made_for = self
        self.counts.prompts += 1
        self.counts.prompt_tokens += n_tokens
        self.counts.hit_tokens += cache.n_tokens
        if link.shape.has_states:
            self._compute_pages(link, cache, ids, named)
        elif self._save != "none":
            cache.when_computed(n_tokens, lambda: self._saved(link, cache, named))
        return "", cache

    def _name_weights(self, link: CacheLink) -> tuple[str, NamedWeights | None]:
        """Whose KV the model computes now; or why nobody can say."""
        if self._held_as != _held_as(self._model):
            why = f"it was cast or moved since node(model): it is {_held_as(self._model)} now"
            return why, None
        with self._lock:
            changes = self._watch.changes()
            if self._watch.has_uncounted and not self._weights:
                why = "its weights are of inference mode, where changes are not counted"
                return f"{why}: say weights=", None
            if why := foreign_part_of(self._model):
                return why, None
            if changes != self._named_at or not self.namespace:
                self._named_at = changes
                identity = identity_of_model(
                    self._model, link.shape, weights=self._weights, partition=self._partition
                )
                self.namespace = identity.namespace
                for flaw in identity.alone:
                    logger.warning("kvd: nobody shares the cache of this model: %s", flaw)
            return "", NamedWeights(self.namespace, changes)

    def _compute_pages(
        self, link: CacheLink, cache: KvdCache, ids: torch.Tensor, named: NamedWeights
    ) -> None:
        """Up to the last whole page before the last token, and save what stands there."""
        end = (ids.shape[1] - 1) // link.page_size * link.page_size if link.page_size else 0
        if end <= cache.n_tokens:
            return
        piece = ids[:, cache.n_tokens : end].to(self._model.device)
        compute(self._model, piece, cache, first=cache.n_tokens)
        if self._save != "none":
            self._saved(link, cache, named)

    def _saved(self, link: CacheLink, cache: KvdCache, named: NamedWeights) -> None:
        """Have the node cache what of it is whole pages, if the weights are those of before."""
        if self._watch.changes() != named.changes or foreign_part_of(self._model):
            logger.info("kvd: nothing is saved of a generate under which the weights changed")
            return
        if link.shape.has_states and link.page_size and cache.n_tokens % link.page_size:
            return  # A state stands at its end alone, and that is none of a page.
        self.counts.saved_tokens += link.save(cache, named.namespace)

    def _alone(self, why: str) -> None:
        """It is computed without kvd: told once for each reason."""
        kind = why.partition(":")[0]
        if kind not in self.counts.alone and not self._why_alone:
            logger.info("kvd: a generate goes without it: %s", why)
        self.counts.alone[kind] += 1

    def _given(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is about to compute: what, into which cache."""
        cache = None if self._link is None else kwargs.get(self._link.shape.argument)
        # Each node of the model hears of it: counted twice, its KV would be taken for more tokens'.
        if isinstance(cache, KvdCache) and cache.made_for is self:
            cache.given(args[0] if args else kwargs.get("input_ids"))

    def _prepare(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Of a model whose cache does not say how far it is: what is left of the prompt."""
        cache = None if self._link is None else kwargs.get(self._link.shape.argument)
        if kwargs.get("is_first_iteration") and isinstance(cache, KvdCache):
            kwargs["next_sequence_length"] = input_ids.shape[1] - cache.n_tokens
        before = self._before.get("prepare_inputs_for_generation")
        prepare = before or partial(self._class.prepare_inputs_for_generation, self._model)
        return prepare(input_ids, *args, **kwargs)

    # ---- which are served ------------------------------------------------------------------------

    def _why_not(
        self,
        ids: torch.Tensor | None,
        asked: GenerationConfig | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> str:
        """Why this one is computed as without kvd; empty: it is served."""
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return "it has no token ids of its own"
        reasons = self._reasons(ids, args, kwargs)
        return next(reasons, "") or next(self._settings_reasons(ids, asked, kwargs), "")

    def _reasons(
        self, ids: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[str]:
        if ids.shape[0] != 1:
            yield f"it is of several sequences: {ids.shape[0]}"
        if ids.shape[1] < 2:
            yield "its prompt has one token"
        if self._model.training:
            yield "the model is in training mode"
        if ids.device.type == "mps":
            yield "on mps transformers computes a token more than it says"
        if len(args) > BY_POSITION:
            yield "it has arguments by position beyond synced_gpus"
        yield from (f"it brings {name}" for name in REFUSED if kwargs.get(name) is not None)
        mask = kwargs.get("attention_mask")
        if mask is not None and (mask.shape != ids.shape or not bool((mask == 1).all())):
            yield "its attention_mask masks something"

    def _settings_reasons(
        self, ids: torch.Tensor, asked: GenerationConfig | None, kwargs: Mapping[str, Any]
    ) -> Iterator[str]:
        own = self._model.generation_config.to_dict()
        given = {} if asked is None else asked.to_dict()
        of_generate = inspect.signature(self._class.generate).parameters
        known = {*own, *given, *TAKEN, *of_generate, *SETTINGS}
        for name, value in kwargs.items():
            if value is not None and name not in known:
                yield f"the model is given {name} beside token ids"
        settings: dict[str, object] = {}
        for found in (own, given, kwargs):
            settings.update({name: found[name] for name in found if found[name] is not None})
        if kwargs.get("attention_mask") is None and _has_padding(ids, settings):
            yield "its prompt has the padding token, and no attention_mask"
        for name, allowed in ONE_BY_ONE.items():
            if settings.get(name) not in allowed:
                yield f"{name} is {settings[name]!r}"
        has_states = self._link is not None and self._link.shape.has_states
        if has_states and settings.get("prefill_chunk_size") is not None:
            yield "prefill_chunk_size is set, and the model has states"


def _has_padding(ids: torch.Tensor, settings: Mapping[str, object]) -> bool:
    """Whether transformers masks some of them, by their numbers alone."""
    pad, ends = settings.get("pad_token_id"), settings.get("eos_token_id")
    if pad is None:
        return False
    padding = torch.as_tensor(pad, device=ids.device)
    is_end = ends is not None and bool((torch.as_tensor(ends, device=ids.device) == padding).any())
    return not is_end and bool((ids == padding).any())
