"""Run benchmarks: `scripts/bench NAME` prints the tables of one; `--write` puts them into docs/benchmarks.md.

Imports no torch: a child's peak memory is never counted as less than what its parent had.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec

from scripts.benchmarks.consolidate import consolidate, inspect, large
from scripts.benchmarks.delta import delta
from scripts.benchmarks.gpu import gpu
from scripts.benchmarks.loss import loss
from scripts.benchmarks.manage import manage
from scripts.benchmarks.merge import merge
from scripts.benchmarks.names import names
from scripts.benchmarks.plan import plan
from scripts.benchmarks.reshard import reshard
from scripts.benchmarks.save_in_trainer import save_in_trainer
from scripts.benchmarks.scale import scale
from scripts.benchmarks.serve import serve
from scripts.benchmarks.storage import load, save
from scripts.benchmarks.store import store
from scripts.benchmarks.trainers import trainers
from scripts.benchmarks.training.compare import DEFAULTS, OPTIONS, train
from scripts.benchmarks.trillion_dcp import trillion
from scripts.benchmarks.verify import verify
from scripts.markdown import ROOT, paragraph, write_part

PAGE = ROOT / "docs" / "benchmarks.md"
VERSIONS = ("torch", "transformers", "accelerate")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: the function that runs it and prints its tables, and the defaults of its options."""

    run: Callable[..., None]
    defaults: Mapping[str, float | str] = field(default_factory=dict)


BENCHMARKS = {
    "consolidate": Benchmark(consolidate, {"size_gb": 1.6, "runs": 5}),
    "large": Benchmark(large, {"size_gb": 6.8, "runs": 3}),
    "reshard": Benchmark(reshard, {"size_gb": 3.2, "runs": 3}),
    "load": Benchmark(load, {"size_gb": 1.6, "runs": 3}),
    "save": Benchmark(save, {"size_gb": 1.6, "runs": 3}),
    "save-in-trainer": Benchmark(save_in_trainer, {"size_gb": 1.2, "runs": 3}),
    "store": Benchmark(store, {"size_gb": 1.6, "runs": 3}),
    "verify": Benchmark(verify, {"size_gb": 1.6, "runs": 5}),
    "delta": Benchmark(delta, {"size_gb": 1.6, "runs": 3}),
    "manage": Benchmark(manage, {"size_gb": 1.6, "runs": 3}),
    "inspect": Benchmark(inspect, {"runs": 5}),
    "plan": Benchmark(plan, {"runs": 5}),
    "trainers": Benchmark(trainers, {"size_gb": 1.2, "runs": 3}),
    "names": Benchmark(names, {"size_gb": 1.6, "runs": 3}),
    "merge": Benchmark(merge, {"size_gb": 1.7, "runs": 3}),
    "serve": Benchmark(serve, {"size_gb": 1.7, "runs": 3}),
    "scale": Benchmark(scale),
    "trillion": Benchmark(trillion, {"layers": 61}),
    "train": Benchmark(train),
    "loss": Benchmark(loss, {"runs": 5, "device": "cpu"}),
    "gpu": Benchmark(gpu, {"size_gb": 4.8, "runs": 1, "device": "cuda"}),
}
HELP = {
    "size_gb": "size of the checkpoint in GB",
    "runs": "runs of each program",
    "layers": "layers of the model",
    "device": "where tensors are",
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: a subcommand for each benchmark, with its own options."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure ckptkit beside other tools, and print tables in Markdown. Without a name: all benchmarks.",
    )
    writing = argparse.ArgumentParser(add_help=False)
    writing.add_argument(
        "--write", action="store_true", default=argparse.SUPPRESS, help=f"into {PAGE.relative_to(ROOT)} instead"
    )
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)} instead")
    commands = parser.add_subparsers(dest="name")
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=escaped(benchmark.run.__doc__), parents=[writing])
        for option, default in benchmark.defaults.items():
            flag, text = f"--{option.replace('_', '-')}", f"{HELP[option]}, {default} by default"
            command.add_argument(flag, type=type(default), default=default, help=text)
        add_own_options(command, name)
    return parser


def escaped(text: str | None) -> str:
    """Return a help text in which argparse reads no `%` as a format."""
    return (text or "").replace("%", "%%")


def add_own_options(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options that only one benchmark has."""
    if name == "scale":
        command.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 9], help="layers of the models")
    if name == "train":
        for option, text in OPTIONS.items():
            cpu, cuda = (DEFAULTS[device][option] for device in ("cpu", "cuda"))
            shown = f"{text}; by default {cpu} on the CPU and {cuda} on a GPU"
            command.add_argument(f"--{option.replace('_', '-')}", type=type(cpu), help=shown)
        command.add_argument("--only", action="append", help="only rows named so, or `saves`; several times")


def describe(arguments: Sequence[str]) -> str:
    """Return the command, the day and the machine that a table is to be read with."""
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS if find_spec(name))
    command = shlex.join(["scripts/bench", *arguments])
    cores = len(os.sched_getaffinity(0))
    return paragraph(
        f"`{command}` on {day}: {cores} cores, {platform.system()} {platform.machine()}, Python "
        f"{platform.python_version()}, {versions}."
    )


def run_one(parser: argparse.ArgumentParser, arguments: Sequence[str], *, write: bool) -> None:
    """Run the benchmark that `arguments` name, and print its tables or write them into their part of the page."""
    options = vars(parser.parse_args(arguments))
    options.pop("write")
    name = options.pop("name")
    head = describe([word for word in arguments if word != "--write"])
    if not write:
        print(head)
        BENCHMARKS[name].run(**options)
        return
    with redirect_stdout(io.StringIO()) as said:
        BENCHMARKS[name].run(**options)
    write_part(PAGE, f"bench {name}", f"{head}\n{said.getvalue()}")


def main() -> None:
    """Parse the command line, and run one benchmark or all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is cleared away
    parser = make_parser()
    given = parser.parse_args()
    for arguments in [sys.argv[1:]] if given.name else [[name] for name in BENCHMARKS if name != "gpu"]:
        run_one(parser, [word for word in arguments if word != "--write"], write=given.write)


if __name__ == "__main__":
    main()
