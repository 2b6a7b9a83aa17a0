"""The errors of ckptkit, as a tree.

CkptError
├── Usage         the request contradicts itself                              exit 2
├── NotACheckpoint  no format recognizes this path                            exit 3
├── Corrupt       the files contradict themselves: gap, overlap, short, CRC   exit 3
│   └── Incomplete  files are missing: a rank's, another node's, unfinished    exit 3
├── Unsupported   valid, but not supported; never skipped silently            exit 3
│   └── SeveralModels  more than one model, and nothing shows which is meant  exit 3
├── Mismatch      two layouts do not fit: missing tensor, other shape         exit 3
├── IOFailure     the operating system reports an error                       exit 4
│   └── NoRoom    not enough disk space for the output                        exit 4
├── Occupied      the destination exists, or the run is in use                exit 5
└── Unsafe        a path outside its directory, a link, a device              exit 5
"""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Self

_COMMAND_LINE = re.compile(r"(`ckptkit [^`]*`)")
# option values that occur in messages
_WORDS = "adapter|auto|bf16|block|dcp|hf|hub|hybrid_shard|keep|pt|sharded"
_OPTION = re.compile(
    rf"(?<![\w-])--(?P<name>[a-z][a-z0-9-]*)(?:[= ](?:(?P<value>[A-Z]+\b|[0-9]+|'[^']*')|(?P<word>(?:{_WORDS})\b)))?"
)


class CkptError(Exception):
    """A fault of a checkpoint or a request, as a message of one line.

    `path` is the file at fault, `tensor` the tensor, `offset` the byte offset in the file, `hint` the next action.
    `str` includes all of them except the offset, for tracebacks and logs. It names arguments instead of command-line
    options: `overwrite` for `--overwrite`.
    """

    code = "error"
    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path if path is None or isinstance(path, Path) else Path(path)
        self.tensor = tensor
        self.offset = offset
        self.hint = hint

    def __str__(self) -> str:
        return replace_options_with_arguments(f"{self.line} (hint: {self.hint})" if self.hint else self.line)

    @property
    def line(self) -> str:
        """Return the error as the command line prints it: path, tensor and message."""
        path = "" if self.path is None else str(self.path)
        tensor = f"tensor `{self.tensor}`" if self.tensor else ""
        return ": ".join(filter(None, (path, tensor, self.message)))

    def blame(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        offset: int | None = None,
    ) -> Self:
        """Fill in the file, the tensor and the byte offset, unless they are already known."""
        if self.path is None and path is not None:
            self.path = path if isinstance(path, Path) else Path(path)
        self.tensor = self.tensor or tensor
        self.offset = offset if self.offset is None else self.offset
        return self

    def to_json(self) -> dict[str, str | int | None]:
        """Return the error as `--json` prints it: code, message, path, tensor, offset, hint."""
        path = None if self.path is None else str(self.path)
        location = {"path": path, "tensor": self.tensor, "offset": self.offset}
        return {"code": self.code, "message": self.message, **location, "hint": self.hint}


@contextmanager
def errors_at(*, path: str | os.PathLike[str] | None = None, tensor: str | None = None) -> Iterator[None]:
    """Fill in the file and the tensor of a `CkptError` inside the block, unless they are already known."""
    try:
        yield
    except CkptError as error:
        error.blame(path=path, tensor=tensor)
        raise


def replace_options_with_arguments(text: str) -> str:
    """Return a message with arguments in place of options (`fill_from=DIR`), except inside full command lines."""
    return "".join(
        part if part.startswith("`ckptkit ") else _OPTION.sub(option_to_argument, part)
        for part in _COMMAND_LINE.split(text)
    )


def option_to_argument(match: re.Match[str]) -> str:
    name = match["name"].replace("-", "_")
    value = f"'{match['word']}'" if match["word"] else match["value"]
    return f"{name}={value}" if value else name


# the hint for missing files of ranks
ELSEWHERE = "pass --also DIR for files that other nodes wrote to their own disks"


def and_more(number: int) -> str:
    """Return ` and 2 more`, to follow the names that a message lists; "" if there are no more."""
    return f" and {number:,} more" if number > 0 else ""


def names_and_more(names: Sequence[str], limit: int) -> str:
    """Return the first `limit` names as text, and how many more there are: `a, b and 2 more`."""
    return ", ".join(names[:limit]) + and_more(len(names) - limit)


class Caution(str):
    """A remark that becomes a warning: the user must act before the result can be used."""

    __slots__ = ()


class CheckpointWarning(UserWarning):
    """A warning about a checkpoint that is used nevertheless."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line that called ckptkit, instead of at one of ckptkit's own lines."""
    import inspect  # deferred: slow to import, and rarely needed

    frame, level, last = inspect.currentframe(), 1, 1
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            last = level
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=last + 1)


