"""Start a run: everything between its configuration and the first step.

Rank 0 alone finds checkpoints, downloads models and writes small files, and sends the results to all ranks.
"""

from __future__ import annotations

import json
import math
import socket
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ckptkit import storage
from ckptkit.adapters.config import NAME as ADAPTER_CONFIG
from ckptkit.adapters.names import parse_tensor_name
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import local_directory_of_run
from ckptkit.errors import Mismatch, Occupied, Usage, translate_os_errors
from ckptkit.io.allocation import make_directory
from ckptkit.io.disk import lock_path
from ckptkit.io.file import read_small
from ckptkit.io.locks import acquire_lock, release_lock
from ckptkit.io.path import is_remote
from ckptkit.io.small_files import replace_file, require_writable_store
from ckptkit.models.companions import CONFIG
from ckptkit.storage.ranks import Ranks
from ckptkit.training.config import SETTINGS, TrainConfig
from ckptkit.training.data.batches import open_corpus
from ckptkit.training.data.tokenizer import choose_tokenizer
from ckptkit.training.data.tokens import TokenFile, prepare_tokens
from ckptkit.training.metrics import drop_metrics_after_step
from ckptkit.training.models.blueprint import Blueprint, choose_blueprint, download_if_hub_id
from ckptkit.training.models.lora import Lora, LoraBlueprint
from ckptkit.training.resume import find_resume_candidates, first_readable_checkpoint, load_newest_undamaged
from ckptkit.training.saving.run import Run
from ckptkit.training.saving.save import ADAPTER
from ckptkit.training.saving.state import are_adapter_names
from ckptkit.training.shard import ShardedModel, param_dtype
from ckptkit.training.trainer import Trainer

_LIMIT = 1 << 24  # bytes of a config.json
_COMPUTED = ".rotary_emb.inv_freq"  # a buffer in checkpoints of older transformers; every model computes it itself
_PRIME = 2**31 - 1  # so small that the product of two residues fits into int64


def load_and_checksum_initial_weights(sharded: ShardedModel, path: Path, config: Mapping[str, Any]) -> int:
    """Load the weights at `path`, a checkpoint or a run (its latest checkpoint), into a model; casts dtypes.

    Names of another family are translated with the config.json next to the weights, or else with `config`. Adapters of
    the model keep their values. Returns a checksum of the loaded base weights if the model has adapters, else 0.

    Raises `Mismatch` if a tensor is missing or has another shape, if the checkpoint has a tensor that the model does
    not have, or if two tied tensors differ in the checkpoint.
    """
    state: dict[str, Any] = get_model_state_dict(sharded.model)
    tied = {name: state[sharded.first_names[name]] for name in state if parse_tensor_name(name) is None}
    unused = storage.load_weights(path, tied, config, cast="allow")
    unexpected = [name for name in unused if not name.endswith(_COMPUTED)]
    if unexpected:
        raise Mismatch(
            f"the model does not have {len(unexpected)} of the checkpoint's tensors: {', '.join(unexpected[:4])}",
            path=path,
            tensor=unexpected[0],
            hint="check that the checkpoint is of the same model",
        )
    set_model_state_dict(sharded.model, state | tied)
    return checksum_across_ranks(tied) if len(tied) < len(state) else 0


