"""Speculative decoding: n-gram and draft-model proposers, and adaptive draft length."""
