"""Describe a model that is not built yet, as the loop needs to know it; chosen by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from ckptkit.errors import Unsupported, Usage
from ckptkit.io.stores.hub import downloading
from ckptkit.models.companions import FILES
from ckptkit.training.models.config import SIZES, ModelConfig, require_known
from ckptkit.training.models.llama import LlamaBlueprint


class Blueprint(Protocol):
    """A model that is not built yet; the built-in Llama and transformers' models each have one."""

    vocab_size: int
    max_length: int  # tokens that a sequence may have
    layers: int  # transformer blocks
    attention_width: int  # query heads times the size of one
    weights: Path | None  # a directory with the weights it was trained to, if it has any

    def build(self) -> nn.Module:
        """Build the model, tied where it should be, on torch's default device: `meta`, when the loop asks."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return its transformer blocks in the order of the forward pass: the units that FSDP gathers and frees."""

    def initialize(self, name: str, module: nn.Module) -> None:
        """Give the parameters and buffers of `module` itself, not of its children, their first values.

        They are whole and on a real device, and hold garbage; torch's random numbers are seeded for this module.
        `name` is the module's in the model.
        """

    def tie(self, model: nn.Module) -> None:
        """Tie again what was tied: moving a model off `meta` undoes it."""

    def logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return logits [batch, length, vocabulary] of int64 token ids [batch, length].

        `positions` int64 [batch, length] count from 0 in each document, and no token sees another document's; None
        is one document per sequence.
        """

    def files(self) -> Mapping[str, bytes]:
        """Return the small files with which others open its weights: config.json and its companions."""


def resolve_model(model: str) -> str:
    """Return `model` for `choose_blueprint`: the same, or the directory that a Hub id was downloaded to.

    One rank does it for all that share a disk. Raises `Usage` where there is no such model.
    """
    require_known(model)
    if model in SIZES or Path(model).exists():
        return model
    from huggingface_hub import snapshot_download

    with downloading(model):
        found = Path(snapshot_download(model, allow_patterns=[*FILES, "model*.safetensors*"], ignore_patterns="*/*"))
    if weights_in(found) is None:
        hint = "download it and `ckptkit convert` its weights, or give a directory with its config.json to start anew"
        raise Unsupported(f"`{model}` does not have safetensors files on the Hub", hint=hint)
    return str(found)


def choose_blueprint(model: str, *, tied: bool = True, vocab_size: int | None = None) -> Blueprint:
    """Return the blueprint of a size name, a Llama's config.json, or a directory with any causal model's config.json.

    `tied` and `vocab_size` (None: bytes) are for a size alone; the others bring their own. A Hub id goes through
    `resolve_model` first. Raises `Usage` where there is no such model and `Unsupported` where it is beyond us.
    """
    if model in SIZES:
        return LlamaBlueprint(ModelConfig.sized(model, tied=tied, vocab_size=vocab_size))
    path = Path(resolve_model(model))
    if path.is_dir():
        return choose_pretrained(path)
    try:
        return LlamaBlueprint(ModelConfig.read(path))
    except Unsupported as error:
        error.hint = f"give the directory, `{path.parent}`, and transformers builds it"
        raise


def choose_pretrained(directory: Path) -> Blueprint:
    """Return the blueprint of a model of transformers, which is imported only here: it is an extra."""
    try:
        from ckptkit.training.models.pretrained import Pretrained
    except ImportError as error:
        hint = "pip install 'ckptkit-fsdp[hf]', or give a size or a Llama's config.json"
        raise Usage(f"a model's directory needs transformers 5: {error}", path=directory, hint=hint) from error
    return Pretrained(directory, weights_in(directory))


def weights_in(directory: Path) -> Path | None:
    """Return the directory if it holds weights in safetensors, else None. Raises `Unsupported` for pickled ones."""
    if any(directory.glob("*.safetensors")):
        return directory
    pickled = next(iter(sorted(directory.glob("pytorch_model*.bin"))), None)
    if pickled is not None:
        hint = "make safetensors files of it with `ckptkit convert`, and give their directory"
        raise Unsupported("the model's weights are pickled", path=pickled, hint=hint)
    return None
