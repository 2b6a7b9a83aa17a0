"""Find tensors that do not fit a model: another shape, a padded vocabulary, a head that differs from its tie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.diagnosis.case import Case
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.fix import export, rewrite
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.files.path import RemotePath
from ckptkit.models.fit import check_equal, ties_of
from ckptkit.models.vocabulary import vocabulary_in
from ckptkit.tensors.box import Shape

_SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "n_embd", "n_layer", "n_head", "num_experts", "num_local_experts"),
)
Pairs = Mapping[str, tuple[Shape, Shape]]


def find_shapes(case: Case) -> Iterator[Finding]:
    """Yield the tensors that have another shape than the model calls for."""
    if case.model is None or case.form is None or case.weights is None or not case.is_plain:
        return
    there = {name: case.form.shapes.get(case.renames.get(name, name), shape) for name, shape in case.shapes.items()}
    pairs = {name: (shape, there[name]) for name, shape in case.shapes.items() if there[name] != shape}
    vocabulary = vocabulary_in(case.model.config)
    padded = {
        name: found for name, pair in pairs.items() if (found := vocabulary.sizes(case.renames.get(name, name), *pair))
    }
    for name, (here, called_for) in padded.items():
        message = (
            f"expected {called_for} rows (vocab_size of {case.model.name}), found {here}: one of the two is padded"
        )
        base = case.model.name if case.model.asked else None
        yield Finding("vocabulary", name, message, rewrite(case.checkpoint, vocab_size=called_for, base=base))
    others = {name: pair for name, pair in pairs.items() if name not in padded}
    yield from find_other_model(case, others)
    for name, (shape, wanted) in others.items():
        yield Finding("shape", name, f"expected {list(wanted)} as in {case.model.name}, found {list(shape)}")


def find_other_model(case: Case, pairs: Pairs) -> Iterator[Finding]:
    """Yield that the model is of another size, where the checkpoint's own config says so."""
    own = case.checkpoint.companions
    if not pairs or not case.is_asked or own.config is None or case.model is None:
        return
    sizes = [key for key in _SIZES if size_of(own.config, key) != size_of(case.model.config, key)]
    if sizes:
        said = ", ".join(f"{key} {size_of(case.model.config, key)}, not {size_of(own.config, key)}" for key in sizes)
        message = f"{case.model.name} is another model: {said}"
        yield Finding("config", None, message, export(case.checkpoint, base=str(own.found_in)))


def size_of(config: Mapping[str, Any], key: str) -> object:
    inner = config.get("text_config")
    return (inner if isinstance(inner, Mapping) else config).get(key)


def find_ties(case: Case) -> Iterator[Finding]:
    """Yield the tensors that the config ties to others: loaders take the other's numbers for both.

    Shards that lack one are no model's whole state dict, which has both names. Reads both tensors, where a disk is.
    """
    model, weights = case.model, case.weights
    if model is None or weights is None or not case.is_plain:
        return
    for name, source in ties_of(weights.layout, model.config, case.form).items():
        if name in case.renames.values():
            continue
        if name not in weights.layout.tensors:
            if source in weights.layout.tensors and case.checkpoint.model_component.reader.is_sharded and model.asked:
                message = f"it is tied to `{source}`; a model in memory has both, so torch's load asks for this one too"
                yield Finding("tie", name, message, export(case.checkpoint, base=model.name))
        elif not isinstance(weights.layout.root, RemotePath) and differs(case, name, source):
            message = (
                f"the config of {model.name} ties it to `{source}`, but their values differ: a load loses one of them"
            )
            yield Finding("tie", name, message)


def differs(case: Case, name: str, source: str) -> bool:
    """Return whether two tensors that should be the same are not."""
    if case.weights is None or source not in case.weights.layout.tensors:
        return False
    try:
        check_equal(case.weights.layout, name, source)
    except Mismatch:
        return True
    except Unsupported:
        pass
    return False
