"""Build the model that a conversion writes, step by step, from the weights in a checkpoint.

The steps are in the order of this file. Each takes a `Model` and returns another one. No step reads or writes tensor
data.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.checkpoints.component import Component
from ckptkit.entry_points import import_object
from ckptkit.layout import Layout
from ckptkit.models.names import KEEP
from ckptkit.state.model import Model
from ckptkit.state.options import MODULE, QUANTIZERS, ConvertOptions
from ckptkit.state.steps import (
    cast_to_requested,
    check_and_drop_unneeded_tensors,
    is_plain_llama,
    open_selected_model,
    record_dtype,
    record_vocabulary_size,
    refuse_duplicate_model,
    restore_key_paths,
    translate_names,
    without_trainer_prefix,
)


def build_model(components: Sequence[Component], options: ConvertOptions) -> Model:  # noqa: C901 - one list of all steps
    """Return the model that will be written: of one component, merged with adapters, or as a mean of several."""
    if options.merge:
        from ckptkit.adapters.merge import merge_adapters

        model = merge_adapters(components, options)
    else:
        model = open_and_join_models(components, options)
        if options.vocab_size is not None:
            model = record_vocabulary_size(model, options.vocab_size)
        if options.from_base:
            from ckptkit.state.base_tensors import copy_from_base

            model = copy_from_base(model, options)
        if options.is_for_hub:
            model = check_and_drop_unneeded_tensors(model, options)
            model = compare_base_and_correct_mtp(model, options)
        if not options.writer.is_model_only:
            model = restore_key_paths(model, options)
    if options.dtype:
        model = cast_to_requested(model, options)
        if options.quantize is None and model.may_be_quantized:
            from ckptkit.state.quantized.dequantize import check_quantized_casts

            model = check_quantized_casts(model, options)
    if model.companions.config is not None:
        model = record_dtype(model, options)
    if options.quantize is not None:
        model = import_object(QUANTIZERS[options.quantize].quantize)(model, options)
    if options.weights:
        from ckptkit.state.mean import average_siblings

        model = average_siblings(model, options)
    is_export = options.writer.is_model_only and options.weights_from is None and not options.merge
    # an export leaves out the low bits of the weights that an optimizer may have
    if model.part.masters is not None or (
        is_export and any(tensor.spec.dtype.name == "int16" for tensor in model.part.layout.tensors.values())
    ):
        from ckptkit.state.master_weights import add_master_recipes, with_note_on_remainders

        model = with_note_on_remainders(model) if model.part.masters is None else add_master_recipes(model)
    return model


def open_and_join_models(components: Sequence[Component], options: ConvertOptions) -> Model:
    """Return the weights in a component under the names that `options` ask for, together with those of more components.

    A component's own fp32 master weights are joined in the same way.
    """
    models = [open_model_with_names(component, options) for component in components]
    if len(models) > 1:
        from ckptkit.state.mean import join_models_to_average

        return join_models_to_average(models)
    (model,) = models
    if model.part.masters is None:
        return model
    from ckptkit.state.master_weights import join_masters

    return join_masters(model, open_model_with_names(model.part, options, model.part.masters))


def open_model_with_names(component: Component, options: ConvertOptions, replacement: Layout | None = None) -> Model:
    """Return the weights in a component, or in a layout `replacement`, under the names that `options` ask for."""
    model = open_selected_model(component, options, replacement)
    if options.is_for_hub:
        refuse_duplicate_model(model)
    if options.quantize is not None or model.may_be_quantized:
        from ckptkit.state.quantized.dequantize import dequantize_if_asked

        model = dequantize_if_asked(model, options)
    if options.wanted_names != KEEP and not options.rename and may_need_renaming(model, options):
        model = without_trainer_prefix(model)
    if may_need_renaming(model, options):
        model = translate_names(model, options.wanted_names, options)
    if options.text_only:
        from ckptkit.state.text_only import extract_text_model

        model = extract_text_model(model)
    return model


def may_need_renaming(model: Model, options: ConvertOptions) -> bool:
    """Return whether the tensors may need other names or rows than they have."""
    is_asked = options.map is not None or options.vocab_size is not None
    return is_asked or not (options.is_for_hub and is_plain_llama(model))


def compare_base_and_correct_mtp(model: Model, options: ConvertOptions) -> Model:
    """Add notes on differences from the base, and correct the number of predictor layers in config.json."""
    # with --text-only, the base has the names of the larger model
    if (options.base or model.config.get("_name_or_path")) and not options.text_only:
        from ckptkit.state.base_tensors import with_base_difference_notes

        model = with_base_difference_notes(model, options)
    if any(word in str(model.config) for word in ("mtp", "nextn")):
        from ckptkit.models.mtp_layers import with_present_mtp_layers

        config, words = with_present_mtp_layers(model.config, model.layout.tensors)
        model = model.with_config(config).with_remarks(*words)
    return model


def choose_model_component(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[Component, tuple[str, ...]]:
    """Return the component with the model to write, and a note if there is an alternative."""
    takes_states = options.salvage or options.weights_from == MODULE or checkpoint.model_component.masters is not None
    exported = None if takes_states else checkpoint.exported_weights
    if exported is None:
        return checkpoint.model_component, ()
    from ckptkit.adapters.find import find_empty_adapter_error  # deferred: rarely needed

    name, states = exported.path.name, checkpoint.model_component.place
    if error := find_empty_adapter_error(exported.layout):
        return checkpoint.model_component, (f"used the states in `{states}`, not `{name}`: {error.message}",)
    return exported, (f"used `{name}`, the exported model; pass `{states}` to use the weights in its states",)
