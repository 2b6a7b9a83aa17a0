"""DeepSpeed's directories against the state that its engine had: every tensor, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptkit
from ckptkit.checkpoints.checkpoint import Checkpoint, open_layout
from ckptkit.errors import CkptError, Corrupt, Unsupported
from ckptkit.formats import detect_format, locate_all_chunks
from ckptkit.formats.archives.non_tensor_entries import load_value
from ckptkit.layout import Layout, check_chunks_tile
from ckptkit.plugins.deepspeed.file_names import OFFLOADED
from tests.conftest import Produce
from tests.formats.contract import raw_bytes, spec_of
from tests.raw import contents
from tests.trainers import produced_zero as zero

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def truth_of(truth: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{kind}/"): value for name, value in truth.items() if name.startswith(f"{kind}/")}


def assert_holds(layout: Layout, truth: Mapping[str, Tensor]) -> None:
    check_chunks_tile(layout)
    found = locate_all_chunks(layout)
    assert truth
    for name, tensor in truth.items():
        assert found.specs[name] == spec_of(tensor), name
        assert contents(found, name) == raw_bytes(tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", zero.KINDS)
def test_two_ranks(kind: str, produce: Produce) -> None:
    made = produce(zero.on_two)
    layout = open_layout(made.root / kind)
    assert (layout.format, layout.world_size) == ("deepspeed", 2)
    # what is not saved round robin has the same numbers
    assert_holds(layout, truth_of(made.truth, "zero2-fp32" if kind == "round-robin" else kind))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*zero.ON_THREE, zero.TINY])
def test_three_ranks(kind: str, produce: Produce) -> None:
    made = produce(zero.on_three)
    layout = open_layout(made.root / kind)
    assert layout.world_size == 3
    assert_holds(layout, truth_of(made.truth, kind))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_pipelines(kind: str, produce: Produce) -> None:
    made = produce(zero.pipelines)
    layout = open_layout(made.root / kind)
    truth = truth_of(made.truth, kind)
    assert layout.world_size == Checkpoint.open(made.root / kind).world_size == 2
    assert_holds(layout, truth)
    masters = {name for name in truth if name.startswith("model.")}
    assert masters == {name for name in layout.tensors if name.startswith("model.")} == set(layout.twins)


def test_the_optimizer_is_by_name_in_groups(produce: Produce) -> None:
    layout = open_layout(produce(zero.on_two).root / "zero3")
    names = ["embed.weight", "down.weight"], ["norm.weight"]
    for i, group in enumerate(names):
        key = ("optimizer", "param_groups", i, "params")
        (found,) = [name for name in layout.blobs if layout.key(name) == key]
        assert load_value(layout.root, layout.blobs[found]) == group
    steps = [name for name in layout.tensors if name.endswith(".step")]
    assert [layout.key(name) for name in steps] == [("optimizer", "state", n, "step") for g in names for n in g]


def test_what_the_client_gave_lies_under_its_own_keys(produce: Produce) -> None:
    layout = open_layout(produce(zero.on_two).root / "zero1")
    tops = {layout.key(name)[0] for name in layout.names}
    assert {"my_epoch", "lr_scheduler", "global_steps", "ds_config"} <= tops
    assert not {"module", "param_shapes", "optimizer_state_dict", "param_slice_mappings"} & tops


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero2-fp32", "round-robin", "aligned", "bf16-optimizer", "zero0"])
def test_a_rounded_copy_lies_beside_each_master(kind: str, produce: Produce) -> None:
    layout = locate_all_chunks(open_layout(produce(zero.on_two).root / kind))
    assert layout.twins
    for name, twin in layout.twins.items():
        master = torch.frombuffer(bytearray(contents(layout, name)), dtype=torch.float32)
        copy = Layout(layout.root, layout.format, {name: twin})
        dtype = getattr(torch, twin.spec.dtype.name)
        assert raw_bytes(master.to(dtype)) == contents(copy, name), name


def test_without_zero_numbered_states_have_names_where_the_order_is_certain(produce: Produce) -> None:
    made = produce(zero.on_two)
    for kind in ("zero0", "zero0-fp32"):
        layout = open_layout(made.root / kind)
        parameters = {name.removeprefix("model.") for name in layout.tensors if name.startswith("model.")}
        states = {layout.key(name)[2] for name in layout.tensors if name.endswith("exp_avg")}
        assert states == parameters - {"frequencies", "head.weight" if kind == "zero0-fp32" else ""}
        for name in states:
            assert layout.specs[f"optimizer.state.{name}.exp_avg"].shape == layout.specs[f"model.{name}"].shape


def test_an_adapter_beside_the_states_is_for_use(produce: Produce, tmp_path: Path) -> None:
    """As transformers' Trainer leaves it: what `consolidate` means is the adapter, `convert` all states."""
    run = tmp_path / "checkpoint-2"
    shutil.copytree(produce(zero.on_two).root / "zero1", run)
    (run / "trainer_state.json").write_text('{"global_step": 2}')
    (run / "zero_to_fp32.py").write_text("# a script of DeepSpeed's")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up"]}
    (run / "adapter_config.json").write_text(json.dumps(config))
    sides = {"A": torch.ones(2, zero.WIDTH), "B": torch.ones(zero.WIDTH + 1, 2)}
    adapter = {f"base_model.model.up.lora_{side}.weight": tensor for side, tensor in sides.items()}
    save_file(adapter, run / "adapter_model.safetensors")
    done = ckptkit.consolidate(run, tmp_path / "out")
    assert any("used `adapter_model.safetensors`" in note and "global_step2" in note for note in done.notes)
    assert set(ckptkit.open(tmp_path / "out")) == adapter.keys()
    assert (tmp_path / "out" / "adapter_config.json").exists()
    done = ckptkit.convert(run, tmp_path / "dcp", to="dcp")
    assert "model.embed.weight" in ckptkit.open(tmp_path / "dcp")
    assert "adapter_config.json" in done.files
    left = {left.name: left.why for left in done.left_behind}
    assert left["adapter_model.safetensors"] == "exported by the trainer, beside its own states"
    done = ckptkit.consolidate(run, tmp_path / "strict", strict=True)
    assert all(left.is_expected for left in done.left_behind)
    done = ckptkit.consolidate(run, tmp_path / "module", weights_from="module")
    assert "embed.weight" in ckptkit.open(tmp_path / "module")


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path, produce: Produce) -> Any:
    def make(kind: str, step: int = 2) -> Path:
        source = produce(zero.on_two).root / kind / f"global_step{step}"
        return Path(shutil.copytree(source, tmp_path / f"global_step{step}"))

    return make


