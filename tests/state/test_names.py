"""Names where two checkpoints are brought together, or one is read: a table and rules of the user's mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from ckptkit import consolidate, convert, diff, verify
from ckptkit.checkpoints.checkpoint import Checkpoint
from ckptkit.errors import Unsupported, Usage
from ckptkit.storage import Reader
from tests.conversion.salvaging.damage import cut
from tests.models.names.hub_models import config_of, saved
from tests.models.names.test_family_file import own_of, table_in
from tests.producers import counted, save_alone

RULE = r"^trunk\.=>model."


class Case:
    """A model of the Hub, the same under names of one's own, and a table and a rule that bring them together."""

    def __init__(self, place: Path) -> None:
        self.table = table_in(place)
        self.hub, self.own, self.trunk = place / "hub", place / "own.pt", place / "trunk.pt"
        self.tensors = saved(config_of("llama"), self.hub)
        torch.save(own_of(self.tensors), self.own)
        self.renamed = {f"trunk.{name.removeprefix('model.')}": one for name, one in self.tensors.items()}
        self.renamed["lm_head.weight"] = self.renamed.pop("trunk.lm_head.weight")
        torch.save(self.renamed, self.trunk)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_diff_takes_a_table_of_either_side(case: Case) -> None:
    assert not diff(case.own, case.hub).is_equal
    assert diff(case.own, case.hub, map=case.table).is_equal
    assert diff(case.hub, case.own, map=case.table).is_equal
    assert diff(case.own, case.own, map=case.table).is_equal


def test_diff_renames_the_first(case: Case) -> None:
    found = diff(case.trunk, case.hub, rename=RULE)
    assert found.is_equal
    assert not found.renamed
    with pytest.raises(Usage, match="matches no tensor"):
        diff(case.hub, case.trunk, rename=RULE)
    assert diff(case.hub, case.hub, rename=RULE, allow_unmatched=True).is_equal


def test_a_table_that_fits_no_side_is_said(case: Case) -> None:
    with pytest.raises(Usage, match=r"no tensor of .* has a name of the table `mine`"):
        diff(case.hub, case.trunk, map=case.table)


def test_verify_brings_an_export_and_its_source_together(case: Case, tmp_path: Path) -> None:
    consolidate(case.own, tmp_path / "of_own", map=case.table, base=case.hub)
    consolidate(case.trunk, tmp_path / "of_trunk", rename=RULE, base=case.hub)
    assert not verify(tmp_path / "of_own", against=case.own)[0].is_ok
    assert verify(tmp_path / "of_own", against=case.own, map=case.table)[0].is_ok
    assert not verify(tmp_path / "of_trunk", against=case.trunk)[0].is_ok
    assert verify(tmp_path / "of_trunk", against=case.trunk, rename=RULE)[0].is_ok
    with pytest.raises(Usage, match="no effect without against"):
        verify(tmp_path / "of_own", map=case.table)


