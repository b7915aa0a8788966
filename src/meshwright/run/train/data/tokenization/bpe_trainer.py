"""Train a byte-level BPE on text, for machines that reach no hub; saved as `tokenizers` JSON.

Text is cut into words as GPT-4's tokenizer does (numbers of up to three digits, words with the
space before them, runs of punctuation), then bytes are merged. Knows nothing of files of text.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors, make_parent_folder
from meshwright.run.train.data.corpus.vocabulary import BOS_TOKEN, EOS_TOKEN, PAD_TOKEN
from meshwright.run.train.data.tokenization.tokenizer import import_tokenizers

# The pattern of cl100k_base (tiktoken, openai_public.py), without its possessive quantifiers.
PRETOKENIZE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN)


def train_bpe(texts: Iterable[str], size: int, *, special: Iterable[str] = ()) -> str:
    """Return the JSON of a BPE of `size` tokens, learnt from texts; the same for the same texts.

    Special tokens come last, after the merges: ours, then yours. A small text may not hold enough
    pairs for the size asked; then there are fewer.
    """
    names = [*SPECIAL_TOKENS, *(name for name in special if name not in SPECIAL_TOKENS)]
    if not 256 + len(names) <= size <= 1 << 24:
        what = f"{size:,} tokens cannot hold 256 bytes and {len(names)} special tokens"
        raise InputError([Problem("size", what, f"use {256 + len(names)} or more")])
    tokenizers = import_tokenizers()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    cut = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(PRETOKENIZE_PATTERN), behavior="isolated"
    )
    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, letters])
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - len(names),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_some(texts), trainer)
    made.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return str(made.to_str(pretty=True))


def _some(texts: Iterable[str]) -> Iterator[str]:
    empty = True
    for text in texts:
        empty = empty and not text
        yield text if text.isascii() else text.encode("utf-8", "replace").decode()
    if empty:
        raise InputError([Problem("texts", "hold no text to learn from", "give more text")])


def save_tokenizer(description: str, file: Path) -> None:
    """Write a tokenizer's JSON; the file appears whole or not at all."""
    make_parent_folder(file)
    with convert_os_errors(file, "write"):
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(description, encoding="utf-8")
        partial.replace(file)
