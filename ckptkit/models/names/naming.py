"""Give a model's tensors the requested names: the Hub's, a family's, or the names that they have.

Under the Hub's names, a model must have exactly the layers and experts of its config.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ckptkit.errors import Caution, CkptError, Mismatch, Unsupported
from ckptkit.formats import locate_all_chunks
from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import is_existing_path, read_small
from ckptkit.layout import Layout, StoredTensor, edits
from ckptkit.layout.box import Shape
from ckptkit.models.config_differences import describe_differences, find_contradictions
from ckptkit.models.expected import AskBase, Form, closest_form_or_error
from ckptkit.models.names import KEEP, find_family_of, get_family
from ckptkit.models.names.between_families import choose_family, make_translation
from ckptkit.models.names.family import Family
from ckptkit.models.names.family_file import with_fallback_family
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.translate import Translated, Turn
from ckptkit.models.names.translate_checkpoint import translate_checkpoint
from ckptkit.models.names.weights import JOINED, OF_ONE, Weights, find_model_key, find_weights
from ckptkit.models.vocabulary import NewVocabulary, check_vocabulary_rows, with_vocabulary_size
from ckptkit.words import count

Config = Mapping[str, Any] | None
Shapes = Mapping[str, Shape]
_LIMIT = 1 << 20  # bytes; the largest file with a model's sizes has a few kilobytes
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.(.*)")
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]{1,9})\.(.*)")
_OF_EXPERTS = re.compile(r"\.experts\.|_moe\.")
_MTP_LAYERS = "num_nextn_predict_layers"  # MTP layers, after the other layers
# LongCat's experts that compute nothing; transformers still saves a gate and an up projection for each of them
_ZERO_EXPERTS = "zero_expert_num"
_HINT = "check that config.json belongs to this model"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedNames:
    """The names that a caller requests, and facts about the model.

    `names` is a family's name, `HUB` or `KEEP`. `trainer` wrote the present names; None if unknown. `check` raises for
    weights that must not be cut or joined, before anything is translated. `table` is the user's own table; it has
    priority over the known families. `rows` is the new number of rows of embedding and head. `ask_base` returns the
    base's tensor names: they decide if the Hub has several names for one tensor.
    """

    names: str
    config: Config
    trainer: str | None
    check: Callable[[Weights, Config], None]
    table: Family | None = None
    rows: int | None = None
    ask_base: AskBase = None

    def find_new_vocabulary(self) -> NewVocabulary | None:
        """Return the requested vocabulary; None if it does not change."""
        return None if self.rows is None else NewVocabulary.of(self.config, self.rows, self.ask_base)


def name_weights(weights: Weights, asked: AskedNames) -> tuple[Weights, list[str]]:
    """Return weights under the names of a family or of the Hub, and notes.

    Raises `Mismatch` if a config.json is needed and missing, or if no rule translates a tensor.
    """
    change = find_family_change(weights, asked)
    if change is None and asked.rows is None:
        return weights, []
    asked.check(weights, asked.config)
    layout = locate_all_chunks(weights.layout)
    if change is not None and change.here is not None and change.here.arithmetic is not None:
        from ckptkit.engine.arithmetic import apply_arithmetic  # deferred: imports numpy

        arithmetic = {name: change.here.arithmetic(name, change.sizes) for name in layout.tensors}
        layout = apply_arithmetic(layout, {name: one for name, one in arithmetic.items() if one is not None})
    vocabulary = asked.find_new_vocabulary()
    try:
        named_tensors = translation_with_resized_rows(change, vocabulary)(layout.tensors)
    except CkptError as error:
        raise error.blame(path=layout.path) from None
    if change is not None and change.there is None and asked.config is not None:
        require_layers_and_experts(named_tensors.tensors, Sizes(asked.config), layout.root)
    came_from = {
        new: JOINED.join(dict.fromkeys(weights.came_from[old] for old in olds))
        for new, olds in named_tensors.came_from.items()
    }
    named = replace(layout, tensors=named_tensors.tensors, blobs={}, keys={}, twins={})
    why = f"no name in `{asked.names}`"
    left_out = {**weights.left_out, **dict.fromkeys(weights.origins_of(named_tensors.unplaced), why)}
    notes = notes_on_translation(weights.layout, change, named_tensors, asked.config, vocabulary)
    notes += warn_of_contradictions(weights.whole, change, asked)
    return replace(weights, layout=named, came_from=came_from, left_out=left_out), notes


def rename_checkpoint_parameters(layout: Layout, asked: AskedNames) -> tuple[Layout, list[str]]:
    """Return a checkpoint with a family's parameter names, and notes. Raises as `name_weights` does."""
    if asked.names == KEEP and asked.rows is None:
        return layout, []  # the checkpoint may have no model, which `find_weights` refuses
    weights = find_weights(layout)
    change = find_family_change(weights, asked)
    if change is None and asked.rows is None:
        return layout, []
    if change is not None and change.here is not None and change.here.is_model_only:
        message = f"ckptkit translates {change.here.possessive} names only for a model without optimizer"
        hint = "run `ckptkit consolidate SRC OUT` first, then convert OUT"
        raise Unsupported(message, path=layout.path, hint=hint)
    asked.check(weights, asked.config)
    layout = locate_all_chunks(layout)
    try:
        vocabulary = asked.find_new_vocabulary()
        turn = translation_with_resized_rows(change, vocabulary)
        named, translated = translate_checkpoint(layout, find_weights(layout), find_model_key(layout), turn)
    except CkptError as error:
        raise error.blame(path=layout.path) from None
    notes = notes_on_translation(weights.layout, change, translated, asked.config, vocabulary)
    notes += warn_of_contradictions(layout, change, asked)
    # non-tensor entries of layers have no meaning under other names
    last_steps = {name: str(named.key(name)[-1]).partition(OF_ONE)[0] for name in named.blobs}
    here = change.here if change else None
    dropped = {name for name, step in last_steps.items() if here and here.is_unknown_to_hub(step)}
    if dropped:
        what = f"{count(len(dropped), 'non-tensor entry')} of layers"
        notes.append(f"dropped {what} for which `{asked.names}` has no name, such as `{min(dropped)}`")
    return edits.select_entries(named, lambda name: name not in dropped), notes


