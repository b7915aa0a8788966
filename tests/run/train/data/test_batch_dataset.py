"""Batches: a pure function of the step, whatever splits them; labels, positions and documents."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.train.data import (
    BatchDataset,
    DataConfig,
    DataSource,
    TrainBatch,
    build_dataset,
    open_tokenizer,
    tokenize_files,
)
from meshwright.spec.workload import Packing, TrainingWorkload
from tests.run.train.data.conftest import Write, write_shards

PACKINGS: tuple[Packing, ...] = ("none", "concat", "pack")
END = 0


def numbered(count: int, mean: int, first: int = 1, seed: int = 0) -> list[list[int]]:
    """Documents whose tokens count up within 1 to 900, each ended by 0."""
    lengths = np.random.default_rng(seed).geometric(1 / mean, count)
    return [[1 + (first + n * 37 + k) % 900 for k in range(length)] + [END]
            for n, length in enumerate(lengths.tolist())]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three corpora of different sizes."""
    folder = tmp_path_factory.mktemp("corpora")
    cases = [(300, 20, 1), (100, 45, 3), (40, 5, 1)]
    return [
        str(write_shards(folder / str(n), numbered(count, mean, n, n), files=files))
        for n, (count, mean, files) in enumerate(cases)
    ]


def opened(
    folders: Sequence[str],
    *,
    packing: Packing = "pack",
    length: int = 32,
    batch: int = 8,
    seed: int = 1,
    rank: int = 0,
    world: int = 1,
    weights: Sequence[float] | None = None,
    shuffle: bool = True,
    vocabulary_size: int | None = None,
) -> BatchDataset:
    training = TrainingWorkload(
        tokens=1000, sequence_length=length, global_batch=batch, packing=packing
    )
    sources = tuple(
        DataSource(path=path, weight=None if weights is None else weights[place])
        for place, path in enumerate(folders)
    )
    return build_dataset(
        DataConfig(sources=sources, shuffle=shuffle),
        training, seed=seed, rank=rank, world=world, vocabulary_size=vocabulary_size,
    )  # fmt: skip


def rows(batch: TrainBatch) -> list[tuple[list[int], list[int]]]:
    return list(zip(batch.tokens_BT.tolist(), batch.labels_BT.tolist(), strict=True))


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    step=st.integers(0, 10**6),
    world=st.sampled_from([1, 2, 3, 4, 6, 12]),
    microbatch=st.integers(1, 12),
)
def test_a_step_trains_the_same_sequences_in_order_for_every_split(
    folders: list[str], packing: Packing, step: int, world: int, microbatch: int
) -> None:
    weights = (0.5, 0.3, 0.2)
    whole = rows(opened(folders, packing=packing, batch=12, weights=weights).get_batch(step))
    ranks = [
        opened(folders, packing=packing, batch=12, weights=weights, rank=rank, world=world)
        for rank in range(world)
    ]
    parts = [part for one in ranks for part in one.get_batch(step).split_microbatches(microbatch)]
    assert [row for part in parts for row in rows(part)] == whole


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_reads_every_document_and_the_next_in_another_order(
    folders: list[str], packing: Packing
) -> None:
    batches = opened(folders[:1], packing=packing, length=64, batch=1)
    epochs = [
        [rows(batches.get_batch(step))[0] for step in range(first, first + batches.num_sequences)]
        for first in (0, batches.num_sequences)
    ]
    starts = [sum(row[0].count(END) for row in epoch) for epoch in epochs]
    if packing == "pack":
        assert starts == [300, 300]
    if packing != "concat":  # which lays documents side by side anew
        assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_a_seed_gives_an_order_of_its_own(folders: list[str]) -> None:
    one, same, other = (opened(folders, seed=seed).get_batch(3) for seed in (1, 1, 2))
    assert rows(one) == rows(same)
    assert rows(one) != rows(other)


