"""List the trainers that are known, and answer from their tables what a name means. Each is one file and one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

from ckptkit.layout import KeyPath
from ckptkit.trainers.accelerate import ACCELERATE
from ckptkit.trainers.ckptkit import CKPTKIT
from ckptkit.trainers.composer import COMPOSER
from ckptkit.trainers.deepspeed import DEEPSPEED
from ckptkit.trainers.diffusers import DIFFUSERS
from ckptkit.trainers.dlrover import DLROVER
from ckptkit.trainers.lightning import LIGHTNING
from ckptkit.trainers.llmc import LLMC
from ckptkit.trainers.megatron import MEGATRON
from ckptkit.trainers.meta_llama import META_LLAMA
from ckptkit.trainers.nanochat import NANOCHAT
from ckptkit.trainers.nanogpt import NANOGPT
from ckptkit.trainers.nanotron import NANOTRON
from ckptkit.trainers.nemo import NEMO
from ckptkit.trainers.olmo import OLMO
from ckptkit.trainers.orbax import ORBAX
from ckptkit.trainers.peft import PEFT
from ckptkit.trainers.plain import PLAIN
from ckptkit.trainers.torchtitan import TORCHTITAN
from ckptkit.trainers.torchtune import TORCHTUNE
from ckptkit.trainers.trainer import Evidence, MetricsFile, Trainer
from ckptkit.trainers.transformers import TRANSFORMERS
from ckptkit.trainers.verl import VERL
from ckptkit.trainers.vllm import VLLM

# Asked in this order who wrote a checkpoint: who leaves most that is its own comes first, and torch before the
# libraries whose files lie beside its own.
TRAINERS: tuple[Trainer, ...] = (
    *(CKPTKIT, ACCELERATE, LIGHTNING, NEMO, MEGATRON, COMPOSER, TORCHTITAN, TORCHTUNE, OLMO, VERL, DEEPSPEED),
    *(DLROVER, NANOTRON, META_LLAMA, LLMC, NANOGPT, NANOCHAT, ORBAX, VLLM, PLAIN, PEFT, TRANSFORMERS, DIFFUSERS),
)


def step_in(name: str) -> int | None:
    """Return the step in the name of a checkpoint's directory or file, None if it says none."""
    return number_in(name, "steps")


def epoch_in(name: str) -> int | None:
    """Return the epoch in a checkpoint's name, None if it says none. Epochs cannot be compared with steps."""
    return number_in(name, "epochs")


def step_or_epoch_in(name: str) -> int | None:
    """Return the step in a checkpoint's name, or the epoch if that is all it says; None otherwise."""
    step = step_in(name)
    return epoch_in(name) if step is None else step


def number_in(name: str, table: str) -> int | None:
    match = next(matches(table, name), None)
    return int(match[1]) if match else None


def rank_in(name: str) -> int | None:
    return number_in(name, "ranks")


def owner_of_file(name: str) -> int | None:
    """Return the rank whose own state a file holds by its name, None for other files."""
    return number_in(name, "own_state")


def owner_of_key(key: KeyPath) -> int | None:
    """Return the rank whose own state lies at a key path, None for what all ranks share."""
    owners = (trainer.rank_of_key(key) for trainer in TRAINERS)
    return next((rank for rank in owners if rank is not None), None)


def is_whole(name: str) -> bool:
    return any(matches("wholes", name))


def is_exported(name: str) -> bool:
    """Return whether a file of this name has weights as they are to be used, beside a directory with all states."""
    return any(matches("exported", name))


def is_other_part(name: str) -> bool:
    """Return whether a directory of this name in a checkpoint holds anything but the model."""
    return name.startswith("optim") or is_beside_model(name)


def is_beside_model(name: str) -> bool:
    return any(matches("others", name))


def key_beside(name: str, step: int | None) -> str | None:
    """Return the keys that the contents of a file of this name belong under beside a model; None for other files.

    The model is a directory, or else a file of this `step`.
    """
    for pattern, key in files_beside():
        match = pattern.fullmatch(name)
        if match:
            said = match.groupdict()
            if step == (int(said["step"]) if "step" in said else None):
                return key.format(**said)
    return None


def is_beside_file(name: str) -> bool:
    return any("step" in pattern.groupindex and pattern.fullmatch(name) for pattern, _ in files_beside())


@cache
def files_beside() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), key) for trainer in TRAINERS for pattern, key in trainer.beside.items())


def is_kept(name: str, beside: Iterable[str]) -> bool:
    """Return whether a directory or hidden file goes along as it is, by its name and those that it lies beside."""
    return any(trainer.kept[name] in beside for trainer in TRAINERS if name in trainer.kept)


def step_keys() -> tuple[tuple[str, KeyPath], ...]:
    """Return where a checkpoint says its step: the file, "" for its own entries, and the way to it."""
    return tuple(found for trainer in TRAINERS for found in trainer.step_keys)


def is_tracker(name: str) -> bool:
    return any(name in trainer.trackers for trainer in TRAINERS)


def companion_folders() -> tuple[str, ...]:
    """Return the names of directories in a checkpoint in which some trainer puts config and tokenizer."""
    return tuple(folder for trainer in TRAINERS for folder in trainer.companions)


def metrics_files() -> dict[str, MetricsFile]:
    """Return the files of metrics that trainers leave, by name; ours comes first."""
    return {name: file for trainer in TRAINERS for name, file in trainer.metrics.items()}


def say_unread(names: Iterable[str]) -> str | None:
    """Return what files of these names are, if some trainer's that ckptkit does not read is among them."""
    return look_up("unread", sorted(names))


def hint_on_unread(names: Iterable[str]) -> str | None:
    """Return what to do about files of these names that ckptkit does not read, None if there is nothing to say."""
    return look_up("hints", sorted(names))


def say_opaque(names: Iterable[str]) -> str | None:
    """Return what tensors among these names are that can only be carried as they are, None if there are none."""
    return look_up("opaque", names)


def look_up(table: str, names: Iterable[str]) -> str | None:
    known = [(re.compile(key), words) for trainer in TRAINERS for key, words in getattr(trainer, table).items()]
    return next((words for name in names for pattern, words in known if pattern.fullmatch(name)), None)


def who_wrote(seen: Evidence) -> str | None:
    """Return the name of who wrote a checkpoint, None if nothing tells. Nothing is guessed."""
    return next((name for trainer in TRAINERS if (name := trainer.wrote(seen))), None)


def matches(table: str, name: str) -> Iterator[re.Match[str]]:
    """Match a whole name with all patterns of a table, those of every trainer in turn."""
    return (match for pattern in patterns(table) if (match := pattern.fullmatch(name)))


@cache
def patterns(table: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for trainer in TRAINERS for pattern in getattr(trainer, table))
