"""Read and write DeepSpeed's universal checkpoints: a file for each parameter, and for each of its moments.

Source: deepspeed/checkpoint/ds_to_universal.py, deepspeed/checkpoint/universal_checkpoint.py and
`load_hp_checkpoint_state_from_checkpoint_dir*` in deepspeed/runtime. Below a directory with `latest_universal` lies one
with model states and `zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`. DeepSpeed loads it at any stage of ZeRO, with any
number of ranks, if its configuration has `"checkpoint": {"load_universal": true}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptkit.errors import Corrupt, Report, Unsafe, refuse
from ckptkit.formats.archives.state_files import extents_of, places_in
from ckptkit.formats.protocols import FormatWriter
from ckptkit.io.file import check_name, is_there, read_small
from ckptkit.layout import Extent, FileOffset, Layout, NewFile, WriterOptions
from ckptkit.plugins.deepspeed.names import is_ours
from ckptkit.plugins.deepspeed.read_universal import NAME, OPTIMIZER, POINTER, ZERO, check_files, read_universal
from ckptkit.plugins.deepspeed.write_universal import files_for

_POINTER_LIMIT = 1 << 10  # bytes


class Universal(FormatWriter):
    """The format of universal checkpoints: the directory with all files, or one that points to it."""

    name = NAME
    known_by = "`zero/optimizer_state.pt`"
    needs_names = True
    needs_shapes = True

    def owns(self, name: str) -> bool:
        """Return True for the directory of the parameters, model states and the pointer."""
        return name in (ZERO, POINTER) or is_ours(name)

    def detect(self, path: Path) -> bool:
        """Return True for a directory with that of the parameters, or that points to one and to no other."""
        return path.is_dir() and tag_of(path) is not None

    def check_names(self, path: Path, report: Report) -> None:
        """Report each file of a parameter that is missing."""
        check_files(path, tag_of(path) or "", report)

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout: the model under `model`, in fp32, and the optimizer by name under `optimizer`."""
        return read_universal(path, tag_of(path) or "", report)

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:
        """Return every entry of every file."""
        return extents_of(layout, (name for name in layout.descriptions if name != POINTER), report)

    def arrange(self, wanted: Layout, options: WriterOptions) -> tuple[NewFile, ...]:
        """Return a file for each parameter and moment, the model states of ZeRO 1, 2 and 3, and the pointer."""
        return tuple(files_for(wanted, options))

    def checksum_places(self, made: Layout) -> Iterator[tuple[FileOffset, int]]:
        """Return both places of each storage's CRC-32."""
        return places_in(made, sorted({chunk.path for one in made.tensors.values() for chunk in one.chunks}))


def tag_of(path: Path) -> str | None:
    """Return the name of the directory in `path` with the parameters, "" if it is `path`; None if there is none."""
    if holds_parameters(path):
        return ""
    if not is_there(path / POINTER) or is_there(path / "latest"):  # with both it is a run
        return None
    try:
        tag = read_small(path / POINTER, _POINTER_LIMIT).decode("utf-8").strip()
        check_name(tag, path)
    except (Corrupt, Unsafe, UnicodeDecodeError):
        return None
    return tag if holds_parameters(path / tag) else None


def holds_parameters(path: Path) -> bool:
    return is_there(path / ZERO / OPTIMIZER)