class FamilyChange(NamedTuple):
    """The family of the weights, the requested family, and the function that translates; None stands for the Hub."""

    here: Family | None
    there: Family | None
    turn: Turn
    sizes: Sizes


def find_family_change(found: Weights, asked: AskedNames) -> FamilyChange | None:
    """Return how to translate the names; None if they stay."""
    if asked.names == KEEP:
        return None
    weights, config, table = found.layout, asked.config, asked.table
    sizes = Sizes(config or {}, asked.ask_base)
    current = find_family_of(
        weights.shapes, asked.trainer, sizes.model_type, lambda name: is_existing_path(weights.root / name)
    )
    if config is not None:
        try:
            current = choose_family(current, weights.shapes, sizes)
        except CkptError as error:
            raise error.blame(path=weights.path) from None
    if table is not None and asked.names == table.name:
        target: Family | None = table
    else:
        target = get_family(asked.names)
        current = current if table is None else with_fallback_family(table, current)
    if current is target:
        return None
    if config is None and current is not None:
        config = find_family_sizes(weights.root, current)
    if config is None and table is None:
        whose = " and ".join(family.name for family in (current, target) if family)
        message = f"translating the names of {whose} to the Hub's needs config.json; none was found"
        hint = "pass --base MODEL, which has the config.json of this architecture, or keep the names with --names keep"
        raise Mismatch(message, path=weights.path, tensor=next(iter(weights.tensors)), hint=hint)
    known = config or {} if asked.rows is None else with_vocabulary_size(config or {}, asked.rows)
    sizes = Sizes(known, asked.ask_base)
    if current is not None:
        try:
            current.check(found.whole, sizes)
        except CkptError as error:
            raise error.blame(path=weights.path) from None
    return FamilyChange(current, target, make_translation(current, target, sizes), sizes)


