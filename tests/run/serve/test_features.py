"""Every pair of features works together, or is refused: the table of the guide, tried."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")
pytest.importorskip("llguidance", reason="binds answers")

import torch

from meshwright.errors import InputError
from scripts.serve_features import EITHER, FEATURES, IDLE, REFUSED, page, pairs, verdict
from tests.run.serve.pairs.evidence import check
from tests.run.serve.pairs.trial import tried

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guide" / "serve-features.md"
ALONE = [pair for pair in pairs() if "ranks" not in pair and pair not in EITHER]
BEFORE_RANKS = ("adapter", "draft", "batch_invariant")
"""What ranks refuse before any of them is started."""
ASKED = (
    "choices", "seed", "penalties", "logprobs", "prompt_logprobs", "stop", "structured_outputs",
    "embeddings", "cancel", "sleep",
)  # fmt: skip
"""What one engine of several ranks can be asked for."""
RANKS = [ASKED, *((name,) for name in FEATURES if name not in (*ASKED, *BEFORE_RANKS, "ranks"))]


def quick() -> list[tuple[str, str]]:
    """Return pairs in which every feature that works alone in a process takes part."""
    names = [name for name in FEATURES if name != "ranks"]
    half = -(-len(names) // 2)
    # What was once found broken stays among them.
    found = [("swap", "choices"), ("choices", "cancel"), ("logprobs", "kv_transfer"),
             ("structured_outputs", "ngram"), ("adapter", "embeddings")]  # fmt: skip
    chosen = {*zip(names[:half], names[-half:], strict=True), *found, *REFUSED, *IDLE}
    return [pair for pair in ALONE if pair in chosen]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def hold(pair: tuple[str, str]) -> None:
    """Hold what the table says of a pair against the engine."""
    if verdict(*pair)[0] == "refused":
        with pytest.raises(InputError, match=REFUSED[pair].said):
            tried(pair)
    else:
        check(tried(pair))


@pytest.mark.parametrize("pair", quick(), ids=" ".join)
def test_features_go_together_as_the_table_says(pair: tuple[str, str]) -> None:
    hold(pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [pair for pair in ALONE if pair not in quick()], ids=" ".join)
def test_all_features_go_together_as_the_table_says(pair: tuple[str, str]) -> None:
    hold(pair)


@pytest.mark.parametrize("name", BEFORE_RANKS)
def test_what_ranks_cannot_share_is_refused_before_they_start(name: str) -> None:
    hold((name, "ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("names", RANKS, ids=" ".join)
def test_ranks_go_together_with_other_features(names: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.run.serve.pairs", *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, cwd=ROOT
    )
    if verdict(names[0], "ranks")[0] == "refused":
        assert done.returncode != 0
        assert "InputError" in done.stderr
        assert REFUSED[names[0], "ranks"].said in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_the_page_shows_the_table() -> None:
    assert "```{printed} scripts.serve_features" in PAGE.read_text()
    lines = page().splitlines()
    for feature in FEATURES.values():
        assert sum(f"| {feature.title} | " in line for line in lines) >= 2
    known = {pair for named in (REFUSED, IDLE, EITHER) for pair in named}
    assert known <= set(pairs()), "pairs are named in the order of the features"
    signs = sum(line.count(sign) for line in lines for sign in "✓✗○–" if line.startswith("| "))
    assert signs == len(pairs())