def refused(path: Path, kind: type[CkptError] = Corrupt) -> CkptError:
    with pytest.raises(kind) as raised:
        open_layout(path)
    return raised.value


@pytest.mark.parametrize("rank", [0, 1])
def test_the_missing_file_of_a_rank_is_named(rank: int, copy: Any) -> None:
    root = copy("zero2-fp32")
    (root / OPTIMIZER.format(rank)).unlink()
    error = refused(root)
    assert error.path == root / OPTIMIZER.format(rank)
    assert f"rank {rank} is missing" in error.message
    assert not Checkpoint.at(root).is_complete


@pytest.mark.slow
def test_files_of_an_older_larger_run_are_named(copy: Any, produce: Produce) -> None:
    root = copy("zero2-fp32")
    older = produce(zero.on_three).root / "zero2-fp32" / "global_step2" / OPTIMIZER.format(2)
    shutil.copy(older, root)
    error = refused(root)
    assert error.path == root / OPTIMIZER.format(2)
    assert "of an older, larger run" in error.message


def test_files_of_two_runs_are_not_mixed(copy: Any, produce: Produce, tmp_path: Path) -> None:
    root = copy("zero2-fp32")
    other = produce(zero.on_two).root / "zero3" / "global_step2"
    for file in other.glob("*_model_states.pt"):
        shutil.copy(file, root)
    assert "of two runs" in refused(root).message
    shutil.rmtree(root)
    root = copy("zero2-fp32")
    shutil.copy(root / OPTIMIZER.format(0), root / f"bf16_{OPTIMIZER.format(0)}")
    assert "of two runs" in refused(root).message


