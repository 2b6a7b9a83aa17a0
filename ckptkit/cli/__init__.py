"""Run the command line: options, tables and exit codes. Prints, alone of all rooms, and errors end here."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any, NoReturn

from ckptkit.errors import CheckpointWarning, CkptError, IOFailure, Usage
from ckptkit.io.disk import DurabilityWarning
from ckptkit.version import __version__


class Interrupted(BaseException):
    """A signal that asks us to stop; what was begun is taken back on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


_shown: set[str] = set()


def show_warning(message: Warning | str, *_where: Any, **_how: Any) -> None:
    """Print a warning as a note; where in the code it arose is of no use to whoever types commands.

    Each is printed once: Python's own filter forgets what it has shown when a library changes the filters.
    """
    from ckptkit.cli.output import note

    text = f"warning: {message}"
    if text not in _shown or isinstance(message, DurabilityWarning):
        _shown.add(text)
        note(text)


def raise_again(lost: sys.UnraisableHookArgs) -> None:
    """Let an interruption come again that Python dropped, raised where nobody could catch it, as in a destructor."""
    if isinstance(lost.exc_value, Interrupted):
        threading.Timer(0.01, os.kill, (os.getpid(), lost.exc_value.exit_code - 128)).start()
    else:
        sys.__unraisablehook__(lost)


def is_want_of_memory(error: BaseException) -> bool:
    """Return whether memory was short where this was raised, be it by the loader of libraries or the interpreter."""
    is_unloaded = isinstance(error, ImportError) and "failed to map segment" in str(error)
    return is_unloaded or isinstance(error, MemoryError | SystemError)


def missing_package(error: Exception) -> str | None:
    """Return the package that an import did not find; None for a module of ours or of Python's library."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (name or "").partition(".")[0]
    return None if package in {"", "ckptkit", *sys.stdlib_module_names} else package


def translate(error: Exception) -> CkptError:
    """Return a missing package, or what the system refused us, as an error of ours. Raises an error of another kind."""
    if package := missing_package(error):
        return Usage(f"{package} is not installed", hint=f"run `pip install {package}`")
    if is_want_of_memory(error):
        return IOFailure("not enough memory", hint="use fewer --jobs, or a machine or a limit with more memory")
    if not isinstance(error, OSError):
        raise error
    named = error.filename if isinstance(error.filename, str) else None
    return IOFailure((error.strerror or str(error)).lower(), path=named)


def main() -> None:
    """Run the command line; every error of ours ends here."""
    if sys.argv[1:] in (
        ["--version"],
        ["-V"],
    ):  # all that is imported below would take four times as long as the answer
        print(f"ckptkit {__version__}")
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    sys.unraisablehook = raise_again
    warnings.simplefilter("always", DurabilityWarning)
    warnings.simplefilter("once", CheckpointWarning)
    warnings.showwarning = show_warning
    try:
        from ckptkit.cli.commands import app

        sys.exit(app(standalone_mode=False))
    except (CkptError, OSError, MemoryError, SystemError, ImportError) as error:
        from ckptkit.cli.output import print_error

        said = error if isinstance(error, CkptError) else translate(error)
        if said.hint:
            from ckptkit.cli.commands import fit_hint

            said.hint = fit_hint(said.hint, sys.argv[1:])
        print_error(said, as_json="--json" in sys.argv)
        sys.exit(said.exit_code)
    except Interrupted as stop:
        print("\n".join(["interrupted", *getattr(stop, "__notes__", [])]), file=sys.stderr)
        sys.exit(stop.exit_code)
