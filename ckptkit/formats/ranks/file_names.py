"""Parse the names of the files of ranks: model, optimizer and the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptkit.errors import ELSEWHERE, SALVAGE, Corrupt, Incomplete, Report, Unsupported, raise_problem

MODEL, OPTIMIZER, REST = "model", "optimizer", "rest"
CONFIG = "fsdp_config.json"  # beside files whose names contain the number of ranks


@dataclass(frozen=True, slots=True)
class Naming:
    """A way to name the files of ranks: a pattern for each kind of file, with groups `rank`, `set` and `world`.

    The text of `set` is the same in all files of one checkpoint. `templates` are the names to write. `is_in_order` says
    that trainers with this naming pass the parameters to their optimizer in the model's order.
    """

    patterns: dict[str, str]
    templates: dict[str, str] = field(default_factory=dict)
    is_in_order: bool = False

    def match_name(self, name: str) -> tuple[str, re.Match[str]] | None:
        """Return the kind of a file, and the match of its name; None if it does not belong to a rank."""
        matches = ((kind, re.fullmatch(pattern, name)) for kind, pattern in self.patterns.items())
        return next(((kind, match) for kind, match in matches if match), None)


_RANK = r"(?P<rank>[0-9]{1,7})"
_WORLD = rf"(?P<set>)_world_size_(?P<world>[0-9]{{1,7}})_rank_{_RANK}\.pt"
_PLAIN = rf"(?P<set>(?:_[0-9]+)?)_rank{_RANK}\.bin"
_ANY = rf"(?P<set>(?:[._-][\w.-]*?)?)[._-]rank[_-]?{_RANK}\.(?:pt|pth|bin)"

WITH_WORLD = Naming(
    {MODEL: f"model{_WORLD}", OPTIMIZER: f"optim{_WORLD}", REST: f"extra_state{_WORLD}"},
    {
        MODEL: "model_world_size_{world}_rank_{rank}.pt",
        OPTIMIZER: "optim_world_size_{world}_rank_{rank}.pt",
        REST: "extra_state_world_size_{world}_rank_{rank}.pt",
    },
    is_in_order=True,  # ckptkit/trainers/table.py has the sources
)
WITHOUT_WORLD = Naming(
    {MODEL: f"pytorch_model_fsdp{_PLAIN}", OPTIMIZER: f"optimizer{_PLAIN}"},
    {MODEL: "pytorch_model_fsdp{set}_rank{rank}.bin", OPTIMIZER: "optimizer{set}_rank{rank}.bin"},
)
OTHER = Naming({MODEL: f"model{_ANY}", OPTIMIZER: f"(?:optim|optimizer){_ANY}"})
NAMINGS = (WITH_WORLD, WITHOUT_WORLD, OTHER)
BARE = Naming({MODEL: rf"(?P<set>)rank[_-]?{_RANK}\.(?:pt|pth|bin)"})  # the complete state of a rank, if it has shards


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one checkpoint, by kind and rank; `world` is their number, `label` the common text of the names."""

    naming: Naming
    label: str
    world: int
    files: dict[str, dict[int, str]]

    @property
    def names(self) -> list[str]:
        return [name for by_rank in self.files.values() for name in by_rank.values()]

    def file_name_of(self, kind: str, rank: int) -> str:
        """Return the name of the file of a kind and rank, whether it is there or not."""
        known = next(iter(self.files[kind].values()))
        match = re.fullmatch(self.naming.patterns[kind], known)
        assert match is not None
        start, end = match.span("rank")
        width = end - start if known[start] == "0" else 0
        return self.files[kind].get(rank, f"{known[:start]}{rank:0{width}d}{known[end:]}")


def find_rank_files_among(names: Iterable[str], report: Report = raise_problem) -> RankFiles | None:
    """Return the files of ranks in a directory, None if none of them has a model.

    Reports ranks whose files are missing. Raises `Corrupt` for files of several runs, `Unsupported` for several models.
    """
    names = sorted(names)
    for naming in (*NAMINGS, BARE):
        matches = [(name, *match) for name in names if (match := naming.match_name(name))]
        if any(kind == MODEL for _, kind, _ in matches) and (naming is not OTHER or len(matches) > 1):
            return group_by_kind_and_rank(naming, matches, report)
    return None


def has_rank_model_files(names: Iterable[str]) -> bool:
    """Return whether a directory has files of ranks with a model."""
    kinds = [(naming, match[0]) for name in names for naming in NAMINGS if (match := naming.match_name(name))]
    models = [naming for naming, kind in kinds if kind == MODEL]
    return any(naming is not OTHER or models.count(OTHER) > 1 for naming in models)


def group_by_kind_and_rank(naming: Naming, matches: list[tuple[str, str, re.Match[str]]], report: Report) -> RankFiles:
    """Return the files, and report ranks without a file of each kind. Raises `Corrupt` for files of several runs."""
    worlds = sorted({int(match["world"]) for *_, match in matches if "world" in match.re.groupindex})
    if len(worlds) > 1:
        message = f"expected files of one run, found files of runs with {' and '.join(map(str, worlds))} ranks"
        raise Corrupt(message, hint="move the files of the earlier run to another directory")
    labels = sorted({match["set"] for _, kind, match in matches if kind == MODEL})
    if len(labels) > 1:
        names = ", ".join(next(name for name, _, match in matches if match["set"] == label) for label in labels[:4])
        hint = "move each model to a directory of its own"
        raise Unsupported(f"expected files of one model, found {len(labels)}: {names}", hint=hint)
    files: dict[str, dict[int, str]] = {}
    for name, kind, match in matches:
        if match["set"] == labels[0]:
            files.setdefault(kind, {})[int(match["rank"])] = name
    world = worlds[0] if worlds else 1 + max(files[MODEL])
    gathered = RankFiles(naming, labels[0], world, files)
    for kind, by_rank in files.items():
        missing = [rank for rank in range(world) if rank not in by_rank]
        if missing:
            ranks_text = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            like = next(iter(by_rank.values()))
            message = f"{len(missing)} of {world} files like `{like}` are missing, for rank {ranks_text}"
            lost = [gathered.file_name_of(kind, rank) for rank in missing]
            report(Incomplete(message, hint=f"{ELSEWHERE}, or {SALVAGE}", files=lost, ranks=missing))
        if len(by_rank) > world:
            last = max(by_rank)
            message = f"expected files of {world} ranks, found one of rank {last}: `{by_rank[last]}`"
            raise Corrupt(message, hint="move the file away if it belongs to an earlier run")
    return gathered
