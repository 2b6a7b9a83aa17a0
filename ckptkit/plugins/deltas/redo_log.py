"""Write the changes of a model as absolute values, which can be applied again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptkit.errors import Corrupt
from ckptkit.io.allocation import make_folder
from ckptkit.io.crc32 import crc32
from ckptkit.io.file import OpenFiles
from ckptkit.io.trees import remove
from ckptkit.layout import FileOffset, Layout
from ckptkit.plugins.deltas.changes import changes_in
from ckptkit.plugins.deltas.new_blocks import Successor
from ckptkit.plugins.deltas.record import DeltaRecord
from ckptkit.plugins.deltas.spool import Spool
from ckptkit.plugins.deltas.write_delta import FoundChanges, write_delta

_SPOOL = ".changes"


def write_log(root: Path, base: Layout, sums: Mapping[str, int], successor: Successor) -> DeltaRecord:
    """Write the delta from a base with these sums to its successor into directory `root`, which is made.

    Raises `Corrupt` if the bytes of the base are not those of its sums.
    """
    make_folder(root)
    after = dict(sums)
    with Spool(root / _SPOOL, base.specs) as spool:
        for name in successor.specs:
            old = new = 0
            for block in successor.blocks(name):
                old, new = crc32(block.old, old), crc32(block.new, new)
                spool.add(name, block.first, changes_in(block.old, block.new, base.specs[name].dtype.itemsize))
            if old != sums[name]:
                raise Corrupt(f"expected CRC-32 {sums[name]:08x}, found {old:08x}", path=base.root, tensor=name)
            after[name] = new

        def fill(wanted: Layout, names: Mapping[str, str]) -> dict[FileOffset, int]:
            return {place: crc for key, name in names.items() for place, crc in fill_one(wanted, key, name)}

        def fill_one(wanted: Layout, key: str, name: str) -> Iterator[tuple[FileOffset, int]]:
            chunk = wanted.tensors[key].chunks[0]
            at = crc = 0
            with OpenFiles(wanted.root, writable=True) as files:
                for block in successor.blocks(name):
                    files[chunk.path].write_at(block.new, chunk.offset + at)
                    at, crc = at + len(block.new), crc32(block.new, crc)
            yield (chunk.path, chunk.offset), crc

        record = write_delta(root, FoundChanges(base.specs, sums, after, spool, fill))
    remove(root / _SPOOL)
    return record
