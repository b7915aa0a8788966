"""Which kernel computes an attention, as a pure function of what is asked, with the reason.

Facts used, all about torch 2.11 and newer:
- cuDNN is the fastest on Hopper (measured on an H200 at 4,096 positions: 600 to 634 TFLOP/s
  forward and 428 to 529 backward, torch's flash kernel about half), but torch gives it no windows.
  It takes heads up to 128 wide, and 192 with values of 128 since cuDNN 9.11
  (`check_cudnn_tensor_shapes` in torch's sdp_utils.cpp).
- It plans every new shape before it computes it, forward and backward: what brings new lengths with
  every pass is better off with the flash kernel.
- Its ragged form, for documents, is of no use yet: torch 2.11 plans it anew at every call (61 ms
  measured; pytorch/pytorch pull request 191576), and its gradients come out wrong (measured).
- The flash kernel takes windows and documents (its variable-length form), heads up to 256 wide and
  values as wide as keys; narrower values are padded.
- Neither has a soft cap or position slopes in backward: flex attention compiles a kernel for those.
- Sinks need no kernel of their own: they rescale output and normaliser of any that returns both.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch

from meshwright.errors import InputError, Problem

AttentionBackend = Literal["cudnn", "flash", "cpu-flash", "flex", "reference"]
ATTENTION_BACKENDS: tuple[AttentionBackend, ...] = get_args(AttentionBackend)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """What decides between kernels."""

    device: str
    """`cuda`, `cpu`, `meta`, …"""
    capability: tuple[int, int] | None = None
    """The CUDA device's compute capability."""
    cudnn_version: int | None = None
    """cuDNN's version as torch gives it, such as 91002."""
    dtype: torch.dtype = torch.bfloat16
    head_dim: int
    value_dim: int
    sequence_length: int
    causal: bool = True
    has_window: bool = False
    """A window shorter than the sequence."""
    has_softcap: bool = False
    has_sinks: bool = False
    has_documents: bool = False
    has_alibi: bool = False
    dynamic_shapes: bool = False
    """Most passes bring a batch or a length that was not there before."""
    needs_backward: bool = True
    """Gradients will be asked for."""
    has_compiler: bool = True
    """Triton is there, so that flex attention can be compiled."""


@dataclass(frozen=True, slots=True)
class AttentionBackendChoice:
    """A kernel, and why it and none before it."""

    backend: AttentionBackend
    reason: str


@lru_cache(maxsize=256)
def select_attention_backend(
    case: AttentionCase, prefer: AttentionBackend | None = None
) -> AttentionBackendChoice:
    """Return the fastest kernel that computes the case, or the preferred one if it can.

    Raises:
        InputError: the preferred kernel cannot compute it.
    """
    if prefer is not None:
        reason = find_unsupported_reason(case, prefer)
        if reason is not None:
            able = ", ".join(
                kernel
                for kernel in ATTENTION_BACKENDS
                if find_unsupported_reason(case, kernel) is None
            )
            what = f"{prefer} cannot compute this attention: {reason}"
            raise InputError([Problem("prefer", what, f"use one of {able}")])
        return AttentionBackendChoice(prefer, "asked for")
    refused: list[str] = []
    for kernel in _FUSED:
        reason = find_unsupported_reason(case, kernel)
        if reason is None and kernel == "cudnn" and case.dynamic_shapes:
            reason = "it would plan every new shape"
        if reason is None:
            return AttentionBackendChoice(kernel, "; ".join((*refused, _PRAISE[kernel])))
        refused.append(f"not {kernel}: {reason}")
    # A compiled kernel pays from some hundred positions on; below, scores in full are cheaper.
    if (
        find_unsupported_reason(case, "flex") is None
        and case.device == "cuda"
        and case.sequence_length >= 128
    ):
        return AttentionBackendChoice("flex", "; ".join((*refused, "compiled for these options")))
    return AttentionBackendChoice(
        "reference", "; ".join((*refused, "written out it takes everything"))
    )


_FUSED: tuple[AttentionBackend, ...] = ("cudnn", "flash", "cpu-flash")
_PRAISE: dict[str, str] = {
    "cudnn": "the fastest on this device",
    "flash": "fused, in the layout that the GEMMs write",
    "cpu-flash": "the fused kernel for the processor",
}


def find_unsupported_reason(case: AttentionCase, kernel: AttentionBackend) -> str | None:
    """Say why a kernel cannot compute a case; None where it can."""
    if kernel == "reference":
        return None
    if kernel == "flex":
        if case.device == "cuda" and not case.has_compiler:
            return "flex attention is compiled with Triton, which is not installed"
        if case.device == "cpu":
            return "flex attention has no backward on a processor" if case.needs_backward else None
        return None if case.device == "cuda" else f"not on {case.device}"
    common = _beyond_fused(case)
    if common is not None:
        return common
    if kernel == "cpu-flash":
        return _beyond_cpu(case)
    if case.device != "cuda" or case.capability is None:
        return f"not on {case.device}"
    if case.dtype not in {torch.bfloat16, torch.float16}:
        return f"{case.dtype} is not a 16-bit type"
    return _beyond_cudnn(case) if kernel == "cudnn" else _beyond_flash(case)


def _beyond_fused(case: AttentionCase) -> str | None:
    if case.has_softcap:
        return "scores are soft-capped"
    return "scores have position slopes" if case.has_alibi else None


def _beyond_cpu(case: AttentionCase) -> str | None:
    if case.device != "cpu":
        return f"not on {case.device}"
    if case.has_window or case.has_documents:
        return "a window" if case.has_window else "documents"
    return None if case.head_dim == case.value_dim else "values are not as wide as keys"


def _beyond_cudnn(case: AttentionCase) -> str | None:
    assert case.capability is not None
    if case.capability < (8, 0) or not case.cudnn_version:
        return "cuDNN's attention needs compute capability 8.0 and cuDNN"
    if case.has_window or case.has_documents:
        return "a window" if case.has_window else "documents"
    widths = (case.head_dim, case.value_dim)
    latent = widths == (192, 128) and case.cudnn_version >= 91100 and case.capability[0] in {9, 10}
    if any(width % 8 for width in widths) or (max(widths) > 128 and not latent):
        return f"heads are {case.head_dim} wide, values {case.value_dim}"
    return "a single position" if case.sequence_length == 1 else None


def _beyond_flash(case: AttentionCase) -> str | None:
    assert case.capability is not None
    if case.capability < (8, 0):
        return "the flash kernel needs compute capability 8.0"
    if case.head_dim % 8 or case.head_dim > 256:
        return f"heads are {case.head_dim} wide"
    wide_backward = case.capability in {(8, 6), (8, 9), (12, 0), (12, 1)}
    if case.head_dim > 192 and wide_backward:
        return f"heads of {case.head_dim} have no backward on this device"
    return "values are wider than keys" if case.value_dim > case.head_dim else None
