"""Reads the history of pods and nodes from kube-state-metrics series in Prometheus."""
