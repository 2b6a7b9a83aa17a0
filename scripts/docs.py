"""Write what the documentation takes from the program: the help of every command, functions, messages of others.

`scripts/docs --write` writes docs/options.md, docs/results.md, docs/llms.txt, the functions and classes in
docs/python.md and the messages of failed loads in docs/messages.md. Without it they are only compared, and the exit
status is 1 if one is stale. `scripts/docs --release` writes the entries of docs/changes/ into CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import metadata
from pathlib import Path
from textwrap import fill
from typing import Any

import ckptkit
from ckptkit.cli.commands import COMMANDS, make_command
from ckptkit.plugins.doctor.known_errors import MESSAGES
from scripts.changes import release
from scripts.markdown import ROOT, WIDTH, fill_part, paragraph
from scripts.results import write_fields, write_json

DOCS = ROOT / "docs"
OPTIONS, PYTHON, LOADS, RESULTS = (DOCS / f"{name}.md" for name in ("options", "python", "messages", "results"))
LLMS = DOCS / "llms.txt"
CONVERSION_OPTIONS = ckptkit.ConvertOptions.__name__
SHARED = "Options of several commands"
HEAD = f"""# Options

What `ckptkit COMMAND --help` prints. An option that several commands share is listed once, under
[{SHARED.lower()}](#{SHARED.lower().replace(" ", "-")}). Written by `scripts/docs --write`.
"""
_ASK = """
import contextlib, io, json, sys
from ckptkit.cli import main
answers = []
for line in json.load(sys.stdin):
    sys.argv = ["ckptkit", *line]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    answers.append((code, out.getvalue(), err.getvalue()))
json.dump(answers, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the command line: its exit code, and what it said on stdout and stderr."""

    code: int
    out: str
    err: str


def ask(lines: Sequence[Sequence[str]]) -> list[Answer]:
    """Ask the real command line for the help of each of `lines`, which it gives where it knows command and options.

    One process answers all, so that a hundred lines take a second or two. `--help` comes first: as the value of an
    option that lacks one it would not stop the command.
    """
    env = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    asked = json.dumps([[*line[:1], "--help", *line[1:]] if is_command(line) else ["--help", *line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", _ASK], input=asked, capture_output=True, text=True, env=env, check=True
    )
    return [Answer(*answer) for answer in json.loads(done.stdout)]


def is_command(line: Sequence[str]) -> bool:
    """Return True if a line begins with a command, and not with an option of all."""
    return bool(line) and not line[0].startswith("-")


def list_commands() -> list[str]:
    """Return the names of all commands, in the order of `ckptkit --help`."""
    return re.findall(r"^  ([a-z]+)  +[A-Z]", ask([[]])[0].out, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Manual:
    """The help of a command: its usage, its paragraphs, and its arguments and options, each with its help text."""

    usage: str
    paragraphs: list[str]
    parameters: list[tuple[str, str]]


def read_help(name: str) -> Manual:
    """Return the help of a command."""
    command = make_command(name)
    context = command.make_context(name, [], resilient_parsing=True)
    records = [each.get_help_record(context) for each in command.params if each.name != "help"]
    usage = " ".join(["ckptkit", name, *command.collect_usage_pieces(context)])
    return Manual(usage, command.help.split("\n\n"), [(words, " ".join(text.split())) for words, text in records])


def write_options() -> str:
    """Return docs/options.md: the help of every command, and once the options that several commands share."""
    manuals = {name: read_help(name) for name in COMMANDS.own}
    users = Counter(parameter for manual in manuals.values() for parameter in manual.parameters)
    shared = [parameter for parameter, commands in users.most_common() if commands > 1 and parameter[0][0] == "-"]
    contents = paragraph(" ".join(f"[{name}](#{name})" for name in manuals))
    common = f"## {SHARED}\n\n{list_parameters([*shared, ('-h, --help', 'Show the help of the command.')])}\n"
    return "\n".join([HEAD, contents, common, *(write_manual(*each, shared) for each in manuals.items())])


def write_manual(name: str, manual: Manual, shared: Collection[tuple[str, str]]) -> str:
    """Return the section of a command, which only names the options that it shares with others."""
    own = [parameter for parameter in manual.parameters if parameter not in shared]
    names = [re.findall("--[a-z-]+", words)[0] for words, _ in manual.parameters if (words, _) in shared]
    texts = [
        f"    {text.removeprefix('Example: ')}" if text.startswith("Example: ") else paragraph(text).strip()
        for text in (" ".join(text.split()) for text in manual.paragraphs)
    ]
    also = paragraph(f"Shared options: {', '.join(f'`{option}`' for option in names)}.").strip()
    return "\n\n".join([f"## {name}", f"    {manual.usage}", *texts, list_parameters(own), also]) + "\n"


def list_parameters(parameters: Iterable[tuple[str, str]]) -> str:
    """Return arguments and options with their help texts as a list."""
    return "\n".join(
        fill(f"- `{words}`: {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for words, text in parameters
    )


def write_functions() -> str:
    """Return the public functions with their signatures and the first line of what each says of itself."""
    functions = {name: thing for name in ckptkit.__all__ if inspect.isfunction(thing := getattr(ckptkit, name))}
    shared = conversion_options()
    sections = [
        f"### {name}\n\n{first_line(function)}\n\n```python\n{sign(f'ckptkit.{name}', function, shared)}\n```"
        for name, function in functions.items()
    ]
    options = "\n".join(["```python", *shared, "```"])
    users = "`average`, `consolidate`, `convert`, `merge` and `reshard` take these keyword arguments:"
    return "\n\n".join([*sections, f"### {CONVERSION_OPTIONS}\n\n{users}\n\n{options}"])


def conversion_options() -> list[str]:
    """Return the parameters that every function with all options of a conversion has."""
    functions = (ckptkit.average, ckptkit.consolidate, ckptkit.convert, ckptkit.merge, ckptkit.reshard)
    spelled = [[spell(each) for each in inspect.signature(function).parameters.values()] for function in functions]
    return [text for text in spelled[0] if all(text in others for others in spelled)]


def write_classes() -> str:
    """Return the classes that users construct, with their parameters, docstrings and public methods."""
    from ckptkit.storage import Reader, Writer  # imports torch

    classes = {"ckptkit.Run": ckptkit.Run, "ckptkit.storage.Reader": Reader, "ckptkit.storage.Writer": Writer}
    return "\n\n".join(write_class(name, holder) for name, holder in classes.items())


def write_class(path: str, holder: type) -> str:
    """Return a class: its signature, its docstring, and the methods that it adds, those of torch's interface aside."""
    inherited = {name for base in holder.__mro__[1:] for name in vars(base)}
    methods = {
        name: method
        for name, method in vars(holder).items()
        if inspect.isfunction(method) and not name.startswith("_") and name not in inherited
    }
    listed = [(sign(name, method, width=sys.maxsize), first_line(method)) for name, method in methods.items()]
    text = "\n\n".join(
        part if part.startswith("- ") else paragraph(part).strip()
        for part in (inspect.getdoc(holder) or "").split("\n\n")
    )
    return "\n\n".join(
        [f"### {holder.__name__}", f"```python\n{sign(path, holder)}\n```", text, list_parameters(listed)]
    ).strip()


def first_line(thing: object) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def sign(name: str, function: Callable[..., Any], shared: Collection[str] = (), width: int = WIDTH) -> str:
    """Return the signature of a function, on one line if it fits; the `shared` parameters together as `**options`."""
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    shown = [spell(parameter) for parameter in parameters]
    if shared and set(shared) <= set(shown):
        shown = [*(text for text in shown if text not in shared), f"**options: {CONVERSION_OPTIONS}"]
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    end = ")" if isinstance(function, type) else f") -> {signature.return_annotation}"
    line = f"{name}({', '.join(shown)}{end}"
    return line if len(line) <= width else "\n".join([f"{name}(", *(f"    {text}," for text in shown), end])


def spell(parameter: inspect.Parameter) -> str:
    """Return a parameter as it is written; a default that is no plain value is dots."""
    text = str(parameter.replace(default=parameter.empty, annotation=parameter.empty)) + f": {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    default = parameter.default
    is_plain = isinstance(default, int | float | str | tuple | None)
    return f"{text} = {json.dumps(default) if isinstance(default, str) else default if is_plain else '...'}"


def write_messages() -> str:
    """Return the messages that failed loads end with, each with who says it and what it means."""
    return "\n".join(f"### {one.words}\n\n{paragraph(f'*{one.whose}.* {one.means}')}" for one in MESSAGES)


def write_llms() -> str:
    """Return docs/llms.txt: the pages of docs/README.md and docs/trainers/, in the form of https://llmstxt.org."""
    rows = re.findall(r"^\| \[(.+?)\]\((\S+?)\) \| (.+) \|$", (DOCS / "README.md").read_text(), re.MULTILINE)
    trainers = {path: path.read_text().partition("\n")[0].removeprefix("# ") for path in DOCS.glob("trainers/*.md")}
    lines = [
        f"# ckptkit\n\n> {metadata('ckptkit-fsdp')['Summary']}\n\n## Documentation\n",
        *(f"- [{title}]({page}): {contents}" for title, page, contents in rows),
        "\n## Trainers\n",
        *(f"- [{trainers[path]}](trainers/{path.name})" for path in sorted(trainers)),
    ]
    return "\n".join(lines) + "\n"


@cache
def pages() -> dict[Path, str]:
    """Return what each page should be, by its path."""
    return {
        OPTIONS: write_options(),
        PYTHON: fill_part(fill_part(PYTHON.read_text(), "functions", write_functions()), "classes", write_classes()),
        RESULTS: fill_part(fill_part(RESULTS.read_text(), "json", write_json()), "fields", write_fields()),
        LOADS: fill_part(LOADS.read_text(), "loads", write_messages()),
        LLMS: write_llms(),
    }


def main() -> None:
    """Parse the command line; write the pages, or say which are stale."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Write what docs/ takes from the program anew.")
    parser.add_argument("--write", action="store_true", help="write them; without it they are only compared")
    parser.add_argument("--release", action="store_true", help="join docs/changes/ into CHANGELOG.md, dated today")
    options = parser.parse_args()
    if options.release:
        release()
        return
    write = options.write
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if write:
            path.write_text(text)
        print(f"{'written' if write else 'stale'}: {path.relative_to(ROOT)}")
    sys.exit(bool(stale) and not write)


if __name__ == "__main__":
    main()
