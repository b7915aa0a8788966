"""Every kernel agrees with attention written out, and the choice between them says why."""

from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from meshwright.errors import InputError
from meshwright.run.kernels.attention.flex import AttentionMaskRule, make_block_mask
from meshwright.run.kernels.attention.fused_attention import (
    FusedAttentionArgs,
    fused_attention,
    fused_forward,
)
from meshwright.run.kernels.attention.sdpa import (
    AttentionBackend,
    AttentionCase,
    PackedSequences,
    attention,
    attention_reference,
    make_attention_case,
    select_attention_backend,
)

B, T, H, K, E = 2, 24, 4, 2, 16
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(
    *, length: int = T, dtype: torch.dtype = torch.float64, value_dim: int = E, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Make q, k and v as strided views of one product's output, as a decoder has them."""
    torch.manual_seed(seed)
    fused = torch.randn(B, length, H * E + K * (E + value_dim), dtype=dtype)
    q, k, v = torch.split(fused, [H * E, K * E, K * value_dim], -1)
    shape = (B, length, -1)
    return q.view(*shape, E), k.view(*shape, E), v.view(*shape, value_dim)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Any, sink: Tensor | None = None) -> Tensor:
    """Attend token by token and head by head; `seen(b, t, s)` says what is visible."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    shared = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            near = [s for s in range(q.shape[1]) if seen(b, t, s)]
            for h in range(q.shape[2]):
                scores = k[b, near, h // shared] @ q[b, t, h] * E**-0.5
                extra = torch.empty(0, dtype=q.dtype) if sink is None else sink[h : h + 1]
                shares = torch.cat((scores, extra)).softmax(0)[: len(near)]
                out[b, t, h] = shares @ v[b, near, h // shared]
    return out


class TestPlain:
    def test_it_weighs_the_past_by_the_softmax_of_scaled_scores(self) -> None:
        q, k, v = inputs(length=7)
        expected = by_hand(q, k, v, lambda _, t, s: s <= t)
        torch.testing.assert_close(attention_reference(q, k, v), expected)

    def test_a_window_shows_that_many_positions_with_the_own_one(self) -> None:
        q, k, v = inputs(length=9)
        expected = by_hand(q, k, v, lambda _, t, s: t - 3 < s <= t)
        torch.testing.assert_close(attention_reference(q, k, v, window=3), expected)

    def test_a_window_without_cause_shows_both_sides(self) -> None:
        q, k, v = inputs(length=9)
        expected = by_hand(q, k, v, lambda _, t, s: abs(t - s) < 3)
        torch.testing.assert_close(attention_reference(q, k, v, window=3, causal=False), expected)

    def test_a_sink_takes_its_share_and_gives_nothing(self) -> None:
        q, k, v = inputs(length=7)
        sinks = torch.randn(H, dtype=q.dtype)
        expected = by_hand(q, k, v, lambda _, t, s: s <= t, sinks)
        torch.testing.assert_close(attention_reference(q, k, v, sinks=sinks), expected)

    def test_a_soft_cap_bounds_every_score(self) -> None:
        q, k, v = inputs(length=5)
        # With a tiny cap all scores are nearly equal: a mean over what is seen.
        means = v.cumsum(1) / torch.arange(1, 6, dtype=v.dtype).view(1, 5, 1, 1)
        found = attention_reference(q, k, v, softcap=1e-9)
        torch.testing.assert_close(found, means.repeat_interleave(H // K, 2))

    def test_slopes_lower_scores_by_distance(self) -> None:
        q, k, v = inputs(length=6)
        steep = torch.full((H,), 1e4, dtype=q.dtype)
        # So steep that each token sees itself alone.
        found = attention_reference(q, k, v, alibi=steep)
        torch.testing.assert_close(found, v.repeat_interleave(H // K, 2))

    def test_sixteen_bit_inputs_are_computed_in_fp32_and_rounded_once(self) -> None:
        q, k, v = inputs(dtype=torch.bfloat16)
        exact = attention_reference(q.double(), k.double(), v.double())
        torch.testing.assert_close(
            attention_reference(q, k, v), exact.bfloat16(), rtol=2**-7, atol=1e-6
        )


class TestDocuments:
    lengths = ((5, 13, 6), (24,))

    @pytest.mark.parametrize("options", [{}, {"window": 4}, {"chunk": 4}, {"softcap": 3.0}])
    def test_packed_documents_equal_each_alone(self, options: dict[str, Any]) -> None:
        q, k, v = inputs()
        packed = attention(q, k, v, documents=PackedSequences.from_lengths(self.lengths), **options)
        for row, lengths in enumerate(self.lengths):
            start = 0
            for length in lengths:
                place = (slice(row, row + 1), slice(start, start + length))
                alone = attention(q[place], k[place], v[place], **options)
                torch.testing.assert_close(packed[place], alone)
                start += length

    def test_positions_start_again_with_each_document(self) -> None:
        found = PackedSequences.from_lengths(self.lengths).positions(2, 24)
        expected = [*range(5), *range(13), *range(6)], [*range(24)]
        assert found.tolist() == [list(row) for row in expected]

    def test_a_cut_leaves_no_piece_longer_than_the_chunk(self) -> None:
        pieces = PackedSequences.from_lengths(self.lengths).split_by_chunk(5, 2, 24)
        starts = pieces.cu_seqlens.tolist()
        assert starts[:7] == [0, 5, 10, 15, 18, 23, 24]
        assert max(b - a for a, b in pairwise(starts)) == pieces.max_length == 5
        assert starts[-1] == 48

    def test_sequences_of_unequal_length_are_refused(self) -> None:
        with pytest.raises(InputError, match=r"\[5, 6\] tokens"):
            PackedSequences.from_lengths([[5], [3, 3]])


class TestChunks:
    @pytest.mark.parametrize("chunk", [8, 7])
    def test_each_chunk_equals_itself_alone(self, chunk: int) -> None:
        q, k, v = inputs()
        whole = attention(q, k, v, chunk=chunk)
        for start in range(0, T, chunk):
            place = (slice(None), slice(start, start + chunk))
            torch.testing.assert_close(whole[place], attention(q[place], k[place], v[place]))

    def test_plain_attention_has_them_as_well(self) -> None:
        q, k, v = inputs()
        torch.testing.assert_close(
            attention_reference(q, k, v, chunk=7), attention(q, k, v, chunk=7)
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 5},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi": True},
    "documents": {"documents": PackedSequences.from_lengths([[10, 14], [24]])},
    "all": {
        "window": 5,
        "sinks": True,
        "softcap": 2.0,
        "alibi": True,
        "documents": PackedSequences.from_lengths([[10, 14], [24]]),
    },
}


def filled(options: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    torch.manual_seed(1)
    made = dict(options)
    for name in ("sinks", "alibi"):
        if options.get(name):
            made[name] = torch.rand(H, dtype=dtype, device=device)
    return made


class TestKernels:
    @pytest.mark.parametrize("name", ["causal", "full", "sinks"])
    def test_the_fused_kernel_of_the_processor_equals_plain_with_gradients(self, name: str) -> None:
        options = filled(OPTIONS[name], torch.float64)
        q, k, v, *sinks = leaves(*inputs(), *[options[key] for key in options if key == "sinks"])
        if sinks:
            options["sinks"] = sinks[0]
        found = attention(q, k, v, prefer="cpu-flash", **options)
        expected = attention_reference(q, k, v, **options)
        torch.testing.assert_close(found, expected)
        weight = torch.randn_like(found)
        ours = torch.autograd.grad((found * weight).sum(), [q, k, v, *sinks])
        theirs = torch.autograd.grad((expected * weight).sum(), [q, k, v, *sinks])
        torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize("name", OPTIONS)
    def test_flex_attention_equals_plain(self, name: str) -> None:
        options = filled(OPTIONS[name], torch.float32)
        q, k, v = inputs(dtype=torch.float32)
        found = attention(q, k, v, prefer="flex", **options)
        torch.testing.assert_close(found, attention_reference(q, k, v, **options))

    @pytest.mark.parametrize("length", [300, 512])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", [None, 90, 200])
    def test_blocks_of_a_flex_mask_are_those_that_all_pairs_give(
        self, length: int, causal: bool, window: int | None
    ) -> None:
        documents = PackedSequences.from_lengths([[40, 130, length - 170], [length]])
        mask = make_block_mask(
            2, length, torch.device("cpu"), AttentionMaskRule(causal, window), documents
        )
        wanted = create_block_mask(mask.mask_mod, 2, None, length, length, device="cpu")
        assert torch.equal(mask.to_dense(), wanted.to_dense())
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mask, name), getattr(wanted, name))

    def test_heads_are_given_and_returned_without_a_copy_of_their_layout(self) -> None:
        q, k, v = inputs(dtype=torch.float32)
        assert attention(q, k, v, prefer="cpu-flash").flatten(2).is_contiguous()


class TestGpuKernelsWithoutGpu:
    """Shapes alone: that torch's kernels take what they are given, forward and backward."""

    @pytest.mark.parametrize("kernel", ["cudnn", "flash"])
    @pytest.mark.parametrize("sinks", [False, True])
    @pytest.mark.parametrize("value_dim", [E, 8])
    def test_gradients_have_the_shapes_of_inputs(
        self, kernel: AttentionBackend, sinks: bool, value_dim: int
    ) -> None:
        tensors = [x.to("meta") for x in inputs(dtype=torch.bfloat16, value_dim=value_dim)]
        q, k, v = leaves(*tensors)
        sink = torch.zeros(H, device="meta", requires_grad=True) if sinks else None
        ask = FusedAttentionArgs(kernel, True, 1.0, None, None)
        out = fused_attention(q, k, v, ask, sink)
        assert out.shape == (B, T, H, value_dim)
        wanted = [q, k, v] if sink is None else [q, k, v, sink]
        grads = torch.autograd.grad(out.sum(), wanted)
        assert [x.shape for x in grads] == [x.shape for x in wanted]

    @pytest.mark.parametrize("window", [None, 5])
    @pytest.mark.parametrize("sinks", [False, True])
    def test_documents_and_windows_reach_flash(self, window: int | None, sinks: bool) -> None:
        q, k, v = leaves(*(x.to("meta") for x in inputs(dtype=torch.bfloat16)))
        sink = torch.zeros(H, device="meta", requires_grad=True) if sinks else None
        documents = PackedSequences(torch.zeros(4, dtype=torch.int32, device="meta"), 14)
        out = fused_attention(
            q, k, v, FusedAttentionArgs("flash", True, 1.0, window, documents), sink
        )
        grads = torch.autograd.grad(out.sum(), [q, k, v])
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


