"""Read the expert matrices of an adapter, in any form that a library stores. Only byte locations change.

    flat        experts.lora_A [E*r, in], lora_B [out, r*E]       PEFT's target_parameters; vLLM's fused experts
    stacked     experts.lora_A [E, r, in], lora_B [out, r, E]     Megatron-Bridge's `stack_3d_moe`, for vLLM
    per-expert  experts.3.down_proj.lora_A [r, in], B [out, r]    PEFT with a module for each expert; vLLM, SGLang
    3d          experts.down_proj.lora_A [E, r, in], B [E, out, r]  SGLang, Megatron-Bridge, SkyRL, Tinker

In `flat` and `stacked`, the gate-and-up matrices are called `experts.base_layer`. In `3d`, E is 1 if all experts share
one matrix. Sources: `ParamWrapper` in peft/tuners/lora/layer.py; peft/utils/transformers_weight_conversion.py;
`_stack_moe_lora_weights` in vllm/lora/model_manager.py; sgl-project/sglang#25528; NVIDIA-NeMo/Megatron-Bridge#5939;
`_convert_moe_experts_lora_to_vllm` of SkyRL's megatron_worker.py.

In `flat`, B is packed in one of two layouts: in `peft` column `k*E + e` belongs to expert e, in `blocks` column
`e*r + k`. unsloth trained `blocks` until 2026.9.5. Since 2026.9.6 it uses PEFT's layout, and records which layout it
used. Sources: `ParamWrapper.get_delta_weight` in peft/tuners/lora/layer.py; `unflatten_moe_lora_b` and
`saved_lora_b_layouts` in unsloth_zoo/temporary_patches/moe_utils.py (2026.10.9); unslothai/unsloth#6930,
unslothai/unsloth-zoo#1232 and #1269.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptkit.adapters.config import AdapterConfig
from ckptkit.adapters.find import Adapter
from ckptkit.adapters.names import ExpertPlace
from ckptkit.errors import CkptError, Mismatch, Unsupported, Usage
from ckptkit.io.file import read_small
from ckptkit.layout import StoredTensor, axes
from ckptkit.state.options import BLOCKS, FLAT, PEFT, PER_EXPERT, THREE_D

_STACKED = "stacked"
GATE_UP, DOWN, GATE, UP = "gate_up_proj", "down_proj", "gate_proj", "up_proj"
_FUSED = (GATE_UP, DOWN)
_LEAVES = {**{leaf: leaf for leaf in (GATE_UP, DOWN, GATE, UP)}, "w1": GATE, "w2": DOWN, "w3": UP}
_HINT = "pass --experts-layout blocks if unsloth 2026.9.5 or older trained the adapter, or else --experts-layout peft"

_RECORDED = {"rank_major": PEFT, "grouped_by_expert": BLOCKS}
_FLAT, _DETAIL = "lora_B_layout", "unsloth_fused_expert_lora"
_CARD, _TAG = "README.md", "- unsloth"  # the model card of an adapter that unsloth trained has this tag
_LIMIT = 1 << 24  # bytes of a model card


class ExpertPair(NamedTuple):
    """The two matrices for one parameter of all experts of a layer: A `[E, r, in]` and B `[E, out, r]`.

    `source` is the name that the adapter's config uses: of the parameter, or of the first expert's module.
    """

    module: str
    leaf: str
    a: StoredTensor
    b: StoredTensor
    source: str

    @property
    def expert_count(self) -> int:
        return self.a.spec.shape[0]

    @property
    def rank(self) -> int:
        return self.a.spec.shape[1]


def find_expert_form(adapter: Adapter) -> str | None:
    """Return the form of an adapter's expert matrices; None if it has none. Raises `Mismatch` for several forms."""
    specs = adapter.layout.specs
    name_by_form = {}
    for name, entry in adapter.entries.items():
        if place := entry.of_experts:
            all_in_one = _STACKED if len(specs[name].shape) == 3 else FLAT
            form = PER_EXPERT if place.expert is not None else THREE_D if place.leaf else all_in_one
            name_by_form[form] = name
    if len(name_by_form) > 1:
        message = f"the adapter stores experts as {' and '.join(sorted(name_by_form))}"
        raise Mismatch(message, path=adapter.layout.path, tensor=next(iter(name_by_form.values())))
    return next(iter(name_by_form), None)


