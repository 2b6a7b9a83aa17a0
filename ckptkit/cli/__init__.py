"""The command line: options, tables and exit codes. Only this package prints, and it reports every error."""

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
    """SIGINT or SIGTERM was received. Raised so that handlers undo unfinished work on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def raise_interrupted(number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


_shown: set[str] = set()


def show_warning(message: Warning | str, *_where: Any, **_how: Any) -> None:
    """Print a warning as a note, without the source line, which does not help users of the command line.

    Prints each text once. Python's own filter is not enough: it resets when a library changes the filters.
    """
    from ckptkit.cli.output import print_note

    text = f"warning: {message}"
    if text not in _shown or isinstance(message, DurabilityWarning):
        _shown.add(text)
        print_note(text)


def resend_dropped_signal(unraisable: sys.UnraisableHookArgs) -> None:
    """Send a signal again if its `Interrupted` was raised where Python drops exceptions, such as in a destructor."""
    if isinstance(unraisable.exc_value, Interrupted):
        # from another thread, a moment later, so that the signal arrives after the destructor has returned
        threading.Timer(0.01, os.kill, (os.getpid(), unraisable.exc_value.exit_code - 128)).start()
    else:
        sys.__unraisablehook__(unraisable)


def to_ckpt_error(error: Exception) -> CkptError:
    """Return a CkptError for a missing package, too little memory or an OSError. Raises any other error again."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (missing or "").partition(".")[0]
    if package not in {"", "ckptkit", *sys.stdlib_module_names}:
        return Usage(f"{package} is not installed", hint=f"run `pip install {package}`")
    is_unloaded = isinstance(error, ImportError) and "failed to map segment" in str(error)  # of the dynamic linker
    if is_unloaded or isinstance(error, MemoryError | SystemError):
        return IOFailure("not enough memory", hint="use fewer --jobs, or a machine or a limit with more memory")
    if not isinstance(error, OSError):
        raise error
    named = error.filename if isinstance(error.filename, str) else None
    return IOFailure((error.strerror or str(error)).lower(), path=named)


def main() -> None:
    """Run the command line, report errors, and exit with the exit code."""
    if sys.stderr is None:  # the process that started this one closed it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until this process ends
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, raise_interrupted)
    sys.unraisablehook = resend_dropped_signal
    warnings.simplefilter("always", DurabilityWarning)
    warnings.simplefilter("once", CheckpointWarning)
    warnings.showwarning = show_warning
    try:
        if sys.stdout is None:
            raise IOFailure("stdout is closed", hint="redirect it to a file or to /dev/null")
        if sys.argv[1:] in (["--version"], ["-V"]):  # fast path: the imports below take four times as long
            print(f"ckptkit {__version__}", flush=True)
            return
        from ckptkit.cli.commands import app

        sys.exit(app(standalone_mode=False, prog_name="ckptkit"))
    except (CkptError, OSError, MemoryError, SystemError, ImportError) as error:
        from ckptkit.cli.output import print_error

        reported = error if isinstance(error, CkptError) else to_ckpt_error(error)
        if reported.hint:
            from ckptkit.cli.commands import fit_hint_to_command

            reported.hint = fit_hint_to_command(reported.hint, sys.argv[1:])
        print_error(reported, as_json="--json" in sys.argv)
        sys.exit(reported.exit_code)
    except Interrupted as stop:
        print("\n".join(["interrupted", *getattr(stop, "__notes__", [])]), file=sys.stderr)
        sys.exit(stop.exit_code)
