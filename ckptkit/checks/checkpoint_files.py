"""Find out which files in a directory belong to a checkpoint, and which checksums its manifest has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckptkit.checkpoints.manifest import FileSum, Manifest
from ckptkit.formats import FormatReader
from ckptkit.io.file import names_in
from ckptkit.layout import Extent, Layout


@dataclass(frozen=True)
class OwnFiles:
    """The files of a checkpoint to verify: their path, the layout that their format reads, and their manifest.

    `others` are files and directories beside them that belong to other components.
    """

    reader: FormatReader
    path: Path
    layout: Layout
    manifest: Manifest | None
    others: frozenset[Path] = frozenset()

    @property
    def root(self) -> Path:
        return self.layout.root

    @property
    def needed_files(self) -> set[str]:
        """Return the files that the checkpoint cannot be read without."""
        return self.layout.files | {chunk.path for _, chunk in self.layout.replica_chunks}

    @property
    def recorded_file_sums(self) -> Mapping[str, FileSum]:
        """Return the manifest's records: of all files in a directory, or of the files that a single file needs."""
        known = self.manifest.files if self.manifest else {}
        return known if self.path.is_dir() else {name: known[name] for name in known if name in self.needed_files}

    @cached_property
    def tensor_checksums(self) -> Mapping[str, int]:
        """Return the manifest's CRC-32 of each tensor by name; {} if they belong to other files."""
        known = self.manifest
        return known.tensors if known and known.tensors_belong_to(self.path, self.reader.owns_file) else {}

    @property
    def unexpected_files(self) -> list[str]:
        """Return the files in the directory that look like files of this checkpoint but do not belong to it."""
        names = set(names_in(self.root)) if self.path.is_dir() else set()
        known = {name.partition("/")[0] for name in (*self.needed_files, *self.recorded_file_sums)}
        unused = sorted(filter(self.reader.owns_file, names - known))
        return [name for name in unused if self.root / name not in self.others and (self.root / name).lstat().st_size]

    def expected_checksum(self, extent: Extent) -> int | None:
        """Return the CRC-32 that a byte range should have: from the manifest, or else from the format."""
        file = self.recorded_file_sums.get(extent.path)
        if file and (extent.offset, extent.length) in file.runs:
            return file.runs[extent.offset, extent.length]
        tensor = self.layout.tensors.get(extent.name)
        if self.tensor_checksums and tensor and len(tensor.chunks) == 1 and extent.path in self.recorded_file_sums:
            known = self.tensor_checksums.get(extent.name)
            if known is not None and tensor.spec.nbytes == extent.length:
                return known
        return extent.crc32
