"""Write the model card, the README.md on the Hub: origin and size of the checkpoint, and how to load it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

from ckptkit.checkpoints.manifest import Manifest
from ckptkit.checks.inspect import Inspected
from ckptkit.formats import title_of_format
from ckptkit.trainers import find_step_of_path
from ckptkit.version import __version__
from ckptkit.words import count

NAME = "README.md"
_CARD = Template("""\
---
${library}tags:
- ckptkit
${tag}---

# $name

$what, uploaded with ckptkit $version.

| | |
|---|---|
$facts

## How to load it

$load
""")
_PLAIN = re.compile(r"\w[\w. +-]{0,95}", re.ASCII)
_TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json"})


def make_card(
    repo_id: str,
    inspected: Inspected,
    *,
    names: Collection[str],
    config: Mapping[str, Any] | None,
    manifest: Manifest | None,
) -> bytes:
    """Return the model card of a checkpoint that is pushed as the files `names`."""
    layout = inspected.layout
    is_model = layout.format == "hf" and config is not None
    folder = repo_id.partition("/")[2]
    load = ["```bash", f"ckptkit pull {repo_id} {folder}", f"ckptkit inspect {folder}", "```"]
    if is_model and config is not None:
        architectures = config.get("architectures")
        is_causal = isinstance(architectures, list) and any(str(one).endswith("ForCausalLM") for one in architectures)
        loader = "AutoModelForCausalLM" if is_causal else "AutoModel"
        has_tokenizer = bool(_TOKENIZERS & set(names))
        load = [
            "```python",
            f"from transformers import {loader}{', AutoTokenizer' if has_tokenizer else ''}",
            "",
            f'model = {loader}.from_pretrained("{repo_id}", dtype="auto")',
            *([f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'] if has_tokenizer else []),
            "```",
        ]
    fields = {
        "library": "library_name: transformers\n" if is_model else "",
        "tag": "- safetensors\n" if layout.format == "hf" else "",
        "name": folder,
        "what": "Model weights" if layout.format == "hf" else "A training checkpoint",
        "version": __version__,
        "facts": "\n".join(f"| {name} | {value} |" for name, value in card_rows(inspected, manifest)),
        "load": "\n".join(load),
    }
    return _CARD.substitute(fields).encode()


def card_rows(inspected: Inspected, manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: name and value of each known fact."""
    layout = inspected.layout
    yield "format", title_of_format(layout.format)
    origin = manifest.source if manifest else None
    made_of = Path(origin["path"]) if origin and "path" in origin else None
    if origin and made_of and _PLAIN.fullmatch(made_of.name):
        yield "made from", f"`{made_of.name}`, {title_of_format(origin.get('format', ''))}"
    whole = inspected.whole.resolve()
    paths = [candidate for path in (whole, made_of) if path for candidate in (path, path.parent)]
    step = next((step for path in paths if (step := find_step_of_path(path)) is not None), None)
    if step is not None:
        yield "step", f"{step:,}"
    if layout.world_size is not None:
        yield "written by", count(layout.world_size, "rank")
    if inspected.parameters is not None:
        yield "parameters", f"{inspected.parameters:,}"
        yield "dtype", ", ".join(inspected.groups["model"].bytes_by_dtype)
    yield "tensors", f"{len(layout.tensors):,}"
    yield "bytes", f"{layout.nbytes:,}"
