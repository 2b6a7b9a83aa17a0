"""Find checkpoints without plain weights of one model: no model, several, adapters, quantized, extra state."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.adapters.config import find_adapter_config
from ckptkit.adapters.find import find_empty_adapter_error
from ckptkit.adapters.weight_updates import check_adapter_fits_config, require_saved_modules
from ckptkit.errors import Corrupt, Mismatch, SeveralModels, Unsupported
from ckptkit.layout.renames import globs_for
from ckptkit.models.architectures import find_embedding
from ckptkit.models.mtp_layers import mtp_tensor_names, with_present_mtp_layers
from ckptkit.models.names.weights import find_weights
from ckptkit.models.token_ids import warn_of_tokens_without_row
from ckptkit.plugins.doctor.finding import Finding, Fix, consolidate_fix, has_loadable_weight_files, output_path_for
from ckptkit.plugins.doctor.load_target import LoadTarget
from ckptkit.state.base_tensors import BaseWeights
from ckptkit.state.quantized.config import read_quantization_config
from ckptkit.state.quantized.find import has_no_quantized_tensor

_QUANTIZATION = "quantization_config"
_EXTRA_STATE = "_extra_state"


def find_ambiguous_model(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if it is ambiguous which tensors are the model that the user asked for."""
    if target.asked is None:
        return
    try:
        find_weights(target.checkpoint.model_component.layout)
    except SeveralModels as error:
        fix = consolidate_fix(target.checkpoint, include=(error.globs[0],), base=target.base)
        yield Finding("no_model", None, error.message, fix)
    except (Mismatch, Unsupported) as error:
        yield Finding("no_model", None, error.message)


def find_unmerged_adapters(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding for each checkpoint with an adapter, and the command that merges it into its base."""
    if target.adapters_in_model is None:
        return
    if misfit := find_adapter_error(target):
        yield Finding("adapter_misfit", misfit.tensor, misfit.message)
        return
    if target.asked is None:
        return
    adapter, model = target.adapters_in_model.adapters[0], target.asked.name
    kind = f"{adapter.method} `{adapter.name}` on {', '.join(adapter.target_suffixes[:4])}"
    message = f"this is an adapter, {kind}, not a model"
    fix = consolidate_fix(target.checkpoint, merge=True, base=model)
    if target.adapters_in_model.base:
        message = f"the weights contain an adapter that is not merged, {kind}, so {model} does not find its names"
    elif target.adapters_in_model.is_saved:
        path = target.checkpoint.path
        fix = Fix.of("merge", model, path, output_path_for(path, "model"))
    names = tuple(adapter.entries)
    yield Finding("adapter", names[0], message, fix, names)


def find_adapter_error(target: LoadTarget) -> Mismatch | Unsupported | None:
    """Return why an adapter fits no base: its matrices or its config contradict each other. None if it fits."""
    if target.adapters_in_model is None or target.weights is None or find_empty_adapter_error(target.weights.layout):
        return None
    for adapter in target.adapters_in_model.adapters:
        try:
            config = find_adapter_config(target.checkpoint.model_component.path, adapter.name)
            if config is not None:
                check_adapter_fits_config(adapter, config)
                require_saved_modules(adapter, config)
        except (Mismatch, Unsupported) as error:
            return error
        except Corrupt:
            continue
    return None


def find_undeclared_quantized(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if weights are quantized and the config for the load does not say so."""
    if target.model is None or target.quantization is None or target.model.config.get(_QUANTIZATION):
        return
    if not (target.model.asked or has_loadable_weight_files(target.checkpoint)):
        return
    message = (
        f"the weights are quantized ({target.quantization}), but the config of {target.model.name} does not say so"
    )
    yield Finding("quantized", None, message, consolidate_fix(target.checkpoint, dtype=("bf16",), base=target.base))


def find_declared_quantized(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the config for the load declares quantized weights, and the weights are plain."""
    asked = target.asked
    config = asked.config if asked else target.checkpoint.companions.config
    method = read_quantization_config(config).method if config else None
    if method is None or target.weights is None or not (asked or has_loadable_weight_files(target.checkpoint)):
        return
    if has_no_quantized_tensor(target.checkpoint.model_component.layout.specs):
        whose = f"the config of {asked.name}" if asked else "config.json"
        message = f"`{_QUANTIZATION}` in {whose}: expected weights quantized by {method}, found plain ones"
        yield Finding("config_quantized", None, message, consolidate_fix(target.checkpoint, base=target.base))


def find_tokens_without_row(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the tokenizer of a model has tokens without a row in the embedding."""
    companions = target.checkpoint.companions
    embedding = find_embedding(target.shapes)
    if embedding is not None and target.shapes[embedding] and has_loadable_weight_files(target.checkpoint):
        for words in warn_of_tokens_without_row(companions, target.shapes[embedding][0]):
            yield Finding("tokens", None, words.partition(";")[0])


def find_extra_state(target: LoadTarget) -> Iterator[Finding]:
    """Yield the `_extra_state` entries of modules, such as fp8 scales, if the target model has other modules."""
    if target.asked is None:
        return
    layout = target.checkpoint.model_component.layout
    names = tuple(name for name in layout.names if _EXTRA_STATE in str(layout.key(name)[-1]).split("/")[0].split("."))
    if names:
        message = f"the state of a module, such as the scales of fp8; {target.asked.name} has another kind of module"
        yield Finding("extra_state", names[0], message, consolidate_fix(target.checkpoint, base=target.base), names)


def find_missing_mtp_layers(target: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the config.json of a model declares MTP layers that have no tensors."""
    if not has_loadable_weight_files(target.checkpoint) or target.weights is None:
        return
    config = target.checkpoint.companions.config or {}
    _, notes = with_present_mtp_layers(config, target.shapes)
    if not notes:
        return
    names = BaseWeights(target.base)() or frozenset() if target.base else frozenset()
    heads = mtp_tensor_names(names, config) - target.shapes.keys()
    options = {"base": target.base, "from_base": tuple(globs_for(sorted(heads), names - heads))} if heads else {}
    yield Finding("mtp", None, notes[0].partition(";")[0], consolidate_fix(target.checkpoint, **options))
