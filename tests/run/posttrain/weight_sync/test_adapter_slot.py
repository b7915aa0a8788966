"""An engine that takes versions of an adapter says of tokens what the trainer says of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="serves a model")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.posttrain.lora import DecoderAdapter, LoRAConfig, attach_adapter
from meshwright.run.posttrain.lora.decoder_adapter import find_adaptable_modules
from meshwright.run.posttrain.objectives.decoder_logprobs import compute_decoder_logprobs
from meshwright.run.posttrain.weight_sync.adapter_slot import collect_adapter_weights
from meshwright.run.posttrain.weight_sync.engine_weights import EngineWeightUpdater
from meshwright.run.posttrain.weight_sync.weight_receiver import (
    RECEIVING_RANKS,
    connect_in_process,
    receive_version,
)
from meshwright.run.posttrain.weight_sync.weight_sender import FROZEN, WeightSender
from meshwright.run.posttrain.weight_sync.weight_tensors import collect_decoder_weights
from meshwright.run.serve.engine.engine_config import EngineConfig, LoRASlotConfig
from meshwright.run.serve.engine.executor.multiproc_executor import SERVING_RANKS, RankEntryPoint
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.model.peft_checkpoint import strip_module_prefix
from meshwright.run.serve.sampling_params import SamplingParams
from tests.run.posttrain.lora.models import ours, stir

PROMPT = tuple(range(1, 20))
KINDS = {
    "lora": LoRAConfig(rank=4, alpha=8),
    "dora": LoRAConfig(rank=4, dora=True),
    "few": LoRAConfig(rank=2, rslora=True, target_modules=("q_proj", "v_proj")),
}


def engine_for(
    decoder: Decoder,
    lora: LoRAConfig,
    *,
    shares: bool = True,
    ranks: RankEntryPoint = SERVING_RANKS,
) -> LLM:
    """Start an engine with room for an adapter, which has the decoder's weights or drawn ones."""
    chosen = tuple(
        strip_module_prefix(each)
        for each in find_adaptable_modules(decoder)
        if lora.targets_module(each)
    )
    room = LoRASlotConfig(max_rank=lora.rank, dora=lora.dora, target_modules=chosen)
    settings = EngineConfig(device="cpu", cuda_graphs=False, trained_lora_slot=room)
    lent = dict(decoder.named_parameters()) if shares else None
    return LLM(decoder.model, settings, ranks=ranks, lent=lent)


