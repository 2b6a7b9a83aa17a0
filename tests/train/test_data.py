from pathlib import Path

import pytest
import torch

from ckptkit.errors import IOFailure, Usage
from ckptkit.train.data import IGNORED, Corpus, read_text, share


def corpus(size: int, length: int = 8, seed: int = 0) -> Corpus:
    return Corpus(torch.arange(size).remainder(251).to(torch.uint8), length, seed)


@pytest.mark.parametrize("size", [2, 8, 9, 10, 16, 17, 18, 1000])
def test_an_epoch_asks_for_every_next_byte_once(size: int) -> None:
    text = corpus(size)
    batch = text.batch(range(text.sequences))
    counted = batch.targets != IGNORED
    assert batch.tokens == size - 1
    assert sorted(batch.targets[counted].tolist()) == sorted(text.text[1:].tolist())
    assert ((batch.inputs[counted] + 1) % 251 == batch.targets[counted]).all()


def test_epochs_visit_the_same_sequences_in_another_order() -> None:
    text = corpus(1000)
    first, second = (text.batch(range(n * text.sequences, (n + 1) * text.sequences)).inputs.tolist() for n in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


def test_order_follows_the_seed_and_position_alone() -> None:
    places = range(300, 308)
    batch = corpus(1000, seed=3).batch(places)
    assert torch.equal(batch.inputs, corpus(1000, seed=3).batch(places).inputs)
    assert not torch.equal(batch.inputs, corpus(1000, seed=4).batch(places).inputs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_shares_of_ranks_are_disjoint_and_make_up_the_global_batch(world_size: int) -> None:
    text, places = corpus(1000), range(40, 48)
    shares = [share(places, rank, world_size) for rank in range(world_size)]
    assert [place for part in shares for place in part] == list(places)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    parts = torch.cat([text.batch(part).inputs for part in shares])
    assert torch.equal(parts, text.batch(places).inputs)


def test_text_is_a_file_or_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"some text")
    assert bytes(read_text(tmp_path / "text").tolist()) == b"some text"
    assert torch.equal(read_text(None), read_text(None))
    assert len(read_text(None)) > 2**20


def test_a_missing_and_an_empty_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IOFailure):
        read_text(tmp_path / "absent")
    (tmp_path / "empty").touch()
    with pytest.raises(Usage):
        read_text(tmp_path / "empty")
