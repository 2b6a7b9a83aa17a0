"""Estimate the GPU memory and disk space that training a model needs, from its config alone, without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.errors import NotACheckpoint, Usage
from ckptkit.formats.json_text import not_json_error
from ckptkit.io.file import read_small
from ckptkit.io.path import hint_for_hub_id, means_hub_model, remarks_if_taken_from_hub
from ckptkit.io.stores.hub import translate_download_errors
from ckptkit.layout.dtypes import DTYPES, parse_dtype
from ckptkit.plugins.estimate.memory import STRATEGIES, Architecture, Budget, Setup, make_budget, read_architecture
from ckptkit.summary import Summarized
from ckptkit.training.models.config import SIZES, ModelConfig
from ckptkit.words import format_bytes, format_count, parse_bytes

if TYPE_CHECKING:
    import torch

_CONFIG = "config.json"
_CONFIG_LIMIT = 1 << 24  # bytes; a usual config has a few thousand
_USUAL_LENGTH = 4096
_MOST_GPUS = 1 << 16


@dataclass(frozen=True, slots=True)
class Estimated(Summarized):
    """The memory of a training: one `Budget` per strategy, the bytes of each kind of checkpoint, and notes.

    `gpu_memory` is the memory of a GPU in bytes, None if unknown.
    """

    model: Architecture
    budgets: tuple[Budget, ...]
    disk: Mapping[str, int]
    gpu_memory: int | None
    notes: tuple[str, ...]

    def summary(self) -> Iterator[str]:
        yield f"{self.model.model_type}: {format_count(self.model.numel)} parameters"
        for budget in self.budgets:
            yield f"  {budget.setup.strategy}: {format_bytes(budget.peak)} on each GPU"

    @property
    def largest_unit(self) -> int:
        """Return the bytes of the largest FSDP unit when it is gathered, in the compute dtype."""
        numel = max(self.model.largest_block_numel, self.model.root_unit_numel)
        return numel * self.budgets[0].setup.param_dtype.itemsize

    def fits(self, budget: Budget) -> bool | None:
        """Return whether the budget fits into GPU memory; None if the GPU memory is unknown."""
        return None if self.gpu_memory is None else budget.peak <= self.gpu_memory

    def fits_at(self, budget: Budget) -> int | None:
        """Return the smallest world size, doubled from this one, at which the strategy fits; None if there is none."""
        setup = budget.setup
        while self.gpu_memory is not None and setup.world_size <= _MOST_GPUS:
            if make_budget(self.model, setup).peak <= self.gpu_memory:
                return setup.world_size
            setup = replace(setup, world_size=2 * setup.world_size)
        return None


def estimate(
    model: str | Path | Mapping[str, Any],
    *,
    world_size: int,
    vocab_size: int | None = None,
    untied: bool = False,
    strategy: str | None = None,
    replicas: int | None = None,
    micro_batch_size: int = 1,
    sequence_length: int | None = None,
    param_dtype: str | torch.dtype = "bfloat16",
    master_dtype: str | torch.dtype = "float32",
    recompute_every: int = 1,
    prefetch: int = 1,
    cpu_offload: bool = False,
    gpu_memory: int | str | None = None,
) -> Estimated:
    """Estimate the memory that training `model` needs on each of `world_size` GPUs, and the sizes of its checkpoints.

    `model` is a parsed config.json, its path, a directory that contains one, a Hub id, or a size of the built-in Llama
    such as "8b". For a size, `vocab_size` is by default 256, the bytes, and with `untied` embedding and output weights
    are not shared. Without `strategy`, all strategies are estimated. `replicas` is the number of copies of the model
    with hybrid_shard, by default 2. `sequence_length` is in tokens, by default the model's longest, at most 4096.
    `gpu_memory` is in bytes, or text such as "80GB". For the other options see `Setup` in
    `ckptkit.plugins.estimate.memory`. Raises `Usage` for settings that exclude each other, `Unsupported` for a model of
    unknown sizes.
    """
    asked = () if isinstance(model, Mapping) else remarks_if_taken_from_hub(str(model))
    if not isinstance(model, Mapping) and model in SIZES:
        sized = ModelConfig.of_size(str(model), tied=not untied, vocab_size=vocab_size)
        config: Mapping[str, Any] = json.loads(sized.to_json())
        tied = "tied" if sized.tie_word_embeddings else "untied"
        counted = f"counted `{model}` with a vocabulary of {sized.vocab_size}, {tied}"
        asked = (f"{counted}: change this with --vocab-size and --untied",)
    elif vocab_size is not None or untied:
        message = f"--vocab-size and --untied have no effect: MODEL is not a size ({', '.join(SIZES)})"
        raise Usage(message, hint="drop them")
    else:
        config = model if isinstance(model, Mapping) else load_model_config(str(model))
    architecture = read_architecture(config)
    longest = architecture.max_length
    if longest and sequence_length is not None and sequence_length > longest:
        message = f"--sequence-length: expected at most {longest} (max_position_embeddings), found {sequence_length}"
        raise Usage(message)
    usual_length = min(longest or _USUAL_LENGTH, _USUAL_LENGTH)
    setup = Setup(
        world_size=world_size,
        sequence_length=usual_length if sequence_length is None else sequence_length,
        micro_batch_size=micro_batch_size,
        param_dtype=parse_dtype(param_dtype),
        master_dtype=parse_dtype(master_dtype),
        recompute_every=recompute_every,
        prefetch=prefetch,
        cpu_offload=cpu_offload,
    )
    setups = setups_to_estimate(setup, strategy, replicas)
    return Estimated(
        architecture,
        tuple(make_budget(architecture, variant) for variant in setups),
        checkpoint_bytes_by_kind(architecture, setup),
        None if gpu_memory is None else parse_bytes(gpu_memory),
        (*asked, *notes_on_limits(architecture, setup)),
    )


def setups_to_estimate(setup: Setup, strategy: str | None, replicas: int | None) -> list[Setup]:
    """Return the setup for `strategy`, or for each strategy.

    Without an explicit request, hybrid_shard is left out if the GPUs cannot be divided into replicas.
    """
    if replicas is not None and strategy not in {"hybrid_shard", None}:
        message = f"--strategy: expected hybrid_shard for {replicas} replicas, found {strategy}"
        raise Usage(message, hint="pass --strategy hybrid_shard")
    asked = strategy is not None or replicas is not None
    copies = 2 if replicas is None else replicas
    names = [strategy] if strategy is not None else list(STRATEGIES)
    if not asked and setup.world_size % copies:
        names.remove("hybrid_shard")
    return [replace(setup, strategy=name, replicas=copies) for name in names]


def checkpoint_bytes_by_kind(model: Architecture, setup: Setup) -> dict[str, int]:
    """Return the tensor bytes of each kind of checkpoint; headers and metadata add a few hundred bytes per shard.

    `model` and `model_and_optimizer` are checkpoints of the training loop, in shards or one file: tied weights are
    saved under each of their names, and AdamW saves two states per parameter and a step count. An export has each
    weight once.
    """
    weights = setup.master_dtype.itemsize * model.numel
    stored = weights + setup.master_dtype.itemsize * sum(map(prod, model.tied.values()))
    counts = DTYPES["float32"].itemsize * len(model.parameters)
    return {
        "model": stored,
        "model_and_optimizer": stored + 2 * weights + counts,
        "export_float32": DTYPES["float32"].itemsize * model.numel,
        "export_bfloat16": DTYPES["bfloat16"].itemsize * model.numel,
    }


def notes_on_limits(model: Architecture, setup: Setup) -> Iterator[str]:
    if setup.master_dtype.name == "bfloat16":
        yield (
            "weights stored in bfloat16 lose small updates: at a learning rate of 2e-5 AdamW does not move a weight "
            "of 0.05 at all; store them in float32"
        )
    if not model.computes_like_llama:
        yield f"activations of `{model.model_type}` are counted as if its blocks were Llama's of the same sizes"
    yield "not counted: the CUDA context, NCCL's buffers, and memory that the allocator loses to fragmentation"


def load_model_config(model: str) -> dict[str, Any]:
    """Read the config of `model`: a config.json, a directory with one, or a Hub id (only the config is fetched)."""
    path = Path(model)
    if path.is_dir():
        path = path / _CONFIG
        if not path.is_file():
            raise NotACheckpoint("no config.json in this directory", path=path.parent)
    elif not path.exists():
        if not means_hub_model(model):
            expected = "a size such as 8b, a config.json, a directory with one, or a Hub id like `org/model`"
            raise Usage(f"expected {expected}; found `{model}`", hint=hint_for_hub_id(model))
        from huggingface_hub import hf_hub_download

        with translate_download_errors(model):
            path = Path(hf_hub_download(model, _CONFIG))
    text = read_small(path.resolve(), _CONFIG_LIMIT)  # files in the Hub cache are symbolic links
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise not_json_error(error, text, path) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise NotACheckpoint("expected the config of a model, found no `model_type`", path=path)
    return config
