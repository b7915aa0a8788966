"""An engine that takes versions of an adapter says of tokens what the trainer says of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="serves a model")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import save
from meshwright.run.nn.linear import Linear
from meshwright.run.posttrain.adapters import DecoderAdapter, Lora, adapt
from meshwright.run.posttrain.adapters.adapter import modules_of
from meshwright.run.posttrain.objectives.decoded import decoder_logprobs
from meshwright.run.posttrain.weights.adapter_slot import of_adapter
from meshwright.run.posttrain.weights.offered import FROZEN, Offered
from meshwright.run.posttrain.weights.serving import EngineWeights
from meshwright.run.posttrain.weights.taking import TAKING, meet, take_version
from meshwright.run.posttrain.weights.tensors import of_decoder
from meshwright.run.serve.asked import Sampling
from meshwright.run.serve.engine.ranks import SERVED, Ranks
from meshwright.run.serve.engine.settings import AdapterRoom, EngineSettings
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.model.peft_folder import short_name
from tests.run.posttrain.adapters.models import ours, stir

PROMPT = tuple(range(1, 20))
KINDS = {
    "lora": Lora(rank=4, alpha=8),
    "dora": Lora(rank=4, dora=True),
    "few": Lora(rank=2, rslora=True, targets=("q_proj", "v_proj")),
}


def engine_for(decoder: Decoder, lora: Lora, *, shares: bool = True, ranks: Ranks = SERVED) -> LLM:
    """Start an engine with room for an adapter, which has the decoder's weights or drawn ones."""
    chosen = tuple(short_name(each) for each in modules_of(decoder) if lora.chooses(each))
    room = AdapterRoom(rank=lora.rank, dora=lora.dora, modules=chosen)
    settings = EngineSettings(device="cpu", graphs=False, own_adapter=room)
    lent = dict(decoder.named_parameters()) if shares else None
    return LLM(decoder.model, settings, ranks=ranks, lent=lent)


def drawn(llm: LLM, count: int = 8) -> Iterator[tuple[int, float]]:
    """Yield the likeliest tokens after a prompt, with what the engine says of each."""
    sampling = Sampling(temperature=0.0, max_tokens=count, logprobs=1)
    (answer,) = llm.generate([PROMPT], sampling)
    for each in answer.choices[0].logprobs:
        yield each.token, each.logprob


def gap(llm: LLM, decoder: Decoder) -> float:
    """Return how far engine and trainer are apart in what they say of tokens."""
    tokens, said = zip(*drawn(llm), strict=True)
    ids = torch.tensor([[*PROMPT, *tokens]])
    with torch.no_grad():
        found, _ = decoder_logprobs(decoder, decoder.hidden(ids[:, :-1]), ids[:, 1:])
    mine = found[0, len(PROMPT) - 1 :]
    return float((mine - torch.tensor(said)).abs().max())


def trained(tmp_path: Path, lora: Lora, family: str = "llama") -> tuple[Decoder, DecoderAdapter]:
    decoder = ours(tmp_path, family).eval()
    return decoder, adapt(decoder, lora)


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_trainer_say_the_same_of_tokens(kind: str, tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS[kind])
    llm = engine_for(decoder, KINDS[kind])
    weights = EngineWeights([of_adapter(adapter)], llm.engine, llm.upkeep, adapter=adapter.settings)
    before = list(drawn(llm))
    for version in (1, 2):
        stir(adapter, seed=version)
        weights.update(version)
        assert gap(llm, decoder) <= 1e-5
        assert list(drawn(llm)) != before, "it does something"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_latent_and_recurrent_layers_say_the_same_too(family: str, tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, Lora(rank=2), family)
    llm = engine_for(decoder, adapter.settings)
    weights = EngineWeights([of_adapter(adapter)], llm.engine, llm.upkeep, adapter=adapter.settings)
    stir(adapter)
    weights.update(1)
    assert gap(llm, decoder) <= 1e-5