@torch.no_grad()
def checksum_across_ranks(tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum of tensors that does not depend on their sharding or dtype; a collective.

    Each tensor is rounded to bf16. The bits of each row are summed as integers and multiplied by the row number; the
    sum of these products is taken modulo a prime. The checksum is the CRC-32 of the names and sums.
    """
    names = sorted(tensors)
    summands = []
    for tensor in (tensors[name] for name in names):
        local, is_counted = tensor, dist.get_rank() == 0
        numbers = torch.arange(1, 1 + (tensor.shape or (1,))[0], device=tensor.device)
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            local, coordinate = tensor.to_local(), mesh.get_coordinate() or ()
            # src_data_rank=None: every rank slices its own copy, without communication
            numbers = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()
            # count only the first replica
            replicas = (at for at, kind in zip(coordinate, placements, strict=True) if isinstance(kind, Replicate))
            is_counted = not any(replicas)
        bits = local.reshape(local.shape or (1,)).to(torch.bfloat16).view(torch.int16)
        rows = bits.reshape(len(bits), math.prod(bits.shape[1:]))
        row_sums = rows.sum(1, dtype=torch.int64) % _PRIME * numbers % _PRIME
        summands.append(row_sums.sum() * is_counted % _PRIME)
    sums = torch.stack(summands)
    dist.all_reduce(sums)
    return zlib.crc32(str(list(zip(names, (sums % _PRIME).tolist(), strict=True))).encode())


@dataclass(frozen=True, slots=True)
class Findings:
    """What rank 0 finds for all ranks: the checkpoint to resume, the path of the model, and the tokenizer.

    `candidates` are the checkpoints to resume from, newest first; `resume` is the first with undamaged metadata.
    """

    candidates: Sequence[Path]
    resume: Path | None
    model: str
    tokenizer: str | None
    vocab_size: int
    tokenizer_files: Mapping[str, bytes]
    needs_base: bool  # the checkpoint to resume has only adapters, so base weights must be loaded too


def build_trainer_and_run(
    config: TrainConfig, mesh: DeviceMesh, warn: Callable[[str], None] = warnings.warn
) -> tuple[Trainer, Run]:
    """Build the trainer and the run on every rank, at step 0 or at the step of the resumed checkpoint.

    Calls `warn` with a message for each damaged checkpoint that was skipped.
    """
    if config.batch_size < mesh.size():
        message = f"--batch-size: expected at least {mesh.size()}, a sequence for each rank, found {config.batch_size}"
        raise Usage(message)
    ranks = Ranks()
    findings = ranks.run_on_first_rank(partial(resolve_training_inputs, config))
    blueprint = choose_blueprint(findings.model, tied=not config.untied, vocab_size=findings.vocab_size)
    weights = config.weights or blueprint.weights
    if config.lora_rank is not None:
        if weights is None and (config.state_dict == ADAPTER or findings.needs_base):
            raise Usage(
                "the checkpoints would contain only adapters, and no file would have the weights of their base",
                path=findings.resume,
                hint="pass --weights, or a --model with weights, or --state-dict sharded",
            )
        base = config.weights or (config.model if blueprint.weights else None)
        lora = Lora(config.lora_rank, config.lora_alpha, config.lora_targets, config.seed)
        dtype = param_dtype(config, mesh.device_type)
        blueprint = LoraBlueprint(blueprint, lora, dtype, None if base is None else str(base))
    require_inputs_fit(config, blueprint, findings)
    run = make_run(config, {**findings.tokenizer_files, **blueprint.model_files()})
    tokens = token_file_for_ranks(config, findings, ranks)
    corpus = open_corpus(tokens, length=config.sequence_length, seed=config.seed)
    # no seed: the weights are loaded next, so initializing them would be wasted
    trainer = Trainer(config, blueprint, corpus, mesh, None if findings.resume or weights else config.seed)
    if weights is not None and (findings.resume is None or findings.needs_base):
        trainer.progress.base = load_and_checksum_initial_weights(
            trainer.sharded, weights, json.loads(blueprint.model_files()[CONFIG])
        )
    if findings.resume is not None:
        load_newest_undamaged(trainer, run, findings.candidates, ranks, warn)
    # only after a successful load, and only if steps remain: otherwise the run keeps its old settings and metrics
    if trainer.progress.step < config.steps:
        ranks.run_on_first_rank(partial(prepare_run_directory, config, trainer.progress.step, blueprint.model_files()))
    return trainer, run


@contextmanager
def locked_run(run: Path) -> Iterator[None]:
    """Lock a local run inside the block. Raises `Occupied`, on all ranks, if another training has locked it."""
    path, ranks = lock_path(run / "train"), Ranks()

    def lock() -> int:
        make_directory(run)
        with translate_os_errors(run):
            try:
                return acquire_lock(path)
            except Occupied as error:
                hint = "wait for it to end, or pass another run"
                raise Occupied("another `ckptkit train` is saving to this run", path=run, hint=hint) from error

    locked = None if is_remote(run) else ranks.run_on_first_rank(lock)
    try:
        yield
    finally:
        if locked is not None and ranks.rank == 0:
            release_lock(locked, path)
            with suppress(OSError):  # it is empty if the training could not start
                run.rmdir()


def resolve_training_inputs(config: TrainConfig) -> Findings:
    """Find the checkpoint, the model and the tokenizer, and check that the run's directory is writable."""
    candidates = find_resume_candidates(config)
    require_writable_store(config.run)
    resume = first_readable_checkpoint(candidates) if candidates else None
    model = download_if_hub_id(config.model)
    models_tokenizer = model if Path(model).is_dir() and any(Path(model).glob("tokenizer*")) else None
    name = config.tokenizer or models_tokenizer
    tokenizer = choose_tokenizer(name)
    needs_base = False
    if config.lora_rank is not None and resume is not None:
        needs_base = are_adapter_names(Checkpoint.open(resume).weights.layout.tensors)
    return Findings(candidates, resume, model, name, tokenizer.vocab_size, tokenizer.files(), needs_base)


def token_file_for_ranks(config: TrainConfig, findings: Findings, ranks: Ranks) -> TokenFile:
    """Return the token file of the data: in a local run one file for all ranks, else one file per machine.

    Raises `Mismatch` if the data differs between machines.
    """

    def prepare() -> TokenFile:
        # in the run or, for a run in a store, in a local directory
        return prepare_tokens(config.data, choose_tokenizer(findings.tokenizer), local_directory_of_run(config.run))

    tokens = ranks.run_on_first_rank(prepare)
    if not is_remote(config.run):
        return tokens
    machines = ranks.gather_values(socket.gethostname())
    is_first_here = machines.index(socket.gethostname()) == ranks.rank
    # One rank per machine writes the file of its machine, then the others find it there.
    ranks.run_on_all_ranks(lambda: prepare() if is_first_here else None)
    tokens = ranks.run_on_all_ranks(prepare)
    for machine, checksum in zip(machines, ranks.gather_values(tokens.checksum), strict=True):
        if checksum != tokens.checksum:
            hint = "copy the same files to all machines"
            raise Mismatch(
                f"the data on {machine} differs from the data on {socket.gethostname()}", path=config.data, hint=hint
            )
    return tokens


def require_inputs_fit(config: TrainConfig, blueprint: Blueprint, findings: Findings) -> None:
    """Raise `Usage` or `Mismatch` unless model, data, tokenizer and the checkpoint to resume fit together."""
    if config.sequence_length > blueprint.max_length:
        raise Usage(
            f"--sequence-length: expected at most {blueprint.max_length} (positions of the model), found "
            f"{config.sequence_length}"
        )
    if findings.vocab_size > blueprint.vocab_size:
        raise Usage(
            f"expected a tokenizer of at most {blueprint.vocab_size} tokens as in the model, "
            f"found {findings.vocab_size}",
            hint="pass the model's own tokenizer with --tokenizer",
        )
    if findings.resume is None:
        return
    require_same_config(findings.resume / CONFIG, blueprint.model_files()[CONFIG], "model")
    path, text = findings.resume / ADAPTER_CONFIG, blueprint.model_files().get(ADAPTER_CONFIG)
    if path.exists() and text is not None:
        require_same_config(path, text, "adapter", ignored_keys=("base_model_name_or_path",))
    elif path.exists():
        rank = json.loads(read_small(path, _LIMIT)).get("r", "R")
        message = "the checkpoint has LoRA adapters, but --lora-rank is missing"
        raise Mismatch(message, path=path, hint=f"pass --lora-rank {rank}")
    elif text is not None:
        message = "expected LoRA adapters in the checkpoint to resume, found none"
        hint = f"train into a new run with --weights {path.parent}"
        raise Mismatch(message, path=path.parent, hint=hint)


def require_same_config(path: Path, expected_content: bytes, kind: str, ignored_keys: Collection[str] = ()) -> None:
    """Raise `Mismatch` if the config at `path` differs from `expected_content` in a key outside `ignored_keys`.

    Equal tensor shapes are not enough: a model with another `rope_theta`, for example, would train on silently.
    """
    with translate_os_errors(path):
        path.stat()  # reports a missing file as missing
    theirs, ours = json.loads(read_small(path, _LIMIT)), json.loads(expected_content)
    different = sorted(
        key for key in (theirs.keys() | ours.keys()) - {*ignored_keys} if theirs.get(key) != ours.get(key)
    )
    if different:
        key = different[0]
        raise Mismatch(
            f"the checkpoint has another {kind}: expected {ours.get(key)!r} as `{key}`, found {theirs.get(key)!r}",
            path=path,
        )


def make_run(config: TrainConfig, files: Mapping[str, bytes]) -> Run:
    """Return the run with the format and retention rules of `config`. `files` are written into every checkpoint."""
    return Run(
        config.run,
        state_dict=config.state_dict,
        background=config.background,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        files=files,
    )


def prepare_run_directory(config: TrainConfig, step: int, files: Mapping[str, bytes]) -> None:
    """Write the settings and model files into the run, and drop metrics of steps after `step`."""
    make_directory(config.run)
    for name, content in {SETTINGS: config.to_toml().encode(), **files}.items():
        replace_file(config.run / name, content)
    drop_metrics_after_step(config.run, step)
