"""The mutation score of the proof: of generated faults in the right script, at least 95 % are caught.

A mutation deletes one line of what the script saves or loads, or changes one state right after it was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.resume_proof.faults import NUMPY
from tests.plugins.resume_proof.test_judges import prove

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

_LAST_LOAD = '        rng.bit_generator.state = state["rng"]\n'
_CHANGES = (
    "weights = {name: weight * 0.9 for name, weight in weights.items()}",
    "weights = {name: weight.T.copy() for name, weight in weights.items()}",
    "weights = dict(zip(weights, reversed(weights.values())))",
    "weights['layers.0.weight'] = weights['layers.0.weight'] * 0",
    "weights['layers.1.weight'][0, 0] += 1e-6",
    "moments = {name: moment * 0 for name, moment in moments.items()}",
    "moments = {name: moment * 1.01 for name, moment in moments.items()}",
    "moments = dict(zip(moments, reversed(moments.values())))",
    "moments['layers.0.weight.exp_avg'] = moments['layers.1.weight.exp_avg']",
    "moments['layers.0.weight.exp_avg_sq'] = moments['layers.1.weight.exp_avg_sq']",
    "ema = {name: weight.copy() for name, weight in weights.items()}",
    "ema['layers.0.weight'] = ema['layers.0.weight'] * 0",
    "group['lr'] = LR",
    "group['lr'] *= 0.5",
    "group['betas'] = [0.9, 0.99]",
    "group['betas'] = [0.0, 0.999]",
    "taken = 0",
    "taken += 1",
    "taken -= 1",
    "step += 1",
    "step -= 1",
    "scheduler['last_epoch'] = 0",
    "scheduler['last_epoch'] += 1",
    "scheduler['base_lrs'] = [LR / 2]",
    "position = {'epoch': 0, 'batch': 0}",
    "position['batch'] = 0",
    "position['batch'] += 1",
    "position['epoch'] = 0",
    "position['epoch'] += 1",
    "rng = np.random.default_rng(1)",
    "rng.random()",
)


def mutations() -> Iterator[tuple[str, str]]:
    """Yield each mutation by name, and the script with it."""
    text = NUMPY.read_text()
    for change in _CHANGES:
        yield f"after loading: {change}", text.replace(_LAST_LOAD, f"{_LAST_LOAD}        {change}\n")
    loads = text[text.index("    if saved:") : text.index("    while step < steps:")]
    for line in re.findall(r"^ {8}\w.*\n", loads, re.MULTILINE):
        yield f"deleted: {line.strip()}", text.replace(line, "")
    saves = text[text.index("            state = {") : text.index("            hidden_place =")]
    for line in re.findall(r'^ {16}".*\n', saves, re.MULTILINE):
        yield f"deleted: {line.strip()}", text.replace(line, "")
    for line in re.findall(r"^ {12}save_file.*\n", text, re.MULTILINE):
        yield f"deleted: {line.strip()}", text.replace(line, "")


def test_generated_faults_are_caught(tmp_path: Path) -> None:
    missed = []
    for i, (name, text) in enumerate(mutations()):
        room = tmp_path / str(i)
        room.mkdir()
        (room / "train.py").write_text(text)
        if not any(check.ok is False for check in prove(room, room / "train.py")):
            missed.append(name)
    assert i >= 40
    assert len(missed) <= 0.05 * (i + 1), missed
