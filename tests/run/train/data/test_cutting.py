"""Documents cut into sequences, held against the obvious way to do it."""

from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import DamagedFile, InputError
from meshwright.run.train.data import Corpus
from meshwright.run.train.data.document_split import select_split
from meshwright.run.train.data.packing.best_fit_packing import BestFitPacking, plan_in_memory
from meshwright.run.train.data.packing.concat_packing import ConcatPacking
from meshwright.run.train.data.packing.packing_cache import open_packing
from meshwright.run.train.data.packing.sequence_packing import (
    NoPacking,
    SequencePacking,
    TokenSpans,
)
from meshwright.run.train.data.permutation import make_permutation_key, permute_indices
from tests.run.train.data.conftest import Open

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(lambda one: sum(one) > 0)


def memory(lengths: list[int]) -> Corpus:
    """A corpus whose tokens count up, so that a token tells its own place."""
    starts = np.cumsum([0, *lengths])
    return Corpus(
        name="memory",
        format="shards",
        num_documents=len(lengths),
        num_tokens=int(starts[-1]),
        dtype=np.dtype(np.int32),
        token_arrays=(np.arange(starts[-1], dtype=np.int32),),
        array_offsets=np.zeros(1, np.int64),
        lookup_documents=lambda documents: (
            starts[documents],
            np.array(lengths, np.int64)[documents],
        ),
        fingerprint=str(lengths),
    )


def rows(cutting: SequencePacking, epoch: int = 0) -> list[list[tuple[int, int]]]:
    """Return the pieces of all sequences of an epoch, row by row."""
    found = cutting.get_spans(epoch, np.arange(cutting.sequences))
    assert (np.diff(found.row) >= 0).all()
    out: list[list[tuple[int, int]]] = [[] for _ in range(cutting.sequences)]
    for row, start, length in zip(*map(np.ndarray.tolist, found), strict=True):
        assert length > 0
        out[row].append((start, length))
    return out


def tokens(row: list[tuple[int, int]]) -> list[int]:
    return list(chain.from_iterable(range(start, start + length) for start, length in row))


@given(LENGTHS, st.integers(1, 20), st.booleans(), st.integers(0, 3))
def test_concat_cuts_the_row_of_shuffled_documents(
    lengths: list[int], length: int, shuffle: bool, epoch: int
) -> None:
    selection = select_split(memory(lengths))
    if selection.num_tokens <= length:
        with pytest.raises(InputError, match="too few"):
            ConcatPacking(selection, length, key=(7,), shuffle=shuffle)
        return
    order = np.arange(len(lengths))
    if shuffle:
        order = permute_indices(order, len(lengths), make_permutation_key(7, "documents", epoch))
    starts = np.cumsum([0, *lengths])
    stream = [token for one in order for token in range(starts[one], starts[one + 1])]
    cutting = ConcatPacking(selection, length, key=(7,), shuffle=shuffle)
    assert cutting.sequences == (len(stream) - 1) // length
    for number, row in enumerate(rows(cutting, epoch)):
        assert tokens(row) == stream[number * length : (number + 1) * length + 1]


def test_concat_reads_any_sequences_in_any_order() -> None:
    draw = np.random.default_rng(1)
    cutting = ConcatPacking(
        select_split(memory(draw.integers(0, 30, 500).tolist())), 16, key=(1,), shuffle=True
    )
    whole = rows(cutting)
    numbers = draw.permutation(cutting.sequences)[:40]
    some = cutting.get_spans(0, numbers)
    for place, number in enumerate(numbers):
        mine = some.row == place
        pairs = list(zip(some.start[mine].tolist(), some.length[mine].tolist(), strict=True))
        assert pairs == whole[number]


