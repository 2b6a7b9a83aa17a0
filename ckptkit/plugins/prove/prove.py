"""Prove an export: its tensors equal the tensors of its source, and transformers computes the same with both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.checkpoints.model_facts import ModelFacts
from ckptkit.checks.diff import compare_tensors_with_source
from ckptkit.errors import Mismatch, Unsupported, Usage
from ckptkit.io.file import read_small
from ckptkit.io.path import remarks_if_taken_from_hub
from ckptkit.io.progress import Progress
from ckptkit.models.companions import Companions, different_preprocessing_files, find_companions
from ckptkit.models.config_differences import ConfigDifference, describe_differences, rope_parameters_of
from ckptkit.models.transformers_model import find_missing_model_package
from ckptkit.plugins.prove.model import Logits, Runnable
from ckptkit.state.names import NameOptions
from ckptkit.summary import Summarized
from ckptkit.words import count

if TYPE_CHECKING:
    from ckptkit.checks.differences import Diff


_FEWEST = 64  # minimum tokens of a run
_BEYOND = 64  # tokens after a length, so that the changed computation covers several tokens
_MOST = 8192  # maximum tokens of a run: attention is quadratic in it
_MOST_FLOPS = 4e13  # of one forward pass: some minutes on 16 cores
_MOST_LOGITS = 1 << 27  # numbers: 1 GiB in float64
_WINDOW = re.compile(
    r"(sliding|attention|local_attention|attn)_window(_size)?|window_size|attention_chunk_size|index_topk"
)
_POSITIONS = re.compile(
    r"max_((source|target)_)?position(s|_embeddings)|n_(positions|ctx)|(max_)?seq(uence)?_len(gth)?", re.IGNORECASE
)
_RESERVED = 2  # positions that some models leave unused before the first token: RoBERTa up to its padding token
_BY_LENGTH = {  # rope types that change at a length, and the config keys with that length, in order
    "longrope": ("original_max_position_embeddings", "max_position_embeddings"),
    "su": ("original_max_position_embeddings", "max_position_embeddings"),
    "dynamic": ("original_max_position_embeddings", "max_position_embeddings"),
}


def largest_length_thresholds(configs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the lengths in several configs; the maximum for each key."""
    lengths: dict[str, int] = {}
    for key, length in (pair for config in configs for pair in length_thresholds_in(config)):
        lengths[key] = max(length, lengths.get(key, 0))
    return lengths


