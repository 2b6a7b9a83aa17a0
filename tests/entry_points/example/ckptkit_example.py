"""Name what this package adds to ckptkit; the modules are imported when ckptkit needs them."""

from __future__ import annotations

from ckptkit.formats import KnownFormat
from ckptkit.io.stores import KnownStore
from ckptkit.models.names import KnownFamily
from ckptkit.trainers.trainer import Mark, TrainerFacts

FORMAT = KnownFormat("ckptkit_example_format:Example", "one example tensor", r".*\.example")
TRAINER = TrainerFacts(name="example", marks=(Mark("Example Trainer", format="example"),))
FAMILY = KnownFamily("ckptkit_example_family:EXAMPLE", r"example\.#\.w")
STORE = KnownStore("ckptkit_example_store:Folder")
