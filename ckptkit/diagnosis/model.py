"""Open the model that a checkpoint is to be loaded into: what its config.json calls for, and what its weights are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage
from ckptkit.layout import Spec
from ckptkit.models.companions import find_companions, read_config
from ckptkit.models.expected import Form, forms_for


@dataclass(frozen=True)
class Model:
    """A model called `name`: the forms that its tensors may have on disk, that in memory last, and its config.

    `specs` are those of its weights, {} where none lie there. `reason` says why there are no forms. It is `asked` for,
    or the checkpoint's own.
    """

    name: str
    config: Mapping[str, Any]
    forms: tuple[Form, ...]
    specs: Mapping[str, Spec]
    reason: str | None = None
    asked: bool = True

    @classmethod
    def open(cls, source: str) -> Model:
        """Open the model in a directory, a checkpoint's, a config.json, or the repository of a Hub id.

        Raises `NotACheckpoint` where neither a config nor weights are found.
        """
        if source.endswith(".json") and Path(source).is_file():
            return cls.of(source, read_config(Path(source)) or {}, {})
        specs = find_specs(source)
        try:
            config = find_companions(Path(source), source).config if not Path(source).is_file() else None
        except (NotACheckpoint, Usage):
            if not specs:
                raise
            config = None
        return cls.of(source, config or {}, specs)

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], specs: Mapping[str, Spec], *, asked: bool = True) -> Model:
        """Return the model of a config, of which weights with these specs may lie there."""
        by_weights = Form({name: spec.shape for name, spec in specs.items()}) if specs else None
        try:
            forms = forms_for(config, lambda: frozenset(specs) or None) if config else ()
            reason = None
        except Unsupported as error:
            forms, reason = (), error.message
        if not forms and by_weights is not None:
            forms, reason = (by_weights,), None
        return cls(name, config, forms, specs, reason, asked)


def find_specs(source: str) -> Mapping[str, Spec]:
    """Return dtype and shape of the weights that lie somewhere, by the model's names; {} where there are none."""
    try:
        return Checkpoint.open(source).weights.layout.specs
    except (Corrupt, IOFailure, Mismatch, NotACheckpoint, Unsupported, Usage):
        return {}
