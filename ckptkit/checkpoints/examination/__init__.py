"""Check a checkpoint for entries that contradict each other even though every file is undamaged.

Reads metadata, and the parameter lists of an optimizer's groups. Each rule is a function from the facts to
inconsistencies: the rules for weights are here, the rules for optimizer states in `optimizers.py`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from ckptkit.checkpoints.checkpoint import UNREADABLE, Checkpoint
from ckptkit.checkpoints.examination.facts import Facts, Inconsistency
from ckptkit.checkpoints.examination.optimizers import (
    find_empty_groups,
    find_missing_state_kinds,
    find_optimizer_step_mismatch,
    find_train_mode_schedule_free,
    find_unknown_names,
    find_wrapper_prefix_mismatch,
    find_wrong_state_shapes,
    group_list_inconsistencies,
)
from ckptkit.errors import names_and_more
from ckptkit.formats import is_main_file_name
from ckptkit.layout import Layout
from ckptkit.layout.renames import numbers_to_wildcards
from ckptkit.layout.wrappers import may_be_adapter

_FEWEST = 3  # with fewer numbered modules, a missing number proves nothing
_FEWEST_ALIKE = 3  # with fewer other layers, a layer that differs from them proves nothing
_ROUTER_MODULES = ("", ".gate", ".layer", ".linear", ".wg", ".proj", ".classifier")
_ROUTERS = ("gate_weight", *(f"{name}{module}.weight" for name in ("gate", "router") for module in _ROUTER_MODULES))
_MATRIX = 2  # dimensions of the weight of one expert
_HEADS = ("lm_head.weight", "embed_out.weight")
_HEAD = re.compile(rf"(.*\.)?(?:{'|'.join(map(re.escape, _HEADS))})")
_EMBEDDING = re.compile(
    r"(?:(?:model|transformer|decoder|gpt_neox|language_model|text_model|backbone)\.)*"
    r"(?:embed_tokens|embed_in|wte|word_embeddings|tok_embeddings)\.weight"
)  # below the module of the head: another part of the model may have an embedding of its own


def find_empty_weights(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the weights without elements, if other weights have some.

    A rank's shard that was saved in place of the full tensor has shape [0]: a placeholder of ZeRO 3, or of an FSDP1
    rank without a shard of the parameter. An embedding of zero tokens, [0, n], may be intended.
    """
    shapes = facts.layout.shapes
    names = [name for name in facts.weights if 0 in shapes[name] and name.endswith((".weight", ".bias"))]
    if len(names) in (0, len(facts.weights)) or may_be_adapter(facts.weights.values()):
        return
    for name in names:
        code = "empty_weight" if shapes[name] == (0,) else "empty_tensor"
        yield Inconsistency(code, name, {"found": list(shapes[name])})


