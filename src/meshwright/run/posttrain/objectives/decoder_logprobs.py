"""How likely words are after a decoder's hidden vectors, whether or not ranks share its head."""

from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.parallel.tensor_parallel.vocab_parallel import VocabParallel
from meshwright.run.posttrain.objectives.token_logprobs import TokenLogprobs, compute_token_logprobs
from meshwright.run.posttrain.objectives.vocab_parallel_logprobs import (
    compute_vocab_parallel_logprobs,
)


def compute_decoder_logprobs(
    decoder: Decoder,
    x_BTD: Tensor,
    words_BT: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log p of one word for each of a decoder's hidden vectors, and entropies, [B, T].

    `words_BT` are what follows each token, `IGNORED` where that is not asked for. Where ranks share
    the words of the head, all of them have all hidden vectors, and entropies have no gradients.
    """
    model, shared, words_NK = decoder.model, decoder.head.vocab_parallel, words_BT.reshape(-1, 1)
    if isinstance(shared, VocabParallel) and (temperature != 1 or chunk_bytes is not None):
        what = "the rows of the output head are split between ranks"
        fix = "use temperature 1 and no chunk_bytes"
        raise InputError([Problem("compute_decoder_logprobs", what, fix)])

    def read() -> TokenLogprobs:
        x_ND, weight, bias = x_BTD.flatten(0, 1), decoder.head_weight, decoder.head.bias
        if isinstance(shared, VocabParallel):
            return compute_vocab_parallel_logprobs(
                shared, x_ND, weight, bias, words_NK,
                softcap=model.logit_softcap, scale=model.logit_scale, entropy=entropy,
            )  # fmt: skip
        return compute_token_logprobs(
            x_ND, weight, words_NK, bias=bias,
            softcap=model.logit_softcap, scale=model.logit_scale, temperature=temperature,
            entropy=entropy, chunk_bytes=chunk_bytes, gemm=decoder.head.gemm,
        )  # fmt: skip

    found = decoder.with_head_weight(read)
    spread = None if found.entropy is None else found.entropy.view(words_BT.shape)
    return found.logprobs.view(words_BT.shape), spread
