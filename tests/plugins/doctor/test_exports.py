"""Exports that other tools broke: the libraries refuse them, `doctor --fix` makes what these load, or leaves it."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import ckptkit
from ckptkit import doctor
from ckptkit.errors import Corrupt, Occupied
from tests.command import ckptkit as cli
from tests.conftest import Produce
from tests.conversion.salvaging.damage import load_hf
from tests.plugins.doctor.situations import HEADS, SIZES, adapted, from_pretrained, llama, saved
from tests.trainers import produced_zero

INDEX, CONFIG, ADAPTER = "model.safetensors.index.json", "config.json", "adapter_model.safetensors"


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file."""
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


def no_index(root: Path) -> None:
    (root / INDEX).unlink()


def other_names(root: Path) -> None:
    (root / INDEX).unlink()
    for number, file in enumerate(sorted(root.glob("*.safetensors"))):
        file.rename(root / f"part_{number}.safetensors")


def index_of_a_stage(root: Path) -> None:
    """Tensors of a file that is read are not named, and those of a whole file neither."""
    edit(root / INDEX, lambda found: [found["weight_map"].pop(name) for name in of_last_stage(found)])


def index_of_whole_files(root: Path) -> None:
    last = max(root.glob("*.safetensors")).name
    edit(
        root / INDEX, lambda found: [found["weight_map"].pop(n) for n, f in [*found["weight_map"].items()] if f == last]
    )


def of_last_stage(found: Any) -> list[str]:
    return [name for name in found["weight_map"] if re.match(r"model\.(layers\.1|norm)|lm_head", name)]


def cut_index(root: Path) -> None:
    (root / INDEX).write_text("{")


def dtype_of_nothing(root: Path) -> None:
    edit(root / CONFIG, lambda found: found.update(dtype=""))


def config_of_a_deleted_adapter(root: Path) -> None:
    (root / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "/no/base"}')


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (no_index, "index"),
        (other_names, "index"),
        (index_of_a_stage, "index"),
        (index_of_whole_files, "index"),
        (cut_index, "index"),
        (dtype_of_nothing, "config_dtype"),
        (config_of_a_deleted_adapter, "adapter_config"),
    ],
)
def test_what_lies_beside_whole_tensors_is_fixed(tmp_path: Path, damage: Callable[[Path], None], code: str) -> None:
    if damage is config_of_a_deleted_adapter:
        pytest.importorskip("peft")  # without it transformers does not follow the file
    root, out = tmp_path / "model", tmp_path / "out"
    llama().save_pretrained(root, max_shard_size="20KB")
    truth = load_hf(root)
    damage(root)
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    try:
        _, said = from_pretrained(root)
    except (AttributeError, OSError, ValueError):
        pass
    else:
        assert said["missing_keys"] or damage is dtype_of_nothing  # which ends a load that does not name a dtype
    found = doctor(root, fix=out)
    assert [one.code for one in found.findings] == [code]
    assert found.is_ok
    model, said = from_pretrained(out)
    assert not said["missing_keys"]
    assert all(torch.equal(tensor, truth[name]) for name, tensor in model.state_dict().items())
    assert before == {path.name: path.read_bytes() for path in root.iterdir()}
    with pytest.raises(Occupied):
        doctor(root, fix=out)


def test_an_entry_that_torch_writes_for_a_tied_weight_is_dropped(tmp_path: Path) -> None:
    """By torch itself: an index from a model whose head is not tied names a tensor that the state does not have."""
    model = llama(tie_word_embeddings=True)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    places = dict.fromkeys(state, 1) | {"lm_head.weight": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(
            str(tmp_path / "ckpt"), places, enable_consolidation=True, save_distributed=True
        )
        dcp.save(state, storage_writer=writer, no_dist=True)
    root = next(path.parent for path in sorted(tmp_path.rglob("model-00002-of-00002.safetensors")))
    assert b'"dtype":""' in (root / "model-00002-of-00002.safetensors").read_bytes().replace(b" ", b"")
    model.config.save_pretrained(root)
    with pytest.raises(SafetensorError, match="unknown variant"):
        load_file(root / "model-00002-of-00002.safetensors")
    found = doctor(root, fix=tmp_path / "out")
    assert [(one.code, one.tensor) for one in found.findings] == [("empty_entry", "lm_head.weight")]
    assert found.is_ok
    loaded, said = from_pretrained(tmp_path / "out")
    assert not said["missing_keys"]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    edit(root / CONFIG, lambda config: config.update(tie_word_embeddings=False))  # now the head is missing
    assert doctor(root, fix=tmp_path / "other").fixed is None
    assert not (tmp_path / "other").exists()


def test_numbers_of_experts_at_the_end_are_moved(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    root, out = tmp_path / "model", tmp_path / "out"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **experts)).save_pretrained(root)
    truth = load_hf(root)
    wrong = {re.sub(r"experts\.(\d+)\.(\w+)\.weight", r"experts.\2.weight\1", name): truth[name] for name in truth}
    save_file(wrong, root / "model.safetensors", metadata={"format": "pt"})
    found = doctor(root, fix=out)
    assert [(one.code, one.count) for one in found.findings] == [("expert_names", 24)]
    assert found.is_ok
    made = load_hf(out)
    assert made.keys() == truth.keys()
    assert all(torch.equal(made[name], truth[name]) for name in truth)
    lacking = {name: tensor for name, tensor in wrong.items() if not name.endswith("weight3")}
    save_file(lacking, root / "model.safetensors", metadata={"format": "pt"})
    found = doctor(root, fix=tmp_path / "other")
    assert {one.code for one in found.findings} == {"expert_names", "missing"}
    assert found.fixed is None