def test_without_shuffling_documents_come_as_they_lie(shards: Write) -> None:
    documents = numbered(20, 6)
    batches = opened([str(shards(documents))], packing="concat", length=10, batch=4, shuffle=False)
    stream = [token for document in documents for token in document]
    assert batches.get_batch(0).tokens_BT.flatten().tolist() == stream[:40]
    assert batches.get_batch(0).labels_BT.flatten().tolist() == stream[1:41]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_label_is_the_next_token_of_the_same_document(
    folders: list[str], packing: Packing
) -> None:
    batches = opened(folders, packing=packing, batch=24)
    for step in range(10):
        batch = batches.get_batch(step)
        for tokens, labels in rows(batch):
            for place, (label, following) in enumerate(zip(labels, tokens[1:], strict=False)):
                if packing != "concat" and tokens[place] in (END, 999):
                    assert label == IGNORE_INDEX
                else:
                    assert label == following
            # Even the last position knows its label where the document goes on.
            if tokens[-1] not in (END, 999):
                assert labels[-1] in (tokens[-1] % 900 + 1, END)
        assert batch.num_targets == int((batch.labels_BT != IGNORE_INDEX).sum())
        held = (batch.tokens_BT != 999).sum(1).tolist()
        assert [one.num_tokens for one in batch.sequences] == held


def test_packed_documents_restart_their_positions(folders: list[str]) -> None:
    batches = opened(folders, packing="pack", length=48, batch=6)
    assert batches.max_documents > 3
    for step in range(20):
        batch = batches.get_batch(step)
        assert batch.documents is not None
        assert batch.positions_BT is not None
        starts = batch.documents.cu_seqlens
        assert starts.dtype == torch.int32
        bounds = starts.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == 6 * 48
        flat = batch.tokens_BT.flatten().tolist()
        positions = batch.positions_BT.flatten().tolist()
        for first, after in pairwise(bounds):
            assert first < after
            assert positions[first:after] == list(range(after - first))
            inside = flat[first:after]
            padding = inside == [999] * len(inside)
            assert padding or (END not in inside[:-1] and 999 not in inside)
        assert batch.documents.max_length == max(b - a for a, b in pairwise(bounds))
        assert set(range(0, 6 * 48, 48)) <= set(bounds)
        assert batch.positions_BT.equal(batch.documents.positions(6, 48))
        counts = [sum(row * 48 <= one < (row + 1) * 48 for one in bounds[:-1]) for row in range(6)]
        assert [one.documents for one in batch.sequences] == counts
        assert max(counts) <= batches.max_documents


def test_parts_of_a_batch_have_documents_of_their_own(folders: list[str]) -> None:
    batch = opened(folders, packing="pack", batch=7).get_batch(5)
    parts = batch.split_microbatches(3)
    assert [len(part.sequences) for part in parts] == [3, 3, 1]
    for part in parts:
        assert part.documents is not None
        assert part.positions_BT is not None
        count, length = part.tokens_BT.shape
        assert part.documents.cu_seqlens[0] == 0
        assert part.documents.cu_seqlens[-1] == count * length
        assert part.positions_BT.equal(part.documents.positions(count, length))
        assert part.num_targets == int((part.labels_BT != IGNORE_INDEX).sum())


def test_sequences_of_one_span_need_no_positions(folders: list[str]) -> None:
    for packing in ("none", "concat"):
        batch = opened(folders, packing=packing).get_batch(0)
        assert batch.positions_BT is None
        assert batch.documents is None


def test_sources_are_blended_by_weight(shards: Write) -> None:
    paths = [str(shards([[100 * (n + 1)] * 50] * 40, name=str(n))) for n in range(3)]
    batches = opened(paths, packing="concat", length=10, batch=100, weights=(0.6, 0.3, 0.1))
    first = batches.get_batch(0).tokens_BT[:, 0]
    assert [int((first == value).sum()) for value in (100, 200, 300)] == [60, 30, 10]
    assert batches.count_epochs(2) == pytest.approx([120 / 199, 60 / 199, 20 / 199])
    by_size = opened(paths, packing="concat", length=10, batch=100)
    assert by_size.blend.quotas.tolist() == [1, 1, 1]


def test_corpora_of_narrow_and_wide_ids_are_blended(shards: Write) -> None:
    narrow = str(shards([[5, 6, 7]] * 9, name="narrow"))
    wide = str(shards([[70_000, 70_001]] * 9, name="wide", dtype="int32"))
    tokens = opened([narrow, wide], packing="none", length=3, batch=18).get_batch(0).tokens_BT
    assert set(tokens.flatten().tolist()) == {5, 6, 7, 70_000, 70_001, 999}


def test_an_id_that_the_model_does_not_know_is_refused(shards: Write) -> None:
    path = str(shards([[5, 6, 7000]] * 9))
    with pytest.raises(InputError, match=r"corpus: holds token 7000, the model knows 1,000"):
        opened([path], packing="none", vocabulary_size=1000).get_batch(0)