def find_family_sizes(root: Path, family: Family) -> Config:
    """Return a model's sizes from the family's own file beside the weights, as a config; None without such a file."""
    path = root / family.sizes_file
    if not family.sizes_file or not is_existing_path(path):
        return None
    sizes = parse_json(read_small(path, _LIMIT), path)
    return family.config_of(sizes if isinstance(sizes, dict) else {})


def reported_facts(family: Family, checkpoint: Layout) -> dict[str, Any]:
    """Return the facts about the computation in a checkpoint's own files, in keys of config.json."""
    return {**(find_family_sizes(checkpoint.root, family) or {}), **family.describe(checkpoint)}


def warn_of_contradictions(checkpoint: Layout, change: FamilyChange | None, asked: AskedNames) -> list[Caution]:
    """Return a warning if config.json makes the model compute something else than the checkpoint's own files say."""
    if change is None or change.here is None or asked.config is None:
        return []
    differences = find_contradictions(reported_facts(change.here, checkpoint), asked.config)
    text = f"config.json differs from what {change.here.possessive} files say of the training"
    return [Caution(f"{text}: {describe_differences(differences, 'config.json')}")] if differences else []


def translation_with_resized_rows(change: FamilyChange | None, vocabulary: NewVocabulary | None) -> Turn:
    """Return the function that translates names and resizes the tensors that follow the vocabulary."""
    turn = Translated.of if change is None else change.turn
    if vocabulary is None:
        return turn

    def resized(tensors: Mapping[str, StoredTensor]) -> Translated:
        translated = turn(tensors)
        return replace(translated, tensors=vocabulary.resize_all(translated.tensors))

    return resized


def notes_on_translation(
    before: Layout,
    change: FamilyChange | None,
    translated: Translated,
    config: Config,
    vocabulary: NewVocabulary | None,
) -> list[str]:
    """Return notes on changed names and rows. Raises `Mismatch` if config.json contradicts the number of rows."""
    notes = []
    uses = Counter(old for olds in translated.came_from.values() for old in olds)
    try:
        if vocabulary is not None:
            rows, old_rows = vocabulary.rows, vocabulary.require_one_size(before.tensors)
            more = rows - old_rows
            what = f"dropped the last {-more}" if more < 0 else f"added {more} rows of zeros"
            resized = f"the vocabulary has {rows} rows instead of {old_rows}: {what}"
            notes.append(resized if more else f"the vocabulary already has {rows} rows")
        else:
            notes += notes_on_cropped_tensors(before, translated, uses)
            if config is not None:
                check_vocabulary_rows(translated.tensors, config)
    except CkptError as error:
        raise error.blame(path=before.root) from None
    if change is not None:
        old, new = (family.name if family else "the Hub" for family in (change.here, change.there))
        tensors, unplaced = count(len(uses), "tensor"), translated.unplaced
        notes.append(f"translated {tensors} from the names of {old} to {len(translated.came_from)} of {new}")
        if unplaced:
            what = f"{count(len(unplaced), 'tensor')} for which {new} has no name"
            notes.append(f"dropped {what}, such as `{unplaced[0]}`")
    return notes


def notes_on_cropped_tensors(before: Layout, translated: Translated, uses: Mapping[str, int]) -> Iterator[str]:
    """Yield a note on each tensor that lost rows; `uses` counts the new tensors that each old one is part of."""
    for new, olds in translated.came_from.items():
        now = translated.tensors[new].spec
        if len(olds) == 1 and uses[olds[0]] == 1 and now.numel < before.tensors[olds[0]].spec.numel:
            rows = before.tensors[olds[0]].spec.shape[0]
            dropped = f"the last {rows - now.shape[0]} of the {rows} rows of `{olds[0]}`"
            yield f"dropped {dropped}, which pad the vocabulary"