def test_a_version_is_as_many_bytes_as_the_adapter_and_prefixes_of_others_are_not_found(
    tmp_path: Path,
) -> None:
    decoder, adapter = trained(tmp_path, KINDS["lora"])
    llm = engine_for(decoder, KINDS["lora"])
    weights = EngineWeights([of_adapter(adapter)], llm.engine, llm.upkeep, adapter=adapter.settings)
    numbers = sum(each.numel() for each in adapter.parameters())
    assert sum(each.bytes for each in weights.plan.slices) == 4 * numbers
    assert {each.tensor for each in weights.plan.slices} == set(dict(adapter.named_parameters()))
    greedy = Sampling(temperature=0.0, max_tokens=2)
    for version, found in ((None, False), (None, True), (1, False), (None, True)):
        if version is not None:
            weights.update(version)
        assert (llm.generate([PROMPT], greedy)[0].cached_tokens > 0) == found


def test_the_engine_uses_the_trainers_weights_where_they_lie(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["lora"])
    llm = engine_for(decoder, adapter.settings)
    served = dict(llm.engine.runner.forward.decoder.named_parameters())
    for name, each in decoder.named_parameters():
        assert each.data_ptr() == served[name].data_ptr()
    llm.upkeep.sleep(level=0)
    assert llm.engine.asleep
    assert all(each.numel() for each in served.values()), "weights stay, the cache does not"
    llm.upkeep.wake()
    assert not llm.engine.asleep


def test_whatever_an_engine_is_told_the_trainers_weights_stay(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["lora"])
    llm = engine_for(decoder, adapter.settings)
    lent = {name: each.detach().clone() for name, each in decoder.named_parameters()}
    save(engine_for(decoder, adapter.settings, shares=False).engine.runner.forward.decoder,
         tmp_path / "others")  # fmt: skip
    with pytest.raises(InputError, match="level: 2 gives weights up, which are lent"):
        llm.upkeep.sleep(level=2)
    with pytest.raises(InputError, match="its weights are lent"):
        llm.upkeep.update_weights(str(tmp_path / "others"))
    assert all(torch.equal(each, lent[name]) for name, each in decoder.named_parameters())
    assert gap(llm, decoder) < 1e-5, "and the engine answers with them"


def test_layers_that_it_leaves_alone_are_plain_ones(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["few"])
    llm = engine_for(decoder, adapter.settings)
    served = llm.engine.runner.forward.decoder.layers[0]
    linear = {name: one for name, one in served.named_modules() if isinstance(one, Linear)}
    assert {name for name, one in linear.items() if one.across is not None} == {"mixer.qkv"}


def test_engines_elsewhere_get_the_frozen_weights_once(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["dora"])
    llm = engine_for(decoder, adapter.settings, shares=False, ranks=TAKING)
    frozen = of_decoder(decoder)
    offered = Offered([of_adapter(adapter)], frozen=frozen, adapter=adapter.settings)
    meet(offered, llm.upkeep)
    for version in (1, 2):
        stir(adapter, seed=version)
        offered.post(version)
        take_version(version, llm.engine, llm.upkeep)
        offered.settle()
        assert gap(llm, decoder) <= 1e-5
        there = sorted(path.name for path in offered.folder.iterdir())
        assert there == [FROZEN, f"version-{version}"]
    assert offered.plan is not None
    named = {each.tensor for each in offered.plan.slices}
    assert not named & set(frozen), "versions are the adapter's alone"
    # Who let go of them in sleep takes them again with its next version.
    llm.upkeep.sleep(level=2)
    llm.upkeep.wake()
    offered.post(3)
    take_version(3, llm.engine, llm.upkeep)
    assert gap(llm, decoder) <= 1e-5
    offered.close()


def test_an_engine_without_room_for_an_adapter_says_so(tmp_path: Path) -> None:
    decoder, adapter = trained(tmp_path, KINDS["lora"])
    llm = LLM(decoder.model, device="cpu", graphs=False)
    with pytest.raises(InputError, match="no room for an adapter in training"):
        EngineWeights([of_adapter(adapter)], llm.engine, llm.upkeep, adapter=adapter.settings)
