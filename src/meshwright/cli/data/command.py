"""`mw data tokenize|inspect|train-tokenizer|sample`: text to tokens, and what became of it."""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.parser import add_common, add_verbs
from meshwright.cli.render.progress import show_progress
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.spec.serialization import encode
from meshwright.spec.units import format_bytes, format_quantity, parse_bytes, parse_count

EXAMPLES = (
    "mw data tokenize books.jsonl more/ --tokenizer tokenizer.json --out tokens",
    "mw data inspect tokens --sequence-length 4096",
    "mw data train-tokenizer books.jsonl --vocab-size 32k --out tokenizer.json",
    "mw data sample tokens --packing pack --step 10",
)

_VERBS = (
    ("tokenize", "turn files of text into tokens on disk", (EXAMPLES[0],)),
    ("inspect", "what tokenized text holds, and whether it is whole", (EXAMPLES[1],)),
    ("train-tokenizer", "learn a byte-level BPE from text", (EXAMPLES[2],)),
    ("sample", "show the sequences that a step would train on", (EXAMPLES[3],)),
)
_SHOWN_CHARACTERS = 120


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    found = add_verbs(parser, _VERBS)
    for verb in ("tokenize", "train-tokenizer"):
        sub = found[verb]
        sub.add_argument(
            "files", nargs="+", metavar="TEXT",
            help="JSON lines, Parquet or text, gzipped or not; folders of them; or builtin",
        )  # fmt: skip
        sub.add_argument("--out", required=True, metavar="PATH", help="what to write")
    sample = found["sample"]
    for verb in ("inspect", "sample"):
        found[verb].add_argument(
            "path", metavar="PATH", help="folder of shards, or prefix of .bin and .idx"
        )
        found[verb].add_argument("--sequence-length", metavar="N", help="positions of a sequence")
    for verb in ("tokenize", "train-tokenizer", "sample"):
        found[verb].add_argument(
            "--field", default="text", metavar="NAME", help="field of the text (default: text)"
        )
    for verb in ("tokenize", "sample"):
        found[verb].add_argument(
            "--tokenizer", metavar="FILE",
            help="tokenizer's JSON file or folder, or bytes (default: bytes, or the one that is "
            "kept with tokens)" if verb == "sample" else
            "tokenizer's JSON file or folder, or bytes (default: bytes)",
        )  # fmt: skip
    _configure_tokenize(found["tokenize"])
    found["inspect"].add_argument("--check", action="store_true", help="read every byte")
    train = found["train-tokenizer"]
    train.add_argument("--vocab-size", required=True, metavar="N", help="tokens of the vocabulary")
    train.add_argument("--special-tokens", default="", metavar="A,B", help="more special tokens")
    train.add_argument(
        "--max-bytes", default="256MB", metavar="SIZE", help="text to learn from (default: 256MB)"
    )
    sample.add_argument("--step", default="0", metavar="N", help="which step (default: 0)")
    sample.add_argument("--global-batch", default="4", metavar="N", help="sequences (default: 4)")
    sample.add_argument("--seed", default="0", metavar="N", help="seed of the order (default: 0)")
    sample.add_argument(
        "--packing", default="pack", choices=("none", "concat", "pack"),
        help="how documents fill a sequence (default: pack)",
    )  # fmt: skip
    for sub in found.values():
        add_common(sub)


