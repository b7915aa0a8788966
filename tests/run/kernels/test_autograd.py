import torch

from meshwright.run.kernels.norm.rms_norm import add_rms_norm
from meshwright.run.nn.linear.linear import linear


def test_a_pass_without_gradients_gives_the_same_numbers_and_remembers_nothing() -> None:
    x = torch.randn(3, 16)
    weight = torch.nn.Parameter(torch.randn(8, 16))
    with_gradient = linear(x, weight)
    assert with_gradient.requires_grad
    with torch.no_grad():
        without = linear(x, weight)
    assert torch.equal(with_gradient, without)
    assert without.grad_fn is None
    assert not without.requires_grad


def test_kernels_with_several_results_do_without_a_context_as_well() -> None:
    x, residual = torch.randn(2, 4, 32), torch.randn(2, 4, 32)
    weight = torch.nn.Parameter(torch.randn(32))
    wanted = add_rms_norm(x, residual, weight, 1e-5, backend="triton")
    with torch.no_grad():
        got = add_rms_norm(x, residual, weight, 1e-5, backend="triton")
    assert all(map(torch.equal, wanted, got))