Report = Callable[[CkptError], None]  # receives each problem, so that the caller can go on


def raise_problem(problem: CkptError) -> None:
    """Raise the problem: the `Report` of a caller who cannot use a checkpoint with any problem."""
    raise problem


def skip_problem(_problem: CkptError) -> None:
    """Skip the problem: the `Report` of a caller who does not need the affected entry, or has already reported it."""


class Usage(CkptError):
    """A request that contradicts itself or names something that does not exist."""

    code, exit_code = "usage", 2


def hint_on_choices(names: Iterable[str]) -> str:
    """Return the hint for an unknown name: `use a`, or `use one of a, b`."""
    known = list(names)
    return f"use {known[0]}" if len(known) == 1 else f"use one of {', '.join(known)}"


def too_small_error(name: str, least: float, found: object) -> Usage:
    """Return the error for an option or argument `name` below its minimum."""
    return Usage(f"--{name.replace('_', '-')}: expected {least} or more, found {found}")


class NotACheckpoint(CkptError):
    """A path that no format recognizes."""

    code, exit_code = "not_a_checkpoint", 3


RESTORE = "restore the file from a copy"
SALVAGE = "run `ckptkit consolidate SRC OUT --salvage` to keep the other tensors"
SALVAGE_HERE = "pass --salvage to keep the other tensors"  # for commands that have the option
DAMAGED = f"{RESTORE}, or {SALVAGE}"


class Corrupt(CkptError):
    """Files that contradict themselves: a gap, an overlap, a truncated file, a wrong CRC.

    The default hint for an error about a tensor says how to keep the other tensors.
    """

    code, exit_code = "corrupt", 3

    @property
    def hint(self) -> str | None:
        return self._hint or (DAMAGED if self.tensor else None)

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint


def truncated_error(
    expected: int, found: int, *, path: str | os.PathLike[str], tensor: str | None = None, recorded_in: str = ""
) -> Corrupt:
    """Return the error for a file of `found` bytes whose part `recorded_in` says that it has at least `expected`."""
    source = f" ({recorded_in})" if recorded_in else ""
    message = f"expected at least {expected} bytes{source}, found {found}: the file is truncated"
    return Corrupt(message, path=path, tensor=tensor, offset=found, hint=None if tensor else RESTORE)


class Incomplete(Corrupt):
    """Missing files: of a rank, of another node, or all files that an unfinished save did not write.

    `files` are their names in directory `path`, unless `path` is the file itself. `ranks` are the ranks that wrote
    them, as far as that is known. With a `tensor`, the error is about that tensor alone, which has a shard in the file.
    """

    code = "incomplete"

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        hint: str | None = None,
        files: Iterable[str] = (),
        ranks: Iterable[int] = (),
    ) -> None:
        super().__init__(message, path=path, tensor=tensor, hint=hint)
        self.files = tuple(files)
        self.ranks = tuple(ranks)


class Unsupported(CkptError):
    """A valid checkpoint or request that ckptkit does not support."""

    code, exit_code = "unsupported", 3


class SeveralModels(Unsupported):
    """More than one model, and nothing shows which one is meant; `globs` match the names of each."""

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        hint: str | None = None,
        globs: Iterable[str] = (),
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.globs = tuple(globs)


class Mismatch(CkptError):
    """Two layouts that do not fit: a tensor is missing or has another shape."""

    code, exit_code = "mismatch", 3


class IOFailure(CkptError):
    """An error of the operating system while reading or writing."""

    code, exit_code = "io", 4


class NoRoom(IOFailure):
    """Not enough free disk space for the planned output."""

    code = "no_room"


class Occupied(CkptError):
    """A destination that exists, or that another process is working on."""

    code, exit_code = "occupied", 5


class Unsafe(CkptError):
    """A path outside its directory, a link, a device, or a source inside the destination."""

    code, exit_code = "unsafe", 5


def with_torch_hint(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return an import error with a hint to install torch, if torch is the missing module."""
    if error.name != "torch":
        return error
    return ModuleNotFoundError("torch is not installed (hint: run `pip install torch`)", name=error.name)


def translate_os_errors(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Turn an `OSError` inside the block into an `IOFailure` (or `NoRoom`) that names `path`."""
    return _Translation(path)


class _Translation(AbstractContextManager[None]):
    """A context manager class, entered for every few kilobytes read: a generator would take three times as long."""

    __slots__ = ("_path",)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, OSError):
            return
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = NoRoom if full else IOFailure
        reason = error.strerror or str(error)
        named = (
            error.filename if isinstance(error.filename, (str, bytes)) else self._path
        )  # filename may be a file descriptor
        where = named if isinstance(named, Path) else os.fsdecode(named)
        raise kind(reason[:1].lower() + reason[1:], path=where) from error
