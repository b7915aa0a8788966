"""Branch-and-bound search over layouts: GPU splits, frames, shapes and whole layouts."""
