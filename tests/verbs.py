"""Name the modules that commands consist of, for servers that import them once for all their children."""

from __future__ import annotations

import ckptkit
from ckptkit.cli.commands import COMMANDS
from ckptkit.formats import FORMATS

FORMAT_MODULES = tuple(known.where.partition(":")[0] for known in FORMATS.own.values())


def modules_of(*commands: str) -> tuple[str, ...]:
    """Return the modules of some commands: what reads the command line, and the function in Python."""
    lines = (COMMANDS[name].where.partition(":")[0] for name in commands)
    functions = (ckptkit._HOMES[name] for name in commands if name in ckptkit._HOMES)
    return ("ckptkit.cli.commands", *dict.fromkeys((*lines, *functions)))
