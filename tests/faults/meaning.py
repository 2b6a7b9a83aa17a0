"""One thing more than the weights: undamaged checkpoints, and commands that must write it, say it or refuse.

Silence is the only failure: status 0, the thing is not in the output, and no word of it.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path

from safetensors.torch import save_file

from tests.faults.cases import Case, Seen
from tests.faults.meaning_outputs import Output, rows_of, words_of
from tests.faults.meaning_sources import CONFIG, FORMATS, add_of, model
from tests.faults.meaning_things import CHANGES_WEIGHTS, NEEDS_MANIFEST, THINGS, Piece, Thing, lay_adapter
from tests.faults.server import Ended, Server
from tests.faults.verdicts import ERROR_CODES, Verdict
from tests.hub_server import Hub
from tests.verbs import FORMAT_MODULES, modules_of

GROUP = "meaning"
_VERBS = (
    *("consolidate", "reshard", "convert", "average", "merge", "finalize"),
    *("inspect", "verify", "diff", "stats", "doctor", "prune"),
)
_MODULES = (
    *modules_of(*_VERBS),
    *FORMAT_MODULES,
    *("torch", "numpy", "safetensors.torch"),
)


class Outcome(StrEnum):
    """What became of a thing, from the best to the worst."""

    NONE = "-"  # the command refuses this format whatever is in it, or has no such option
    WRITTEN = "written"
    SAID = "said"
    REFUSED = "refused"
    UNNAMED = "unnamed"  # refused without naming the thing
    SILENT = "SILENT"
    CRASH = "crash"


_WHOLE = frozenset({"dcp", "hf"})
_FEW = frozenset(
    {"consolidate", "convert-dcp", "convert-pt", "demote", "verify", "inspect", "diff", "push", "overwrite"}
)
BAD = frozenset({Outcome.UNNAMED, Outcome.SILENT, Outcome.CRASH})
_VERDICTS = {
    Outcome.NONE: Verdict.UNFIRED,
    Outcome.WRITTEN: Verdict.RIGHT,
    Outcome.SAID: Verdict.RIGHT,
    Outcome.REFUSED: Verdict.CLEAN,
    Outcome.UNNAMED: Verdict.UNNAMED,
    Outcome.SILENT: Verdict.SILENT,
    Outcome.CRASH: Verdict.TRACEBACK,
}


@dataclass(frozen=True, slots=True)
class Run:
    """What one command made of one thing in one format."""

    thing: str
    command: str
    format: str
    outcome: Outcome
    why: str


@dataclass(frozen=True, slots=True)
class Place:
    """The directories of one try: the checkpoint, the same without the thing, the output, and what stands beside."""

    home: Path
    format: str

    @property
    def source(self) -> Path:
        """The checkpoint with the thing."""
        return self.home / "src" / add_of(self.format)

    @property
    def plain(self) -> Path:
        """The same without it."""
        return plain_of(self.format)

    @property
    def out(self) -> Path:
        """Where to write."""
        return self.home / "out"

    def beside(self, name: str) -> Path:
        """Something beside: base, adapter, empty-dir, other-model, other-names, map.toml."""
        return self.home / name


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its lines, what it writes (None: it looks only), and where options go.

    It reads a copy of the checkpoint if it `changes` that.
    """

    name: str
    lines: Callable[[Place], list[list[str]]]
    writes: Callable[[Place], Path] | None = None
    prepare: Callable[[Place], object] | None = None
    good: frozenset[int] = frozenset({0})
    has_model: bool = True


def _convert(to: str) -> Command:
    def lines(place: Place) -> list[list[str]]:
        base = ["--base", str(place.beside("base"))] if to == "hf" else []
        return [["convert", str(place.source), str(place.out), "--to", to, "--no-sync", *base]]

    return Command(f"convert-{to}", lines, _out)


def _out(place: Place) -> Path:
    return place.out


def _line(*words: str) -> Callable[[Place], list[list[str]]]:
    return lambda place: [_fill(words, place)]


def _fill(words: Sequence[str], place: Place) -> list[str]:
    known = {
        "SRC": place.source,
        "OUT": place.out,
        "PLAIN": place.plain,
        "RUN": place.home / "run",
        "BASE": place.beside("base"),
        "ADAPTER": place.beside("adapter"),
        "EMPTY": place.beside("empty-dir"),
        "OTHER": place.beside("other-model"),
        "MAP": place.beside("map.toml"),
        "ADAPTER_CONFIG": place.beside("adapter") / "adapter_config.json",
    }
    filled = [str(known.get(word, word)) for word in words]
    return [word.replace("OTHER_NAMES", str(place.beside("other-names"))) for word in filled]


