"""Find the class of transformers that has a checkpoint's tensors, if config.json names a class without its head.

Training often starts with the config.json of a causal model and adds a head. The saved reward model has `score.weight`,
and transformers silently loads it as a causal model if config.json still says so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptkit.errors import Caution, Mismatch, Unsupported, and_more
from ckptkit.layout.box import Shape
from ckptkit.models.architectures import HEAD, has_tied_head
from ckptkit.models.expected import Form, closest_form, forms_of_model
from ckptkit.models.transformers_model import model_class_names_of
from ckptkit.words import count

Config = Mapping[str, Any]
# heads of transformers' classes, and value heads that RLHF libraries add to a causal model. Sources:
# AutoModelForCausalLMWithValueHead (`v_head`), get_llm_for_sequence_regression (`value_head` and others)
_HEAD = re.compile(r"(?:.*\.)?(?:score|(?:pre_)?classifier|qa_outputs|pooler|classification_head)\..+")
_VALUE_HEAD = re.compile(r"(?:.*\.)?(?:v_head|value_head|reward_head|regression_head)\..+")


def is_task_head_name(name: str) -> bool:
    return bool(_HEAD.fullmatch(name) or _VALUE_HEAD.fullmatch(name))


def with_trained_class(shapes: Mapping[str, Shape], config: Config, form: Form) -> tuple[Config, list[str]]:
    """Return config.json with the class that has the tensors, and notes; unchanged if its own class has them.

    `form` is the form that config.json describes. Raises `Mismatch` if no class of this type has the head, or several
    do; if the head of a language model is present too, which the class drops; and if `id2label` has another number of
    labels.
    """
    extra = sorted(shapes.keys() - form.shapes.keys())
    heads = [name for name in extra if is_task_head_name(name)]
    if not heads:
        return config, []
    named = ", ".join(map(str, config.get("architectures") or [config.get("model_type")]))
    fitting = list(candidate_configs(shapes, config, heads))
    if len(fitting) == 1:
        (fitting_config,) = fitting
        class_name = str(fitting_config["architectures"][0])
        if HEAD in shapes and not has_tied_head(config):  # a language model's own (untied) head beside another head
            both = f"{named} and {class_name}"
            message = f"this head and `{HEAD}` are those of two classes, {both}, and each class drops the other head"
            module = heads[0].rpartition(".")[0]
            raise Mismatch(message, tensor=heads[0], hint=f"pass --exclude '*{HEAD}' or --exclude '*{module}.*'")
        words = f"config.json says {named}, but the checkpoint has `{heads[0]}`: wrote {class_name}"
        labels = len(fitting_config.get("id2label") or {})
        if fitting_config.get("id2label") == config.get("id2label"):
            return fitting_config, [words]
        names = (config.get("id2label") or {}).values()
        if any(not re.fullmatch(r"LABEL_[0-9]+", str(name)) for name in names):
            message = f"expected {len(names)} labels (id2label of config.json), found {labels}"
            hint = "pass a --base whose config.json names the labels of this head"
            raise Mismatch(message, tensor=heads[0], hint=hint)
        return fitting_config, [f"{words} with {count(labels, 'label')}"]
    if not fitting and all(map(_VALUE_HEAD.fullmatch, heads)):
        words = f"`{heads[0]}`{and_more(len(heads) - 1)} is a value head, which {named} of config.json does not have"
        return config, [Caution(f"{words}: load the output with the library that trained it")]
    classes = [str(class_name["architectures"][0]) for class_name in fitting]
    which = f"fits {' or '.join(classes)}" if classes else "fits no class of this type together with the other tensors"
    hint = "pass a --base whose config.json names the class that was trained, or --names keep"
    raise Mismatch(f"config.json says {named}, which does not have this tensor: it {which}", tensor=heads[0], hint=hint)


def candidate_configs(shapes: Mapping[str, Shape], config: Config, heads: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield a config.json for each class of its type that fits, and for each number of labels that a head may have."""
    rows = {shapes[name][0] for name in heads if len(shapes[name]) == 2}
    known = {len(config["id2label"])} if config.get("id2label") else {int(config.get("num_labels") or 2)}
    for name in model_class_names_of(config):
        for labels in sorted(known) + sorted(rows - known):
            candidate = {**config, "architectures": [name]}
            if labels not in known:
                candidate |= {"id2label": {str(i): f"LABEL_{i}" for i in range(labels)}}
                candidate |= {"label2id": {f"LABEL_{i}": i for i in range(labels)}}
                candidate.pop("num_labels", None)
            if describes_all_tensors(shapes, candidate):
                yield candidate
                break


def describes_all_tensors(shapes: Mapping[str, Shape], config: Config) -> bool:
    """Return whether a config.json describes all tensors; an additional language model's head is allowed."""
    try:
        form = closest_form(forms_of_model(config), shapes.keys())
    except Unsupported:
        return False
    fits = all(shapes[name] == form.shapes[name] for name in shapes.keys() & form.shapes.keys())
    return fits and form.needed_names <= shapes.keys() and shapes.keys() - form.shapes.keys() <= {HEAD}
