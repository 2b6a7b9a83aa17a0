"""Consolidates: the model of a training checkpoint as a Hugging Face model that every loader opens."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckptkit import edits
from ckptkit.dtypes import DType, parse_dtype
from ckptkit.errors import Usage
from ckptkit.formats import get_writer, open_layout
from ckptkit.layout import Layout
from ckptkit.ops.companions import CONFIG, Companions, find_companions, mend_config
from ckptkit.ops.convert import Output, Progress, make_draft, peak_rss_bytes, write
from ckptkit.ops.fit import fit
from ckptkit.ops.weights import LeftOut, Weights, find_weights
from ckptkit.runs import find_checkpoint
from ckptkit.staging import check_destination, free_bytes

DEFAULT_SHARD_SIZE = 5 * 10**9
Rule = tuple[re.Pattern[str], str]


@dataclass(frozen=True, slots=True)
class Consolidated:
    """What a consolidation did, or with `dry_run` would do."""

    source: Path
    output: Path
    wrapper: str
    files: dict[str, int]
    tensors: int
    nbytes: int
    renamed: dict[str, str]
    dropped: tuple[LeftOut, ...]
    cast: dict[str, str]
    notes: tuple[str, ...]
    seconds: float
    copies: int = 0
    checked_bytes: int = 0
    unchecked_bytes: int = 0
    free_bytes: int = 0
    peak_rss_bytes: int = 0
    dry_run: bool = False


def consolidate(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    base: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    strict: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
) -> Consolidated:
    """Write the model weights of the checkpoint at `src` to directory `dst` as safetensors, with config and tokenizer.

    `dtype` converts floats of 16 bits and more; `max_shard_size` is in bytes; `base` is a directory or Hub id to take
    config and tokenizer from; `include` and `exclude` are globs of names as the checkpoint has them, `rename` rules
    `REGEX=>TEXT` on the model's own names; `strict` refuses tensors that config.json does not call for; without `sync`
    the result may not outlive a power cut. Raises a `CkptError`, and leaves `dst` as it was, if anything does not fit
    or a checksum differs.
    """
    began = time.perf_counter()
    dst = Path(dst)
    check_destination(dst, overwrite)
    source = find_checkpoint(Path(src))
    found = find_weights(filter_names(open_layout(source), include, exclude))
    layout, names = apply_renames(found, rename)
    companions = find_companions(source, base)
    layout, notes = fit(layout, companions, strict)
    layout, casts = apply_dtype(layout, dtype)
    output = Output(dst, max_shard_size, overwrite, sync, jobs, progress)
    draft = make_draft(source, layout, get_writer("hf"), output, companion_files(companions, layout))
    result = Consolidated(
        source=source,
        output=dst,
        wrapper=found.wrapper,
        files=draft.file_sizes,
        tensors=len(layout.tensors),
        nbytes=layout.nbytes,
        renamed={old: new for new, old in names.items() if new in layout.tensors and old != new},
        dropped=found.left_out,
        cast=casts,
        notes=tuple(notes),
        seconds=0.0,
        dry_run=dry_run,
    )
    if dry_run:
        copies = sum(len(tensor.chunks) for tensor in draft.source.tensors.values())
        seconds = time.perf_counter() - began
        return replace(result, copies=copies, free_bytes=free_bytes(dst), seconds=seconds)
    copied = write(draft, output)
    return replace(
        result,
        seconds=time.perf_counter() - began,
        checked_bytes=copied.checked_bytes,
        unchecked_bytes=copied.unchecked_bytes,
        peak_rss_bytes=peak_rss_bytes(),
    )


def filter_names(layout: Layout, include: Sequence[str], exclude: Sequence[str]) -> Layout:
    """The entries that `--include` admits and `--exclude` does not, by their names in the checkpoint."""
    for glob in include:
        if not any(fnmatchcase(name, glob) for name in layout.tensors):
            hint = "`ckptkit inspect --tensors` shows the names"
            raise Usage(f"--include '{glob}' matches no tensor", path=layout.root, hint=hint)

    def keep(name: str) -> bool:
        included = not include or any(fnmatchcase(name, glob) for glob in include)
        return included and not any(fnmatchcase(name, glob) for glob in exclude)

    return edits.select(layout, keep)


def apply_renames(weights: Weights, rules: Sequence[str]) -> tuple[Layout, dict[str, str]]:
    """The weights after each rule `REGEX=>TEXT` in turn, and the name in the checkpoint that each came from."""
    parsed = [parse_rule(rule) for rule in rules]

    def new_name(name: str) -> str:
        for pattern, text in parsed:
            name = pattern.sub(text, name)
        return name

    came_from = {new_name(name): old for name, old in weights.came_from.items()}
    return edits.rename(weights.layout, new_name), came_from


def parse_rule(rule: str) -> Rule:
    """A rule `REGEX=>TEXT`, compiled."""
    pattern, arrow, text = rule.partition("=>")
    if not arrow:
        raise Usage(f"--rename '{rule}' has no `=>`", hint="for example --rename '^model\\.=>'")
    try:
        compiled = re.compile(pattern)
        compiled.sub(text, "")
    except (re.error, IndexError) as error:
        raise Usage(f"--rename '{rule}': {error}") from error
    return compiled, text


def apply_dtype(layout: Layout, wanted: str) -> tuple[Layout, dict[str, str]]:
    """The layout with every float of 16 bits or more in dtype `wanted`, and what changes; `keep` changes nothing."""
    if wanted == "keep":
        return layout, {}
    dtype = parse_dtype(wanted)
    if not dtype.can_become(dtype):
        raise Usage(f"weights can be cast to float64, float32, float16 and bfloat16, not to {dtype}")

    def choose(_name: str, spec: Any) -> DType:
        return dtype if spec.dtype.can_become(dtype) else spec.dtype

    changed = edits.cast(layout, choose)
    casts = {
        name: f"{before} => {dtype}"
        for name, tensor in layout.tensors.items()
        if (before := tensor.spec.dtype) != changed.tensors[name].spec.dtype
    }
    return changed, casts


def companion_files(companions: Companions, layout: Layout) -> dict[str, bytes]:
    """What to put beside the weights: the companions, with a config.json that says what is true of these weights."""
    if companions.config is None:
        return {}
    return companions.files | {CONFIG: mend_config(companions.config, layout.specs.values())}
