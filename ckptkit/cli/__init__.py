"""Run the command line: options, tables and exit codes. Prints, alone of all rooms, and errors end here."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from ckptkit.cli.average import average
from ckptkit.cli.consolidate import consolidate
from ckptkit.cli.convert import convert
from ckptkit.cli.diff import diff
from ckptkit.cli.estimate import estimate
from ckptkit.cli.finalize import finalize
from ckptkit.cli.inspect import inspect
from ckptkit.cli.ls import ls
from ckptkit.cli.output import note, print_error
from ckptkit.cli.pin import pin, unpin
from ckptkit.cli.prune import prune
from ckptkit.cli.pull import pull
from ckptkit.cli.push import push
from ckptkit.cli.report import report
from ckptkit.cli.reshard import reshard
from ckptkit.cli.stats import stats
from ckptkit.cli.train import smoke, train
from ckptkit.cli.verify import manifest, verify
from ckptkit.errors import CkptError, IOFailure
from ckptkit.files.system import PromiseLost
from ckptkit.version import __version__

app = typer.Typer(
    name="ckptkit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    consolidate,
    reshard,
    convert,
    finalize,
    inspect,
    ls,
    verify,
    diff,
    manifest,
    prune,
    pin,
    unpin,
    stats,
    average,
    report,
    push,
    pull,
    estimate,
    train,
    smoke,
):
    app.command()(command)


def print_version(wanted: bool) -> None:
    """Answer `--version`."""
    if wanted:
        typer.echo(f"ckptkit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Convert and check checkpoints of PyTorch distributed training: consolidate, reshard, inspect, verify, train.

    Exit codes: 0 done; 1 a check found something; 2 usage; 3 the input is not a checkpoint, damaged or beyond us;
    4 an I/O failure; 5 refused: the destination exists or a path is unsafe; 130 interrupted.
    """


class Interrupted(BaseException):
    """A signal that asks us to stop; what was begun is taken back on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Handle a signal."""
    raise Interrupted(number)


def show_warning(message: Warning | str, *_where: Any, **_how: Any) -> None:
    """Print a warning as a note; where in the code it arose is of no use to whoever types commands."""
    note(f"warning: {message}")


def come_again(lost: sys.UnraisableHookArgs) -> None:
    """Let an interruption come again that Python dropped, raised where nobody could catch it, as in a destructor."""
    if isinstance(lost.exc_value, Interrupted):
        threading.Timer(0.01, os.kill, (os.getpid(), lost.exc_value.exit_code - 128)).start()
    else:
        sys.__unraisablehook__(lost)


def is_want_of_memory(error: BaseException) -> bool:
    """Return whether memory was short where this was raised, be it by the loader of libraries or the interpreter."""
    is_unloaded = isinstance(error, ImportError) and "failed to map segment" in str(error)
    return is_unloaded or isinstance(error, MemoryError | SystemError)


def translate(error: Exception) -> IOFailure:
    """Return what the system refused us, wherever that was. Raises an error that says something else."""
    if is_want_of_memory(error):
        return IOFailure("not enough memory", hint="use fewer --jobs, or a machine or a limit with more memory")
    if not isinstance(error, OSError):
        raise error
    named = error.filename if isinstance(error.filename, str) else None
    return IOFailure((error.strerror or str(error)).lower(), path=named)


def main() -> None:
    """Run the command line; every error of ours ends here."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    sys.unraisablehook = come_again
    warnings.simplefilter("always", PromiseLost)
    warnings.showwarning = show_warning
    try:
        app()
    except (CkptError, OSError, MemoryError, SystemError, ImportError) as error:
        said = error if isinstance(error, CkptError) else translate(error)
        print_error(said, as_json="--json" in sys.argv)
        sys.exit(said.exit_code)
    except Interrupted as stop:
        typer.echo("\n".join(["interrupted", *getattr(stop, "__notes__", [])]), err=True)
        sys.exit(stop.exit_code)