def require_layers_and_experts(names: Collection[str], sizes: Sizes, path: Path) -> None:
    """Raise `Mismatch` for a missing layer or expert, or for more of them than the config declares."""
    layers: dict[int, set[str]] = {}
    experts: dict[tuple[str, str], set[int]] = {}
    has_experts = False
    for name in names:
        layer, expert = _LAYER.fullmatch(name), _EXPERT.fullmatch(name)
        has_experts |= bool(_OF_EXPERTS.search(name))
        if layer:
            layers.setdefault(int(layer[1]), set()).add(layer[2])
        if expert:
            experts.setdefault((expert[1], expert[3]), set()).add(int(expert[2]))

    @cache
    def find_shapes() -> Shapes | None:
        form = closest_form_or_error(names, sizes.config, sizes.ask_base)
        return form.shapes if isinstance(form, Form) else None

    layer_count, wanted = sizes.find_size("layers"), sizes.find_size("experts")
    if layers and layer_count is not None:
        check_layer_numbers(layers, layer_count, integer_or_zero(sizes, _MTP_LAYERS), "model.layers.{}", path)
    if wanted is not None:
        shapes = find_shapes() if layers and not has_experts else {}
        if shapes is None or any(map(_OF_EXPERTS.search, shapes)):
            raise Mismatch(f"expected {wanted} experts (config.json), found none", path=path, hint=_HINT)
        for (above, below), numbers in experts.items():
            check_layer_numbers(numbers, wanted, integer_or_zero(sizes, _ZERO_EXPERTS), f"{above}.{{}}.{below}", path)
    if layers and layer_count is not None:
        require_alike_layers({number: layers[number] for number in range(layer_count)}, find_shapes, path)


def integer_or_zero(sizes: Sizes, key: str) -> int:
    """Return an integer of config.json; 0 if it is absent."""
    number = sizes.text_config.get(key)
    return number if type(number) is int else 0


def check_layer_numbers(present: Iterable[int], layer_count: int, extra: int, name: str, path: Path) -> None:
    """Raise `Mismatch` unless the numbers are 0 to `layer_count` - 1, optionally followed by up to `extra` others."""
    numbers = set(present)
    missing = next((number for number in range(layer_count) if number not in numbers), None)
    if missing is not None:
        message = f"missing: expected numbers 0 to {layer_count - 1} (config.json), found {len(numbers)} of them"
        raise Mismatch(message, path=path, tensor=name.format(missing))
    if max(numbers) >= layer_count + extra:
        message = f"expected numbers 0 to {layer_count - 1} (config.json), found this one too"
        raise Mismatch(message, path=path, tensor=name.format(max(numbers)), hint=_HINT)


def require_alike_layers(layers: Mapping[int, set[str]], find_shapes: Callable[[], Shapes | None], path: Path) -> None:
    """Raise `Mismatch` if the tensors of a layer are a proper subset of the tensors of another layer.

    If `find_shapes` returns the shapes of the model's tensors, a tensor that is not among them is not missing.
    """
    kinds: dict[frozenset[str], int] = {}
    for number, tensors in layers.items():
        kinds.setdefault(frozenset(tensors), number)
    for kind, number in kinds.items():
        for other, complete in kinds.items():
            if kind < other:
                missing, shapes = (f"model.layers.{number}.{name}" for name in sorted(other - kind)), find_shapes()
                missing_name = next((name for name in missing if shapes is None or name in shapes), None)
                if missing_name is not None:
                    has = f"layer {complete} has this tensor, and otherwise the same tensors as layer {number}"
                    raise Mismatch(f"missing: {has}", path=path, tensor=missing_name)
