"""Parse the paths of users: local files and directories, and URLs.

A remote path can be examined, listed and joined like any other path. Functions that need a local path, such as `open`,
refuse it, so that no local file of the same name is ever read instead.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar
from urllib.parse import quote, unquote

from ckptkit.errors import CkptError, Unsafe, Unsupported, Usage
from ckptkit.io.stores import (
    LOCAL,
    STORES,
    CachedStore,
    KnownStore,
    StoreEntry,
    known_store_for_url,
    open_store,
    translate_store_errors,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # in typing since Python 3.13

T = TypeVar("T")
U = TypeVar("U")
REMOTE_JOBS = 16  # threads: they wait most of the time

_URL = re.compile(r"(?:[A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]*://")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[^/\s]+)?", re.ASCII)
_SPECIAL_REVISION = re.compile(r"@(refs/[^/]+/[^/]+)")
_KINDS = ("datasets", "spaces", "buckets")  # kinds of repositories on the Hub with a prefix of their own
_LEVELS_AHEAD = 2  # directory levels that `prefetch_listings` lists


class RemotePath(PosixPath):
    """A file or directory behind a URL, whose scheme is the first component of the path.

    Each request is sent once; its response is cached until `drop_cached_listing`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        text = super().__str__()
        scheme, colon, rest = text.partition(":/")
        return f"{scheme}://{rest}" if colon else f"{text}//" if text.endswith(":") else text

    def __fspath__(self) -> NoReturn:
        raise Unsupported("this is remote, but only a local file or directory is accepted here", path=self)

    @property
    def parent(self) -> Self:
        """Return the parent directory. A bucket or repository is its own parent."""
        return self if len(self.parts) <= self._depth else super().parent

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        """Return whether the path is a directory, or a prefix of keys in a store without directories."""
        entry = self.find_entry()
        return entry is not None and entry.is_dir

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        entry = self.find_entry()
        return entry is not None and not entry.is_dir

    def exists(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return self.find_entry() is not None

    def is_symlink(self) -> bool:
        """Return False: a store resolves its own links, if it has any."""
        return False

    def absolute(self) -> Self:
        return self

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002
        return self

    def iterdir(self) -> Generator[Self, None, None]:
        store, key = self._store_and_key
        with translate_store_errors(self, store.store):
            names = list(store.entries_by_name(key))
        yield from (self / name for name in names)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002
        """Return type, size and modification time. The inode is a number that changes with the content."""
        from hashlib import blake2b

        entry = self.find_entry()
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        mode = stat.S_IFDIR | 0o555 if entry.is_dir else stat.S_IFREG | 0o444
        inode = int.from_bytes(blake2b(entry.tag.encode(), digest_size=8).digest())
        when = int(entry.changed)
        times = {f"st_{kind}time{unit}": when * scale for kind in "amc" for unit, scale in (("", 1), ("_ns", 10**9))}
        return os.stat_result((mode, inode, 0, 1, 0, 0, entry.size, when, when, when), times)

    def lstat(self) -> os.stat_result:
        return self.stat()

    def find_entry(self) -> StoreEntry | None:
        """Return the store's description of the path; None if nothing exists there."""
        store, key = self._store_and_key
        with translate_store_errors(self, store.store):
            return store.find_entry(key)

    def find_change(self) -> RemotePath | None:
        """Query the store again. Returns the path of something here that has changed, or None."""
        store, key = self._store_and_key
        with translate_store_errors(self, store.store):
            changed = store.find_change(key)
        return None if changed is None else RemotePath(*self.store_root.parts, changed)

    @property
    def store_root(self) -> RemotePath:
        """Return the bucket, host or repository of the path."""
        return RemotePath(*self.parts[: self._depth])

    @property
    def store(self) -> CachedStore:
        return self._store_and_key[0]

    @property
    def key(self) -> str:
        return self._store_and_key[1]

    @property
    def _store_and_key(self) -> tuple[CachedStore, str]:
        if not self.parts or not self.parts[0].endswith(":"):
            raise Unsafe("the path leaves its store", path=Path(*self.parts))
        depth = self._depth
        try:
            store = open_store(str(self.store_root))
        except CkptError as error:
            raise error.blame(path=self) from error.__cause__
        return store, "/".join(self.parts[depth:])

    @property
    def _depth(self) -> int:
        """The number of components that name the store: the scheme, and a bucket, host or repository."""
        if self.parts[:1] == ("memory:",):
            return 1
        if self.parts[:1] == ("hf:",):
            return 4 if self.parts[1:2] and self.parts[1] in _KINDS else 3
        return 2


def is_remote(path: object) -> TypeIs[RemotePath]:
    """Return whether a path is in a store, where each read is a request and no file has a local name."""
    return isinstance(path, RemotePath)


def capabilities_at(path: Path) -> KnownStore:
    """Return ckptkit's capabilities in the store of a path; for a local path, on a disk."""
    return known_store_for_url(str(path)) if is_remote(path) else LOCAL


def drop_cached_listing(path: Path) -> Path:
    """Return the path after dropping the cached responses of its store, which are otherwise kept for the process."""
    if is_remote(path):
        path.store.drop_cache()
    return path


def local_path_beside(source: Path, name: str) -> Path:
    """Return the path `name` beside a local source; in the current directory, if the source is remote."""
    return Path(name) if is_remote(source) else source.with_name(name)


def to_path(typed: str | os.PathLike[str]) -> Path:
    """Return the path that a user means by `typed`: a local path or a URL.

    While HF_HUB_OFFLINE is set, an `hf://` URL becomes the snapshot in the Hub's cache, if the cache has one.
    """
    path = to_uncached_path(typed)
    if isinstance(typed, str) and is_remote(path) and path.parts[0] == "hf:":
        from ckptkit.io.stores.hub import find_offline_snapshot

        depth = path._depth
        snapshot = find_offline_snapshot("/".join(path.parts[1:depth]))
        return path if snapshot is None else snapshot.joinpath(*path.parts[depth:])
    return path


def to_uncached_path(typed: str | os.PathLike[str]) -> Path:
    """Return the path that a user wants to change: a local path or a URL, never a copy in a cache.

    Raises `Usage` for an invalid URL, also for one without its two slashes, as `Path("s3://bucket")` is.
    """
    if typed == "":
        raise Usage("the path is empty", hint="pass . for the current directory")
    if not (isinstance(typed, str) and _URL.match(typed)):
        return require_no_url(typed)
    scheme, _, rest = typed.partition("://")
    scheme = scheme.lower()
    if scheme in ("file", "local"):
        if scheme == "file" and not rest.startswith(("/", "localhost/")):
            raise Usage(f"`{typed}` names the host `{rest.partition('/')[0]}`", hint=f"write file:///{rest}")
        return Path(unquote(rest.removeprefix("localhost") if rest.startswith("localhost/") else rest))
    if scheme == "hf":
        rest = _SPECIAL_REVISION.sub(lambda found: "@" + quote(found[1], safe=""), rest)
    parts = rest.rstrip("/").split("/")
    if scheme == "memory":
        parts = [part for part in parts if part]
    if scheme == "az" and "\\" in rest:
        hint = f"write az://{rest.replace(chr(92), '/')}"
        raise Usage(f"`{typed}` contains a backslash, which becomes a slash in requests to Azure", hint=hint)
    path = RemotePath(f"{scheme}:", *parts)
    if "://" in rest or not {"", ".", ".."}.isdisjoint(parts) or len(path.parts) < path._depth:
        hint = "write it like s3://bucket/run/ckpt-5 or hf://org/name"
        raise Usage(f"`{typed}` cannot be the location of a checkpoint", hint=hint)
    return path


def require_no_url(typed: str | os.PathLike[str]) -> Path:
    """Return the path. Raises `Usage` if it is like a URL without its two slashes; `./s3:/x` is a local path."""
    path = typed if isinstance(typed, Path) else Path(typed)
    scheme, colon, rest = (path.parts[0] if path.parts else "").partition(":")
    if not colon or is_remote(path) or scheme.lower() not in STORES:
        return path
    if isinstance(typed, str) and typed.startswith("./"):
        return path.absolute()  # the relative path would be like a URL again
    url = f"{scheme.lower()}://{'/'.join(filter(None, (rest, *path.parts[1:])))}"
    hint = f"pass the text {url}, not a Path" if isinstance(typed, Path) else f"write {url}"
    raise Usage(f"`{typed}` is not a URL", hint=hint)


def to_local_path(typed: str | os.PathLike[str]) -> Path:
    """Return the local path that a user wants to write to. Raises `Usage` for any URL except `file:`."""
    path = to_uncached_path(typed)
    if is_remote(path):
        raise Usage(f"expected a local path, found `{typed}`", hint="pass a local path, and copy it with `ckptkit cp`")
    return path


def restore_relative_path(typed: Path, absolute: Path) -> Path:
    """Return an absolute path as a relative one if the user typed a relative one.

    Only if it is below the current directory.
    """
    current_directory = Path.cwd()
    is_plain = type(absolute) is type(current_directory) and not typed.is_absolute()
    return (
        absolute.relative_to(current_directory) if is_plain and absolute.is_relative_to(current_directory) else absolute
    )


def to_model_path(typed: str | os.PathLike[str]) -> Path:
    """Return the path of a model: like `to_path`, but also accepts a model id on the Hub."""
    return to_path(f"hf://{typed}" if means_hub_model(typed) else typed)


def means_hub_model(typed: str | os.PathLike[str]) -> bool:
    """Return whether `typed` is like `org/name`, and no local path `typed` or `org` exists.

    Only options that take a model id call this: the name of a local file never goes to the Hub.
    """
    if not isinstance(typed, str) or not has_model_id_form(typed):
        return False
    return not os.path.lexists(typed) and not os.path.lexists(Path(typed).parent)


def has_model_id_form(typed: str) -> bool:
    """Return whether `typed` has the form of a model id, `org/name` or `org/name@revision`."""
    return _HUB_ID.fullmatch(typed) is not None and not typed.endswith(".json")


def hint_for_hub_id(typed: str) -> str | None:
    """Return a hint for a path that does not exist and may be meant for the Hub; None for any other path."""
    if os.path.lexists(typed) or not has_model_id_form(typed):
        return None
    return f"write hf://{typed} for a repository on the Hub: ckptkit only looked on this disk"


def remarks_if_taken_from_hub(typed: str | os.PathLike[str] | None) -> tuple[str, ...]:
    """Return the remark that a model came from the Hub because no local path is called `typed`; () for any other."""
    if typed is None or not means_hub_model(typed):
        return ()
    return (f"`{typed}` is not a path here: ckptkit took it for the id of a model on the Hub",)


def prefetch_listings(paths: Iterable[Path]) -> None:
    """List the remote directories among `paths`, and directories below, in parallel, to fill the cache.

    Errors are ignored: the later reader of the directory gets them.
    """
    waiting = [path for path in paths if is_remote(path)]
    if not waiting:
        return

    def folders_in(path: RemotePath) -> list[RemotePath]:
        with suppress(OSError):
            return [child for child in path.iterdir() if child.is_dir()]
        return []

    for _ in range(_LEVELS_AHEAD):
        waiting = list(chain.from_iterable(map_in_parallel(folders_in, waiting)))


def map_in_parallel(function: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """Return the results of `function` for all things, in order; the calls run in parallel threads."""
    from concurrent.futures import ThreadPoolExecutor  # deferred: slow to import, and rarely needed

    with ThreadPoolExecutor(REMOTE_JOBS) as pool:
        return list(pool.map(function, items))
