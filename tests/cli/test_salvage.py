"""`--salvage` as users type it: exit codes, what is said on which stream, and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from ckptkit import reshard
from tests import producers
from tests.command import ckptkit
from tests.conftest import Produce
from tests.producers import save_alone


def test_exit_codes_and_streams(produce: Produce, tmp_path: Path) -> None:
    made = produce(producers.fsdp2)
    root = Path(shutil.copytree(made.root, tmp_path / "ckpt-500"))
    (root / "__1_0.distcp").unlink()
    assert ckptkit("consolidate", root, tmp_path / "strict").returncode == 3
    done = ckptkit("consolidate", root, tmp_path / "out", "--salvage")
    assert done.returncode == 0
    assert "consolidated" in done.stdout
    assert "lost: 10 of 15 entries" in done.stderr
    assert "__1_0.distcp: the file is missing" in done.stderr
    assert "embed.weight[4:8]" in done.stderr
    assert "--fill-from" in done.stderr
    again = ckptkit("consolidate", root, tmp_path / "out", "--salvage", "--json", "--overwrite")
    assert again.returncode == 0
    lost = json.loads(again.stdout)["lost"]
    assert {"name", "why", "path"} <= lost[0].keys()
    filled = ckptkit("reshard", root, tmp_path / "filled", "--to", 2, "--salvage", "--fill-from", made.root)
    assert filled.returncode == 0
    assert "filled" in filled.stderr
    assert "lost:" not in filled.stderr
    whole = ckptkit("reshard", made.root, tmp_path / "whole", "--to", 2, "--salvage")
    assert whole.returncode == 0
    assert "nothing was lost: " in whole.stderr
    assert ckptkit("verify", tmp_path / "out", tmp_path / "filled").returncode == 0
    seen = ckptkit("inspect", tmp_path / "out")
    assert "salvaged from a damaged checkpoint: 10 lost" in seen.stdout
    assert ckptkit("consolidate", root, tmp_path / "part", "--salvage", "--part", "1/2").returncode == 2
    assert ckptkit("consolidate", root, tmp_path / "alone", "--fill-from", made.root).returncode == 2


def lacks_a_rank(root: Path) -> Path:
    """`ckpt-9` as FSDP2 saves it, without the shard of one of four ranks; `whole` beside it has that."""
    names = [f"layers.{number}.weight" for number in range(3)]
    states = {name: {"step": torch.tensor(3.0), "exp_avg": torch.randn(8, 4)} for name in names}
    state = {"model": {name: torch.randn(8, 4) for name in names}, "optim": {"state": states}}
    save_alone(state, root / "one")
    reshard(root / "one", root / "whole", to=4)
    shutil.copytree(root / "whole", root / "run" / "ckpt-9")
    (root / "run" / "ckpt-9" / "__2_0.distcp").unlink()
    return root / "run" / "ckpt-9"


def test_a_salvage_without_weights_is_refused(tmp_path: Path) -> None:
    root = lacks_a_rank(tmp_path)
    for words in (["convert", "--to", "dcp"], ["reshard", "--to", 2], ["consolidate"]):
        done = ckptkit(words[0], root, tmp_path / "out", *words[1:], "--salvage")
        assert done.returncode == 3
        assert "all 3 weights lost some data" in done.stderr or "all 3 tensors" in done.stderr
        assert "pass --fill-from OTHER" in done.stderr
        assert not (tmp_path / "out").exists()
    rest = ckptkit("convert", root, tmp_path / "rest", "--to", "dcp", "--salvage", "--exclude", "model.*")
    assert rest.returncode == 0, rest.stderr
    seen = ckptkit("verify", tmp_path / "rest")
    assert seen.returncode == 0
    assert "warning: " in seen.stderr
    assert "missing: `optim.state.layers.0.weight.exp_avg`" in seen.stderr
    assert json.loads(ckptkit("verify", tmp_path / "rest", "--json").stdout)["checkpoints"][0]["salvaged"]["lost"]


def test_weights_of_another_checkpoint_are_said_first(tmp_path: Path) -> None:
    root = lacks_a_rank(tmp_path)
    line = ["convert", root, tmp_path / "out", "--to", "dcp", "--salvage", "--fill-from", tmp_path / "whole"]
    done = ckptkit(*line)
    assert done.returncode == 0
    first = f"warning: 3 of 3 weights (384 B, 100% of the bytes) come from {tmp_path / 'whole'}, not from {root}"
    assert done.stderr.splitlines()[0] == first
    weights = json.loads(ckptkit(*line, "--overwrite", "--json").stdout)["weights"]
    assert weights == {"own": 0, "own_bytes": 0, "filled": 3, "filled_bytes": 384, "lost": 0, "lost_bytes": 0}
    seen = ckptkit("verify", tmp_path / "out")
    assert seen.returncode == 0
    assert "0 of 3 weights are from the checkpoint itself" in seen.stderr


def test_what_is_lost_is_grouped_by_layer(tmp_path: Path) -> None:
    state = {f"layers.{i}.{part}.weight": torch.randn(4, 4) for i in range(30) for part in ("a", "b", "c", "d", "e")}
    save_alone({"model": state}, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__0_0.distcp").write_bytes((tmp_path / "ckpt" / "__0_0.distcp").read_bytes()[:100_000])
    done = ckptkit("consolidate", tmp_path / "ckpt", tmp_path / "out", "--salvage")
    lines = done.stderr.splitlines()
    assert done.returncode == 0
    assert "    layers.12-29  a.weight, b.weight, c.weight, d.weight and 1 more" in lines
    assert len(lines) < 8


def test_a_damaged_optimizer_beside_a_model(produce: Produce, tmp_path: Path) -> None:
    """A part of a checkpoint that cannot be read at all is left out, and what lies in it is not carried along."""
    made = produce(producers.accelerate)
    root = Path(shutil.copytree(made.root, tmp_path / "checkpoint-3"))
    (root / "optimizer_0" / ".metadata").write_bytes(b"garbage")
    (root / "scheduler.bin").write_bytes(b"as it is")
    done = ckptkit("reshard", root, tmp_path / "out", "--to", 1, "--salvage")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "pytorch_model_fsdp_0",
        "salvage.json",
        "scheduler.bin",
    ]
    assert "no file lists its contents" in done.stderr


def test_a_salvaged_source_is_said_again(produce: Produce, tmp_path: Path) -> None:
    root = Path(shutil.copytree(produce(producers.fsdp2).root, tmp_path / "ckpt"))
    (root / "__1_0.distcp").unlink()
    assert ckptkit("reshard", root, tmp_path / "saved", "--to", 1, "--salvage").returncode == 0
    done = ckptkit("consolidate", tmp_path / "saved", tmp_path / "out")
    assert done.returncode == 0
    assert "salvaged from a damaged checkpoint" in done.stdout
    assert (tmp_path / "out" / "salvage.json").exists()
