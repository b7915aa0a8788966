#!/bin/sh
# Slurm's Epilog: looks at the node after a job. Where DRAIN=yes an unfit node is drained; else the
# finding is only logged. It never fails: that would drain the node without a reason.
here=$(dirname "$0")
# shellcheck source=/dev/null
if [ -r "$here/health.conf" ]; then . "$here/health.conf"; fi
PATH="${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin:/usr/local/bin"
[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0
node="${SLURMD_NODENAME:-$(hostname -s)}"
# A measurement belongs before a job, not between a user and the end of one.
told=$(MW_NO_BENCH=1 timeout -k 5 "${WHOLE_S:-60}" "$here/check.sh" 2>/dev/null)
code=$?
[ "$code" = 1 ] || exit 0
logger -t mw-health "$node after job ${SLURM_JOB_ID:-?}: $told" 2>/dev/null
if [ "${DRAIN:-no}" = yes ]; then
    timeout 20 scontrol update nodename="$node" state=drain reason="mw-health $told" 2>/dev/null
fi
exit 0
