#!/bin/sh
# Notes which GPUs of this node a job is given: a line in the log that `mw fleet ingest` reads, and
# where MW_HPC_JOBS names dcgm-exporter's folder of job mappings, a file for each GPU.
# Slurm drains a node whose prolog fails, so nothing in here may fail.
log="${MW_GPU_MAP:-/var/log/slurm/gpu-map.log}"
node="${SLURMD_NODENAME:-$(hostname -s)}"
if [ -n "${SLURM_JOB_GPUS:-}" ]; then
    printf '%s prolog job=%s node=%s gpus=%s restarts=%s cluster=%s\n' "$(date +%s)" \
        "$SLURM_JOB_ID" "$node" "$SLURM_JOB_GPUS" "${SLURM_JOB_RESTART_COUNT:-}" \
        "${SLURM_CLUSTER_NAME:-}" >>"$log" 2>/dev/null
    if [ -d "${MW_HPC_JOBS:-}" ]; then
        for gpu in $(printf '%s' "$SLURM_JOB_GPUS" | tr ',' ' '); do
            printf '%s\n' "$SLURM_JOB_ID" >"$MW_HPC_JOBS/$gpu" 2>/dev/null
        done
    fi
fi
exit 0
