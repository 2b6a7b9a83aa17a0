"""Read the expert matrices of an adapter, in any form that a library stores. Only byte locations change.

    flat        experts.lora_A [E*r, in], lora_B [out, r*E]       PEFT's target_parameters; vLLM's fused experts
    stacked     experts.lora_A [E, r, in], lora_B [out, r, E]     Megatron-Bridge's `stack_3d_moe`, for vLLM
    per-expert  experts.3.down_proj.lora_A [r, in], B [out, r]    PEFT with a module for each expert; vLLM, SGLang
    3d          experts.down_proj.lora_A [E, r, in], B [E, out, r]  SGLang, Megatron-Bridge, SkyRL, Tinker

In `flat` and `stacked`, the gate-and-up matrices are called `experts.base_layer`. In `3d`, E is 1 if all experts share
one matrix. Sources: `ParamWrapper` in peft/tuners/lora/layer.py; peft/utils/transformers_weight_conversion.py;
`_stack_moe_lora_weights` in vllm/lora/model_manager.py; sgl-project/sglang#25528; NVIDIA-NeMo/Megatron-Bridge#5939;
`_convert_moe_experts_lora_to_vllm` of SkyRL's megatron_worker.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptkit.adapters.config import AdapterConfig
from ckptkit.adapters.experts import choose_lora_b_layout, find_expert_form
from ckptkit.adapters.find import Adapter
from ckptkit.adapters.names import ExpertPlace
from ckptkit.errors import CkptError, Mismatch, Unsupported, Usage
from ckptkit.layout import StoredTensor, axes
from ckptkit.state.options import BLOCKS, FLAT, STACKED

GATE_UP, DOWN, GATE, UP = "gate_up_proj", "down_proj", "gate_proj", "up_proj"
_FUSED = (GATE_UP, DOWN)
_LEAVES = {**{leaf: leaf for leaf in (GATE_UP, DOWN, GATE, UP)}, "w1": GATE, "w2": DOWN, "w3": UP}


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
        if find_expert_form(self.adapter) in (FLAT, STACKED):
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