def drawn(llm: LLM, count: int = 8) -> Iterator[tuple[int, float]]:
    """Yield the likeliest tokens after a prompt, with what the engine says of each."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count, logprobs=1)
    (answer,) = llm.generate([PROMPT], sampling)
    for each in answer.outputs[0].logprobs:
        yield each.token_id, each.logprob


def gap(llm: LLM, decoder: Decoder) -> float:
    """Return how far engine and trainer are apart in what they say of tokens."""
    tokens, said = zip(*drawn(llm), strict=True)
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        found, _ = compute_decoder_logprobs(
            decoder, decoder.compute_hidden_states(ids[:, :-1]), ids[:, 1:]
        )
    mine = found[0, len(PROMPT) - 1 :]
    return float((mine - torch.tensor(said)).abs().max())


def trained(
    tmp_path: Path, lora: LoRAConfig, family: str = "llama"
) -> tuple[Decoder, DecoderAdapter]:
    decoder = ours(tmp_path, family).eval()
    return decoder, attach_adapter(decoder, lora)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_trainer_say_the_same_of_tokens(kind: str, tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS[kind])
    llm = engine_for(decoder, KINDS[kind])
    weights = EngineWeightUpdater(
        [collect_adapter_weights(adapter)], llm.engine, llm.lifecycle, adapter=adapter.config
    )
    before = list(drawn(llm))
    for version in (1, 2):
        stir(adapter, seed=version)
        weights.update(version)
        assert gap(llm, decoder) <= 1e-5
        assert list(drawn(llm)) != before, "it does something"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_latent_and_recurrent_layers_say_the_same_too(family: str, tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, LoRAConfig(rank=2), family)
    llm = engine_for(decoder, adapter.config)
    weights = EngineWeightUpdater(
        [collect_adapter_weights(adapter)], llm.engine, llm.lifecycle, adapter=adapter.config
    )
    stir(adapter)
    weights.update(1)
    assert gap(llm, decoder) <= 1e-5


def test_a_version_is_as_many_bytes_as_the_adapter_and_prefixes_of_others_are_not_found(
    tmp_path: Path,
) -> None:
    decoder, adapter = trained(tmp_path, KINDS["lora"])
    llm = engine_for(decoder, KINDS["lora"])
    weights = EngineWeightUpdater(
        [collect_adapter_weights(adapter)], llm.engine, llm.lifecycle, adapter=adapter.config
    )
    numbers = sum(each.numel() for each in adapter.parameters())
    assert sum(each.size_bytes for each in weights.plan.slices) == 4 * numbers
    assert {each.tensor_name for each in weights.plan.slices} == set(
        dict(adapter.named_parameters())
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    for version, found in ((None, False), (None, True), (1, False), (None, True)):
        if version is not None:
            weights.update(version)
        assert (llm.generate([PROMPT], greedy)[0].cached_tokens > 0) == found


def test_the_engine_uses_the_trainers_weights_where_they_lie(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["lora"])
    llm = engine_for(decoder, adapter.config)
    served = dict(llm.engine.runner.model.decoder.named_parameters())
    for name, each in decoder.named_parameters():
        assert each.data_ptr() == served[name].data_ptr()
    llm.lifecycle.sleep(level=0)
    assert llm.engine.is_sleeping
    assert all(each.numel() for each in served.values()), "weights stay, the cache does not"
    llm.lifecycle.wake_up()
    assert not llm.engine.is_sleeping


def test_whatever_an_engine_is_told_the_trainers_weights_stay(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["lora"])
    llm = engine_for(decoder, adapter.config)
    lent = {name: each.detach().clone() for name, each in decoder.named_parameters()}
    save_hf_checkpoint(
        engine_for(decoder, adapter.config, shares=False).engine.runner.model.decoder,
        tmp_path / "others",
    )
    with pytest.raises(InputError, match="level: 2 gives weights up, which are lent"):
        llm.lifecycle.sleep(level=2)
    with pytest.raises(InputError, match="its weights are lent"):
        llm.lifecycle.update_weights(str(tmp_path / "others"))
    assert all(torch.equal(each, lent[name]) for name, each in decoder.named_parameters())
    assert gap(llm, decoder) < 1e-5, "and the engine answers with them"


def test_layers_that_it_leaves_alone_are_plain_ones(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["few"])
    llm = engine_for(decoder, adapter.config)
    served = llm.engine.runner.model.decoder.layers[0]
    linear = {name: one for name, one in served.named_modules() if isinstance(one, Linear)}
    assert {name for name, one in linear.items() if one.tp_overlap is not None} == {"mixer.qkv"}


def test_engines_elsewhere_get_the_frozen_weights_once(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["dora"])
    llm = engine_for(decoder, adapter.config, shares=False, ranks=RECEIVING_RANKS)
    frozen = collect_decoder_weights(decoder)
    offered = WeightSender(
        [collect_adapter_weights(adapter)], frozen_shards=frozen, lora_config=adapter.config
    )
    connect_in_process(offered, llm.lifecycle)
    for version in (1, 2):
        stir(adapter, seed=version)
        offered.publish(version)
        receive_version(version, llm.engine, llm.lifecycle)
        offered.release_old_versions()
        assert gap(llm, decoder) <= 1e-5
        there = sorted(path.name for path in offered.folder.iterdir())
        assert there == [FROZEN, f"version-{version}"]
    assert offered.plan is not None
    named = {each.tensor_name for each in offered.plan.slices}
    assert not named & set(frozen), "versions are the adapter's alone"
    # Who let go of them in sleep takes them again with its next version.
    llm.lifecycle.sleep(level=2)
    llm.lifecycle.wake_up()
    offered.publish(3)
    receive_version(3, llm.engine, llm.lifecycle)
    assert gap(llm, decoder) <= 1e-5
    offered.close()


def test_an_engine_without_room_for_an_adapter_says_so(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["lora"])
    llm = LLM(decoder.model, device="cpu", cuda_graphs=False)
    with pytest.raises(InputError, match="no room for an adapter in training"):
        EngineWeightUpdater(
            [collect_adapter_weights(adapter)], llm.engine, llm.lifecycle, adapter=adapter.config
        )
