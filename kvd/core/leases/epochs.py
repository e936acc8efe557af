"""Generations of namespaces: what was cached before new weights is never found again.

A namespace in epoch 3 is a namespace of its own to the tree, to leases and to handoffs: its name
has the number behind it. So a request that says ``llama`` means ``llama @epoch 3``, a lease of
before keeps the name that it began with, and two nodes in different epochs have different prompts.
Epoch 0 is the name alone: a node that was never told of an epoch looks at none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

MARK: Final = " @epoch "
"""Between a namespace and its epoch."""

MOST_EPOCHS: Final = 4096
"""Namespaces that may have one at a time; each costs some hundred bytes for the daemon's life."""

MAX_EPOCH: Final = 2**53 - 1
MAX_NAMESPACE: Final = 256
"""Characters, its epoch included: as long as any on the wire."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Epochs:
    """The epoch of each namespace that has one."""

    __slots__ = ("by_namespace", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        """This node's."""
        self.by_namespace: dict[str, int] = {}

    def internal(self, namespace: str) -> str | Refusal:
        """What the tree calls it now."""
        if MARK in namespace:
            return Refusal(
                Code.BAD_REQUEST,
                f"namespace {namespace!r} names an epoch itself: leave {MARK!r} out, the epoch is "
                "that of the node",
                side=self.name,
            )
        epoch = self.by_namespace.get(namespace, 0)
        return f"{namespace}{MARK}{epoch}" if epoch else namespace

    def flaw(self, namespace: str, epoch: int) -> Refusal | None:
        """Why this epoch cannot be that of the namespace; the one that it has is no flaw."""
        before = self.by_namespace.get(namespace, 0)
        if not before <= epoch <= MAX_EPOCH:
            return Refusal(
                Code.WRONG_STATE,
                f"epoch {epoch} of namespace {namespace!r}, which is in {before}: an epoch goes up "
                f"only, to {MAX_EPOCH} at most; take the number of the weights",
                side=self.name,
                numbers={"epoch": epoch, "now": before},
            )
        if MARK in namespace or len(f"{namespace}{MARK}{epoch}") > MAX_NAMESPACE:
            return Refusal(
                Code.BAD_REQUEST,
                f"namespace {namespace!r} cannot have an epoch: with it a name has at most "
                f"{MAX_NAMESPACE} characters, and {MARK!r} once",
                side=self.name,
            )
        if namespace not in self.by_namespace and len(self.by_namespace) >= MOST_EPOCHS:
            return Refusal(
                Code.TOO_LARGE,
                f"{MOST_EPOCHS} namespaces have an epoch: use fewer names, or restart this node",
                side=self.name,
                numbers={"limit": MOST_EPOCHS},
            )
        return None

    def begin(self, namespace: str, epoch: int) -> None:
        """It is in this epoch from now on; ``flaw`` was asked."""
        if epoch:
            self.by_namespace[namespace] = epoch

    def learn(self, names: Iterable[str]) -> None:
        """What the tree of before a restart says: the latest epoch of each."""
        for name in names:
            namespace, is_marked, number = name.rpartition(MARK)
            if is_marked and number.isdecimal():
                known = self.by_namespace.get(namespace, 0)
                self.by_namespace[namespace] = max(known, int(number))
