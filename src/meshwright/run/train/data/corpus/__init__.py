"""Tokenized corpora on disk: native token shards and Megatron indexed datasets."""
