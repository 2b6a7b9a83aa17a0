"""Open a checkpoint as `consolidate` would write it: its tensors by name, each in its dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.conversion.convert import draft_conversion
from ckptkit.errors import Mismatch, Unsupported, names_and_more
from ckptkit.formats import locate_all_chunks
from ckptkit.io.path import to_model_path
from ckptkit.layout import Layout, edits
from ckptkit.layout.gc_pause import collector_paused
from ckptkit.state.draft import Conversion, Draft
from ckptkit.state.options import ConvertOptions, Keywords
from ckptkit.words import command_line

_SHOWN = 4  # names in a message
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class ConsolidatedView:
    """A checkpoint as `consolidate` would write it: its plan, and the located tensors by their final names."""

    checkpoint: Checkpoint
    conversion: Conversion
    layout: Layout

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def draft(self) -> Draft:
        return self.conversion.drafts[0]


@collector_paused()
def open_as_consolidated(source: Source, options: Keywords, dst: Path) -> ConsolidatedView:
    """Open a checkpoint as `consolidate` would write it with these options to `dst`.

    Raises `Unsupported` for an adapter, and for weights that have to be computed.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(to_model_path(source))
    asked = ConvertOptions.of(options, to="hf")
    conversion = draft_conversion([checkpoint.with_base(asked.base)], dst, asked)
    draft = conversion.drafts[0]
    if len(conversion.drafts) > 1 or any(file.name == _ADAPTER for file in draft.files):
        hint = "copy the adapter itself: it is small, and each save contains all of it"
        raise Unsupported("ckptkit does not write deltas of adapters", path=checkpoint.path, hint=hint)
    if draft.recipes:
        name = min(draft.recipes)
        hint = f"run {command_line('consolidate', checkpoint.path, 'OUT')} first, and pass OUT"
        message = "expected a tensor of the checkpoint, found one that ckptkit computes (merged or dequantized)"
        raise Unsupported(message, path=checkpoint.path, tensor=name, hint=hint)
    layout = replace(locate_all_chunks(draft.wanted), blobs={}, twins={}, keys={})
    return ConsolidatedView(checkpoint, conversion, layout)


def open_both_as_consolidated(
    base: Source, new: Source, dtype: Sequence[str], dst: Path
) -> tuple[ConsolidatedView, ConsolidatedView]:
    """Open two checkpoints of one model as `consolidate` would write both, in the dtypes of the first.

    A checkpoint without config.json uses the one of the other. With `dtype`, both are cast first. Raises `Mismatch`
    unless they have the same names, shapes and dtypes.
    """
    opened = [one if isinstance(one, Checkpoint) else Checkpoint.open(to_model_path(one)) for one in (base, new)]
    found_in = [one.companions.found_in for one in opened]
    sides = []
    for checkpoint, own, other in zip(opened, found_in, found_in[::-1], strict=True):
        asked: Keywords = {"dtype": dtype} if dtype else {}
        if own is None and other is not None:
            asked["base"] = str(other)
        sides.append(open_as_consolidated(checkpoint, asked, dst))
    one, two = sides
    two = replace(two, layout=locate_all_chunks(edits.cast_to_specs(two.layout, one.layout.specs)))
    before, after = one.layout.specs, two.layout.specs
    for path, other_path, names in (
        (one.path, two.path, sorted(before.keys() - after.keys())),
        (two.path, one.path, sorted(after.keys() - before.keys())),
    ):
        if names:
            shown = names_and_more([f"`{name}`" for name in names], _SHOWN)
            message = f"expected the tensors of {other_path}, found others: {shown}"
            hint = "pass two checkpoints of one model; `ckptkit diff` shows what both contain"
            raise Mismatch(message, path=path, hint=hint)
    for name, spec in before.items():
        if after[name] != spec:
            raise Mismatch(f"expected {spec} as in {one.path}, found {after[name]}", path=two.path, tensor=name)
    in_order = {name: two.layout.tensors[name] for name in one.layout.tensors}
    return one, replace(two, layout=replace(two.layout, tensors=in_order))
