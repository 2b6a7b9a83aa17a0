"""Bad inputs: files cut, lost, zeroed, flipped, and mixed with those of another save. Cases 1 to 7 and 11 to 21."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests import producers
from tests.faults.cases import Case
from tests.faults.damage import (
    LFS_POINTER,
    Damage,
    append,
    become,
    become_file,
    cut,
    empty,
    flip,
    remove,
    take,
    write,
    zero_all,
    zero_page,
)
from tests.faults.originals import original, produced, trained
from tests.faults.subjects import OURS
from tests.faults.tables import UNTOLD
from tests.faults.trials import Bad, case, case_of

METADATA, INDEX = ".metadata", "model.safetensors.index.json"
Files = Sequence[tuple[str, str]]  # of each original one

CHECKED: Files = (("dcp", "__1_0.distcp"), ("pt", "state.pt"))  # tensors, with their checksums
UNCHECKED: Files = (
    ("shards", "shard-00002-model-00001-of-00001.safetensors"),
    ("hf", "model.safetensors"),
    ("indexed", "model-00002-of-00003.safetensors"),
)
SAVED: Files = (  # the same of trainers' ranks
    ("zero2", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("zero3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("universal", "zero/head.weight/fp32.pt"),
    ("ranks", "model_world_size_2_rank_1.pt"),
    ("items", "model_1.pt"),
    ("bins", "pytorch_model-00002-of-00002.bin"),
    ("megatron", "mp_rank_01/model_optim_rng.pt"),
    ("meta", "consolidated.01.pth"),
)
DESCRIBED: Files = (
    *(("zero2", "mp_rank_00_model_states.pt"), ("zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt")),
    *(("universal", "mp_rank_00_model_states.pt"), ("universal", "zero/optimizer_state.pt")),
    ("bins", "pytorch_model.bin.index.json"),
    ("items", "metadata.pkl"),
)
# by which a rank, or what should be there, is named where the name of its file is not known
WORDS = {
    "zero2": ("file of model states",),
    "universal": ("_states.pt",),
    "ranks": ("of rank 1",),
    "items": ("one torch.save file",),
    "megatron": ("mp_rank_01",),
    "meta": ("the ranks' files",),
}
DIRECTORIES: Files = (("dcp", METADATA), ("indexed", INDEX), *DESCRIBED)  # what says where the tensors are
DATA: Files = (*CHECKED, *UNCHECKED, *SAVED)
OF_RANKS = [(kind, file) for kind, file in SAVED if kind not in ("universal", "bins")]
_RANK = re.compile(r"(rank_|model_|mp_rank_0|consolidated\.0)1")
PARTS = [(kind, file) for kind, file in DATA if kind not in ("hf", "pt")]  # files of several


def in_each(name: str, damage: Callable[[str], Damage], files: Files = DATA) -> list[Bad]:
    """The same damage to a file of each original."""
    return [Bad(f"{name}: {file}", kind, damage(file), (file, *WORDS.get(kind, ()))) for kind, file in files]


def in_the_midst(damage: Callable[[str, int], Damage], unit: int = 1) -> Callable[[str], Damage]:
    """Damage in the middle of a file, at an offset counted in `unit` bytes."""
    return lambda name: lambda root: damage(name, (root / name).stat().st_size // 2 // unit)(root)


def root_of(name: str) -> Callable[[], Path]:
    """Where an original lies, once it is asked for."""
    return lambda: original(name).root


def without_checksums() -> Iterator[Bad]:
    """A checkpoint of which nothing can be checked, and nothing is wrong."""
    sound = produced(producers.no_crc)
    yield Bad("no checksums", "dcp", become(lambda: sound.root), truth=sound.truth, subjects=OURS)


def of_three(kind: str) -> Callable[[], Path]:
    """Where three ranks have saved the same, once it is asked for."""
    return lambda: trained(kind, ranks=3).root


def of_rank(file: str, rank: int) -> str:
    """The file of another rank, by that of rank 1."""
    return _RANK.sub(rf"\g<1>{rank}", file)


def of_other_ranks() -> Iterator[Bad]:
    """Files of three ranks among those of two: one more, or one in the place of another."""
    for kind, file in OF_RANKS:
        more, names = of_rank(file, 2), (file, "ranks", *WORDS.get(kind, ()))
        if kind == "ranks":
            yield Bad(f"{file} of three", kind, write(file.replace("size_2", "size_3"), b""), ("2 and 3 ranks",))
        else:
            yield Bad(f"{more} beside those of two", kind, take(of_three(kind), more), names)
            yield Bad(f"{file} of three", kind, take(of_three(kind), file), names)


def exchange(file: str) -> Damage:
    """Let the files of the first two ranks have each other's names."""

    def damage(root: Path) -> None:
        first = of_rank(file, 0)
        one, other = (root / first).read_bytes(), (root / file).read_bytes()
        (root / first).write_bytes(other)
        (root / file).write_bytes(one)

    return damage


