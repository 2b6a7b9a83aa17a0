"""Look up names in the table of trainers: their meaning, the writer of a checkpoint, the step in its name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from ckptkit.layout import KeyPath
from ckptkit.trainers.table import TRAINERS
from ckptkit.trainers.trainer import ConfigOf, Evidence, MetricsFile, Unread

Found = TypeVar("Found")
NUMBER = re.compile(r"[0-9]{1,18}")
ONE_FILE = (".bin", ".ckpt", ".pt", ".pth", ".safetensors", ".tar")  # suffixes of a checkpoint that is one file
# Model files of other programs, with hints how to load them. They count only in a directory without a checkpoint,
# since such files also occur beside checkpoints. Sources: ggml-org/llama.cpp, gguf-py; keras-team/keras,
# src/saving/saving_lib.py; NVIDIA-NeMo/NeMo, nemo/core/connectors/save_restore_connector.py; coreweave/tensorizer;
# NVIDIA/TensorRT-LLM, `rank0.engine`; sgl-project/sglang, `PreshardedModelLoader` and model_loader/expert_pack;
# NovaSky-AI/SkyRL, whose Tinker server keeps tar files of adapters.
FOREIGN = {
    r".*\.gguf": Unread(
        "a model of llama.cpp, in GGUF", "load it with transformers' `gguf_file=`, then `save_pretrained`"
    ),
    r".*\.nemo": Unread("an archive of NeMo 1", "run `tar xf` on it, and pass the directory"),
    r"model-[0-9]{5}-(common|rank-[0-9,]+)\.safetensor": Unread(
        "weights as SGLang's ranks hold them (presharded)", "take the model that it was made of"
    ),
    r".*\.expert-pack": Unread("experts as SGLang reads them from a disk (expert pack)", "take the model in GGUF"),
    r".*\.keras": Unread("a model of Keras", "load it with Keras, and save its weights as safetensors"),
    r".*\.h5": Unread("weights of Keras, in HDF5", "load them with Keras, and save them as safetensors"),
    r".*\.tensors": Unread(
        "tensors of CoreWeave's tensorizer", "load them with `TensorDeserializer`, and save them as safetensors"
    ),
    r".*\.(engine|plan)": Unread("an engine of TensorRT, built for one GPU", "take the model that it was built from"),
    r"\.snapshot_metadata": Unread(
        "a snapshot of torchsnapshot, which ckptkit stopped reading in 0.1",
        "load it with torchsnapshot, and save it again with torch.distributed.checkpoint",
    ),
    r"model_[0-9]{8}\.bin": Unread(
        "a model of llm.c, which ckptkit stopped reading in 0.1", "convert it with llm.c's dev/eval/export_hf.py"
    ),
    r".*\.(tar|tar\.gz|tgz)": Unread(
        "an archive, such as a Tinker server keeps", "run `tar xf` on it, and pass the directory"
    ),
}


@cache
def rows_of_all_trainers(table: str) -> tuple[Any, ...]:
    """Return the rows of a table such as "step_keys", trainer by trainer; of a mapping its keys."""
    return tuple(row for trainer in TRAINERS.values() for row in getattr(trainer, table))


# file ("" for the checkpoint's own entries) and key path of the step of a checkpoint, and of the best one of a run
step_keys, best_keys = partial(rows_of_all_trainers, "step_keys"), partial(rows_of_all_trainers, "best_keys")
best_trackers = partial(
    rows_of_all_trainers, "best_trackers"
)  # files that name the best checkpoint of a run, not the latest
unfinished_names = partial(
    rows_of_all_trainers, "unfinished"
)  # files that are in a checkpoint only while its trainer writes it
companion_directories = partial(rows_of_all_trainers, "companions")  # they may contain config and tokenizer
module_change_directories = partial(rows_of_all_trainers, "changes")  # they describe changes of the model's modules


def find_number_in(name: str, table: str) -> int | None:
    """Return the number in a name, by the patterns of a table such as "steps"; None if no pattern matches."""
    match = next(matches_in_table(table, name), None)
    return int(match[1]) if match else None


def matches_table_pattern(table: str, name: str) -> bool:
    return any(matches_in_table(table, name))


is_whole = partial(matches_table_pattern, "complete_folders")  # a directory with the full checkpoint
is_exported = partial(
    matches_table_pattern, "exported"
)  # a file with weights for inference, beside the full training state
is_beside_model = partial(matches_table_pattern, "others")  # a directory with everything except the model
is_description = partial(matches_table_pattern, "descriptions")  # a file that describes only the weights beside it
is_optional_state = partial(matches_table_pattern, "optional_state")  # per-rank state that its trainer can do without
is_last = partial(matches_table_pattern, "last")  # the last checkpoint of a run, whatever its step


def find_owner_rank_of_file(name: str) -> int | None:
    """Return the rank whose per-rank state a file contains, by its name in any directory; None for other files."""
    return find_number_in(Path(name).name, "own_state")


def find_owner_rank_of_key(key: KeyPath) -> int | None:
    """Return the rank of per-rank state at a key path, None for entries that all ranks share."""
    for patterns in per_rank_key_patterns():
        rank = None
        for pattern, step in zip(patterns, key, strict=False):
            match = pattern.fullmatch(f"[{step}]" if isinstance(step, int) else step)
            if match is None:
                break
            rank = int(match[1]) if match.groups() else rank
        else:  # each of the first steps matches its pattern
            if rank is not None and len(key) >= len(patterns):
                return rank
    return None


@cache
def per_rank_key_patterns() -> tuple[tuple[re.Pattern[str], ...], ...]:
    return tuple(tuple(map(re.compile, patterns)) for patterns in rows_of_all_trainers("own_keys"))


def is_non_model_component_name(name: str) -> bool:
    """Return whether a directory of this name in a checkpoint has other contents than the model."""
    return name.startswith("optim") or is_beside_model(name)


def find_key_for_file(name: str, step: int | None, names: Collection[str]) -> str | None:
    """Return the keys under which the contents of a file beside a model belong; None for other files.

    The model is a directory with these `names`, or else a file of this `step`.
    """
    for pattern, key, companion in patterns_beside_model():
        match = pattern.fullmatch(name)
        if match and companion in (None, *names):
            groups = match.groupdict()
            if step == (int(groups["step"]) if "step" in groups else None):
                return key.format(**groups)
    return None


def is_step_file_beside_model(name: str) -> bool:
    return any("step" in pattern.groupindex and pattern.fullmatch(name) for pattern, _, _ in patterns_beside_model())


@cache
def patterns_beside_model() -> tuple[tuple[re.Pattern[str], str, str | None], ...]:
    """Return the files that belong to a model: pattern, key, and the file that must be beside them, if any."""
    return tuple(
        (re.compile(pattern), key, trainer.beside_of.get(pattern))
        for trainer in TRAINERS.values()
        for pattern, key in trainer.beside.items()
    )


def is_training_state(name: str) -> bool:
    """Return whether a file of this name has training state, which a model for inference does not need."""
    is_beside = any(
        pattern.fullmatch(name) and not key.startswith("model") for pattern, key, _ in patterns_beside_model()
    )
    return is_beside or matches_table_pattern("states", name) or is_bookkeeping_file_name(name)


def is_checkpoint_file_name(name: str) -> bool:
    """Return whether a trainer gives this name to a file of one of its checkpoints."""
    is_beside = any(pattern.fullmatch(name) for pattern, _, _ in patterns_beside_model())
    return is_beside or matches_table_pattern("ranks", name) or is_bookkeeping_file_name(name)


def is_bookkeeping_file_name(name: str) -> bool:
    """Return whether a file of this name is a tracker, has metrics, or has the state of one rank."""
    return is_tracker(name) or name in metrics_files() or find_owner_rank_of_file(name) is not None


def is_copied_unchanged(name: str, beside: Iterable[str]) -> bool:
    """Return whether a directory or hidden file is copied unchanged, by its name and the names beside it."""
    return any(trainer.kept[name] in beside for trainer in TRAINERS.values() if name in trainer.kept)


def is_tracker(name: str) -> bool:
    return any(name in rows_of_all_trainers(table) for table in ("trackers", "best_trackers", "json_trackers"))


def is_run_file_name(name: str) -> bool:
    """Return whether trainers put a file of this name into a run, possibly before its first checkpoint."""
    return is_tracker(name) or is_progress_file(name)


def is_progress_file(name: str) -> bool:
    """Return whether a trainer's file of this name has settings, steps, metrics or the best under known keys."""
    files = {file for file, _ in (*step_keys(), *best_keys())}
    return name in files or name in metrics_files() or name in rows_of_all_trainers("of_runs")