def _parts(place: Place) -> list[list[str]]:
    convert = ["convert", str(place.source), str(place.out), "--to", "dcp", "--no-sync", "--part"]
    return [[*convert, "1/2"], [*convert, "2/2"], ["finalize", str(place.out)]]


def _lay_run(place: Place) -> None:
    run = place.home / "run"
    run.mkdir()
    _copy(place.source, run / place.source.name)
    later = place.source.name.replace("10", "20")
    _copy(place.plain, run / later)


def _lay_tracked_run(place: Place) -> None:
    """A run with a later checkpoint than the one that its latest-checkpoint file names."""
    _lay_run(place)
    (place.home / "run" / "latest").write_text(place.source.name)


def _lay_run_with_notes(place: Place) -> None:
    """A run with a later checkpoint than the one that a file of no known name mentions."""
    _lay_run(place)
    (place.home / "run" / "resume.json").write_text(json.dumps({"checkpoint": f"runs/{place.source.name}", "seed": 7}))


def _demoted(place: Place) -> Path:
    return place.home / "run"


def _lay_target(place: Place) -> None:
    place.out.parent.mkdir(exist_ok=True)
    _copy(place.source, place.out)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


COMMANDS = {
    command.name: command
    for command in (
        Command("consolidate", _line("consolidate", "SRC", "OUT", "--base", "BASE", "--no-sync"), _out),
        *(_convert(to) for to in ("dcp", "hf", "pt", "ranks", "universal")),
        Command("reshard", _line("reshard", "SRC", "OUT", "--to", "3", "--no-sync"), _out),
        Command("parts", _parts, _out),
        Command("salvage", _line("consolidate", "SRC", "OUT", "--base", "BASE", "--salvage", "--no-sync"), _out),
        Command("average", _line("average", "SRC", "SRC", "OUT", "--base", "BASE", "--no-sync"), _out),
        Command("merge", _line("merge", "SRC", "ADAPTER", "OUT", "--base", "BASE", "--no-sync"), _out, has_model=False),
        Command("demote", _line("prune", "RUN", "--keep-last", "1", "--demote", "--yes"), _demoted, _lay_run),
        Command(
            "overwrite",
            _line("convert", "PLAIN", "OUT", "--to", "pt", "--overwrite", "--no-sync"),
            _out,
            _lay_target,
            has_model=False,
        ),
        Command("latest", _line("consolidate", "RUN", "OUT", "--base", "BASE", "--no-sync"), _out, _lay_tracked_run),
        Command("latest-any", _line("consolidate", "RUN", "OUT", "--no-sync"), _out, _lay_run_with_notes),
        Command("latest-inspect", _line("inspect", "RUN"), None, _lay_tracked_run),
        Command("verify", _line("verify", "SRC"), good=frozenset({0, 1})),
        Command("inspect", _line("inspect", "SRC", "--tensors")),
        Command("stats", _line("stats", "SRC", "--tensors")),
        Command("diff", _line("diff", "SRC", "PLAIN"), good=frozenset({0, 1})),
        Command("doctor", _line("doctor", "SRC"), good=frozenset({0, 1})),
        Command("doctor-model", _line("doctor", "SRC", "--model", "BASE"), good=frozenset({0, 1})),
        Command("manifest", _line("manifest", "OUT"), _out, _lay_target, has_model=False),
        Command("push", _line("push", "SRC", "org/model")),
    )
}


# -- the stage ---------------------------------------------------------------------------------------------------------


