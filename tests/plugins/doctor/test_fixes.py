"""Fixes as data: words for a process, a line for a shell, and the fewest commands that fix all findings."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ckptkit import Checkpoint, Finding
from ckptkit.errors import CkptError, Incomplete, Mismatch, SeveralModels, Unsupported
from ckptkit.plugins.doctor.choose_fixes import Trial, choose_fixes, joined_fix_by_fix
from ckptkit.plugins.doctor.finding import Fix
from tests.conftest import Produce
from tests.producers import fsdp2

SOURCE, OUT = Path("my run") / "ckpt-3", Path("-out")
RULES = (r"^(a|b)\.=>\1'", "c=>d")


def convert(**options: int | str | tuple[str, ...]) -> Fix:
    return Fix.of("convert", SOURCE, OUT, **options)


def test_words_are_what_a_shell_makes_of_the_line() -> None:
    fix = convert(base="org/m", rename=RULES, complete_optimizer=True, world_size=4, to="dcp")
    assert fix.process_arguments[:6] == ["ckptkit", "convert", "my run/ckpt-3", "./-out", "--to", "dcp"]
    assert fix.process_arguments[6:] == [
        *("--world-size", "4", "--rename", RULES[0], "--rename", RULES[1], "--complete-optimizer", "--base", "org/m")
    ]
    assert shlex.split(str(fix)) == fix.process_arguments
    assert Finding("renamed", None, "", fix).fix == str(fix)
    assert Finding("shape", None, "").fix is None


def test_options_are_joined_unless_they_disagree() -> None:
    one, two, three = convert(to="dcp", rename=RULES[:1]), convert(to="dcp", rename=RULES), convert(to="pt")
    found = joined_fix_by_fix([one, two, convert(to="dcp", names="hub")], is_sharded=True)
    assert set(found.values()) == {convert(to="dcp", rename=RULES, names="hub")}
    assert joined_fix_by_fix([one, two, three], is_sharded=True) == {one: one, two: two, three: three}


def test_a_salvage_is_a_command_of_its_own() -> None:
    one, two = convert(to="dcp", salvage=True), convert(to="dcp", names="hub")
    assert joined_fix_by_fix([one, two], is_sharded=True) == {one: one, two: two}


def test_shards_for_other_ranks_are_converted_with_the_rest() -> None:
    one, two = Fix.of("reshard", SOURCE, OUT, to=4), convert(to="dcp", names="hub")
    whole = convert(to="dcp", world_size=4, names="hub")
    assert joined_fix_by_fix([one, two], is_sharded=True) == {one: whole, two: whole}
    assert joined_fix_by_fix([one, two], is_sharded=False) == {one: one, two: two}


@pytest.mark.slow
def test_a_command_that_fails_gives_way_to_another(produce: Produce) -> None:
    checkpoint = Checkpoint.open(produce(fsdp2).root)
    fix = Fix.of("reshard", SOURCE, OUT, to=3)
    findings = [Finding("ranks", "a.weight", "", fix), Finding("missing", "b.weight", "")]
    tried: list[Fix] = []

    def dry_run(one: Fix) -> Trial:
        tried.append(one)
        return Trial() if one.verb == "convert" else Trial(Mismatch("a tensor is missing"))

    found, notes = choose_fixes(findings, checkpoint, dry_run)
    assert [one.fix for one in found] == [
        "ckptkit convert 'my run/ckpt-3' ./-out --to dcp --world-size 3",
        None,
    ]
    assert (len(tried), notes) == (2, [])
    found, notes = choose_fixes(findings, checkpoint, lambda _: Trial(Mismatch("a tensor is missing")))
    assert [one.fix for one in found] == [None, None]
    assert notes == [f"`{fix}` would fail with: a tensor is missing"]


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (Incomplete("1 of 2 files is missing", files=["b"], ranks=[1]), Incomplete("1 of 2 files is missing")),
        (SeveralModels("which?", globs=["a.*", "b.*"]), Unsupported("which?")),
    ],
)
def test_what_errors_are_told_apart_by_is_in_no_json(error: CkptError, known: CkptError) -> None:
    assert (error.to_json(), error.exit_code) == (known.to_json(), known.exit_code)
