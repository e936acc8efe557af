"""Whose KV it is: the model as it is in memory now.

A script may do anything to a model once it is loaded: train it, merge an adapter, cast it. So what
its files hold says little, and what counts are the parameters and buffers themselves: all of their
bytes are digested before the first ``generate``, in some seconds for 10 GB. Before each later one
it is looked whether one was replaced or written since, which costs some tenths of a millisecond;
then they are digested anew, and the KV is that of another model.

What torch does not count (a write through ``.data``, or by a kernel of one's own) is not seen: say
``GenerateNode.reread`` after it. An adapter that can be switched makes no namespace of its own, so
a model with one is computed without kvd.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import torch
import transformers

from kvd.connectors.identity import (
    DIGEST_CHARS,
    EngineIdentity,
    IdentityParts,
    UnknownWeights,
    described,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvd.connectors.transformers.layout import CacheShape

SCHEME: Final = 1
"""Of what is digested: another number is another name for the same KV."""

MOST: Final = {"partition": 24, "model": 40, "revision": 10}
"""Characters of what can be read in a name; the digest tells apart what was cut."""

CHUNK_BYTES: Final = 64 << 20
"""Copied from a device at a time, to be digested."""

THREADS: Final = 4
"""That digest: each is alone with its tensors, without the interpreter."""

SWITCHED: Final = ("peft.",)
"""Modules from these packages can be switched on and off in a running model."""


def identity_of_model(
    model: PreTrainedModel, shape: CacheShape, *, weights: str, partition: str
) -> EngineIdentity:
    """The namespace of the KV that ``model`` computes now.

    Args:
        model: as it is.
        shape: what its cache holds.
        weights: a name for its weights, in place of their digest.
        partition: what stands before the name, and shares nothing with others.
    """
    config = model.config
    gathered = IdentityParts()
    gathered.add("scheme", lambda: SCHEME)
    gathered.add("engine", lambda: f"transformers {series_of(transformers.__version__)}")
    gathered.add("class", lambda: f"{type(model).__module__}.{type(model).__qualname__}")
    gathered.add("model", lambda: name_of(model))
    gathered.add("config", lambda: described(config))
    gathered.add("dtype", lambda: str(model.dtype))
    gathered.add("weights", lambda: f"named {weights}" if weights else weight_digest_of(model))
    gathered.add("packing", shape.in_words)
    name = plain(name_of(model), MOST["model"])
    revision = revision_of(model)
    if revision:
        name += "@" + plain(revision, MOST["revision"])
    before = f"{plain(partition, MOST['partition'])}/" if partition else ""
    dtype = str(model.dtype).removeprefix("torch.")
    namespace = f"{before}{name}:{dtype}:{gathered.digest()}"
    return EngineIdentity(namespace, gathered.found, tuple(gathered.alone))


def series_of(version: str) -> str:
    """The first two numbers: how a cache is packed may change with them."""
    return ".".join(version.split(".")[:2])


def name_of(model: PreTrainedModel) -> str:
    """The last word of its path, or its class where it was loaded from none."""
    return str(model.config._name_or_path).rstrip("/").rpartition("/")[2] or type(model).__name__  # noqa: SLF001


def revision_of(model: PreTrainedModel) -> str:
    """The commit of the hub that its configuration was read at; empty: it is not from there."""
    found = vars(model.config).get("_commit_hash")
    return found if isinstance(found, str) else ""


def weight_digest_of(model: PreTrainedModel) -> str:
    """Of the bytes of all parameters and buffers, their names, types and shapes.

    Raises:
        UnknownWeights: some are not in memory.
    """
    named = sorted(_tensors(model))
    with ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(_digest, (tensor for _, tensor in named))
        total = hashlib.sha256()
        for (name, tensor), digest in zip(named, digests, strict=True):
            total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{digest}\n".encode())
    return total.hexdigest()[:DIGEST_CHARS]


def switched(model: PreTrainedModel) -> str:
    """What of ``model`` can be switched while it runs; empty: nothing that is known."""
    found = (type(part).__module__ for part in model.modules())
    return next((name for name in found if name.startswith(SWITCHED)), "")


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        raise UnknownWeights("some of its weights are not in memory: name them by weights=")
    found = hashlib.sha256()
    flat = tensor.detach().reshape(-1)
    if flat.numel():
        step = max(1, CHUNK_BYTES // flat.element_size())
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            found.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


class WeightWatch:
    """Whether a model's parameters are those that were digested."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Whether one was replaced or written since this was last asked."""
        now = self._look()
        was, self._seen = self._seen, now
        return was != now

    def _look(self) -> tuple[tuple[int, int, torch.dtype], ...]:
        return tuple(
            # Those made in inference mode cannot be written outside it, and have no count.
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, tensor.dtype)  # noqa: SLF001
            for _, tensor in _tensors(self._model)
        )
