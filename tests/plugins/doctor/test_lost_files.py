"""Files that were lost after a save: what doctor says of them, and what it suggests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import CkptError
from ckptkit.models.companions import CONFIG
from tests.command import ckptkit as run

SIZES = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def model(root: Path, **more: object) -> Path:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, **more)).save_pretrained(root)
    return root


@pytest.mark.parametrize("name", [CONFIG, "generation_config.json"])
def test_a_salvage_is_no_fix_for_a_lost_config(tmp_path: Path, name: str) -> None:
    base = model(tmp_path / "base")
    ckptkit.consolidate(base, tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    (finding,) = ckptkit.doctor(tmp_path / "out").findings
    assert finding.fix is None
    (finding,) = ckptkit.doctor(tmp_path / "out", model=base).findings
    assert finding.fixed_by is not None
    assert run(*finding.fixed_by.process_arguments[1:]).returncode == 0
    assert Path(finding.fixed_by.paths[-1], name).read_bytes() == (base / name).read_bytes()


def test_a_salvage_stays_the_fix_for_lost_tensors(tmp_path: Path) -> None:
    base = model(tmp_path / "base")
    ckptkit.consolidate(base, tmp_path / "out", max_shard_size="4KB")
    min((tmp_path / "out").glob("*.safetensors")).unlink()
    findings = ckptkit.doctor(tmp_path / "out", model=base).findings
    assert all("--salvage" in str(finding.fix) for finding in findings)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_deleted_metadata_is_no_unfinished_save(tmp_path: Path, has_manifest: bool) -> None:
    root = tmp_path / "ckpt-5"
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    ckptkit.convert(tmp_path / "model.safetensors", root, to="dcp")
    (root / ".metadata").unlink()
    if not has_manifest:
        (root / "ckptkit.json").unlink()
    words = "deleted after the save" if has_manifest else "the save did not finish"
    assert words in ckptkit.verify(root)[0].problems[0].message
    assert words in ckptkit.doctor(root).findings[0].message
    with pytest.raises(CkptError, match=words):
        ckptkit.consolidate(root, tmp_path / "out", names="keep")


def test_the_tensors_that_doctor_has_read_are_not_called_unread(tmp_path: Path) -> None:
    plain = model(tmp_path / "plain")
    assert ckptkit.doctor(plain).not_read == f"tensors were not read: run `ckptkit verify {plain}` to check them"
    tied = model(tmp_path / "tied", tie_word_embeddings=True)
    state = {**ckptkit.open(tied)}
    tensors = {name: tensor.torch() for name, tensor in state.items()}
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tied / "model.safetensors", metadata={"format": "pt"})
    found = ckptkit.doctor(tied)
    assert found.is_ok
    assert "tensors were not read, except `lm_head.weight` and `model.embed_tokens.weight`" in found.not_read