def _configure_tokenize(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--bos-token", default="", metavar="TOKEN", help="token before each document")
    sub.add_argument("--eos-token", default="", metavar="TOKEN", help="token after each document")
    sub.add_argument("--workers", metavar="N", help="processes (default: one for each core)")
    sub.add_argument(
        "--skip-damaged", action="store_true", help="leave damaged documents out and count them"
    )
    sub.add_argument(
        "--format", default="shards", choices=("shards", "megatron"),
        help="write a folder of shards, or Megatron's .bin and .idx (default: shards)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> CommandResult:
    """Answer one of the verbs."""
    answers = {
        "tokenize": _tokenize,
        "inspect": _inspect,
        "train-tokenizer": _train_tokenizer,
        "sample": _sample,
    }
    return answers[args.verb](args)


def _tokenize(args: argparse.Namespace) -> CommandResult:
    from meshwright.run.train.data.tokenization.corpus_tokenization import (
        count_text_bytes,
        tokenize_files,
        tokenize_to_megatron,
    )
    from meshwright.run.train.data.tokenization.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(args.tokenizer or "bytes", begin=args.bos_token, end=args.eos_token)
    total = count_text_bytes(args.files)
    with show_progress("tokenizing", total, quiet=args.quiet or args.json) as advance:
        options: dict[str, Any] = {
            "field": args.field,
            "skip_damaged": args.skip_damaged,
            "workers": args.workers and parse_count(args.workers, "--workers"),
            "progress": advance,
        }
        if args.format == "megatron":
            _, made = tokenize_to_megatron(args.files, Path(args.out), tokenizer, **options)
        else:
            made = tokenize_files(args.files, Path(args.out), tokenizer, **options)
    vocabulary = tokenizer.vocabulary
    head = {
        "wrote": args.out + (".bin and .idx" if args.format == "megatron" else ""),
        "documents": f"{made.documents:,}",
        "tokens": f"{made.tokens:,}",
        "text": format_bytes(made.text_bytes),
        "bytes per token": f"{made.text_bytes / made.tokens:.2f}" if made.tokens else None,
        "tokenizer": f"{vocabulary.name}, {vocabulary.size:,} tokens",
    }
    notes: tuple[View, ...] = ()
    if made.skipped:
        notes = (NoteView(f"{made.skipped:,} damaged left out; the first: {made.first_skipped}"),)
    data = {
        "out": args.out,
        "form": args.format,
        "documents": made.documents,
        "tokens": made.tokens,
        "text_bytes": made.text_bytes,
        "skipped": made.skipped,
        "vocabulary": encode(vocabulary),
    }
    return CommandResult("data.tokenize/2", data, (make_fields(head), *notes), (str(made.tokens),))


def _inspect(args: argparse.Namespace) -> CommandResult:
    from meshwright.run.train.data.corpus_loader import check_corpus, open_corpus
    from meshwright.run.train.data.packing.corpus_stats import (
        compute_packing_stats,
        fit_length_distribution,
        sample_document_lengths,
        summarize_lengths,
    )

    corpus = open_corpus(args.path)
    lengths = sample_document_lengths(corpus)
    spread = summarize_lengths(lengths)
    like = fit_length_distribution(lengths)
    positions = parse_count(args.sequence_length or "4096", "--sequence-length")
    filled = compute_packing_stats(lengths, corpus.num_documents, positions)
    damage = check_corpus(args.path) if args.check else []
    vocabulary = corpus.vocabulary
    head = {
        "path": corpus.name,
        "form": f"{corpus.format}, {format_quantity(len(corpus.token_arrays), 'file')} of "
        f"{corpus.dtype}",
        "documents": f"{corpus.num_documents:,}",
        "tokens": f"{corpus.num_tokens:,}",
        "text": format_bytes(corpus.text_bytes) if corpus.text_bytes else None,
        "bytes per token": f"{corpus.text_bytes / corpus.num_tokens:.2f}"
        if corpus.text_bytes
        else None,
        "on disk": format_bytes(corpus.num_tokens * corpus.dtype.itemsize),
        "tokenizer": vocabulary and f"{vocabulary.name}, {vocabulary.size:,} tokens",
        "length": f"mean {spread.mean:,.0f}, half up to {spread.p50:,}, 90 % up to {spread.p90:,}, "
        f"99 % up to {spread.p99:,}, longest {spread.max:,}",
        "as a workload": like
        and f'lengths = {{kind = "lognormal", median = {like.median:g}, sigma = {like.sigma:g}}}',
        "checked": None if not args.check else "damaged" if damage else "every byte as written",
    }
    rows = [
        (one.packing, f"{one.sequences:,}", f"{one.filled_fraction:.2%}",
        f"{one.truncated_fraction:.2%}",
         f"{one.split_fraction:.2%}")
        for one in filled
    ]  # fmt: skip
    data = {
        "path": args.path,
        "kind": corpus.format,
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
        "text_bytes": corpus.text_bytes or None,
        "dtype": str(corpus.dtype),
        "fingerprint": corpus.fingerprint,
        "vocabulary": vocabulary and encode(vocabulary),
        "lengths": encode(spread),
        "workload_lengths": like and encode(like),
        "sequence_length": positions,
        "packings": [encode(one) for one in filled],
        "damaged": [problem._asdict() for problem in damage],
    }
    ways = make_table(
        "packing, sequences, filled, thrown away, documents split", rows,
        f"in sequences of {positions:,}",
        right="sequences, filled, thrown away, documents split",
    )  # fmt: skip
    views: tuple[View, ...] = (
        make_fields(head),
        ways,
        *(NoteView(str(problem)) for problem in damage),
    )
    return CommandResult(
        "data.inspect/2", data, views, (str(corpus.num_tokens),), 1 if damage else 0
    )


def _train_tokenizer(args: argparse.Namespace) -> CommandResult:
    from meshwright.run.train.data.tokenization.bpe_trainer import save_tokenizer, train_bpe
    from meshwright.run.train.data.tokenization.corpus_tokenization import read_all_documents
    from meshwright.run.train.data.tokenization.tokenizer import open_tokenizer

    limit = parse_bytes(args.max_bytes, "--max-bytes")
    special = [name for name in args.special_tokens.split(",") if name]
    size = parse_count(args.vocab_size, "--vocab-size")
    out = Path(args.out)
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        with show_progress("reading", limit, quiet=args.quiet or args.json) as advance:
            for text in read_all_documents(args.files, args.field):
                yield text
                count = len(text.encode("utf-8", "replace"))
                advance(count)
                read += count
                if read >= limit:
                    return

    save_tokenizer(train_bpe(texts(), size, special=special), out)
    vocabulary = open_tokenizer(str(out)).vocabulary
    head = {
        "wrote": args.out,
        "tokens": f"{vocabulary.size:,}",
        "learnt from": format_bytes(read),
        "ends documents with": vocabulary.eos,
    }
    data = {"out": args.out, "text_bytes": read, "vocabulary": encode(vocabulary)}
    short = f"the text has no more than {vocabulary.size:,} of the {size:,} tokens asked for"
    notes = (NoteView(f"{short}: give more of it for more"),) if vocabulary.size < size else ()
    return CommandResult(
        "data.train-tokenizer/2", data, (make_fields(head), *notes), (str(vocabulary.size),)
    )


def _sample(args: argparse.Namespace) -> CommandResult:
    from meshwright.run.train.data.batch_preview import list_document_previews, make_token_decoder
    from meshwright.run.train.data.data_config import DataConfig
    from meshwright.run.train.data.dataset_builder import build_dataset
    from meshwright.spec.workload import TrainingWorkload

    length = parse_count(args.sequence_length or "256", "--sequence-length")
    batch = parse_count(args.global_batch, "--global-batch")
    training = TrainingWorkload(
        tokens=length, sequence_length=length, global_batch=batch, packing=args.packing
    )
    step, seed = parse_count(args.step, "--step"), parse_count(args.seed, "--seed")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as cache:
        settings = DataConfig(
            sources=(args.path,),
            tokenizer=args.tokenizer or "bytes",
            text_field=args.field,
            cache_dir=cache,
        )
        batches = build_dataset(settings, training, seed=seed)
        reader = make_token_decoder(batches, args.tokenizer)
        found = list_document_previews(batches.get_batch(step), reader)
        epoch = batches.count_epochs(step)[0]
    rows = [
        (one.sequence, one.first_token, one.num_tokens, one.num_targets, _short(one.text))
        for one in found
    ]
    shown = make_table(
        "sequence, from, tokens, trained, text", rows,
        f"step {step}: {batch} sequences of {length}, after {epoch:.3g} epochs",
        right="sequence, from, tokens, trained", wide="text",
    )  # fmt: skip
    data = {
        "path": args.path,
        "step": step,
        "epochs": epoch,
        "fingerprint": batches.fingerprint,
        "documents": [msgspec.to_builtins(one) for one in found],
    }
    return CommandResult("data.sample/2", data, (shown,), tuple(one.text for one in found))


def _short(text: str) -> str:
    """Print text on one line, its middle left out where it is long."""
    line = repr(text)[1:-1]
    if len(line) <= _SHOWN_CHARACTERS:
        return line
    half = _SHOWN_CHARACTERS // 2
    return f"{line[:half]} … {line[-half:]}"
