"""Engines whose ranks take versions: of one device, and of two that share every product."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="serves a model")

from meshwright.errors import InputError
from meshwright.run.posttrain.weight_sync.engine_weights import EngineWeightUpdater
from meshwright.run.posttrain.weight_sync.weight_receiver import (
    RECEIVING_RANKS,
    connect_in_process,
    receive_version,
)
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender
from meshwright.run.posttrain.weight_sync.weight_tensors import collect_decoder_weights
from meshwright.run.serve.engine.executor.rank_commands import RankCommand
from meshwright.run.serve.llm import LLM
from tests.run.posttrain.weight_sync.test_engine_weights import WIDE, drawn, likely, started

REPOSITORY = Path(__file__).parents[4]


def test_one_device_takes_what_is_offered() -> None:
    llm, other = started(ranks=RECEIVING_RANKS), started()
    offered = WeightSender([collect_decoder_weights(drawn(3))])
    with pytest.raises(InputError, match="ranks=RECEIVING_RANKS"):
        connect_in_process(offered, other.lifecycle)
    with pytest.raises(InputError, match="ranks that do"):
        other.lifecycle.run_on_all_ranks(RankCommand(name="versions"))
    connect_in_process(offered, llm.lifecycle)
    offered.publish(1)
    receive_version(1, llm.engine, llm.lifecycle)
    EngineWeightUpdater([collect_decoder_weights(drawn(3))], other.engine, other.lifecycle).update(
        1
    )
    assert likely(llm) == likely(other)
    offered.publish(2)
    offered.release_old_versions()
    assert [path.name for path in offered.folder.iterdir()] == ["version-2"]
    offered.close()
    with pytest.raises(InputError, match="different ways"):
        offered.plan_transfer([{}])


def test_four_bits_take_no_versions() -> None:
    """What was quantised when it was read cannot be filled slice by slice, and says so."""
    llm = LLM(WIDE, device="cpu", cuda_graphs=False, quantization="int4", ranks=RECEIVING_RANKS)
    before = likely(llm)
    said = r"kept as int4-weights.*serve with weights in fp8, or as they are"
    with pytest.raises(InputError, match=said):
        EngineWeightUpdater(
            [collect_decoder_weights(drawn(3, model=WIDE))], llm.engine, llm.lifecycle
        )
    offered = WeightSender([collect_decoder_weights(drawn(3, model=WIDE))])
    with pytest.raises(InputError, match=said):
        connect_in_process(offered, llm.lifecycle)
    offered.close()
    with pytest.raises(InputError, match="quantised when they were read"):
        llm.lifecycle.update_weights("anywhere")
    assert (llm.engine.weights_version, likely(llm)) == (0, before)


@pytest.mark.slow
def test_two_ranks_take_their_slices_together_or_not_at_all() -> None:
    command = [sys.executable, "-m", "tests.run.posttrain.weight_sync.ranked"]
    ended = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    first, updated, refused, kept, mended, shared, sizes = said
    one = started()
    assert first == pytest.approx(likely(one), abs=1e-5)
    weights = EngineWeightUpdater([collect_decoder_weights(drawn(3))], one.engine, one.lifecycle)
    weights.update(1)
    assert updated == pytest.approx(likely(one), abs=1e-5)
    assert refused == "version 2 was received by nobody: ranks [1] lack some of it"
    assert kept == [1, updated]
    EngineWeightUpdater([collect_decoder_weights(drawn(4))], one.engine, one.lifecycle).update(2)
    assert mended == [2, pytest.approx(likely(one), abs=1e-5)]
    assert "share its weights" in shared
    assert sizes == [[32, 24], [32, 24]], "each has a half of the columns"
