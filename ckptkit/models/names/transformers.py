"""The names that transformers' models have in memory. Since version 5 they differ from the names on disk.

In memory, experts are fused, the components of a vision-language model have a prefix, and some heads have other names.
transformers' own table translates to the names on disk; it depends on the version and the model type. For the types in
ckptkit's own table, rules do the same without transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.models.expected import ExpectedByTransformers, Form, closest_form, expected_model
from ckptkit.models.names.family import Family
from ckptkit.models.names.rule import Rule
from ckptkit.models.names.sizes import LAYER, Sizes, expert_names_of_type
from ckptkit.models.names.steps import Concatenated
from ckptkit.models.names.translate import Translated, translate_by_rules
from ckptkit.models.transformers_model import NotBuilt, NotInstalled, UnknownType

# types whose experts or prefixes are equal on disk and in memory
_SAME = frozenset(
    {
        *("gpt_oss", "llama4", "llama4_text", "qwen3_vl", "qwen3_vl_text", "gemma4", "gemma4_text", "idefics3"),
        *("smolvlm", "qwen3_5", "qwen3_5_text"),
    }
)


@dataclass(frozen=True, kw_only=True)
class InMemory(Family):
    """The names of transformers' models in memory. The rules are transformers' own table, except for a few types."""

    def has_in_memory_names(self, shapes: Mapping[str, Shape], sizes: Sizes, *, is_likely: bool) -> bool:
        """Return whether tensors have the in-memory names of a model whose names on disk differ.

        `is_likely` is True if some names match the pattern of this family. Raises `Unsupported` if `is_likely` and
        transformers cannot be used, and in any case if transformers knows the type but cannot build the model.
        """
        try:
            forms = expected_model(sizes.config, sizes.ask_base).forms
        except UnknownType:
            return False
        except NotInstalled as error:
            types = {str(sizes.config.get("model_type")), sizes.model_type}
            if types & _SAME or not is_likely:
                return False
            hint = f"{error.hint}, or keep the names with --names keep"
            message = f"the names are those in memory; {error.message}"
            raise Unsupported(message, tensor=next(iter(shapes)), hint=hint) from None
        except Unsupported as error:
            if not (is_likely or isinstance(error, NotBuilt)):
                return False
            error.hint = "fix config.json, or pass --names keep to keep the names of the checkpoint"
            raise
        return any(name in forms[-1].shapes and name not in forms[0].shapes for name in shapes)

    def to_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        """Return the tensors as `save_pretrained` writes them."""
        model = expected_model(sizes.config, sizes.ask_base)
        require_model_shapes(tensors, model.shapes)
        known = {name: tensor for name, tensor in tensors.items() if name in model.shapes}
        if isinstance(model, ExpectedByTransformers):
            from ckptkit.models.conversion_mapping import transform_to_disk_form, transforms_reverted_on_save
            from ckptkit.models.names.tensor_tracing import MovedTensor  # deferred: imports torch

            moved = {name: MovedTensor(tensor) for name, tensor in known.items()}
            on_disk = transform_to_disk_form(
                model.meta, transforms_reverted_on_save(model.meta, model.hub_names), moved
            )
            translated = Translated({name: one.stored for name, one in on_disk.tensors.items()}, on_disk.came_from)
        else:
            translated = translate_experts_by_rules(known, model.forms[0], sizes, to_hub=True)
        for name, olds in translated.came_from.items():
            missing = set(model.forms[0].came_from.get(name, ())) - set(olds)
            if missing:
                raise Mismatch(f"missing: `{olds[0]}` is here, and the two become one tensor", tensor=min(missing))
        return replace(translated, unplaced=tuple(name for name in tensors if name not in known))

    def from_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        """Return tensors from disk as `from_pretrained` has them in memory."""
        model = expected_model(sizes.config, lambda: frozenset(tensors))
        merged: dict[str, list[str]] = {}  # by name in memory, all tensors on disk that become it
        for name, olds in closest_form(model.forms, tensors.keys()).came_from.items():
            for old in olds:
                merged.setdefault(old, []).append(name)
        for names in merged.values():
            present = [name for name in names if name in tensors]
            missing = next((name for name in names if name not in tensors), None)
            if present and missing is not None:
                raise Mismatch(f"missing: `{present[0]}` is here, and the two become one tensor", tensor=missing)
        if isinstance(model, ExpectedByTransformers):
            from ckptkit.models.conversion_mapping import transform_to_memory_form
            from ckptkit.models.names.tensor_tracing import MovedTensor  # deferred: imports torch

            there = transform_to_memory_form(
                model.meta, {name: MovedTensor(tensor) for name, tensor in tensors.items()}
            )
            translated = Translated({name: one.stored for name, one in there.tensors.items()}, there.came_from)
        else:
            translated = translate_experts_by_rules(tensors, model.forms[-1], sizes, to_hub=False)
        known = {name: tensor for name, tensor in translated.tensors.items() if name in model.shapes}
        require_model_shapes(known, model.shapes)
        unplaced = [old for name, olds in translated.came_from.items() if name not in known for old in olds]
        came_from = {name: translated.came_from[name] for name in known}
        return Translated(known, came_from, tuple(unplaced))


def translate_experts_by_rules(
    tensors: Mapping[str, StoredTensor], wanted: Form, sizes: Sizes, *, to_hub: bool
) -> Translated:
    """Return the tensors of a model with experts in another form. Tensors without a rule do not change."""
    same = Translated.of({name: tensor for name, tensor in tensors.items() if name in wanted.shapes})
    others = {name: tensor for name, tensor in tensors.items() if name not in wanted.shapes}
    by_rule = translate_by_rules(others, rules_of_experts(sizes), sizes, to_hub=to_hub)
    unchanged = Translated.of({name: tensors[name] for name in by_rule.unplaced})
    every = (same, by_rule, unchanged)
    return Translated(
        {name: tensor for one in every for name, tensor in one.tensors.items()},
        {name: olds for one in every for name, olds in one.came_from.items()},
    )


def require_model_shapes(tensors: Mapping[str, StoredTensor], shapes: Mapping[str, Shape]) -> None:
    """Raise `Mismatch` for a tensor whose shape differs from the model's."""
    for name, tensor in tensors.items():
        if name in shapes and tensor.spec.shape != shapes[name]:
            message = f"expected shape {list(shapes[name])} (config.json), found {list(tensor.spec.shape)}"
            raise Mismatch(message, tensor=name, hint="check that config.json belongs to this model")


def rules_of_experts(sizes: Sizes) -> tuple[Rule, ...]:
    """Return the rules for the experts of the types in ckptkit's own table."""
    hub, memory = expert_names_of_type(sizes.model_type), f"{LAYER}mlp."
    both = tuple(f"{LAYER}{name}.weight" for name in (hub.gate, hub.up))
    return (
        Rule.of(f"{memory}experts.gate_up_proj", both, Concatenated(2)),
        Rule.of(f"{memory}experts.down_proj", f"{LAYER}{hub.down}.weight"),
        Rule.of(f"{memory}gate.weight", f"{LAYER}{hub.router}.weight"),
    )


TRANSFORMERS = InMemory(
    name="transformers",
    rules=rules_of_experts,
    has_tied_head=None,
    drops=(r"(.*\.)?_extra_state(/.*)?", r"(.*\.)?rotary_emb\.inv_freq"),
)
