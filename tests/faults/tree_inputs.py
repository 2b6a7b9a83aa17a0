"""Bad inputs of the trees that came up in 2026: files cut and lost, and maps that cannot be. Cases 69 to 74."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.faults.bad_inputs import FLIP, PAGE, Files
from tests.faults.cases import Case
from tests.faults.damage import LFS_POINTER, Damage, append, cut, remove, write
from tests.faults.forged import forge
from tests.faults.subjects import CONSOLIDATE, CONVERT, VERIFY
from tests.faults.trials import Bad, case, case_of

SECONDS, MEMORY = 10.0, 512 << 20
MAP, LAYERS = "mp_rank_00_model_states.pt", "ds_autoep_layers"
ARRAY = "params.head.weight"
GATE = "model.module.decoder.layers.0.mlp.linear_fc1.weight_w"

CHECKED: Files = (  # data with checksums
    ("prime", "trainer/__0_1.distcp"),
    ("miles", "model/__0_1.distcp"),
    ("miles", "optimizer/__0_0.distcp"),
    ("automodel", "optim/__0_1.distcp"),
    ("core", "__0_1.distcp"),
    ("fsdp_dtensor", "__0_0.distcp"),
    ("auto_tp", "mp_rank_01_model_states.pt"),
    ("auto_tp", "zero_pp_rank_1_mp_rank_01_optim_states.pt"),
    ("auto_ep", "layer_0_expert_3_mp_rank_00_model_states.pt"),
)
UNCHECKED: Files = (("automodel", "model/shard-00001-model-00001-of-00001.safetensors"),)
CELLS: Files = (("ocdbt", "d/*"), ("zarr", f"{ARRAY}/1.1"))
DESCRIBED: Files = (
    *(("prime", "trainer/.metadata"), ("miles", "model/.metadata"), ("miles", "optimizer/.metadata")),
    *(("automodel", "optim/.metadata"), ("core", ".metadata"), ("fsdp_dtensor", ".metadata")),
    *(("auto_tp", MAP), ("auto_ep", MAP)),
    *(("ocdbt", "_METADATA"), ("ocdbt", "manifest.ocdbt"), ("zarr", "_METADATA"), ("zarr", f"{ARRAY}/.zarray")),
)
# what messages call a missing or damaged file, in other words
WORDS = {
    "prime": (".metadata", "trainer"),
    "miles": (".metadata", "model", "optimizer"),
    "automodel": ("optim", "model"),
    "auto_tp": ("mp_rank_0", "tensor parallelism"),
    "auto_ep": ("layer_0_expert_3", "_model_states.pt"),
    "ocdbt": ("manifest.ocdbt", "_METADATA", "/d/"),
    "zarr": (ARRAY, "_METADATA", "manifest.ocdbt", "arrays of zarr"),
}


def largest(pattern: str, damage: Callable[[str], Damage]) -> Damage:
    """Damage the largest file that a pattern finds: of a database's files no name is known."""

    def harm(root: Path) -> None:
        found = max(root.glob(pattern), key=lambda path: path.stat().st_size)
        damage(str(found.relative_to(root)))(root)

    return harm


def in_each(
    name: str, damage: Callable[[str], Damage], files: Files, words: Mapping[str, tuple[str, ...]] = WORDS
) -> list[Bad]:
    """The same damage to a file of each tree."""
    return [
        Bad(f"{name}: {file}", kind, largest(file, damage), (Path(file).name, *words.get(kind, ())))
        for kind, file in files
    ]


def bad(name: str, kind: str, damage: Damage, *culprits: str) -> Bad:
    """A tree of which nothing may come out."""
    return Bad(name, kind, damage, culprits, refused=True, seconds=SECONDS, memory=MEMORY)


