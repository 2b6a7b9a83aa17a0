"""The benchmarks: `scripts/bench NAME` runs one of them and prints its tables in Markdown.

Imports no torch: a child's peak memory is never counted as less than what its parent had.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from scripts.bench_bridge import load, save
from scripts.bench_consolidate import consolidate, inspect
from scripts.bench_manage import manage
from scripts.bench_place import workplace
from scripts.bench_plan import plan
from scripts.bench_reshard import reshard
from scripts.bench_scale import scale
from scripts.bench_train import add_options, train
from scripts.bench_verify import verify

Bench = Callable[..., None]

RUNS: dict[Bench, int] = {consolidate: 5, inspect: 5, plan: 5, reshard: 3, load: 3, save: 3, verify: 5, manage: 3}
SIZES: dict[Bench, float] = {
    consolidate: 1.6,
    reshard: 3.2,
    load: 1.6,
    save: 1.6,
    verify: 1.6,
    manage: 1.6,
}  # of the checkpoint in GB
LAYERS = [1, 2, 4, 9]


def main() -> None:
    """Parse the command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is cleared away
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure ckptkit beside other tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, runs in RUNS.items():
        options = commands.add_parser(command.__name__, help=command.__doc__)
        options.add_argument("--runs", type=int, default=runs, help=f"runs of each program, {runs} by default")
        if command in SIZES:
            size = SIZES[command]
            options.add_argument(
                "--size-gb", type=float, default=size, help=f"size of the checkpoint, {size} by default"
            )
    options = commands.add_parser("scale", help=scale.__doc__)
    options.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="layers of the model, once or more")
    add_options(commands.add_parser("train", help=train.__doc__))
    arguments = parser.parse_args()
    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    if arguments.command == "train":
        with workplace() as home:
            train(home, arguments)
    elif arguments.command == "scale":
        scale(**given)
    else:
        next(command for command in RUNS if command.__name__ == arguments.command)(**given)


if __name__ == "__main__":
    main()
