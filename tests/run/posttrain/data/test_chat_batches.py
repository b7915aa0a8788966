"""Chats are packed whole and kept apart, and every batch is a function of its step."""

import random
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="makes tensors")
pytest.importorskip("jinja2", reason="renders templates")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import numpy as np
import torch
from torch.nn import functional

from meshwright.errors import InputError
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.data.chat_batches import ChatBatches, Packing, mask_batch_tokens
from meshwright.run.posttrain.data.mismatched_pairs import mismatch_completions
from meshwright.run.posttrain.data.prepared_dataset import PreparedDataset, prepare_dataset
from meshwright.run.posttrain.data.records import DataRecord
from meshwright.run.train.data.batch import TrainBatch
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary
from tests.run.posttrain.data.small_words import chat, words_of

LENGTH = 96
DRAW = random.Random(1)


def records(count: int, longest: int = 20) -> list[DataRecord]:
    words = ("the", "user", "talk", "answer", "and")

    def said() -> str:
        return " ".join(DRAW.choice(words) for _ in range(DRAW.randint(1, longest)))

    return [
        DataRecord(f"here:{number}", chat(*(said() for _ in range(2 * DRAW.randint(1, 2)))))
        for number in range(count)
    ]


def prepared(count: int = 40, **given: Any) -> PreparedDataset:
    return prepare_dataset(records(count), words_of(), **{"length": LENGTH, **given})


def documents_of(batch: TrainBatch) -> list[tuple[list[int], list[int]]]:
    """Return tokens and labels of each document of a batch."""
    assert batch.documents is not None
    tokens, labels = batch.tokens_BT.flatten().tolist(), batch.labels_BT.flatten().tolist()
    starts = batch.documents.cu_seqlens.tolist()
    return [(tokens[one:other], labels[one:other]) for one, other in pairwise(starts)]


def test_an_epoch_holds_every_chat_once_and_whole() -> None:
    data = prepared()
    batches = ChatBatches(data, global_batch=1)
    seen = []
    for step in range(batches.num_sequences):
        batch, members = batches.get_batch(step), batches.examples_of(step)
        assert len(documents_of(batch)) == members.document_counts[0]
        for number, (tokens, labels) in zip(
            members.example_ids[0], documents_of(batch), strict=False
        ):
            example = data.get_example(number)
            seen.append(number)
            assert tokens == example.token_ids.tolist()
            wanted = np.where(example.loss_mask[1:], example.token_ids[1:], IGNORE_INDEX).tolist()
            assert labels == [*wanted, IGNORE_INDEX]
    assert sorted(seen) == list(range(data.stats.examples))


def test_positions_begin_anew_in_every_chat_and_targets_are_counted() -> None:
    batches = ChatBatches(prepared(), global_batch=4)
    batch = batches.get_batch(0)
    assert batch.documents is not None
    assert batch.positions_BT is not None
    assert torch.equal(batch.positions_BT, batch.documents.positions(4, LENGTH))
    assert batch.num_targets == int((batch.labels_BT != IGNORE_INDEX).sum())
    for part in batch.split_microbatches(1):
        assert part.num_targets == int((part.labels_BT != IGNORE_INDEX).sum())


def test_batches_are_a_function_of_step_and_seed_under_any_ranks() -> None:
    data = prepared()
    one = ChatBatches(data, global_batch=4, seed=3)
    again = ChatBatches(data, global_batch=4, seed=3)
    ranks = [ChatBatches(data, global_batch=4, seed=3, rank=rank, world=2) for rank in range(2)]
    for step in (7, 0, 30):
        batch = one.get_batch(step)
        assert torch.equal(batch.labels_BT, again.get_batch(step).labels_BT)
        parts = [rank.get_batch(step).tokens_BT for rank in ranks]
        assert torch.equal(batch.tokens_BT, torch.cat(parts))
    with one.iterate(5, until=7) as loader:
        for step, batch in zip((5, 6), loader, strict=True):
            assert torch.equal(batch.labels_BT, again.get_batch(step).labels_BT)
    other = ChatBatches(data, global_batch=4, seed=4)
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert not torch.equal(one.get_batch(0).tokens_BT, other.get_batch(0).tokens_BT)


