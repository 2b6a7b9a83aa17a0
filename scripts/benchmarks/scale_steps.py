"""Take the steps of `scripts/bench scale`, each in a process of its own: make a checkpoint, read it, plan.

The model is Llama 3.1 405B, or its first layers. No tensor has any data: files are sparse, so that each reads as zeros.
All else is there: every shard in an archive of torch.save's with its CRC-32, and `.metadata` pickled by torch, each
string of it as often as it would come from so many ranks. The archives are written by ckptkit.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.engine.shares import Share
from ckptkit.formats.dcp.write import KnownBytes, ShardItem, items_per_rank, pickled_metadata, size_of_file
from ckptkit.io.crc32 import crc32
from ckptkit.layout import Chunk, Layout, NewFile, Patch, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES
from ckptkit.models.names.weights import find_weights
from ckptkit.state.draft import Draft
from ckptkit.state.options import ConvertOptions
from ckptkit.state.output_files import plan_draft
from scripts.benchmarks import shapes

WIDTHS = {"hidden": 16384, "inner": 53248, "keys": 8 * 128, "vocabulary": 128256}  # of Llama 3.1 405B


def make(root: Path, layers: int, ranks: int) -> None:
    """Write the checkpoint that so many ranks would have saved."""
    wanted = llama(layers)
    write(root, wanted, items_per_rank(wanted, ranks))


def write(root: Path, wanted: Layout, dealt: list[list[ShardItem]]) -> None:
    """Write a checkpoint of zeros, of which each rank's file has these items."""
    files = {f"__{rank}_0.distcp": items for rank, items in enumerate(dealt)}
    root.mkdir()
    for name, items in files.items():
        write_sparse(root, NewFile(name, size_of_file(items), chain(KnownBytes(items), seals(items))))
    (root / ".metadata").write_bytes(pickled_metadata(wanted, files))
    pickle_as_torch(root)


def llama(layers: int) -> Layout:
    """Return the model with so many of its layers, under the key `model`."""
    return model({name: Spec(DTYPES["bfloat16"], shape) for name, shape in shapes.llama(layers, **WIDTHS).items()})


def model(specs: Mapping[str, Spec]) -> Layout:
    """Return a model of these tensors, under the key `model`."""
    tensors, keys = {}, {}
    for name, spec in specs.items():
        chunk = Chunk(full_box(spec.shape), "", 0, spec.nbytes, spec.dtype)
        tensors[f"model.{name}"] = StoredTensor(spec, (chunk,))
        keys[f"model.{name}"] = ("model", name)
    return Layout(Path(), "made", tensors, keys=keys)


def seals(items: list[ShardItem]) -> Iterator[Patch]:
    """Yield the checksums of items whose data is zeros."""
    for item in items:
        if item.envelope is not None:
            for hole in item.envelope.holes.values():
                content = crc32_of_zeros(hole.length).to_bytes(4, "little")
                yield from ((item.offset + at, content) for at in hole.crc_offsets)


@cache
def crc32_of_zeros(length: int) -> int:
    """Return the CRC-32 of so many zeros."""
    return crc32(bytes(length))


def write_sparse(root: Path, file: NewFile) -> None:
    """Write what is known of a file, with holes for the rest, which take no room."""
    with (root / file.name).open("wb") as out:
        os.truncate(out.fileno(), file.nbytes)
        for offset, content in file.parts:
            os.pwrite(out.fileno(), content, offset)


def pickle_as_torch(root: Path) -> None:
    """Write `.metadata` anew, as torch pickles what ranks have sent: equal strings are not the same."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(root).read_metadata()
    metadata.storage_data = {
        replace(index, fqn="".join(list(index.fqn))): info for index, info in metadata.storage_data.items()
    }
    (root / ".metadata").write_bytes(pickle.dumps(metadata))


def read(root: Path) -> None:
    """Read and check the metadata."""
    began = time.perf_counter()
    layout = open_layout(root)
    tell(time.perf_counter() - began, chunks=sum(len(tensor.chunks) for tensor in layout.tensors.values()))


def consolidate(root: Path, parts: int) -> None:
    """Plan the first of so many parts of a consolidation: where each byte shall lie, and where it is now."""
    layout = find_weights(open_layout(root)).layout
    began = time.perf_counter()
    part = f"1/{parts}" if parts > 1 else None
    draft = Draft.of([layout], ConvertOptions(to="hf", part=part), world_size=1)
    with tempfile.TemporaryDirectory(dir=root.parent) as room:
        for file in draft.files:
            write_sparse(Path(room), file)
        planned = plan_draft(draft, Path(room), share=Share(0, parts))
    copied = [region.numel * chunk.dtype.itemsize for region, chunk, *_ in planned.copies]
    tell(time.perf_counter() - began, copies=len(copied), nbytes=sum(copied))


def tell(seconds: float, **facts: float) -> None:
    """Say what was measured, and the most memory that this process has had."""
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak": mib, **facts}))


def main() -> None:
    """Parse the command line and take a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=["make", "read", "consolidate"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--parts", type=int, default=1)
    options = parser.parse_args()
    if options.step == "make":
        make(options.root, options.layers, options.ranks)
    elif options.step == "read":
        read(options.root)
    else:
        consolidate(options.root, options.parts)


if __name__ == "__main__":
    main()
