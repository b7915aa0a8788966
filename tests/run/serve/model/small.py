"""Small decoders with random weights, of each kind that keeps something between steps."""

import msgspec
import torch

from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.initialise import materialise
from meshwright.spec.model import Attention, Block, LatentAttention, Mamba2, Mlp, Model, Rotary
from meshwright.spec.model.mixers import Mixer
from meshwright.spec.model.positions import Temperature

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_MLP = Mlp(width=24)
_PLAIN = Attention(heads=4, kv_heads=2, head_dim=8, rotary=Rotary())


def made(model: Model, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build with weights large enough that everything matters."""
    decoder = build(model, dtype=dtype)
    materialise(decoder, DEVICE, seed=1)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            torch.manual_seed(len(name))
            weight.mul_(4).add_(0.1 * torch.randn(weight.shape, dtype=dtype).to(DEVICE))
    return decoder.eval()


def _model(pattern: str, **mixers: Mixer) -> Model:
    blocks = tuple(Block(name=name, mixer=mixer, mlp=_MLP) for name, mixer in mixers.items())
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
    near = Attention(heads=4, kv_heads=1, head_dim=8, rotary=Rotary(), chunk=6, qk_norm="l2")
    far = Attention(heads=4, kv_heads=1, head_dim=8, temperature=Temperature(floor=4, scale=0.3))
    return made(_model("2*(near far)", near=near, far=far))


def latent() -> Decoder:
    """Return one with latent attention."""
    mixer = LatentAttention(
        heads=4, kv_rank=12, nope_dim=8, rope_dim=4, value_dim=6, rotary=Rotary()
    )
    return made(_model("2*latent", latent=mixer))


def hybrid() -> Decoder:
    """Return one with recurrent layers beside attention."""
    mixer = Mamba2(heads=4, head_dim=8, state_dim=6, groups=2)
    return made(_model("scan plain scan", scan=mixer, plain=_PLAIN))
