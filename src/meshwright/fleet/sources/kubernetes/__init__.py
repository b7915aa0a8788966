"""Kubernetes reads pods as jobs, and nodes, from its API or from kube-state-metrics."""
