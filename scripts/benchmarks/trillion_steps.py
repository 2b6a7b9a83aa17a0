"""Take the steps of `scripts/bench trillion`, each in a process of its own: make a checkpoint, read it with torch.

The model is Kimi K2 before its experts were packed: 70,000 tensors in bf16, of which each expert has three. Its 2,048
ranks are pipeline stages of 128 ranks with a run of layers each. In a stage each expert is whole on one rank, and 16
ranks shard all other tensors by FSDP on dim 0; the other ranks of the stage have replicas, which torch saves once.
No tensor has any data: the files are sparse, as in `scale_steps`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckptkit.formats.dcp.write import ShardItem, append_item, row_shards, template_of_chunk
from ckptkit.layout import Layout, Spec
from ckptkit.layout.box import Box, Shape, full_box
from ckptkit.layout.dtypes import DTYPES
from scripts.benchmarks import scale_steps, trillion

_DTYPES = {"BF16": DTYPES["bfloat16"], "F32": DTYPES["float32"]}


@dataclass(frozen=True)
class Mesh:
    """The ranks of a training: `stages` of `group` ranks, of which `shards` share what is in no expert."""

    stages: int = 16
    group: int = 128
    shards: int = 16

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.stages * self.group

    def cut(self, shape: Shape, replica: int) -> list[tuple[int, Box]]:
        """Return the ranks within a stage that save a tensor outside the experts, and the box of each."""
        first = replica % (self.group // self.shards) * self.shards
        return [(first + rank, box) for rank, box in row_shards(shape, self.shards)]


def make(root: Path, layers: int = trillion.LAYERS, experts: int = trillion.EXPERTS, mesh: Mesh = Mesh()) -> None:
    """Write the checkpoint that the ranks of a mesh would have saved."""
    tensors = [trillion.layer(number, experts, trillion.plain) for number in range(layers)] + [trillion.ends()]
    specs = {name: Spec(_DTYPES[dtype], shape) for one in tensors for name, (dtype, shape) in one.items()}
    wanted = scale_steps.model(specs)
    files: list[list[ShardItem]] = [[] for _ in range(mesh.ranks)]
    for number, names in enumerate(tensors):
        first = min(number, layers - 1) * mesh.stages // layers * mesh.group  # the ends are on the last stage
        for name in names:
            expert = expert_of(name)
            whole_on = None if expert is None else expert * mesh.group // experts
            shape = specs[name].shape
            boxes = mesh.cut(shape, number) if whole_on is None else [(whole_on, full_box(shape))]
            for rank, box in boxes:
                put(files[first + rank], wanted, f"model.{name}", box)
    scale_steps.write(root, wanted, files)


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to, or None."""
    _, is_expert, rest = name.partition(".experts.")
    return int(rest.partition(".")[0]) if is_expert else None


def put(file: list[ShardItem], wanted: Layout, name: str, box: Box) -> None:
    """Append a box of a tensor to a rank's file."""
    envelope = template_of_chunk(name, wanted.tensors[name], box)
    append_item(file, name, box, envelope.nbytes, envelope)


def read_by_torch(root: Path) -> None:
    """Read the metadata with torch, without the time and with the memory of its import."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    began = time.perf_counter()
    metadata = FileSystemReader(root).read_metadata()
    seconds = time.perf_counter() - began
    entries = metadata.state_dict_metadata.values()
    sizes = [prod(entry.size) for entry in entries if isinstance(entry, TensorStorageMetadata)]
    scale_steps.tell(seconds, chunks=len(metadata.storage_data), tensors=len(sizes), parameters=sum(sizes))


def main() -> None:
    """Parse the command line and take a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=["make", "read-by-torch"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--layers", type=int, default=trillion.LAYERS)
    options = parser.parse_args()
    if options.step == "make":
        make(options.root, options.layers)
    else:
        read_by_torch(options.root)


if __name__ == "__main__":
    main()
