"""Delta support for `ckptkit inspect`, `verify` and `cp`: one of the kinds in `ckptkit.checkpoints.other_kinds`."""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.cli.output import pick, print_json, print_table, print_text_line
from ckptkit.io.file import file_size
from ckptkit.plugins.deltas.open_delta import inspect_delta, open_delta
from ckptkit.plugins.deltas.record import FORMAT, RECORD, is_complete_delta
from ckptkit.plugins.deltas.verify_delta import verify_delta
from ckptkit.runs.cp import Contents
from ckptkit.words import per_cent

is_complete = is_complete_delta
verify_directory = verify_delta


def list_contents(path: Path) -> Contents:
    """Return the files of a delta to copy. `delta.json` comes last, because it marks the delta as complete."""
    delta = open_delta(path)
    manifest = read_manifest(path)
    names = [*sorted(delta.layout.files), *([MANIFEST] if manifest else []), RECORD]
    sizes = {name: file_size(path / name) for name in names}
    sums = {} if manifest is None else {name: file_sum for name, file_sum in manifest.files.items() if name in sizes}
    return Contents(path, FORMAT, (), sizes, (RECORD,), sums=sums)


def show_description(path: Path, *, tensors: bool, json: bool) -> None:
    inspected = inspect_delta(path)
    record = inspected.record
    if json:
        result = {**pick(inspected, "path", "format", "nbytes"), **pick(record, "base", "new", "density", "unchanged")}
        described = [
            {"name": name, "dtype": tensor.spec.dtype.name, **pick(tensor.spec, "shape"), "changed": tensor.changed}
            for name, tensor in record.tensors.items()
        ]
        print_json({**result, "whole_nbytes": record.nbytes, "tensors": described})
        return
    for line in inspected.summary():
        print_text_line(line)
    if tensors:
        rows = [
            (f"{tensor.changed:,}", per_cent(tensor.changed / tensor.spec.numel), str(tensor.spec), name)
            for name, tensor in record.tensors.items()
        ]
        print_table(rows, ("changed", "", "dtype and shape", "tensor"))
