"""A share of the cases of meaning: one thing more than the weights is written, said or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults.meaning import COMMANDS, Outcome, try_thing
from tests.faults.meaning_sources import FORMATS
from tests.faults.meaning_things import THINGS, Piece, thing_of
from tests.tiers import nightly_but

pytestmark = pytest.mark.slow

WRITTEN = (
    ("second-model", "convert-pt", "dcp"),
    ("ema-shadow-list", "convert-dcp", "pt"),
    ("second-optimizer-ids", "convert-pt", "zero2"),
    ("odd-tensors", "convert-pt", "dcp"),
    ("tuples", "convert-dcp", "pt"),
    ("sampler", "reshard", "dcp"),
)
SAID = (
    ("second-model", "consolidate", "pt"),
    ("ema", "consolidate", "zero2"),
    ("ema-averaged-model", "consolidate", "dcp"),
    ("ema-state-dict", "average", "dcp"),
    ("scheduler", "inspect", "pt"),
    ("frozen-tensor", "diff", "dcp"),
    ("one-of-several", "inspect", "pt"),
    ("tracker-differs", "latest", "dcp"),
    ("tracker-differs", "latest-inspect", "hf"),
    ("tracker-of-any-name", "latest-any", "dcp"),
)
REFUSED = (
    ("exclude-unmatched", "consolidate", "dcp"),
    ("dtype-unmatched", "convert-pt", "pt"),
    ("rename-collides", "convert-dcp", "hf"),
    ("max-shard-size-elsewhere", "convert-pt", "dcp"),
    ("adapter-config-unused", "consolidate", "pt"),
    ("optimizer-order-no-optimizer", "convert-dcp", "hf"),
    ("ema-directory", "overwrite", "dcp"),
    ("config-other-vocab", "consolidate", "hf"),
    ("one-of-several", "consolidate", "pt"),
    ("one-of-several", "average", "pt"),
)


def outcome_of(thing: str, command: str, kind: str) -> Outcome:
    (run,) = try_thing(thing_of(thing), [kind], [command])
    return run.outcome


@pytest.mark.parametrize(("thing", "command", "kind"), nightly_but(WRITTEN[:2], WRITTEN))
def test_a_thing_is_written(thing: str, command: str, kind: str) -> None:
    assert outcome_of(thing, command, kind) is Outcome.WRITTEN


@pytest.mark.parametrize(("thing", "command", "kind"), nightly_but(SAID[:2], SAID))
def test_a_thing_is_said(thing: str, command: str, kind: str) -> None:
    assert outcome_of(thing, command, kind) is Outcome.SAID


@pytest.mark.parametrize(("thing", "command", "kind"), nightly_but(REFUSED[:2], REFUSED))
def test_a_thing_is_refused_by_name(thing: str, command: str, kind: str) -> None:
    assert outcome_of(thing, command, kind) is Outcome.REFUSED


def test_silence_is_seen() -> None:
    ema = thing_of("ema")
    (piece,) = ema.pieces
    unheard = replace(ema, pieces=(Piece(("a word that nobody says",), piece.tensors),))
    runs = {run.command: run.outcome for run in try_thing(unheard, ["dcp"], ["consolidate", "convert-pt"])}
    assert runs == {"consolidate": Outcome.SILENT, "convert-pt": Outcome.WRITTEN}


def test_a_refusal_for_another_reason_is_seen() -> None:
    config = thing_of("config-other-vocab")
    unheard = replace(config, pieces=(Piece(("a word that nobody says",)),))
    (run,) = try_thing(unheard, ["hf"], ["consolidate"])
    assert run.outcome is Outcome.UNNAMED


def test_things_are_known_by_name() -> None:
    names = [thing.name for thing in THINGS]
    assert len(set(names)) == len(names)
    assert all(thing.commands <= COMMANDS.keys() and set(thing.formats) <= FORMATS.keys() for thing in THINGS)
