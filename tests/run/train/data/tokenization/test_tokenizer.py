"""Tokenizers: bytes, any JSON of the `tokenizers` library, and a BPE trained here."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.train.data import open_tokenizer, train_bpe
from meshwright.run.train.data.corpus.vocabulary import BOS_TOKEN, EOS_TOKEN, PAD_TOKEN
from meshwright.run.train.data.tokenization.bpe_trainer import save_tokenizer
from meshwright.run.train.data.tokenization.tokenizer import TextTokenizer, open_saved_tokenizer

TEXTS = ["def add(one, two):\n    return one + two\n" * 20, "the cat sat on the mat, 12345 times"]


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bpe") / "mine.json"
    save_tokenizer(train_bpe(TEXTS, 320), file)
    return file


@pytest.fixture(scope="module")
def bpe(bpe_file: Path) -> TextTokenizer:
    return open_tokenizer(str(bpe_file))


@given(st.text())
def test_bytes_come_back_as_the_text(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    (ids,) = tokenizer.encode([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_have_special_tokens_that_no_text_spells() -> None:
    vocabulary = open_tokenizer("bytes").vocabulary
    assert (vocabulary.size, vocabulary.eos, vocabulary.pad) == (259, 257, 258)
    assert vocabulary.bos is None
    assert open_tokenizer("bytes", begin=BOS_TOKEN).vocabulary.bos == 256
    assert open_tokenizer("bytes").encode([EOS_TOKEN])[0].max() < 256
    assert open_tokenizer("bytes").decode([104, 105, 257]) == f"hi{EOS_TOKEN}"


def test_lone_surrogates_do_no_harm(bpe: TextTokenizer) -> None:
    for tokenizer in (open_tokenizer("bytes"), bpe):
        assert tokenizer.decode(tokenizer.encode(["a\ud800b"])[0]) == "a?b"


@given(st.text(max_size=40))
def test_the_library_reads_bytes_alike(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    ours = open_tokenizer("bytes")
    theirs = tokenizers.Tokenizer.from_str(ours.json)
    theirs.encode_special_tokens = True
    assert theirs.encode(text).ids == ours.encode([text])[0].tolist()
    assert theirs.token_to_id(EOS_TOKEN) == ours.vocabulary.eos


@given(st.text())
def test_a_trained_bpe_brings_any_text_back(bpe: TextTokenizer, text: str) -> None:
    (ids,) = bpe.encode([text])
    assert bpe.decode(ids) == text


def test_a_trained_bpe_is_shorter_than_bytes(bpe: TextTokenizer) -> None:
    assert len(bpe.encode([TEXTS[0]])[0]) < len(TEXTS[0]) / 2
    assert bpe.vocabulary.size <= 320


def test_training_twice_gives_the_same() -> None:
    assert train_bpe(TEXTS, 300) == train_bpe(iter(TEXTS), 300)


def test_special_tokens_come_last_and_stay_text_in_text(bpe: TextTokenizer) -> None:
    vocabulary = bpe.vocabulary
    assert vocabulary.eos == vocabulary.size - 2
    assert vocabulary.pad == vocabulary.size - 1
    (ids,) = bpe.encode([f"a {EOS_TOKEN} b"])
    assert vocabulary.eos not in ids
    assert bpe.decode(ids) == f"a {EOS_TOKEN} b"


def test_a_vocabulary_too_small_is_refused() -> None:
    with pytest.raises(InputError, match="use 259 or more"):
        train_bpe(TEXTS, 100)


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(InputError, match="no text to learn from"):
        train_bpe(["", ""], 300)


def test_your_special_tokens_are_added() -> None:
    made = json.loads(train_bpe(TEXTS, 300, special=["<|user|>"]))
    assert [one["content"] for one in made["added_tokens"]] == [
        BOS_TOKEN,
        EOS_TOKEN,
        PAD_TOKEN,
        "<|user|>",
    ]


def test_the_end_is_named_by_the_configuration_beside_it(tmp_path: Path, bpe_file: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(bpe_file.read_text())
    config = {"eos_token": {"content": PAD_TOKEN}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = open_tokenizer(str(tmp_path))
    assert found.vocabulary.eos == found.vocabulary.pad
    named = open_tokenizer(str(tmp_path), end=EOS_TOKEN, begin=BOS_TOKEN)
    assert named.vocabulary.eos == found.vocabulary.size - 2
    assert named.vocabulary.bos == found.vocabulary.size - 3


def test_a_tokenizer_that_cuts_texts_short_does_not_here(tmp_path: Path, bpe_file: Path) -> None:
    cutting = json.loads(bpe_file.read_text())
    cutting["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    file = tmp_path / "cutting.json"
    file.write_text(json.dumps(cutting))
    tokenizer = open_tokenizer(str(file))
    assert tokenizer.decode(tokenizer.encode([TEXTS[0]])[0]) == TEXTS[0]


def test_the_tokenizer_kept_with_data_is_the_same(bpe_file: Path, tmp_path: Path) -> None:
    made = open_tokenizer(str(bpe_file), begin=BOS_TOKEN)
    (tmp_path / "tokenizer.json").write_text(made.json)
    kept = open_saved_tokenizer(tmp_path, made.vocabulary)
    assert kept.vocabulary == made.vocabulary
    assert np.array_equal(kept.encode(TEXTS)[1], made.encode(TEXTS)[1])


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"path": "nowhere.json"}, "there is no such tokenizer"),
        ({"path": "bytes", "end": "</s>"}, "leave end out"),
        ({"path": "mine.json", "end": "</s>"}, EOS_TOKEN),
        ({"path": "broken.json"}, "train-tokenizer"),
        ({"path": "endless.json"}, "name it with `end`"),
    ],
)
def test_what_cannot_be_opened_says_why(
    given: dict[str, str],
    hint: str,
    bpe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text(bpe_file.read_text())
    Path("broken.json").write_text("{")
    endless = json.loads(bpe_file.read_text()) | {"added_tokens": []}
    Path("endless.json").write_text(json.dumps(endless))
    with pytest.raises(InputError, match=hint.replace("|", r"\|").replace("(", r"\(")):
        open_tokenizer(**given)
