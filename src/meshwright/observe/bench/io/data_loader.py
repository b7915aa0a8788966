"""What feeds training: a tokenizer made on the spot, and the trainer's own loader.

The text is what every machine has (`generate_builtin_documents`), the tokenizer a byte-level BPE
learnt from it. The loader reads documents of random tokens, as long as web text, from the page
cache.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError
from meshwright.observe.bench.bench_case import BenchCase, BenchRow, SizeValue
from meshwright.observe.bench.bench_family import (
    BenchFamily,
    BenchTarget,
    FailedCase,
    Size,
    build_row,
    prepare_nothing,
)
from meshwright.observe.bench.io.scratch_folder import create_scratch_folder
from meshwright.observe.bench.timing import time_passes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TEXT_BYTES: dict[Size, int] = {"quick": 1_000_000, "full": 4_000_000}
VOCAB_SIZE = 8192
CORPUS_TOKENS: dict[Size, int] = {"quick": 1 << 20, "full": 1 << 23}
SEQ_LEN, BATCH = 4096, 8
STEPS = 4
"""Batches of one pass."""
MEDIAN, SIGMA = 400, 1.2
"""Of the log-normal lengths of documents, in tokens."""


def list_data_loader_cases(size: Size, _on_gpu: bool) -> tuple[BenchCase, ...]:
    """Return the loader by its ways of packing, then the tokenizer."""
    found: list[tuple[str, dict[str, SizeValue]]] = [
        ("load", {"packing": packing, "length": SEQ_LEN, "batch": BATCH,
                  "corpus": CORPUS_TOKENS[size]})
        for packing in ("pack", "concat")
    ]  # fmt: skip
    text: dict[str, SizeValue] = {"text": TEXT_BYTES[size], "vocabulary": VOCAB_SIZE}
    # What is learnt by the one is used by the other.
    found += [("train_tokenizer", text), ("tokenize", text)]
    return tuple(BenchCase(family="data_loader", name=name, sizes=sizes) for name, sizes in found)


def run_data_loader_cases(
    asked: Sequence[BenchCase], place: BenchTarget, end: float
) -> Iterator[BenchRow | FailedCase]:
    """Measure cases in a folder of their own."""
    if not asked:
        return
    with create_scratch_folder(Path(place.folder or ".")) as folder:
        source = _TokenSource(folder)
        for case in asked:
            if time.monotonic() > end:
                return
            try:
                yield source.row(case)
            except (OSError, RuntimeError, MeshwrightError) as fault:
                yield case.key, str(fault).splitlines()[0]


class _TokenSource:
    """Text and tokens that cases share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts = dict[int, list[str]]()
        self._learnt = dict[tuple[int, int], str]()

    def row(self, case: BenchCase) -> BenchRow:
        ways: dict[str, Callable[[BenchCase], BenchRow]] = {
            "load": self._load,
            "tokenize": self._tokenize,
            "train_tokenizer": self._train,
        }
        return ways[case.name](case)

    def _text(self, size: int) -> list[str]:
        from meshwright.run.train.data import generate_builtin_documents

        if size not in self._texts:
            self._texts[size] = list(generate_builtin_documents(size))
        return self._texts[size]

    def _learn(self, case: BenchCase) -> str:
        from meshwright.run.train.data import train_bpe

        size, vocabulary = case.size("text"), case.size("vocabulary")
        found = train_bpe(self._text(size), vocabulary)
        self._learnt[size, vocabulary] = found
        return found

    def _train(self, case: BenchCase) -> BenchRow:
        timed = time_passes(lambda: self._learn(case), least=1, most=3)
        return build_row(case, timed, bytes=_size(self._text(case.size("text"))))

    def _tokenize(self, case: BenchCase) -> BenchRow:
        from meshwright.run.train.data import open_tokenizer

        known = self._learnt.get((case.size("text"), case.size("vocabulary")))
        file = self._folder / "tokenizer.json"
        file.write_text(known or self._learn(case), encoding="utf-8")
        tokenizer, texts = open_tokenizer(str(file)), self._text(case.size("text"))
        tokens = sum(len(one) for one in tokenizer.encode(texts))
        timed = time_passes(lambda: tokenizer.encode(texts), most=10)
        return build_row(case, timed, bytes=_size(texts), items=float(tokens))

    def _load(self, case: BenchCase) -> BenchRow:
        from meshwright.run.train.data import DataConfig, build_dataset
        from meshwright.spec.workload import TrainingWorkload

        shards = self._corpus(case.size("corpus"))
        length, batch = case.size("length"), case.size("batch")
        packing: Any = case.text("packing")
        training = TrainingWorkload(
            tokens=10**9, sequence_length=length, global_batch=batch, packing=packing
        )
        with build_dataset(
            DataConfig(sources=(str(shards),)), training, verify=False
        ).iterate() as loader:
            for _ in range(3):  # what was made ready before anybody asked
                next(loader)

            def run() -> None:
                for _ in range(STEPS):
                    next(loader)

            run()
            timed = time_passes(run)
        return build_row(case, timed, items=float(STEPS * length * batch))

    def _corpus(self, tokens: int) -> Path:
        from meshwright.run.train.data import Vocabulary, write_token_shards

        shards = self._folder / f"shards-{tokens}"
        if not shards.exists():
            vocabulary = Vocabulary(name="random", size=50_000, digest="random", eos=0)
            write_token_shards(_documents(tokens, 50_000), shards, vocabulary)
        return shards


def _documents(tokens: int, vocabulary: int) -> Iterator["NDArray[np.int64]"]:
    """Yield documents, each ended by 0."""
    import numpy as np

    draw = np.random.default_rng(7)
    done = 0
    while done < tokens:
        count = int(draw.lognormal(np.log(MEDIAN), SIGMA)) + 1
        done += count + 1
        yield np.append(draw.integers(1, vocabulary, count), 0)


def _size(texts: Sequence[str]) -> float:
    return float(sum(len(text.encode()) for text in texts))


DATA_LOADER_FAMILY = BenchFamily(
    "data_loader",
    "text and batches",
    list_data_loader_cases,
    prepare_nothing,
    runs_on_device=False,
    run_all=run_data_loader_cases,
    typical_s={"quick": 2.5, "full": 6.0},
)
