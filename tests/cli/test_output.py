"""Where output goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def test_stdout_can_be_kept_for_data() -> None:
    code = (
        "import os\n"
        "from ckptkit.cli.output import reserve_stdout, print_text_line\n"
        "print_text_line('before')\n"
        "reserve_stdout()\n"
        "os.write(1, b'noise')\n"
        "print_text_line('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\nafter\n", "noise")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["inspect m.pt --json", "inspect m.pt", "inspect none.pt --json", "--version"])
@pytest.mark.parametrize(
    ("redirection", "said"),
    [(">/dev/full", "no space left on device"), (">&-", "error: stdout is closed\nhint: redirect it")],
    ids=["full", "closed"],
)
def test_a_result_that_cannot_be_printed_is_an_error(words: str, redirection: str, said: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    command = f"{sys.executable} -m ckptkit {words} {redirection}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    is_missing = "none" in words and redirection == ">/dev/full"
    assert done.returncode == (3 if is_missing else 4)
    assert ("none.pt: no such file" if is_missing else said) in done.stderr
    assert "Traceback" not in done.stderr


def test_without_stderr_a_conversion_goes_on(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    command = f"{sys.executable} -m ckptkit convert m.pt out --to dcp 2>&-"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "out" / ".metadata").is_file()


def progress_of(*told: tuple[int, int], quiet: bool = False) -> list[str]:
    """The lines that go to a log where a command tells of (bytes more, bytes in all)."""
    code = (
        "from ckptkit.cli.output import set_quiet, progress_bar\n"
        f"set_quiet({quiet})\n"
        "with progress_bar('convert') as tell:\n"
        f"    for nbytes, total in {told}:\n"
        "        tell(nbytes, total)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_log_has_a_line_every_ten_percent() -> None:
    each = [(10**6, 2 * 10**9)] * 2000
    lines = progress_of(*each)
    assert lines == [f"convert: {percent}% of 2 GB" for percent in range(10, 101, 10)]
    assert progress_of((7 * 10**8, 10**9), (3 * 10**8, 10**9)) == [
        "convert: 70% of 1 GB",
        "convert: 100% of 1 GB",
    ]
    assert progress_of((10**9, 10**9), (10**9, 2 * 10**9)) == ["convert: 100% of 1 GB", "convert: 50% of 2 GB"]


def test_little_work_and_quiet_work_have_no_lines_in_a_log() -> None:
    assert progress_of((10**6, 10**7), (9 * 10**6, 10**7)) == []
    assert progress_of((10**9, 10**9), quiet=True) == []
