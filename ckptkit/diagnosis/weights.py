"""Find checkpoints without plain weights of one model: no model, several, adapters, quantized, extra state."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.adapters.changes import check_config
from ckptkit.adapters.config import find_adapter_config
from ckptkit.adapters.empty import find_empty
from ckptkit.checkpoints.base_weights import BaseWeights
from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.finding import Finding, Fix, export, is_model, output_path_for
from ckptkit.errors import Corrupt, Mismatch, SeveralModels, Unsupported
from ckptkit.layout.renames import globs_for
from ckptkit.models.known_types import find_embedding
from ckptkit.models.names.weights import find_weights
from ckptkit.models.predictors import predictors_in, with_counts
from ckptkit.models.tokens import warn_of_tokens
from ckptkit.state.quantized.config import read_quantization_config
from ckptkit.state.quantized.find import is_plain

_QUANTIZATION = "quantization_config"
_EXTRA_STATE = "_extra_state"


def find_model(case: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if it is ambiguous which tensors are the model that the user asked for."""
    if case.asked is None:
        return
    try:
        find_weights(case.checkpoint.model_component.layout)
    except SeveralModels as error:
        fix = export(case.checkpoint, include=(error.globs[0],), base=case.base)
        yield Finding("no_model", None, error.message, fix)
    except (Mismatch, Unsupported) as error:
        yield Finding("no_model", None, error.message)


def find_adapters(case: LoadTarget) -> Iterator[Finding]:
    """Yield a finding for each checkpoint with an adapter, and the command that merges it into its base."""
    if case.adapted is None:
        return
    if misfit := adapter_error(case):
        yield Finding("adapter_misfit", misfit.tensor, misfit.message)
        return
    if case.asked is None:
        return
    adapter, model = case.adapted.adapters[0], case.asked.name
    kind = f"{adapter.method} `{adapter.name}` on {', '.join(adapter.targets[:4])}"
    message = f"this is an adapter, {kind}, not a model"
    fix = export(case.checkpoint, merge=True, base=model)
    if case.adapted.base:
        message = f"the weights contain an adapter that is not merged, {kind}, so {model} does not find its names"
    elif case.adapted.is_saved:
        path = case.checkpoint.path
        fix = Fix.of("merge", model, path, output_path_for(path, "model"))
    names = tuple(adapter.entries)
    yield Finding("adapter", names[0], message, fix, names)


def adapter_error(case: LoadTarget) -> Mismatch | Unsupported | None:
    """Return why an adapter fits no base: its matrices or its config contradict each other. None if it fits."""
    if case.adapted is None or case.weights is None or find_empty(case.weights.layout):
        return None
    for adapter in case.adapted.adapters:
        try:
            config = find_adapter_config(case.checkpoint.model_component.path, adapter.name)
            if config is not None:
                check_config(adapter, config)
        except (Mismatch, Unsupported) as error:
            return error
        except Corrupt:
            continue
    return None


def find_quantized(case: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if weights are quantized and the config for the load does not say so."""
    if case.model is None or case.quantization is None or case.model.config.get(_QUANTIZATION):
        return
    if not (case.model.asked or is_model(case.checkpoint)):
        return
    message = f"the weights are quantized ({case.quantization}), but the config of {case.model.name} does not say so"
    yield Finding("quantized", None, message, export(case.checkpoint, dtype=("bf16",), base=case.base))


def find_declared_quantized(case: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the config for the load declares quantized weights, and the weights are plain."""
    asked = case.asked
    config = asked.config if asked else case.checkpoint.companions.config
    method = read_quantization_config(config).method if config else None
    if method is None or case.weights is None or not (asked or is_model(case.checkpoint)):
        return
    if is_plain(case.checkpoint.model_component.layout.specs):
        whose = f"the config of {asked.name}" if asked else "config.json"
        message = f"`{_QUANTIZATION}` in {whose}: expected weights quantized by {method}, found plain ones"
        yield Finding("config_quantized", None, message, export(case.checkpoint, base=case.base))


def find_tokens(case: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the tokenizer of a model has tokens without a row in the embedding."""
    companions = case.checkpoint.companions
    embedding = find_embedding(case.shapes)
    if embedding is not None and case.shapes[embedding] and is_model(case.checkpoint):
        for words in warn_of_tokens(companions, case.shapes[embedding][0]):
            yield Finding("tokens", None, words.partition(";")[0])


def find_extra_state(case: LoadTarget) -> Iterator[Finding]:
    """Yield the `_extra_state` entries of modules, such as fp8 scales, if the target model has other modules."""
    if case.asked is None:
        return
    layout = case.checkpoint.model_component.layout
    names = tuple(name for name in layout.names if _EXTRA_STATE in str(layout.key(name)[-1]).split("/")[0].split("."))
    if names:
        message = f"the state of a module, such as the scales of fp8; {case.asked.name} has another kind of module"
        yield Finding("extra_state", names[0], message, export(case.checkpoint, base=case.base), names)


def find_predictors(case: LoadTarget) -> Iterator[Finding]:
    """Yield a finding if the config.json of a model declares MTP layers that have no tensors."""
    if not is_model(case.checkpoint) or case.weights is None:
        return
    config = case.checkpoint.companions.config or {}
    _, notes = with_counts(config, case.shapes)
    if not notes:
        return
    names = BaseWeights(case.base)() or frozenset() if case.base else frozenset()
    heads = predictors_in(names, config) - case.shapes.keys()
    options = {"base": case.base, "from_base": tuple(globs_for(sorted(heads), names - heads))} if heads else {}
    yield Finding("mtp", None, notes[0].partition(";")[0], export(case.checkpoint, **options))
