"""Run a transformers model with the tensors of a checkpoint, one block in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.checks.open import LazyCheckpoint
from ckptkit.errors import CkptError, Unsupported, Usage
from ckptkit.layout.dtypes import DType
from ckptkit.models.transformers_model import quiet_transformers
from ckptkit.plugins.prove.model import Logits, Runnable


def choose_token_ids(wanted: Sequence[int] | None, count: int, seed: int, models: Sequence[Runnable]) -> Tensor:
    """Return the token ids to run, shape [1, tokens]: `wanted`, or `count` random ones.

    Raises `Usage` for a token outside the vocabulary of a model.
    """
    size = min(require_vocabulary_size(model) for model in models)
    if wanted is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(size, (1, count), generator=generator)
    beyond = next((token for token in wanted if not 0 <= token < size), None)
    if beyond is not None:
        raise Usage(f"expected tokens below {size}, the size of the vocabulary, found {beyond}")
    return torch.tensor([list(wanted)])


def require_vocabulary_size(model: Runnable) -> int:
    """Return the vocabulary size of a model. Raises `Unsupported` if the model does not take tokens."""
    try:
        return int(model.meta.model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError) as error:
        raise Unsupported("the model does not take tokens", path=model.path) from error


def compare_logits(one: Runnable, two: Runnable, ids: Tensor) -> Logits:
    """Run both models on the same tokens and compare their logits; `two` is the source.

    If dtypes differ, the source runs once more with its weights rounded to the dtypes of `one`. Rounding does not
    explain a difference that remains then.
    """
    ours, theirs = (Forward(model).compute_outputs(ids) for model in (one, two))
    if ours.logits.shape != theirs.logits.shape:
        shapes = f"{list(ours.logits.shape)} and {list(theirs.logits.shape)}"
        raise Unsupported(f"the logits of the models have different shapes, {shapes}", path=one.path)
    dtypes = {name: tensor.spec.dtype for name, tensor in one.layout.tensors.items()}
    is_rounded = dtypes != {name: tensor.spec.dtype for name, tensor in two.layout.tensors.items()}
    alike = Forward(two, dtypes).compute_outputs(ids) if is_rounded else theirs
    a, b = (logits.double().log_softmax(-1) for logits in (ours.logits, theirs.logits))
    # rounding can make a KL slightly negative; NaN counts as an infinite difference
    divergence = (b.exp() * (b - a)).nan_to_num(nan=torch.inf).sum(-1).clamp(min=0)
    first = next(
        (name for name, output in alike.outputs.items() if not is_same_tensor(ours.outputs.get(name), output)), None
    )
    return Logits(
        tokens=divergence.numel(),
        kl=float(divergence.mean()),
        max_kl=float(divergence.max()),
        max_abs=largest_logit_difference(ours, theirs),
        unexplained=largest_logit_difference(ours, alike),
        scale=float(theirs.logits.abs().max()),
        same_choice=int((a.argmax(-1) == b.argmax(-1)).sum()),
        first=first,
        rounded=is_rounded,
    )


def largest_logit_difference(one: Outputs, two: Outputs) -> float:
    return float((one.logits - two.logits).abs().nan_to_num(nan=torch.inf).max())


def is_same_tensor(one: Tensor | None, two: Tensor) -> bool:
    return one is not None and one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())


@dataclass(frozen=True, slots=True)
class Outputs:
    """The logits of a model, shape [tokens, vocabulary], and the output of each block by name, in order."""

    logits: Tensor
    outputs: Mapping[str, Tensor]


@dataclass
class Forward:
    """The forward pass of a model whose tensors are loaded when a block needs them, and freed after it.

    Tensors in `dtypes` are rounded to that dtype first.
    """

    source: Runnable
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    _outputs: dict[str, Tensor] = field(default_factory=dict)

    def compute_outputs(self, ids: Tensor) -> Outputs:
        """Compute in float32 with tokens of shape [1, tokens].

        Raises `Unsupported` if the model cannot run block by block.
        """
        with quiet_transformers(), torch.no_grad():
            model = deepcopy(self.source.meta.model).eval()
            compute_non_persistent_buffers(model, self.source)
            tensors = LazyCheckpoint(self.source.layout)
            for name, block in modules_loaded_together(model):
                self.add_loading_hooks(name, block, tensors)
            extra_inputs = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
            try:
                output = model(input_ids=ids, use_cache=False, **extra_inputs)
            except CkptError:
                raise
            except Exception as error:  # model code of transformers may raise anything
                first = next(iter(str(error).strip().splitlines()), type(error).__name__)
                message = f"transformers cannot run this `{type(model).__name__}` block by block: {first}"
                raise Unsupported(message, path=self.source.path) from error
        logits = output.get("logits", output.get("last_hidden_state"))
        if logits is None:
            raise Unsupported(f"a `{type(model).__name__}` does not return logits", path=self.source.path)
        return Outputs(logits.float().flatten(0, -2), self._outputs)

    def add_loading_hooks(self, name: str, block: nn.Module, tensors: LazyCheckpoint) -> None:
        """Add hooks to a block that load its tensors before it computes and free them after it.

        The second hook also records the output of the block.
        """
        # load a listed block with all submodules: it may use the weights of a submodule without calling it
        owners = block.named_modules(remove_duplicate=False) if is_in_module_list(name) else [("", block)]
        parameters = [
            (".".join(filter(None, (name, inside, own))), owner, own)
            for inside, owner in owners
            for own, _ in saved_tensors_without_submodules(owner)
        ]

        def load(*_: Any) -> None:
            for full, owner, own in parameters:
                load_into_module(owner, own, tensors[full].torch(), self.dtypes.get(full))

        def forget(_block: nn.Module, _args: Any, output: Any) -> None:
            for _, owner, own in parameters:
                free_in_module(owner, own)
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                self._outputs[name] = first.detach()

        block.register_forward_pre_hook(load)
        block.register_forward_hook(forget)


def is_in_module_list(name: str) -> bool:
    """Return whether a module is an element of a ModuleList: its name ends with an index."""
    return name.rpartition(".")[2].isdecimal()


def modules_loaded_together(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose tensors are loaded together: elements of ModuleLists, and modules outside of them."""
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if is_in_module_list(name) or any(True for _ in saved_tensors_without_submodules(module)):
            yield name, module
        if not is_in_module_list(name):
            waiting += [(f"{name}.{child}" if name else child, inside) for child, inside in module.named_children()]