def test_concat_mixes_documents_anew_in_each_epoch() -> None:
    cutting = ConcatPacking(select_split(memory([5] * 200)), 10, key=(1,), shuffle=True)
    epochs = [rows(cutting, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert rows(cutting, 0) == epochs[0]


def test_concat_refuses_an_index_that_misses_tokens() -> None:
    corpus = memory([5, 5, 5])
    short = select_split(Corpus(**{**vars(corpus), "num_tokens": 40}))
    with pytest.raises(DamagedFile, match="15 of 40 tokens"):
        ConcatPacking(short, 4, key=(1,), shuffle=True).get_spans(0, np.arange(1))


@given(LENGTHS, st.integers(1, 20))
def test_pack_holds_every_document_once_and_whole(lengths: list[int], length: int) -> None:
    selection = select_split(memory(lengths))
    plan = plan_in_memory(selection, length)
    found = rows(BestFitPacking(selection, length, plan, 99))
    starts = np.cumsum([0, *lengths]).tolist()
    ends = dict(pairwise(starts))
    seen: list[int] = []
    for row in found:
        for start, count in row:
            # A piece that goes on past its sequence knows the next token, for its last label.
            goes_on = count == length + 1
            seen += range(start, start + count - goes_on)
            if goes_on:
                assert len(row) == 1
            elif count < length:
                assert start + count in ends.values()
        assert sum(count for _, count in row) <= length + 1
    assert sorted(seen) == list(range(starts[-1]))
    # Documents that fit are not cut.
    for start, end in ends.items():
        if 0 < end - start <= length:
            assert sum((start, end - start) in row for row in found) == 1


def test_pack_leaves_less_than_a_thousandth_empty() -> None:
    lengths = (np.random.default_rng(0).lognormal(5, 1, 5000).astype(int) + 1).tolist()
    selection = select_split(memory(lengths))
    plan = plan_in_memory(selection, 1024)
    assert sum(lengths) / (1024 * (len(plan.sequence_offsets) - 1)) > 0.998


def same(one: TokenSpans, other: TokenSpans) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_plan_on_disk_reads_as_the_one_in_memory(corpus: Open, tmp_path: Path) -> None:
    selection = select_split(corpus([list(range(1, 2 + n % 9)) for n in range(100)]))
    kept = open_packing(selection, 16, tmp_path / "plans")
    again = open_packing(selection, 16, tmp_path / "plans")
    memory_only = open_packing(selection, 16, None)
    numbers = np.arange(kept.sequences)
    assert kept.max_documents == memory_only.max_documents
    for other in (again, memory_only):
        assert same(kept.get_spans(0, numbers), other.get_spans(0, numbers))
    (folder,) = [one for one in (tmp_path / "plans").iterdir() if one.is_dir()]
    before = (folder / "firsts").stat().st_mtime_ns
    open_packing(selection, 16, tmp_path / "plans")
    assert (folder / "firsts").stat().st_mtime_ns == before


def test_a_damaged_plan_is_made_again(corpus: Open, tmp_path: Path) -> None:
    selection = select_split(corpus([[1, 2, 3]] * 20))
    whole = open_packing(selection, 8, tmp_path)
    numbers = np.arange(whole.sequences)
    expected = whole.get_spans(0, numbers)
    (folder,) = [one for one in tmp_path.glob("pack-*") if one.is_dir()]
    (folder / "places").write_bytes(b"12")
    assert same(open_packing(selection, 8, tmp_path).get_spans(0, numbers), expected)
    (folder / "plan.json").write_bytes(b"{")
    assert same(open_packing(selection, 8, tmp_path).get_spans(0, numbers), expected)


def test_where_nothing_can_be_written_the_plan_stays_in_memory(
    corpus: Open, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert (
        open_packing(select_split(corpus([[1, 2, 3]] * 20)), 8, tmp_path / "file").sequences == 10
    )


@given(LENGTHS, st.integers(1, 20))
def test_single_gives_each_document_a_sequence(lengths: list[int], length: int) -> None:
    found = rows(NoPacking(select_split(memory(lengths)), length))
    starts = np.cumsum([0, *lengths]).tolist()
    for row, start, count in zip(found, starts[:-1], lengths, strict=True):
        assert row == ([(start, min(count, length + 1))] if count else [])


@given(st.integers(2, 300), st.floats(0.01, 0.5))
def test_held_out_documents_are_the_rest_of_those_to_train_on(count: int, share: float) -> None:
    corpus = memory(list(range(1, count + 1)))
    if count < max(2, round(1 / share)):
        with pytest.raises(InputError, match="is none"):
            select_split(corpus, "validation", share)
        return
    split = {name: select_split(corpus, name, share) for name in ("train", "validation")}
    starts = {
        name: set(one.get_document_spans(np.arange(one.num_documents))[0].tolist())
        for name, one in split.items()
    }
    assert not starts["train"] & starts["validation"]
    assert starts["train"] | starts["validation"] == set(
        corpus.lookup_documents(np.arange(count))[0].tolist()
    )
    assert sum(one.num_tokens for one in split.values()) == corpus.num_tokens


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(InputError, match="holds no tokens"):
        select_split(memory([0, 0]))
