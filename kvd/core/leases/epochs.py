"""Generations of namespaces: what was cached before new weights is never found again.

A namespace in epoch 3 is a namespace of its own to the tree, to leases and to handoffs: its key has
the number behind it (``cache.namespaces``). So a request that says ``llama`` means ``llama`` in the
epoch of now, a lease of before keeps the key that it began with, and two nodes in different epochs
have different prompts. Epoch 0 is the name alone: a node that was never told of an epoch looks at
none. An epoch is of a base and its members: ``llama`` and every ``llama#...``.

An epoch counts from the step in which it is said, and is answered when it is on disk
(``kept_answers``).

What must not live here: what a new epoch drops and ends (``engines``, ``operators``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from mypy_extensions import mypyc_attr

from kvd.core.cache.namespaces import (
    MEMBER,
    SEPARATOR,
    bad_name,
    base_of,
    epoch_in,
    epochs_differ,
    key_of,
    name_in,
)
from kvd.errors import Code, Refusal
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.inputs import EpochsFound
    from kvd.core.outbox import Outbox

MOST_EPOCHS: Final = 4096
"""Bases that may have one at a time; each costs some hundred bytes, here and on disk."""

MAX_EPOCH: Final = 2**53 - 1

MOST_PLAIN: Final = 4096
"""Names of which is remembered that they are good, and in epoch 0."""

FORMER_MARK: Final = " @epoch "
"""Between name and epoch in journals of daemons that kept no epochs; anybody could write it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Epochs:
    """The epoch of each base that has one.

    ``plain`` are names that are their own keys, so that most requests cost one look.
    """

    __slots__ = ("by_namespace", "is_first", "name", "plain")

    def __init__(self, name: str) -> None:
        self.name = name
        """This node's."""
        self.by_namespace: dict[str, int] = {}
        self.plain: set[str] = set()
        self.is_first = False
        """Whether no daemon before this one kept epochs here."""

    def now(self, namespace: str) -> int:
        """The epoch that a namespace is in."""
        return self.by_namespace.get(base_of(namespace), 0)

    def internal(self, namespace: str) -> str | Refusal:
        """What the tree calls it now."""
        refusal = bad_name(namespace, self.name)
        if refusal is not None:
            return refusal
        epoch = self.now(namespace)
        if epoch:
            return key_of(namespace, epoch)
        if len(self.plain) >= MOST_PLAIN:
            self.plain.clear()
        self.plain.add(namespace)
        return namespace

    def key_for_peer(self, peer: str, namespace: str, epoch: int) -> str | Refusal:
        """The same for a node that asks in ``epoch``: only one that is in ours is told anything."""
        now = self.now(namespace)
        if epoch == now:
            return self.internal(namespace)
        return Refusal(
            Code.PROMPT_MISMATCH,
            epochs_differ(key_of(namespace, now), side=self.name, peer=peer, peer_epoch=epoch),
            side=self.name,
            numbers={"epoch": now, "peer_epoch": epoch, "base": base_of(namespace)},
        )

    def flaw(self, namespace: str, epoch: int | None) -> Refusal | None:
        """Why this epoch cannot be that of the base; the one that it has is no flaw.

        None: the next one.
        """
        refusal = bad_name(namespace, self.name)
        if refusal is not None:
            return refusal
        base, before = base_of(namespace), self.now(namespace)
        after = before + 1 if epoch is None else epoch
        if not before <= after <= MAX_EPOCH:
            return Refusal(
                Code.WRONG_STATE,
                f"epoch {after} of {base!r}, which is in {before}: an epoch goes up only, to "
                f"{MAX_EPOCH} at most; take the number of the weights, or none for the next one",
                side=self.name,
                numbers={"epoch": after, "now": before},
            )
        if base not in self.by_namespace and len(self.by_namespace) >= MOST_EPOCHS:
            return Refusal(
                Code.TOO_LARGE,
                f"{MOST_EPOCHS} namespaces have an epoch: use fewer names, each with "
                f"its members behind {MEMBER!r}",
                side=self.name,
                numbers={"limit": MOST_EPOCHS},
            )
        return None

    def after(self, namespace: str, epoch: int | None) -> int:
        """The number that is meant; None is the next one."""
        return self.now(namespace) + 1 if epoch is None else epoch

    def begin(self, namespace: str, epoch: int) -> None:
        """Its base is in this epoch from now on; ``flaw`` was asked."""
        if epoch:
            self.by_namespace[base_of(namespace)] = epoch
            self.plain.clear()

    # ---- over restarts -----------------------------------------------------------------------

    def found(self, got: EpochsFound) -> None:
        """What the daemon before has kept; before anything else happens."""
        for base, epoch in got.by_base.items():
            self.begin(base, epoch)
        self.is_first = got.is_first

    def learn(self, keys: Iterable[str]) -> bool:
        """What the tree of before a restart has beyond that; whether there was anything.

        The highest epoch of each base counts: more than what is on disk where that was lost, or
        where the daemon ended while it wrote.
        """
        before = dict(self.by_namespace)
        for key in keys:
            if SEPARATOR in key:
                self._at_least(name_in(key), epoch_in(key))
            elif self.is_first and FORMER_MARK in key:
                # Which epoch that was cannot be believed, anybody could call a namespace so. That
                # its base had one can: nothing of before is found in the next.
                self._at_least(key.rpartition(FORMER_MARK)[0], 1)
        return self.by_namespace != before

    def _at_least(self, namespace: str, epoch: int) -> None:
        # A flaw of it is that it is lower than what is known, too.
        if self.flaw(namespace, epoch) is None:
            self.begin(namespace, epoch)

    def over(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Those of the tree's keys that no request means any more."""
        return tuple(
            key
            for key in keys
            if epoch_in(key) != self.now(key) or (self.is_first and FORMER_MARK in key)
        )


class SendsOfNamespaces(Protocol):
    """The prefill side, as far as a new epoch touches it."""

    def end_base(self, base: str, why: Refusal) -> None:
        """End the sends of a base and its members that nobody has begun to receive."""


def begin_epoch(
    epochs: Epochs, sends: SendsOfNamespaces, out: Outbox, *, base: str, epoch: int, who: str
) -> None:
    """A base is in this epoch from now on; the caller drops what is cached, and answers."""
    before = epochs.now(base)
    epochs.begin(base, epoch)
    out.emit(events.EpochBegan(namespace=base, epoch=epoch, who=who))
    # What is being received goes on: it was asked for before, and the decode side keeps it in its
    # own epoch. What nobody has come for yet would be received from now on.
    why = Refusal(
        Code.PROMPT_MISMATCH,
        f"{epochs.name} is in epoch {epoch} of {base!r} now, and this was sent in {before}: "
        "compute and send it again",
        side=epochs.name,
        numbers={"epoch": epoch, "sent_in_epoch": before},
    )
    sends.end_base(base, why)


def other_epoch(key: str, peer: str, peer_epoch: int, side: str) -> Refusal:
    """Why a prompt of ours is not the one that a peer offers pages for."""
    return Refusal(
        Code.PROMPT_MISMATCH,
        epochs_differ(key, side=side, peer=peer, peer_epoch=peer_epoch),
        side=side,
        numbers={"epoch": epoch_in(key), "peer_epoch": peer_epoch, "base": base_of(key)},
    )
