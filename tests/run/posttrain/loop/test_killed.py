"""A run that is killed at any phase goes on with nothing lost and nothing done twice."""

import json
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.loop import run
from meshwright.run.posttrain.loop.keeping import keys_of
from meshwright.run.posttrain.rollouts import read_rollouts
from tests.run.posttrain.loop.killed import PHASES, STEPS, settings_of

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[4]


@cache
def uninterrupted(kind: str) -> Decoder:
    return run(settings_of("", kind)).decoder


CASES = [(kind, phase) for kind in ("disaggregated", "asynchronous") for phase in PHASES]
# What these add lies in checkpoints, and in what is asked after them.
CASES += [
    (kind, phase)
    for kind in ("critic", "spare", "asynchronous, spare")
    for phase in ("draw", "train", "sync", "checkpoint")
]
CASES += [("colocated", "train"), ("colocated", "sync")]


@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_a_killed_run_goes_on(tmp_path: Path, kind: str, phase: str) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.run.posttrain.loop.killed"]
    ended = subprocess.run(
        [*command, str(folder), kind, phase], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    given = settings_of(str(folder), kind)
    outcome = run(given)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    drawn = [each.key for each in read_rollouts(folder / "rollouts.jsonl").rollouts]
    more = int(sum(row.get("replaced_groups", 0) for row in rows))
    assert bool(more) == bool(given.spare_prompts)
    asked = STEPS * given.prompts + more
    every = [key for group in range(asked) for key in keys_of(given, group)]
    assert sorted(drawn) == every
    finished = run(given)
    assert not finished.rows
    assert any("was finished before" in note for note in finished.notes)
    pairs = zip(outcome.decoder.parameters(), finished.decoder.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    if not given.overlaps and phase != "draw":
        # What was drawn in part is drawn in other batches, which may round otherwise.
        pairs = zip(outcome.decoder.parameters(), uninterrupted(kind).parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
