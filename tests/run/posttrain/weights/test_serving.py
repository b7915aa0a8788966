"""An engine answers with one version of weights, and finds no prefix of another."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="serves a model")

import torch

from meshwright.errors import InputError
from meshwright.policy.kv import block_keys, salt_of
from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.initialise import materialise
from meshwright.run.posttrain.weights.arrivals import IncompleteVersion
from meshwright.run.posttrain.weights.in_process import InProcess
from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.weights.serving import EngineWeights, take
from meshwright.run.posttrain.weights.taking import TAKING, meet, take_version
from meshwright.run.posttrain.weights.tensors import of_decoder
from meshwright.run.serve.asked import Sampling
from meshwright.run.serve.engine.doing import HalfRenewed
from meshwright.run.serve.llm import LLM
from meshwright.spec.model import Model
from meshwright.spec.model import decoder as model_of
from tests.run.freed import Memory
from tests.run.posttrain.weights.virtual_ranks import DENSE

PROMPT = tuple(range(40))
GREEDY = Sampling(temperature=0.0, max_tokens=8)


WIDE = model_of("wide", layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=256)


def drawn(seed: int, dtype: torch.dtype = torch.float32, model: Model = DENSE) -> Decoder:
    decoder = build(model, device="meta", dtype=dtype)
    materialise(decoder, torch.device("cpu"), seed=seed)
    return decoder


def started(**given: Any) -> LLM:
    return LLM(DENSE, device="cpu", graphs=False, **given)


def likely(llm: LLM) -> list[float]:
    """Return how likely the tokens of an answer are, which hangs on every weight."""
    sampling = Sampling(temperature=0.0, max_tokens=8, logprobs=1)
    return [each.logprob for each in llm.generate([PROMPT], sampling)[0].choices[0].logprobs]


def test_an_updated_engine_answers_as_one_that_began_with_these_weights() -> None:
    llm, other = started(), started()
    before = likely(llm)
    assert llm.generate([PROMPT], GREEDY)[0].cached_tokens > 0, "a prefix of this version is found"
    weights = EngineWeights([of_decoder(drawn(3))], llm.engine, llm.upkeep)
    assert weights.plan.moved_bytes == 0, "both are in this process"
    weights.update(1)
    first = llm.generate([PROMPT], GREEDY)[0]
    assert (llm.engine.version, first.cached_tokens) == (1, 0)
    with torch.no_grad():
        for mine, theirs in zip(
            other.engine.runner.forward.decoder.parameters(), drawn(3).parameters(), strict=True
        ):
            mine.copy_(theirs)
    assert likely(llm) == likely(other) != before
    llm.upkeep.sleep(level=2)
    llm.upkeep.wake()
    weights.update(2)
    assert likely(llm) == likely(other), "weights are found where they lie after sleep"


def test_prefixes_are_named_by_version_even_where_nothing_is_forgotten() -> None:
    llm = started()
    likely(llm)
    llm.engine.version = 1
    assert llm.generate([PROMPT], GREEDY)[0].cached_tokens == 0
    assert llm.generate([PROMPT], GREEDY)[0].cached_tokens > 0
    names = (None, "", "a", "b", "long" * 16, "long" * 16 + "er")
    salts = [salt_of(version, adapter) for version in (0, 1, 2) for adapter in names]
    assert len({block_keys(PROMPT, 16, salt=salt)[0] for salt in salts}) == len(salts)


def test_an_engine_with_half_a_version_answers_nobody() -> None:
    llm = started()
    weights = EngineWeights([of_decoder(drawn(3))], llm.engine, llm.upkeep)
    assert isinstance(weights._carrier, InProcess)
    arrivals = weights._carrier.arrivals[0]
    arrivals.expect(1)
    before = likely(llm)
    with pytest.raises(IncompleteVersion):
        take(arrivals, llm.engine, llm.upkeep)
    assert likely(llm) == before, "nothing was written, so the old version answers"
    weights._carrier.bring(1)

    def broken() -> None:
        raise RuntimeError("no more memory")

    with pytest.raises(HalfRenewed, match=r"version 1 .*no more memory"):
        llm.upkeep.renew(1, broken)
    with pytest.raises(InputError, match="broke off"):
        likely(llm)
    weights.update(1)
    assert likely(llm) != before


@pytest.mark.parametrize("by_ranks", [False, True])
def test_who_sleeps_holds_none_of_its_weights_whichever_way_they_came(by_ranks: bool) -> None:
    def came(version: int) -> None:
        if carrier is not None:
            carrier.update(version)
            return
        offered.post(version)
        take_version(version, llm.engine, llm.upkeep)

    llm = started(ranks=TAKING)
    offered = Offered([of_decoder(drawn(3))])
    carrier = None if by_ranks else EngineWeights([of_decoder(drawn(3))], llm.engine, llm.upkeep)
    if by_ranks:
        meet(offered, llm.upkeep)
    for version in (0, 1, 2):
        if version:
            came(version)
        runner = llm.engine.runner
        held = [*runner.forward.decoder.parameters(), *runner.cache._pools]
        memory = [Memory(each) for each in held]
        del held
        llm.upkeep.sleep(level=2)
        assert all(each.is_free for each in memory), version
        llm.upkeep.wake()
    offered.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graphs_answer_with_the_new_weights() -> None:
    new = drawn(3, torch.bfloat16, WIDE).cuda()
    llm, other = (LLM(WIDE, device="cuda", graphs=True, precision="bf16") for _ in range(2))
    before = likely(llm)
    EngineWeights([of_decoder(new)], llm.engine, llm.upkeep).update(1)
    with torch.no_grad():
        theirs = other.engine.runner.forward.decoder.parameters()
        for mine, given in zip(theirs, new.parameters(), strict=True):
            mine.copy_(given)
    other.upkeep.sleep()
    other.upkeep.wake()  # captures anew, with these weights
    assert likely(llm) == likely(other) != before


def test_an_engine_in_fp8_takes_what_a_trainer_has_in_fp32() -> None:
    fp8 = started(weights="fp8", precision="bf16")
    EngineWeights([of_decoder(drawn(3))], fp8.engine, fp8.upkeep).update(1)
    right = started(weights="fp8", precision="bf16")
    EngineWeights([of_decoder(drawn(3, torch.bfloat16))], right.engine, right.upkeep).update(1)
    decoders = [each.engine.runner.forward.decoder for each in (fp8, right)]
    formats = set()
    for mine, theirs in zip(*(each.parameters() for each in decoders), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        formats.add(mine.dtype)
    assert formats == {torch.bfloat16, torch.float8_e4m3fn}
