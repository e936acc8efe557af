"""Where the pages of a host pool of SGLang lie, and which pool of kvd holds them.

SGLang says it itself (``get_page_buffer_meta``, what it gives every store that copies by address):
of a page some stretches of bytes. They are asked for three pages, and stand for all if they lie at
even distances. What lies inside is SGLang's own, so a pool of family ``raw`` holds them: a page
there is these bytes, stretch after stretch.

A pool whose pages are smaller than those of kvd's leaves the rest of each page as it is: those
bytes are a group of layers that has no block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvd.client.mover.engine_memory import HOST, LayerMemory
from kvd.client.mover.pieces import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEAST_PAGE_TOKENS: Final = 8
"""Of a page of kvd's that is found by a key."""


class UnfitHostPool(Exception):
    """Its pages cannot be copied by address, and why."""


class PageStretch(NamedTuple):
    """Of each page ``n_bytes``, ``step`` apart, the first at ``address``."""

    address: int
    n_bytes: int
    step: int


class HostPages:
    """The pages of one host pool.

    Args:
        name: as SGLang calls it, ``kv`` and others.
        host_pool: a ``HostKVCache``; a group of pools stands for its anchor.
        device: where it lies.

    Raises:
        UnfitHostPool: they cannot be copied by address.
    """

    def __init__(self, name: str, host_pool: Any, *, device: str = HOST) -> None:
        self.name = name
        self._device = device
        self.page_size = int(host_pool.page_size)
        """Tokens, of which SGLang has so many indices."""
        self.n_pages = int(host_pool.page_num)
        self.layout = str(host_pool.layout)
        self.dtype = str(host_pool.dtype)
        self.kind = type(host_pool).__name__
        self.format_tag = str(host_pool.storage_format_tag or "")
        if host_pool.shared_allocation_domain is not None:
            raise UnfitHostPool(f"pages of {name} move within a memory that several pools share")
        if host_pool.dcp_size > 1:
            raise UnfitHostPool(f"pages of {name} are divided among ranks of decode contexts")
        self.stretches = self._stretches(host_pool)

    @property
    def page_bytes(self) -> int:
        """Of one page, all layers."""
        return sum(stretch.n_bytes for stretch in self.stretches)

    def in_words(self) -> str:
        """How a page is packed: equal for two engines whose bytes are exchanged."""
        sizes = " ".join(str(stretch.n_bytes) for stretch in self.stretches)
        packed = f"{self.kind} {self.layout} {self.dtype} page {self.page_size}: {sizes}"
        return f"{packed} {self.format_tag}".rstrip()

    def groups(self, pool_page_bytes: int) -> list[dict[str, LayerMemory]]:
        """What ``Node.blocks`` takes, for pages of kvd's of so many bytes.

        Raises:
            UnfitHostPool: they are smaller than these.
        """
        left = pool_page_bytes - self.page_bytes
        if left < 0:
            raise UnfitHostPool(
                f"a page of {self.name} has {self.page_bytes} bytes, and one of kvd's "
                f"{pool_page_bytes}"
            )
        first = {
            f"{self.name} {number}": self._memory(stretch)
            for number, stretch in enumerate(self.stretches)
        }
        if not left:
            return [first]
        # Of no block ever: an address that is read and written by nobody.
        rest = PageStretch(self.stretches[0].address, left, left)
        return [first, {"rest": self._memory(rest)}]

    def rows(self, blocks: Sequence[int], pool_page_bytes: int) -> list[list[int]]:
        """The same blocks as an order names them, by group."""
        rows = [list(blocks)]
        if pool_page_bytes > self.page_bytes:
            rows.append([NO_BLOCK] * len(rows[0]))
        return rows

    def blocks_of(self, indices: NDArray[np.int64]) -> list[int]:
        """The pages that SGLang names by the indices of their tokens.

        Raises:
            ValueError: they are not those of whole pages.
        """
        rows = indices.reshape(-1, self.page_size)
        first = rows[:, 0]
        whole = first[:, np.newaxis] + np.arange(self.page_size)
        if (first % self.page_size).any() or (rows != whole).any():
            raise ValueError(f"indices of {self.name} that are not those of whole pages")
        found: list[int] = (first // self.page_size).tolist()
        return found

    def section(self, size: str = "16GiB") -> str:
        """The ``[pool]`` of a daemon for it, with so much memory."""
        return (
            f'[pool]\nfamily = "raw"\nlayers = 1\nsize = "{size}"\n'
            f"page_size = {max(self.page_size, LEAST_PAGE_TOKENS)}\n"
            f"page_bytes = {self.page_bytes}"
        )

    def _memory(self, stretch: PageStretch) -> LayerMemory:
        return LayerMemory(
            pointer=stretch.address,
            shape=(self.n_pages, stretch.n_bytes),
            strides=(stretch.step, 1),
            itemsize=1,
            device=self._device,
        )

    def _stretches(self, host_pool: Any) -> list[PageStretch]:
        if self.n_pages < 2:
            raise UnfitHostPool(f"{self.name} has {self.n_pages} pages")
        first, second, last = (self._said(host_pool, number) for number in (0, 1, self.n_pages - 1))
        found = [
            PageStretch(address, n_bytes, following - address)
            for (address, n_bytes), (following, _) in zip(first, second, strict=True)
        ]
        for stretch, (address, n_bytes) in zip(found, last, strict=True):
            where = stretch.address + (self.n_pages - 1) * stretch.step
            if address != where or n_bytes != stretch.n_bytes or stretch.step < n_bytes:
                raise UnfitHostPool(f"pages of {self.name} do not lie at even distances")
        return found

    def _said(self, host_pool: Any, number: int) -> list[tuple[int, int]]:
        import torch  # noqa: PLC0415 - SGLang has it, and kvd's client does not need it

        indices = torch.arange(number * self.page_size, (number + 1) * self.page_size)
        try:
            addresses, sizes = host_pool.get_page_buffer_meta(indices)
        except (NotImplementedError, ValueError, AttributeError) as error:
            why = f"{self.kind} with the layout {self.layout} does not say where its pages lie"
            raise UnfitHostPool(f"{why}: {error}; try --hicache-mem-layout page_first") from None
        return [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
