"""An engine answers with one version of weights, and finds no prefix of another."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="serves a model")

import torch

from meshwright.errors import InputError
from meshwright.policy.serving.block_pool import compute_cache_salt, hash_blocks
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.weight_sync.engine_weights import (
    EngineWeightUpdater,
    commit_to_engine,
)
from meshwright.run.posttrain.weight_sync.in_process_transfer import InProcessTransfer
from meshwright.run.posttrain.weight_sync.weight_buffer import IncompleteVersionError
from meshwright.run.posttrain.weight_sync.weight_receiver import (
    RECEIVING_RANKS,
    connect_in_process,
    receive_version,
)
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender
from meshwright.run.posttrain.weight_sync.weight_tensors import collect_decoder_weights
from meshwright.run.serve.engine.executor.rank_commands import PartialUpdateError
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.model import Model, build_decoder_model
from tests.run.freed import Memory
from tests.run.posttrain.weight_sync.virtual_ranks import DENSE

PROMPT = tuple(range(40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


WIDE = build_decoder_model("wide", layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=256)


def drawn(seed: int, dtype: torch.dtype = torch.float32, model: Model = DENSE) -> Decoder:
    decoder = build_decoder(model, device="meta", dtype=dtype)
    materialize(decoder, torch.device("cpu"), seed=seed)
    return decoder


def started(**given: Any) -> LLM:
    return LLM(DENSE, device="cpu", cuda_graphs=False, **given)


def likely(llm: LLM) -> list[float]:
    """Return how likely the tokens of an answer are, which hangs on every weight."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    return [each.logprob for each in llm.generate([PROMPT], sampling)[0].outputs[0].logprobs]


def test_an_updated_engine_answers_as_one_that_began_with_these_weights() -> None:
    llm, other = started(), started()
    before = likely(llm)
    assert llm.generate([PROMPT], GREEDY)[0].cached_tokens > 0, "a prefix of this version is found"
    weights = EngineWeightUpdater([collect_decoder_weights(drawn(3))], llm.engine, llm.lifecycle)
    assert weights.plan.moved_bytes == 0, "both are in this process"
    weights.update(1)
    first = llm.generate([PROMPT], GREEDY)[0]
    assert (llm.engine.weights_version, first.cached_tokens) == (1, 0)
    with torch.no_grad():
        for mine, theirs in zip(
            other.engine.runner.model.decoder.parameters(), drawn(3).parameters(), strict=True
        ):
            mine.copy_(theirs)
    assert likely(llm) == likely(other) != before
    llm.lifecycle.sleep(level=2)
    llm.lifecycle.wake_up()
    weights.update(2)
    assert likely(llm) == likely(other), "weights are found where they lie after sleep"


def test_prefixes_are_named_by_version_even_where_nothing_is_forgotten() -> None:
    llm = started()
    likely(llm)
    llm.engine.weights_version = 1
    assert llm.generate([PROMPT], GREEDY)[0].cached_tokens == 0
    assert llm.generate([PROMPT], GREEDY)[0].cached_tokens > 0
    names = (None, "", "a", "b", "long" * 16, "long" * 16 + "er")
    salts = [compute_cache_salt(version, adapter) for version in (0, 1, 2) for adapter in names]
    assert len({hash_blocks(PROMPT, 16, salt=salt)[0] for salt in salts}) == len(salts)


def test_an_engine_with_half_a_version_answers_nobody() -> None:
    llm = started()
    weights = EngineWeightUpdater([collect_decoder_weights(drawn(3))], llm.engine, llm.lifecycle)
    assert isinstance(weights._carrier, InProcessTransfer)
    arrivals = weights._carrier.buffers[0]
    arrivals.begin_version(1)
    before = likely(llm)
    with pytest.raises(IncompleteVersionError):
        commit_to_engine(arrivals, llm.engine, llm.lifecycle)
    assert likely(llm) == before, "nothing was written, so the old version answers"
    weights._carrier.transfer(1)

    def broken() -> None:
        raise RuntimeError("no more memory")

    with pytest.raises(PartialUpdateError, match=r"version 1 .*no more memory"):
        llm.lifecycle.update_weights_with(1, broken)
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
        offered.publish(version)
        receive_version(version, llm.engine, llm.lifecycle)

    llm = started(ranks=RECEIVING_RANKS)
    offered = WeightSender([collect_decoder_weights(drawn(3))])
    carrier = (
        None
        if by_ranks
        else EngineWeightUpdater([collect_decoder_weights(drawn(3))], llm.engine, llm.lifecycle)
    )
    if by_ranks:
        connect_in_process(offered, llm.lifecycle)
    for version in (0, 1, 2):
        if version:
            came(version)
        runner = llm.engine.runner
        held = [*runner.model.decoder.parameters(), *runner.kv_cache._pools]
        memory = [Memory(each) for each in held]
        del held
        llm.lifecycle.sleep(level=2)
        assert all(each.is_free for each in memory), version
        llm.lifecycle.wake_up()
    offered.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graphs_answer_with_the_new_weights() -> None:
    new = drawn(3, torch.bfloat16, WIDE).cuda()
    llm, other = (LLM(WIDE, device="cuda", cuda_graphs=True, dtype="bf16") for _ in range(2))
    before = likely(llm)
    EngineWeightUpdater([collect_decoder_weights(new)], llm.engine, llm.lifecycle).update(1)
    with torch.no_grad():
        theirs = other.engine.runner.model.decoder.parameters()
        for mine, given in zip(theirs, new.parameters(), strict=True):
            mine.copy_(given)
    other.lifecycle.sleep()
    other.lifecycle.wake_up()  # captures anew, with these weights
    assert likely(llm) == likely(other) != before


def test_an_engine_in_fp8_takes_what_a_trainer_has_in_fp32() -> None:
    fp8 = started(quantization="fp8", dtype="bf16")
    EngineWeightUpdater([collect_decoder_weights(drawn(3))], fp8.engine, fp8.lifecycle).update(1)
    right = started(quantization="fp8", dtype="bf16")
    EngineWeightUpdater(
        [collect_decoder_weights(drawn(3, torch.bfloat16))], right.engine, right.lifecycle
    ).update(1)
    decoders = [each.engine.runner.model.decoder for each in (fp8, right)]
    formats = set()
    for mine, theirs in zip(*(each.parameters() for each in decoders), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        formats.add(mine.dtype)
    assert formats == {torch.bfloat16, torch.float8_e4m3fn}
