"""Steps of one device: predicted and measured in the same words, and held against each other."""

import ast
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.errors import InputError
from meshwright.observe.analyze.device_time.kernel_classes import classify_trainer_kernel
from meshwright.observe.twin.default_configs import build_default_gpu_configs
from meshwright.observe.twin.device_twin import (
    DeviceTwin,
    TwinConfig,
    TwinStep,
    predict_device_step,
)
from meshwright.observe.twin.step_breakdown import SHOWN_KINDS, measure_step_breakdown
from meshwright.run import kernels
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model
from meshwright.timeline import SpanKind, Timeline, TimelineWriter, read_timeline

KERNELS = Path(kernels.__file__).parent
TINY = build_decoder_model("tiny", layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=512)
H200 = catalog.get_cluster("h200-superpod")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("void cutlass::device_kernel<enable_3x_kernel<GemmUniversal>>", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true>", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "data"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", "other"),
    ],
)  # fmt: skip
def test_kernels_of_libraries_are_known_by_their_names(name: str, part: str) -> None:
    assert classify_trainer_kernel(name) == part


TRAINER_KERNELS = {
    "activation": "activations",
    "embedding.py": "embedding",
    "fp8": "casts",
    "loss": "loss",
    "moe": "routing",
    "moe/grouped_gemm_kernel.py": "grouped_gemm",
    "norm": "norms",
    "optimizer": "optimizer",
    "optimizer/grad_norm.py": "gradient_norm",
    "rotary": "rotary",
}
"""Folders and modules of `run/kernels` that the trainer uses, and the work of their kernels."""


@pytest.mark.parametrize(("path", "part"), TRAINER_KERNELS.items())
def test_kernels_of_the_trainer_are_known_by_their_names(path: str, part: str) -> None:
    names = find_kernel_names(path)
    assert names
    assert {name: classify_trainer_kernel(name) for name in names} == dict.fromkeys(names, part)


def find_kernel_names(path: str) -> set[str]:
    """Return the names of the kernels that the host launches: no other kernel names them."""
    named = {name for names in find_jit_functions().values() for name in names.used}
    deeper = [other for other in TRAINER_KERNELS if other.startswith(f"{path}/")]
    return {
        name
        for name, found in find_jit_functions().items()
        if name not in named
        and f"{found.path}/".startswith(f"{path}/")
        and found.path not in deeper
    }


class JitFunction(NamedTuple):
    path: str
    used: set[str]
    """Names that its body reads."""


@cache
def find_jit_functions() -> dict[str, JitFunction]:
    """Return the functions of `run/kernels` that Triton compiles, read from their sources."""
    return {
        node.name: JitFunction(
            path.relative_to(KERNELS).as_posix(),
            {name.id for name in ast.walk(node) if isinstance(name, ast.Name)},
        )
        for path in sorted(KERNELS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any(".jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def test_time_of_kernels_is_put_to_their_work_and_what_is_left_to_gaps(tmp_path: Path) -> None:
    with TimelineWriter(tmp_path / "run", rank=0) as timeline:
        on_gpu = partial(timeline.span, kind=SpanKind.COMPUTE, process="gpu 0", lane="s")
        for step in (0, 1_000):
            spans = (("nvjet_x", 0, 100), ("rms_norm_kernel", 150, 50), ("nvjet_y", 200, 300))
            for name, start, length in spans:
                on_gpu(name, step + start, length)
            timeline.span("launch", step, 900, kind=SpanKind.HOST, process="host", lane="t")
    found = measure_step_breakdown(read_timeline(tmp_path / "run"), steps=2)
    assert found["gemm"] == pytest.approx(400e-9)
    assert found["norms"] == pytest.approx(50e-9)
    assert found["idle"] == pytest.approx((50 + 500 + 50) / 2 * 1e-9)
    assert set(found) == set(SHOWN_KINDS)


def test_a_prediction_is_told_in_the_words_of_a_measurement() -> None:
    side = predict_device_step(TwinConfig(TINY, Layout(microbatch=2), 128, 4), H200)
    assert sum(side.step_breakdown.values()) == pytest.approx(side.step_s)
    assert side.peak_memory_bytes > 0


def test_several_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="2 ranks"):
        predict_device_step(TwinConfig(TINY, Layout(dp=2), 128, 4), H200)


def test_what_is_tried_covers_what_was_asked_for() -> None:
    every = build_default_gpu_configs()
    assert len(every) >= 12
    assert {one.layout.precision for one in every} >= {"bf16", "fp8-tensorwise", "fp8-rowwise"}
    assert {one.layout.recompute for one in every} == {"none", "selective", "full"}
    fits = [
        predict_device_step(one, H200).peak_memory_bytes < 0.9 * H200.gpu.memory_bytes
        for one in every
    ]
    assert all(fits)


def test_a_twin_names_the_work_that_moved() -> None:
    def side(step_s: float, memory: int, products_s: float) -> TwinStep:
        return TwinStep(step_s, memory, {**dict.fromkeys(SHOWN_KINDS, 0.0), "gemm": products_s})

    config = TwinConfig(TINY, Layout(), 128, 1)
    near = DeviceTwin(config, side(1.05, 102, 0.9), side(1.0, 100, 0.8), (1.0,), EMPTY)
    assert near.step_error == pytest.approx(0.05)
    assert near.largest_error[0] == "gemm"
    assert near.largest_error[1] == pytest.approx(0.1)
    assert near.is_within_tolerance
    assert not near._replace(predicted=side(1.05, 106, 0.9)).is_within_tolerance
    assert not near._replace(predicted=side(1.11, 100, 0.9)).is_within_tolerance
    assert near._replace(measured=side(1.0, 0, 0.8)).memory_error is None


EMPTY = Timeline.empty()


def test_a_configuration_says_all_that_is_not_as_usual() -> None:
    every = [str(config) for config in build_default_gpu_configs()]
    assert len(set(every)) == len(every)
    assert "llama3.2-3b, 4 × 4096, bf16, layernorm and mlp_act recomputed" in every
    assert "llama3.2-1b, 4 × 4 × 4096, bf16" in every
    told = Layout(microbatch=2, precision="fp8-rowwise", recompute="full", optimizer="muon")
    assert str(TwinConfig(TINY, told, 128, 2)) == (
        "tiny, 2 × 128, fp8-rowwise, all recomputed, optimizer=muon"
    )
    assert str(TwinConfig(TINY, Layout(recompute="selective"), 128, 1)).endswith(
        "recompute=selective"
    )
