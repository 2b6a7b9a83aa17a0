"""The command line, each time a process of its own, without the start of an interpreter that imports torch.

It is forked from a process that has imported what the commands need, and has the caller's environment. Tests of that
start, of signals, of terminals and of what is imported start `python -m ckptkit` themselves.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ckptkit.cli import main as ckptkit_main
from ckptkit.cli.commands import COMMANDS
from tests.faults.server import Server
from tests.verbs import FORMAT_MODULES, modules_of

_PATIENCE = 300.0  # seconds
# huggingface_hub itself reads the environment when it is imported: each child imports it, but not what it needs.
_LIBRARIES = ("aiobotocore.httpsession", "filelock", "httpx", "httpx2", "s3fs", "safetensors.torch", "yaml")
_IMPORTED = (
    *modules_of(*(name for name in COMMANDS.own if name not in ("push", "pull"))),  # these import huggingface_hub
    *FORMAT_MODULES,
    *(name for name in _LIBRARIES if find_spec(name.partition(".")[0])),
)


def ckptkit(
    *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ckptkit` with these arguments to its end, here and as it is here unless an environment is given."""
    words = [str(argument) for argument in arguments]
    environment = json.dumps(dict(os.environ if env is None else env))
    ended = _serve().run(f"{__name__}:main", [environment, *words], timeout=_PATIENCE, cwd=cwd or Path.cwd())
    assert ended.code is not None, f"ckptkit {' '.join(words)} does not end"
    out, err = (said.replace("\r\n", "\n").replace("\r", "\n") for said in (ended.out, ended.err))
    return subprocess.CompletedProcess(["ckptkit", *words], ended.code, out, err)


@cache
def _serve() -> Server:
    """The process that is forked; it ends with this one."""
    server = Server(*_IMPORTED, environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}).__enter__()
    atexit.register(server.__exit__, None, None, None)
    return server


def main(environment: str, *words: str) -> None:
    """Be the command line, in an environment."""
    os.environ.clear()
    os.environ.update(json.loads(environment))
    sys.argv = ["ckptkit", *words]
    ckptkit_main()
