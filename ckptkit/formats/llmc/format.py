"""Read the models of llm.c, `model_00001000.bin`, with the states of its optimizer beside them.

Names are llm.c's own, and so is the padded vocabulary. The files have no checksums.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from math import prod
from pathlib import Path

from ckptkit.errors import Corrupt, Report, refuse
from ckptkit.files.file import file_size, is_there, names_in
from ckptkit.formats.llmc.header import HEADER, MODEL, Config, State, read_config, read_numbers, read_state, shapes_of
from ckptkit.formats.llmc.states import find_moments
from ckptkit.formats.protocols import Reader
from ckptkit.formats.torchfile.write_pickle import dump
from ckptkit.layout import Blob, Chunk, Extent, KeyPath, Layout, Spec, StoredTensor
from ckptkit.tensors.box import whole

_MODEL = re.compile(r"model_([0-9]{8})\.bin")


class LlmC(Reader):
    """The format of llm.c's files, which is only read: a model's file, and its ranks' states where it has some."""

    name = "llmc"
    known_by = "llm.c's `.bin`"

    def owns(self, name: str) -> bool:
        """Return True for the name of a model's file."""
        return bool(_MODEL.fullmatch(name))

    def detect(self, path: Path) -> bool:
        """Return True for a file that begins as llm.c's models do. A directory may hold any number of these."""
        return path.suffix == ".bin" and path.is_file() and read_numbers(path)[:1] == (MODEL,)

    def check_names(self, path: Path, report: Report) -> None:
        """Raise `Corrupt` if the model's file is too short, or its states are not there for every rank."""
        files = find_states(path)
        if not files:
            read_model(path)
        else:
            self.read(path, report)

    def read(self, path: Path, report: Report = refuse) -> Layout:  # noqa: ARG002 - what does not fit is one error
        """Return the layout of a model and its optimizer."""
        root = path.parent
        config, model = read_model(path)
        keys: dict[str, KeyPath] = {}
        tensors: dict[str, StoredTensor] = {}
        blobs: dict[str, Blob] = {}
        for name, tensor in model.items():
            tensors[put(keys, ("model", name))] = tensor
        for field, number in config._asdict().items():
            blobs[put(keys, ("config", field))] = Blob(path.name, 0, 0, dump(number))
        files = find_states(path)
        if files:
            states = [read_state(root / file) for file in files]
            check_same_step(root, files, states)
            for (name, moment), tensor in find_moments(root, files, states, config).items():
                tensors[put(keys, ("optimizer", "state", name, moment))] = tensor
            blobs[put(keys, ("step",))] = Blob(files[0], 0, 0, dump(states[0].step))
        return Layout(root, self.name, tensors, blobs, keys, len(files) or None, (path.name, *files))

    def extents(self, layout: Layout, report: Report = refuse) -> Iterator[Extent]:  # noqa: ARG002 - there is no sum
        """Return what each tensor has of the files. llm.c records no checksums."""
        for name, tensor in layout.tensors.items():
            for chunk in tensor.chunks:
                yield Extent(chunk.path, chunk.offset, chunk.length, None, name)


def put(keys: dict[str, KeyPath], key: KeyPath) -> str:
    """Add a key path, and return the name that it gives."""
    name = ".".join(map(str, key))
    keys[name] = key
    return name


def find_states(path: Path) -> list[str]:
    """Return the files with the states of a model's ranks, in order of rank; [] for a model alone.

    Raises `Corrupt` if the save did not end, or a rank's is missing.
    """
    match = _MODEL.fullmatch(path.name)
    if match is None:
        return []
    root, pattern = path.parent, re.compile(rf"state_{match[1]}_([0-9]{{5}})\.bin")
    found = {int(rank[1]): name for name in names_in(root) if (rank := pattern.fullmatch(name))}
    if not found:
        return []
    if not is_there(root / f"DONE_{match[1]}"):
        raise Corrupt(f"no `DONE_{match[1]}`: the save did not finish", path=path, hint="use an older checkpoint")
    ranks = read_state(root / found[min(found)]).ranks
    absent = islice((rank for rank in range(ranks) if rank not in found), 8)
    missing = [f"state_{match[1]}_{rank:05d}.bin" for rank in absent]
    if missing or len(found) > ranks:
        beside = f"missing: {', '.join(missing)}" if missing else f"there are {len(found)}"
        raise Corrupt(f"the states of {ranks} ranks belong to this model; {beside}", path=path)
    return [found[rank] for rank in range(ranks)]


def check_same_step(root: Path, files: list[str], states: list[State]) -> None:
    """Raise `Corrupt` if the states of the ranks are not those of one save."""
    for rank, (file, state) in enumerate(zip(files, states, strict=True)):
        if state != states[0]._replace(rank=rank):
            message = f"it is of rank {state.rank} of {state.ranks} at step {state.step}"
            raise Corrupt(f"{message}, `{files[0]}` of {states[0].ranks} at {states[0].step}", path=root / file)


def read_model(path: Path) -> tuple[Config, dict[str, StoredTensor]]:
    """Return the sizes of a model, and where its tensors lie, by name. Raises `Corrupt` for a file of another size."""
    config, dtype = read_config(path)
    found, at = {}, HEADER.size
    for name, shape in shapes_of(config).items():
        length = prod(shape) * dtype.itemsize
        found[name] = StoredTensor(Spec(dtype, shape), (Chunk(whole(shape), path.name, at, length, dtype),))
        at += length
    size = file_size(path)
    if size != at:
        raise Corrupt(f"the file has {size} bytes, its header calls for {at}", path=path, offset=min(size, at))
    return config, found