def hopper(**changes: Any) -> AttentionCase:
    values: dict[str, Any] = {
        "device": "cuda",
        "capability": (9, 0),
        "cudnn_version": 91501,
        "head_dim": 128,
        "value_dim": 128,
        "sequence_length": 4096,
    }
    return AttentionCase(**{**values, **changes})


class TestChoice:
    @pytest.mark.parametrize(
        ("changes", "kernel"),
        [
            ({}, "cudnn"),
            ({"has_sinks": True}, "cudnn"),
            ({"head_dim": 192}, "cudnn"),
            ({"head_dim": 192, "cudnn_version": 90800}, "flash"),
            ({"head_dim": 256, "value_dim": 256}, "flash"),
            ({"has_window": True}, "flash"),
            ({"has_window": True, "has_sinks": True}, "flash"),
            ({"has_documents": True}, "flash"),
            ({"dynamic_shapes": True}, "flash"),
            ({"has_softcap": True}, "flex"),
            ({"has_alibi": True}, "flex"),
            ({"has_softcap": True, "has_compiler": False}, "reference"),
            ({"has_softcap": True, "sequence_length": 64}, "reference"),
            ({"dtype": torch.float32}, "flex"),
            ({"head_dim": 512, "value_dim": 512}, "flex"),
            ({"capability": (7, 5)}, "flex"),
            ({"capability": (8, 9), "head_dim": 256, "value_dim": 256}, "flex"),
            ({"cudnn_version": None}, "flash"),
            ({"device": "cpu", "capability": None}, "cpu-flash"),
            ({"device": "cpu", "capability": None, "has_window": True}, "reference"),
            ({"device": "cpu", "capability": None, "head_dim": 192}, "reference"),
            ({"device": "meta", "capability": None}, "reference"),
        ],
    )
    def test_the_fastest_kernel_that_can_is_taken(
        self, changes: dict[str, Any], kernel: AttentionBackend
    ) -> None:
        assert select_attention_backend(hopper(**changes)).backend == kernel

    def test_it_says_why_the_faster_ones_were_not(self) -> None:
        why = select_attention_backend(hopper(has_documents=True)).reason
        assert why.startswith("not cudnn: documents;")
        assert why.endswith("; fused, in the layout that the GEMMs write")

    def test_who_asks_for_a_kernel_gets_it_for_varied_shapes_too(self) -> None:
        assert select_attention_backend(hopper(dynamic_shapes=True), "cudnn").backend == "cudnn"

    def test_a_kernel_that_cannot_is_refused_with_those_that_can(self) -> None:
        with pytest.raises(InputError, match=r"cudnn cannot .* a window .* flash, flex, reference"):
            select_attention_backend(hopper(has_window=True), "cudnn")

    def test_a_window_as_long_as_the_sequence_is_none(self) -> None:
        q, k, v = inputs()
        assert not make_attention_case(q, k, v, window=T).has_window
        assert make_attention_case(q, k, v, window=T - 1).has_window