def test_packed_chats_have_the_loss_that_they_have_alone() -> None:
    data = prepared(12)
    attention = AttentionSpec(heads=2, kv_heads=1, head_dim=8, rotary=Rotary())
    block = BlockSpec(name="plain", mixer=attention, mlp=MLPSpec(width=32))
    model = Model(
        name="m", hidden=16, vocab=400, blocks=(block,), pattern="2*plain", max_positions=LENGTH
    )
    decoder = build_decoder(model, dtype=torch.float32)
    materialize(decoder, "cpu", seed=0)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(4)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
        sums = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return float(sums)

    packed = ChatBatches(data, global_batch=1)
    assert packed.num_sequences < data.num_units
    together = alone = 0.0
    with torch.no_grad():
        for step in range(packed.num_sequences):
            batch = packed.get_batch(step)
            logits = decoder(
                batch.tokens_BT, positions=batch.positions_BT, documents=batch.documents
            )
            together += loss(logits, batch.labels_BT)
        for number in range(data.num_units):
            tokens = torch.tensor(data.get_example(number).token_ids[None].astype(np.int64))
            trained = torch.tensor(data.get_example(number).loss_mask[1:])
            labels = torch.where(trained, tokens[:, 1:], IGNORE_INDEX)
            alone += loss(decoder(tokens)[:, :-1], labels)
    assert together == pytest.approx(alone, rel=1e-5)


def test_chats_too_long_are_cut_dropped_split_or_refused() -> None:
    words = words_of()
    long = DataRecord("here:9", chat("hi", " ".join(["the answer"] * 60)))
    given = [*records(3, 4), long]
    cut = prepare_dataset(given, words, length=LENGTH)
    assert (cut.stats.truncated, cut.num_units) == (1, 4)
    assert cut.stats.truncated_tokens == cut.stats.max_example_tokens - LENGTH
    drop = prepare_dataset(given, words, length=LENGTH, length_policy="drop")
    assert (drop.stats.dropped_long, drop.num_units) == (1, 3)
    with pytest.raises(InputError, match=r"here:9: has .* tokens, a sequence 96"):
        prepare_dataset(given, words, length=LENGTH, length_policy="error")
    split = prepare_dataset(given, words, length=LENGTH, length_policy="split")
    batches = ChatBatches(split, global_batch=1)
    assert batches.stats.split_examples == 1
    targets = sum(batches.get_batch(step).num_targets for step in range(batches.num_sequences))
    assert targets == split.stats.targets
    with pytest.raises(InputError, match="does not fit 96 positions"):
        ChatBatches(split, global_batch=1, packing="none")
    late = DataRecord("here:1", chat(" ".join(["the user"] * 60), "hi"))
    assert prepare_dataset([*given, late], words, length=LENGTH).stats.dropped_without_targets == 1


def test_figures_are_said_in_words() -> None:
    data = prepared()
    figures = ChatBatches(data, global_batch=2).stats
    assert figures.tokens == figures.filled_tokens
    assert figures.trained_fraction == figures.targets / len(data.tokens)
    assert 0.8 < figures.packed_fraction <= 1
    first, second, *_ = str(figures).splitlines()
    assert first.startswith(f"40 records, 40 examples, {figures.tokens:,} tokens")
    assert f"{figures.packed_fraction:.1%} filled" in second


