#!/bin/sh
# Slurm's Prolog: looks at the node before a job gets it. Where DRAIN=yes an unfit node is drained
# and the job is put back into the queue; else the finding is only logged and the job starts.
# What cannot be told is never held against the node.
here=$(dirname "$0")
# shellcheck source=/dev/null
if [ -r "$here/health.conf" ]; then . "$here/health.conf"; fi
PATH="${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin:/usr/local/bin"
[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0
node="${SLURMD_NODENAME:-$(hostname -s)}"
whole="${WHOLE_S:-60}"
if [ "${BENCH:-no}" = yes ]; then whole=$((whole + ${BENCH_S:-120})); fi
told=$(timeout -k 5 "$whole" "$here/check.sh" 2>/dev/null)
code=$?
[ "$code" = 1 ] || exit 0
logger -t mw-health "$node before job ${SLURM_JOB_ID:-?}: $told" 2>/dev/null
[ "${DRAIN:-no}" = yes ] || exit 0
timeout 20 scontrol update nodename="$node" state=drain reason="mw-health $told" 2>/dev/null
# Slurm puts a job back whose prolog fails.
exit 1
