"""Corpora of given tokens, written by hand as the format is documented."""

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from meshwright.run.train.data import Corpus, open_corpus

Write = Callable[..., Path]
Open = Callable[..., Corpus]


def write_shards(
    folder: Path, documents: Sequence[Sequence[int]], *, files: int = 1, dtype: str = "uint16"
) -> Path:
    folder.mkdir()
    starts = np.cumsum([0, *(len(one) for one in documents)]).astype("<i8").tobytes()
    (folder / "documents").write_bytes(starts)
    shards = []
    cuts = [len(documents) * n // files for n in range(files + 1)]
    for number in range(files):
        mine = documents[cuts[number] : cuts[number + 1]]
        raw = np.array([token for one in mine for token in one], dtype).tobytes()
        (folder / f"{number:05d}.tokens").write_bytes(raw)
        shards.append(
            {"file": f"{number:05d}.tokens", "documents": len(mine),
             "tokens": sum(map(len, mine)), "crc32": zlib.crc32(raw)}
        )  # fmt: skip
    index = {
        "format": "meshwright-tokens",
        "version": 2,
        "dtype": dtype,
        "documents": len(documents),
        "tokens": sum(map(len, documents)),
        "documents_crc32": zlib.crc32(starts),
        "shards": shards,
        "vocabulary": {"name": "test", "size": 1000, "digest": "d", "eos": 0, "pad": 999},
    }
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Write:
    """Write documents as a folder of shards."""

    def write(
        documents: Sequence[Sequence[int]],
        *,
        name: str = "corpus",
        files: int = 1,
        dtype: str = "uint16",
    ) -> Path:
        return write_shards(tmp_path / name, documents, files=files, dtype=dtype)

    return write


@pytest.fixture
def corpus(shards: Write) -> Open:
    """Write documents and open them."""

    def write(documents: Sequence[Sequence[int]], *, files: int = 1) -> Corpus:
        return open_corpus(str(shards(documents, files=files)))

    return write
