"""Read the models of llm.c, `model_00001000.bin`, with the states of its optimizer beside them.

Names are llm.c's own, and so is the padded vocabulary. The files have no checksums.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from ckptkit.errors import Corrupt, Incomplete, Report, refuse
from ckptkit.files.file import file_size, is_there, names_in
from ckptkit.formats.each_file import read_each
from ckptkit.formats.llmc.header import HEADER, MODEL, Config, State, read_config, read_numbers, read_state, shapes_of
from ckptkit.formats.llmc.states import find_moments
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.formats.protocols import FormatReader
from ckptkit.layout import Blob, Chunk, Extent, KeyPath, Layout, Spec, StoredTensor
from ckptkit.tensors.box import whole

_MOST = 1 << 12  # ranks that are missing
_MODEL = re.compile(r"model_([0-9]{8})\.bin")


class LlmC(FormatReader):
    """The format of llm.c's files, which is only read: a model's file, and its ranks' states where it has some."""

    name = "llmc"
    known_by = "llm.c's `.bin`"

    def owns(self, name: str) -> bool:
        return bool(_MODEL.fullmatch(name))

    def detect(self, path: Path) -> bool:
        """Return True for a file that begins as llm.c's models do. A directory may hold any number of these."""
        return path.suffix == ".bin" and path.is_file() and read_numbers(path)[:1] == (MODEL,)

    def check_names(self, path: Path, report: Report) -> None:
        """Report what of the model's file or of its ranks' states is missing."""
        self.read(path, report)

    def read(self, path: Path, report: Report = refuse) -> Layout:
        """Return the layout of a model and its optimizer. Reports files of ranks that cannot be read, or are short."""
        root = path.parent
        config, model = read_model(path, report)
        keys: dict[str, KeyPath] = {}
        tensors: dict[str, StoredTensor] = {}
        blobs: dict[str, Blob] = {}
        for name, tensor in model.items():
            tensors[put(keys, ("model", name))] = tensor
        for field, number in config._asdict().items():
            blobs[put(keys, ("config", field))] = Blob(path.name, 0, 0, dump(number))
        files = find_states(path, report)
        states = {file: state for file, state in files.items() if state is not None}
        if states:
            check_same_step(root, list(files), states)
            for (name, moment), tensor in find_moments(root, list(files), states, config, report).items():
                tensors[put(keys, ("optimizer", "state", name, moment))] = tensor
            file, state = next(iter(states.items()))
            blobs[put(keys, ("step",))] = Blob(file, 0, 0, dump(state.step))
        return Layout(root, self.name, tensors, blobs, keys, len(files) or None, (path.name, *states))

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:  # noqa: ARG002 - there is no sum
        """Return what each tensor has of the files. llm.c records no checksums."""
        for name, tensor in layout.tensors.items():
            for chunk in (chunk for chunk in tensor.chunks if chunk.is_in_file):
                yield Extent(chunk.path, chunk.offset, chunk.length, None, name)


def put(keys: dict[str, KeyPath], key: KeyPath) -> str:
    """Add a key path, and return the name that it gives."""
    name = ".".join(map(str, key))
    keys[name] = key
    return name


def find_states(path: Path, report: Report) -> dict[str, State | None]:
    """Return the files with the states of a model's ranks, in order of rank, each with its header.

    For a model alone {}. Reports ranks whose file is missing or has no header, which is None then. Raises `Corrupt` if
    the save did not end, or for files of more ranks than there were.
    """
    match = _MODEL.fullmatch(path.name)
    if match is None:
        return {}
    root, pattern = path.parent, re.compile(rf"state_{match[1]}_([0-9]{{5}})\.bin")
    found = {int(rank[1]): name for name in names_in(root) if (rank := pattern.fullmatch(name))}
    if not found:
        return {}
    if not is_there(root / f"DONE_{match[1]}"):
        raise Incomplete(f"no `DONE_{match[1]}`: the save did not finish", path=path, hint="use an older checkpoint")
    states = read_each(root, dict(sorted(found.items())), lambda _, name: read_state(root / name), report)
    ranks = next((state.ranks for state in states.values()), len(found))
    if len(found) > ranks:
        raise Corrupt(f"expected the states of {ranks} ranks, found {len(found)}", path=path)
    missing = [rank for rank in range(min(ranks, len(found) + _MOST)) if rank not in found]
    found |= {rank: f"state_{match[1]}_{rank:05d}.bin" for rank in missing}
    if missing:
        names = ", ".join(found[rank] for rank in missing[:8])
        message = f"expected the states of {ranks} ranks; missing: {names}"
        path = root / found[missing[0]]
        (report if len(found) == ranks else refuse)(Incomplete(message, path=path, ranks=missing))
    return {name: states.get(rank) for rank, name in sorted(found.items())}


def check_same_step(root: Path, files: list[str], states: Mapping[str, State]) -> None:
    """Raise `Corrupt` if the states of the ranks, of which all `files` are, are not those of one save."""
    one, first = next(iter(states.items()))
    for file, state in states.items():
        if state != first._replace(rank=files.index(file)):
            message = f"expected {first.ranks} ranks at step {first.step} as in `{one}`"
            raise Corrupt(f"{message}, found {state.ranks} at {state.step} (rank {state.rank})", path=root / file)


def read_model(path: Path, report: Report) -> tuple[Config, dict[str, StoredTensor]]:
    """Return the sizes of a model, and where its tensors lie, by name.

    Reports a file that is too short. Raises `Corrupt` for one that is too long.
    """
    config, dtype = read_config(path)
    found, at = {}, HEADER.size
    for name, shape in shapes_of(config).items():
        length = prod(shape) * dtype.itemsize
        found[name] = StoredTensor(Spec(dtype, shape), (Chunk(whole(shape), path.name, at, length, dtype),))
        at += length
    size = file_size(path)
    if size != at:
        problem = Corrupt(f"expected {at} bytes (header), found {size}", path=path, offset=min(size, at))
        (report if size < at else refuse)(problem)
    return config, found
