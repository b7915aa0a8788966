"""Linear layers: `Linear`, its FP8 variant, FP8 conversion and an FP8 fused GLU product."""
