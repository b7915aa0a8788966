#!/bin/sh
# Notes that a job gives the GPUs of this node back; see prolog.sh.
log="${MW_GPU_MAP:-/var/log/slurm/gpu-map.log}"
node="${SLURMD_NODENAME:-$(hostname -s)}"
if [ -n "${SLURM_JOB_GPUS:-}" ]; then
    printf '%s epilog job=%s node=%s gpus=%s cluster=%s\n' "$(date +%s)" \
        "$SLURM_JOB_ID" "$node" "$SLURM_JOB_GPUS" "${SLURM_CLUSTER_NAME:-}" >>"$log" 2>/dev/null
    if [ -d "${MW_HPC_JOBS:-}" ]; then
        for gpu in $(printf '%s' "$SLURM_JOB_GPUS" | tr ',' ' '); do
            if [ "$(cat "$MW_HPC_JOBS/$gpu" 2>/dev/null)" = "$SLURM_JOB_ID" ]; then
                rm -f "$MW_HPC_JOBS/$gpu"
            fi
        done
    fi
fi
exit 0
