"""Turn adapters into recipes for the tensors that they change, and report what does not fit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from ckptkit.adapters.config import AdapterConfig
from ckptkit.adapters.experts import choose_lora_b_layout, find_lora_b_layout
from ckptkit.adapters.find import Adapter
from ckptkit.adapters.merged_blocks import (
    ChangeStep,
    DoraRescale,
    ExpertsProduct,
    LinearProduct,
    Merge,
    Product,
    Rows,
    ScaledAddition,
    TransposedProduct,
)
from ckptkit.adapters.weight_updates import (
    WeightUpdate,
    is_saved_module,
    trained_biases,
    weight_updates_of,
    wrong_rank_error,
)
from ckptkit.engine.recipes import Taken, working_dtype
from ckptkit.errors import Mismatch, Unsupported
from ckptkit.layout import Layout, Spec, StoredTensor
from ckptkit.layout.box import Box, Shape
from ckptkit.layout.dtypes import DType
from ckptkit.layout.plan import Operand, Recipe, Region, identity_region
from ckptkit.models.architectures import HEAD, find_embedding
from ckptkit.state.options import BLOCKS

Kind = Callable[[Operand, Operand, Shape, Shape, float], Product]

# the newest PEFT that was seen to add the product for the `out_proj` of an `nn.MultiheadAttention` twice, in training
# and in a merge; https://github.com/huggingface/peft/pull/3774 proposes to change it
_ADDS_TWICE = (0, 21)
MERGE_WITH_PEFT = "merge it with `merge_and_unload` of the PEFT that trained it"
_MOST_IN_MEMORY = 1 << 28  # bytes of a tensor that stays in memory in full, because every block needs all of it

# the modules that are a `Conv1D` of transformers in GPT-2, OpenAI GPT, ImageGPT and CLVP; elsewhere, an `nn.Linear`
_CONV1D = ("c_attn", "c_fc", "c_proj", "q_attn")


def may_be_conv1d(weight_name: str) -> bool:
    """Return whether the name is one of a `Conv1D` weight, which has shape [in, out]."""
    return weight_name.endswith(tuple(f"{name}.weight" for name in _CONV1D))


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to merge: the number of its layout among the sources, and its factor in the sum (`weight`)."""

    number: int
    adapter: Adapter
    config: AdapterConfig
    base: Mapping[str, str]  # the other tensors of its checkpoint: base model name -> name in the checkpoint
    weight: float = 1.0
    experts_layout: str | None = None  # the value of --experts-layout

    def shape_of_tensor(self, name: str) -> Shape:
        return self.adapter.layout.tensors[name].spec.shape

    def mismatch_error(self, message: str, name: str, hint: str | None = None) -> Mismatch:
        return Mismatch(message, path=self.adapter.layout.path, tensor=name, hint=hint)


