"""Matrix products: torch and cuBLASLt backends, int4 weights, and skinny GEMMs for decode.

`gemm` serves linear layers in training; `skinny_gemm` and `int4_gemm` serve inference.
"""