@cache
def _home() -> Path:
    home = Path(tempfile.mkdtemp(prefix="meaning-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@cache
def _server() -> Server:
    server = Server(*_MODULES)
    server.__enter__()
    atexit.register(server.__exit__, None, None, None)
    return server


@cache
def plain_of(name: str) -> Path:
    """The checkpoint of a format with nothing more."""
    root = _home() / f"plain-{name}" / add_of(name)
    root.parent.mkdir()
    FORMATS[name].make(root, {})
    return root


def _lay_beside(home: Path, thing: Thing | None) -> None:
    for name in ("base", "adapter", "empty-dir", "other-model", "other-names"):
        (home / name).mkdir()
    if thing is not None and thing.base is not None:
        thing.base(home / "base")
    else:
        (home / "base" / "config.json").write_text(json.dumps(CONFIG))
    lay_adapter(home / "adapter")
    save_file(model(11), home / "other-model" / "model.safetensors")
    save_file({f"z.{name}": value for name, value in model(11).items()}, home / "other-names" / "model.safetensors")
    (home / "map.toml").write_text('name = "mine"\n[[rule]]\nown = "nowhere.{i}.x"\nhub = "somewhere.{i}.x"\n')


def _ckptkit(words: Sequence[str]) -> Ended:
    if words[0] != "push":
        return _server().run("ckptkit", words, timeout=60, env={"HF_HUB_OFFLINE": "1"})
    with tempfile.TemporaryDirectory(dir=_home()) as root, Hub(Path(root)) as hub:
        return _server().run("ckptkit", words, timeout=60, env=hub.env)


# -- judging -----------------------------------------------------------------------------------------------------------


def try_thing(
    thing: Thing, formats: Sequence[str] | None = None, commands: Sequence[str] | None = None
) -> Iterator[Run]:
    """Put a thing in each of its formats through each of its commands."""
    for name in thing.formats:
        if formats is not None and name not in formats:
            continue
        with tempfile.TemporaryDirectory(dir=_home()) as work:
            place = Place(Path(work), name)
            try:
                lay(place, thing)
            except Unable:
                continue
            for command in COMMANDS.values():
                if command.name in (commands or _commands_for(thing, name)) and command.name in thing.commands:
                    yield try_command(thing, command, place)


def _commands_for(thing: Thing, name: str) -> frozenset[str]:
    """Every command in the first formats; in the others, what differs by the reader: one of each kind."""
    found = thing.commands if name in _WHOLE else thing.commands & _FEW
    return found if FORMATS[name].has_config or thing.base is None else found - {"doctor"}


class Unable(Exception):
    """A thing that a format has no place for."""


def lay(place: Place, thing: Thing) -> None:
    """Lay down the checkpoint with the thing in it, and what stands beside."""
    known = FORMATS[place.format]
    (place.home / "src").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known.make(place.source, thing.more())
        if thing.name in NEEDS_MANIFEST:
            (place.source / "notes.txt").write_text("seventeen")
            assert _ckptkit(["manifest", str(place.source)]).code == 0
        if thing.lay is not None:
            thing.lay(place.source)
    _lay_beside(place.home, thing)


def try_command(thing: Thing, command: Command, place: Place) -> Run:
    """Give the worst outcome of the thing's pieces, by what is printed and, if that is silent, by the JSON."""
    outcome, why = _run(thing, command, place, as_json=False)
    if outcome is Outcome.SILENT:
        told, why_told = _run(thing, command, place, as_json=True)
        if told is not Outcome.CRASH:
            outcome, why = told, why_told
    if outcome is Outcome.UNNAMED and _plain_code(command.name, place.format) not in command.good:
        outcome = Outcome.NONE
    return Run(thing.name, command.name, place.format, outcome, why)


@cache
def _plain_code(command: str, name: str) -> int | None:
    with tempfile.TemporaryDirectory(dir=_home()) as work:
        place = Place(Path(work), name)
        (place.home / "src").mkdir()
        _copy(place.plain, place.source)
        _lay_beside(place.home, None)
        return _start(COMMANDS[command], place, (), as_json=False)[-1].code


def _start(command: Command, place: Place, options: Sequence[str], *, as_json: bool) -> list[Ended]:
    for name in ("out", "run"):
        shutil.rmtree(place.home / name, ignore_errors=True)
    if (place.home / "out").exists():
        (place.home / "out").unlink()
    if command.prepare is not None:
        command.prepare(place)
    ended: list[Ended] = []
    for line in command.lines(place):
        more = () if line[0] == "finalize" else _fill(options, place)
        ended.append(_ckptkit([*line, *more, *(["--json"] if as_json else [])]))
        if ended[-1].code not in command.good:
            break
    return ended


def _run(thing: Thing, command: Command, place: Place, *, as_json: bool) -> tuple[Outcome, str]:
    runs = _start(command, place, thing.options, as_json=as_json)
    last = runs[-1]
    said = "\n".join(f"{words_of(each.out)}\n{each.err}" for each in runs)
    for path, label in ((place.home, "HOME"), (_home(), "STAGE")):
        said = said.replace(str(path), label)
    if last.code is None or last.code not in ERROR_CODES | command.good or "Traceback (most recent call" in said:
        return Outcome.CRASH, f"code {last.code}: {said.strip()[-400:]}"
    if last.code == 2 and re.search(r"[Nn]o such option", said):
        return Outcome.NONE, "no such option"
    if last.code not in command.good:
        named = any(_names(piece, said) for piece in thing.pieces)
        return (Outcome.REFUSED if named else Outcome.UNNAMED), _short(said)
    outcomes = [_judge(piece, command, place, said, last, as_json=as_json) for piece in thing.pieces]
    worst = max(outcomes, key=list(Outcome).index)
    if worst is not Outcome.SILENT and (lost := _lost_weights(thing, command, place, said)):
        return Outcome.SILENT, f"the model's own weights are not in the output: {lost}"
    silent = [piece.words[0] for piece, each in zip(thing.pieces, outcomes, strict=True) if each is Outcome.SILENT]
    return worst, f"{', '.join(silent)} | {_short(said)}" if silent else ""


def _short(said: str) -> str:
    return " / ".join(line.strip() for line in said.strip().splitlines() if line.strip())[:600]


def _names(piece: Piece, said: str) -> bool:
    return any(_is_named(word, said) for word in piece.words)


def _is_named(word: str, said: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", said) is not None


def _judge(piece: Piece, command: Command, place: Place, said: str, last: Ended, *, as_json: bool) -> Outcome:
    if command.name == "diff" and last.code == 1:
        return Outcome.SAID
    if command.name == "demote" and '"demote": []' in said:
        return Outcome.REFUSED  # it stays whole
    named = Outcome.SAID if _names(piece, said) else Outcome.SILENT
    if command.name == "manifest":
        listed = "".join(path.read_text() for path in sorted(place.home.glob("out*/**/ckptkit.json")))
        return Outcome.WRITTEN if _names(piece, listed) else named
    if (
        command.writes is not None
        and piece.can_be_written
        and _is_in(piece, Output(command.writes(place)), place.format)
    ):
        return Outcome.WRITTEN
    if command.name == "verify" and named is Outcome.SILENT and as_json and _is_read(piece, place):
        return Outcome.WRITTEN
    return named


def _is_in(piece: Piece, output: Output, source: str) -> bool:
    as_text = source == "dcp"  # torch's planner has made text of keys when it saved them
    return (
        all(output.is_mtp_tensor(tensor) for tensor in piece.tensors)
        and all(output.has_value(tuple(map(str, path)) if as_text else path, value) for path, value in piece.values)
        and (piece.content is None or output.has_bytes(piece.content))
    )


def _is_read(piece: Piece, place: Place) -> bool:
    """Whether verify finds it out if a bit of the thing is flipped, or else if its file is cut."""
    wanted = [row for tensor in piece.tensors for row in rows_of(tensor) if row.strip(b"\0")]
    if not wanted:
        return piece.content is None  # a value has no bytes of its own that could be flipped
    files = [place.source] if place.source.is_file() else sorted(p for p in place.source.rglob("*") if p.is_file())
    for path in files:
        raw = path.read_bytes()
        at = raw.find(wanted[0])
        if at < 0:
            continue
        try:
            for spoiled in (raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :], raw[:-1]):
                path.write_bytes(spoiled)
                if _ckptkit(["verify", str(place.source)]).code != 0:
                    return True
        finally:
            path.write_bytes(raw)
    return False


@cache
def _keeps_weights(command: str, name: str) -> bool:
    """Whether the command, without any thing, leaves the rows of the weights as they are."""
    with tempfile.TemporaryDirectory(dir=_home()) as work:
        place = Place(Path(work), name)
        (place.home / "src").mkdir()
        _copy(place.plain, place.source)
        _lay_beside(place.home, None)
        ended = _start(COMMANDS[command], place, (), as_json=False)[-1]
        return ended.code == 0 and not _missing(COMMANDS[command], place)


def _lost_weights(thing: Thing, command: Command, place: Place, said: str) -> str:
    """Return a tensor of the model that is not in the output, if no word says which files were left; else ""."""
    if command.writes is None or not command.has_model or thing.options or thing.base is not None:
        return ""
    if thing.name in CHANGES_WEIGHTS or not _keeps_weights(command.name, place.format):
        return ""
    lost = _missing(command, place)
    return "" if lost and any(_is_named(path.name, said) for path in place.plain.rglob("*")) else lost


def _missing(command: Command, place: Place) -> str:
    assert command.writes is not None
    output = Output(command.writes(place))
    return next((name for name, value in model().items() if not output.is_mtp_tensor(value)), "")


# -- the cases ---------------------------------------------------------------------------------------------------------


def _try(thing: Thing, _place: Path, whole: bool) -> Iterator[Seen]:
    for run in try_thing(thing, None if whole else thing.formats[:1]):
        what = f"{run.thing} in {run.format}: {run.why}"
        yield Seen(f"ckptkit {run.command}", _VERDICTS[run.outcome], what)


CASES = tuple(Case("63", GROUP, thing.name, partial(_try, thing)) for thing in THINGS)
