"""Whether the documentation is true: its links, its command lines, its messages, and that all of it is short."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

import ckptkit
from scripts import docs, matrix, sweep
from scripts.benchmarks.__main__ import BENCHMARKS
from scripts.markdown import fill_part
from tests.source import PATHS, nodes

ROOT = Path(__file__).parents[1]
GUIDE = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *GUIDE, *sorted((ROOT / "docs" / "trainers").glob("*.md"))]
WIDTH = 120

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def split(page: Path) -> tuple[str, list[str]]:
    """The text of a page, and the lines of its blocks of code without their indentation; mermaid's are neither.

    A block between fences begins with its fence.
    """
    text, code = [], []
    fence: str | None = None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            code.extend([line] if fence is None else [])
            fence = line[3:] if fence is None else None
        elif fence is not None:
            code.extend([] if fence == "mermaid" else [line])
        elif line.startswith("    "):
            code.append(line[4:])
        else:
            text.append(line)
    return "\n".join(text), code


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    text, _ = split(page)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text, _ = split(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        assert place.exists(), f"{page.name}: there is no {target}"
        assert place.is_relative_to(ROOT), f"{page.name}: {target} leaves the repository"
        assert not anchor or anchor in anchors(place), f"{page.name}: {name or page.name} has no #{anchor}"


@each_page
def test_lines_fit_a_screen(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    long = [number for number, line in lines if len(line) > WIDTH and not line.startswith("|")]
    assert not long, f"{page.name}: lines {long} have more than {WIDTH} columns"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_listed() -> None:
    listed = re.findall(r"\]\(([a-z]+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert sorted(listed) == [page.name for page in GUIDE if page.name != "README.md"]


@pytest.mark.parametrize("page", [docs.OPTIONS, docs.PYTHON, docs.LOADS, docs.RESULTS], ids=lambda page: page.name)
def test_what_comes_from_the_program_is_up_to_date(page: Path) -> None:
    if page == docs.OPTIONS and f"typer=={version('typer')}\n" not in matrix.CONSTRAINTS.read_text():
        pytest.skip("other versions of typer print the help in another form")
    assert page.read_text() == docs.pages()[page], "stale: run `scripts/docs --write`"


@pytest.mark.parametrize(
    ("page", "part"),
    [
        ("../CONTRIBUTING.md", matrix.PART),
        ("names.md", sweep.PART),
        *(("reliability.md", part) for part in ("faults", "faults store")),
        *(("benchmarks.md", f"bench {name}") for name in BENCHMARKS),
    ],
)
def test_what_is_measured_has_its_place(page: str, part: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert fill_part(fill_part(text, part, "x"), part, "y") == fill_part(text, part, "y") != text


def command_lines(page: Path) -> Iterator[str]:
    """What is said to be typed after `ckptkit`: in blocks of code, and inside sentences."""
    text, code = split(page)
    program = r"(?:torchrun [^`]*?-m )?ckptkit ([^`]+)"
    yield from (found[1] for line in code if (found := re.match(rf"(?:\$ )?{program}", line)))
    yield from (" ".join(found.split()) for found in re.findall(rf"`{program}`", text))


LINES = {
    f"{page.stem}: {line}": tuple(shlex.split(line, comments=True))
    for page in PAGES
    if page.name != "options.md"
    for line in command_lines(page)
}


@cache
def answers() -> dict[tuple[str, ...], docs.Answer]:
    lines = sorted(set(LINES.values()))
    return dict(zip(lines, docs.ask(lines), strict=True))


@pytest.mark.parametrize("shown", LINES)
def test_command_lines_are_understood(shown: str) -> None:
    answer = answers()[LINES[shown]]
    assert answer.code == 0, answer.err
    assert answer.out.startswith("Usage: ")


def test_every_command_occurs() -> None:
    assert set(docs.list_commands()) <= {line[0] for line in LINES.values()}


def test_every_public_function_occurs() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    assert not [name for name in ckptkit.__all__ if name[0].islower() and f"### {name}\n" not in text]


@cache
def said() -> list[str]:
    """Every string of the package that is not documentation, f-strings in their fixed parts."""
    return [
        node.value
        for path in PATHS
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


MESSAGES = re.findall(r"^### (.+)$", (ROOT / "docs" / "messages.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_those_of_the_program(message: str) -> None:
    for fixed in message.split("…"):
        piece = fixed.strip(" `'")
        assert any(piece in text for text in said()), f"nothing says `{piece}`"


def test_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "\n".join([*said(), *(page.read_text() for page in PAGES)])
    named = re.findall(r"ckptkit-fsdp\[([\w,]+)\]", text) + re.findall(r"[Tt]he extras? `(\w+)`", text)
    assert set(named) - {"scheme"} <= project["optional-dependencies"].keys()
    assert len(set(named)) > 3


def shown_in(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of a page that begin with `$`, each with the output that is shown of it."""
    _, code = split(page)
    blocks = "\n".join(code).split("$ ckptkit ")[1:]
    for block in blocks:
        line, *output = block.partition("\n```")[0].splitlines()
        yield line, output


def alike(text: str, home: Path) -> str:
    """A line of output without what differs from run to run: numbers, units, spaces, and where the run is."""
    text = re.sub(r"\d[\d,.]*(e-\d+)?", "#", text.replace(f"{home}/", ""))
    return " ".join(re.sub(r"# (([KMG]?B(/s)?)|s|min)\b", "#", text).split())


def run_in(home: Path, line: str) -> str:
    """What a command prints in a directory, where it succeeds."""
    command = [sys.executable, "-m", "ckptkit", *shlex.split(line)]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ckptkit {line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def follow(page: Path, home: Path) -> None:
    """Type the commands of a page in order, and look for each line that is shown of what they print."""
    for line, output in shown_in(page):
        said = run_in(home, line)
        lines = {alike(one, home) for one in said.splitlines()}
        missing = [one for one in output if one and one != "..." and alike(one, home) not in lines]
        assert not missing, f"ckptkit {line}\nprinted\n{said}\nand not\n" + "\n".join(missing)


@pytest.mark.nightly
def test_the_quickstart_can_be_followed(tmp_path: Path) -> None:
    follow(ROOT / "docs" / "quickstart.md", tmp_path)


@pytest.mark.slow
def test_the_readme_can_be_followed_where_the_demo_was(tmp_path: Path) -> None:
    run_in(tmp_path, "train run --nproc 2 --steps 8 --save-every 4")
    run_in(tmp_path, "consolidate run out")  # what `scripts/demo` leaves is `run` and `out`
    follow(ROOT / "README.md", tmp_path)