def pairs(count: int) -> list[DataRecord]:
    return [
        DataRecord(
            f"here:{number}",
            {
                "prompt": [{"role": "user", "content": f"the user {number}"}],
                "chosen": "the answer" * (1 + number % 3),
                "rejected": "talk" * (1 + number % 5),
            },
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("packing", ["pack", "none"])
def test_pairs_stay_together_and_are_found_in_every_microbatch(packing: Packing) -> None:
    words = words_of()
    data = prepare_dataset(pairs(30), words, length=LENGTH)
    batches = ChatBatches(data, global_batch=4, packing=packing)
    assert (data.kind, data.num_units, data.stats.examples) == ("pairs", 30, 60)
    seen = set()
    for step in range(-(-batches.num_sequences // 4)):
        parts = zip(
            batches.get_batch(step).split_microbatches(2),
            batches.examples_of(step).split(2),
            strict=True,
        )
        for part, members in parts:
            documents = documents_of(part)
            places = members.example_documents.tolist()
            numbers = [number for row in members.example_ids for number in row]
            assert members.labels.tolist() == [True, False] * (len(places) // 2)
            ones = torch.ones(part.labels_BT.shape)
            targets = (
                mask_batch_tokens(part)
                .sum_per_sequence(ones)[members.example_documents]
                .int()
                .tolist()
            )
            assert targets == [data.get_example(number).num_targets for number in numbers]
            for place, number in zip(places, numbers, strict=True):
                assert documents[place][0] == data.get_example(number).token_ids.tolist()
            for chosen, rejected in zip(numbers[::2], numbers[1::2], strict=True):
                assert rejected == chosen + 1
                seen.add(chosen)
    assert seen == set(range(0, 60, 2))


def test_long_pairs_share_a_sequence() -> None:
    long = {"prompt": "the user", "chosen": " the answer" * 90, "rejected": " talk"}
    data = prepare_dataset([DataRecord("here", long)], words_of(), length=LENGTH)
    chosen, rejected = data.get_example(0), data.get_example(1)
    assert len(chosen.token_ids) + len(rejected.token_ids) == LENGTH
    assert rejected.token_ids[-1] == 2
    assert data.stats.truncated == 1
    with pytest.raises(InputError, match="is a pair"):
        prepare_dataset(
            [DataRecord("here", long)], words_of(), length=LENGTH, length_policy="split"
        )
    with pytest.raises(InputError, match="is a pair"):
        prepare_dataset([DataRecord("here", long)], words_of(), length=LENGTH, train_on="each")


def test_verdicts_are_told_beside_their_examples() -> None:
    given = [
        DataRecord(
            f"here:{number}", {"prompt": "a", "completion": f"b{number}", "label": number % 2}
        )
        for number in range(6)
    ]
    batches = ChatBatches(prepare_dataset(given, words_of(), length=LENGTH), global_batch=1)
    members = batches.examples_of(0)
    numbers = [number for row in members.example_ids for number in row]
    assert members.labels.tolist() == [bool(number % 2) for number in numbers]


def test_mismatched_answers_belong_to_other_prompts() -> None:
    given = [
        DataRecord(str(number), {"prompt": prompt, "completion": str(number), "label": True})
        for number, prompt in enumerate("aabbc")
    ]
    found = [one.values["completion"] for one in mismatch_completions(given)]
    assert found == ["2", "2", "4", "4", "0"]
    messages = [DataRecord(str(n), {**chat(str(n), f"to {n}"), "label": False}) for n in range(2)]
    (first, second) = mismatch_completions(messages)
    assert first.values == {**chat("0", "to 1"), "label": False}
    assert second.values == {**chat("1", "to 0"), "label": False}
    assert prepare_dataset([first, second], words_of(), length=LENGTH).kind == "verdicts"
    with pytest.raises(InputError, match="all 2 records have the same prompt"):
        mismatch_completions(given[:2])
    with pytest.raises(InputError, match="here: has no prompt with one answer"):
        mismatch_completions([DataRecord("here", {"chosen": 1})])


def test_held_out_records_are_those_that_are_not_trained_on() -> None:
    given = records(20)
    words = words_of()
    train = prepare_dataset(given, words, length=LENGTH, validation=0.2)
    held = prepare_dataset(given, words, length=LENGTH, validation=0.2, split="validation")
    assert held.sources == ("here:4", "here:9", "here:14", "here:19")
    assert set(train.sources) | set(held.sources) == {one.source for one in given}


def test_sets_of_two_kinds_and_empty_ones_are_refused() -> None:
    words = words_of()
    with pytest.raises(InputError, match=r"here:0: is of another kind \(pairs\)"):
        prepare_dataset([*records(1), *pairs(1)], words, length=LENGTH)
    with pytest.raises(InputError, match="nothing is left to train of 1 records"):
        prepare_dataset([DataRecord("here", chat("only a user"))], words, length=LENGTH)
    with pytest.raises(
        InputError, match=r"longer sequences than 8 .*two answers.* tokens hold all"
    ):
        prepare_dataset(pairs(2), words, length=8)
    with pytest.raises(InputError, match="here: messages: the model has no chat template"):
        prepare_dataset([DataRecord("here", chat("a", "b"))], words_of(""), length=LENGTH)


def test_a_step_that_holds_more_than_there_is_says_so() -> None:
    told = "every step of 64 sequences holds each of them"
    assert told in str(ChatBatches(prepared(), global_batch=64).stats)
    assert "every step" not in str(ChatBatches(prepared(), global_batch=1).stats)


def test_pairs_of_one_answer_are_counted() -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    found = prepare_dataset([*pairs(2), DataRecord("here:2", same)], words_of(), length=LENGTH)
    assert "pairs of twice the same answer, which teach nothing: 1" in str(found.stats)


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    batches = ChatBatches(prepared(), global_batch=1, vocabulary_size=50)
    with pytest.raises(InputError, match="the model knows 50"):
        batches.get_batch(0)
