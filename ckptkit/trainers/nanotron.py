"""Know the runs of nanotron: directories that are called by their step alone, and `latest.txt` with that step.

Source: nanotron/serialize/main.py.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Trainer

NANOTRON = Trainer(name="nanotron", trackers=("latest.txt",))