@cache
def json_trackers() -> dict[str, tuple[str, ...]]:
    """Return the latest-checkpoint files in JSON, each with the keys that lead to the checkpoint's name."""
    return {name: keys for trainer in TRAINERS.values() for name, keys in trainer.json_trackers.items()}


def required_completion_marker(path: Path) -> str | None:
    """Return the name of the file without which the directory at `path` is unfinished; None if it needs no marker."""
    path = path.absolute()
    return find_in_tables([trainer.markers for trainer in TRAINERS.values()], [f"{path.parent.name}/{path.name}"])


def is_commit_marker(name: str) -> bool:
    """Return whether a file of this name marks the end of the save that it belongs to."""
    return matches_table_pattern("commits", name) or any(
        name in trainer.markers.values() for trainer in TRAINERS.values()
    )


def metrics_files() -> dict[str, MetricsFile]:
    """Return the metrics files that trainers write, by name; ckptkit's own comes first."""
    return {name: file for trainer in TRAINERS.values() for name, file in trainer.metrics.items()}


def library_of_config(config: Mapping[str, object]) -> ConfigOf:
    """Return the library of a config.json that does not name a transformers model."""
    configs = (trainer.config for trainer in TRAINERS.values() if trainer.config is not None)
    return next((known for known in configs if config.keys() >= set(known.keys)), ConfigOf("an unknown library", ()))


