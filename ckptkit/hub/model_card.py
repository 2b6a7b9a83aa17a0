"""Model cards: the README.md that the Hub shows: what was made from what, and how to load it. Names no local path."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import step_of
from ckptkit.checkpoints.manifest import Manifest
from ckptkit.layout import Layout, Spec
from ckptkit.version import __version__

NAME = "README.md"
_FORMATS = {"hf": "Hugging Face safetensors", "dcp": "PyTorch distributed checkpoint (DCP)", "pt": "torch.save"}
_PLAIN = re.compile(r"\w[\w. +-]{0,95}", re.ASCII)
_TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json"})


def make_card(
    repo_id: str,
    source: Path,
    layout: Layout,
    *,
    names: Collection[str],
    config: Mapping[str, Any] | None,
    manifest: Manifest | None,
) -> bytes:
    """The card of the checkpoint at `source`, which is pushed as the files `names`."""
    is_model = layout.format == "hf" and config is not None
    tags = ["ckptkit", *([] if layout.format != "hf" else ["safetensors"])]
    metadata = ["---", *(["library_name: transformers"] if is_model else []), "tags:", *(f"- {tag}" for tag in tags)]
    facts = [f"| {name} | {value} |" for name, value in facts_of(source, layout, manifest)]
    load = load_model(repo_id, config or {}, names) if is_model else load_checkpoint(repo_id)
    what = "Model weights" if layout.format == "hf" else "A training checkpoint"
    lines = [
        *metadata,
        "---",
        "",
        f"# {repo_id.partition('/')[2]}",
        "",
        f"{what}, uploaded with ckptkit {__version__}.",
        "",
        "| | |",
        "|---|---|",
        *facts,
        "",
        "## How to load it",
        "",
        *load,
    ]
    return ("\n".join(lines) + "\n").encode()


def facts_of(source: Path, layout: Layout, manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    """What there is to know, as far as it is known."""
    yield "format", _FORMATS.get(layout.format, layout.format)
    origin = manifest.source if manifest else None
    made_of = Path(origin["path"]) if origin and "path" in origin else None
    if origin and made_of and _PLAIN.fullmatch(made_of.name):
        yield "made from", f"`{made_of.name}`, {_FORMATS.get(origin.get('format', ''), 'a checkpoint')}"
    step = find_step(source.resolve(), made_of)
    if step is not None:
        yield "step", f"{step:,}"
    if layout.world_size is not None:
        yield "written by", f"{layout.world_size:,} ranks"
    weights = weights_of(layout)
    yield "parameters", f"{sum(spec.numel for spec in weights):,}"
    yield "dtype", ", ".join(dtypes_of(weights))
    yield "tensors", f"{len(layout.tensors):,}"
    yield "bytes", f"{layout.nbytes:,}"


def find_step(source: Path, made_of: Path | None) -> int | None:
    """The step that the checkpoint, or the one that it was made of, was saved at."""
    places = [place for path in (source, made_of) if path for place in (path, path.parent)]
    return next((step for place in places if (step := step_of(place)) is not None), None)


def weights_of(layout: Layout) -> list[Spec]:
    """The tensors of the model, without an optimizer's; those that are tied count once."""
    chunks = {
        tensor.chunks: tensor.spec
        for name, tensor in layout.tensors.items()
        if not str(layout.key(name)[0]).startswith("optim")
    }
    return list(chunks.values())


def dtypes_of(weights: list[Spec]) -> list[str]:
    """The element types, that of most bytes first."""
    nbytes: Counter[str] = Counter()
    for spec in weights:
        nbytes[spec.dtype.name] += spec.nbytes
    return [name for name, _ in nbytes.most_common()]


def load_model(repo_id: str, config: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    """How transformers loads it."""
    architectures = config.get("architectures")
    is_causal = isinstance(architectures, list) and any(str(name).endswith("ForCausalLM") for name in architectures)
    loader = "AutoModelForCausalLM" if is_causal else "AutoModel"
    has_tokenizer = bool(_TOKENIZERS & set(names))
    yield "```python"
    yield f"from transformers import {loader}{', AutoTokenizer' if has_tokenizer else ''}"
    yield ""
    yield f'model = {loader}.from_pretrained("{repo_id}", dtype="auto")'
    if has_tokenizer:
        yield f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'
    yield "```"


def load_checkpoint(repo_id: str) -> Iterator[str]:
    """How ckptkit gets it, for whatever is to be made of it."""
    folder = repo_id.partition("/")[2]
    yield "```bash"
    yield f"ckptkit pull {repo_id} {folder}"
    yield f"ckptkit inspect {folder}"
    yield "```"
