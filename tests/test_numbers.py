"""Numbers in the README and in docs/ are those of the tables, of pyproject.toml and of scripts/constraints.txt."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from ckptkit.version import __version__
from scripts import matrix
from scripts.changes import CHANGES, join, section_of
from scripts.markdown import WIDTH

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOORS = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE))
PINS = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE))
WORDS = {"six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def rows(page: str, part: str) -> list[dict[str, str]]:
    """The rows of the tables in a part of a page, each by the names of its columns; "" is the first column."""
    text = (ROOT / page).read_text().split(f"<!-- {part} -->")[1].split(f"<!-- end of {part} -->")[0]
    found: list[dict[str, str]] = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *body = [cells(line) for line in table.splitlines()]
        found += [dict(zip(["", *head[1:]], row, strict=True)) | {"table": head[0]} for row in body]
    return found


def row(page: str, part: str, name: str) -> dict[str, str]:
    """The first row of this name."""
    return next(each for each in rows(page, part) if each[""] == name)


def number(text: str) -> float:
    """The first number in a text, such as 1,234 or 5.6 s, or a word for it."""
    found = re.search(r"[\d,]*\.?\d+", text)
    return WORDS[text] if found is None else float(found[0].replace(",", ""))


def quoted(page: str, sentence: str) -> float:
    """The number that a sentence of a page quotes."""
    (found,) = re.findall(sentence, " ".join((ROOT / page).read_text().split()))
    return number(found)


def test_runs_of_the_fault_matrix() -> None:
    runs = quoted("README.md", r"none of ([\d,]+) runs with damaged files")
    total = row("docs/reliability.md", "faults", "**all**")
    assert runs == number(total["runs"])
    assert [total[bad] for bad in ("traceback", "half output", "silent wrong")] == ["0", "0", "0"]


@pytest.mark.parametrize("part", ["faults", "faults store"])
def test_runs_above_the_tables_are_those_in_them(part: str) -> None:
    page = (ROOT / "docs" / "reliability.md").read_text().split(f"<!-- {part} -->")[1]
    found = rows("docs/reliability.md", part)
    totals = [each for each in found if each[""] in ("**all**", "*without a manifest*")]
    assert number(page.partition(" runs of ")[0].rpartition(" ")[2]) == sum(number(each["runs"]) for each in totals)
    programs = page.partition(" runs of ")[2].partition(" in ")[0]
    assert programs.split(", ") == list(dict.fromkeys(each["table"] for each in found))


def test_speed_and_memory_of_consolidate() -> None:
    ours, theirs, synced, cat = (
        row("docs/benchmarks.md", "bench consolidate", name)
        for name in (
            "ckptkit consolidate --no-sync",
            "accelerate merge-weights",
            "ckptkit consolidate",
            "bf16: cat, sync",
        )
    )
    assert quoted("README.md", r"and (\d+) MiB of memory") == number(synced["peak RSS"])
    times = quoted("README.md", r"accelerate takes (\w+) times as long")
    assert times == round(number(theirs["warm"]) / number(ours["warm"]))
    for kind, words in (
        ("warm", r"([\d.]+) times as long as `cat`"),
        ("cold", r"page cache, ([\d.]+) times from the disk"),
    ):
        assert quoted("README.md", words) == round(number(synced[kind]) / number(cat[kind]), 1)


def test_versions_and_packages_that_are_needed() -> None:
    readme = (ROOT / "README.md").read_text()
    python = PROJECT["requires-python"].removeprefix(">=")
    assert f"needs Python {python} and torch {FLOORS['torch']}, or newer" in readme
    (without_torch,) = re.findall(r"pip install ([\w -]+) && pip install --no-deps", readme)
    assert {*without_torch.split(), "torch"} == FLOORS.keys()


def test_classifiers_are_the_pythons_of_the_matrix() -> None:
    said = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    listed = [each[""] for each in rows("CONTRIBUTING.md", matrix.PART)]
    assert said == list(dict.fromkeys(map(matrix.minor, listed)))
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert re.findall(r"python: \[(.*)\]", release) == [", ".join(f'"{version}"' for version in said)]


def test_trainers_are_tested_with_the_pinned_versions() -> None:
    page = (ROOT / "docs" / "trainers.md").read_text()
    table = next(table for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE) if "tested with |" in table)
    tested = [
        found for line in table.splitlines() for found in re.findall(r"([\w-]+) (\d+(?:\.\d+)+)", cells(line)[-1])
    ]
    pinned = [(name, version) for name, version in tested if name in PINS]
    assert len(pinned) > 10
    assert [(name, version) for name, version in pinned if not f"{PINS[name]}.".startswith(f"{version}.")] == []


def test_the_changelog_has_each_version_once_and_the_newest_first() -> None:
    versions = re.findall(
        r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    headings = re.findall(r"^## .*", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__
    assert len(set(versions)) == len(headings)


@pytest.mark.parametrize("entry", sorted(CHANGES.glob("*")), ids=lambda path: path.name)
def test_each_entry_is_an_item_of_a_section(entry: Path) -> None:
    assert section_of(entry)
    text = entry.read_text()
    assert re.fullmatch(r"- \S.*\n(  \S.*\n)*", text)
    assert max(map(len, text.splitlines())) <= WIDTH


CHANGELOG = """# Changelog

## 0.2.0 (unreleased)

### Added

#### Checks

- `ckptkit look`.

## 0.1.0 (2026-12-01)

### Fixed

- A fault.
"""


@pytest.mark.parametrize("is_begun", [True, False])
def test_entries_are_joined(is_begun: bool) -> None:
    entries = {Path("added-one.md"): "- One.\n", Path("fixed-two.md"): "- Two.\n", Path("fixed-three.md"): "- Three.\n"}
    head, begun, old = re.split("(?m)^(?=## )", CHANGELOG)
    joined = join(head + begun * is_begun + old, entries, "0.2.0", "2027-01-02")
    kept = "\n#### Checks\n\n- `ckptkit look`.\n" if is_begun else ""
    new = f"## 0.2.0 (2027-01-02)\n\n### Added\n\n- One.\n{kept}\n### Fixed\n\n- Two.\n- Three.\n\n"
    assert joined == head + new + old
    with pytest.raises(ValueError, match="begins with one of added, changed, removed, fixed"):
        join(CHANGELOG, {Path("new-one.md"): "- One.\n"}, "0.2.0", "2027-01-02")