def saved_tensors_without_submodules(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of a module itself, without submodules."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    yield from ((name, buffer) for name, buffer in buffers if name not in module._non_persistent_buffers_set)


def load_into_module(owner: nn.Module, name: str, stored: Tensor, rounded_to: DType | None) -> None:
    """Load a tensor into a module, rounded to a dtype first if one is given; floats become float32."""
    if rounded_to is not None:
        stored = stored.to(getattr(torch, rounded_to.name))
    tensor = empty_in_own_mmap(stored.shape, torch.float32 if stored.is_floating_point() else stored.dtype).copy_(
        stored
    )
    replace_in_module(owner, name, tensor)


def empty_in_own_mmap(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor in its own memory mapping, so that freeing it returns the memory to the system.

    The C allocator may keep freed memory, and would then keep the memory of every block. A mapping also aligns all
    tensors in the same way.
    """
    count = shape.numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def free_in_module(owner: nn.Module, name: str) -> None:
    replace_in_module(owner, name, getattr(owner, name).to("meta"))


def replace_in_module(owner: nn.Module, name: str, tensor: Tensor) -> None:
    is_parameter = isinstance(getattr(owner, name), nn.Parameter)
    setattr(owner, name, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def compute_non_persistent_buffers(model: Any, source: Runnable) -> None:
    """Compute the buffers that no checkpoint contains, such as rotary frequencies, as transformers does.

    Source: transformers/modeling_utils.py, `_move_missing_keys_from_meta_to_device` and `_initialize_missing_keys`.
    Raises `Unsupported` for a buffer that transformers' initialization does not set.
    """
    for module in model.modules():
        for own in sorted(module._non_persistent_buffers_set):
            before = getattr(module, own)
            if before is not None:
                setattr(module, own, sentinel_like(before))
    model.initialize_weights()
    for name, module in model.named_modules():
        for own in module._non_persistent_buffers_set:
            buffer = getattr(module, own)
            if buffer is None or not buffer.numel() or buffer.dtype == torch.bool:
                continue  # cannot tell
            unset = sentinel_like(buffer)
            if torch.equal(buffer.nan_to_num(), unset.nan_to_num()) and torch.equal(buffer.isnan(), unset.isnan()):
                message = f"the value of the buffer `{name}.{own}` is unknown"
                raise Unsupported(f"{message}: transformers' initialization does not set it", path=source.path)


def sentinel_like(buffer: Tensor) -> Tensor:
    # values that no initialization produces: a buffer that still has them was not set
    sentinel = torch.empty(buffer.shape, dtype=buffer.dtype)
    return (
        sentinel.fill_(torch.nan)
        if buffer.is_floating_point()
        else sentinel.fill_(-77 if buffer.dtype.is_signed else 77)
    )
