"""Cross-entropy kernels, alone and fused with the LM head, with chunked logits."""
