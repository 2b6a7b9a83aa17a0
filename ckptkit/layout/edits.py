"""Edit layouts: select, rename, join and cast entries. No data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ckptkit.errors import Mismatch
from ckptkit.layout import Chunk, KeyPath, Layout, Spec, StoredTensor
from ckptkit.layout.dtypes import DType

_Entry = TypeVar("_Entry")


def select_entries(layout: Layout, keep: Callable[[str], bool]) -> Layout:
    named = chain(layout.tensors, layout.blobs, layout.twins, layout.spares, layout.absent)
    return select_and_rename_entries(layout, {name: name for name in named if keep(name)}, layout.keys)


def prepend_directory_to_paths(layout: Layout, directory: str) -> Layout:
    """Return the layout with paths relative to the parent of its directory, which is called `directory`."""
    if not directory:
        return layout

    def move(file: str) -> str:
        return str(PurePosixPath(directory, file)) if file else file

    def move_chunks(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
        return tuple(chunk._replace(path=move(chunk.path)) for chunk in chunks)

    def move_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        return {name: replace(tensor, chunks=move_chunks(tensor.chunks)) for name, tensor in tensors.items()}

    return replace(
        layout,
        root=layout.root.parent,
        tensors=move_tensors(layout.tensors),
        blobs={name: blob._replace(path=move(blob.path)) for name, blob in layout.blobs.items()},
        descriptions=tuple(map(move, layout.descriptions)),
        file_sums={move(file): sums for file, sums in layout.file_sums.items()},
        twins=move_tensors(layout.twins),
        spares={name: move_chunks(chunks) for name, chunks in layout.spares.items()},
        absent={name: move(file) for name, file in layout.absent.items()},
        file=move(layout.file),
    )


def join_disjoint_layouts(root: Path, layouts: Sequence[Layout]) -> Layout:
    """Join layouts that share no name, in the first one's format, with its texts. Paths must be relative to `root`."""

    def joined(parts: Iterable[Mapping[str, _Entry]]) -> dict[str, _Entry]:
        return dict(chain.from_iterable(mapping.items() for mapping in parts))

    return Layout(
        root=root,
        format=layouts[0].format,
        tensors=joined(layout.tensors for layout in layouts),
        blobs=joined(layout.blobs for layout in layouts),
        keys=joined(layout.keys for layout in layouts),
        world_size=max((layout.world_size or 0 for layout in layouts), default=0) or None,
        descriptions=tuple(chain.from_iterable(layout.descriptions for layout in layouts)),
        file_sums=joined(layout.file_sums for layout in layouts),
        keeper=tuple(layout.keeper for layout in layouts if layout.keeper is not None) or None,
        twins=joined(layout.twins for layout in layouts),
        spares=joined(layout.spares for layout in layouts),
        absent=joined(layout.absent for layout in layouts),
        texts=layouts[0].texts,
        file=layouts[0].file if len(layouts) == 1 else "",
    )


def select_and_rename_entries(layout: Layout, names: Mapping[str, str], keys: Mapping[str, KeyPath]) -> Layout:
    """Return the entries in `names`, renamed as it says, with the new key paths in `keys`."""

    def named(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
        return {names[old]: entry for old, entry in entries.items() if old in names}

    return replace(
        layout,
        tensors=named(layout.tensors),
        blobs=named(layout.blobs),
        keys=keys,
        twins=named(layout.twins),
        spares=named(layout.spares),
        absent=named(layout.absent),
    )


def select_and_rename_tensors(layout: Layout, names: Mapping[str, str]) -> Layout:
    """Return the tensors in `names`, renamed as it says, without blobs and copies. Raises as `with_new_key_paths`."""
    require_distinct_names(layout, names)
    alone = replace(layout, blobs={}, twins={}, spares={}, absent={})
    return select_and_rename_entries(alone, names, {})


def with_new_key_paths(layout: Layout, key_paths: Mapping[str, KeyPath]) -> Layout:
    """Return the same entries with new key paths. Raises `Mismatch` if names clash, or one is where a dict must be."""
    names = {name: ".".join(map(str, key_paths[name])) for name in layout.names}
    require_distinct_names(layout, names)
    keys = {new: key_paths[old] for old, new in names.items()}
    require_nestable_key_paths(layout, keys)
    names |= {name: ".".join(map(str, key_paths.get(name, (name,)))) for name in layout.absent}
    return select_and_rename_entries(layout, names, keys)


def require_distinct_names(layout: Layout, names: Mapping[str, str]) -> None:
    old_names: dict[str, str] = {}
    for old, new in names.items():
        if old_names.setdefault(new, old) != old:
            message = f"`{old_names[new]}` and `{old}` would both get this name"
            raise Mismatch(message, path=layout.path, tensor=new, hint="change --rename, or drop one with --exclude")


def require_nestable_key_paths(layout: Layout, keys: Mapping[str, KeyPath]) -> None:
    """Raise `Mismatch` if an entry is where others need a dict."""
    ends = {key: name for name, key in keys.items()}
    for name, key in keys.items():
        in_the_way = next((ends[key[:i]] for i in range(1, len(key)) if key[:i] in ends), None)
        if in_the_way is not None:
            message = f"expected a dict at `{in_the_way}`, found an entry"
            raise Mismatch(message, path=layout.path, tensor=name, hint="change --rename, or drop one")


def nest_below_key(layout: Layout, above: KeyPath) -> Layout:
    """Return the same tensors and blobs, all below one key of the nested dict."""
    return with_new_key_paths(layout, {name: (*above, *layout.key(name)) for name in (*layout.names, *layout.absent)})


def with_low_precision_as_weights(layout: Layout) -> Layout:
    """Return the layout with its low-precision copies in place of the tensors that have one."""
    return replace(layout, tensors={**layout.tensors, **layout.twins}, twins={})


def cast_tensors(layout: Layout, dtype_for: Callable[[str, Spec], DType]) -> Layout:
    """Return the same tensors with the dtypes that `dtype_for` returns. Chunks stay, and are cast on read."""
    tensors = {
        name: replace(tensor, spec=replace(tensor.spec, dtype=dtype_for(name, tensor.spec)))
        for name, tensor in layout.tensors.items()
    }
    return replace(layout, tensors=tensors)


def cast_to_specs(layout: Layout, specs: Mapping[str, Spec]) -> Layout:
    """Return the same tensors with the dtypes in `specs` for their names, where they can be cast."""

    def choose(name: str, spec: Spec) -> DType:
        wanted = specs.get(name, spec).dtype
        return wanted if spec.dtype.is_castable_to(wanted) else spec.dtype

    return cast_tensors(layout, choose)


def split_off_lost_tensors(layout: Layout) -> tuple[Layout, dict[str, StoredTensor]]:
    """Return the layout without its lost tensors, and the lost tensors."""
    lost = {name: t for name, t in layout.tensors.items() if t.is_lost}
    return select_entries(layout, lambda name: name not in lost), lost
