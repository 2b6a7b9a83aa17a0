"""Edits of a layout keep every field of it: the tests fail for a new field until the edits treat it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ckptkit.layout import Blob, Chunk, Layout, Spec, StoredTensor, edits
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES

FLOAT = DTYPES["float32"]
NAMED = ("tensors", "blobs", "keys", "twins", "spares", "absent")  # the fields with entries by name


def chunk_in(file: str) -> Chunk:
    return Chunk(full_box((2,)), file, 0, 8, FLOAT)


def full(prefix: str) -> Layout:
    """A layout in which no field is empty, with names that begin with a prefix."""
    tensor, entry = f"{prefix}.weight", f"{prefix}.step"
    return Layout(
        root=Path("step") / prefix,
        format="dcp",
        tensors={tensor: StoredTensor(Spec(FLOAT, (2,)), (chunk_in("data"),))},
        blobs={entry: Blob("other", 0, 8)},
        keys={tensor: (prefix, "weight"), entry: (prefix, "step")},
        world_size=2,
        descriptions=("index",),
        file_sums={"data": (8, 1)},
        keeper=object(),
        twins={tensor: StoredTensor(Spec(FLOAT, (2,)), (chunk_in("twin"),))},
        spares={tensor: (chunk_in("spare"),)},
        absent={f"{prefix}.lost": "gone"},
        texts={"format": "pt"},
        file="data",
    )


def empty_fields(layout: Layout) -> list[str]:
    return [field.name for field in fields(Layout) if not getattr(layout, field.name)]


def files_of(layout: Layout) -> set[str]:
    """All names of files that a layout has in any field."""
    tensors = (*layout.tensors.values(), *layout.twins.values())
    return {
        *(chunk.path for tensor in tensors for chunk in tensor.chunks),
        *(blob.path for blob in layout.blobs.values()),
        *(chunk.path for _, chunk in layout.replica_chunks),
        *layout.descriptions,
        *layout.file_sums,
        *layout.absent.values(),
        layout.file,
    }


def names_of(layout: Layout) -> dict[str, set[str]]:
    return {field: set(getattr(layout, field)) for field in NAMED}


def test_the_sample_has_every_field() -> None:
    assert not empty_fields(full("model"))


def test_files_are_named_from_the_parent_in_every_field() -> None:
    moved = edits.prepend_directory_to_paths(full("model"), "model")
    assert not empty_fields(moved)
    assert moved.root == Path("step")
    assert files_of(moved) == {f"model/{name}" for name in files_of(full("model"))}


def test_joined_layouts_have_what_each_has_in_every_field() -> None:
    parts = [full("model"), full("optimizer")]
    joined = edits.join_disjoint_layouts(Path("step"), parts)
    assert empty_fields(joined) == ["file"], "it is a directory"
    assert joined.keeper == (parts[0].keeper, parts[1].keeper)
    assert joined.descriptions == ("index", "index")
    for field, names in names_of(joined).items():
        assert names == names_of(parts[0])[field] | names_of(parts[1])[field]


def test_entries_under_another_key_have_it_in_every_field() -> None:
    nested = edits.nest_below_key(full("model"), ("state",))
    assert not empty_fields(nested)
    for field, names in names_of(full("model")).items():
        assert names_of(nested)[field] == {f"state.{name}" for name in names}


def test_what_is_left_out_is_left_out_of_every_field() -> None:
    both = edits.join_disjoint_layouts(Path("step"), [full("model"), full("optimizer")])
    one = edits.select_entries(both, lambda name: name.startswith("model"))
    for field in set(NAMED) - {"keys"}:
        assert set(getattr(one, field)) == set(getattr(full("model"), field))
