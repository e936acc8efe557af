"""How large an object is; known without any package that the storage process needs."""

from __future__ import annotations

from typing import Final

HEAD_BYTES: Final = 4096
"""A block, so that the page begins at one."""
BLOCK_BYTES: Final = 4096


def object_bytes(page_bytes: int) -> int:
    """What an object of such a page takes: head, page, and what is left of its last block."""
    return HEAD_BYTES + -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES
