from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.training.data.batches import IGNORED, Batch, Corpus, epoch_order, indices_of_rank, open_corpus
from ckptkit.training.data.tokenizer import Bytes
from ckptkit.training.data.tokens import prepare_tokens

END = 0

documents = st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=8)
lengths = st.integers(1, 12)


def corpus(size: int, length: int = 8, seed: int = 0) -> Corpus:
    """One document, in which every id follows from the one before."""
    return Corpus(np.arange(size, dtype=np.uint16) + 1, END, length, seed)


def pack(written: list[list[int]], length: int, *, ended: bool = True, seed: int = 0) -> Corpus:
    """Documents as long as those `written`, of ids of which no two are the same."""
    fresh = count(1)
    ids = [token for document in written for token in [*(next(fresh) for _ in document), END]]
    return Corpus(np.array(ids if ended else ids[:-1], dtype=np.uint32), END, length, seed)


def positions_of(batch: Batch) -> torch.Tensor:
    return torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs) if batch.positions is None else batch.positions


@given(documents, lengths, st.booleans())
def test_an_epoch_asks_once_for_every_token_that_follows_another_in_its_document(
    written: list[list[int]], length: int, ended: bool
) -> None:
    text = pack([[], *written, [1, 1]], length, ended=ended)
    batch = text.batch_at(range(text.sequences_per_epoch))
    counted = batch.targets != IGNORED
    asked = list(zip(batch.inputs[counted].tolist(), batch.targets[counted].tolist(), strict=True))
    ids = text.ids.tolist()
    assert sorted(asked) == sorted((a, b) for a, b in pairwise(ids) if a != END)
    assert batch.loss_token_count == len(asked)


@given(documents, lengths, st.booleans())
def test_positions_count_from_the_start_of_a_document_or_of_the_sequence(
    written: list[list[int]], length: int, ended: bool
) -> None:
    text = pack([[], *written, [1, 1]], length, ended=ended)
    ids = text.ids.tolist()
    for place, index in enumerate(epoch_order(text.sequences_per_epoch, text.seed, 0).tolist()):
        batch = text.batch_at(range(place, place + 1))
        real = ids[index * length :][:length]
        expected = [0]
        for before in real[:-1]:
            expected.append(0 if before == END else expected[-1] + 1)
        expected += range(length - len(real))
        assert batch.inputs[0].tolist() == real + [END] * (length - len(real))
        assert positions_of(batch)[0].tolist() == expected
        assert (batch.positions is None) == (0 not in expected[1:])


def test_packing_by_hand() -> None:
    ids = np.array([5, 6, END, 7, END, 8, 9, 8], dtype=np.uint8)
    text = Corpus(ids, END, 5, seed=0)
    batch = text.batch_at(range(text.sequences_per_epoch))
    rows = sorted(range(2), key=lambda row: batch.inputs[row, 0] != 5)
    x = IGNORED
    assert batch.positions is not None
    assert batch.inputs[rows].tolist() == [[5, 6, END, 7, END], [8, 9, 8, END, END]]
    assert batch.targets[rows].tolist() == [[6, END, x, END, x], [9, 8, x, x, x]]
    assert batch.positions[rows].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]


def test_sequences_of_one_document_each_have_plain_positions() -> None:
    whole, two = corpus(17).batch_at(range(2)), pack([[1] * 7, [1] * 8], length=8).batch_at(range(2))
    assert whole.positions is None
    assert two.positions is None, "a document that ends with its sequence is alone in it"
    assert pack([[1] * 6, [1] * 8], length=8).batch_at(range(2)).positions is not None


def test_epochs_visit_the_same_sequences_in_another_order() -> None:
    text = corpus(1000)
    first, second = (
        text.batch_at(range(n * text.sequences_per_epoch, (n + 1) * text.sequences_per_epoch)).inputs.tolist()
        for n in (0, 1)
    )
    assert first != second
    assert sorted(first) == sorted(second)


def test_order_follows_the_seed_and_position_alone() -> None:
    places = range(300, 308)
    batch = corpus(1000, seed=3).batch_at(places)
    assert torch.equal(batch.inputs, corpus(1000, seed=3).batch_at(places).inputs)
    assert not torch.equal(batch.inputs, corpus(1000, seed=4).batch_at(places).inputs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 11])
def test_shares_of_ranks_are_disjoint_and_make_up_the_global_batch(world_size: int) -> None:
    text, places = pack([[1] * n for n in range(40)], length=8), range(100, 108)
    shares = [indices_of_rank(places, rank, world_size) for rank in range(world_size)]
    assert [place for part in shares for place in part] == list(places)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    parts, whole = [text.batch_at(part) for part in shares if part], text.batch_at(places)
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert torch.equal(torch.cat([positions_of(part) for part in parts]), positions_of(whole))


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 9), st.integers(0, 12))
def test_a_run_goes_on_in_the_middle_of_an_epoch_at_another_world_size(
    before: int, after: int, batch_size: int, stopped: int
) -> None:
    text = corpus(300)
    seen: list[int] = []
    for step in range(2 * text.sequences_per_epoch // batch_size):
        places = range(step * batch_size, (step + 1) * batch_size)
        world_size = before if step < stopped else after
        for rank in range(world_size):
            if part := indices_of_rank(places, rank, world_size):
                seen += text.batch_at(part).inputs[:, 0].tolist()
    starts = set(range(1, 300, text.length))
    assert set(seen[: text.sequences_per_epoch]) <= starts
    assert len(set(seen[: text.sequences_per_epoch])) == min(len(seen), text.sequences_per_epoch), (
        "none twice in an epoch"
    )
    assert seen == text.batch_at(range(len(seen))).inputs[:, 0].tolist(), (
        "the order is that of one rank that never stopped"
    )


def test_no_places_give_a_sequence_without_targets() -> None:
    batch = corpus(100).batch_at(range(40, 40))
    assert batch.inputs.shape == batch.targets.shape == (1, 8)
    assert batch.loss_token_count == 0
    assert batch.positions is None


def test_a_batch_moves_with_all_it_has() -> None:
    batch = pack([[1] * 6, [1] * 8], length=8).batch_at(range(2)).to(torch.device("meta"))
    assert batch.positions is not None
    assert batch.inputs.is_meta
    assert batch.targets.is_meta
    assert batch.positions.is_meta


@pytest.mark.gpu
def test_a_batch_comes_through_pinned_memory_whole() -> None:
    batch = pack([[1] * 6, [1] * 8], length=8).batch_at(range(2))
    moved = batch.to(torch.device("cuda"))
    assert batch.positions is not None
    assert moved.positions is not None
    assert torch.equal(moved.inputs.cpu(), batch.inputs)
    assert torch.equal(moved.targets.cpu(), batch.targets)
    assert torch.equal(moved.positions.cpu(), batch.positions)


def test_a_corpus_is_mapped_not_held(tmp_path: Path) -> None:
    tokens = prepare_tokens(None, Bytes(), tmp_path)
    text = open_corpus(tokens, length=64, seed=1)
    assert isinstance(text.ids, np.memmap)
    assert text.sequences_per_epoch * 64 > 2**20
    batch = text.batch_at(range(16))
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous()
    assert bytes(batch.inputs[0].tolist()) in (tmp_path / "tokens.bin").read_bytes()
