"""Prompts of files become tokens with what is right, and nothing held out is trained on."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("tokenizers", reason="reads a tokenizer")

from meshwright.errors import InputError
from meshwright.run.posttrain.data.encoding import encode_chat
from meshwright.run.posttrain.data.record_format import ChatExample
from meshwright.run.posttrain.evaluation.questions import (
    ExactMatchQuestion,
    MultipleChoiceQuestion,
    read_questions,
)
from meshwright.run.posttrain.prompt_task.prompt_files import (
    OpenQuestion,
    PromptSplits,
    read_prompt_splits,
)
from meshwright.run.posttrain.prompt_task.reward_config import (
    FieldMapping,
    FormatReward,
    ModelReward,
)
from meshwright.run.posttrain.rl.config.rl_config import TaskConfig
from tests.run.posttrain.data.small_words import FORGETFUL, MARKED, words_of
from tests.run.posttrain.prompt_task.small import questions, task
from tests.run.posttrain.supervised.tiny import write

WORDS = words_of()
ANY = (FormatReward(pattern=".*"),)


def read(folder: Path, records: list[dict[str, Any]], room: int = 60, **given: Any) -> PromptSplits:
    path = str(write(folder / "records.jsonl", records))
    return read_prompt_splits(task(path, **given), WORDS, room=room)


def text(asked: Any) -> str:
    return WORDS.decode(asked.token_ids, skip_special=False)


def test_a_chat_is_asked_by_the_models_template(tmp_path: Path) -> None:
    first = read(tmp_path, questions()).train[0]
    assert text(first) == "<|im_start|>user\nb 0<|im_end|>\n<|im_start|>assistant\n"
    assert first.question == ExactMatchQuestion(
        prompt=[{"role": "user", "content": "b 0"}], answers=["0"],
        where=f"{tmp_path}/records.jsonl:1",
    )  # fmt: skip


def test_texts_are_continued_or_asked_as_chats_behind_a_system_prompt(tmp_path: Path) -> None:
    records = [{"prompt": "the user", "answer": "4"}] * 2
    plain = read(tmp_path, records, validation=0.0)
    assert text(plain.train[0]) == "the user"
    assert "2 prompts are texts, which are continued without" in plain.notes[0]
    asked = read(tmp_path, records, validation=0.0, chat=True, system="talk")
    assert text(asked.train[0]) == (
        "<|im_start|>system\ntalk<|im_end|>\n"
        "<|im_start|>user\nthe user<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not asked.notes
    with pytest.raises(InputError, match=r"records.jsonl:1: .*no system's message .*task.chat"):
        read(tmp_path, records, system="talk")


def test_a_system_message_of_a_record_stays(tmp_path: Path) -> None:
    own = {"role": "system", "content": "and"}
    records = [{"prompt": [own, *each["prompt"]], "answer": "1"} for each in questions(2)]
    asked = read(tmp_path, records, validation=0.0, system="talk").train[0]
    assert text(asked).startswith("<|im_start|>system\nand<|im_end|>\n<|im_start|>user")


def test_records_may_call_their_fields_otherwise(tmp_path: Path) -> None:
    records = [{"question": "the", "about": {"truth": 7}, "answers": ["no"]}] * 2
    fields = FieldMapping(prompt="question", answer="about.truth")
    asked = read(tmp_path, records, validation=0.0, fields=fields).train[0]
    assert asked.question == ExactMatchQuestion(
        prompt="the", answers=["7"], where=f"{tmp_path}/records.jsonl:1"
    )  # fmt: skip
    with pytest.raises(InputError, match=r"no field 'problem', which task.fields.prompt names"):
        read(tmp_path, records, fields=FieldMapping(prompt="problem"))


def test_a_field_that_is_renamed_is_found_under_no_other_name(tmp_path: Path) -> None:
    records = [{"prompt": "the", "solution": "long", "answer": 1, "choices": ["a", "b"]}] * 2
    fields = FieldMapping(right="answer", answer="solution")
    (asked, _) = read(tmp_path, records, validation=0.0, fields=fields).train
    assert isinstance(asked.question, MultipleChoiceQuestion)
    assert asked.question.right == 1, "and not the solution, which was renamed before it"
    kept = [{"prompt": "the", "answer": "a whole solution", "answers": ["another"]}]
    with pytest.raises(InputError, match="which is no question"):
        read(tmp_path, kept, validation=0.0, fields=FieldMapping(answer="final"))


def test_prompts_without_answers_do_where_no_reward_needs_one(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "the", "chosen": "a", "rejected": "b"},
        {"messages": [{"role": "user", "content": "and"}]},
        {"messages": [{"role": "user", "content": "and"}, {"role": "assistant", "content": "x"}]},
    ]
    parts = read(tmp_path, records, validation=0.0, rewards=ANY)
    assert [type(each.question) for each in parts.train] == [OpenQuestion] * 3
    assert text(parts.train[1]) == text(parts.train[2])
    with pytest.raises(InputError, match="which is no question"):
        read(tmp_path, records[:1], validation=0.0)


def test_the_share_kept_back_is_what_the_evaluation_asks(tmp_path: Path) -> None:
    parts = read(tmp_path, questions(40), validation=0.1)
    asked = read_questions([tmp_path / "records.jsonl"], validation=0.1)
    assert [each.question for each in parts.held_out] == asked
    assert len(parts.train) == 36


@pytest.mark.parametrize("file", [True, False])
def test_a_prompt_that_is_held_out_is_not_trained_on(tmp_path: Path, file: bool) -> None:
    records = questions(10)
    records[0] = records[9]
    held_out = str(write(tmp_path / "held-out.jsonl", records[-1:])) if file else ""
    parts = read(tmp_path, records, held_out=held_out)
    assert len(parts.held_out) == 1
    kept = {each.token_ids for each in parts.held_out}
    assert not any(each.token_ids in kept for each in parts.train)
    assert len(parts.train) == 8
    assert any("to train on stand among those held out" in note for note in parts.notes)


def test_parquet_is_read_as_lines_are(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    records = questions(8)
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "train.parquet")
    lines = read(tmp_path, records, validation=0.0)
    rows = read_prompt_splits(task(str(tmp_path / "train.parquet"), validation=0.0), WORDS, room=60)
    assert [each.token_ids for each in rows.train] == [each.token_ids for each in lines.train]
    assert rows.digest == lines.digest


def test_long_prompts_are_refused_by_name_or_left_out(tmp_path: Path) -> None:
    records = [*questions(3), {"prompt": "the" + " the" * 39, "answer": "1"}]
    with pytest.raises(InputError, match=r"records.jsonl:4: has a prompt of 40 tokens, and there"):
        read(tmp_path, records, room=20, validation=0.0)
    with pytest.raises(InputError, match=r"a higher task.max_prompt_tokens"):
        read(tmp_path, records, room=20, validation=0.0, max_prompt_tokens=20)
    parts = read(tmp_path, records, room=20, validation=0.0, length_policy="drop")
    assert len(parts.train) == 3
    assert "1 prompt of more than 20 tokens left out (task.length_policy = drop)" in parts.notes


@pytest.mark.parametrize(
    ("records", "given", "told"),
    [
        ([{"text": "a"}], {}, r"records.jsonl:1: holds text, which is no question"),
        ([{"prompt": "a", "answer": "b"}], {"reward": "number"}, "which comes to no number"),
        ([{"prompt": "", "answer": "b"}], {}, "has a prompt without tokens"),
        ([{"prompt": [], "answer": "b"}], {"rewards": ANY}, "has an empty prompt"),
        ([{"text": "b"}], {"rewards": ANY}, "holds text, which is no prompt"),
        ([], {}, "is empty: it holds no record"),
        ([{"text": "a"}] * 12, {}, "4 more are refused likewise"),
        (
            [{"prompt": "a", "answer": "b"}] * 20,
            {"validation": 0.1},
            "that is not held out as well",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, records: list[dict[str, Any]], given: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        read(tmp_path, records, **{"validation": 0.0} | given)


def test_a_chat_for_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path / "records.jsonl", questions(2)))
    with pytest.raises(InputError, match="is a chat, and the model has no chat template"):
        read_prompt_splits(task(path, validation=0.0), words_of(""), room=60)


def test_chats_of_texts_for_a_model_without_a_template_are_refused_once(tmp_path: Path) -> None:
    path = str(write(tmp_path / "records.jsonl", [{"prompt": "b", "answer": "c"}] * 9))
    with pytest.raises(InputError) as refused:
        read_prompt_splits(task(path, validation=0.0, chat=True), words_of(""), room=60)
    (problem,) = refused.value.problems
    assert problem.where == "task.chat"


def test_a_field_that_records_lack_is_told_with_those_they_have(tmp_path: Path) -> None:
    records = [{"prompt": "b", "answer": "c"}]
    with pytest.raises(InputError, match="prompts are in: there is answer, prompt"):
        read(tmp_path, records, validation=0.0, fields=FieldMapping(prompt="question"))


@pytest.mark.parametrize("template", ["chatml", "marked", "forgetful"])
def test_what_a_template_writes_behind_an_answer_is_known(tmp_path: Path, template: str) -> None:
    written = {"chatml": None, "marked": MARKED, "forgetful": FORGETFUL}[template]
    words = WORDS if written is None else words_of(written)
    path = str(write(tmp_path / "records.jsonl", questions(2)))
    asked = read_prompt_splits(task(path, validation=0.0), words, room=60).train[0]
    answer = {"role": "assistant", "content": "aye"}
    (whole,) = encode_chat(words, ChatExample((*asked.question.prompt, answer)), "last")
    assert words.decode(asked.template_suffix) == "\n"
    assert tuple(whole.token_ids[-len(asked.template_suffix) :]) == asked.template_suffix


def test_other_answers_are_another_digest_and_other_places_are_not(tmp_path: Path) -> None:
    first = read(tmp_path, questions(8))
    (tmp_path / "moved").mkdir()
    assert read(tmp_path / "moved", questions(8)).digest == first.digest
    other = questions(8)
    other[3]["answer"] = 77
    assert read(tmp_path, other).digest != first.digest


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"reward": "share"}, "task.reward: share is of places in sorted digits"),
        ({"rewards": ANY, "reward": "share"}, r"share is of places .*use exact or number\)$"),
        ({"train": ""}, "task.train: nothing says what is asked"),
        ({"digits": 5}, "task.digits: is read by sorting-digits alone"),
        ({"rewards": ANY, "reward": "number"}, "task.reward: number stands beside task.rewards"),
        ({"name": "sorting-digits"}, "task.train: is read by questions alone"),
        ({"name": "mine:own"}, r"task.train: is read by questions alone .*task.options"),
    ],
)
def test_fields_that_would_be_passed_over_are_refused(given: dict[str, Any], told: str) -> None:
    asked = msgspec.structs.replace(task("train.jsonl"), validation=0.05, **given)
    with pytest.raises(InputError, match=told):
        raise InputError(asked.problems())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FormatReward(pattern="("), "pattern: .* is no regular expression"),
        (lambda: FormatReward(pattern=".", weight=0.0), "weight: 0.0 is no finite number"),
        (lambda: FormatReward(pattern=".", name="A b"), "name: 'A b' is no name of a figure"),
        (lambda: ModelReward(model=""), "model: '' is not a name"),
        (lambda: ModelReward(model="a", clip=-1.0), "clip: -1.0 is not a finite number above 0"),
        (lambda: TaskConfig(rewards=(*ANY, *ANY)), "rewards: format is the name of several"),
    ],
)
def test_rewards_that_mean_nothing_are_refused(make: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()
