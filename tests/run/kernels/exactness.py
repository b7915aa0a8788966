"""How kernels are held against the same operation in float64, on a GPU or in the interpreter."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Of the largest element. Triton's interpreter cuts bits off where a GPU rounds to bfloat16, so it
# may miss by a whole last place (2⁻⁷), and a GPU by half of one.
LIMITS = {
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8 if DEVICE == "cuda" else 2**-7,
}


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Draw normal numbers that every device draws alike."""
    source = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(*shape, generator=source).to(dtype).to(DEVICE)


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in float64, as a leaf that asks for its gradient."""
    return tensor.detach().double().requires_grad_()


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest element."""
    assert got.shape == exact.shape
    got, exact = got.detach().double(), exact.detach()
    return float((got - exact).abs().max() / exact.abs().max().clamp_min(1e-30))


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Fail where the result is further off than its type explains."""
    limit = LIMITS[dtype or got.dtype]
    assert error(got, exact) <= limit, f"error {error(got, exact):.2e}, allowed {limit:.2e}"
