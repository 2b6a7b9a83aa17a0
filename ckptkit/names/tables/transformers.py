"""Know the names that transformers' models have in memory, which since version 5 are others than on disk.

Experts are fused in memory, the parts of a vision-language model lie under a prefix, some heads are called otherwise.
What they are called on disk says transformers' own table, which differs by version and type of model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import StoredTensor
from ckptkit.models.expected import is_known
from ckptkit.models.form import Form, closest
from ckptkit.models.transformers_forms import forms_of
from ckptkit.models.transformers_model import UnknownType, find_blueprint, is_installed
from ckptkit.names.family import Family
from ckptkit.names.rule import Rule
from ckptkit.names.sizes import Sizes
from ckptkit.names.translate import Translated
from ckptkit.tensors.box import Shape

# types whose experts, or prefixes, are on disk as they are in memory
_SAME = frozenset(
    {
        *("gpt_oss", "llama4", "llama4_text", "qwen3_vl", "qwen3_vl_text", "gemma4", "gemma4_text", "idefics3"),
        *("smolvlm", "qwen3_5", "qwen3_5_text"),
    }
)


@dataclass(frozen=True, kw_only=True)
class InMemory(Family):
    """The names in memory of models of transformers: a family without rules, whose table is transformers' own."""

    def is_of(self, shapes: Mapping[str, Shape], sizes: Sizes, *, looks_it: bool) -> bool:
        """Return whether names are those in memory of a model for which there are others on disk.

        They look it where some are what the table of families has of it. Raises `Unsupported` where they do, and
        transformers is not installed.
        """
        if is_known(sizes.config):
            return False
        if not is_installed():
            types = {str(sizes.config.get("model_type")), sizes.model_type}
            if types & _SAME or not looks_it:
                return False
            message = f"experts or prefixes of this `{sizes.config.get('model_type')}` are as transformers has them"
            hint = "pip install 'ckptkit-fsdp[hf]', or keep the names with --names keep"
            raise Unsupported(f"{message} in memory, and it is not installed", tensor=next(iter(shapes)), hint=hint)
        try:
            disk, *_, memory = forms_of(sizes.config, sizes.hub_names)
        except UnknownType:
            return False
        except Unsupported as error:
            if not looks_it:
                return False
            error.hint = "keep the names as transformers has them in memory, with --names keep"
            raise
        return any(name in memory.shapes and name not in disk.shapes for name in shapes)

    def to_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        """Return the tensors as `save_pretrained` writes them."""
        from ckptkit.models.transformers_table import to_disk, transforms_of
        from ckptkit.names.moved import MovedTensor

        blueprint = find_blueprint(sizes.config)
        there = {name: MovedTensor(tensor) for name, tensor in tensors.items() if name in blueprint.shapes}
        check_shapes(tensors, blueprint.shapes)
        made = to_disk(blueprint, transforms_of(blueprint, sizes.hub_names), there)
        check_whole(made.came_from, forms_of(sizes.config, sizes.hub_names)[0])
        unplaced = tuple(name for name in tensors if name not in there)
        return Translated({name: one.stored for name, one in made.tensors.items()}, made.came_from, unplaced)

    def from_hub(self, tensors: Mapping[str, StoredTensor], sizes: Sizes) -> Translated:
        """Return tensors of the disk as `from_pretrained` has them in memory."""
        from ckptkit.models.transformers_table import to_memory
        from ckptkit.names.moved import MovedTensor

        blueprint = find_blueprint(sizes.config)
        check_all_there(tensors.keys(), closest(forms_of(sizes.config), tensors.keys()))
        made = to_memory(blueprint, {name: MovedTensor(tensor) for name, tensor in tensors.items()})
        found = {name: one.stored for name, one in made.tensors.items() if name in blueprint.shapes}
        check_shapes(found, blueprint.shapes)
        unplaced = [old for name, olds in made.came_from.items() if name not in found for old in olds]
        came_from = {name: made.came_from[name] for name in found}
        return Translated(found, came_from, tuple(unplaced))


def check_shapes(tensors: Mapping[str, StoredTensor], shapes: Mapping[str, Shape]) -> None:
    """Raise `Mismatch` for a tensor that has another shape than the model's."""
    for name, tensor in tensors.items():
        if name in shapes and tensor.spec.shape != shapes[name]:
            message = f"the shape is {list(tensor.spec.shape)}, config.json calls for {list(shapes[name])}"
            raise Mismatch(message, tensor=name, hint="is the config.json that of another model?")


def check_whole(came_from: Mapping[str, tuple[str, ...]], form: Form) -> None:
    """Raise `Mismatch` if some of the tensors that one comes from were not there."""
    for name, olds in came_from.items():
        missing = set(form.came_from.get(name, ())) - set(olds)
        if missing:
            raise Mismatch(f"`{olds[0]}` is there, but not this, which it becomes one with", tensor=min(missing))


def check_all_there(names: Collection[str], form: Form) -> None:
    """Raise `Mismatch` if some of the tensors that become one in memory are not there."""
    parts: dict[str, list[str]] = {}
    for disk, olds in form.came_from.items():
        for old in olds:
            parts.setdefault(old, []).append(disk)
    for together in parts.values():
        there = [name for name in together if name in names]
        missing = [name for name in together if name not in names]
        if there and missing:
            raise Mismatch(f"`{there[0]}` is there, but not this, which it becomes one with", tensor=missing[0])


def no_rules(sizes: Sizes) -> tuple[Rule, ...]:
    """Return no rules: the table is transformers' own."""
    del sizes
    return ()


TRANSFORMERS = InMemory(
    name="transformers",
    rules=no_rules,
    has_tied_head=None,
    drops=(r"(.*\.)?_extra_state(/.*)?", r"(.*\.)?rotary_emb\.inv_freq"),
)
