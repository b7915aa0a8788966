"""Model families: how each `model_type` of a Hugging Face config maps to a `Model`."""
