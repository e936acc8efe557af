"""Files that the kernel has not in its page cache: their pages are read past it.

What was written or read lately is in the page cache, and a copy out of it is the fastest. What is
not would be read into it first, on the processor of who asks and one piece after the other, and
push out what others have there. With ``O_DIRECT`` the disk writes to the pool itself, many pieces
at a time. It takes whole blocks in file and memory; where they are none, or a file system does not
do it, all goes through the page cache.

Which of the two a file is, its head tells: it is read through the cache in any case, because it is
judged before a byte of the page is asked for. Of a file that was read past it the head is put out
of it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

from kvd.storage.sizes import BLOCK_BYTES, HEAD_BYTES


def reads_past_cache(path: str) -> bool:
    """Whether files where ``path`` would lie can be read so; one is made there to try, and removed.

    Not on a disk that is full, where none can be made.
    """
    try:
        with open(path, "wb+", buffering=0) as file, mmap.mmap(-1, BLOCK_BYTES) as block:
            os.unlink(path)
            file.write(bytes(HEAD_BYTES + BLOCK_BYTES))
            read_past_cache(file.fileno())
            return os.preadv(file.fileno(), [block], HEAD_BYTES) == BLOCK_BYTES
    except OSError:
        return False


def is_cold(fd: int) -> bool:
    """Whether the head of an open file is not in the page cache; then its read begins now."""
    # Or the kernel reads more than the head.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        os.posix_fadvise(fd, 0, HEAD_BYTES, os.POSIX_FADV_WILLNEED)
        return True
    except OSError:
        pass  # a file system that cannot say it
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return False


def read_past_cache(fd: int) -> None:
    """From now on; what is read must be whole blocks.

    Raises:
        OSError: the file system does not do that.
    """
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def forget_head(fd: int) -> None:
    """Let the page cache forget it."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, HEAD_BYTES, os.POSIX_FADV_DONTNEED)
