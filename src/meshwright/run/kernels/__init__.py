"""Kernels: each module has the kernel, its gradient and its reference in plain torch.

attention         attention of whole sequences, and the choice of its backend
paged_attention   attention over a paged KV cache, and writing into that cache
gemm, fp8         GEMMs of a linear layer, and their fp8 matrices
moe               token permutation and grouped GEMMs of experts
norm, rotary, activation, loss   what a decoder layer and its head compute besides GEMMs
optimizer         fused updates of all parameters, and the gradient norm
sampling          the choice of the next token from logits
collective        collective algorithms between virtual ranks on one GPU
triton_compat     whether Triton or torch runs

Import from the modules. A kernel that is too long for one module has a module `…_kernel`.
"""

__all__: list[str] = []
