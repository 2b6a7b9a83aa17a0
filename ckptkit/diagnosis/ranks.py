"""Find per-rank state, and formats that only the same number of ranks can load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.finding import Finding, reshard_fix, world_size_fix
from ckptkit.io.file import names_in
from ckptkit.trainers import find_owner_rank_of_file, find_owner_rank_of_key, is_optional_state
from ckptkit.words import count


def find_rank_dependent_state(target: LoadTarget) -> Iterator[Finding]:
    """Yield the entries and files that another number of ranks cannot load."""
    wanted = target.world_size
    if wanted is None:
        return
    reader = target.checkpoint.model_component.reader
    ranks = target.layout.world_size or target.checkpoint.world_size
    if ranks is not None and ranks != wanted and reader.is_bound_to_world_size(target.checkpoint.model_component.path):
        message = f"the library that saved it loads it only with {count(ranks, 'rank')}, not with {wanted}"
        yield Finding("world_size", None, message, world_size_fix(target.checkpoint, wanted))
    # files of ranks
    path = target.checkpoint.path
    names = [name for name in names_in(path) if not is_optional_state(name)] if path.is_dir() else []
    owners = {name: rank for name in names if (rank := find_owner_rank_of_file(name)) is not None}
    saved = 1 + max(owners.values(), default=-1)
    if owners and saved != wanted:
        message = f"the random states of {count(saved, 'rank')} are in one file a rank and cannot be used by {wanted}"
        fix = reshard_fix(target.checkpoint, wanted) if reader.is_sharded else None  # other trainers cannot read DCP
        yield Finding("rank_state", min(owners), message, fix, tuple(sorted(owners)))
    # entries of ranks
    owners_by_group: dict[str, dict[str, int]] = defaultdict(dict)  # by the first word of the key path
    for name in target.layout.names:
        key = target.layout.key(name)
        if (owner := find_owner_rank_of_key(key)) is not None:
            owners_by_group[str(key[0])][name] = owner
    for group, owners in owners_by_group.items():
        ranks = 1 + max(owners.values())
        if wanted not in (ranks, target.layout.world_size):
            message = f"the file has a state for each of {count(ranks, 'rank')}; {wanted} cannot use these states"
            yield Finding("rank_state", group, message, reshard_fix(target.checkpoint, wanted), tuple(owners))
