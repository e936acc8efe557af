"""Whose KV it is: the model as it is in memory now.

A script may do anything to a model once it is loaded: train it, merge an adapter, cast it. So what
its files hold says little, and what counts are the parameters and buffers themselves: all of their
bytes are digested before the first ``generate``, in some seconds for 10 GB. Before each later one
it is looked whether one was replaced or written since, which costs some tenths of a millisecond;
then they are digested anew, and the KV is that of another model. It is looked again before anything
is saved: what was computed while they changed is nobody's.

What torch does not count (a write through ``.data``, or by a kernel of one's own) is not seen: say
``GenerateNode.reread`` after it. An adapter that can be switched makes no namespace of its own, nor
does a hook, which may do anything: so a model with one is computed without kvd.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

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

LIBRARIES: Final = ("torch.", "transformers.", "accelerate.", "kernels.", "kvd.")
"""Whose hooks, and whose forwards in place of a module's own, leave its KV as it is."""


class NamedWeights(NamedTuple):
    """Whose KV a model computes, and at which count of changes of its weights that was so."""

    namespace: str
    changes: int


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


def foreign_part_of(model: PreTrainedModel) -> str:
    """What of ``model`` makes KV that no digest of weights tells apart; empty: nothing is known."""
    for name, part in model.named_modules():
        at = name or "the model itself"
        if type(part).__module__.startswith(SWITCHED):
            return f"it has an adapter that can be switched: {at}, of {type(part).__module__}"
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())  # noqa: SLF001
        if not all(map(_is_of_libraries, hooks)):
            return f"it has a hook, which may change what is computed: on {at}"
        if not _is_of_libraries(vars(part).get("forward")):
            return f"its forward was replaced: of {at}"
    return ""


def _is_of_libraries(called: Any) -> bool:
    """Whether it is code of ``LIBRARIES``, whatever it says of itself; so is what is not there."""
    while isinstance(called, functools.partial):
        called = called.func
    if isinstance(called, types.MethodType):
        called = called.__func__
    home = called.__globals__["__name__"] if isinstance(called, types.FunctionType) else ""
    home = home or type(called).__module__
    return called is None or f"{home}.".startswith(LIBRARIES)


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
    """How often a model's parameters were replaced or written, as far as it was looked."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._seen: list[_SeenTensor] = []
        self._changes = 0
        self.has_uncounted = False
        """Whether torch does not count what is written to some of them, as of the last look."""

    def changes(self) -> int:
        """Another number than before: they are others than they were then."""
        with self._lock:
            tensors = [tensor for _, tensor in _tensors(self._model)]
            now = list(map(_SeenTensor, tensors))
            self.has_uncounted = any(tensor.is_inference() for tensor in tensors)
            self._changes += now != self._seen
            self._seen = now
            return self._changes


class _SeenTensor:
    """One as it was when it was looked at.

    Its storage is referred to, weakly: no other one has its place in memory while this is there. By
    an address alone one that took the place of another would be taken for it.
    """

    __slots__ = ("_said", "_storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        # Those made in inference mode have no count.
        written = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
        self._said = (self._storage.cdata, tensor.data_ptr(), written, tensor.dtype)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SeenTensor) and self._said == other._said

    __hash__ = None  # type: ignore[assignment]
