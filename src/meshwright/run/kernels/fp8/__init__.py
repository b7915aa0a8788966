"""FP8 quantization kernels and scaled matrix products.

`quantization` is the entry point of the kernels, and `scaled_mm` multiplies their results.
"""