@pytest.mark.parametrize("damage", ["a shard is missing", "twice", "another model", "cut short"])
def test_what_is_not_certain_is_left(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "model"
    llama().save_pretrained(root, max_shard_size="20KB")
    first, *_, last = sorted(root.glob("*.safetensors"))
    index_of_a_stage(root)
    if damage == "a shard is missing":
        last.unlink()
    elif damage == "twice":
        shutil.copy(first, root / "model-copy.safetensors")
    elif damage == "another model":
        save_file({"value_head.weight": torch.ones(2)}, root / "value_head.safetensors")
    else:
        last.write_bytes(last.read_bytes()[:-8])
    before = sorted(path.name for path in tmp_path.rglob("*"))
    found = doctor(root, fix=tmp_path / "out")
    assert found.findings
    assert found.fixed is None
    assert not found.is_ok
    assert any("nothing was fixed" in note for note in found.notes)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_the_command(tmp_path: Path) -> None:
    root = saved(tmp_path / "model")
    llama().save_pretrained(root, max_shard_size="20KB")
    (root / "model.safetensors").unlink()
    index_of_a_stage(root)
    line = ["doctor", root]
    shown = cli(*line)
    assert shown.returncode == 1
    assert f"ckptkit doctor {root} --fix {root}-fixed" in shown.stdout.replace("\n", " ")
    done = cli(*line, "--fix", f"{root}-fixed")
    assert done.returncode == 0, done.stderr
    assert f"wrote {root}-fixed, which is now:" in done.stdout
    again = cli(*line, "--fix", f"{root}-fixed", "--json")
    assert again.returncode == 5
    assert json.loads(again.stdout)["error"]["code"] == "occupied"
    done = cli(*line, "--fix", f"{root}-2", "--json")
    found = json.loads(done.stdout)
    assert (found["ok"], found["fixed"]["ok"], found["findings"][0]["code"]) == (True, True, "index")


@pytest.mark.parametrize("is_without_tensors", [False, True])
def test_the_empty_adapter_of_zero3(tmp_path: Path, is_without_tensors: bool) -> None:
    root = tmp_path / "adapter"
    adapted().save_pretrained(root)
    base = saved(tmp_path / "base")
    names = [] if is_without_tensors else load_file(root / ADAPTER)
    save_file({name: torch.empty(0) for name in names}, root / ADAPTER, metadata={"format": "pt"})
    found = doctor(root, fix=tmp_path / "out")
    assert [(one.code, one.fix) for one in found.findings] == [("empty_adapter", None)]
    assert "global_step" in found.findings[0].message
    (problem,) = ckptkit.verify(root)[0].problems
    assert "the adapter is empty" in problem.message
    for write in (
        lambda: ckptkit.merge(base, root, tmp_path / "out"),
        lambda: ckptkit.consolidate(root, tmp_path / "out"),
    ):
        with pytest.raises(ckptkit.CkptError) as raised:
            write()
        assert is_without_tensors or (isinstance(raised.value, Corrupt) and "empty" in raised.value.message)


def test_the_states_beside_an_empty_adapter_are_taken(produce: Produce, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    root = Path(shutil.copytree(produce(produced_zero.on_two).root / "zero3", tmp_path / "checkpoint-2"))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up"]}
    (root / "adapter_config.json").write_text(json.dumps(config))
    empty = {f"base_model.model.up.lora_{side}.weight": torch.empty(0) for side in "AB"}
    save_file(empty, root / ADAPTER, metadata={"format": "pt"})
    (finding,) = (one for one in doctor(root).findings if one.code == "empty_adapter")
    assert "`global_step2` contains the weights" in finding.message
    done = ckptkit.consolidate(root, tmp_path / "out")
    assert any("used the states in `global_step2`, not `adapter_model.safetensors`" in note for note in done.notes)
    assert "embed.weight" in ckptkit.open(tmp_path / "out")


def test_a_tower_and_layers_of_an_unknown_type_are_looked_for(tmp_path: Path) -> None:
    root = saved(tmp_path / "model")
    edit(root / CONFIG, lambda config: config.update(model_type="of_no_library", architectures=["OfNoLibrary"]))
    found = doctor(root, fix=tmp_path / "out")
    assert found.is_ok
    assert f"nothing to fix: {tmp_path / 'out'} was not written" in found.notes
    edit(root / CONFIG, lambda config: config.update(num_hidden_layers=4, vision_config={"depth": 2}))
    tower, layers = (one.message for one in doctor(root).findings)
    assert "declares `vision_config`, but the checkpoint has no tensors of it" in tower
    assert "expected 4 layers (num_hidden_layers of" in layers
    assert "found no tensors for 2 of them, such as layer 2" in layers


def test_adapters_with_other_names_are_no_models(tmp_path: Path) -> None:
    """MLX writes adapters.safetensors, and its adapter_config.json names no base."""
    save_file({"model.layers.0.self_attn.q_proj.lora_a": torch.ones(8, 2)}, tmp_path / "adapters.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    assert "adapter_config" not in {finding.code for finding in doctor(tmp_path).findings}