def saved_again(file: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change what a file of torch.save says."""

    def damage(root: Path) -> None:
        saved = torch.load(root / file, weights_only=False)
        change(saved)
        torch.save(saved, root / file)

    return damage


def mapped(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change AutoTP's map of a parameter that is cut."""

    def in_map(saved: dict[str, Any]) -> None:
        params = saved["universal_checkpoint_info"]["affine_map"]["params"]
        change(next(entry for name, entry in params.items() if "up" in name and "weight" in name))

    return saved_again(MAP, in_map)


def sliced(key: str, value: Any) -> Damage:
    """Let the piece of the second rank say something else."""
    return mapped(lambda entry: entry["ranks"][1]["pieces"][0].update({key: value}))


def layered(**said: Any) -> Damage:
    """Let AutoEP's layer be another."""
    return saved_again(MAP, lambda saved: saved[LAYERS][0].update(said))


def in_json(file: str, change: Callable[[Any], object]) -> Damage:
    """Change what a file of JSON says."""

    def damage(root: Path) -> None:
        said = json.loads((root / file).read_text())
        change(said)
        (root / file).write_text(json.dumps(said))

    return damage


def called(name: str) -> Damage:
    """Let an array of a tree have another name."""

    def rename(said: Any) -> None:
        next(iter(said["tree_metadata"].values()))["key_metadata"] = [{"key": name, "key_type": 2}]

    return in_json("_METADATA", rename)


def led_away(root: Path) -> None:
    """Have an array beside the checkpoint, to which a name in it leads."""
    (root / ARRAY).rename(root.parent / "elsewhere")
    text = (root / "_METADATA").read_text()
    said = json.loads(text)
    for entry in said["tree_metadata"].values():
        if [key["key"] for key in entry["key_metadata"]] == ARRAY.split("."):
            entry["key_metadata"] = [{"key": "../elsewhere", "key_type": 2}]
    (root / "_METADATA").write_text(json.dumps(said))


def pipe_in(file: str) -> Damage:
    """Have a pipe in place of a file."""

    def damage(root: Path) -> None:
        (root / file).unlink()
        os.mkfifo(root / file)

    return damage


def maps() -> Iterator[Bad]:
    """Maps of slices, and layers of experts, that cannot be."""
    for shape in ([1 << 40, 32], [-1, 32], [64], "64", None, [64.0, 32]):
        yield bad(f"a logical shape {shape}", "auto_tp", mapped(partial(dict.update, logical_shape=shape)), "up", MAP)
    for place in ([1 << 40, [32, 1]], [-4, [32, 1]], [0, [1, 64]], [0], "0", None, [0, [32]]):
        yield bad(f"a piece at {place}", "auto_tp", sliced("source", place), "up", MAP)
    yield bad("a piece in the place of another", "auto_tp", sliced("source", [0, [32, 1]]), "up", MAP)
    yield bad("a piece of nobody's", "auto_tp", sliced("locations", [0]), "up", MAP)
    yield bad("a factor", "auto_tp", sliced("scale", 2), "up", MAP)
    yield bad("one rank", "auto_tp", mapped(lambda entry: entry["ranks"].pop(1)), "up", MAP)
    for version in (2, "1", None):
        said: dict[str, Any] = {"affine_map": {"version": version, "params": {}}}
        damage = saved_again(MAP, partial(dict.update, universal_checkpoint_info=said))
        yield bad(f"version {version}", "auto_tp", damage, MAP)
    for number in (1 << 40, 0, -1, "4", 4.5, 3):
        yield bad(f"{number} experts", "auto_ep", layered(num_experts=number), *WORDS["auto_ep"], "experts")
        yield bad(f"{number} ranks of experts", "auto_ep", layered(ep_size=number), *WORDS["auto_ep"], "experts")
    yield bad("no prefix", "auto_ep", layered(expert_key_prefix=7), *WORDS["auto_ep"])
    yield bad("another prefix", "auto_ep", layered(expert_key_prefix="layers.1"), "layers.1")
    yield bad(
        "a placement", "auto_ep", layered(expert_placement={"ranks": [{"rank": 0, "experts": [3, 1]}]}), "experts"
    )


def boxed(*boxes: tuple[int, int]) -> Damage:
    """Let the boxes of the gates, from the last one on, begin at other rows and have another number of them."""

    def change(metadata: Metadata) -> None:
        entry: Any = metadata.state_dict_metadata[GATE]
        chunks = entry.chunks[-len(boxes) :]
        places = [metadata.storage_data.pop(MetadataIndex(GATE, chunk.offsets)) for chunk in chunks]
        for chunk, place, (first, rows) in zip(chunks, places, boxes, strict=True):
            chunk.offsets, chunk.sizes = torch.Size([first, 0]), torch.Size([rows, 12])
            metadata.storage_data[MetadataIndex(GATE, chunk.offsets)] = place

    return forge(change)


def rows() -> Iterator[Bad]:
    """Impossible boxes of uneven rows: the tensor has 24 rows, and one of them is in the first box."""
    for box in ((2, 23), (0, 23), (1, 22), (1, 24), (2, 22), (-1, 23), (1 << 40, 23), (1, 0), (1, -1), (24, 0)):
        yield bad(f"{box[1]} rows from row {box[0]}", "fsdp_dtensor", boxed(box), "linear_fc1.weight_w")
    yield bad("even boxes", "fsdp_dtensor", boxed((0, 12), (12, 12)), "linear_fc1.weight_w")
    yield bad("boxes the other way round", "fsdp_dtensor", boxed((1, 23), (0, 1)), "linear_fc1.weight_w")


def negate(key: str, said: dict[str, Any]) -> None:
    said[key] = not said[key]


def arrays() -> Iterator[Bad]:
    """Names, shapes and kinds of arrays that cannot be."""
    for name in ("", "..", ".", "/dev/zero", "../in/checkpoint/" + ARRAY, "\0"):
        yield bad(f"an array called {name!a}", "zarr", called(name), "_METADATA")
    yield bad("an array beside the checkpoint", "zarr", led_away, "_METADATA")
    array = partial(in_json, f"{ARRAY}/.zarray")
    for shape in ([1 << 40, 32], [1 << 62, 1 << 62], [-1, 32], [95], "95", None, [95.5, 32]):
        yield bad(f"shape {shape}", "zarr", array(partial(dict.update, shape=shape)), ARRAY)
    for chunks in ([1, 1], [0, 16], [1 << 62, 16], [48], None):
        yield bad(f"cells of {chunks}", "zarr", array(partial(dict.update, chunks=chunks)), ARRAY)
    cells = (CONSOLIDATE, CONVERT, VERIFY)  # which open the cells that are too short for it
    yield replace(bad("dtype <f8", "zarr", array(partial(dict.update, dtype="<f8")), ARRAY), subjects=cells)
    for dtype in ("|O8", "<U4", "nothing", None):
        yield bad(f"dtype {dtype}", "zarr", array(partial(dict.update, dtype=dtype)), ARRAY)
    yield bad("a pipe", "zarr", pipe_in(f"{ARRAY}/1.1"), ARRAY)
    for kind in ("ocdbt", "zarr"):
        for key in ("use_ocdbt", "use_zarr3"):
            damage = in_json("_METADATA", partial(negate, key))
            yield bad(f"{key} is another", kind, damage, *WORDS[kind], "params", "opt_state")
        yield bad("deep", kind, write("_METADATA", b'{"a":' * 200_000 + b"1" + b"}" * 200_000), "_METADATA")
        yield bad("no object", kind, write("_METADATA", b"[]"), "_METADATA")
        yield bad("no tree", kind, write("_METADATA", b"{}"), "_METADATA")
        damage = write("_CHECKPOINT_METADATA", b'{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": null}')
        yield bad("a save without its end", kind, damage, "checkpoint")


def unfinished(root: Path) -> None:
    """Have the mark of an unfinished save."""
    (root / ".incomplete").touch()


CASES: tuple[Case, ...] = (
    case(
        *("69", "trees", "files truncated, too long, missing or replaced"),
        [
            *in_each("half", partial(cut, keep=0.5), (*CHECKED, *UNCHECKED, *CELLS, *DESCRIBED)),
            *in_each("last byte", partial(cut, keep=1), (*CHECKED, *UNCHECKED, *CELLS, *DESCRIBED)),
            *in_each("0 bytes", partial(cut, keep=0.0), (*CHECKED, *UNCHECKED, *CELLS, *DESCRIBED)),
            *in_each("1 byte more", partial(append, content=b"\x2a"), (*CHECKED, *UNCHECKED)),
            *in_each("gone", remove, (*CHECKED, *CELLS, *DESCRIBED)),
            *in_each("garbage", partial(write, content=b"\x9c\x1f not what it was \xff" * 40), (*CHECKED, *DESCRIBED)),
            *in_each("pointer", partial(write, content=LFS_POINTER), (*CHECKED, *DESCRIBED)),
        ],
    ),
    case(
        *("70", "trees", "a flipped bit, or zeros in place of data"),
        [*in_each("flip", FLIP, CHECKED), *in_each("page", PAGE, CHECKED)],
    ),
    case(
        *("71", "trees", "markers of unfinished saves"),
        [bad("`.incomplete` is there", "automodel", unfinished, ".incomplete")],
    ),
    case_of("72", "trees", "invalid AutoTP maps and AutoEP layers", maps),
    case_of("73", "trees", "invalid orbax arrays", arrays),
    case_of("74", "trees", "invalid boxes of Megatron-FSDP", rows),
)