def find_unreadable_file(names: Iterable[str]) -> Unread | None:
    """Return the description of a trainer's file that ckptkit does not read, if one of the names is one."""
    return find_in_tables([trainer.unread for trainer in TRAINERS.values()], sorted(names))


def find_foreign_program_file(name: str) -> Unread | None:
    """Return the description of a file of another program's model by its name, None for any other file."""
    return find_in_tables([FOREIGN], [name])


def why_copied_unchanged(names: Iterable[str]) -> str | None:
    """Return why tensors among these names can only be copied unchanged, None if there are none."""
    return find_in_tables([trainer.opaque for trainer in TRAINERS.values()], names)


def find_in_tables(tables: Iterable[Mapping[str, Found]], names: Iterable[str]) -> Found | None:
    """Return the value for the first name that matches a pattern of the tables."""
    known = [(re.compile(pattern), value) for table in tables for pattern, value in table.items()]
    return next((value for name in names for pattern, value in known if pattern.fullmatch(name)), None)


def who_wrote(evidence: Evidence) -> str | None:
    """Return the name of the program that wrote a checkpoint, None if no mark proves it.

    Trainers of other packages are tried first, because torch's marks are on almost every checkpoint.
    """
    for trainer in (*TRAINERS.added.values(), *TRAINERS.own.values()):
        marked = (mark.title for mark in trainer.marks if mark.is_in_evidence(evidence))
        if title := trainer.wrote(evidence) or next(marked, None):
            return title
    return None


def matches_in_table(table: str, name: str) -> Iterator[re.Match[str]]:
    """Match a full name with all patterns of a table, trainer by trainer."""
    return (match for pattern in patterns_of_table(table) if (match := pattern.fullmatch(name)))


@cache
def patterns_of_table(table: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, rows_of_all_trainers(table)))


def name_without_suffixes(name: str) -> str:
    """Return the name of a checkpoint file without its suffixes: `ckpt-5` for `ckpt-5.pth.tar`."""
    for _ in range(2 if name.endswith(".tar") else 1):
        stem, dot, suffix = name.rpartition(".")
        name = stem if f"{dot}{suffix}" in ONE_FILE else name
    return name


def find_step_of_path(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's directory, or else its epoch; None without either."""
    step = find_number_in(path.name, "steps")
    return find_number_in(path.name, "epochs") if step is None else step


def has_only_epoch_in_name(path: Path) -> bool:
    """Return whether a checkpoint's name has only an epoch, which cannot be compared with steps."""
    return find_number_in(path.name, "steps") is None and find_number_in(path.name, "epochs") is not None


def checkpoint_sort_key(step: int, name: str) -> tuple[int, int, str]:
    """Return the sort key of a checkpoint in its run, oldest first: its step, the version of its name, the name."""
    return step, find_number_in(name, "versions") or 0, name


def find_step_of_path_or_parent(path: Path) -> int | None:
    """Return the step in the name of a directory, or else of its parent; None if neither has one."""
    path = path.absolute()
    own = find_step_of_path(path)
    return find_step_of_path(path.parent) if own is None else own


def is_like_checkpoint_name(name: str) -> bool:
    """Return whether a directory has the name of a checkpoint, or a plain number, which some trainers use."""
    return find_step_of_path(Path(name)) is not None or bool(NUMBER.fullmatch(name))


def is_training_entry_name(name: str) -> bool:
    """Return whether an entry of a directory has the name of a checkpoint, training state, or file of a run."""
    is_step = is_like_checkpoint_name(name) or find_step_of_path(Path(name_without_suffixes(name))) is not None
    return is_step or is_non_model_component_name(name) or is_training_state(name) or is_run_file_name(name)


def is_like_checkpoint(path: Path) -> bool:
    """Return whether an entry of a run is named like a checkpoint."""
    if path.is_dir():
        return is_like_checkpoint_name(path.name)
    return path.suffix in ONE_FILE and find_step_of_path(Path(name_without_suffixes(path.name))) is not None
