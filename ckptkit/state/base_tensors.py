"""Read the weights of the base: compare their names and shapes with the model's, copy tensors that only it has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from shlex import quote

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import CkptError, Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage
from ckptkit.formats import locate_all_chunks
from ckptkit.io.path import to_model_path
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.box import Shape
from ckptkit.layout.plan import Operand
from ckptkit.layout.renames import find_few_globs
from ckptkit.models.expected import Form, closest_form, forms_of_model
from ckptkit.models.fit import join_few_names
from ckptkit.state.model import Model, RecipeFor, recipe_for_any_tensor
from ckptkit.state.options import ConvertOptions
from ckptkit.state.quantized.config import is_declared_quantized
from ckptkit.state.quantized.dequantize import dequantizing_recipe_of, dtype_in_config
from ckptkit.state.quantized.find import find_quantized
from ckptkit.state.quantized.packed import dequantized_name
from ckptkit.words import count, format_bytes

Shapes = Mapping[str, Shape]
# buffers in older files that loaders compute
_COMPUTED = (".inv_freq", ".position_ids", ".masked_bias", ".attn.bias", "_extra_state")
_MAX_GLOBS = 3


def with_base_difference_notes(model: Model, options: ConvertOptions) -> Model:
    """Add notes on tensors that only the base has or only the model has, and on shapes that differ."""
    base: BaseWeights | None = None
    recorded = model.config.get("_name_or_path")
    if options.base is not None:
        base = model.ask_base if isinstance(model.ask_base, BaseWeights) else BaseWeights(options.base)
    elif isinstance(recorded, str) and Path(recorded).is_absolute() and Path(recorded).is_dir():
        base = BaseWeights(recorded)
    if base is not None and base.problem is not None:
        return model.with_remarks(f"not compared with the weights of {base.base}: {base.problem.message}")
    if base is None or base.layout is None:
        return model
    ours, theirs = model.layout.shapes, base.layout.shapes
    if not is_declared_quantized(model.config):  # then the base's quantized weights count with their plain shapes
        with suppress(Corrupt, Mismatch, Unsupported):  # some tensors are missing: compare the other names anyway
            if quantized := find_quantized(base.layout, base.open().companions.config):
                packed = {dequantized_name(name): one.shape for name, one in quantized.weights.items()}
                theirs = {name: shape for name, shape in theirs.items() if name not in quantized.members} | packed
    forms: tuple[Form, ...] = ()
    with suppress(Unsupported):  # an unknown model
        forms = forms_of_model(model.config, model.ask_base) if model.config else ()
    return model.with_remarks(*notes_on_differences(ours, theirs, forms, base.base))


def names_only_in(names: Iterable[str], others: Collection[str], known: Collection[str]) -> list[str]:
    """Return the names that are not in `others`, even without their first two components, except computed buffers."""
    ends = {end for other in others for end in (other, *without_leading_components(other))}
    candidates = (name for name in names if not (name in known or name in ends or name.endswith(_COMPUTED)))
    return sorted(name for name in candidates if not any(end in others for end in without_leading_components(name)))


def without_leading_components(name: str) -> list[str]:
    """Return a name without its first component, and without its first two."""
    first, second = name.partition(".")[2], name.partition(".")[2].partition(".")[2]
    return [end for end in (first, second) if "." in end]


def notes_on_differences(ours: Shapes, theirs: Shapes, forms: tuple[Form, ...], base: str) -> Iterator[str]:
    """Yield a sentence for each kind of difference in names and shapes between a model and its base."""
    known: Collection[str] = ()  # names in which the two may differ: other names on disk of this model type
    if forms:
        form, other_form = (closest_form(forms, names) for names in (ours, theirs))
        is_same = form.shapes == other_form.shapes
        known = {*form.tied, *form.unsaved} if is_same else {name for one in forms for name in one.shapes}
    only_base, only_ours = names_only_in(theirs, ours, known), names_only_in(ours, theirs, known)
    if theirs and not ours.keys() & theirs.keys() and len(only_base) == len(theirs):
        yield f"not compared with the weights of {base}: they have no tensor name in common"
        return
    if only_base:
        globs = find_few_globs(only_base, theirs.keys() - set(only_base), _MAX_GLOBS) or ("GLOB",)
        asked = " ".join(f"--from-base {quote(glob)}" for glob in globs)
        lack = f"{base} has {count(len(only_base), 'tensor')} that the output lacks: {join_few_names(only_base)}"
        yield f"{lack}; {asked} copies {'them' if len(only_base) > 1 else 'it'}"
    if only_ours and theirs:
        more = count(len(only_ours), "tensor")
        yield f"the output has {more} that {base} lacks: {join_few_names(only_ours)}"
    if other := [name for name, shape in ours.items() if name not in known and theirs.get(name, shape) != shape]:
        shapes = f"expected {list(theirs[other[0]])} as in {base}, found {list(ours[other[0]])}"
        yield f"{count(len(other), 'tensor', 'has')} another shape than in {base}: `{other[0]}`: {shapes}"


def copy_from_base(model: Model, options: ConvertOptions) -> Model:
    """Add the tensors of the base that match `--from-base` and that the checkpoint does not have.

    The base becomes a further source. Quantized weights are copied with their scales if config.json declares the model
    as quantized; otherwise ckptkit computes plain weights. Raises `Usage` for a glob that matches nothing, or only
    tensors that the checkpoint has.
    """
    assert options.base is not None
    base = BaseWeights(options.base).open()
    layout = locate_all_chunks(base.weights.layout)
    chosen = choose_from_base(layout, model.layout.tensors.keys(), options)
    quantized = find_quantized(layout, base.companions.config)
    if quantized is not None and quantized.members.isdisjoint(chosen):
        quantized = None
    # a number, a scale or a zero point is useless without the others of its weight
    groups = [(weight, *packed.beside) for weight, packed in quantized.weights.items()] if quantized else []
    group_of = {name: group for group in groups for name in group}
    chosen = list(dict.fromkeys(one for name in chosen for one in group_of.get(name, (name,))))
    if is_declared_quantized(model.config):
        quantized = None
    elif quantized is not None:
        quantized.require_supported()
    number = len(model.others) + 1
    added: dict[str, tuple[Spec, RecipeFor]] = {}
    stored_as: dict[str, str] = {}
    for name in chosen:
        if quantized is None or name not in quantized.members:
            added[name] = layout.tensors[name].spec, copy_recipe(name, number)
        elif name in quantized.weights:
            new = dequantized_name(name)
            spec = Spec(dtype_in_config(model.config), quantized.weights[name].shape)
            added[new] = spec, recipe_for_any_tensor(dequantizing_recipe_of(quantized, name, number))
            stored_as[new] = f"{layout.tensors[name].spec.dtype} times scales"
    tensors = {**model.layout.tensors, **{name: StoredTensor(spec, ()) for name, (spec, _) in added.items()}}
    nbytes = format_bytes(sum(spec.nbytes for spec, _ in added.values()))
    return replace(
        model.with_layout(replace(model.layout, tensors=tensors)),
        base=base,
        others=(*model.others, replace(layout, blobs={}, twins={}, keys={})),
        recipes={**model.recipes, **{name: recipe for name, (_, recipe) in added.items()}},
        stored_as={**model.stored_as, **stored_as},
    ).with_remarks(f"copied {count(len(added), 'tensor')} ({nbytes}) from {options.base}: {join_few_names([*added])}")


def choose_from_base(layout: Layout, ours: Collection[str], options: ConvertOptions) -> list[str]:
    """Return the tensors of a base that match a glob and that the checkpoint does not have."""
    names = list(layout.tensors)
    options.edits.require_matches("--from-base", options.from_base, names, layout.root)
    chosen = []
    for glob in options.from_base:
        matching = [name for name in names if fnmatchcase(name, glob)]
        absent = [name for name in matching if dequantized_name(name) not in ours and name not in ours]
        if matching and not absent:
            hint = "drop --from-base: it copies tensors that only the base has"
            message = f"--from-base '{glob}' matches only tensors that the checkpoint has: {join_few_names(matching)}"
            raise Usage(message, path=layout.path, hint=hint)
        chosen += absent
    return list(dict.fromkeys(chosen))


def copy_recipe(name: str, source_index: int) -> RecipeFor:
    """Return the recipe that copies a tensor of the source with this index, cast to the dtype to write."""
    from ckptkit.engine.recipes import Taken  # imports numpy, which plain copies do not need

    return lambda _, dtype: Taken(Operand(source_index, name, dtype))


@dataclass(frozen=True, eq=False)
class BaseWeights:
    """The weights of a base: a directory, a URL or a Hub id. Calling it returns their names, None without weights.

    The first use opens the base. A base that cannot be reached counts as a base without weights, because the Hub's
    cache may contain only the config.
    """

    base: str

    @property
    def layout(self) -> Layout | None:
        """Return the weights under their names in the base; None without weights."""
        return self._layout_or_error if isinstance(self._layout_or_error, Layout) else None

    @property
    def problem(self) -> CkptError | None:
        """Return why existing weights cannot be read, for example Git LFS pointers or an unknown format; else None."""
        return self._layout_or_error if isinstance(self._layout_or_error, CkptError) else None

    @cached_property
    def _layout_or_error(self) -> Layout | CkptError | None:
        try:
            return self.open().weights.layout
        except (Corrupt, Mismatch, Unsupported) as error:
            return error
        except (IOFailure, NotACheckpoint, Usage):
            return None

    def open(self) -> Checkpoint:
        """Return the base as a checkpoint. Raises a `CkptError` if it has no readable weights."""
        return Checkpoint.open(to_model_path(self.base))

    def __call__(self) -> frozenset[str] | None:
        return None if self.layout is None else frozenset(self.layout.tensors)
