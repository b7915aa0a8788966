"""Health of nodes and GPUs: what faults mean, scores, advice, hooks, alerts and dashboards."""
