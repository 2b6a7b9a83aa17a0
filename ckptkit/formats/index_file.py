"""Read and write the index beside the files of a model: JSON that maps tensors to files.

Source: huggingface_hub's `split_torch_state_dict_into_shards`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.errors import Corrupt
from ckptkit.formats.json_text import parse_json
from ckptkit.io.file import read_small, require_plain_file_name
from ckptkit.layout import Spec

_LIMIT = 1 << 28  # bytes
_PLACES, _METADATA = "weight_map", "metadata"


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the file of each tensor in an index, checked to be a plain file name, and the index's metadata."""
    index = parse_json(read_small(path, _LIMIT), path)
    fields = index if isinstance(index, dict) else {}
    places, metadata = fields.get(_PLACES), fields.get(_METADATA)
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise Corrupt(f"the index does not have `{_PLACES}`, which maps names to files", path=path)
    for file in set(places.values()):
        require_plain_file_name(file, path.parent)
    return places, metadata if isinstance(metadata, dict) else {}


def make_index(specs: Mapping[str, Spec], file_by_tensor: Mapping[str, str]) -> bytes:
    """Return the index, as transformers writes it."""
    metadata = {
        "total_parameters": sum(spec.numel for spec in specs.values()),
        "total_size": sum(spec.nbytes for spec in specs.values()),
    }
    return (json.dumps({_METADATA: metadata, _PLACES: dict(file_by_tensor)}, indent=2, sort_keys=True) + "\n").encode()
