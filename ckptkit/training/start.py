"""Start a run: everything between a configuration and the first step. Rank 0 does for all what one rank can do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Mismatch, NotACheckpoint, Occupied, Usage, translate_os_errors
from ckptkit.storage.ranks import Ranks
from ckptkit.training.config import SETTINGS, TrainConfig
from ckptkit.training.data.corpus import open_corpus
from ckptkit.training.data.tokenizer import choose_tokenizer
from ckptkit.training.data.tokens import TokenFile, prepare_tokens
from ckptkit.training.metrics import forget_after
from ckptkit.training.models.blueprint import Blueprint, choose_blueprint, resolve_model
from ckptkit.training.saving.run import Run
from ckptkit.training.trainer import Trainer
from ckptkit.training.weights import load_weights

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of rank 0 for all: the checkpoint to resume, the model's place, and its tokenizer."""

    resume: Path | None
    model: str
    tokenizer: str | None
    vocab_size: int
    tokenizer_files: Mapping[str, bytes]


def start(config: TrainConfig, mesh: DeviceMesh) -> tuple[Trainer, Run]:
    """Make all that a run needs, on every rank, at its first step or at the one that it resumes."""
    if config.batch_size < mesh.size():
        raise Usage(f"batch_size {config.batch_size} leaves some of {mesh.size()} ranks without a sequence")
    ranks = Ranks()
    found = ranks.on_first(partial(find, config))
    blueprint = choose_blueprint(found.model, tied=not config.untied, vocab_size=found.vocab_size)
    require_fit(config, blueprint, found)
    run = make_run(config, {**found.tokenizer_files, **blueprint.files()})
    tokens = ranks.on_first(partial(tokenise, config, found))
    corpus = open_corpus(tokens, length=config.sequence_length, seed=config.seed)
    weights = config.weights or blueprint.weights
    trainer = Trainer(config, blueprint, corpus, mesh, None if found.resume or weights else config.seed)
    if found.resume is not None:
        trainer.load(run, found.resume)
    elif weights is not None:
        load_weights(trainer.sharded, weights, json.loads(blueprint.files()[CONFIG]))
    ranks.on_first(partial(prepare, config, trainer.progress.step, blueprint.files()))
    return trainer, run


def find(config: TrainConfig) -> Findings:
    """Find the checkpoint, the model and the tokenizer, before anything is built."""
    resume = find_resume(config)
    model = resolve_model(config.model)
    own = model if Path(model).is_dir() and any(Path(model).glob("tokenizer*")) else None
    name = config.tokenizer or own
    tokenizer = choose_tokenizer(name)
    return Findings(resume, model, name, tokenizer.vocab_size, tokenizer.files())


def tokenise(config: TrainConfig, found: Findings) -> TokenFile:
    """Return the tokens of the data, in a file of the run that every rank opens."""
    return prepare_tokens(config.data, choose_tokenizer(found.tokenizer), config.run)


def find_resume(config: TrainConfig) -> Path | None:
    """Return the checkpoint to resume, None if there is none. Raises `Occupied` if one must not be resumed."""
    latest = Run(config.run).latest()
    if config.resume is None and latest is not None:
        hint = "go on with `--resume auto`, or name another run"
        raise Occupied("the run has checkpoints already", path=config.run, hint=hint)
    if config.resume is None or (config.resume == "auto" and latest is None):
        return None
    if config.resume != "auto" and not Path(config.resume).exists():
        raise NotACheckpoint("no complete checkpoint to go on from", path=config.resume)
    chosen = latest if config.resume == "auto" and latest else Checkpoint.open(config.resume)
    chosen.require_resumable()
    if not chosen.is_complete:
        raise NotACheckpoint("no complete checkpoint to go on from", path=chosen.path)
    return chosen.path


def require_fit(config: TrainConfig, blueprint: Blueprint, found: Findings) -> None:
    """Raise an error unless model, data and the checkpoint to resume belong together."""
    if config.sequence_length > blueprint.max_length:
        raise Usage(f"sequence_length {config.sequence_length} is beyond the model's {blueprint.max_length} positions")
    if found.vocab_size > blueprint.vocab_size:
        raise Usage(
            f"the tokenizer has {found.vocab_size} tokens, the model {blueprint.vocab_size}",
            hint="give the model's own with `--tokenizer`",
        )
    if found.resume is not None:
        require_same_model(found.resume / CONFIG, blueprint.files()[CONFIG])


def require_same_model(path: Path, text: bytes) -> None:
    """Raise `Mismatch` if a checkpoint's config.json is of another model: its weights may fit, and mean another."""
    with translate_os_errors(path):
        theirs, ours = json.loads(path.read_bytes()), json.loads(text)
    different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if different:
        key = different[0]
        raise Mismatch(
            f"the checkpoint is of another model: its `{key}` is {theirs.get(key)!r}, not {ours.get(key)!r}", path=path
        )


def make_run(config: TrainConfig, files: Mapping[str, bytes]) -> Run:
    """Return the run, to save in as the configuration says."""
    return Run(
        config.run,
        state_dict=config.state_dict,
        background=config.background,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        files=files,
    )


def prepare(config: TrainConfig, step: int, files: Mapping[str, bytes]) -> None:
    """Prepare the run directory: its settings, the model's files, and the metrics of the steps that were taken."""
    with translate_os_errors(config.run):
        config.run.mkdir(parents=True, exist_ok=True)
        (config.run / SETTINGS).write_text(config.to_toml())
        for name, content in files.items():
            (config.run / name).write_bytes(content)
    forget_after(config.run, step)
