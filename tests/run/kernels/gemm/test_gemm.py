"""Whoever computes a linear layer's products, they are those of autograd."""

import ctypes
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")

import torch
from torch import Tensor

from meshwright.run.kernels.gemm import cublaslt, gemm
from meshwright.run.kernels.gemm.cublaslt import (
    CublasLt,
    GemmShape,
    open_cublaslt,
    select_algorithm,
)
from meshwright.run.kernels.gemm.gemm import (
    TORCH_GEMM,
    TunedGemm,
    compute_wgrad_in_dtype,
    select_gemm_backend,
)

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


def by_autograd(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = torch.nn.functional.linear(x, w)
    return (y.detach(), *torch.autograd.grad(y, (x, w), dy))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_torch_products_are_those_of_autograd(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, dy = (torch.randn(*shape).to(dtype) for shape in ((5, 7), (3, 7), (5, 3)))
    ours = (TORCH_GEMM.forward(x, w), TORCH_GEMM.dgrad(dy, w), TORCH_GEMM.wgrad(dy, x))
    torch.testing.assert_close(ours, by_autograd(x, w, dy))


def test_a_wider_weight_gradient_is_rounded_once() -> None:
    torch.manual_seed(0)
    dy, x = torch.randn(9, 3).bfloat16(), torch.randn(9, 5).bfloat16()
    found = compute_wgrad_in_dtype(dy, x, torch.float32, TORCH_GEMM)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), dy.double().t() @ x.double(), rtol=1e-6, atol=1e-6)


def test_without_a_gpu_products_are_torchs() -> None:
    assert open_cublaslt(CPU) is None
    assert select_gemm_backend(CPU) is TORCH_GEMM


def test_without_the_library_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert open_cublaslt(torch.device("cuda")) is None


class _Refusing:
    """A library that answers every call with a status of its own."""

    def __init__(self, status: int) -> None:
        self.status = status

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.status


def test_a_call_that_fails_names_itself_and_the_reason() -> None:
    library: Any = _Refusing(15)
    with pytest.raises(RuntimeError, match=r"cublasLtCreate.*NOT_SUPPORTED \(15\)"):
        cublaslt.CublasLt(library, CPU)
    library = _Refusing(0)
    with pytest.raises(RuntimeError, match=r"no algorithm for .*rows=8, columns=16, inner=24"):
        cublaslt.CublasLt(library, CPU).matmul(
            GemmShape(8, 16, 24, True, False), *(torch.empty(1) for _ in range(3))
        )


class TestNearTies:
    def test_the_first_proposal_wins_unless_another_is_clearly_faster(self) -> None:
        assert select_algorithm([[1.0, 1.0, 1.0], [0.995, 0.995, 0.995]]) == 0
        assert select_algorithm([[1.0, 1.0, 1.0], [0.98, 0.98, 0.98]]) == 1

    def test_among_those_near_the_best_the_first_is_taken(self) -> None:
        times = [[1.2] * 5, [1.005] * 5, [1.0] * 5, [1.1] * 5]
        assert select_algorithm(times) == 1

    def test_one_slow_run_does_not_decide(self) -> None:
        assert select_algorithm([[0.9, 0.9, 0.9, 0.9, 9.0], [1.0] * 5]) == 0


@GPU
class TestOnGpu:
    @pytest.fixture
    def tuned(self) -> TunedGemm:
        library = open_cublaslt(torch.device("cuda"))
        assert library is not None, "torch on CUDA comes with cuBLASLt"
        return TunedGemm(library)

    @pytest.mark.parametrize("shape", [(256, 512, 384), (1024, 8, 64), (40, 72, 8)], ids=str)
    def test_tuned_products_equal_float64_to_one_rounding(
        self, tuned: TunedGemm, shape: tuple[int, int, int]
    ) -> None:
        torch.manual_seed(0)
        rows, fan_out, fan_in = shape
        sizes = ((rows, fan_in), (fan_out, fan_in), (rows, fan_out))
        x, w, dy = (torch.randn(*size, device="cuda").bfloat16() for size in sizes)
        exact = by_autograd(x.double(), w.double(), dy.double())
        for _ in range(2):  # timed, then by the algorithm that was kept
            ours = (tuned.forward(x, w), tuned.dgrad(dy, w), tuned.wgrad(dy, x))
            for found, wanted in zip(ours, exact, strict=True):
                off = (found.double() - wanted).abs().max() / wanted.abs().max()
                assert float(off) < torch.finfo(torch.bfloat16).eps

    def test_what_the_library_does_not_take_goes_to_torch(self, tuned: TunedGemm) -> None:
        x, w = torch.randn(6, 10, device="cuda"), torch.randn(4, 10, device="cuda")
        torch.testing.assert_close(tuned.forward(x, w), TORCH_GEMM.forward(x, w))
        x, w = x.bfloat16(), w.bfloat16()
        torch.testing.assert_close(tuned.forward(x, w), TORCH_GEMM.forward(x, w))

    def test_a_recorded_product_reads_what_lies_in_its_operands_then(
        self, tuned: TunedGemm
    ) -> None:
        x, w = (torch.randn(64, 64, device="cuda").bfloat16() for _ in range(2))
        tuned.forward(x, w)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = tuned.forward(x, w)
        x.copy_(torch.randn(64, 64, device="cuda"))
        graph.replay()
        torch.testing.assert_close(y, TORCH_GEMM.forward(x, w))


class ColumnMajor:
    """Stands for cuBLASLt: computes an order as its documentation reads."""

    def matmul(
        self, order: GemmShape, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor
    ) -> None:
        one = first if order.transpose_a else first.t()
        two = second if order.transpose_b else second.t()
        assert (one.shape, two.shape) == (
            (order.rows, order.inner),
            (order.inner, order.columns),
        )
        out.copy_((one @ two).t())


def test_orders_name_the_products_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_fits", lambda *_: True)
    tuned = gemm.TunedGemm(cast(CublasLt, ColumnMajor()))
    x_NK, w_MK, dy_NM = torch.randn(5, 3), torch.randn(4, 3), torch.randn(5, 4)
    torch.testing.assert_close(tuned.forward(x_NK, w_MK), x_NK @ w_MK.t())
    torch.testing.assert_close(tuned.dgrad(dy_NM, w_MK), dy_NM @ w_MK)
    torch.testing.assert_close(tuned.wgrad(dy_NM, x_NK), dy_NM.t() @ x_NK)
