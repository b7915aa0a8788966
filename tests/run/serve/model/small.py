"""Small decoders with random weights, of each kind that keeps something between steps."""

import msgspec
import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    Model,
    Rotary,
)
from meshwright.spec.model.rotary import AttentionTemperature
from meshwright.spec.model.token_mixers import Mixer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_MLP = MLPSpec(width=24)
_PLAIN = AttentionSpec(heads=4, kv_heads=2, head_dim=8, rotary=Rotary())


def made(model: Model, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build with weights large enough that everything matters."""
    decoder = build_decoder(model, dtype=dtype)
    materialize(decoder, DEVICE, seed=1)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            torch.manual_seed(len(name))
            weight.mul_(4).add_(0.1 * torch.randn(weight.shape, dtype=dtype).to(DEVICE))
    return decoder.eval()


def _model(pattern: str, **mixers: Mixer) -> Model:
    blocks = tuple(BlockSpec(name=name, mixer=mixer, mlp=_MLP) for name, mixer in mixers.items())
    return Model(
        name="small", hidden=32, vocab=61, blocks=blocks, pattern=pattern, max_positions=64
    )


def small(dtype: torch.dtype = torch.float32) -> Decoder:
    """Return a decoder like Llama."""
    return made(_model("2*plain", plain=_PLAIN), dtype)


def capped() -> Decoder:
    """Return one whose logits are scaled and capped."""
    model = _model("plain", plain=_PLAIN)
    return made(msgspec.structs.replace(model, logit_scale=0.5, logit_softcap=3.0))


def chunked() -> Decoder:
    """Return one like Llama 4: chunks with rotary, and far layers whose queries grow."""
    near = AttentionSpec(heads=4, kv_heads=1, head_dim=8, rotary=Rotary(), chunk=6, qk_norm="l2")
    far = AttentionSpec(
        heads=4, kv_heads=1, head_dim=8, temperature=AttentionTemperature(floor=4, scale=0.3)
    )
    return made(_model("2*(near far)", near=near, far=far))


def latent() -> Decoder:
    """Return one with latent attention."""
    mixer = LatentAttentionSpec(
        heads=4, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=6, rotary=Rotary()
    )
    return made(_model("2*latent", latent=mixer))


def hybrid() -> Decoder:
    """Return one with recurrent layers beside attention."""
    mixer = Mamba2Spec(heads=4, head_dim=8, state_dim=6, groups=2)
    return made(_model("scan plain scan", scan=mixer, plain=_PLAIN))