def add_to_steps(value: Any) -> None:
    """Add 7 to every optimizer step in a nested value, in place."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else []):
        if key == "step":
            value[key] = inner + 7
        else:
            add_to_steps(inner)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_files_of_two_saves_are_not_mixed(kind: str, copy: Any) -> None:
    root = copy(kind)
    (optimizer,) = root.glob("*zero_pp_rank_1_*_optim_states.pt")
    change(optimizer, add_to_steps)
    error = refused(root)
    assert "several saves" in error.message
    assert error.path == optimizer


def test_model_states_of_two_saves_are_not_mixed(copy: Any) -> None:
    root = copy("zero3")
    (model,) = root.glob("zero_pp_rank_1_*_model_states.pt")
    change(model, lambda state: state.update(global_steps=9))
    error = refused(root)
    assert (error.path, "expected global_steps 2" in error.message) == (model, True)


def test_buffers_that_ranks_have_with_other_values_are_told(copy: Any, tmp_path: Path) -> None:
    root = copy("zero3")
    file = root / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["module"]["frequencies"] += 1
    torch.save(state, file)
    error = refused(root)
    assert error.tensor == "model.frequencies"
    assert f"the replica in `{file.name}`" in error.message
    assert error.line in [problem.line for problem in ckptkit.verify(root)[0].problems]
    done = ckptkit.consolidate(root, tmp_path / "out", salvage=True)
    assert done.salvaged is not None
    assert [lost.name for lost in done.salvaged.lost] == ["model.frequencies"]
    assert ckptkit.open(tmp_path / "out")["frequencies"].torch().tolist() == [0.0, 1.0, 2.0]


def test_sizes_that_do_not_add_up_are_told(copy: Any, produce: Produce) -> None:
    root = copy("zero2-fp32")
    other = produce(zero.on_two).root / "zero2" / "global_step2"
    shutil.copy(other / OPTIMIZER.format(1), root / OPTIMIZER.format(1))
    error = refused(root)
    assert error.path is not None
    assert error.path.name.endswith("_states.pt")


def test_model_states_of_zero3_alone_say_where_the_data_is(copy: Any) -> None:
    root = copy("zero3")
    for file in root.glob("*_optim_states.pt"):
        file.unlink()
    assert "ZeRO 3 keeps the weights in" in refused(root, Unsupported).message
    file = next(root.glob("zero_pp_rank_0_*_model_states.pt"))
    error = refused(file, Unsupported)
    assert str(root) in (error.hint or "")
    assert detect_format(file) is not None


def test_model_states_without_their_optimizer_say_what_is_missing(copy: Any) -> None:
    root = copy("zero1")
    for file in root.glob("*_optim_states.pt"):
        file.unlink()
    error = refused(root)
    assert "_optim_states.pt" in error.message
    assert open_layout(root / MODEL).format == "pt"  # by itself it has the 16-bit weights


def test_a_missing_file_of_model_states_is_told(copy: Any) -> None:
    root = copy("zero1")
    (root / MODEL).unlink()
    assert "model states is missing" in refused(root).message


def test_offloaded_tensors_and_strange_experts_are_refused(copy: Any) -> None:
    root = copy("zero3")
    (root / OFFLOADED).mkdir()
    assert "offloaded" in refused(root, Unsupported).message
    (root / OFFLOADED).rmdir()
    shutil.copy(next(root.glob("*_model_states.pt")), root / "layer_0_expert_0_mp_rank_00_model_states.pt")
    assert "does not have this expert" in refused(root).message


@pytest.mark.parametrize("kind", ["zero2-fp32", "zero3", "bf16-optimizer"])
def test_a_flipped_bit_of_a_master_is_found_on_the_way(kind: str, copy: Any, tmp_path: Path) -> None:
    """The one checksum is over all that a rank has of a group: of many parameters, and of padding."""
    root = copy(kind)
    ckptkit.consolidate(root, tmp_path / "sound")
    chunk = open_layout(root).tensors["model.head.weight"].chunks[-1]
    with (root / chunk.path).open("r+b") as file:
        file.seek(chunk.offset)
        byte = file.read(1)[0]
        file.seek(chunk.offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(Corrupt, match="damaged") as raised:
        ckptkit.consolidate(root, tmp_path / "out")
    assert raised.value.path == root / chunk.path
    assert not (tmp_path / "out").exists()
    assert not ckptkit.verify(root)[0].is_ok


def test_all_bytes_are_compared(copy: Any, tmp_path: Path) -> None:
    for kind in ("zero2-fp32", "zero3"):
        root = copy(kind)
        done = ckptkit.convert(root, tmp_path / kind, to="dcp")
        assert done.unchecked_bytes == 0
        shutil.rmtree(root)


def test_a_truncated_file_is_named(copy: Any) -> None:
    root = copy("zero3")
    file = next(root.glob("*rank_1_*_optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(root).path == file
    assert [problem.path for problem in Checkpoint.at(root).components[0].reader.problems(root)][:1] == [file]


def change(path: Path, alter: Any) -> None:
    """Save a file again with something changed."""
    state = torch.load(path, weights_only=False)
    alter(state)
    torch.save(state, path)


def test_elastic_states_are_refused(copy: Any) -> None:
    root = copy("zero2-fp32")
    change(root / OPTIMIZER.format(0), lambda s: s["optimizer_state_dict"].update(base_optimizer_state=[{}]))
    assert "elastic" in refused(root, Unsupported).message


def test_without_zero_a_state_of_a_stranger_leaves_all_numbers(copy: Any) -> None:
    root = copy("zero0-fp32")

    def renumber(state: dict[str, Any]) -> None:
        states = state["optimizer"]["state"]
        states[99] = states.pop(max(states))

    change(root / MODEL, renumber)
    layout = open_layout(root)
    assert {"optimizer.state.0.exp_avg", "optimizer.state.99.exp_avg"} <= layout.tensors.keys()


def test_without_zero_and_names_the_order_is_no_evidence(copy: Any) -> None:
    """The script may have passed the parameters in any order; two of them have one shape."""
    root = copy("zero0-fp32")
    change(root / MODEL, lambda state: state["optimizer"]["param_groups"][0].pop("param_names"))
    assert "optimizer.state.0.exp_avg" in open_layout(root).tensors


def test_without_zero_recorded_names_decide(copy: Any) -> None:
    """An optimizer that has the parameters in the reverse of the model's order, and says so."""
    root = copy("zero0-fp32")
    before = {name: lazy.torch() for name, lazy in ckptkit.open(root).items() if name.endswith(".exp_avg")}
    names = [name.split(".", 2)[2].removesuffix(".exp_avg") for name in before]

    def reverse(state: dict[str, Any]) -> None:
        states, (group,) = state["optimizer"]["state"], state["optimizer"]["param_groups"]
        state["optimizer"]["state"] = {len(states) - 1 - number: one for number, one in states.items()}
        group["param_names"] = [f"module.{name}" for name in reversed(names)]

    change(root / MODEL, reverse)
    after = ckptkit.open(root)
    assert all(torch.equal(after[name].torch(), tensor) for name, tensor in before.items())
    (listed,) = (name for name in open_layout(root).blobs if name.endswith("param_names"))
    assert load_value(root, open_layout(root).blobs[listed]) == names[::-1]
    change(root / MODEL, lambda state: state["optimizer"]["param_groups"][0]["param_names"].append("stranger"))
    assert "optimizer.state.0.exp_avg" in open_layout(root).tensors