def length_thresholds_in(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the lengths in a config and its sections at which the computation changes."""
    for key, value in ((str(key), value) for key, value in config.items()):
        if isinstance(value, Mapping) and "vision" not in key and "audio" not in key:
            yield from length_thresholds_in(value)
        elif _WINDOW.fullmatch(key) and type(value) is int and value > 0:
            yield key, value
    rope = rope_parameters_of(config)
    for key in _BY_LENGTH.get(str(rope.get("rope_type")), ()):
        length = rope.get(key, config.get(key))
        if type(length) is int:
            yield key, length
            return


def choose_token_count(configs: Sequence[Mapping[str, Any]]) -> int:
    """Return how many tokens to run: past as many of these lengths as fit."""
    most = min(map(affordable_token_count, configs))
    reached = [length + _BEYOND for length in largest_length_thresholds(configs).values() if length + _BEYOND <= most]
    positions = [number for config in configs if (number := find_position_limit(config)) is not None]
    length = max([_FEWEST, *reached])
    return length if length <= min(positions, default=length) else max(1, min(positions) - _RESERVED)


def find_position_limit(config: Mapping[str, Any]) -> int | None:
    """Return how many positions a model has; None if any number works, as with rotary positions."""
    text = text_section(config)
    if rope_parameters_of(text):
        return None
    numbers = [number for key, number in text.items() if _POSITIONS.fullmatch(key) and type(number) is int]
    return min((number for number in numbers if number > 0), default=None)


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((one for key in ("text_config", "decoder") if isinstance(one := config.get(key), Mapping)), config)


def affordable_token_count(config: Mapping[str, Any]) -> int:
    """Return how many tokens of a model fit into memory and into minutes of computing."""
    text = text_section(config)
    hidden, layers, vocabulary = (int(text.get(key) or 1) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    stored = vocabulary + hidden * layers  # values per token
    flops = 2 * (12 * hidden**2 * layers + hidden * vocabulary)
    return int(min(_MOST, _MOST_LOGITS // stored, _MOST_FLOPS // flops))


_LIMIT = 1 << 24  # bytes of a file of tokens
_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Proved(Summarized):
    """The comparison of the model at `out` with the checkpoint at `source`.

    `tensors` are the differences by component, after casts. `configs` are the keys of config.json that make the two
    compute differently. `unreached` maps keys of config.json, such as `sliding_window`, to lengths that the tested
    tokens did not exceed.
    """

    out: Path
    source: Path
    tensors: tuple[Diff, ...]
    logits: Logits
    configs: tuple[ConfigDifference, ...] = ()
    unreached: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        return not self.differing

    @property
    def differing(self) -> list[str]:
        found = {
            "tensors": not all(diff.is_equal for diff in self.tensors),
            "config.json": any(one.is_certain for one in self.configs),
            "logits": not self.logits.is_ok,
        }
        return [name for name, differs in found.items() if differs]

    def summary(self) -> Iterator[str]:
        if self.configs:
            yield f"config.json differs: {describe_differences(self.configs, str(self.source))}"
        if self.unreached:
            lengths = ", ".join(f"{key} {length:,}" for key, length in self.unreached.items())
            yield f"not reached with {self.logits.tokens:,} tokens: {lengths}; pass more with --tokens FILE"
        tokens = f"tried with {count(self.logits.tokens, 'token')}"
        if self.is_ok:
            rounding = ", up to rounding" if self.logits.rounded else ""
            yield f"proved: {self.out} computes the same as {self.source}{rounding} ({tokens})"
        else:
            yield f"not proved: {self.out} and {self.source} differ in {' and '.join(self.differing)} ({tokens})"


def prove(
    out: Source,
    *,
    against: Source,
    base: str | Path | None = None,
    map: str | Path | None = None,  # noqa: A002 - called as the option
    rename: str | Sequence[str] = (),
    tokens: str | Path | Sequence[int] | None = None,
    seed: int = 0,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Proved:
    """Return whether the Hugging Face model at `out` computes the same as its source, the checkpoint `against`.

    First ckptkit compares the config.json of both, and all tensors, across names and dtypes, as `verify` does. Then
    transformers runs both models in float32 on the same `tokens`: a list of token ids, a file with them, or by default
    random ones from `seed`. The default is 64 tokens, or more than every window and original context of the models, if
    that many fit. At most one block of the model is in memory at a time.

    The config.json of `out` describes the exported model. The source uses the config.json of `base` (a directory or Hub
    id), or else the one next to the checkpoint, or else the one of `out`. `map`, a table of names, and `rename`, rules
    `REGEX=>TEXT`, are the options with which `out` was made. Raises `Unsupported` without transformers and for models
    that it does not know, `Mismatch` if a tensor that config.json describes is missing.
    """
    if missing := find_missing_model_package():
        hint = f"pip install {missing}, or compare only the tensors with `ckptkit verify OUT --against SRC`"
        raise Unsupported(f"prove runs models with {missing}, which is not installed", hint=hint)
    ours, theirs = Checkpoint.open(out), Checkpoint.open(against)
    base_name = None if base is None else str(base)
    our_companions = find_companions(ours.model_component.path, None)
    their_companions = find_companions(theirs.model_component.path, base_name)
    if our_companions.config is None:
        raise Mismatch("no config.json", path=ours.path, hint="pass an exported model, which has a config.json")
    named = NameOptions.of(map, rename, base)
    wanted = parse_token_ids(tokens) if tokens is not None else None
    their_config = our_companions.config if their_companions.config is None else their_companions.config
    our_model, their_model = Runnable.of(ours, our_companions.config), Runnable.of(theirs, their_config, named)
    notes = [
        *remarks_if_taken_from_hub(base),
        *notes_on_unproved(our_companions, their_companions, theirs.path),
        *our_model.remarks,
        *their_model.remarks,
    ]
    differences = compare_tensors_with_source(ours, theirs, allow_cast=True, named=named, jobs=jobs, progress=progress)
    from ckptkit.plugins.prove.forward import choose_token_ids, compare_logits  # imports torch

    described = [model.meta.model.config.to_dict() for model in (our_model, their_model)]
    positions = [number for config in described if (number := find_position_limit(config)) is not None]
    if wanted is not None and len(wanted) > min(positions, default=len(wanted)):
        raise Usage(f"--tokens: expected at most {min(positions)} tokens, the model's positions, found {len(wanted)}")
    ids = choose_token_ids(wanted, choose_token_count(described), seed, (our_model, their_model))
    logits = compare_logits(our_model, their_model, ids)
    return Proved(
        ours.path,
        theirs.path,
        tuple(differences.values()),
        logits,
        configs=ModelFacts.of(ours).compare(ModelFacts.of(theirs, base_name)).differences,
        unreached={
            key: length for key, length in largest_length_thresholds(described).items() if length >= ids.shape[1]
        },
        notes=tuple(notes),
    )


def notes_on_unproved(ours: Companions, theirs: Companions, source: Path) -> Iterator[str]:
    """Yield what the run does not prove: a config without a counterpart, tokenizers that differ."""
    if theirs.config is None:
        hint = "pass --base with the model that the training began with"
        ran = "it ran with the export's config.json, which this run does not prove"
        yield f"{source} has no config.json: {ran}; {hint}"
    if different := different_preprocessing_files(ours, theirs):
        subject = f"{', '.join(different)}: differs from {theirs.found_in}"
        yield f"{subject}; ckptkit did not prove that the models get the same inputs"


def parse_token_ids(given: str | Path | Sequence[int]) -> list[int]:
    """Return token ids from a list, from text like `1,2,3` or `[1, 2, 3]`, or from a file with such text."""
    if not isinstance(given, str | Path):
        return [int(token) for token in given]
    text = str(given)
    if not set(text) <= set("0123456789, []"):
        if not Path(given).is_file():
            raise Usage(f"expected a file or a list of token ids such as 1,2,3; found `{given}`")
        text = read_small(Path(given), _LIMIT).decode(errors="replace")
    words = text.replace(",", " ").strip().removeprefix("[").removesuffix("]").split()
    if not words or not all(word.isdecimal() and len(word) < _DIGITS for word in words):
        raise Usage(f"`{given}` contains no tokens", hint="pass token ids like 1,2,3, or a file with them")
    return [int(word) for word in words]
