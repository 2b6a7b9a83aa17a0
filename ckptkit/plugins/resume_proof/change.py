"""Change one group of state in a copy of a checkpoint, in place, with the checksums made right."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checks.make_manifest import make_manifest
from ckptkit.engine.casting import cast_into, widener
from ckptkit.errors import Corrupt, Unsupported
from ckptkit.formats import locate_all_chunks
from ckptkit.formats.archives.zip_entries import read_central_directory
from ckptkit.formats.pickles import inert_pickle
from ckptkit.formats.pickles.inert_pickle import ANY_NAME
from ckptkit.formats.pickles.write_pickle import dump
from ckptkit.io.crc32 import crc32
from ckptkit.layout import Chunk
from ckptkit.layout.dtypes import DTYPES
from ckptkit.plugins.resume_proof.compare import with_tensors_only
from ckptkit.plugins.resume_proof.containers import Container, map_scalars
from ckptkit.plugins.resume_proof.states import (
    DATA,
    EMA,
    MOMENTS,
    OPTIMIZER_STEP,
    OPTIONS,
    RANDOM,
    SCALER,
    SCHEDULER,
    STEP,
    WEIGHTS,
    CheckpointContents,
    SavedTensor,
    SavedValue,
    read_checkpoint_contents,
)  # fmt: skip

Array = np.ndarray[Any, Any]
Change = Callable[[str, Any], Any]  # (name, array or scalar) -> another

# The groups that are changed, and the words for the change: of so many `entries`, or learning `rates`.
CHANGES = {
    WEIGHTS: "scaled {entries} by 1.25",
    MOMENTS: "scaled {entries} by 4",
    OPTIMIZER_STEP: "added 1 to {entries}",
    OPTIONS: "halved {rates}",
    SCHEDULER: "moved {entries}",
    RANDOM: "moved {entries}",
    DATA: "moved {entries}",
    SCALER: "lowered {entries}",
    EMA: "scaled {entries} by 1.25",
    STEP: "added 1 to {entries}",
}
_SCALE = 2.0**-10  # of a loss scale: doubled every few steps, a higher one could be what it was again at the end
_FACTORS = {WEIGHTS: 1.25, MOMENTS: 4.0, EMA: 1.25, SCALER: _SCALE}
_RATES = ("lr", "initial_lr", "base_lrs", "_last_lr", "max_lr", "min_lr", "learning_rate", "eta_min")
_SIZES = re.compile(r"world_size|num_workers|num_replicas|batch_size")  # of a data loader: these are no position
_BIG = 1 << 10  # a random state has words of 32 bits, and small numbers that say where it is: these must stay valid
_MT19937 = 5056  # bytes of torch's random state on the CPU: a header, 624 words of 8 bytes, a tail
_HEADER, _WORDS = 24, 624
_WORD = 4  # bytes; shorter ones only describe an array
_NEARLY_ONE = 1 - 2**-53  # a beta with which moments stay as they are, in float32, and no division is by zero


def change_state_group(path: Path, group: str) -> int:
    """Change a group of state in the checkpoint at a path; return how many entries that were."""
    state = read_checkpoint_contents(path)
    return change_entries(state, state.names_in(group), lambda name, value: changed_value(group, name, value))


def freeze_optimizer(path: Path) -> None:
    """Set the learning rates in the checkpoint to 0 and its betas to 1: steps then change no weight and no moment."""
    state = read_checkpoint_contents(path)
    names = [name for name in (*state.names_in(OPTIONS), *state.names_in(SCHEDULER)) if name in state.values]
    change_entries(state, names, option_value_without_updates)


def option_value_without_updates(name: str, value: Any) -> Any:
    """Return what an option of an optimizer or a scheduler is set to, so that steps change nothing."""
    words = name.split(".")
    if type(value) not in (int, float):
        return value
    if any(word in _RATES for word in words) or words[-1] == "weight_decay":
        return 0.0
    if "betas" in words:
        return _NEARLY_ONE
    return 1.0 if words[-1] == "dampening" or (words[-1] == "momentum" and value) else value


def changed_value(group: str, name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return change_array(group, value)
    words = name.split(".")
    if group == OPTIONS:
        return value * 0.5 if words[-1] == "lr" and type(value) is float else value
    if group == RANDOM:
        return other_random_value(value) if words[-1] != "seed" or type(value) is not int else value + 1
    if group == DATA and isinstance(value, bytes) and value.startswith(b"\x80"):
        return pickle_with_moved_numbers(value)
    if type(value) is float:
        factor = _SCALE if group == SCALER and words[-1] == "scale" else 0.5
        return value * factor if value else 1.0
    is_count = type(value) is int and value >= 0 and not (group == DATA and _SIZES.search(words[-1]))
    return value + 1 if is_count else value


def pickle_with_moved_numbers(data: bytes) -> bytes:
    """Return the pickled state of a rank's data loader with its numbers moved.

    Bytes that are no pickle stay.
    """
    try:
        state = inert_pickle.load(data, ANY_NAME)[0]
    except (Corrupt, Unsupported):
        return data
    return dump(map_scalars(state, lambda path, value: changed_value(DATA, ".".join(map(str, path)), value)))


def other_random_value(value: Any) -> Any:
    """Return another number or text of a random state; those that say where it is stay."""
    if type(value) is int and value >= _BIG:
        return value ^ 1
    if not isinstance(value, bytes) or len(value) < _WORD:
        return value
    moved = np.frombuffer(value, np.uint8).copy()
    moved[:: _WORD if len(value) == _WORD * _WORDS else len(value)] ^= 1  # of numpy, which has words of 32 bits
    return moved.tobytes()


def change_array(group: str, array: Array) -> Array:
    """Change the elements of a tensor of a group, and return it."""
    if group == RANDOM and array.dtype == np.uint8:
        is_torch = array.size == _MT19937
        array[slice(_HEADER, _HEADER + 8 * _WORDS, 8) if is_torch else slice(0, 1)] ^= 1
        return array
    if array.dtype == np.bool_:
        return array
    if group in _FACTORS and array.dtype.kind == "f":
        array *= np.asarray(_FACTORS[group], array.dtype)
    else:
        array += np.asarray(1, array.dtype)
    return array


def change_entries(state: CheckpointContents, names: Sequence[str], changed_value: Change) -> int:
    """Change entries of a checkpoint, and make its checksums and its manifest right. Return how many changed."""
    tensors = {name: state.tensors[name] for name in names if name in state.tensors}
    change_tensors(tensors, changed_value)
    count = len(tensors)
    by_container: dict[Container, dict[tuple[str | int, ...], tuple[str, SavedValue]]] = defaultdict(dict)
    for name in names:
        if name in state.values:
            by_container[state.values[name].container][state.values[name].path] = name, state.values[name]
    for container, chosen in by_container.items():
        made = {path: changed_value(name, value.value) for path, (name, value) in chosen.items()}
        differing = {path: new for path, new in made.items() if new != chosen[path][1].value}
        if differing:
            changed = map_scalars(container.load_value(), lambda path, old, new=differing: new.get(path, old))  # type: ignore[misc]
            container.write_value(changed)
            count += len(differing)
    if count and state.path.is_dir() and any(state.path.rglob(MANIFEST)):
        make_manifest(state.path, overwrite=True)
    return count


def change_tensors(tensors: Mapping[str, SavedTensor], changed_value: Change) -> None:
    touched: dict[tuple[Path, int, int], list[int]] = defaultdict(list)  # archives, and where in them
    done: set[tuple[Path, int]] = set()
    for name, tensor in tensors.items():
        layout = with_tensors_only(tensor.layout, [tensor.name])
        wrapped, located = (found.tensors[tensor.name].chunks for found in (layout, locate_all_chunks(layout)))
        for envelope, chunk in zip(wrapped, located, strict=True):
            file = layout.root / chunk.path
            if not chunk.is_in_file or not chunk.length or (file, chunk.offset) in done:
                continue
            done.add((file, chunk.offset))
            change_chunk(file, chunk, lambda array, name=name: changed_value(name, array))  # type: ignore[misc]
            archive = (envelope.offset, envelope.length) if envelope.wrapper else (0, file.stat().st_size)
            touched[file, *archive].append(chunk.offset)
    for (file, start, length), offsets in touched.items():
        rewrite_archive_checksums(file, start, length, offsets)


def change_chunk(file: Path, chunk: Chunk, changed_elements: Callable[[Array], Array]) -> None:
    with file.open("r+b") as opened:
        opened.seek(chunk.offset)
        data = opened.read(chunk.length)
        if chunk.dtype.name == "bfloat16":  # numpy has none
            made = np.frombuffer(bytearray(data), np.uint16)
            cast_into(changed_elements(widener(chunk.dtype)(made)), DTYPES["float32"], chunk.dtype, made)
        elif chunk.dtype.kind in ("float", "int", "bool"):
            made = changed_elements(np.frombuffer(bytearray(data), chunk.dtype.name))
        else:
            raise Unsupported(f"ckptkit does not change elements of {chunk.dtype}", path=file)
        opened.seek(chunk.offset)
        opened.write(made.tobytes())


def rewrite_archive_checksums(file: Path, start: int, length: int, offsets: Iterable[int]) -> None:
    """Write the CRC-32 of the entries of an archive of torch.save in which bytes have changed."""
    with file.open("r+b") as opened:

        def read(offset: int, nbytes: int) -> bytes:
            opened.seek(start + offset)
            return opened.read(nbytes)

        if read(0, 2) != b"PK":
            return  # safetensors, or raw bytes: they have no checksums
        for entry in read_central_directory(read, length).values():
            if not any(entry.offset <= offset - start < entry.offset + entry.length for offset in offsets):
                continue
            crc = crc32(read(entry.offset, entry.length)).to_bytes(4, "little")
            if entry.crc32:  # 0 if torch was told not to compute any
                for place in entry.crc_offsets:
                    opened.seek(start + place)
                    opened.write(crc)
