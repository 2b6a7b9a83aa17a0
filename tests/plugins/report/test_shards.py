"""The shard map: whose parts they are, how tensors are folded, and how they are drawn as text."""

from __future__ import annotations

import pytest

from ckptkit.checkpoints.checkpoint import open_layout
from ckptkit.plugins.report.shard_map import Line, draw_tensor_lines, owner_bars
from ckptkit.plugins.report.shards import Row, ShardMap, format_ranges, map_shards, merged_label
from tests import producers
from tests.conftest import Produce
from tests.plugins.report.layouts import cut_among, llama, with_blob


def text(line: Line) -> str:
    return "".join(run.text for run in line)


def drawn(shards: ShardMap, row: Row, width: int = 12) -> list[str]:
    return [text(line) for line in draw_tensor_lines(row, shards.owners, width)]


def find(shards: ShardMap, name: str) -> Row:
    return next(row for row in shards.rows if row.label == name)


def test_bytes_of_ranks_are_those_of_their_chunks() -> None:
    shards = map_shards(with_blob(cut_among(3, {"a": (7, 2)}), "__2_0.distcp", 100))
    assert shards.by == "rank"
    assert [(owner.name, owner.nbytes) for owner in shards.owners] == [("rank 0", 24), ("rank 1", 24), ("rank 2", 108)]
    assert shards.mean == 52


def test_a_rank_that_holds_nothing_is_shown() -> None:
    shards = map_shards(cut_among(4, {"a": (3, 2)}))
    assert [owner.nbytes for owner in shards.owners] == [8, 8, 8, 0]


def test_where_names_tell_no_rank_it_is_by_file() -> None:
    shards = map_shards(cut_among(2, {"a": (4, 2)}, form="hf"))
    assert shards.by == "file"
    assert [(owner.mark, owner.name) for owner in shards.owners] == [
        ("1", "model-00001-of-00002.safetensors"),
        ("2", "model-00002-of-00002.safetensors"),
    ]


def test_tied_tensors_take_their_bytes_once() -> None:
    layout = cut_among(2, {"a": (4, 2)})
    tied = type(layout)(layout.root, "dcp", {**layout.tensors, "b": layout.tensors["a"]})
    assert [owner.nbytes for owner in map_shards(tied).owners] == [16, 16]


def test_layers_that_are_alike_are_folded() -> None:
    shards = map_shards(cut_among(4, llama(32)))
    assert [(row.label, row.repeats) for row in shards.rows] == [
        ("model.embed_tokens.weight", 1),
        ("model.layers.0-31.self_attn.{q,o}_proj.weight", 64),
        ("model.layers.0-31.mlp.{gate,up}_proj.weight", 64),
        ("model.layers.0-31.{input,post_attention}_layernorm.weight", 64),
    ]


def test_layers_of_which_one_is_cut_otherwise_are_not() -> None:
    whole = cut_among(4, llama(3))
    other = cut_among(2, llama(3))
    odd = {name: (other if ".1.self" in name else whole).tensors[name] for name in whole.tensors}
    shards = map_shards(type(whole)(whole.root, "dcp", odd))
    assert find(shards, "model.layers.0,2.self_attn.{q,o}_proj.weight").repeats == 4
    assert find(shards, "model.layers.1.self_attn.{q,o}_proj.weight").repeats == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.07.b"], "a.07.b"),
        (["w.exp_avg", "w.exp_avg_sq"], "w.exp_avg{,_sq}"),
        (["w.weight", "w.bias"], "w.{weight,bias}"),
        (["a", "b", "c", "d"], "{a,b,c,…}"),
        (["x.0", "x.1", "x.5"], "x.0-1,5"),
        (["n.running_mean", "n.running_var"], "n.running_{mean,var}"),
    ],
)
def test_labels(names: list[str], expected: str) -> None:
    assert merged_label(names) == expected


def test_ranges_of_very_many() -> None:
    assert format_ranges({1, 2, 3, 7}) == "1-3,7"
    assert format_ranges(set(range(0, 40, 2))) == "0..38"


