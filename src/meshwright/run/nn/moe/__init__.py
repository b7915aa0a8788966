"""Mixture-of-experts layer and top-k router."""
