"""Start a run: everything between a configuration and the first step. Rank 0 does for all what one rank can do."""

from __future__ import annotations

import json
import math
import socket
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from ckptkit.adapters.names import read_entry
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.run import local_folder
from ckptkit.errors import Mismatch, Usage, translate_os_errors
from ckptkit.io.allocation import make_folder
from ckptkit.io.file import read_small
from ckptkit.io.path import is_remote
from ckptkit.io.small_files import replace_file, require_writable
from ckptkit.storage.ranks import Ranks
from ckptkit.training.config import SETTINGS, TrainConfig
from ckptkit.training.data.corpus import open_corpus
from ckptkit.training.data.tokenizer import choose_tokenizer
from ckptkit.training.data.tokens import TokenFile, prepare_tokens
from ckptkit.training.metrics import forget_after
from ckptkit.training.models.blueprint import Blueprint, choose_blueprint, resolve_model
from ckptkit.training.models.lora import Lora, LoraBlueprint
from ckptkit.training.parallel.precision import param_dtype
from ckptkit.training.parallel.shard import ShardedModel
from ckptkit.training.resume import find_resume, first_readable, load_newest
from ckptkit.training.saving.run import Run
from ckptkit.training.saving.save import ADAPTER
from ckptkit.training.saving.state import are_adapters
from ckptkit.training.trainer import Trainer

_COMPUTED = ".rotary_emb.inv_freq"  # buffers that older checkpoints hold, and every model computes
_PRIME = 2**31 - 1


def load_weights(sharded: ShardedModel, path: Path, config: Mapping[str, Any] | None = None) -> int:
    """Load into a model the weights of the checkpoint, or of the latest one of the run, at `path`, whatever its dtype.

    If they have the names of another family, the config.json beside them or else `config` says what they become.
    Adapters of the model stay as they are; then a checksum of the base is returned, and else 0.

    Raises `Mismatch` where a tensor is missing or of another shape, where the checkpoint has one that the model has
    not, and where two that the model ties differ.
    """
    state: dict[str, Any] = get_model_state_dict(sharded.model)
    tied = {name: state[sharded.first_names[name]] for name in state if read_entry(name) is None}
    unused = storage.load_weights(path, tied, config, cast="allow")
    require_used(unused, path)
    set_model_state_dict(sharded.model, state | tied)
    return checksum(tied) if len(tied) < len(state) else 0


def require_used(unused: Iterable[str], path: Path) -> None:
    """Raise `Mismatch` if a tensor of the checkpoint has no place in the model."""
    strangers = [name for name in unused if not name.endswith(_COMPUTED)]
    if strangers:
        raise Mismatch(
            f"the model does not have {len(strangers)} of the checkpoint's tensors: {', '.join(strangers[:4])}",
            path=path,
            tensor=strangers[0],
            hint="check that the checkpoint is of the same model",
        )


@torch.no_grad()
def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum of tensors, rounded to bf16: the same on any ranks, and whatever dtype they are held in.

    It is of the sum of each row, times its number. A collective.
    """
    names = sorted(tensors)
    sums = torch.stack([sum_of_rows(tensors[name]) for name in names])
    dist.all_reduce(sums)
    return zlib.crc32(str(list(zip(names, (sums % _PRIME).tolist(), strict=True))).encode())


def sum_of_rows(tensor: Tensor) -> Tensor:
    """Return what this rank adds to the sum of a tensor's rows, as bits, each times its number, modulo a prime."""
    local, is_mine = tensor, dist.get_rank() == 0
    numbers = torch.arange(1, 1 + (tensor.shape or (1,))[0], device=tensor.device)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        local, place = tensor.to_local(), mesh.get_coordinate() or ()
        # src_data_rank=None: every rank cuts its own copy, nothing is sent
        numbers = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()
        is_mine = not any(at for at, how in zip(place, placements, strict=True) if isinstance(how, Replicate))
    bits = local.reshape(local.shape or (1,)).to(torch.bfloat16).view(torch.int16)
    rows = bits.reshape(len(bits), math.prod(bits.shape[1:]))
    sums = rows.sum(1, dtype=torch.int64) % _PRIME * numbers % _PRIME
    total: Tensor = sums.sum() * is_mine % _PRIME
    return total


CONFIG = "config.json"
_LIMIT = 1 << 24  # bytes of it


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of rank 0 for all: the checkpoint to resume, the model's place, and its tokenizer.

    `candidates` are all checkpoints that can be resumed, newest first; `resume` is the first with undamaged metadata.
    """

    candidates: Sequence[Path]
    resume: Path | None
    model: str
    tokenizer: str | None
    vocab_size: int
    tokenizer_files: Mapping[str, bytes]
    needs_base: bool  # the checkpoint has adapters alone


def start(config: TrainConfig, mesh: DeviceMesh, warn: Callable[[str], None] = warnings.warn) -> tuple[Trainer, Run]:
    """Make all that a run needs, on every rank, at its first step or at the one that it resumes.

    `warn` hears of damaged checkpoints that were skipped.
    """
    if config.batch_size < mesh.size():
        raise Usage(f"batch_size: expected at least {mesh.size()}, a sequence for each rank, found {config.batch_size}")
    ranks = Ranks()
    found = ranks.on_first(partial(find, config))
    blueprint = choose_blueprint(found.model, tied=not config.untied, vocab_size=found.vocab_size)
    weights = config.weights or blueprint.weights
    if config.lora_rank is not None:
        require_base(config, weights, found)
        blueprint = with_adapters(config, config.lora_rank, blueprint, mesh.device_type)
    require_fit(config, blueprint, found)
    run = make_run(config, {**found.tokenizer_files, **blueprint.files()})
    tokens = share_tokens(config, found, ranks)
    corpus = open_corpus(tokens, length=config.sequence_length, seed=config.seed)
    trainer = Trainer(config, blueprint, corpus, mesh, None if found.resume or weights else config.seed)
    if weights is not None and (found.resume is None or found.needs_base):
        trainer.progress.base = load_weights(trainer.sharded, weights, json.loads(blueprint.files()[CONFIG]))
    if found.resume is not None:
        load_newest(trainer, run, found.candidates, ranks, warn)
    ranks.on_first(partial(prepare, config, trainer.progress.step, blueprint.files()))
    return trainer, run


def find(config: TrainConfig) -> Findings:
    """Find the checkpoint, the model and the tokenizer, before anything is built; and write to the run's store."""
    candidates = find_resume(config)
    require_writable(config.run)
    resume = first_readable(candidates) if candidates else None
    model = resolve_model(config.model)
    own = model if Path(model).is_dir() and any(Path(model).glob("tokenizer*")) else None
    name = config.tokenizer or own
    tokenizer = choose_tokenizer(name)
    needs_base = config.lora_rank is not None and resume is not None and has_adapters_alone(resume)
    return Findings(candidates, resume, model, name, tokenizer.vocab_size, tokenizer.files(), needs_base)