def test_equal_parts_have_equal_widths() -> None:
    shards = map_shards(cut_among(4, {"a": (8, 2)}))
    assert drawn(shards, shards.rows[0]) == ["0░░1▒▒2░░3▒▒"]


def test_a_small_last_part_is_small_but_there() -> None:
    shards = map_shards(cut_among(4, {"a": (301, 2)}))
    (line,) = drawn(shards, shards.rows[0], 24)
    assert line.index("1") == line.index("2") - line.index("1") == 6
    shards = map_shards(cut_among(3, {"a": (201, 2)}))
    assert not shards.rows[0].remarks
    shards = map_shards(cut_among(3, {"a": (200, 2)}))
    assert shards.rows[0].remarks == ("uneven",)


def test_parts_too_many_for_the_width_are_counted() -> None:
    shards = map_shards(cut_among(512, {"a": (1024, 2)}))
    (line,) = drawn(shards, shards.rows[0], 26)
    assert len(line) == 26
    assert line.startswith("0░")
    assert line.endswith("░511")
    assert " 512 parts " in line
    owners = [run.owner for run in draw_tensor_lines(shards.rows[0], shards.owners, 26)[0]]
    assert owners == sorted(owners, key=lambda owner: -1 if owner is None else owner)
    assert owners[0] == 9  # in the middle of the first column of 26


def test_cuts_along_two_axes_are_a_grid(produce: Produce) -> None:
    shards = map_shards(open_layout(produce(producers.mesh).root))
    assert [line[0] for line in drawn(shards, find(shards, "model.grid"))] == ["0", "2"]
    assert [line[0] for line in drawn(shards, find(shards, "model.grid.turned"))] == ["0", "1"]
    assert find(shards, "model.grid").remarks == ("uneven", "by axes 0 and 1")
    assert find(shards, "model.columns").remarks == ("uneven", "by axis 1")
    assert drawn(shards, find(shards, "model.whole")) == ["2" + "░" * 11]


def test_the_flat_shards_of_one_rank_are_one_part(produce: Produce) -> None:
    shards = map_shards(open_layout(produce(producers.fsdp1).root))
    row = find(shards, "model.embed.weight")
    marks = [c for line in drawn(shards, row, 30) for c in line if c.isdigit()]
    assert marks == ["0", "1", "2"]


def test_ranks_of_hf_shards_count_from_0(produce: Produce) -> None:
    shards = map_shards(open_layout(produce(producers.hf_shards).root))
    assert [owner.name for owner in shards.owners] == ["rank 0", "rank 1", "rank 2"]
    assert drawn(shards, find(shards, "no_rows")) == ["(empty)     "]


@pytest.mark.slow
def test_a_thousand_tensors_of_512_ranks_fit_a_screen() -> None:
    shards = map_shards(cut_among(512, llama(160)))
    assert sum(row.repeats for row in shards.rows) == 961
    assert len(shards.rows) == 4
    found = list(owner_bars(shards, 20))
    assert len(found) == 16
    assert (found[1].first.mark, found[1].last.mark) == ("32", "63")


def test_bars_show_who_holds_more() -> None:
    shards = map_shards(with_blob(cut_among(2, {"a": (2, 2)}), "__1_0.distcp", 24))
    assert [bar.bar for bar in owner_bars(shards, 8)] == ["██", "████████"]


def test_the_largest_rows_are_kept_in_order() -> None:
    shards = map_shards(cut_among(2, {"b": (8, 2), "c.x": (2, 2), "a": (16, 2)}))
    shown, left_out = shards.split_off_largest_rows(2)
    assert [row.label for row in shown] == ["b", "a"]
    assert [row.label for row in left_out] == ["c.x"]


def test_rows_stand_under_what_their_names_share() -> None:
    shards = map_shards(cut_among(2, {"m.n.a": (8, 2), "m.n.b.c": (6, 2), "z.y": (2, 2)}))
    assert [(start, len(rows)) for start, rows in shards.rows_by_prefix(shards.rows)] == [("m.n.", 2), ("", 1)]
