"""The interface of models to the training loop, and the choice of a model by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from ckptkit.errors import Unsupported, Usage
from ckptkit.io.stores.hub import translate_download_errors
from ckptkit.models.companions import FILES
from ckptkit.training.models.config import SIZES, ModelConfig, require_known_model
from ckptkit.training.models.llama import LlamaBlueprint


class Blueprint(Protocol):
    """A description of a model that is not built yet: the built-in Llama, or a model of transformers."""

    vocab_size: int
    max_length: int  # tokens per sequence at most
    layers: int  # transformer blocks
    attention_width: int  # number of query heads times head_dim
    weights: Path | None  # a directory with pretrained weights, if there are any

    def build(self) -> nn.Module:
        """Build the model with tied weights on torch's default device; the training loop sets it to `meta`."""

    def transformer_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the transformer blocks, which become FSDP units, in the order of the forward pass."""

    def initialize_direct_tensors(self, name: str, module: nn.Module) -> None:
        """Initialize the direct parameters and buffers of `module`, not those of its children.

        They are unsharded, uninitialized and not on `meta`. The caller has seeded torch for this module. `name` is the
        name of the module in the model.
        """

    def tie_weights(self, model: nn.Module) -> None:
        """Tie the weights again, because moving a model off `meta` unties them."""

    def compute_logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return logits [batch, length, vocabulary] of int64 token ids [batch, length].

        `positions`, int64 [batch, length], count from 0 in each document, and a token attends only to its own document.
        None means one document per sequence.
        """

    def model_files(self) -> Mapping[str, bytes]:
        """Return the model files, by name, that other tools need to load the weights: config.json and others."""


def download_if_hub_id(model: str) -> str:
    """Return `model` unchanged, or for a Hub id the directory that it was downloaded to.

    Call it on one rank per shared disk. Raises `Usage` for an unknown model, and `Unsupported` without safetensors.
    """
    require_known_model(model)
    if model in SIZES or Path(model).exists():
        return model
    from huggingface_hub import snapshot_download

    with translate_download_errors(model):
        directory = Path(
            snapshot_download(model, allow_patterns=[*FILES, "model*.safetensors*"], ignore_patterns="*/*")
        )
    if directory_if_it_has_weights(directory) is None:
        hint = "download it and `ckptkit convert` its weights, or pass a directory with its config.json to start anew"
        raise Unsupported(f"`{model}` does not have safetensors files on the Hub", hint=hint)
    return str(directory)


def choose_blueprint(model: str, *, tied: bool = True, vocab_size: int | None = None) -> Blueprint:
    """Return the blueprint for a size name, a Llama's config.json, or a directory with a causal model's config.json.

    `tied` and `vocab_size` (None: 256, for bytes) apply only to a size name. Pass a Hub id through `download_if_hub_id`
    first. Raises `Usage` for an unknown model, and `Unsupported` for a model that cannot be trained.
    """
    if model in SIZES:
        return LlamaBlueprint(ModelConfig.of_size(model, tied=tied, vocab_size=vocab_size))
    path = Path(download_if_hub_id(model))
    if not path.is_dir():
        try:
            return LlamaBlueprint(ModelConfig.from_config_json(path))
        except Unsupported as error:
            error.hint = f"pass the directory `{path.parent}`: transformers then builds the model"
            raise
    try:
        from ckptkit.training.models.pretrained import Pretrained  # transformers is an optional dependency
    except ImportError as error:
        hint = "pip install 'ckptkit-fsdp[hf]', or pass a size or a Llama's config.json"
        raise Usage(f"a model's directory needs transformers 5: {error}", path=path, hint=hint) from error
    return Pretrained(path, directory_if_it_has_weights(path))


def directory_if_it_has_weights(directory: Path) -> Path | None:
    """Return the directory if it has safetensors files, else None. Raises `Unsupported` for pickled weights."""
    if any(directory.glob("*.safetensors")):
        return directory
    pickled = next(iter(sorted(directory.glob("pytorch_model*.bin"))), None)
    if pickled is not None:
        hint = "make safetensors files of it with `ckptkit convert`, and pass their directory"
        raise Unsupported("the model's weights are pickled", path=pickled, hint=hint)
    return None
