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
from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.build import build
from meshwright.run.nn.initialise import materialise
from meshwright.run.posttrain.data.batches import ChatBatches, Packing, counted
from meshwright.run.posttrain.data.mismatched import mismatched
from meshwright.run.posttrain.data.prepared import Prepared, prepare
from meshwright.run.posttrain.data.records import Record
from meshwright.run.train.data.batch import Batch
from meshwright.spec.model import Attention, Block, Mlp, Model, Rotary
from tests.run.posttrain.data.small_words import chat, words_of

LENGTH = 96
DRAW = random.Random(1)


def records(count: int, longest: int = 20) -> list[Record]:
    words = ("the", "user", "talk", "answer", "and")

    def said() -> str:
        return " ".join(DRAW.choice(words) for _ in range(DRAW.randint(1, longest)))

    return [
        Record(f"here:{number}", chat(*(said() for _ in range(2 * DRAW.randint(1, 2)))))
        for number in range(count)
    ]


def prepared(count: int = 40, **given: Any) -> Prepared:
    return prepare(records(count), words_of(), **{"length": LENGTH, **given})


def documents_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return tokens and labels of each document of a batch."""
    assert batch.documents is not None
    tokens, labels = batch.tokens_BT.flatten().tolist(), batch.labels_BT.flatten().tolist()
    starts = batch.documents.starts.tolist()
    return [(tokens[one:other], labels[one:other]) for one, other in pairwise(starts)]


def test_an_epoch_holds_every_chat_once_and_whole() -> None:
    data = prepared()
    batches = ChatBatches(data, global_batch=1)
    seen = []
    for step in range(batches.sequences):
        batch, members = batches.at(step), batches.members(step)
        assert len(documents_of(batch)) == members.documents[0]
        for number, (tokens, labels) in zip(members.examples[0], documents_of(batch), strict=False):
            example = data.example(number)
            seen.append(number)
            assert tokens == example.tokens.tolist()
            wanted = np.where(example.trained[1:], example.tokens[1:], IGNORED).tolist()
            assert labels == [*wanted, IGNORED]
    assert sorted(seen) == list(range(data.figures.examples))


def test_positions_begin_anew_in_every_chat_and_targets_are_counted() -> None:
    batches = ChatBatches(prepared(), global_batch=4)
    batch = batches.at(0)
    assert batch.documents is not None
    assert batch.positions_BT is not None
    assert torch.equal(batch.positions_BT, batch.documents.positions(4, LENGTH))
    assert batch.targets == int((batch.labels_BT != IGNORED).sum())
    for part in batch.split(1):
        assert part.targets == int((part.labels_BT != IGNORED).sum())


def test_batches_are_a_function_of_step_and_seed_under_any_ranks() -> None:
    data = prepared()
    one = ChatBatches(data, global_batch=4, seed=3)
    again = ChatBatches(data, global_batch=4, seed=3)
    ranks = [ChatBatches(data, global_batch=4, seed=3, rank=rank, world=2) for rank in range(2)]
    for step in (7, 0, 30):
        batch = one.at(step)
        assert torch.equal(batch.labels_BT, again.at(step).labels_BT)
        parts = [rank.at(step).tokens_BT for rank in ranks]
        assert torch.equal(batch.tokens_BT, torch.cat(parts))
    with one.iterate(5, until=7) as loader:
        for step, batch in zip((5, 6), loader, strict=True):
            assert torch.equal(batch.labels_BT, again.at(step).labels_BT)
    other = ChatBatches(data, global_batch=4, seed=4)
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert not torch.equal(one.at(0).tokens_BT, other.at(0).tokens_BT)


def test_packed_chats_have_the_loss_that_they_have_alone() -> None:
    data = prepared(12)
    attention = Attention(heads=2, kv_heads=1, head_dim=8, rotary=Rotary())
    block = Block(name="plain", mixer=attention, mlp=Mlp(width=32))
    model = Model(
        name="m", hidden=16, vocab=400, blocks=(block,), pattern="2*plain", max_positions=LENGTH
    )
    decoder = build(model, dtype=torch.float32)
    materialise(decoder, "cpu", seed=0)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(4)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
        sums = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return float(sums)

    packed = ChatBatches(data, global_batch=1)
    assert packed.sequences < data.units
    together = alone = 0.0
    with torch.no_grad():
        for step in range(packed.sequences):
            batch = packed.at(step)
            logits = decoder(
                batch.tokens_BT, positions=batch.positions_BT, documents=batch.documents
            )
            together += loss(logits, batch.labels_BT)
        for number in range(data.units):
            tokens = torch.tensor(data.example(number).tokens[None].astype(np.int64))
            trained = torch.tensor(data.example(number).trained[1:])
            labels = torch.where(trained, tokens[:, 1:], IGNORED)
            alone += loss(decoder(tokens)[:, :-1], labels)
    assert together == pytest.approx(alone, rel=1e-5)


def test_chats_too_long_are_cut_dropped_split_or_refused() -> None:
    words = words_of()
    long = Record("here:9", chat("hi", " ".join(["the answer"] * 60)))
    given = [*records(3, 4), long]
    cut = prepare(given, words, length=LENGTH)
    assert (cut.figures.cut, cut.units) == (1, 4)
    assert cut.figures.cut_tokens == cut.figures.longest - LENGTH
    drop = prepare(given, words, length=LENGTH, too_long="drop")
    assert (drop.figures.dropped_long, drop.units) == (1, 3)
    with pytest.raises(InputError, match=r"here:9: has .* tokens, a sequence 96"):
        prepare(given, words, length=LENGTH, too_long="refuse")
    split = prepare(given, words, length=LENGTH, too_long="split")
    batches = ChatBatches(split, global_batch=1)
    assert batches.figures.split == 1
    targets = sum(batches.at(step).targets for step in range(batches.sequences))
    assert targets == split.figures.targets
    with pytest.raises(InputError, match="does not fit 96 positions"):
        ChatBatches(split, global_batch=1, packing="none")
    late = Record("here:1", chat(" ".join(["the user"] * 60), "hi"))
    assert prepare([*given, late], words, length=LENGTH).figures.dropped_untrained == 1


def test_figures_are_said_in_words() -> None:
    data = prepared()
    figures = ChatBatches(data, global_batch=2).figures
    assert figures.tokens == figures.filled
    assert figures.trained_share == figures.targets / len(data.tokens)
    assert 0.8 < figures.packed_share <= 1
    first, second, *_ = str(figures).splitlines()
    assert first.startswith(f"40 records, 40 examples, {figures.tokens:,} tokens")
    assert f"{figures.packed_share:.1%} filled" in second


def pairs(count: int) -> list[Record]:
    return [
        Record(
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
    data = prepare(pairs(30), words, length=LENGTH)
    batches = ChatBatches(data, global_batch=4, packing=packing)
    assert (data.kind, data.units, data.figures.examples) == ("pairs", 30, 60)
    seen = set()
    for step in range(-(-batches.sequences // 4)):
        parts = zip(batches.at(step).split(2), batches.members(step).split(2), strict=True)
        for part, members in parts:
            documents = documents_of(part)
            places = members.places.tolist()
            numbers = [number for row in members.examples for number in row]
            assert members.verdicts.tolist() == [True, False] * (len(places) // 2)
            ones = torch.ones(part.labels_BT.shape)
            targets = counted(part).sums(ones)[members.places].int().tolist()
            assert targets == [data.example(number).targets for number in numbers]
            for place, number in zip(places, numbers, strict=True):
                assert documents[place][0] == data.example(number).tokens.tolist()
            for chosen, rejected in zip(numbers[::2], numbers[1::2], strict=True):
                assert rejected == chosen + 1
                seen.add(chosen)
    assert seen == set(range(0, 60, 2))


def test_long_pairs_share_a_sequence() -> None:
    long = {"prompt": "the user", "chosen": " the answer" * 90, "rejected": " talk"}
    data = prepare([Record("here", long)], words_of(), length=LENGTH)
    chosen, rejected = data.example(0), data.example(1)
    assert len(chosen.tokens) + len(rejected.tokens) == LENGTH
    assert rejected.tokens[-1] == 2
    assert data.figures.cut == 1
    with pytest.raises(InputError, match="is a pair"):
        prepare([Record("here", long)], words_of(), length=LENGTH, too_long="split")
    with pytest.raises(InputError, match="is a pair"):
        prepare([Record("here", long)], words_of(), length=LENGTH, train="each")


def test_verdicts_are_told_beside_their_examples() -> None:
    given = [
        Record(f"here:{number}", {"prompt": "a", "completion": f"b{number}", "label": number % 2})
        for number in range(6)
    ]
    batches = ChatBatches(prepare(given, words_of(), length=LENGTH), global_batch=1)
    members = batches.members(0)
    numbers = [number for row in members.examples for number in row]
    assert members.verdicts.tolist() == [bool(number % 2) for number in numbers]


def test_mismatched_answers_belong_to_other_prompts() -> None:
    given = [
        Record(str(number), {"prompt": prompt, "completion": str(number), "label": True})
        for number, prompt in enumerate("aabbc")
    ]
    found = [one.values["completion"] for one in mismatched(given)]
    assert found == ["2", "2", "4", "4", "0"]
    messages = [Record(str(n), {**chat(str(n), f"to {n}"), "label": False}) for n in range(2)]
    (first, second) = mismatched(messages)
    assert first.values == {**chat("0", "to 1"), "label": False}
    assert second.values == {**chat("1", "to 0"), "label": False}
    assert prepare([first, second], words_of(), length=LENGTH).kind == "verdicts"
    with pytest.raises(InputError, match="all 2 records have the same prompt"):
        mismatched(given[:2])
    with pytest.raises(InputError, match="here: has no prompt with one answer"):
        mismatched([Record("here", {"chosen": 1})])


def test_held_out_records_are_those_that_are_not_trained_on() -> None:
    given = records(20)
    words = words_of()
    train = prepare(given, words, length=LENGTH, validation=0.2)
    held = prepare(given, words, length=LENGTH, validation=0.2, split="validation")
    assert held.records == ("here:4", "here:9", "here:14", "here:19")
    assert set(train.records) | set(held.records) == {one.where for one in given}


def test_sets_of_two_kinds_and_empty_ones_are_refused() -> None:
    words = words_of()
    with pytest.raises(InputError, match=r"here:0: is of another kind \(pairs\)"):
        prepare([*records(1), *pairs(1)], words, length=LENGTH)
    with pytest.raises(InputError, match="nothing is left to train of 1 records"):
        prepare([Record("here", chat("only a user"))], words, length=LENGTH)
    with pytest.raises(
        InputError, match=r"longer sequences than 8 .*two answers.* tokens hold all"
    ):
        prepare(pairs(2), words, length=8)
    with pytest.raises(InputError, match="here: messages: the model has no chat template"):
        prepare([Record("here", chat("a", "b"))], words_of(""), length=LENGTH)


def test_a_step_that_holds_more_than_there_is_says_so() -> None:
    told = "every step of 64 sequences holds each of them"
    assert told in str(ChatBatches(prepared(), global_batch=64).figures)
    assert "every step" not in str(ChatBatches(prepared(), global_batch=1).figures)


def test_pairs_of_one_answer_are_counted() -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    found = prepare([*pairs(2), Record("here:2", same)], words_of(), length=LENGTH)
    assert "pairs of twice the same answer, which teach nothing: 1" in str(found.figures)


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    batches = ChatBatches(prepared(), global_batch=1, vocabulary_size=50)
    with pytest.raises(InputError, match="the model knows 50"):
        batches.at(0)
