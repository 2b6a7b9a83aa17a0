"""Small files in any form, names at another level, and errors that speak Python and name the destination."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from transformers import LlamaConfig

import ckptkit
from ckptkit.checkpoints.manifest import StaleManifest
from ckptkit.errors import CkptError, Mismatch, Usage
from ckptkit.storage import Reader, Writer
from tests.command import ckptkit as command

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing")
WEIGHT = torch.arange(6.0).reshape(3, 2)
CONFIG = {"model_type": "tiny", "sizes": [1, 2]}


def save(state: dict[str, Any], writer: Any) -> None:
    dcp.save(state, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize(
    "form", [json.dumps(CONFIG), json.dumps(CONFIG).encode(), CONFIG, "path", LlamaConfig(vocab_size=7)]
)
def test_small_files_are_taken_in_any_form(tmp_path: Path, form: Any) -> None:
    if form == "path":
        (tmp_path / "own.json").write_text(json.dumps(CONFIG))
        form = tmp_path / "own.json"
    save({"model": {"w": WEIGHT}}, Writer(tmp_path / "out", files={"config.json": form}))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["vocab_size"] == 7) if isinstance(form, LlamaConfig) else (found == CONFIG)


@pytest.mark.parametrize(
    ("form", "words"), [(3, "a int"), ({"a": {1, 2}}, "not JSON"), ([1], "a list"), (None, "a NoneT")]
)
def test_the_constructor_refuses_anything_else(tmp_path: Path, form: Any, words: str) -> None:
    with pytest.raises(Usage, match=rf"files\['config.json'\]: expected bytes, text, a path.*{words}"):
        Writer(tmp_path / "out", files={"config.json": form})


def test_a_path_that_is_passed_as_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Usage, match=r"expected JSON, found .model/config\.json.") as raised:
        Writer(tmp_path / "out", files={"config.json": "model/config.json"})
    assert "pathlib.Path" in str(raised.value.hint)


def load(path: Path, state: dict[str, Any], **terms: Any) -> None:
    dcp.load(state, storage_reader=Reader(path, **terms), no_dist=True)


@pytest.mark.parametrize("missing", ["error", "keep", "zero"])
def test_a_load_that_matches_nothing_is_an_error_that_says_where_the_names_are(tmp_path: Path, missing: str) -> None:
    save({"app": {"model": {"w": WEIGHT, "b": WEIGHT}}}, FileSystemWriter(tmp_path / "deep"))
    save({"w": WEIGHT, "b": WEIGHT}, FileSystemWriter(tmp_path / "flat"))
    for path, above, words in (
        ("deep", (), r'under `app\.model`: load \{"app": \{"model": STATE\}\}'),
        ("flat", ("app", "model"), r'pass under="app\.model"'),
        ("flat", ("other",), r'pass under="other"'),
    ):
        state: dict[str, Any] = {"w": torch.zeros(3, 2), "b": torch.zeros(3, 2)}
        for step in reversed(above):
            state = {step: state}
        with pytest.raises(CheckpointException, match=words):
            load(tmp_path / path, state, missing=missing)
    for under in ("model", "app.model"):
        state = {"app": {"model": {"w": torch.zeros(3, 2), "b": torch.zeros(3, 2)}}}
        with pytest.raises(CheckpointException, match=f'drop under="{under}": the checkpoint has these names without'):
            load(tmp_path / "deep", state, missing=missing, under=under)
    with pytest.raises(CheckpointException, match="has names like `b`, `w`"):
        load(tmp_path / "flat", {"x": torch.zeros(3, 2)}, missing=missing)


def test_some_that_match_are_loaded_and_the_others_kept(tmp_path: Path) -> None:
    save({"w": WEIGHT}, FileSystemWriter(tmp_path / "flat"))
    state = {"w": torch.zeros(3, 2), "new": torch.ones(2)}
    with pytest.warns(UserWarning, match="1 entry is not in the checkpoint, and unchanged: `new`"):
        load(tmp_path / "flat", state, missing="keep")
    assert torch.equal(state["w"], WEIGHT)


def test_a_refusal_names_the_destination_and_the_format_that_takes_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match='pass format="dcp"') as refused:
        save({"a": {"w": WEIGHT}, "b": {"w": WEIGHT}, "step": 3}, Writer(tmp_path / "two"))
    assert ".ckptkit.tmp" not in str(refused.value)
    assert str(tmp_path / "two") in str(refused.value)
    assert "--include" not in str(refused.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_quantized_tensor_is_refused_with_what_can_be_saved(tmp_path: Path, to: str) -> None:
    quantized = torch.quantize_per_tensor(WEIGHT.float(), 0.1, 0, torch.qint8)
    with pytest.raises(CheckpointException, match=r"dtype qint8 has its scales.*save its `int_repr\(\)`"):
        save({"w": quantized}, Writer(tmp_path / "out", to))
    assert not list(tmp_path.iterdir())


def test_errors_in_python_name_arguments(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("x")
    torch.save({"w": WEIGHT}, tmp_path / "m.pt")
    with pytest.raises(CkptError) as refused:
        ckptkit.consolidate(tmp_path / "m.pt", tmp_path / "out", names="keep")
    assert "pass overwrite to replace it" in str(refused.value)
    assert "--overwrite" in str(refused.value.hint)
    error = Mismatch(
        "no", hint="pass --keep-last 3 or `ckptkit convert A B --to hf`, --fill-from DIR or --dtype '*=bf16'"
    )
    assert str(error) == (
        "no (hint: pass keep_last=3 or `ckptkit convert A B --to hf`, fill_from=DIR or dtype='*=bf16')"
    )


def test_a_manifest_of_an_earlier_save_is_said_to_be_that(tmp_path: Path) -> None:
    save({"model": {"w": WEIGHT}}, Writer(tmp_path / "ckpt-1", "dcp"))
    assert (tmp_path / "ckpt-1" / "ckptkit.json").exists()
    save({"model": {"w": WEIGHT + 1, "more": WEIGHT}}, FileSystemWriter(tmp_path / "ckpt-1", overwrite=True))
    state = {"model": {"w": torch.zeros(3, 2)}}
    with pytest.warns(StaleManifest, match="ignoring the manifest of an earlier save"):
        load(tmp_path / "ckpt-1", state, unasked="ignore")
    assert torch.equal(state["model"]["w"], WEIGHT + 1)
    with pytest.warns(StaleManifest):
        (found,) = ckptkit.verify(tmp_path / "ckpt-1")
    assert not found.problems
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "ckpt-1"), no_dist=True)
    said = command("inspect", tmp_path / "ckpt-1")
    assert ", no manifest" in said.stdout
    assert said.stderr.count("ignoring the manifest of an earlier save") == 1
    with pytest.warns(StaleManifest):
        copied = ckptkit.cp(tmp_path / "ckpt-1", tmp_path / "copy")
    (left,) = copied.left_behind
    assert (left.name, left.why) == ("ckptkit.json", "the manifest of an earlier save")
    (found,) = ckptkit.verify(tmp_path / "copy")  # the times of its files are others
    assert not found.problems


def test_a_damaged_metadata_file_is_still_damaged(tmp_path: Path) -> None:
    save({"model": {"w": WEIGHT}}, Writer(tmp_path / "ckpt-1", "dcp"))
    path = tmp_path / "ckpt-1" / ".metadata"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CkptError):
        ckptkit.open(tmp_path / "ckpt-1")["model.w"].torch()