def test_tensor_parallelism_is_refused(copy: Any) -> None:
    root = copy("zero2-fp32")
    change(root / MODEL, lambda s: s.update(checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 2}))
    assert "tensor parallelism" in refused(root, Unsupported).message


@pytest.mark.parametrize(
    "alter",
    [
        lambda s: s["param_shapes"][0].update({"up.bias": torch.Size([1 << 62])}),
        lambda s: s["param_shapes"][0].update({"up.bias": torch.Size([8])}),
        lambda s: s["param_shapes"][0].pop("head.weight"),
        lambda s: s["param_shapes"][0].update({"another": torch.Size([5])}),
        lambda s: s.update(param_shapes=s["param_shapes"] * 2),
        lambda s: s.update(param_shapes=None),
        lambda s: s.update(param_shapes=[["up.bias"]]),
        lambda s: s.update(module=[1]),
        lambda s: s["module"].update({"up.bias": torch.zeros(3)}),
        lambda s: s["module"].update({"strange": torch.zeros(0)}),
        lambda s: s.update(shared_params={"alias": 3}),
        lambda s: s.update(frozen_param_shapes={"ghost": torch.Size([3])}),
    ],
)
def test_model_states_that_contradict_themselves(alter: Any, copy: Any) -> None:
    root = copy("zero2-fp32")
    change(root / MODEL, alter)
    with pytest.raises(CkptError) as raised:
        open_layout(root)
    assert raised.value.exit_code == 3
    assert raised.value.path is not None


@pytest.mark.parametrize(
    "alter",
    [
        lambda s: s.update(partition_count=[1 << 60]),
        lambda s: s.update(partition_count="2"),
        lambda s: s.update(single_partition_of_fp32_groups=[]),
        lambda s: s.update(single_partition_of_fp32_groups=[torch.zeros(3)]),
        lambda s: s.update(single_partition_of_fp32_groups=[torch.zeros(13, 10)]),
        lambda s: s.update(single_partition_of_fp32_groups=["x"]),
        lambda s: s.update(param_alignment_paddings=[[1]]),
        lambda s: s.update(param_alignment_paddings=[[-1] * 7]),
        lambda s: s.pop("single_partition_of_fp32_groups"),
        lambda s: s["base_optimizer_state"].update(param_groups=[]),
        lambda s: s["base_optimizer_state"]["param_groups"][0].update(params=[0, 0]),
        lambda s: s["base_optimizer_state"]["param_groups"][0].update(params=[7]),
        lambda s: s["base_optimizer_state"]["state"][0].pop("exp_avg"),
        lambda s: s["base_optimizer_state"]["state"][0].update({str(i): 1 for i in range(1000)}),
        lambda s: s["base_optimizer_state"]["state"][0].update(exp_avg=torch.zeros(7)),
        lambda s: s["base_optimizer_state"]["state"][0].update(exp_avg=torch.zeros(130, dtype=torch.float64)),
    ],
)
def test_optimizers_that_contradict_themselves(alter: Any, copy: Any) -> None:
    root = copy("zero2-fp32")
    change(root / OPTIMIZER.format(1), lambda s: alter(s["optimizer_state_dict"]))
    with pytest.raises(CkptError) as raised:
        open_layout(root)
    assert raised.value.exit_code == 3
    assert raised.value.path is not None
