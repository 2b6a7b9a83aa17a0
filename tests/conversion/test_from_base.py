"""What only the base has: it is reported, copied with `--from-base`, or no longer declared in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckptkit
from ckptkit import average, consolidate, convert, finalize
from ckptkit.errors import Unsafe, Usage
from ckptkit.models.mtp_layers import with_present_mtp_layers
from tests.models.names.tiny_models import make_model
from tests.producers import save_alone

WEIGHTS = "model.safetensors"
HEADS = {
    "qwen3_next": ("mtp.*", ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate.weight"]),
    "deepseek_v3": ("model.layers.2.*", ["model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"]),
    "glm4_moe": ("model.layers.2.*", ["model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"]),
}


def change(place: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    """Give a saved model more tensors, and its config.json other values."""
    save_file(load_file(place / WEIGHTS) | tensors, place / WEIGHTS, metadata={"format": "pt"})
    said = json.loads((place / "config.json").read_text()) | config
    (place / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


def train(model_type: str, place: Path, without: str = "-") -> dict[str, Tensor]:
    """Save a base and a checkpoint of a training of it; return what `save_pretrained` writes of the latter."""
    model = make_model(model_type)
    model.save_pretrained(place / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(place / "theirs")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(without)}
    save_alone({"model": state}, place / "run" / "ckpt-1")
    return load_file(place / "theirs" / WEIGHTS)


def config_in(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "config.json").read_text())
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("model_type", HEADS)
def test_heads_for_further_tokens(model_type: str, tmp_path: Path) -> None:
    glob, names = HEADS[model_type]
    trained, heads = train(model_type, tmp_path), {name: torch.randn(4, 6) for name in names}
    base, run = tmp_path / "base", tmp_path / "run"
    change(base, heads, num_nextn_predict_layers=1)
    lost = consolidate(run, tmp_path / "lost", base=base)
    assert any(f"{len(names)} tensors that the output lacks" in note and glob in note for note in lost.notes)
    assert any("declares 1 MTP layer (" in note for note in lost.notes)
    assert config_in(tmp_path / "lost")["num_nextn_predict_layers"] == 0
    assert_same(load_file(tmp_path / "lost" / WEIGHTS), trained)
    kept = consolidate(run, tmp_path / "kept", base=base, from_base=glob, strict=True)
    assert not any("lacks" in note or "declares" in note for note in kept.notes)
    assert config_in(tmp_path / "kept")["num_nextn_predict_layers"] == 1
    assert_same(load_file(tmp_path / "kept" / WEIGHTS), trained | heads)
    again = consolidate(tmp_path / "kept", tmp_path / "again", strict=True)
    assert not any("does not call for" in note for note in again.notes)
    assert config_in(tmp_path / "again")["num_nextn_predict_layers"] == 1
    narrow = {name: tensor.bfloat16() for name, tensor in heads.items()}
    consolidate(run, tmp_path / "bf16", base=base, from_base=glob, dtype="bf16")
    found = load_file(tmp_path / "bf16" / WEIGHTS)
    assert_same({name: found[name] for name in heads}, narrow)


def test_doctor_sees_layers_without_tensors(tmp_path: Path) -> None:
    train("qwen3_next", tmp_path)
    change(tmp_path / "theirs", {}, num_nextn_predict_layers=1)
    change(tmp_path / "base", {"mtp.fc.weight": torch.ones(4)}, num_nextn_predict_layers=1)
    alone = [one for one in ckptkit.doctor(tmp_path / "theirs").findings if one.code == "mtp"]
    assert "declares 1 MTP layer (" in alone[0].message
    assert str(alone[0].fix).split()[1] == "consolidate"
    beside = [one for one in ckptkit.doctor(tmp_path / "theirs", model=tmp_path / "base").findings if one.code == "mtp"]
    assert "--from-base mtp.fc.weight" in str(beside[0].fix)
    assert not [one for one in ckptkit.doctor(tmp_path / "base").findings if one.code == "mtp"]


def test_a_quantized_base(tmp_path: Path) -> None:
    trained = train("qwen3_next", tmp_path)
    numbers, scale = torch.randn(4, 6).to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    head = {"mtp.fc.weight": numbers, "mtp.fc.weight_scale_inv": scale}
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    base = tmp_path / "base"
    change(base, head, num_nextn_predict_layers=1, quantization_config=said)
    notes = consolidate(tmp_path / "run", tmp_path / "lost", base=base, dry_run=True).notes
    assert any("1 tensor that the output lacks: mtp.fc.weight;" in note for note in notes)
    consolidate(tmp_path / "run", tmp_path / "plain", base=base, from_base="mtp.*weight")
    plain = {"mtp.fc.weight": numbers.float() * 0.5}
    assert_same(load_file(tmp_path / "plain" / WEIGHTS), trained | plain)
    consolidate(tmp_path / "run", tmp_path / "of-scale", base=base, from_base="mtp.*scale_inv")
    assert_same(load_file(tmp_path / "of-scale" / WEIGHTS), trained | plain)
    assert "quantization_config" not in config_in(tmp_path / "plain")
    change(tmp_path / "theirs", {"x.weight": numbers, "x.weight_scale_inv": scale}, quantization_config=said)
    consolidate(tmp_path / "theirs", tmp_path / "whole", base=base, from_base="mtp.*weight")
    found = load_file(tmp_path / "whole" / WEIGHTS)
    assert all(torch.equal(found[name].float(), head[name].float()) for name in head)
    assert found["mtp.fc.weight"].dtype == torch.float8_e4m3fn


def test_a_vision_tower(tmp_path: Path) -> None:
    trained = train("qwen2_vl", tmp_path, without="model.visual.")
    tower = {name: tensor for name, tensor in load_file(tmp_path / "base" / WEIGHTS).items() if "visual" in name}
    consolidate(tmp_path / "run", tmp_path / "out", base=tmp_path / "base", from_base="visual.*", strict=True)
    assert_same(load_file(tmp_path / "out" / WEIGHTS), trained | tower)


def test_a_remote_base(tmp_path: Path) -> None:
    trained = train("qwen3", tmp_path)
    change(tmp_path / "base", {"mtp.norm.weight": torch.ones(4)})
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/base", "/from-base", recursive=True)
    consolidate(tmp_path / "run", tmp_path / "out", base="memory://from-base", from_base="mtp.*")
    assert_same(load_file(tmp_path / "out" / WEIGHTS), trained | {"mtp.norm.weight": torch.ones(4)})


def test_two_processes(tmp_path: Path) -> None:
    trained, base = train("qwen3", tmp_path), tmp_path / "base"
    change(base, {"mtp.norm.weight": torch.ones(4)})
    for part in ("1/2", "2/2"):
        consolidate(tmp_path / "run", tmp_path / "out", base=base, from_base="mtp.*", part=part)
    finalize(tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / WEIGHTS), trained | {"mtp.norm.weight": torch.ones(4)})


def test_what_is_refused(tmp_path: Path) -> None:
    train("qwen3_next", tmp_path)
    run, base, out = tmp_path / "run", tmp_path / "base", tmp_path / "out"
    with pytest.raises(Usage, match=r"'mpt\.\*' matches no tensor"):
        consolidate(run, out, base=base, from_base="mpt.*")
    with pytest.raises(Usage, match="matches only tensors that the checkpoint has"):
        consolidate(run, out, base=base, from_base="model.norm.*")
    with pytest.raises(Usage, match="base is missing"):
        consolidate(run, out, from_base="mtp.*")
    with pytest.raises(Usage, match="under the Hub's names only"):
        convert(run, out, to="dcp", from_base="mtp.*", base=base)
    with pytest.raises(Usage, match="merge or quantize"):
        consolidate(run, out, from_base="mtp.*", base=base, quantize="fp8-block")
    with pytest.raises(Usage, match="an average"):
        average([run, run], out, base=base, from_base="mtp.*")
    change(base, {"mtp.norm.weight": torch.ones(4)})
    with pytest.raises(Unsafe, match="the source is the destination"):
        consolidate(run, base, base=base, from_base="mtp.*", overwrite=True)
    assert not out.exists()


def test_a_base_of_another_shape(tmp_path: Path) -> None:
    train("qwen3", tmp_path)
    base = tmp_path / "base"
    tensors = load_file(base / WEIGHTS)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors | {"lm_head.weight": torch.ones(44, 32), "old.weight": norm}, base / WEIGHTS)
    notes = consolidate(tmp_path / "run", tmp_path / "out", base=base).notes
    assert any("1 tensor that the output lacks: old.weight; --from-base old.weight copies it" in note for note in notes)
    assert any(f"1 tensor that {base} lacks: model.norm.weight" in note for note in notes)
    assert any("expected [44, 32] as in" in note for note in notes)
    said = json.loads((tmp_path / "theirs" / "config.json").read_text()) | {"_name_or_path": str(base)}
    (tmp_path / "run" / "config.json").write_text(json.dumps(said))
    origin = consolidate(tmp_path / "run", tmp_path / "again").notes
    assert [note for note in origin if str(base) in note] == [note for note in notes[1:] if str(base) in note]


def test_a_base_without_its_large_files(tmp_path: Path) -> None:
    train("qwen3", tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
    (tmp_path / "base" / WEIGHTS).write_text(pointer)
    done = consolidate(tmp_path / "run", tmp_path / "out", base=tmp_path / "base")
    assert any("not compared with the weights of" in note for note in done.notes)
    (tmp_path / "base" / WEIGHTS).unlink()
    alone = consolidate(tmp_path / "run", tmp_path / "alone", base=tmp_path / "base")
    assert not any("compared with the weights" in note for note in alone.notes)
    several = {name: {"w": torch.ones(2)} for name in ("actor", "critic")}
    torch.save(several, tmp_path / "base" / "state.pt")
    unknown = consolidate(tmp_path / "run", tmp_path / "unknown", base=tmp_path / "base")
    assert any("not compared with the weights of" in note and "actor, critic" in note for note in unknown.notes)


def test_lists_for_each_layer() -> None:
    kinds = ["a", "b", "c", "d"]
    config = {"text_config": {"num_hidden_layers": 2, "num_nextn_predict_layers": 2, "layer_types": kinds}}
    names = ["model.layers.1.x", "model.language_model.layers.2.x", "model.vision.layers.3.x"]
    changed, words = with_present_mtp_layers(config, names)
    assert changed["text_config"] == {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "layer_types": kinds[:3],
    }
    assert len(words) == 1
    assert with_present_mtp_layers(config, ["mtp.x"]) == (config, [])
