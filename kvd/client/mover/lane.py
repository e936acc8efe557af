"""Who moves bytes, as the mover's thread knows them: ``HostLane`` and ``DeviceLane`` are such."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvd.client.mover.pieces import PieceColumns


class LaneCopy(Protocol):
    """Pieces that a lane has begun."""

    @property
    def is_over(self) -> bool:
        """Whether no byte of them moves any more.

        Raises:
            LaneDead: nobody can tell any more.
        """
        ...

    @property
    def fault(self) -> Exception | None:
        """Why they are not all there."""
        ...


class CopyLane(Protocol):
    """Who moves bytes."""

    @property
    def device(self) -> str:
        """Of which device, as the daemon is told; empty for processors."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """Begun at once."""
        ...

    @property
    def depth(self) -> int:
        """So many chunks of a direction are under way at most."""
        ...

    @property
    def polls(self) -> bool:
        """Whether one must look, since nothing rings."""
        ...

    @property
    def mark_kind(self) -> type | tuple[type, ...]:
        """Of what ``mark`` gives."""
        ...

    def mark(self, stream: object = None) -> object:
        """Stands for all that was begun in that stream of the engine, or its thread's own."""
        ...

    def has_come(self, mark: object) -> bool:
        """Whether all that is done."""
        ...

    def enter(self) -> None:
        """The mover's thread begins; all but ``mark`` is called by it.

        Where nothing is to be looked at, any thread calls ``has_come``.
        """
        ...

    def begin(self, columns: PieceColumns, *, to_pages: bool) -> LaneCopy:
        """Begin to copy these pieces.

        Raises:
            MemoryFault: some cannot be copied; nothing has begun.
            LaneDead: nothing can be copied any more.
        """
        ...

    def close(self) -> None:
        """Nothing is begun any more."""
        ...
