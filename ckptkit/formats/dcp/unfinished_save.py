"""Match the files of an unfinished DCP save with the metadata of another checkpoint of the same run.

A `.distcp` file is a sequence of items. Each item is an archive of torch.save with the dtype and shape of a shard, or
with a non-tensor entry. Only the metadata, which torch writes last, has the names of the tensors and the position of
each shard. A run plans the same items in the same order at every step. So the metadata of another step also describes
these files if every item has the dtype, shape, length and offset that it says.
"""

from __future__ import annotations

from pathlib import Path

from ckptkit.errors import Corrupt, Mismatch, Unsupported
from ckptkit.formats.archives.locate import ENVELOPE, ArchiveTemplates
from ckptkit.formats.archives.zip_entries import read_central_directory
from ckptkit.formats.dcp.read_metadata import find_rank_in_file_name
from ckptkit.io.file import OpenFiles, ReadAhead, file_size, names_in
from ckptkit.layout import Chunk, Layout, Spec

Items = dict[tuple[int, int], tuple[str, str]]  # by offset and length of an item: its name, and its expected contents

_END, _END_BYTES = b"PK\x05\x06", 22  # the signature of an archive's end record, and its size
_ENTRY = "an entry that is not a tensor"
_HINT = "pass --fill-from with a checkpoint that the same run saved with the same ranks"


def require_matching_items(root: Path, expected: Layout) -> None:
    """Compare every item of the files in directory `root` with the items of a plan, which another checkpoint has.

    Skips files that are missing. If a file is cut short inside an item, compares the remaining bytes before the
    tensor's data. Raises `Mismatch` for the first file or item that differs, `Unsupported` for items that were saved
    through a transform.
    """
    planned: dict[str, Items] = {}
    for name, item in expected.chunks_and_blobs:
        if item.wrapper not in (None, ENVELOPE):
            message = f"stored through the transform `{item.wrapper}`: only its metadata says what an item contains"
            raise Unsupported(message, path=expected.root / item.path, tensor=name)
        wanted = str(Spec(item.dtype, item.size)) if isinstance(item, Chunk) else _ENTRY
        if item.length:
            planned.setdefault(item.path, {}).setdefault((item.offset, item.length), (name, wanted))
    present = set(names_in(root))
    for file in sorted(present - planned.keys()):
        if find_rank_in_file_name(file) is not None and (size := file_size(root / file)):
            message = f"expected no file of this name, as in {expected.root}, found {size} bytes"
            raise Mismatch(message, path=root / file, hint=_HINT)
    with OpenFiles(root, in_order=False) as files, OpenFiles(expected.root, in_order=False) as others:
        matching = ItemComparison(ReadAhead(files), ReadAhead(others))
        for file in sorted(present & planned.keys()):
            try:
                matching.compare_items(file, files[file].size, planned[file])
            except Mismatch as error:
                error.hint = _HINT
                raise error.blame(path=root / file) from None


class ItemComparison:
    """Compares files with the files of the same names in another checkpoint."""

    def __init__(self, files: ReadAhead, others: ReadAhead) -> None:
        self._files, self._others = files, others
        self._templates = ArchiveTemplates()

    def compare_items(self, file: str, file_nbytes: int, items: Items) -> None:
        """Raise `Mismatch` for the first item that differs, or if the file of `file_nbytes` bytes is too long."""
        end = 0
        for number, ((offset, length), (name, wanted)) in enumerate(sorted(items.items()), start=1):
            end = offset + length
            if end <= file_nbytes:
                actual = self.describe_content(file, offset, length)
            elif file_nbytes <= offset or self.has_truncated_item(file, offset, length, file_nbytes):
                return
            else:
                actual = f"another item in {file_nbytes - offset} bytes"
            if actual != wanted:
                message = f"item {number} of {len(items)}: expected {wanted} in {length} bytes, found {actual}"
                raise Mismatch(message, tensor=name, offset=offset)
        if file_nbytes > end:
            raise Mismatch(f"expected {end} bytes in {len(items)} items, found {file_nbytes}")

    def describe_content(self, file: str, offset: int, length: int) -> str:
        """Return a description of the archive of `length` bytes at `offset`, or why it is not an archive."""
        try:
            tensor = self._templates.locate_tensor(self._files, file, offset, length).tensor
            return str(Spec(tensor.dtype, tensor.shape))
        except Corrupt as error:
            return error.message
        except Unsupported:
            try:
                read_central_directory(self._files.reader_within(file, offset, length), length)
            except (Corrupt, Unsupported) as error:
                return error.message
            return _ENTRY

    def has_truncated_item(self, file: str, offset: int, length: int, file_nbytes: int) -> bool:
        """Return whether a file that ends at byte `file_nbytes` has the beginning of the expected item at `offset`.

        The bytes before a tensor's data are the same at every step. A file that ends with an archive is not cut short.
        """
        remaining = file_nbytes - offset
        if remaining >= _END_BYTES and self._files.read(file, file_nbytes - _END_BYTES, len(_END)) == _END:
            return False
        try:
            before = self._templates.locate_tensor(self._others, file, offset, length).offset
        except (Corrupt, Unsupported):  # the value of an entry that is not a tensor may differ
            return True
        count = min(before, remaining)
        return self._files.read(file, offset, count) == self._others.read(file, offset, count)