@dataclass(frozen=True, slots=True)
class ExpertReader:
    """Reads the expert matrices of one adapter, in any form.

    `layout` is the option for the layout of lora_B, and `hidden` and `count` are the hidden size and the number of
    experts in the base's config; None if unknown.
    """

    adapter: Adapter
    config: AdapterConfig
    layout: str | None
    hidden: int | None
    count: int | None

    def read_pairs(self) -> list[ExpertPair]:
        """Return all expert matrices. Raises `Mismatch` for contradictions, or `Unsupported`."""
        by_depth: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        by_place: dict[str, dict[ExpertPlace, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
        for name, entry in self.adapter.entries.items():
            if location := entry.of_experts:
                by_depth[location.module][entry.depth][entry.kind] = name
                by_place[location.module][location][entry.kind] = name
        # the depths of PEFT's wrappers tell the parameters of a layer apart
        if find_expert_form(self.adapter) in (FLAT, _STACKED):
            pairs = [pair for module, names in by_depth.items() for pair in self.read_nested_pairs(module, names)]
        else:
            pairs = [pair for module, places in by_place.items() for pair in self.read_parameter_pairs(module, places)]
        counts: dict[str, int] = {}  # by layer
        for pair in pairs:
            wanted = self.count or counts.setdefault(pair.module, pair.expert_count)
            if pair.expert_count != wanted:
                message = f"expected {wanted} experts, found {pair.expert_count} of `{pair.module}.{pair.leaf}`"
                raise Mismatch(message, path=self.adapter.layout.path, hint="check that no shard is missing")
        return pairs

    def tensor(self, name: str) -> StoredTensor:
        return self.adapter.layout.tensors[name]

    def misfit_error(self, name: str, expected: str) -> Mismatch:
        spec = self.tensor(name).spec
        return Mismatch(f"expected {expected}, found {spec}", path=self.adapter.layout.path, tensor=name)

    def read_parameter_pairs(
        self, module: str, places: Mapping[ExpertPlace, Mapping[str, str]]
    ) -> Iterator[ExpertPair]:
        """Yield the matrices that are named after parameters, for all experts together or for each expert."""
        by_leaf: dict[str, dict[int | None, Mapping[str, str]]] = defaultdict(dict)
        for location, names in places.items():
            by_leaf[location.leaf][location.expert] = names
        for own, experts in by_leaf.items():
            leaf, first = _LEAVES.get(own), next(iter(experts.values()))
            if leaf is None:
                message = f"expected experts with {', '.join(_LEAVES)}, found `{own}`"
                raise Unsupported(message, path=self.adapter.layout.path, tensor=first["A"])
            if None in experts:
                matrices = experts[None]
                a, b = self.tensor(matrices["A"]), self.tensor(matrices["B"])
                if len(a.spec.shape) != 3:
                    raise self.misfit_error(matrices["A"], "lora_A of shape [experts, rank, inputs]")
                if len(b.spec.shape) != 3 or b.spec.shape[2] != a.spec.shape[1]:
                    expected = f"lora_B of shape [experts, outputs, {a.spec.shape[1]}]"
                    raise self.misfit_error(matrices["B"], expected)
                count = max(a.spec.shape[0], b.spec.shape[0])
                if {a.spec.shape[0], b.spec.shape[0]} - {1, count}:
                    raise self.misfit_error(matrices["B"], f"matrices of {a.spec.shape[0]} experts, or one for all")
                if count == 1 and self.count:
                    count = self.count
                a, b = repeat_shared_expert(a, count), repeat_shared_expert(b, count)
                yield ExpertPair(module, leaf, a, b, f"{module}.{own}")
                continue
            numbers = sorted(number for number in experts if number is not None)
            if numbers != list(range(len(numbers))):
                message = f"expected experts 0 to {numbers[-1]} of `{own}`, found {len(numbers)} of them"
                raise Mismatch(message, path=self.adapter.layout.path, tensor=first["A"])
            in_order = [experts[number] for number in numbers]
            a, b = (self.stack_experts([names[kind] for names in in_order]) for kind in "AB")
            yield ExpertPair(module, leaf, a, b, f"{module}.0.{own}")

    def stack_experts(self, names: Sequence[str]) -> StoredTensor:
        """Stack the matrices of all experts along a new first axis. Raises `Mismatch` if their shapes differ."""
        first = self.tensor(names[0]).spec
        for name in names:
            if self.tensor(name).spec != first:
                raise self.misfit_error(name, f"{first}, as the other experts have")
        return axes.stack_tensors([self.tensor(name) for name in names])

    def read_nested_pairs(self, module: str, names: Mapping[int, Mapping[str, str]]) -> Iterator[ExpertPair]:
        """Yield the matrices of PEFT's nested wrappers, by their depth. Shapes tell to which parameter they belong."""
        sides = {
            depth: (self.tensor(matrices["A"]).spec.shape[-1], self.tensor(matrices["B"]).spec.shape[0])
            for depth, matrices in names.items()
        }
        leaves, is_turned = self.identify_parameters(module, sides, next(iter(names.values()))["A"])
        for depth, matrices in names.items():
            parameter = f"{module}.{leaves[depth]}"
            a, b = self.tensor(matrices["A"]), self.tensor(matrices["B"])
            if len(a.spec.shape) == 3:
                if len(b.spec.shape) != 3 or b.spec.shape[1:] != a.spec.shape[1::-1]:
                    expected = f"lora_B of shape [outputs, {a.spec.shape[1]}, {a.spec.shape[0]}]"
                    raise self.misfit_error(matrices["B"], expected)
                b = axes.permute_axes(b, (2, 0, 1))
            else:
                rank, rows = self.config.rank_of(parameter), a.spec.shape[0]
                if rows % rank or b.spec.shape[1] != rows:
                    raise self.misfit_error(matrices["B"], f"lora_B with {rows} columns, {rank} for each expert")
                count = rows // rank
                layout = choose_lora_b_layout(self.config, parameter, count, rank, self.layout, matrices["B"])
                is_in_blocks = layout == BLOCKS
                a = axes.split_axis(a, 0, (count, rank))
                b = axes.split_axis(b, 1, (count, rank) if is_in_blocks else (rank, count))
                b = axes.permute_axes(b, (1, 0, 2) if is_in_blocks else (2, 0, 1))
            if is_turned:  # PEFT 0.18 and older treat a weight [out, in] as [in, out]
                a, b = axes.permute_axes(b, (0, 2, 1)), axes.permute_axes(a, (0, 2, 1))
            yield ExpertPair(module, leaves[depth], a, b, parameter)

    def identify_parameters(
        self, module: str, in_out_sizes_by_depth: Mapping[int, tuple[int, int]], name: str
    ) -> tuple[dict[int, str], bool]:
        """Return the parameter at each depth, and whether inputs and outputs are swapped.

        A gate-and-up projection has twice as many rows as the down projection has columns, so two pairs fit in only one
        way. For a single pair, the base's hidden size decides.
        """
        targets = {target.rpartition(".")[2] for target in self.config.name_list_setting("target_parameters")}
        if not targets <= set(_FUSED):
            message = f"expected experts with {' and '.join(_FUSED)}, found {', '.join(sorted(targets))}"
            raise self.unsupported_error(message, name)
        if len(in_out_sizes_by_depth) == 2:
            inner, outer = max(in_out_sizes_by_depth), min(in_out_sizes_by_depth)
            for leaves in ({inner: GATE_UP, outer: DOWN}, {inner: DOWN, outer: GATE_UP}):
                for is_turned in (False, True):
                    (inputs, rows), (columns, outputs) = (
                        in_out_sizes_by_depth[depth][::-1] if is_turned else in_out_sizes_by_depth[depth]
                        for depth in sorted(leaves, key=leaves.__getitem__, reverse=True)
                    )
                    # gate_up maps hidden to 2 * intermediate, down maps intermediate to hidden
                    if (inputs, rows) == (outputs, 2 * columns):
                        return leaves, is_turned
            raise self.unsupported_error(f"`{module}`: the shapes do not fit {' and '.join(_FUSED)}", name)
        if len(targets) != 1 or len(in_out_sizes_by_depth) != 1:
            message = f"expected matrices for each of {', '.join(sorted(targets)) or 'its parameters'} of `{module}`"
            raise self.unsupported_error(f"{message}, found {len(in_out_sizes_by_depth)}", name)
        ((depth, (inputs, outputs)),), (leaf,) = in_out_sizes_by_depth.items(), targets
        of_hidden, other = (inputs, outputs) if leaf == GATE_UP else (outputs, inputs)
        if (of_hidden == self.hidden) == (other == self.hidden):
            message = f"`{leaf}` [{outputs}, {inputs}]: only the base shows which side is the input"
            raise Usage(message, path=self.adapter.layout.path, hint="pass --base MODEL")
        return {depth: leaf}, other == self.hidden

    def unsupported_error(self, message: str, name: str) -> CkptError:
        hint = "drop --experts to keep the matrices as they are"
        return Unsupported(message, path=self.adapter.layout.path, tensor=name, hint=hint)


def repeat_shared_expert(tensor: StoredTensor, count: int) -> StoredTensor:
    """Return a tensor of one expert repeated for `count` experts; any other tensor unchanged."""
    return axes.concatenate([tensor] * count, 0) if tensor.spec.shape[0] == 1 < count else tensor


def find_lora_b_layout(config: AdapterConfig, parameter: str) -> str | None:
    """Return the layout of lora_B of a fused-experts parameter: `peft` or `blocks`; None if no file says.

    unsloth's record takes precedence. Without a record, an adapter of unsloth may have either layout. For any other
    library, `peft_version` in the config shows that PEFT wrote the adapter.
    """
    mapping = config.values.get("auto_mapping")  # where unsloth records itself
    mapping = mapping if isinstance(mapping, dict) else {}
    leaf = parameter.rpartition(".")[2]
    for record in (config.values, mapping):
        if _FLAT in record or _DETAIL in record:
            return _RECORDED.get(unsloth_layout_of(record, leaf))
    if "peft_version" not in config.values or "unsloth" in json.dumps(mapping):
        return None
    card = config.path.parent / _CARD
    is_tagged = card.is_file() and _TAG in read_small(card, _LIMIT).decode(errors="replace").splitlines()
    return None if is_tagged else PEFT


def choose_lora_b_layout(
    config: AdapterConfig, parameter: str, count: int, rank: int, option: str | None, tensor: str
) -> str:
    """Return the layout of lora_B of fused experts: `option`, or else the layout that the files record.

    For one expert or rank 1 both layouts are the same. Raises `Unsupported` if the layout is unknown.
    """
    if 1 in (count, rank):
        return PEFT
    layout = option or find_lora_b_layout(config, parameter)
    if layout is None:
        message = f"no file records the layout of lora_B for {count} experts of rank {rank}: peft or blocks"
        raise Unsupported(message, path=config.path, tensor=tensor, hint=_HINT)
    return layout


def remarks_on_lora_b_layout(config: AdapterConfig) -> list[str]:
    """Return a remark if an adapter of fused experts has a layout other than PEFT's, or an unknown one."""
    layouts = {
        name: find_lora_b_layout(config, name) or "unknown" for name in config.name_list_setting("target_parameters")
    }
    unlike = ", ".join(f"{name} ({layout})" for name, layout in layouts.items() if layout != PEFT)
    if not unlike:
        return []
    option = " --experts-layout peft|blocks" if "unknown" in layouts.values() else ""
    hint = f"pass --merge{option} to write the merged model instead"
    return [f"loaders of adapters expect lora_B of experts in PEFT's layout, found {unlike}; {hint}"]


def unsloth_layout_of(record: Mapping[str, Any], leaf: str) -> str:
    """Return the layout that unsloth recorded for a parameter; "" without a record."""
    detail = record.get(_DETAIL)
    parameters = detail.get("parameters") if isinstance(detail, dict) else None
    if not isinstance(parameters, dict):
        return str(record.get(_FLAT))
    entry = parameters.get(leaf)
    return str(entry.get(_FLAT)) if isinstance(entry, dict) else ""