@dataclass
class Merging:
    """The tensors of a base while adapters are merged into it: the initial value of each, and the steps that change it.

    `plain` has the recipes that dequantize the tensors of a quantized base.
    """

    base: Layout
    plain: Mapping[str, Recipe] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    begins: dict[str, Operand] = field(default_factory=dict)
    steps: dict[str, list[ChangeStep]] = field(default_factory=lambda: defaultdict(list))
    reach: dict[str, Region] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tensors = dict(self.base.tensors)

    def add_adapter(self, source: AdapterSource) -> None:
        """Add an adapter. Raises `Mismatch` if it does not fit, `Unsupported` if it cannot be merged."""
        source.config.require_supported_settings()
        self.replace_parameters(source)
        updates = list(weight_updates_of(source.adapter))
        inside = {update.module for update in updates if self.find_attention_around(source, update)}
        for update in updates:
            if update.module in inside and update.attention is None:
                self.add_note_once(
                    "ignored `out_proj` matrices of nn.MultiheadAttention that PEFT saves but does not use"
                )
            else:
                self.add_update(source, update)
        for name, entry in source.adapter.entries.items():
            if entry.kind == "tokens":
                self.replace_rows(source, f"{entry.module}.weight", name, entry.module)

    def replace_parameters(self, source: AdapterSource) -> None:
        """Replace the parameters that were trained in full."""
        replaced = {entry.module: name for name, entry in source.adapter.entries.items() if entry.kind == "module"}
        biases = trained_biases(source.adapter, source.config, source.base)
        replaced |= {own: name for own, name in source.base.items() if name in biases}
        replaced = self.resized_embeddings(source) | replaced
        for own, name in replaced.items():
            require_factor_one(source, name, f"`{own}`, which was trained in full")
            if self.begins.get(own) is not None:
                raise source.mismatch_error(f"two adapters contain `{own}`, trained in full", name)
            trained = source.adapter.layout.tensors[name]
            in_base = self.tensors.get(own)
            if in_base is None and not is_saved_module(own, source.config):
                raise source.mismatch_error(
                    f"the base does not have `{own}`", name, hint=hint_similar_name(own, self.base)
                )
            if in_base is None:
                self.notes.append(f"`{own}` comes from the adapter: the base does not have this tensor")
            elif in_base.spec.shape != trained.spec.shape:
                ours, theirs = list(trained.spec.shape), list(in_base.spec.shape)
                self.notes.append(f"`{own}` has the adapter's shape {ours}, not the base's {theirs}")
            dtype = trained.spec.dtype if in_base is None else in_base.spec.dtype
            is_castable = trained.spec.dtype == dtype or trained.spec.dtype.is_castable_to(dtype)
            if not is_castable:
                raise source.mismatch_error(
                    f"expected {in_base and in_base.spec} as in the base, found {trained.spec}", name
                )
            self.tensors[own] = StoredTensor(Spec(dtype, trained.spec.shape), ())
            self.begins[own] = Operand(source.number, name, dtype)

    def resized_embeddings(self, source: AdapterSource) -> dict[str, str]:
        """Return the embedding and head that training resized: they belong to the adapter, as in PEFT's own files."""
        ends = (HEAD, find_embedding(source.base))
        sought = [own for own in source.base if own in ends and own in self.tensors]
        shapes = {own: (self.tensors[own].spec.shape, source.shape_of_tensor(source.base[own])) for own in sought}
        return {own: source.base[own] for own, (old, new) in shapes.items() if old != new and old[1:] == new[1:]}

    def add_update(self, source: AdapterSource, update: WeightUpdate) -> None:
        """Add a low-rank update of a weight, and of the bias beside it."""
        own = f"{update.module}.weight"
        if own in self.tensors and own not in source.config.target_parameters_of(update.module):
            kind = self.choose_product_kind(source, update, own)
        else:
            own, kind = self.find_parameter_and_product(source, update)
        dtype = working_dtype(self.tensors[own].spec.dtype)
        a, b = (Operand(source.number, name, dtype) for name in (update.a, update.b))
        scaling = source.config.scaling_of(self.peft_lookup_name(source, update, own)) * source.weight
        product = kind(a, b, source.shape_of_tensor(update.a), source.shape_of_tensor(update.b), scaling)
        self.require_float_base(own, source, update.a)
        if update.magnitude is None:
            self.steps[own] += [product] * self.times_peft_adds_product(source, update)
        else:
            self.steps[own].append(self.dora_step(source, update, own, product))
        if update.bias is not None:
            bias = f"{update.module}.bias"
            if bias not in self.tensors or self.tensors[bias].spec.shape != source.shape_of_tensor(update.bias):
                raise source.mismatch_error(f"the base does not have a `{bias}` of this shape to add to", update.bias)
            self.require_float_base(bias, source, update.bias)
            dtype = working_dtype(self.tensors[bias].spec.dtype)
            self.steps[bias].append(ScaledAddition(Operand(source.number, update.bias, dtype), product.scaling))

    def peft_lookup_name(self, source: AdapterSource, update: WeightUpdate, own: str) -> str:
        """Return the name by which PEFT looks up rank and alpha: `own` if that is a target, else the module's name."""
        if own in source.config.target_parameters_of(update.module):
            return own
        return self.find_attention_around(source, update) or update.module

    def find_attention_around(self, source: AdapterSource, update: WeightUpdate) -> str | None:
        """Return the `nn.MultiheadAttention` of an `out_proj` that PEFT adapted with it; None for any other module."""
        weight = f"{update.attention}.in_proj_weight"
        if update.attention is None or weight not in self.tensors:
            return None
        return None if weight in source.config.target_parameters_of(update.attention) else update.attention

    def times_peft_adds_product(self, source: AdapterSource, update: WeightUpdate) -> int:
        """Return how often PEFT adds a product to a weight. Raises `Unsupported` for an unknown version of PEFT."""
        if self.find_attention_around(source, update) is None:
            return 1
        # an adapter without a version is from a known PEFT: PEFT 0.18 and newer record it
        version = source.config.values.get("peft_version")
        match = re.match(r"([0-9]{1,8})\.([0-9]{1,8})", str(version))
        if match and (int(match[1]), int(match[2])) > _ADDS_TWICE:
            message = (
                f"saved by PEFT {version}: ckptkit does not know whether this version adds the `out_proj` product once "
                "or twice"
            )
            raise Unsupported(message, path=source.adapter.layout.path, tensor=update.a, hint=MERGE_WITH_PEFT)
        self.add_note_once("added the product for `out_proj` of nn.MultiheadAttention twice, as PEFT does in training")
        return 2

    def add_note_once(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def choose_product_kind(self, source: AdapterSource, update: WeightUpdate, own: str) -> Kind:
        """Return the orientation in which a layer stores its weight: by shapes, or by its type if it is square."""
        shape, a, b = self.tensors[own].spec.shape, source.shape_of_tensor(update.a), source.shape_of_tensor(update.b)
        if len(shape) < 2:
            raise source.mismatch_error(
                f"expected a matrix as `{own}` of the base, found shape {list(shape)}", update.a
            )
        rank = source.config.rank_of(self.peft_lookup_name(source, update, own))
        if a[0] != rank:
            raise wrong_rank_error(source.adapter, source.config, update, [rank], a[0])
        is_plain = (b[0], *a[1:]) == shape and not update.is_embedding
        is_turned = len(shape) == 2 and (a[1], b[0]) == shape
        if not (is_plain or is_turned):
            product = [b[0], *a[1:]]
            message = f"expected a weight update of shape {list(shape)} (`{own}` of the base), found {product}"
            raise source.mismatch_error(message, update.a, hint="check that the adapter was trained on this base")
        if is_plain and is_turned:
            return self.orientation_of_square_weight(source, update, own)
        return LinearProduct if is_plain else TransposedProduct

    def orientation_of_square_weight(self, source: AdapterSource, update: WeightUpdate, own: str) -> Kind:
        """Return the orientation of a square weight. Raises `Unsupported` if nothing decides it.

        `fan_in_fan_out` is one switch for all layers, set for the last layer type that PEFT visited. If other layers of
        the adapter contradict the switch, it says nothing about a square weight.
        """
        if not may_be_conv1d(own):
            return LinearProduct
        is_turned = source.config.bool_setting("fan_in_fan_out")
        # a layer that is not square and contradicts the switch shows that the switch is not valid for every layer
        for other in weight_updates_of(source.adapter):
            tensor = self.tensors.get(f"{other.module}.weight")
            product = (source.shape_of_tensor(other.b)[0], *source.shape_of_tensor(other.a)[1:])
            shape = tensor.spec.shape if tensor else ()
            if not other.is_embedding and len(set(shape)) == 2 == len(shape) and (shape == product) == is_turned:
                message = (
                    f"`{own}` is square, and other layers contradict `fan_in_fan_out`: ckptkit cannot know whether the "
                    "weight is transposed"
                )
                raise Unsupported(message, path=source.adapter.layout.path, tensor=update.a)
        # PEFT corrects the switch by the type of the layer (`LoraModel._create_new_module`); the bias of a matrix that
        # is not square shows whether such modules of the base are a `Conv1D`
        for name, tensor in self.base.tensors.items():
            bias = self.base.tensors.get(f"{name.removesuffix('.weight')}.bias")
            shape = tensor.spec.shape
            if may_be_conv1d(name) and bias and len(set(shape)) == 2 == len(shape):
                is_turned = bias.spec.shape == shape[1:]
                break
        return TransposedProduct if is_turned else LinearProduct

    def find_parameter_and_product(self, source: AdapterSource, update: WeightUpdate) -> tuple[str, Kind]:
        """Return the parameter of a module that an update changes: the only one with a fitting shape."""
        fitting_parameters = list(self.fitting_parameters(source, update))
        if len(fitting_parameters) == 1:
            return fitting_parameters[0]
        if not fitting_parameters:
            a, b = source.shape_of_tensor(update.a), source.shape_of_tensor(update.b)
            message = f"the base does not have a `{update.module}` that fits matrices {list(b)} and {list(a)}"
            # weights of single experts that are dequantized have no bytes that could be joined to one tensor
            experts_apart = update.module.endswith(".experts") and any(".experts.0." in name for name in self.plain)
            hint = "dequantize the base first: ckptkit consolidate BASE OUT --dtype bf16" if experts_apart else None
            raise source.mismatch_error(message, update.a, hint=hint or hint_similar_name(update.module, self.base))
        names = sorted({name for name, _ in fitting_parameters})
        message = f"the matrices fit several parameters of the base ({', '.join(names)}), and no file says which one"
        if len(names) == 1:
            sides = list(self.tensors[names[0]].spec.shape[1:])
            message = f"the experts `{names[0]}` have equal sides {sides}: no shape tells which side lora_A belongs to"
        raise Unsupported(message, path=source.adapter.layout.path, tensor=update.a, hint=MERGE_WITH_PEFT)

    def fitting_parameters(self, source: AdapterSource, update: WeightUpdate) -> Iterator[tuple[str, Kind]]:
        """Yield the parameters of a module whose shape fits an update, with the kind of product."""
        a, b = source.shape_of_tensor(update.a), source.shape_of_tensor(update.b)
        wanted = source.config.target_parameters_of(update.module)
        for own, tensor in self.tensors.items():
            shape = tensor.spec.shape
            if own.rpartition(".")[0] != update.module or (wanted and own not in wanted):
                continue
            rank = source.config.rank_of(self.peft_lookup_name(source, update, own))
            if len(shape) == 2 and (a, b) == ((rank, shape[1]), (shape[0], rank)):
                yield own, LinearProduct
            elif len(shape) == 3 and a[0] == b[1] == rank * shape[0]:
                for is_transposed, sides in ((False, (b[0], a[1])), (True, (a[1], b[0]))):
                    if sides == shape[1:]:
                        kind = partial(ExpertsProduct, count=shape[0], is_transposed=is_transposed)
                        yield (
                            own,
                            partial(kind, is_in_blocks=self.lora_b_layout_of(source, update, own, rank) == BLOCKS),
                        )

    def lora_b_layout_of(self, source: AdapterSource, update: WeightUpdate, own: str, rank: int) -> str:
        """Return the layout of lora_B of fused experts; notes if `--experts-layout` contradicts the files."""
        count, given = self.tensors[own].spec.shape[0], source.experts_layout
        recorded = find_lora_b_layout(source.config, own) if given and 1 not in (count, rank) else None
        if recorded and recorded != given:
            reads = f"ckptkit reads lora_B of experts as {given} (--experts-layout)"
            self.add_note_once(f"{reads}, but {source.config.path} says {recorded}")
        return choose_lora_b_layout(source.config, own, count, rank, given, update.b)

    def dora_step(self, source: AdapterSource, update: WeightUpdate, own: str, product: Product) -> DoraRescale:
        """Return DoRA's step. It needs all weights of each output in memory at once."""
        assert update.magnitude is not None
        shape, is_turned = self.tensors[own].spec.shape, isinstance(product, TransposedProduct)
        magnitude = source.shape_of_tensor(update.magnitude)
        outputs = shape[1 if is_turned else 0]
        if sorted(magnitude) != sorted((1,) * (len(magnitude) - 1) + (outputs,)):
            message = f"expected {outputs} magnitudes, one for each output, found shape {list(magnitude)}"
            raise source.mismatch_error(message, update.magnitude)
        require_factor_one(source, update.magnitude, "a DoRA adapter")
        spec = self.tensors[own].spec
        if is_turned and spec.numel * product.a.dtype.itemsize > _MOST_IN_MEMORY:
            message = f"DoRA needs full columns of this weight ({spec}), more than fits in memory"
            raise Unsupported(message, path=source.adapter.layout.path, tensor=update.magnitude)
        full = Box((0,) * len(shape), shape)
        self.reach[own] = (
            (lambda _: full)  # an output is a column here, so every box needs full columns
            if is_turned
            else (lambda box: Box((box.start[0], *full.start[1:]), (box.size[0], *shape[1:])))
        )
        operand = Operand(source.number, update.magnitude, product.a.dtype)
        return DoraRescale(product, operand, magnitude, int(is_turned))

    def replace_rows(self, source: AdapterSource, own: str, name: str, module: str) -> None:
        """Replace the rows of an embedding that were trained."""
        if own not in self.tensors:
            raise source.mismatch_error(f"the base does not have `{own}`", name, hint=hint_similar_name(own, self.base))
        self.require_float_base(own, source, name)
        require_factor_one(source, name, f"rows of `{own}`, which were trained in full")
        shape, row_shape = self.tensors[own].spec.shape, source.shape_of_tensor(name)
        indices = source.config.trained_token_indices(module)
        if row_shape != (len(indices), *shape[1:]):
            message = f"expected {len(indices)} rows of `{own}` (shape {list(shape)}), found shape {list(row_shape)}"
            raise source.mismatch_error(message, name)
        if (last := max(indices, default=0)) >= shape[0]:
            message = f"expected row indices below {shape[0]} (rows of `{own}` in the base), found {last}"
            raise source.mismatch_error(message, name)
        taken = {row for step in self.steps[own] if isinstance(step, Rows) for row in step.indices}
        if both := taken & set(indices):
            raise source.mismatch_error(f"two adapters contain row {min(both)} of `{own}`, trained in full", name)
        self.steps[own].append(Rows(Operand(source.number, name, working_dtype(self.tensors[own].spec.dtype)), indices))

    def require_float_base(self, base_name: str, source: AdapterSource, name: str) -> None:
        """Raise `Unsupported` for a tensor of the base that is not a float of 16 bits or more."""
        dtype = self.tensors[base_name].spec.dtype
        if not dtype.is_castable_to(dtype):
            message = f"expected floats in `{base_name}` of the base, found {dtype}"
            hint = "convert the base to floats first: ckptkit consolidate BASE OUT --dtype bf16"
            raise Unsupported(message, path=source.adapter.layout.path, tensor=name, hint=hint)

    @property
    def changed_tensors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.begins, *(name for name, steps in self.steps.items() if steps))))

    def have_same_changed_rows(self, name: str, source: str) -> bool:
        """Return whether `source` was changed only by rows, and `name` by the same rows or not at all."""
        rows, others = ([getattr(step, "indices", None) for step in self.steps.get(one, [])] for one in (source, name))
        is_by_rows = bool(rows) and None not in rows and not {name, source} & self.begins.keys()
        return is_by_rows and others in ([], rows)

    def make_recipe(self, name: str, source: str, dtype: DType) -> Recipe:
        """Return the recipe that computes a tensor as `dtype`; `source` is its name in the base."""
        steps = self.steps.get(name)
        if name in self.plain and name not in self.begins:
            plain = self.plain[name]
            return Merge(plain, steps, self.reach.get(name, identity_region)) if steps else plain
        initial = self.begins.get(name, Operand(0, source, dtype))
        if not steps:
            return Taken(initial._replace(dtype=dtype))
        return Merge(
            initial._replace(dtype=self.tensors[name].spec.dtype), steps, self.reach.get(name, identity_region)
        )


def require_factor_one(source: AdapterSource, name: str, what: str) -> None:
    """Raise `Unsupported` if the adapter has a weight other than 1. What replaces the base cannot be scaled."""
    if source.weight != 1:
        message = f"--factors: expected 1 for {what}, found {source.weight:g}"
        raise Unsupported(message, path=source.adapter.layout.path, tensor=name, hint="pass 1 for this adapter")


def hint_similar_name(name: str, base: Layout) -> str:
    last = name.removesuffix(".weight").rpartition(".")[2]
    alike = next((own for own in base.tensors if f".{last}." in f".{own}"), None) or next(iter(base.tensors), "nothing")
    return f"the base has {alike}: pass the base that the adapter was trained on, with unchanged tensor names"