def test_prove_computes_with_a_renamed_source(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from ckptkit import prove

    consolidate(case.own, tmp_path / "of_own", map=case.table, base=case.hub)
    consolidate(case.trunk, tmp_path / "of_trunk", rename=RULE, base=case.hub)
    assert prove(tmp_path / "of_own", against=case.own, map=case.table, base=case.hub).is_ok
    assert prove(tmp_path / "of_trunk", against=case.trunk, rename=RULE, base=case.hub).is_ok


def read(reader: Reader, like: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(found, storage_reader=reader)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_reader_reads_by_the_names_that_a_table_or_rules_give(case: Case) -> None:
    for reader in (Reader(case.own, map=case.table, base=case.hub), Reader(case.trunk, rename=RULE)):
        found = read(reader, case.tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in case.tensors.items())
    own = read(Reader(case.hub, map=case.table, names="mine"), own_of(case.tensors))
    assert all(torch.equal(own[name], tensor) for name, tensor in own_of(case.tensors).items())


@pytest.mark.parametrize("source", ["own", "trunk"])
def test_lost_tensors_come_from_the_model_under_the_names_of_the_hub(source: str, case: Case, tmp_path: Path) -> None:
    options: dict[str, Any] = {"map": case.table} if source == "own" else {"rename": RULE}
    root = tmp_path / "ckpt-1"
    convert(getattr(case, source), root, to="dcp", world_size=3)
    file = root / "__2_0.distcp"
    cut(file, file.stat().st_size // 2)
    done = consolidate(root, tmp_path / "out", salvage=True, fill_from=case.hub, base=case.hub, **options)
    assert done.salvaged is not None
    assert done.salvaged.filled
    assert not done.salvaged.lost
    assert diff(tmp_path / "out", case.hub).is_equal


def dtypes(path: Path) -> dict[str, str]:
    return {name: str(spec.dtype) for name, spec in Checkpoint.open(path).layout.specs.items()}


@pytest.mark.parametrize("to", ["hf", "dcp", "pt"])
@pytest.mark.parametrize("glob", ["trunk.layers.*", "model.layers.*"])
def test_a_dtype_s_glob_is_of_the_source_or_else_of_the_output(to: str, glob: str, case: Case, tmp_path: Path) -> None:
    """A name means the same in every command: `consolidate` took names of the output, and `convert` the source's."""
    out = tmp_path / ("out.pt" if to == "pt" else "out")
    done = convert(case.trunk, out, to=to, rename=RULE, dtype=f"{glob}=bf16")
    expected = {name: "bfloat16" if ".layers." in name else "float32" for name in case.tensors}
    assert dtypes(out) == expected
    is_said = any("matches names in the output" in note for note in done.notes)
    assert is_said == glob.startswith("model.")


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_dtype_s_glob_that_matches_nothing_leaves_the_others_as_they_are(to: str, case: Case, tmp_path: Path) -> None:
    """With `allow_unmatched`, one wrong glob made `convert` look for all the others in the output's names."""
    rules = ["trunk.layers.*=bf16", "blocks.*=bf16"]
    convert(case.trunk, tmp_path / "out", to=to, rename=RULE, dtype=rules, allow_unmatched=True)
    assert dtypes(tmp_path / "out") == {name: "bfloat16" if ".layers." in name else "float32" for name in case.tensors}


@pytest.mark.parametrize("to", ["hf", "dcp", "pt"])
def test_each_dtype_s_glob_is_of_the_source_or_the_output_and_the_last_one_wins(
    to: str, case: Case, tmp_path: Path
) -> None:
    """`convert` looked for all globs among the output's names as soon as one of them was not in the source."""
    out = tmp_path / ("out.pt" if to == "pt" else "out")
    rules = ["trunk.*=bf16", "model.layers.0.*=fp16", "trunk.layers.0.mlp.*=fp64"]
    done = convert(case.trunk, out, to=to, rename=RULE, dtype=rules)
    found = dtypes(out)
    assert found["model.layers.0.mlp.up_proj.weight"] == "float64"
    assert found["model.layers.0.self_attn.q_proj.weight"] == "float16"
    assert found["model.layers.1.mlp.up_proj.weight"] == found["model.norm.weight"] == "bfloat16"
    assert [note for note in done.notes if "matches names in the output" in note] == [
        "--dtype 'model.layers.0.*' matches names in the output, but none in the source"
    ]


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_globs_and_a_table_of_names(to: str, case: Case, tmp_path: Path) -> None:
    """Under a family's names, too, a glob is of the source's names or else of the output's."""
    rules = ["blocks.0.*=bf16", "out_of_all.weight=bf16", "model.layers.1.*=fp16"]
    names: dict[str, Any] = {} if to == "hf" else {"names": "hub"}
    convert(case.own, tmp_path / "out", to=to, map=case.table, base=case.hub, dtype=rules, **names)
    found = dtypes(tmp_path / "out")
    assert {dtype for name, dtype in found.items() if ".layers.0." in name} == {"bfloat16"}
    assert {dtype for name, dtype in found.items() if ".layers.1." in name} == {"float16"}


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_dtype_s_glob_that_is_of_neither_is_refused(to: str, case: Case, tmp_path: Path) -> None:
    with pytest.raises(Usage, match=r"dtype='blocks\.\*' matches no tensor"):
        convert(case.trunk, tmp_path / "out", to=to, rename=RULE, dtype="blocks.*=bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rows", "note"), [(16, "already has 16 rows"), (20, "20 rows instead of 16: added 4 rows")])
def test_the_number_of_rows_is_said(tmp_path: Path, rows: int, note: str) -> None:
    save_alone({"model": {"model.embed_tokens.weight": counted(16, 8)}}, tmp_path / "in")
    done = convert(tmp_path / "in", tmp_path / "out", to="hf", vocab_size=rows)
    assert [said for said in done.notes if "the vocabulary" in said and note in said]


@pytest.mark.parametrize("options", [{"rename": ["a=>b"]}, {"vocab_size": 24}], ids=str)
@pytest.mark.parametrize("above", [("ema",), ("trainer", "ema")], ids=str)
def test_a_copy_of_the_weights_does_not_keep_old_names_and_rows(
    tmp_path: Path, options: Any, above: tuple[str, ...]
) -> None:
    """An EMA: the job could not load it beside the model."""
    model = {f"model.layers.0.self_attn.{name}_proj.weight": counted(8, 8) for name in "qkvo"}
    model |= {"model.embed_tokens.weight": counted(16, 8), "a": counted(8)}
    nested: Any = {name: tensor + 1 for name, tensor in model.items()}
    for key in reversed(above):
        nested = {key: nested}
    save_alone({"model": model, **nested}, tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text('{"model_type": "llama", "vocab_size": 16}')
    with pytest.raises(Unsupported, match="this copy of the weights would keep the old names and rows"):
        convert(tmp_path / "in", tmp_path / "out", to="dcp", **options)
    convert(tmp_path / "in", tmp_path / "out", to="dcp", exclude=["*ema.*"], **options)