@GPU
class TestOnGpu:
    @pytest.mark.parametrize(
        ("kernel", "name"),
        [
            *(("cudnn", name) for name in ("causal", "full", "sinks")),
            *(("flash", name) for name in ("causal", "full", "window", "sinks", "documents")),
            *(("flex", name) for name in OPTIONS),
        ],
    )
    def test_kernels_equal_plain_with_gradients(self, kernel: AttentionBackend, name: str) -> None:
        length = 256
        options = filled(OPTIONS[name], torch.float32, "cuda")
        if "documents" in options:
            options["documents"] = PackedSequences.from_lengths([[100, 156], [256]], "cuda")
        raw = [each.cuda().bfloat16() for each in inputs(length=length, dtype=torch.float32)]
        extra = [options[key] for key in options if key == "sinks"]
        ours, theirs = leaves(*raw, *extra), leaves(*(each.double() for each in (*raw, *extra)))
        weight = torch.randn(B, length, H, E, device="cuda")
        results = []
        for tensors, prefer in ((ours, kernel), (theirs, "reference")):
            if extra:
                options["sinks"] = tensors[3]
            out = attention(*tensors[:3], prefer=prefer, **options)
            grads = torch.autograd.grad((out * weight).sum(), tensors)
            results.append((out.detach(), *grads))
        named = ("out", "dq", "dk", "dv", "dsinks")
        errors = {
            what: float((found.double() - expected).norm() / expected.norm())
            for what, found, expected in zip(named, *results, strict=False)
        }
        # A sink's gradient is a sum of B·T terms of either sign, each with the output's rounding:
        # exact arithmetic on rounded outputs is off by up to 0.016 (20 draws of the weight).
        bounds = dict.fromkeys(named, 0.01) | {"dsinks": 0.03}
        assert {what: error for what, error in errors.items() if error >= bounds[what]} == {}

    def test_cudnn_gives_normalisers_in_nats(self) -> None:
        q, k, v = (each.cuda().bfloat16() for each in inputs(length=256, dtype=torch.float32))
        lse_BHT1 = fused_forward(q, k, v, FusedAttentionArgs("cudnn", True, 0.25, None, None))[1]
        scores = torch.einsum("bthe,bshe->bhts", q.double(), k.double().repeat_interleave(2, 2))
        behind = torch.ones(256, 256, device="cuda").tril().bool()
        wanted = (scores * 0.25).masked_fill(~behind, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse_BHT1.flatten(2).double(), wanted, rtol=1e-4, atol=1e-3)

    def test_values_narrower_than_keys_are_padded_for_flash(self) -> None:
        q, k, v = (each.cuda().bfloat16() for each in inputs(length=64, value_dim=8))
        found = attention(q, k, v, prefer="flash")
        torch.testing.assert_close(found, attention_reference(q, k, v), rtol=0.02, atol=0.02)
