"""Paged attention kernels for decode, prefill and MLA, and kernels that write the KV cache.

`paged_decode`, `paged_prefill` and `mla_decode` launch the kernels in the `*_kernel` modules;
`paged_reference` computes the same in torch.
"""
