"""A decoder gives the logits of transformers, and its loss is that of its logits.

Families and their checkpoints are the matter of `huggingface`; here stand the two shapes whose
kernels are fused most, and what holds for all.
"""

from typing import Any

import pytest

pytest.importorskip("torch", reason="modules are torch's")

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    Model,
    MoESpec,
    MtpSpec,
    NormSpec,
    Rotary,
    build_decoder_model,
)

VOCAB, LENGTH = 97, 21


def made(
    model: Model, options: BuildOptions | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Build with weights large enough that everything matters."""
    built = build_decoder(model, dtype=dtype, options=options or BuildOptions())
    materialize(built, "cpu", seed=1)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            torch.manual_seed(len(name))
            weight.mul_(4).add_(0.1 * torch.randn_like(weight))
    return built


def model(**changes: Any) -> Model:
    made = build_decoder_model("m", layers=2, hidden=32, heads=4, kv_heads=2, ffn=40, vocab=VOCAB)
    return msgspec.structs.replace(made, **changes)


def with_attention(**changes: Any) -> Model:
    plain = model()
    block = plain.blocks[0]
    assert block.mixer is not None
    mixer = msgspec.structs.replace(block.mixer, **changes)
    return msgspec.structs.replace(plain, blocks=(msgspec.structs.replace(block, mixer=mixer),))


def tokens(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, VOCAB, (2, LENGTH))


def theirs(reference: Any, ours: Decoder) -> Any:
    """Give a Llama or Qwen3 of transformers our weights."""
    names = {"norm_mixer": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
    names |= {"mixer.": "self_attn.", "self_attn.o.": "self_attn.o_proj.", "down.": "down_proj."}
    weights: dict[str, Tensor] = {"model.embed_tokens.weight": ours.embedding.weight}
    weights["model.norm.weight"] = ours.get_parameter("final_norm.weight")
    weights["lm_head.weight"] = ours.head_weight
    for name, weight in ours.layers.named_parameters(prefix="model.layers"):
        for our, their in names.items():
            name = name.replace(our, their)  # noqa: PLW2901
        sizes = {"qkv": ([32, 16, 16], "qkv"), "gate_up": ([40, 40], ("gate", "up"))}
        fused = next((key for key in sizes if f".{key}." in name), None)
        if fused is None:
            weights[name] = weight
            continue
        for part, piece in zip(sizes[fused][1], torch.split(weight, sizes[fused][0]), strict=True):
            weights[name.replace(fused, f"{part}_proj")] = piece
    reference.load_state_dict(weights)
    return reference.eval()


CONFIG = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_logits_and_gradients_equal_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    ours = made(with_attention(qk_norm="head" if name == "Qwen3" else "none"))
    config = getattr(transformers, f"{name}Config")(**CONFIG)
    reference = theirs(getattr(transformers, f"{name}ForCausalLM")(config), ours)
    x, y = tokens(), tokens(1)
    expected = reference(x).logits
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-4)
    torch.autograd.backward(ours.loss(x, y).total)
    nats = functional.cross_entropy(expected.flatten(0, 1), y.flatten(), reduction="sum")
    torch.autograd.backward(nats)
    grad = reference.model.embed_tokens.weight.grad
    found = ours.embedding.weight.grad
    assert found is not None
    assert (found - grad).norm() < 1e-5 * grad.norm()


SHAPES: dict[str, Model] = {
    "llama": model(),
    "softcapped": model(logit_softcap=3.0, logit_scale=0.5, embedding_scale=2.0),
    "tied": model(tied=True, head_bias=True),
    "learned": model(positions="learned", max_positions=40, position_offset=2),
    "embedding norm": model(embedding_norm=True, final_norm=False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_loss_is_the_cross_entropy_of_the_logits(name: str) -> None:
    ours = made(SHAPES[name])
    x, y = tokens(), tokens(1)
    y[0, :5] = IGNORE_INDEX
    found = ours.loss(x, y)
    expected = functional.cross_entropy(ours(x).flatten(0, 1), y.flatten(), reduction="sum")
    torch.testing.assert_close(found.loss_sum, expected)
    assert found.count.item() == 2 * LENGTH - 5
    assert found.auxiliary_loss.item() == 0


MIXED: dict[str, Model] = {
    "rotary": model(),
    "window and sinks": with_attention(window=4, sinks=True),
    "chunk": with_attention(chunk=4, qk_norm="l2"),
    "alibi": msgspec.structs.replace(with_attention(rotary=None), positions="alibi"),
    "learned": msgspec.structs.replace(
        with_attention(rotary=None), positions="learned", max_positions=LENGTH
    ),
    "gated": with_attention(gate=True, qk_norm="head", rotary=Rotary(fraction=0.5)),
    "clipped": with_attention(clip=0.5, qk_norm="full", softcap=2.0, scale=0.3),
}


@pytest.mark.parametrize("name", MIXED)
def test_packed_documents_equal_each_alone(name: str) -> None:
    ours = made(MIXED[name], dtype=torch.float64)
    x = tokens()
    lengths = [[6, LENGTH - 6], [LENGTH]]
    packed = ours(x, documents=PackedSequences.from_lengths(lengths))
    torch.testing.assert_close(packed[0, :6], ours(x[:1, :6])[0])
    torch.testing.assert_close(packed[0, 6:], ours(x[:1, 6:])[0])
    torch.testing.assert_close(packed[1], ours(x[1:])[0])


@pytest.mark.parametrize("name", MIXED)
def test_a_token_sees_nothing_after_it(name: str) -> None:
    ours = made(MIXED[name], dtype=torch.float64)
    x = tokens()
    changed = x.clone()
    changed[:, 12:] = tokens(5)[:, 12:]
    torch.testing.assert_close(ours(x)[:, :12], ours(changed)[:, :12])
    assert not torch.allclose(ours(x)[:, 12:], ours(changed)[:, 12:])


def test_given_positions_are_those_the_tokens_stand_at() -> None:
    ours = made(model())
    x = tokens()[:, :8]
    counted = torch.arange(8).expand(2, 8)
    torch.testing.assert_close(ours(x, positions=counted), ours(x))
    # Rotary positions are relative: only distances count.
    assert not torch.allclose(ours(x, positions=counted.flip(1)), ours(x))


@pytest.mark.parametrize("place", ["pre", "post", "sandwich", "parallel", "parallel-shared"])
@pytest.mark.parametrize("norm", [NormSpec(), NormSpec(kind="layer", bias=True)])
def test_norms_stand_where_the_block_says(place: Any, norm: NormSpec) -> None:
    block = msgspec.structs.replace(model().blocks[0], norms=place)
    ours = made(model(blocks=(block,), norm=norm))
    layer: Any = ours.layers[0]
    x = torch.randn(2, 5, 32)
    places = _places(ours, x)

    def mix(y: Tensor) -> Tensor:
        return layer.mixer(y, places)  # type: ignore[no-any-return]

    if place == "pre":
        middle = x + mix(layer.norm_mixer(x))
        expected = middle + layer.mlp(layer.norm_mlp(middle))
    elif place == "post":
        middle = x + layer.norm_mixer_after(mix(x))
        expected = middle + layer.norm_mlp_after(layer.mlp(middle))
    elif place == "sandwich":
        middle = x + layer.norm_mixer_after(mix(layer.norm_mixer(x)))
        expected = middle + layer.norm_mlp_after(layer.mlp(layer.norm_mlp(middle)))
    else:
        second = layer.norm_mlp if place == "parallel" else layer.norm_mixer
        expected = x + mix(layer.norm_mixer(x)) + layer.mlp(second(x))
    branch, residual = layer(x, None, places)
    torch.testing.assert_close(branch + residual, expected)


def _places(ours: Decoder, x: Tensor) -> Any:
    from meshwright.run.nn.positions import PositionInfo

    return PositionInfo(ours.position_tables, torch.zeros(x.shape[:2], dtype=torch.long))


def test_layers_may_have_one_part_only() -> None:
    mixer = model().blocks[0].mixer
    blocks = (BlockSpec(name="a", mixer=mixer), BlockSpec(name="b", mlp=MLPSpec(width=8)))
    ours = made(model(blocks=blocks, pattern="2*(a b)"))
    assert ours(tokens()).shape == (2, LENGTH, VOCAB)


class TestMultiToken:
    two = model(multi_token=MtpSpec(depth=2, block="dense"))

    def test_further_heads_predict_from_what_came_before_and_the_tokens_between(self) -> None:
        ours = made(self.two, BuildOptions(mtp_loss_scaling_factor=0.3))
        x, y = tokens(), tokens(1)
        places = _places(ours, x)
        hidden = ours.compute_hidden_states(x)
        expected = torch.zeros(())
        for steps, head in enumerate(ours.multi_token, start=1):
            hidden = head(hidden, ours.embed(x.roll(-steps, 1), places), places)
            kept = LENGTH - steps
            logits = ours.logits(hidden)[:, :kept]
            labels = y[:, steps:]
            expected += functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
        found = ours.loss(x, y)
        torch.testing.assert_close(found.auxiliary_loss, 0.3 * expected / 2)
        assert found.total.item() == pytest.approx((found.loss_sum + found.auxiliary_loss).item())

    def test_no_head_predicts_across_documents(self) -> None:
        ours = made(self.two)
        x, y = tokens()[:1], tokens(1)[:1]
        documents = PackedSequences.from_lengths([[9, LENGTH - 9]])
        packed = ours.loss(x, y, documents=documents).auxiliary_loss
        alone = (
            ours.loss(x[:, :9], y[:, :9]).auxiliary_loss
            + ours.loss(x[:, 9:], y[:, 9:]).auxiliary_loss
        )
        torch.testing.assert_close(packed, alone)


def test_balance_is_part_of_the_loss_when_asked_for() -> None:
    block = BlockSpec(
        name="moe",
        mixer=AttentionSpec(heads=4, kv_heads=2, head_dim=8, rotary=Rotary()),
        mlp=MoESpec(count=8, top_k=2, width=8),
    )
    sparse = model(blocks=(block,), pattern="2*moe")
    x, y = tokens(), tokens(1)
    assert made(sparse).loss(x, y).auxiliary_loss.item() == 0
    ours = made(sparse, BuildOptions(moe_aux_loss_coeff=0.01))
    found = ours.loss(x, y)
    # At least one for each layer, which is reached when all experts are used equally.
    assert found.auxiliary_loss.item() >= 0.01 * 2 * x.numel() * 0.99
    torch.autograd.backward(found.auxiliary_loss)
    assert all(part.router.weight.grad is not None for part in ours.iter_moe_layers())


ON_GPU: dict[str, Model] = {
    "llama": model(hidden=256),
    "qwen3": msgspec.structs.replace(with_attention(qk_norm="head"), hidden=256),
    "window and sinks": msgspec.structs.replace(with_attention(window=64, sinks=True), hidden=256),
    "softcap": msgspec.structs.replace(with_attention(softcap=20.0), hidden=256),
    "chunk": msgspec.structs.replace(with_attention(chunk=128, qk_norm="l2"), hidden=256),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_in_bf16_agrees_with_the_processor_in_fp32(name: str, packed: bool) -> None:
    block = ON_GPU[name].blocks[0]
    assert isinstance(block.mixer, AttentionSpec)
    wide = msgspec.structs.replace(block, mixer=msgspec.structs.replace(block.mixer, head_dim=64))
    wide_model = msgspec.structs.replace(ON_GPU[name], blocks=(wide,))
    torch.manual_seed(0)
    x, y = torch.randint(0, VOCAB, (2, 256)), torch.randint(0, VOCAB, (2, 256))
    lengths = [[100, 156], [256]]
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        ours = build_decoder(wide_model, dtype=dtype)
        materialize(ours, device)
        documents = PackedSequences.from_lengths(lengths, device) if packed else None
        loss = ours.loss(x.to(device), y.to(device), documents=documents)
        torch.autograd.backward(loss.total)
        grad = ours.get_parameter("layers.0.mixer.qkv.weight").grad
        assert grad is not None
        results.append((loss.loss_sum.detach().cpu(), grad.float().cpu()))
    (nats, grad), (gpu_nats, gpu_grad) = results
    torch.testing.assert_close(gpu_nats, nats, rtol=2e-3, atol=0)
    assert (gpu_grad - grad).norm() < 0.05 * grad.norm()
