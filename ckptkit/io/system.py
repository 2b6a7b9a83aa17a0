"""Call the operating system, again where a signal interrupts the call. Decides nothing.

Python makes those again that POSIX says can be interrupted (PEP 475). Network and user-space file systems interrupt
others too.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # what is asked for is lacking

P = ParamSpec("P")
T = TypeVar("T")


class PromiseLost(UserWarning):
    """A promise that cannot be kept on this file system, which lacks the call that it takes."""


def warn_of_loss(path: Path, what: str) -> None:
    """Warn of the promise that is lost at `path`."""
    warnings.warn(f"{path}: {what}", PromiseLost, stacklevel=2)


def again(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `call` gives, which is made again as long as a signal interrupts it."""
    while True:
        with suppress(InterruptedError):
            return call(*args, **kwargs)


def close(fd: int) -> None:
    """Close a descriptor. One that was interrupted in closing is closed; by now it may be another thread's."""
    with suppress(InterruptedError):
        os.close(fd)
