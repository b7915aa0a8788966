"""Tokenizers, chat templates and token byte tables for serving."""