def test_a_model_with_too_few_ids_is_refused_at_once(folders: list[str]) -> None:
    with pytest.raises(InputError, match="has 1,000 tokens, the model knows 500"):
        opened(folders, vocabulary_size=500)


def test_corpora_of_other_tokenizers_are_not_blended(shards: Write) -> None:
    one, two = (shards([[1, 2, 3]] * 5, name=name) for name in ("one", "two"))
    index = (two / "index.json").read_text()
    (two / "index.json").write_text(index.replace('"digest": "d"', '"digest": "e"'))
    with pytest.raises(InputError, match="another tokenizer"):
        opened([str(one), str(two)])


@pytest.mark.parametrize(("world", "rank"), [(3, 0), (2, 2), (2, -1)])
def test_ranks_that_do_not_fit_are_refused(folders: list[str], world: int, rank: int) -> None:
    with pytest.raises(InputError):
        opened(folders, batch=8, world=world, rank=rank)


def test_held_out_text_is_the_same_for_every_seed(folders: list[str]) -> None:
    training = TrainingWorkload(tokens=1000, sequence_length=32, global_batch=4)
    chosen = DataConfig(sources=(folders[0],), validation_fraction=0.1)
    one, other = (build_dataset(chosen, training, seed=seed, split="validation") for seed in (1, 2))
    assert rows(one.get_batch(0)) == rows(other.get_batch(0))
    with pytest.raises(InputError, match="no validation data"):
        build_dataset(DataConfig(sources=(folders[0],)), training, split="validation")


def test_held_out_corpora_may_be_named(folders: list[str]) -> None:
    training = TrainingWorkload(tokens=1000, sequence_length=32, global_batch=4)
    chosen = DataConfig(sources=(folders[0],), validation_sources=(folders[2],))
    held = build_dataset(chosen, training, split="validation")
    assert [stream.corpus.name for stream in held.streams] == [folders[2]]
    assert build_dataset(chosen, training).streams[0].corpus.name == folders[0]


def test_bytes_per_token_are_known_where_the_corpora_tell(
    folders: list[str], tmp_path: Path
) -> None:
    assert opened(folders).bytes_per_token is None
    (tmp_path / "text.txt").write_text("ä" * 99)
    tokenize_files([str(tmp_path / "text.txt")], tmp_path / "out", open_tokenizer("bytes"))
    found = opened([str(tmp_path / "out")]).bytes_per_token
    assert found == pytest.approx(198 / 199)


def test_the_fingerprint_changes_with_what_is_read(folders: list[str]) -> None:
    first = opened(folders).fingerprint
    assert first == opened(folders, rank=1, world=2).fingerprint
    others = {
        opened(folders[:2]).fingerprint,
        opened(folders, seed=9).fingerprint,
        opened(folders, length=16).fingerprint,
        opened(folders, packing="concat").fingerprint,
        opened(folders, weights=(1, 1, 2)).fingerprint,
    }
    assert len(others | {first}) == 6


def test_text_is_tokenized_into_the_cache_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words to learn " * 50)
    training = TrainingWorkload(tokens=1000, sequence_length=32, global_batch=2, packing="concat")
    chosen = DataConfig(
        sources=(str(tmp_path / "text.txt"),), tokenizer="bytes", cache_dir=str(tmp_path / "cache")
    )
    first = build_dataset(chosen, training)
    assert bytes(first.get_batch(0).tokens_BT[0].tolist()).decode() in "some words to learn " * 50
    (made,) = (tmp_path / "cache").glob("tokens-*")
    before = (made / "index.json").stat().st_mtime_ns
    build_dataset(chosen, training)
    assert (made / "index.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("given", "hint"),
    [({}, "set data.cache_dir"), ({"cache_dir": "cache"}, "set data.tokenizer to bytes")],
)
def test_text_without_a_cache_or_tokenizer_says_what_is_missing(
    tmp_path: Path, given: dict[str, str], hint: str
) -> None:
    (tmp_path / "text.txt").write_text("words")
    training = TrainingWorkload(tokens=1000, sequence_length=32, global_batch=2)
    with pytest.raises(InputError, match=hint):
        build_dataset(DataConfig(sources=(str(tmp_path / "text.txt"),), **given), training)  # type: ignore[arg-type]
