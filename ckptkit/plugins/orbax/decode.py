"""Let tensorstore decode what ckptkit has read into memory: arrays of zarr and their cells, and nodes of OCDBT.

Source: google/tensorstore, its drivers `zarr`, `zarr3`, `ocdbt` and `memory`. Cells have no checksums; the nodes of
OCDBT that say where cells are have a CRC-32C, which tensorstore compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.errors import Corrupt, Unsupported

if TYPE_CHECKING:
    import tensorstore


def require_tensorstore(path: Path) -> None:
    """Raise `Unsupported`, which names the extra to install, unless there is a tensorstore."""
    try:
        import tensorstore  # noqa: F401
    except ImportError as error:
        hint = "run `pip install 'ckptkit-fsdp[orbax]'`"
        raise Unsupported("orbax's arrays need the package `tensorstore`", path=path, hint=hint) from error


def dump(values: Mapping[str, bytes], node: str | None = None) -> dict[str, Any]:
    """Return the manifest of an OCDBT database as a dict, or a node. `values` are the files that it is in."""
    import tensorstore

    found: dict[str, Any] = tensorstore.ocdbt.dump(store_of(values, tensorstore.Context()), node).result()
    return found


def open_array(driver: str, values: Mapping[str, bytes]) -> Any:
    """Return an array of zarr. `values` are its metadata and its cells, by their keys."""
    import tensorstore

    context = tensorstore.Context()
    store = store_of(values, context)
    spec = {"driver": driver, "kvstore": store.spec().to_json()}
    return tensorstore.open(spec, context=context, open=True, read=True).result()


def store_of(values: Mapping[str, bytes], context: tensorstore.Context) -> tensorstore.KvStore:
    import tensorstore

    store = tensorstore.KvStore.open("memory://", context=context).result()
    for key, value in values.items():
        store[key] = value
    return store


@contextmanager
def explaining(path: Path, name: str | None = None) -> Iterator[None]:
    """Turn what tensorstore raises into a `Corrupt` that names the file and the tensor."""
    try:
        yield
    except (KeyError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition(" [tensorstore_spec")[0].partition(" [source")[0]
        hint = "use another checkpoint"
        raise Corrupt(f"tensorstore cannot read it: {reason}", path=path, tensor=name, hint=hint) from error
