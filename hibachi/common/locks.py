"""Locks of files, which end with the process that holds them, however that ends."""

from __future__ import annotations


def locked(file: int, *, shared: bool = False) -> bool | None:
    """Lock an open file until it is closed, without waiting. False: somebody else has it. None: there are no locks, as
    on Windows and in some file systems.
    """
    try:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True
