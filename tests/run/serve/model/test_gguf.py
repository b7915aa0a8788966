"""GGUF files give the weights and the words that transformers reads from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import DamagedFile, InputError
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.startup import validate_engine_config
from meshwright.run.serve.model.gguf_file import read_context_length
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.run.nn.huggingface.reference import logits_of, reference, tokens_of
from tests.run.serve.model.gguf_made import gguf, rounded, write_gguf

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
TEXT = "The 2 quick foxes don't jump: naïve 'café' 12345 …\n\n\tdone  twice 日本語 🦊!"


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    [("llama", "F32", False), ("llama", "Q8_0", True), ("llama", "Q4_1", True),
     ("qwen2", "F16", True), ("qwen3", "BF16", False)],
)  # fmt: skip
def test_logits_are_those_of_transformers(
    family: str, kind: str, tied: bool, tmp_path: Path
) -> None:
    theirs = reference(family, {**SIZES, "tie_word_embeddings": tied})
    write_gguf(tmp_path / "m.gguf", theirs, kind)
    if kind != "F32":
        rounded(theirs, kind)
    tokens_BT = tokens_of(theirs, length=20)
    decoder = load_served_model(tmp_path / "m.gguf", dtype=torch.float32)
    with torch.no_grad():
        found = decoder(tokens_BT)
    torch.testing.assert_close(found, logits_of(theirs, tokens_BT), atol=1e-4, rtol=0)


def test_wavelengths_stretched_as_llama_3_are_read(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    theirs = reference("llama", {**SIZES, "rope_scaling": scaling})
    plain = 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    stretch = plain / theirs.model.rotary_emb.inv_freq
    assert stretch.max() > 2
    write_gguf(tmp_path / "m.gguf", theirs, stretch=stretch)
    decoder = load_served_model(tmp_path / "m.gguf", dtype=torch.float32)
    tokens_BT = tokens_of(theirs, length=50)
    with torch.no_grad():
        torch.testing.assert_close(
            decoder(tokens_BT), logits_of(theirs, tokens_BT), atol=1e-4, rtol=0
        )


def trained(digits: bool) -> Any:
    """Train a byte-level tokenizer as SmolLM's or GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, "the quick brown fox jumps over the lazy dog"], trainer)
    return tokenizer


@pytest.mark.parametrize(("pre", "digits"), [("smollm", True), ("gpt-2", False)])
def test_byte_level_words_are_those_they_were_made_of(
    pre: str, digits: bool, tmp_path: Path
) -> None:
    tokenizer = trained(digits)
    described = json.loads(tokenizer.to_str())
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    described["gguf"] = {"model": "gpt2", "pre": pre, "bos": 1, "eos": 2, "add_bos": False,
                         "template": template}  # fmt: skip
    theirs = reference("llama", {**SIZES, "vocab_size": tokenizer.get_vocab_size()})
    write_gguf(tmp_path / "m.gguf", theirs, tokenizer=json.dumps(described))
    words = load_tokenizer(tmp_path / "m.gguf")
    text = f"<|im_start|>{TEXT}<|im_end|>"
    assert words.encode(text) == tokenizer.encode(text).ids
    assert words.decode(words.encode(text)) == TEXT
    assert words.decode(words.encode(text), skip_special=False) == text
    assert words.eos_token_ids == {2}
    assert words.special_tokens["bos_token"] == "<|im_start|>"
    assert (
        words.apply_chat_template([{"role": "user", "content": "x"}]) == "<|im_start|>x<|im_end|>"
    )
    assert words.encode("<|im_start|>x", special=False)[0] == 1


def pieces(tmp_path: Path) -> Tokenizer:
    """Return the words of a small SentencePiece vocabulary, with bytes for what it lacks."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    whole = ["▁", "▁t", "he", "▁the", "t", "h", "e", "q", "u", "qu", "▁qu", "i", "c", "k"]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *whole]
    described = {
        "added_tokens": [{"id": 0, "content": "<unk>"}, {"id": 1, "content": "<s>"},
                         {"id": 2, "content": "</s>"}],
        "model": {"vocab": {token: number for number, token in enumerate(tokens)}},
        "gguf": {"model": "llama", "pre": "default", "bos": 1, "eos": 2, "add_bos": True,
                 "scores": [float(-number) for number in range(len(tokens))]},
    }  # fmt: skip
    theirs = reference("llama", {**SIZES, "vocab_size": len(tokens)})
    write_gguf(tmp_path / "m.gguf", theirs, tokenizer=json.dumps(described))
    return load_tokenizer(tmp_path / "m.gguf")


def test_pieces_by_score_are_those_of_transformers(tmp_path: Path) -> None:
    words = pieces(tmp_path)
    ids = words.encode("the quick é")
    shown = [words.id_to_token(each) for each in ids]
    assert shown == ["<s>", "▁the", "▁qu", "i", "c", "k", "▁", "<0xC3>", "<0xA9>"]
    assert words.decode(ids) == "the quick é"


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        ({"general__architecture": "mamba"}, "dense llama, qwen2, qwen3 file"),
        ({"llama__rope__scaling__type": "odd"}, "none, linear or yarn"),
    ],
)
def test_what_is_not_read_is_refused(facts: dict[str, Any], match: str, tmp_path: Path) -> None:
    theirs = reference("llama", SIZES)
    write_gguf(tmp_path / "m.gguf", theirs, **facts)
    with pytest.raises(InputError, match=match):
        load_served_model(tmp_path / "m.gguf")


def test_a_context_that_is_too_short_is_told_by_the_first_facts_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("general.tags", ["small", "kind"])
    writer.add_array("general.numbers", [1, 2, 3])
    writer.add_float32("llama.rope.scaling.factor", 2.0)
    writer.add_context_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    validate_engine_config(path, EngineConfig(max_model_len=64))
    with pytest.raises(InputError, match="65 is more than the 64 tokens"):
        validate_engine_config(path, EngineConfig(max_model_len=65))
    whole = path.read_bytes()
    assert {read_context_length(path)} == {64}
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert read_context_length(path) is None


def test_broken_files_are_named(tmp_path: Path) -> None:
    theirs = reference("llama", SIZES)
    write_gguf(tmp_path / "m.gguf", theirs)
    data = (tmp_path / "m.gguf").read_bytes()
    for size in (4, 20, 300, len(data) // 2):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(DamagedFile, match="fetch it again"):
            load_served_model(tmp_path / "cut.gguf")
    with pytest.raises(InputError, match="no such file"):
        load_served_model(tmp_path / "none.gguf")
