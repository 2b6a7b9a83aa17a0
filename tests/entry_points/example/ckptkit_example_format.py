"""Read files of one float32 vector without a header."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.errors import Corrupt, Report, raise_problem
from ckptkit.formats import FormatReader
from ckptkit.io.file import file_size
from ckptkit.layout import Chunk, Extent, Layout, Spec, StoredTensor
from ckptkit.layout.box import full_box
from ckptkit.layout.dtypes import DTYPES

FLOAT32 = DTYPES["float32"]


class Example(FormatReader):
    name = "example"
    known_by = "a file `.example`"

    def owns_file(self, name: str) -> bool:
        return name.endswith(".example")

    def detect(self, path: Path) -> bool:
        return self.owns_file(path.name) and path.is_file()

    def check_files_complete(self, path: Path, report: Report) -> None:
        self.read(path, report)

    def read(self, path: Path, report: Report = raise_problem) -> Layout:
        size = file_size(path)
        if size % 4:
            report(Corrupt(f"expected a multiple of 4 bytes, found {size}", path=path))
        shape = (size // 4,)
        chunk = Chunk(full_box(shape), path.name, 0, shape[0] * 4, FLOAT32)
        tensors = {"example.0.w": StoredTensor(Spec(FLOAT32, shape), (chunk,))}
        return Layout(path.parent, self.name, tensors, {}, {"example.0.w": ("example.0.w",)}, None, (path.name,))

    def checksummed_extents(self, layout: Layout, report: Report = raise_problem) -> Iterator[Extent]:
        for name, tensor in layout.tensors.items():
            for chunk in tensor.chunks:
                yield Extent(chunk.path, chunk.offset, chunk.length, None, name)
