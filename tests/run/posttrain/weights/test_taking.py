"""Engines whose ranks take versions: of one device, and of two that share every product."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="serves a model")

from meshwright.errors import InputError
from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.weights.serving import EngineWeights
from meshwright.run.posttrain.weights.taking import TAKING, meet, take_version
from meshwright.run.posttrain.weights.tensors import of_decoder
from meshwright.run.serve.engine.doing import Do
from meshwright.run.serve.llm import LLM
from tests.run.posttrain.weights.test_serving import WIDE, drawn, likely, started

REPOSITORY = Path(__file__).parents[4]


def test_one_device_takes_what_is_offered() -> None:
    llm, other = started(ranks=TAKING), started()
    offered = Offered([of_decoder(drawn(3))])
    with pytest.raises(InputError, match="ranks=TAKING"):
        meet(offered, other.upkeep)
    with pytest.raises(InputError, match="ranks that do"):
        other.upkeep.do(Do(what="versions"))
    meet(offered, llm.upkeep)
    offered.post(1)
    take_version(1, llm.engine, llm.upkeep)
    EngineWeights([of_decoder(drawn(3))], other.engine, other.upkeep).update(1)
    assert likely(llm) == likely(other)
    offered.post(2)
    offered.settle()
    assert [path.name for path in offered.folder.iterdir()] == ["version-2"]
    offered.close()
    with pytest.raises(InputError, match="different ways"):
        offered.agree([{}])


def test_four_bits_take_no_versions() -> None:
    """What was quantised when it was read cannot be filled slice by slice, and says so."""
    llm = LLM(WIDE, device="cpu", graphs=False, weights="int4", ranks=TAKING)
    before = likely(llm)
    said = r"kept as int4-weights.*serve with weights in fp8, or as they are"
    with pytest.raises(InputError, match=said):
        EngineWeights([of_decoder(drawn(3, model=WIDE))], llm.engine, llm.upkeep)
    offered = Offered([of_decoder(drawn(3, model=WIDE))])
    with pytest.raises(InputError, match=said):
        meet(offered, llm.upkeep)
    offered.close()
    with pytest.raises(InputError, match="quantised when they were read"):
        llm.upkeep.update_weights("anywhere")
    assert (llm.engine.version, likely(llm)) == (0, before)


@pytest.mark.slow
def test_two_ranks_take_their_slices_together_or_not_at_all() -> None:
    command = [sys.executable, "-m", "tests.run.posttrain.weights.ranked"]
    ended = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    first, updated, refused, kept, mended, shared, sizes = said
    one = started()
    assert first == pytest.approx(likely(one), abs=1e-5)
    weights = EngineWeights([of_decoder(drawn(3))], one.engine, one.upkeep)
    weights.update(1)
    assert updated == pytest.approx(likely(one), abs=1e-5)
    assert refused == "version 2 was taken by nobody: ranks [1] lack some of it"
    assert kept == [1, updated]
    EngineWeights([of_decoder(drawn(4))], one.engine, one.upkeep).update(2)
    assert mended == [2, pytest.approx(likely(one), abs=1e-5)]
    assert "share its weights" in shared
    assert sizes == [[32, 24], [32, 24]], "each has a half of the columns"
