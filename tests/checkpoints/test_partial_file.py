"""A file that is one of several is joined with the others or refused, and is never exported as the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import CkptError
from ckptkit.formats.rank_names import names_differing_in_rank

WEIGHT = torch.arange(32.0).reshape(8, 4)
LLAMA: dict[str, int] = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2}
SETS = {
    "sdp": ("sdp_00.pt", "sdp_01.pt"),
    "fairseq2": ("model/pp_00/tp_00/sdp_00.pt", "model/pp_00/tp_00/sdp_01.pt"),
    "tensor-parallel": ("model/pp_00/tp_00/sdp_00.pt", "model/pp_00/tp_01/sdp_00.pt"),
    "xla": ("rank-00000000-of-00000002-model.pth", "rank-00000001-of-00000002-model.pth"),
    "xla-trainer": ("rank0-of-2-pytorch_model.bin", "rank1-of-2-pytorch_model.bin"),
    "neuron": ("dp_rank_00_tp_rank_00_pp_rank_00.pt", "dp_rank_00_tp_rank_01_pp_rank_00.pt"),
    "folders": ("tp_rank_00/checkpoint.pt", "tp_rank_01/checkpoint.pt"),
    "parts": ("checkpoint_part0.pth", "checkpoint_part1.pth"),
    "bare": ("rank0.pt", "rank1.pt"),
}


def save(path: Path, state: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
@pytest.mark.parametrize("which", [0, 1])
def test_files_of_ranks_are_refused_by_name_together_and_alone(
    tmp_path: Path, names: tuple[str, str], which: int
) -> None:
    root = tmp_path / "src"
    for name in names:
        save(root / name, {"model": {"w": WEIGHT + len(name)}})
    last = {part for name in names for part in Path(name).parts}
    for source in (root, root / names[which]):
        with pytest.raises(CkptError) as refused:
            ckptkit.consolidate(source, tmp_path / "out", names="keep")
        assert any(part in refused.value.message for part in last)
        assert "pass the file that you want" not in str(refused.value)
    assert not (tmp_path / "out").exists()
    assert ckptkit.inspect(root / names[which]).remarks


@pytest.mark.parametrize(
    "name",
    [
        *("sdp_01.pt", "rank1.pt", "model-00001-of-00003.safetensors", "mp_rank_01.pt"),
        *("shard_0.pt", "model_part_1.pt", "model_world_size_2_rank_0.pt"),
    ],
)
def test_a_lone_file_that_its_name_calls_one_of_several_is_refused(tmp_path: Path, name: str) -> None:
    state = {"w": WEIGHT}
    save_file(state, tmp_path / name) if name.endswith("s") else torch.save(state, tmp_path / name)
    for convert in (ckptkit.consolidate, lambda src, out: ckptkit.convert(src, out, to="pt")):
        with pytest.raises(CkptError, match="this is one of several: "):
            convert(tmp_path / name, tmp_path / "out")


ALONE = [
    *("model-00001-of-00003.safetensors", "pytorch_model-00002-of-00005.bin", "tp_01.pt", "sdp_01.pt"),
    *("rank-00000001-of-00000002-model.pth", "shard_0.pt", "world_size_2_rank_0.bin", "mp_rank_01.pt"),
]


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("fast", [False, True])
def test_verify_and_doctor_say_that_a_file_is_one_of_several_and_nothing_else(
    tmp_path: Path, name: str, fast: bool
) -> None:
    state = {"model.layers.1.w": WEIGHT}  # layer 0 is in another file, and config.json has more tensors
    save_file(state, tmp_path / name) if name.endswith("s") else torch.save(state, tmp_path / name)
    transformers.LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    (found,) = ckptkit.verify(tmp_path / name, fast=fast)
    (problem,) = found.problems
    assert problem.message == f"this is one of several: {name}; each has a part of the model"
    (finding,) = ckptkit.doctor(tmp_path / name).findings
    assert problem.message in finding.message


def test_verify_says_where_the_other_files_of_a_model_are(tmp_path: Path) -> None:
    for i in (1, 2):
        save_file({f"w{i}": WEIGHT}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    (found,) = ckptkit.verify(tmp_path / "model-00001-of-00002.safetensors")
    assert found.problems[0].hint == f"pass the directory {tmp_path}"
    assert ckptkit.verify(tmp_path)[0].is_ok


def test_verify_says_first_that_a_part_is_damaged(tmp_path: Path) -> None:
    torch.save({"w": WEIGHT}, tmp_path / "tp_01.pt")
    data = bytearray((tmp_path / "tp_01.pt").read_bytes())
    data[data.index(WEIGHT.numpy().tobytes()) + 5] ^= 1
    (tmp_path / "tp_01.pt").write_bytes(data)
    (found,) = ckptkit.verify(tmp_path / "tp_01.pt")
    assert "CRC-32" in found.problems[0].message


@pytest.mark.parametrize(
    "more",
    [
        {"shard_metadata": {"world_size": 2, "rank": 0, "shard_info": {}}},
        {"shard_metadata": {"shard_info": {}, "rank": 0}},
        {"mp_world_size": 2, "dp_world_size": 1},
    ],
)
def test_a_file_whose_content_calls_it_one_of_several_is_refused(tmp_path: Path, more: dict[str, object]) -> None:
    torch.save({"model": {"w": WEIGHT}, **more}, tmp_path / "model.pt")
    with pytest.raises(CkptError, match=r"this is the file of one of (2|several) ranks; each has a part of the model"):
        ckptkit.consolidate(tmp_path / "model.pt", tmp_path / "out", names="keep")


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("ep0-ba5-rank0.pt", []),
        ("sdp_00.pt", []),
        ("rank0.pt", ["notes.txt"]),
        ("stage_0.pt", []),
        ("ckpt_p0.pt", []),
        ("lora_rank8.pt", ["lora_rank16.pt"]),
        ("ep1.pt", ["ep0.pt"]),
        ("model_tp2.pt", ["model_tp4.pt"]),
        ("model-00001-of-00001.safetensors", []),
        ("epoch_0_step_100.pt", ["epoch_1_step_100.pt"]),
        ("shape.pt", ["shape0.pt"]),
    ],
)
def test_other_names_stand_alone(name: str, beside: list[str]) -> None:
    assert names_differing_in_rank(name, [name, *beside]) == []


def test_a_file_that_is_one_of_one_is_the_model(tmp_path: Path) -> None:
    torch.save({"model": {"w": WEIGHT}, "shard_metadata": {"world_size": 1}}, tmp_path / "rank0-of-1-model.pt")
    ckptkit.consolidate(tmp_path / "rank0-of-1-model.pt", tmp_path / "out", names="keep")
    assert torch.equal(ckptkit.open(tmp_path / "out")["w"].torch(), WEIGHT)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "rank0.pt",
            "ckpt-rank-0.pt",
            "mp_rank_00.pt",
            "model_rank_0.bin",
            "ckpt-rank-1.pt",
            "stage_0.pt",
            "ckpt_p0.pt",
        ),
        *("model_0.pt", "model.0.pth", "model-0.bin", "consolidated.00.pth"),
        *("pytorch_model_0.bin", "weights.0.pt", "my-model.weights_00.pt", "state_dict-0.pt"),
    ],
)
def test_a_lone_file_of_a_rank_may_be_whole_which_is_said(tmp_path: Path, name: str) -> None:
    torch.save({"model": {"w": WEIGHT[:4]}}, tmp_path / name)
    found = ckptkit.consolidate(tmp_path / name, tmp_path / "out", names="keep")
    assert "name contains a rank number, and nothing shows whether this file has the full model" in found.warnings[0]
    assert any("a rank number" in remark for remark in ckptkit.inspect(tmp_path / name).remarks)
    assert any("a rank number" in note for note in ckptkit.verify(tmp_path / name)[0].notes)
    assert any("a rank number" in note for note in ckptkit.doctor(tmp_path / name).notes)


@pytest.mark.parametrize(
    "name",
    [
        "model_1000.pt",
        "model_v0.pt",
        "trial_0.pt",
        "model0b.pt",
        "model-7b.pt",
        "model_0_best.pt",
        "epoch_0.pt",
        "pytorch_model_fsdp_0.bin",
        "weights_1.0.pt",
    ],
)
def test_other_numbers_count_no_ranks(tmp_path: Path, name: str) -> None:
    torch.save({"model": {"w": WEIGHT[:4]}}, tmp_path / name)
    assert not ckptkit.inspect(tmp_path / name).remarks


META = {"tok_embeddings.weight": (32, 16), "norm.weight": (16,), "output.weight": (32, 16)}
QUERIES = "layers.0.attention.wq.weight"


@pytest.mark.parametrize(
    ("rows", "sure"), [(16, "whole"), (8, "part"), (4, "part"), (12, None), (32, None), (None, None)]
)
def test_the_heads_of_metas_models_tell_how_many_ranks_there_were(
    tmp_path: Path, rows: int | None, sure: str | None
) -> None:
    shapes = META | ({QUERIES: (rows, 16)} if rows else {})
    source = tmp_path / "in" / "consolidated.00.pth"
    save(source, {name: torch.ones(shape) for name, shape in shapes.items()})
    for path in (source, source.parent):
        if sure == "part":
            with pytest.raises(CkptError, match=r"consolidated.01.pth: the file is missing"):
                ckptkit.consolidate(path, tmp_path / "out", names="keep")
            assert not ckptkit.verify(path)[0].is_ok
        else:
            found = ckptkit.consolidate(path, tmp_path / "out", names="keep", dry_run=True)
            assert any("a rank number" in one for one in found.warnings) is (sure is None)


@pytest.mark.parametrize("rows", [4, 8])
def test_a_config_tells_whether_the_file_of_a_rank_is_whole(tmp_path: Path, rows: int) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(tmp_path / "base")
    cut = {name: one if one.ndim == 1 else one[: len(one) * rows // 8] for name, one in model.state_dict().items()}
    torch.save(cut, tmp_path / "rank0.pt")
    if rows == 4:
        with pytest.raises(CkptError, match="expected shape"):
            ckptkit.consolidate(tmp_path / "rank0.pt", tmp_path / "out", base=tmp_path / "base")
    else:
        found = ckptkit.consolidate(tmp_path / "rank0.pt", tmp_path / "out", base=tmp_path / "base")
        assert not found.warnings


HALVES = {"w": WEIGHT[:4], "norm": torch.ones(8)}, {"w": WEIGHT[4:], "norm": torch.ones(8)}
UNEVEN = {"w": WEIGHT[:5], "norm": torch.ones(8)}, {"w": WEIGHT[5:], "norm": torch.ones(8)}
STAGES = {"embed": WEIGHT, "layers.0.w": WEIGHT}, {"layers.1.w": WEIGHT, "head": WEIGHT}


@pytest.mark.parametrize(
    ("names", "states"),
    [
        (("model.0.pt", "model.1.pt"), UNEVEN),
        (("weights-0.bin", "weights-1.bin"), UNEVEN),
        (("model_0.pt", "model_1.pt"), STAGES),
        (("stage_0_weights.pt", "stage_1_weights.pt"), STAGES),
        (("model_0_2.pt", "model_1_2.pt"), HALVES),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_files_whose_contents_make_one_model_are_refused_alone(
    tmp_path: Path, names: Sequence[str], states: Sequence[dict[str, torch.Tensor]], which: int
) -> None:
    for name, state in zip(names, states, strict=True):
        torch.save(state, tmp_path / name)
    with pytest.raises(CkptError, match=f"this is one of 2: {names[0]}, {names[1]}"):
        ckptkit.consolidate(tmp_path / names[which], tmp_path / "out", names="keep")


@pytest.mark.parametrize(
    ("names", "more", "is_doubtful"),
    [
        (("model.0.pt", "model.1.pt"), ({}, {}), True),
        (("model_0.pt", "model_1.pt"), ({}, {}), True),  # of torch_checkpointing without its metadata.pkl
        (("model_0.pt", "model_1.pt"), ({"global_step": 5}, {"global_step": 9}), False),
        (("epoch_0.pt", "epoch_1.pt"), ({}, {}), False),
        (("model_100.pt", "model_200.pt"), ({}, {}), False),
        (("model_v0.pt", "model_v1.pt"), ({}, {}), False),
        (("lora_rank8.pt", "notes.pt"), ({"q.lora_A.weight": WEIGHT, "q.lora_B.weight": WEIGHT.T},) * 2, False),
    ],
)
def test_files_counted_from_0_that_are_alike_may_be_parts_which_is_said(
    tmp_path: Path, names: Sequence[str], more: Sequence[dict[str, object]], is_doubtful: bool
) -> None:
    for name, state, entries in zip(names, HALVES, more, strict=True):
        torch.save({**state, **entries} if entries else state, tmp_path / name)
    remarks = ckptkit.inspect(tmp_path / names[0]).remarks
    assert any("nothing shows whether this file has the full model" in one for one in remarks) is is_doubtful


def test_models_of_other_widths_are_no_parts_of_one(tmp_path: Path) -> None:
    for number, width in enumerate((4, 8)):
        torch.save({"w": torch.ones(width, width), "norm": torch.ones(width)}, tmp_path / f"trial_{number}.pt")
    assert not ckptkit.inspect(tmp_path / "trial_0.pt").remarks


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_models_of_one_job_are_not_the_parts_of_one(tmp_path: Path) -> None:
    for i in (0, 1):
        dcp.save({"model": {"w": WEIGHT + i}}, checkpoint_id=tmp_path / "a" / f"pytorch_model_fsdp_{i}", no_dist=True)
    words = "several checkpoints are in this directory: pytorch_model_fsdp_0, pytorch_model_fsdp_1"
    for refused in (ckptkit.inspect, lambda source: ckptkit.consolidate(source, tmp_path / "out")):
        with pytest.raises(CkptError, match=words) as raised:
            refused(tmp_path / "a")
        assert raised.value.hint == "pass one of them"
    ckptkit.consolidate(tmp_path / "a" / "pytorch_model_fsdp_1", tmp_path / "out", names="keep")
    assert ckptkit.open(tmp_path / "out")["w"].torch().equal(WEIGHT + 1)
