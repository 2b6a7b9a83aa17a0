"""Bad inputs of runs: damaged files of a checkpoint, and trackers and states beside it. Cases 75 to 77."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.bad_inputs import FLIP, PAGE, Files
from tests.faults.cases import Case
from tests.faults.damage import LFS_POINTER, Damage, append, cut, remove, write
from tests.faults.originals import trained
from tests.faults.subjects import AVERAGE, CONSOLIDATE, INSPECT
from tests.faults.tree_inputs import bad, in_each, in_json, pipe_in
from tests.faults.trials import Bad, case, case_of

ITERATION, STEP, DATE = "iter_0000001", "global_step_1", "checkpoint_2026-11-26_05-10-01.887563"
POLICY, SNAPSHOT = f"{STEP}/policy", "checkpoint_manager_snapshot.json"
LATER = {"slime": "iter_0000002", "skyrl": "global_step_2", "ray": DATE.replace("01.", "02.")}

CHECKED: Files = (  # data with checksums
    ("slime", f"{ITERATION}/__0_1.distcp"),
    ("ray", f"{DATE}/__0_1.distcp"),
    *(("skyrl", f"{POLICY}/{what}_world_size_2_rank_1.pt") for what in ("model", "optim", "extra_state")),
)
CELLS: Files = (("grain", "items/d/*"),)
DESCRIBED: Files = (
    *(("slime", f"{ITERATION}/.metadata"), ("ray", f"{DATE}/.metadata")),
    *(("grain", "items/_METADATA"), ("grain", "items/manifest.ocdbt")),
)
BESIDE: Files = (  # no tensor is in these, and all can be read without them
    *(("grain", "iter/process_1-of-2.json"), ("grain", "_CHECKPOINT_METADATA")),
    *(("slime", "rollout/global_dataset_state_dict_0.pt"), ("slime", "latest_checkpointed_iteration.txt")),
    *(("slime", f"{ITERATION}/metadata.json"), ("ray", SNAPSHOT)),
    *(("skyrl", f"{POLICY}/fsdp_config.json"), ("skyrl", f"{STEP}/data.pt")),
    *(("skyrl", f"{STEP}/trainer_state.pt"), ("skyrl", "latest_ckpt_global_step.txt")),
)
# what messages call a missing or damaged file, in other words
WORDS = {
    "grain": ("manifest.ocdbt", "_METADATA", "/d/"),
    "slime": (".metadata", ITERATION),
    "ray": (".metadata", DATE),
    "skyrl": ("of rank 1", STEP),
}
TRACKERS = {"slime": "latest_checkpointed_iteration.txt", "skyrl": "latest_ckpt_global_step.txt"}

each = partial(in_each, words=WORDS)


def tracked(kind: str, said: str) -> Damage:
    """Let the tracker of a run name something else."""
    if kind == "ray":
        return in_json(SNAPSHOT, lambda snapshot: snapshot["latest_checkpoint_result"].update(checkpoint_dir_name=said))
    return write(TRACKERS[kind], said.encode())


def begun(kind: str) -> Damage:
    """Have a later checkpoint whose save was cut off: a copy of the first without a file that it needs."""

    def damage(root: Path) -> None:
        first = next(path for path in sorted(root.iterdir()) if path.is_dir() and path.name != "rollout")
        shutil.copytree(first, root / LATER[kind])
        for path in (".metadata", "policy/model_world_size_2_rank_1.pt"):
            (root / LATER[kind] / path).unlink(missing_ok=True)

    return damage


def trackers() -> Iterator[Bad]:
    """Trackers that name what is not there, or lead away; the only checkpoint is the right one."""
    for kind in LATER:
        for said in ("9", "iter_0000009", "..", "../elsewhere", "/dev/zero", "", "\0", "9" * 900, "release"):
            yield Bad(f"the tracker names {said[:20]!a}", kind, tracked(kind, said), WORDS[kind])
        yield Bad("a later save, cut off", kind, begun(kind), WORDS[kind])
    results: tuple[Any, ...] = ({}, [], None, "x", {"checkpoint_dir_name": None}, {"checkpoint_dir_name": ["a"]})
    for result in results:
        damage = in_json(SNAPSHOT, partial(dict.update, latest_checkpoint_result=result))
        yield Bad(f"the tracker has {result}", "ray", damage, WORDS["ray"])
    yield Bad("deep", "ray", write(SNAPSHOT, b'{"a":' * 200_000 + b"1" + b"}" * 200_000), WORDS["ray"])
    for kind, tracker in (*TRACKERS.items(), ("ray", SNAPSHOT)):
        yield Bad("a pipe", kind, pipe_in(tracker), (tracker, *WORDS[kind]))


def of_three(file: str, name: str | None = None) -> Damage:
    """Have a file of a save of SkyRL by three ranks, in the place of another if that has a `name`."""

    def damage(root: Path) -> None:
        shutil.copyfile(trained("skyrl", ranks=3).root / file, root / (name or file))

    return damage


def beside(file: str, change: Callable[[Any], object]) -> Bad:
    return Bad(f"{Path(file).name} says something else", "skyrl", in_json(f"{POLICY}/{file}", change), WORDS["skyrl"])


def states() -> Iterator[Bad]:
    """States of loaders and ranks that cannot be, or of other ranks."""
    for name in ("process_2-of-2.json", "process_0-of-3.json", f"process_{'9' * 300}-of-{'9' * 40}.json"):
        yield Bad(name[:20], "grain", write(f"iter/{name[:240]}", b'{"version": 2}'))
    yield Bad("an array beside", "grain", write("iter/d", b"x" * 99))
    yield Bad("deep", "grain", write("iter/process_1-of-2.json", b"[" * 200_000))
    yield Bad("a pipe", "grain", pipe_in("iter/process_1-of-2.json"), ("process_1",))
    for what in ("model", "optim", "extra_state"):
        file = f"{POLICY}/{what}_world_size_{{}}_rank_{{}}.pt"
        one, more = file.format(2, 1), file.format(3, 2)
        yield Bad(f"{what} of three ranks beside those of two", "skyrl", of_three(more), (STEP,))
        damage = of_three(file.format(3, 1), one)
        yield Bad(
            f"{what} of three ranks in the place of two",
            "skyrl",
            damage,
            (Path(one).name, "on rank 1", *WORDS["skyrl"]),
        )
    for change in ({"world_size": 3}, {"world_size": "x"}, {"fsdp_strategy": 7}):
        yield beside("fsdp_config.json", partial(dict.update, change))
    one_model = (CONSOLIDATE, AVERAGE, INSPECT)  # the others take both, each for itself
    yield replace(bad("a critic as well", "skyrl", critic, "critic"), subjects=one_model)


def critic(root: Path) -> None:
    """Have a critic beside the policy."""
    shutil.copytree(root / POLICY, root / STEP / "critic")


CASES: tuple[Case, ...] = (
    case(
        *("75", "trees", "files of runs truncated, flipped, too long, missing or replaced"),
        [
            *each("half", partial(cut, keep=0.5), (*CHECKED, *CELLS, *DESCRIBED, *BESIDE)),
            *each("last byte", partial(cut, keep=1), (*CHECKED, *CELLS, *DESCRIBED, *BESIDE)),
            *each("0 bytes", partial(cut, keep=0.0), (*CHECKED, *CELLS, *DESCRIBED, *BESIDE)),
            *each("1 byte more", partial(append, content=b"\x2a"), (*CHECKED, *BESIDE)),
            *each("gone", remove, (*CHECKED, *CELLS, *DESCRIBED, *BESIDE)),
            *each("garbage", partial(write, content=b"\x9c\x1f not what it was \xff" * 40), (*CHECKED, *DESCRIBED)),
            *each("pointer", partial(write, content=LFS_POINTER), (*CHECKED, *DESCRIBED, *BESIDE)),
            *each("flip", FLIP, CHECKED),
            *each("page", PAGE, CHECKED),
        ],
    ),
    case_of("76", "trees", "latest-checkpoint files that name a missing checkpoint", trackers),
    case_of("77", "trees", "invalid states of data loaders and ranks", states),
)