def other_files(root: Path) -> None:
    """Have only what belongs to no format."""
    empty(root)
    (root / "notes.txt").write_text("nothing here\n")


FLIP, PAGE = in_the_midst(flip), in_the_midst(zero_page, 4096)
CASES: tuple[Case, ...] = (
    case("1", "data", "a file cut in half", in_each("half", partial(cut, keep=0.5))),
    case("2", "data", "the last byte cut off", in_each("last byte", partial(cut, keep=1))),
    case("3", "data", "a file of 0 bytes", in_each("0 bytes", partial(cut, keep=0.0))),
    case("4", "data", "a byte too long", in_each("1 byte more", partial(append, content=b"\x2a"))),
    case(
        *("5", "data", "files missing"),
        [
            *in_each("gone", remove, [part for part in PARTS if part[0] != "shards"]),
            Bad("rank 0 gone", "shards", remove("shard-00001-model-00001-of-00001.safetensors"), ("shard-00001-",)),
            Bad("all gone", "dcp", remove("__0_0.distcp", "__1_0.distcp"), ("__0_0.distcp, __1_0.distcp", "__0_0")),
        ],
    ),
    case("6", "data", "a bit flipped in tensor data", in_each("flip", FLIP, (*CHECKED, *SAVED))),
    case(
        *("7", "data", "zeros in place of data"),
        [
            *in_each("page", PAGE, (*CHECKED, *SAVED)),
            *in_each("all", zero_all, DATA),
        ],
    ),
    case_of("11", "data", "saved without checksums", without_checksums),
    case(
        *("12-15", "meta", "what says where all is: missing, empty, cut, garbage"),
        [
            *in_each("missing", remove, DIRECTORIES),
            *in_each("0 bytes", partial(cut, keep=0.0), DIRECTORIES),
            *in_each("half", partial(cut, keep=0.5), DIRECTORIES),
            *in_each("4 bytes short", partial(cut, keep=4), DIRECTORIES),
            *in_each("garbage", partial(write, content=b"\x9c\x1f not what it was \xff" * 40), (*DATA, *DIRECTORIES)),
        ],
    ),
    case(
        *("16", "meta", "no checkpoint at all"),
        [
            Bad("nothing", "dcp", empty, ("checkpoint",)),
            Bad("a file", "dcp", become_file, ("checkpoint",)),
            Bad("other files", "dcp", other_files, ("checkpoint",)),
        ],
    ),
    case(
        *("17", "meta", "a Git LFS pointer in place of a file"),
        in_each("pointer", partial(write, content=LFS_POINTER), (*DATA, *DIRECTORIES)),
    ),
    case(
        *("19", "mix", "two checkpoints in one directory"),
        [
            Bad("ranks of an earlier save", "dcp", write("__2_0.distcp", b"old" * 99)),
            Bad("`.metadata` of another", "dcp", take(root_of("training"), METADATA), (".distcp", "optim.")),
        ],
    ),
    case_of("19, 21", "mix", "files of another number of ranks", of_other_ranks),
    case(
        *("20", "mix", "an old `model.safetensors` beside new files"),
        [
            Bad(f"beside {kind}", kind, take(root_of("hf-2"), "model.safetensors"), ("model.safetensors",))
            for kind, _ in UNCHECKED
            if kind != "hf"
        ],
    ),
    case(
        *("6, 7", UNTOLD, "a flip or zeros in safetensors, without a manifest"),
        [
            *in_each("flip", FLIP, UNCHECKED),
            *in_each("page", PAGE, UNCHECKED),
        ],
    ),
    case(
        *("5", UNTOLD, "the file of the last rank, without a manifest"),
        in_each("gone", remove, [part for part in PARTS if part[0] == "shards"]),
    ),
    case(
        *("18", UNTOLD, "a file of another step, without a manifest"),
        [Bad(f"{file} of another step", kind, take(root_of(f"{kind}-2"), file), (file,)) for kind, file in PARTS],
    ),
    case(
        *("21", UNTOLD, "ranks exchanged, without a manifest"),
        [Bad(f"{file} exchanged", kind, exchange(file), (file,)) for kind, file in OF_RANKS],
    ),
)
