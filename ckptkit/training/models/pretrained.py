"""Build a causal language model of transformers from a directory's config.json, without running code in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from ckptkit.errors import NotACheckpoint, Unsupported
from ckptkit.models.companions import find_companions_in
from ckptkit.training.models.llama import causal_document_mask


class Pretrained:
    """The `Blueprint` of a model of transformers, built in fp32; see `ckptkit.training.models.blueprint`.

    `directory` has the config.json. `weights`, usually the same directory, has the weights to start from, if any.
    """

    def __init__(self, directory: Path, weights: Path | None = None) -> None:
        companions = find_companions_in(directory, follow_links=True)  # the Hub's cache consists of symbolic links
        if companions is None:
            raise NotACheckpoint("no config.json of a model in the directory", path=directory)
        self.directory = directory
        self.weights = weights
        with transformers_errors_translated(directory):
            self.config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            text = self.config.get_text_config()
            self.vocab_size = int(text.vocab_size)
            self.max_length = int(getattr(text, "max_position_embeddings", sys.maxsize))
            self.layers = int(text.num_hidden_layers)
            self.attention_width = attention_width(text)
        if getattr(self.config, "quantization_config", None) is not None:
            hint = "pass a directory with dequantized weights, and without `quantization_config` in its config.json"
            raise Unsupported("the model is quantized: such weights cannot be trained", path=directory, hint=hint)
        self._files = companions.files
        self._is_checked = False  # True once `document_separation_checked` has passed for a batch

    def build(self) -> nn.Module:
        """Build the model with transformers, in training mode, with the dropout of its config."""
        with transformers_errors_translated(self.directory):
            model: nn.Module = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        return model

    def transformer_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the transformer blocks (`_no_split_modules`) in the order of the forward pass."""
        kinds = set(getattr(model, "_no_split_modules", None) or ())
        blocks = list(outermost_modules_of(model, kinds))
        if not blocks:
            message = (
                f"transformers does not name the transformer blocks of a `{self.config.model_type}`, which FSDP wraps"
            )
            raise Unsupported(message, path=self.directory, hint="use another model")
        return blocks

    @torch.no_grad()
    def initialize_direct_tensors(self, name: str, module: nn.Module) -> None:
        """Initialize `module` with `_init_weights` of the models that contain it, and its buffers as in a new model.

        Raises `Unsupported` if no weights are loaded later and transformers leaves a parameter uninitialized.
        """
        names = name.split(".") if name else []
        ancestors: list[tuple[nn.Module, PreTrainedModel]] = []  # from the root to the module, with their nearest model
        for depth in range(len(names) + 1):
            ancestor = self._model_on_meta.get_submodule(".".join(names[:depth]))
            ancestors.append((ancestor, ancestor if isinstance(ancestor, PreTrainedModel) else ancestors[-1][1]))
        own = dict(module.named_parameters(recurse=False))
        for parameter in own.values():
            parameter.fill_(torch.nan)  # to detect parameters that no rule initializes
        # `_init_weights` of a model may access children of the module it gets, and a parent's call may initialize this
        # module. So put the module's parameters into a full model, whose other parameters are on `meta`.
        with replaced_parameters(self._model_on_meta.get_submodule(name), own):
            for ancestor, owner in reversed(ancestors):
                owner._init_weights(ancestor)
        for key, buffer in module.named_buffers(recurse=False):
            buffer.copy_(self._model_on_meta.get_submodule(name).get_buffer(key))
        for key, parameter in own.items():
            if self.weights is None and parameter.isnan().any():
                raise Unsupported(
                    f"transformers does not know how to initialize it in a `{self.config.model_type}`",
                    path=self.directory,
                    tensor=f"{name}.{key}".lstrip("."),
                    hint="start from weights: put them beside its config.json",
                )

    def tie_weights(self, model: nn.Module) -> None:
        model.tie_weights()  # type: ignore[operator]

    def compute_logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return logits [batch, length, vocab_size] of int64 token ids [batch, length]; see `Blueprint.compute_logits`.

        Raises `Unsupported` for a family in which documents of a packed sequence attend to each other.
        """
        if positions is None:
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
            return logits
        if "position_ids" not in signature(self._model_on_meta.forward).parameters:
            hint = "pass data that is one document, or use another model"
            message = f"a `{self.config.model_type}` does not accept `position_ids`, which packed documents need"
            raise Unsupported(message, path=self.directory, hint=hint)
        # many families do not derive the attention masks from positions
        shape = torch.empty(*positions.shape, 0, device=positions.device)
        # config, embeddings, attention mask, cache (whose name changed in transformers 5.24), positions
        masks = create_masks_for_generate(self._model_on_meta.config, shape, None, None, positions)
        # check once, with the first batch that has a sequence of several documents
        must_check = not self._is_checked and bool((positions[:, 1:] == 0).any())
        with document_separation_checked(self.transformer_blocks(model), positions) if must_check else nullcontext():
            logits = model(input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=False).logits
        self._is_checked |= must_check
        return logits

    def model_files(self) -> Mapping[str, bytes]:
        """Return the config.json of the directory, with its generation config and tokenizer if present."""
        return self._files

    @cached_property
    def _model_on_meta(self) -> Any:
        """Return the model with real buffers on the CPU and parameters on `meta`.

        The buffers come from here, because transformers computes them only when it builds a model.
        """
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), parameters_on_meta():
            torch.manual_seed(0)  # makes random buffers equal on all ranks
            return self.build()


@contextmanager
def document_separation_checked(blocks: Sequence[nn.Module], positions: Tensor) -> Iterator[None]:
    """Raise `Unsupported` if a block runs inside the context and may mix documents of one sequence.

    Checks the attention mask that each block gets, because not every family applies it, and that no block has a
    convolution.
    """
    hidden = ~causal_document_mask(positions)

    def check(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature(type(block).forward).bind(block, *args, **kwargs).arguments
        mask = bound.get("attention_mask", kwargs.get("attention_mask"))
        is_masked = False
        if isinstance(mask, Tensor) and mask.ndim == 4:
            # float masks have huge negative values where a query does not attend to a key
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            is_masked = not bool((visible & hidden).any())
        if not is_masked or any(isinstance(module, nn.Conv1d) for module in block.modules()):
            raise Unsupported(
                f"a `{type(block).__name__}` lets documents that share a sequence see each other",
                hint="pass data that is one document, or use another model",
            )

    hooks = [block.register_forward_pre_hook(check, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def transformers_errors_translated(directory: Path) -> Iterator[None]:
    """Raise `Unsupported` for any error of transformers inside the block."""
    try:
        yield
    except Exception as error:  # each family raises its own types
        text = str(error).strip() or type(error).__name__
        raise Unsupported(f"transformers cannot build it: {text.splitlines()[0]}", path=directory) from error


def attention_width(text_config: Any) -> int:
    """Return the number of query heads times head_dim of the first layer; 0 for a model without attention."""
    layer = getattr(text_config, "per_layer_config", [text_config])[0]
    heads = getattr(layer, "num_attention_heads", None)
    return int(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads)) if heads else 0


def outermost_modules_of(module: nn.Module, class_names: set[str]) -> Iterator[nn.Module]:
    """Yield the outermost modules inside `module` whose class or base class has one of the names `class_names`."""
    for child in module.children():
        if class_names.isdisjoint(
            kind.__name__ for kind in type(child).__mro__
        ):  # FSDP2 replaces classes by subclasses
            yield from outermost_modules_of(child, class_names)
        else:
            yield child


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to `meta` when a module registers it, inside the block, so that only buffers use memory."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:  # noqa: ARG001
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def replaced_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the module's parameters of these names by `parameters` inside the block."""
    own = {key: module.get_parameter(key) for key in parameters}
    for key, parameter in parameters.items():
        setattr(module, key, parameter)
    try:
        yield
    finally:
        for key, parameter in own.items():
            setattr(module, key, parameter)
