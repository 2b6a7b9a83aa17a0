"""Find per-rank state, and formats that only the same number of ranks can load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ckptkit.diagnosis.case import LoadTarget
from ckptkit.diagnosis.finding import Finding, reshard, resize
from ckptkit.io.file import names_in
from ckptkit.trainers import is_optional_state, owner_of_file, owner_of_key
from ckptkit.words import count


def find_ranks(case: LoadTarget) -> Iterator[Finding]:
    """Yield the entries and files that another number of ranks cannot load."""
    wanted = case.world_size
    if wanted is None:
        return
    yield from find_rank_counts(case, wanted)
    owners_by_group: dict[str, dict[str, int]] = defaultdict(dict)  # by the first word of the key path
    for name in case.layout.names:
        key = case.layout.key(name)
        if (owner := owner_of_key(key)) is not None:
            owners_by_group[str(key[0])][name] = owner
    for group, owners in owners_by_group.items():
        ranks = 1 + max(owners.values())
        if wanted not in (ranks, case.layout.world_size):
            message = f"the file has a state for each of {count(ranks, 'rank')}; {wanted} cannot use these states"
            yield Finding("rank_state", group, message, reshard(case.checkpoint, wanted), tuple(owners))


def find_rank_counts(case: LoadTarget, wanted: int) -> Iterator[Finding]:
    """Yield the per-rank files, if their number differs from the number of ranks that load them."""
    reader = case.checkpoint.model_component.reader
    ranks = case.layout.world_size or case.checkpoint.world_size
    if ranks is not None and ranks != wanted and reader.is_bound(case.checkpoint.model_component.path):
        message = (
            f"saved by {count(ranks, 'rank')}: its own library loads it only with the same number, not with {wanted}"
        )
        yield Finding("world_size", None, message, resize(case.checkpoint, wanted))
    path = case.checkpoint.path
    names = [name for name in names_in(path) if not is_optional_state(name)] if path.is_dir() else []
    owners = {name: rank for name in names if (rank := owner_of_file(name)) is not None}
    saved = 1 + max(owners.values(), default=-1)
    if owners and saved != wanted:
        message = f"the random states of {count(saved, 'rank')} are in one file a rank and cannot be used by {wanted}"
        fix = reshard(case.checkpoint, wanted) if reader.is_sharded else None  # other trainers cannot read DCP
        yield Finding("rank_state", min(owners), message, fix, tuple(sorted(owners)))
