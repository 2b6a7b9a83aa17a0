"""What a newcomer sees of the package: its public names."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import ckptkit


def test_dir_lists_the_public_names() -> None:
    assert {"consolidate", "open", "verify", "CkptError"} <= set(dir(ckptkit))
    assert set(dir(ckptkit)) == set(ckptkit.__all__)


def test_help_describes_the_public_names() -> None:
    text = pydoc.plain(pydoc.render_doc(ckptkit))
    assert "Write the model weights of the checkpoint at `src`" in text
    assert not [name for name in ckptkit.__all__ if name not in text and name != "__version__"]


def test_dir_imports_nothing() -> None:
    code = "import sys, ckptkit; dir(ckptkit); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "ckptkit.checks.open"} & set(done.stdout.split())
