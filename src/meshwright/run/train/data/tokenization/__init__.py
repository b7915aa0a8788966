"""Parallel tokenization of text files into token shards, and tokenizer training.

`corpus_tokenization` splits files into slices, and `worker_pool` runs the workers.
"""
