"""What every store must do with an output: the module of a store subclasses `OutputContract`, which has the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptkit
from ckptkit.entry_points import import_object
from ckptkit.errors import Corrupt, Occupied, Usage
from ckptkit.io import pieces
from ckptkit.io.claims import StoreClaim
from ckptkit.io.destination import CLAIM, to_destination
from ckptkit.io.path import capabilities_at
from tests.directories import files_in

Convert = Callable[..., Any]
PART = 1 << 20  # bytes of a part, so that a small checkpoint has some: the smallest that `pieces` makes
_FOLDER = "run/ckpt-5"
WAYS: dict[str, tuple[Convert, dict[str, Any]]] = {
    "hf": (ckptkit.consolidate, {}),
    "hf shards": (ckptkit.consolidate, {"max_shard_size": 1_250_000, "dtype": "bfloat16"}),
    "dcp": (ckptkit.convert, {"to": "dcp", "world_size": 3}),
    "pt": (ckptkit.convert, {"to": "pt"}),
    "universal": (ckptkit.convert, {"to": "universal"}),
    "average": (lambda source, *more, **options: ckptkit.average([source, source], *more, **options), {}),
}


@dataclass(frozen=True, slots=True)
class Output:
    """A bucket that is empty at first, and the URL of a checkpoint in it.

    `objects` returns the content of all objects by their keys, `put` makes one.
    """

    url: str
    objects: Callable[[], dict[str, bytes]]
    put: Callable[[str, bytes], object]

    def files(self) -> dict[str, bytes]:
        """The objects of the checkpoint, by name."""
        start = f"{_FOLDER}/"
        return {key.removeprefix(start): data for key, data in self.objects().items() if key.startswith(start)}


def make_source(root: Path) -> Path:
    """Save a checkpoint of DCP with an optimizer, a tensor of nothing and entries that are no tensors."""
    generator = torch.Generator().manual_seed(0)
    model = {f"layers.{i}.w": torch.randn(250 + i, 751, generator=generator) for i in range(3)}
    model |= {"embed.weight": torch.randn(7, 3, generator=generator), "empty": torch.zeros(0, 3)}
    states = {name: {"exp_avg": torch.ones(one.shape), "step": torch.tensor(5.0)} for name, one in model.items()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(model)}]
    state = {"model": model, "optimizer": {"state": states, "param_groups": groups}, "step": 5}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=root, no_dist=True)
    (root / "config.json").write_text('{"model_type": "mine"}')
    return root


def damaged(source: Path, root: Path) -> Path:
    """Copy a checkpoint of DCP with one bit flipped."""
    root.mkdir()
    for path in source.iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    file = next(root.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return root


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class OutputContract:
    """The tests. The module has the fixtures `output` and `source`, which `make_source` makes."""

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pieces, "PART_BYTES", PART)

    @pytest.mark.parametrize("way", WAYS)
    def test_the_bytes_are_those_of_a_local_output(
        self, way: str, output: Output, source: Path, tmp_path: Path
    ) -> None:
        convert, options = WAYS[way]
        convert(source, tmp_path / "out", **options)
        convert(source, output.url, **options)
        assert output.files() == files_in(tmp_path / "out")
        assert all(part.is_ok for part in ckptkit.verify(output.url))

    def test_a_single_file_is_an_object(self, output: Output, source: Path, tmp_path: Path) -> None:
        file = tmp_path / "state.pt"
        ckptkit.convert(source, file, to="pt")
        with pytest.raises(Usage, match=r"ends in `.pt`"):
            ckptkit.cp(file, output.url)
        ckptkit.convert(source, f"{output.url}.pt", to="pt")
        assert output.objects() == {f"{_FOLDER}.pt": file.read_bytes()}
        ckptkit.cp(file, f"{output.url}-copied.pt")
        assert output.objects() == dict.fromkeys((f"{_FOLDER}.pt", f"{_FOLDER}-copied.pt"), file.read_bytes())
        with pytest.raises(Occupied):
            ckptkit.cp(file, f"{output.url}.pt")
        ckptkit.cp(file, f"{output.url}.pt", overwrite=True)

    def test_what_is_there_is_refused_or_replaced(self, output: Output, source: Path, tmp_path: Path) -> None:
        model = tmp_path / "model"
        model.mkdir()
        save_file({"w": torch.zeros(4)}, model / "model.safetensors")
        (model / "config.json").write_text("{}")
        ckptkit.cp(model, output.url)
        for write in (ckptkit.cp, ckptkit.consolidate):
            with pytest.raises(Occupied, match="the destination exists"):
                write(source, output.url)
        ckptkit.cp(source, output.url, overwrite=True)
        assert output.files() == files_in(source)
        output.put(f"{_FOLDER}/thesis.tex", b"x")
        with pytest.raises(Occupied, match="thesis"):
            ckptkit.cp(source, output.url, overwrite=True)
        assert "thesis.tex" in output.files()

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_no_file_gets_the_name_of_a_directory(self, output: Output, source: Path, overwrite: bool) -> None:
        output.put(_FOLDER, b"x")
        output.put(f"{_FOLDER}.pt/x", b"x")
        for write in (ckptkit.cp, ckptkit.consolidate):
            with pytest.raises(Occupied, match="the destination is a file"):
                write(source, output.url, overwrite=overwrite)
        with pytest.raises(Occupied, match="the destination is a directory"):
            ckptkit.convert(source, f"{output.url}.pt", to="pt", overwrite=overwrite)
        assert output.objects() == {_FOLDER: b"x", f"{_FOLDER}.pt/x": b"x"}

    def test_only_the_files_of_an_abandoned_upload_are_deleted(self, output: Output, source: Path) -> None:
        claim = StoreClaim.begin("another", ["part.bin"])
        for name, content in ((CLAIM, claim.to_bytes()), ("part.bin", b"x")):
            output.put(f"{_FOLDER}/{name}", content)
        ckptkit.cp(source, output.url, overwrite=True)
        assert output.files() == files_in(source)
        claim = StoreClaim.begin("another", [".metadata", "part.bin"])
        kept = {**files_in(source), "thesis.tex": b"x", "run/ckpt-6/part.bin": b"x"}
        del kept[".metadata"]
        for name, content in ((CLAIM, claim.to_bytes()), ("part.bin", b"x"), *kept.items()):
            output.put(f"{_FOLDER}/{name}", content)
        with pytest.raises(Occupied, match=r"does not know: .*thesis\.tex"):
            ckptkit.cp(source, output.url, overwrite=True)
        assert output.files() == kept
        for old in (b"?", json.dumps({"plan": "another", "started": "now", "host": "there"}).encode()):
            output.put(f"{_FOLDER}/{CLAIM}", old)
            with pytest.raises(Occupied, match="another version of ckptkit wrote this record") as refused:
                ckptkit.cp(source, output.url, overwrite=True)
            assert str(refused.value.path) == f"{output.url}/{CLAIM}"
            assert output.files() == {**kept, CLAIM: old}

    def test_an_upload_that_ended_before_it_deleted_replaced_files_deletes_them_later(
        self, output: Output, source: Path, tmp_path: Path
    ) -> None:
        ckptkit.reshard(source, tmp_path / "ckpt-5", to=3)
        ckptkit.cp(tmp_path / "ckpt-5", output.url)
        kind = import_object(capabilities_at(to_destination(output.url)).destination)
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "_delete_claimed", interrupt)
            ckptkit.cp(source, output.url, overwrite=True)
        assert output.files().items() >= files_in(tmp_path / "ckpt-5").items()
        ckptkit.cp(source, output.url, overwrite=True)
        assert output.files() == files_in(source)

    @pytest.mark.parametrize(
        ("convert", "to"), [(ckptkit.reshard, 2), (ckptkit.convert, "dcp")], ids=["reshard", "convert"]
    )
    def test_damage_is_found_before_the_marks(
        self, convert: Convert, to: object, output: Output, source: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(Corrupt, match="CRC-32"):
            convert(damaged(source, tmp_path / "ckpt-5"), output.url, to=to)
        assert not output.files().keys() & {".metadata", "config.json"}
