"""Drop per-rank state if the output is for another number of ranks than the source.

The state of a rank's random generator or data loader cannot be divided among other ranks. ckptkit drops it and says so,
because a job would otherwise load the state of another rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptkit.errors import first_of
from ckptkit.layout import OWN, Layout, edits
from ckptkit.trainers import find_owner_rank_of_file, find_owner_rank_of_key
from ckptkit.words import count

_MAX_NAMED = 8
OF_RANKS = "state of single ranks; another number of ranks cannot use it"


def drop_state_of_ranks(layout: Layout, world_size: int) -> tuple[Layout, list[str]]:
    """Return the checkpoint without per-rank state that `world_size` ranks cannot use, and notes about that state."""
    owners = {name: owner for name in layout.names if (owner := find_owner_rank_of_key(layout.key(name))) is not None}
    groups = sorted({str(layout.key(name)[0]) for name in owners})
    dropped: set[str] = set()
    notes = []
    for group in groups:
        members = [name for name in owners if str(layout.key(name)[0]) == group]
        ranks = 1 + max(owners[name] for name in members)
        # with tensor parallelism there are fewer data loaders than ranks
        if world_size not in (ranks, layout.world_size):
            dropped |= {name for name in layout.names if str(layout.key(name)[0]) == group}
            inner = list(dict.fromkeys(str(key[2]) for key in map(layout.key, members) if len(key) > 2))
            which = f" ({first_of(inner, _MAX_NAMED)})" if inner else ""
            words = f"state of {count(ranks, 'rank')}, which {world_size} cannot use"
            notes.append(f"dropped `{group}`{which}: {words}")
        elif group == OWN:
            differ = count(len(members), "entry", "differs")
            notes.append(f"{differ} between ranks: each rank has its own under `{OWN}.rank_N`")
    return edits.select_entries(layout, lambda name: name not in dropped), notes


def reasons_to_drop_rank_state(layout: Layout) -> dict[str, str]:
    """Return the entries under keys with per-rank state, each with the reason why a job of another size drops it."""
    groups = {layout.key(name)[0] for name in layout.names if find_owner_rank_of_key(layout.key(name)) is not None}
    return {name: OF_RANKS for name in layout.names if layout.key(name)[0] in groups}


def drop_files_of_ranks(names: Iterable[str], world_size: int) -> tuple[set[str], list[str]]:
    """Return the names of the files with per-rank state, if their number differs from `world_size`; and notes."""
    owners = {name: owner for name in names if (owner := find_owner_rank_of_file(name)) is not None}
    ranks = 1 + max(owners.values(), default=-1)
    if ranks in (0, world_size):
        return set(), []
    state = f"state of {count(ranks, 'rank')}, which {world_size} cannot use"
    return set(owners), [f"skipped `{min(owners)}` and similar files: {state}"]
