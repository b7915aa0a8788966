"""Node health check scripts for Slurm prolog and epilog, and Kubernetes node-problem-detector."""