def has_adapters_alone(path: Path) -> bool:
    return are_adapters(Checkpoint.open(path).weights.layout.tensors)


def share_tokens(config: TrainConfig, found: Findings, ranks: Ranks) -> TokenFile:
    """Return the tokens of the data, in a file that every rank opens: in the run, or one of this machine.

    Raises `Mismatch` if machines have other data.
    """
    tokens = ranks.on_first(partial(tokenize, config, found))
    if not is_remote(config.run):
        return tokens
    machines = ranks.gather(socket.gethostname())
    is_first_here = machines.index(socket.gethostname()) == ranks.rank
    ranks.together(lambda: tokenize(config, found) if is_first_here else None)  # where rank 0's is not to be seen
    tokens = ranks.together(partial(tokenize, config, found))
    for machine, checksum in zip(machines, ranks.gather(tokens.checksum), strict=True):
        if checksum != tokens.checksum:
            hint = "give all machines the same files"
            raise Mismatch(
                f"the data on {machine} differs from the data on {socket.gethostname()}", path=config.data, hint=hint
            )
    return tokens


def tokenize(config: TrainConfig, found: Findings) -> TokenFile:
    """Return the tokens of the data, in a file in the run or, where that is in a store, of this machine."""
    return prepare_tokens(config.data, choose_tokenizer(found.tokenizer), local_folder(config.run))


def require_fit(config: TrainConfig, blueprint: Blueprint, found: Findings) -> None:
    """Raise an error unless model, data and the checkpoint to resume belong together."""
    if config.sequence_length > blueprint.max_length:
        raise Usage(
            f"sequence_length: expected at most {blueprint.max_length} (positions of the model), found "
            f"{config.sequence_length}"
        )
    if found.vocab_size > blueprint.vocab_size:
        raise Usage(
            f"expected a tokenizer of at most {blueprint.vocab_size} tokens as in the model, found {found.vocab_size}",
            hint="give the model's own with `--tokenizer`",
        )
    if found.resume is not None:
        require_same(found.resume / CONFIG, blueprint.files()[CONFIG], "model")
        require_same_adapters(found.resume / ADAPTER_CONFIG, blueprint.files().get(ADAPTER_CONFIG))


def require_same_adapters(path: Path, text: bytes | None) -> None:
    """Raise `Mismatch` if a checkpoint's adapters, by their config at `path`, are not those that are to be trained."""
    if path.exists() and text is not None:
        require_same(path, text, "adapter", but=("base_model_name_or_path",))
    elif path.exists():
        raise Mismatch("the checkpoint has adapters", path=path, hint="continue with its `--lora-rank`")
    elif text is not None:
        message = "the checkpoint has no adapters to continue with"
        raise Mismatch(message, path=path.parent, hint="start from its weights: `--weights`, and another run")


def require_same(path: Path, text: bytes, what: str, but: Collection[str] = ()) -> None:
    """Raise `Mismatch` if a checkpoint's config is of another model, or adapter: its weights may fit all the same."""
    with translate_os_errors(path):
        path.stat()  # a missing file is said to be missing
    theirs, ours = json.loads(read_small(path, _LIMIT)), json.loads(text)
    different = sorted(key for key in (theirs.keys() | ours.keys()) - {*but} if theirs.get(key) != ours.get(key))
    if different:
        key = different[0]
        raise Mismatch(
            f"the checkpoint has another {what}: expected `{key}` {ours.get(key)!r}, found {theirs.get(key)!r}",
            path=path,
        )


def require_base(config: TrainConfig, weights: Path | None, found: Findings) -> None:
    """Raise `Usage` where adapters are saved, or were, without a base that is anywhere else."""
    if weights is None and (config.state_dict == ADAPTER or found.needs_base):
        raise Usage(
            "adapters are useless without the weights that they were trained on",
            path=found.resume,
            hint="give these with `--weights`, or as a `--model` that has some; or save `--state-dict sharded`",
        )


def with_adapters(config: TrainConfig, rank: int, model: Blueprint, device_type: str) -> Blueprint:
    """Return the blueprint of a model with adapters as the configuration has them."""
    base = config.weights or (config.model if model.weights else None)
    lora = Lora(rank, config.lora_alpha, config.lora_targets, config.seed)
    return LoraBlueprint(model, lora, param_dtype(config, device_type), None if base is None else str(base))


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
    """Prepare the run: its settings, the model's files, and the metrics of the steps that were taken."""
    make_folder(config.run)
    for name, content in {SETTINGS: config.to_toml().encode(), **files}.items():
        replace_file(config.run / name, content)
    forget_after(config.run, step)