def find_layer_gaps(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the lists of layers or experts with missing numbers.

    Members of an `nn.Sequential` without parameters leave gaps, too. So only modules that contain modules count, only
    if most numbers are present, and only if most of these modules are equal to another one in names and shapes.
    """
    for above, numbered in facts.numbered_modules.items():
        gaps = 1 + max(numbered) - min(numbered) - len(numbered)  # not listed yet: a name may have any number
        has_modules = any("." in rest for tensors in numbered.values() for rest in tensors)
        if not (gaps and len(numbered) >= max(_FEWEST, 2 * gaps) and has_modules):
            continue
        kinds = Counter(
            frozenset((rest, facts.layout.tensors[name].spec.shape) for rest, name in tensors.items())
            for tensors in numbered.values()
        )
        if 2 * sum(number for number in kinds.values() if number > 1) >= len(numbered):
            missing = [number for number in range(min(numbered), max(numbered)) if number not in numbered]
            numbers = {"expected": max(numbered) + 1, "missing": names_and_more([*map(str, missing)], 4)}
            yield Inconsistency("layer_gap", above, numbers)


def find_odd_layers(facts: Facts) -> Iterator[Inconsistency]:
    """Yield layers that are the only one in their list without a tensor, or with it in another shape or kind of dtype.

    Some layers differ on purpose, and are left out: the first and the last one, a layer with a tensor that no other
    layer has, and a layer with several other shapes, such as full attention among windows.
    """
    for above, numbered in facts.numbered_modules.items():
        if len(numbered) <= _FEWEST_ALIKE:
            continue
        for layer, odd in odd_tensors_by_layer(facts, numbered).items():
            others = len(numbered) - 1
            lacking = tuple(f"{above}.{layer}.{rest}" for rest in odd if rest not in numbered[layer])
            lacking = tuple(name for name in lacking if name not in facts.lost_entries)
            modules = {rest.removesuffix(".bias").removesuffix(".weight") for rest in odd}
            if lacking and len(lacking) == len(odd):
                yield Inconsistency("layer_lacks", lacking[0], {"others": others}, lacking)
            elif not lacking and len(modules) == 1:
                for rest in odd:
                    other = next(tensors for number, tensors in numbered.items() if number != layer)[rest]
                    specs = [facts.layout.tensors[name].spec for name in (other, numbered[layer][rest])]
                    if not specs[1].numel:
                        continue  # `find_empty_weights` yields it
                    expected, found = (f"{list(spec.shape)} {spec.dtype}" for spec in specs)
                    data = {"others": others, "expected": expected, "found": found}
                    yield Inconsistency("layer_differs", numbered[layer][rest], data)


def odd_tensors_by_layer(
    facts: Facts, tensors_by_layer: Mapping[int, Mapping[str, str]]
) -> Mapping[int, Sequence[str]]:
    """Return, by layer, the tensors that exactly this layer lacks or has in another shape or kind of dtype."""
    layers_by_rest: dict[str, dict[int, object]] = defaultdict(dict)
    for layer, tensors in tensors_by_layer.items():
        for rest, name in tensors.items():
            if ".experts." not in f".{rest}":  # the experts of a layer are a list of their own
                spec = facts.layout.tensors[name].spec
                layers_by_rest[rest][layer] = (spec.shape, spec.dtype.kind)
    odd: dict[int, list[str]] = defaultdict(list)
    others: set[int] = {min(tensors_by_layer), max(tensors_by_layer)}
    for rest, specs in layers_by_rest.items():
        kinds = Counter(specs.get(layer) for layer in tensors_by_layer)
        (_, most), *rare = kinds.most_common()
        if most == len(tensors_by_layer) - 1:
            layer = next(layer for layer in tensors_by_layer if specs.get(layer) == rare[0][0])
            if layer in specs and len(specs) == 1:
                others.add(layer)  # a kind of layer of its own
            odd[layer].append(rest)
    return {layer: rests for layer, rests in odd.items() if layer not in others}


def find_misfit_biases(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the biases that fit no axis of their matrix. A packed matrix proves nothing."""
    for path, name in facts.weight_entries_by_path.items():
        weight = (
            facts.weight_entries_by_path.get(f"{path.removesuffix('.bias')}.weight") if path.endswith(".bias") else None
        )
        if weight is None:
            continue
        bias_spec, spec = facts.layout.tensors[name].spec, facts.layout.tensors[weight].spec
        is_matrix = len(spec.shape) == _MATRIX and spec.dtype.kind == "float" and len(bias_spec.shape) == 1
        if is_matrix and bias_spec.shape[0] not in spec.shape:
            yield Inconsistency("bias", name, {"expected": spec.shape[0], "found": bias_spec.shape[0]})


def find_misfit_heads(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the heads that have another number of rows than the only embedding of tokens of the same model."""
    for head, path in facts.weights.items():
        match = _HEAD.fullmatch(path) if path.endswith(_HEADS) else None
        if match is None:
            continue
        above = match[1] or ""
        embeddings = [
            name
            for name, other in facts.weights.items()
            if other.startswith(above) and _EMBEDDING.fullmatch(other.removeprefix(above))
        ]
        shapes = [facts.layout.tensors[name].spec.shape for name in (head, *embeddings)]
        if len(embeddings) != 1 or any(len(shape) != _MATRIX for shape in shapes):
            continue
        (found, width), (expected, its_width) = shapes
        if width == its_width and found != expected:
            yield Inconsistency("head", head, {"expected": expected, "found": found, "embedding": embeddings[0]})


def find_misfit_routers(facts: Facts) -> Iterator[Inconsistency]:
    """Yield the routers and fused experts whose row count differs from the number of experts of their layer."""
    layers: dict[str, dict[str, int]] = defaultdict(dict)
    numbered: dict[str, set[int]] = defaultdict(set)
    for name, path in facts.weights.items():
        above, is_of_experts, rest = f".{path}".rpartition(".experts.")
        if not (is_of_experts and rest):
            continue
        if (number := rest.partition(".")[0]).isdecimal():
            numbered[above].add(int(number))
        elif len(shape := facts.layout.tensors[name].spec.shape) > _MATRIX:
            layers[above][name] = shape[0]
    for experts in layers.values():
        first, count = next(iter(experts.items()))
        for name, other in experts.items():
            if other != count:
                yield Inconsistency("experts", name, {"expected": count, "other": first, "found": other})
    counts = {above: next(iter(experts.values())) for above, experts in layers.items()}
    counts |= {above: 1 + max(numbers) for above, numbers in numbered.items()}
    shared = fused_shared_experts_by_module(facts)
    for (above, count), router in product(counts.items(), _ROUTERS):
        name = facts.weight_entries_by_path.get(f"{above}.{router}"[1:], "")
        shape = facts.layout.tensors[name].spec.shape if name else ()
        if len(shape) == _MATRIX and not {count, count + shared.get(above, 0)} & set(shape):
            yield Inconsistency("router", name, {"expected": count, "found": shape[0]})


def fused_shared_experts_by_module(facts: Facts) -> dict[str, int]:
    """Return the number of fused shared experts beside experts, for which Inkling's router has rows too."""
    split = {name: f".{path}".rpartition(".shared_experts.") for name, path in facts.weights.items()}
    tensors = facts.layout.tensors
    shapes = {above: tensors[name].spec.shape for name, (above, is_shared, _) in split.items() if is_shared}
    return {above: shape[0] for above, shape in shapes.items() if len(shape) > _MATRIX}


Rule = Callable[[Facts], Iterator[Inconsistency]]

# needless if config.json describes every tensor, with the shape that it has
OF_SHAPES: tuple[Rule, ...] = (
    *(find_empty_weights, find_layer_gaps, find_misfit_routers, find_misfit_biases, find_misfit_heads),
)
OF_WEIGHTS: tuple[Rule, ...] = (*OF_SHAPES, find_odd_layers)
OF_EXPORTS: tuple[Rule, ...] = (*OF_WEIGHTS, find_train_mode_schedule_free, find_optimizer_step_mismatch)
OF_STATES: tuple[Rule, ...] = (
    find_wrong_state_shapes,
    find_missing_state_kinds,
    find_wrapper_prefix_mismatch,
    find_unknown_names,
)
RULES: tuple[Rule, ...] = (*OF_EXPORTS, *OF_STATES, find_empty_groups, group_list_inconsistencies)


def examine_checkpoint(checkpoint: Checkpoint, rules: tuple[Rule, ...] = RULES) -> tuple[Inconsistency, ...]:
    """Return the inconsistencies of a checkpoint; () if its components cannot be read or joined.

    An optimizer may also train weights in a file beside the model, such as a `2_Dense` of sentence-transformers.
    """
    try:
        found = examine_layout(checkpoint.layout, rules)
    except UNREADABLE:  # the reader reports these errors in more detail
        return ()
    if not any(one.code == "state_size" for one in found):
        return found
    paths = {left.path for left in checkpoint.unread_files if is_main_file_name(left.path.name)}
    layouts = filter(None, map(checkpoint.find_layout_of_file, paths))
    beside = {shape for layout in layouts for shape in layout.shapes.values()}
    return tuple(one for one in found if one.code != "state_size" or tuple(one.data["found"]) not in beside)


def examine_layout(layout: Layout, rules: tuple[Rule, ...] = RULES) -> tuple[Inconsistency, ...]:
    """Return the inconsistencies of a layout; the same one in every layer counts once, as `layers.*.bias`."""
    facts = Facts.of(layout)
    by_pattern: dict[object, list[Inconsistency]] = {}
    for one in (found for rule in rules for found in rule(facts)):
        by_pattern.setdefault((one.code, one.tensor and numbers_to_wildcards(one.tensor), one.message), []).append(one)
    merged = []
    for same in by_pattern.values():
        first = same[0]
        tensor = numbers_to_wildcards(first.tensor) if first.tensor and len(same) > 1 else first.tensor
        names = tuple(name for one in same for name in one.names or (one.tensor,) if name)
        merged.append(replace(first, tensor=tensor, names=names))
    return tuple(merged)
