"""Small files of a folder that strangers made: read whole, if they are files and small."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST = 100_000_000  # bytes; the family's tiktoken.model has 2.8 MB, the index of a K2 checkpoint 25 MB


def read_small(path: Path, most: int = MOST) -> bytes:
    """All of a file. Raises OSError also for what is none (a pipe would block, a device has no end), and for more
    than `most` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, and {most} are read at the most", str(path))
        return file.read()
