"""Where output goes."""

from __future__ import annotations

import subprocess
import sys


def test_stdout_can_be_kept_for_data() -> None:
    code = (
        "import os\n"
        "from ckptkit.cli.output import reserve_stdout, say\n"
        "say('before')\n"
        "reserve_stdout()\n"
        "os.write(1, b'noise')\n"
        "say('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\nafter\n", "noise")
