"""The `mw launch` command: job scripts and manifests for Slurm, Kubernetes and Ray."""
