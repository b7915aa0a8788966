"""Steps of one device: predicted and measured in the same words, and held against each other."""

from functools import partial
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.twin.alone import AloneTwin, Config, Side, predict_alone
from meshwright.observe.twin.configs import standard
from meshwright.observe.twin.kernel_terms import SHOWN, measured_parts, part_of
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import decoder
from meshwright.timeline import Kind, Timeline, TimelineWriter, read

TINY = decoder("tiny", layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=512)
H200 = catalog.cluster("h200-superpod")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "products"),
        ("void cutlass::device_kernel<enable_3x_kernel<GemmUniversal>>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true>", "attention"),
        ("rows_kernel", "grouped products"),
        ("normalise", "norms"),
        ("gradients", "norms"),
        ("norm_turn_gradients", "rotary"),
        ("_ungate", "activations"),
        ("_update_chunks", "optimizer"),
        ("_square_chunks", "gradient norm"),
        ("cast_tile_of_blocks", "casts"),
        ("Memcpy HtoD (Pinned -> Device)", "data"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", "other"),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(name: str, part: str) -> None:
    assert part_of(name) == part


def test_time_of_kernels_is_put_to_their_work_and_what_is_left_to_gaps(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path / "run", rank=0) as timeline:
        on_gpu = partial(timeline.span, kind=Kind.COMPUTE, process="gpu 0", lane="s")
        for step in (0, 1_000):
            spans = (("nvjet_x", 0, 100), ("normalise", 150, 50), ("nvjet_y", 200, 300))
            for name, start, length in spans:
                on_gpu(name, step + start, length)
            timeline.span("launch", step, 900, kind=Kind.HOST, process="host", lane="t")
    found = measured_parts(read(tmp_path / "run"), steps=2)
    assert found["products"] == pytest.approx(400e-9)
    assert found["norms"] == pytest.approx(50e-9)
    assert found["gaps"] == pytest.approx((50 + 500 + 50) / 2 * 1e-9)
    assert set(found) == set(SHOWN)


def test_a_prediction_is_told_in_the_words_of_a_measurement() -> None:
    side = predict_alone(Config(TINY, Layout(microbatch=2), 128, 4), H200)
    assert sum(side.parts.values()) == pytest.approx(side.step_s)
    assert side.memory_bytes > 0


def test_several_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="2 ranks"):
        predict_alone(Config(TINY, Layout(dp=2), 128, 4), H200)


def test_what_is_tried_covers_what_was_asked_for() -> None:
    every = standard()
    assert len(every) >= 12
    assert {one.layout.precision for one in every} >= {"bf16", "fp8-tensorwise", "fp8-rowwise"}
    assert {one.layout.recompute for one in every} == {"none", "selective", "full"}
    fits = [predict_alone(one, H200).memory_bytes < 0.9 * H200.gpu.memory_bytes for one in every]
    assert all(fits)


def test_a_twin_names_the_work_that_moved() -> None:
    def side(step_s: float, memory: int, products_s: float) -> Side:
        return Side(step_s, memory, {**dict.fromkeys(SHOWN, 0.0), "products": products_s})

    config = Config(TINY, Layout(), 128, 1)
    near = AloneTwin(config, side(1.05, 102, 0.9), side(1.0, 100, 0.8), (1.0,), EMPTY)
    assert near.step_error == pytest.approx(0.05)
    assert near.moved[0] == "products"
    assert near.moved[1] == pytest.approx(0.1)
    assert near.agrees
    assert not near._replace(predicted=side(1.05, 106, 0.9)).agrees
    assert not near._replace(predicted=side(1.11, 100, 0.9)).agrees
    assert near._replace(measured=side(1.0, 0, 0.8)).memory_error is None


EMPTY = Timeline.empty()


def test_a_configuration_says_all_that_is_not_as_usual() -> None:
    every = [str(config) for config in standard()]
    assert len(set(every)) == len(every)
    assert "llama3.2-3b, 4 × 4096, bf16, layernorm and mlp_act recomputed" in every
    assert "llama3.2-1b, 4 × 4 × 4096, bf16" in every
    told = Layout(microbatch=2, precision="fp8-rowwise", recompute="full", optimizer="muon")
    assert str(Config(TINY, told, 128, 2)) == (
        "tiny, 2 × 128, fp8-rowwise, all recomputed, optimizer=muon"
    )
    assert str(Config(TINY, Layout(recompute="selective"), 128, 1)).endswith("recompute=selective")
