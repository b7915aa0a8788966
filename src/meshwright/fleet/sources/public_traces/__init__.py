"""Public traces of GPU clusters (Acme, Philly, Helios, Alibaba, others), recognized by columns."""
