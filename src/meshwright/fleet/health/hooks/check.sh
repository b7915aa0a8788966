#!/bin/sh
# Looks in a few seconds whether this node is fit for a job on GPUs. Prints one line.
# Exit: 0 fit, 1 not fit, 2 could not tell. Faults of programs are no reason: only the Xids below,
# for which NVIDIA asks for a reset, a reboot or a look at the board, are.
here=$(dirname "$0")
# shellcheck source=/dev/null
if [ -r "$here/health.conf" ]; then . "$here/health.conf"; fi
PATH="${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin:/usr/local/bin"
limit="${LIMIT_S:-20}"
xids="@XIDS@"

unfit() {
    printf 'unfit: %s\n' "$*"
    exit 1
}

command -v nvidia-smi >/dev/null 2>&1 || {
    echo "cannot tell: there is no nvidia-smi"
    exit 2
}

# A GPU that is lost makes nvidia-smi fail or hang; both are findings.
asked=index,ecc.errors.uncorrected.volatile.total
gpus=$(timeout -k 2 "$limit" nvidia-smi --query-gpu="$asked" --format=csv,noheader,nounits 2>&1)
code=$?
if [ "$code" = 124 ] || [ "$code" = 137 ]; then unfit "nvidia-smi did not answer in ${limit} s"; fi
if [ "$code" != 0 ]; then unfit "nvidia-smi failed: $(printf '%s' "$gpus" | head -n 1 | cut -c1-50)"; fi
count=$(printf '%s\n' "$gpus" | grep -c '^[0-9]')
if [ -n "${GPUS:-}" ] && [ "$count" -ne "$GPUS" ]; then unfit "$count GPUs of $GPUS"; fi
# Until the next reset the driver keeps counting an error that one program met and no other did.
bad=$(printf '%s\n' "$gpus" | awk -F', *' '$2 + 0 > 0 { print "GPU " $1; exit }')
if [ -n "$bad" ] && [ "${ECC:-no}" = yes ]; then unfit "$bad has uncorrected memory errors"; fi

# Rows that could not be set aside; old boards do not know the question, which is no fault.
rows=$(timeout -k 2 "$limit" nvidia-smi --query-remapped-rows=gpu_bus_id,remapped_rows.failure \
    --format=csv,noheader 2>/dev/null) || rows=""
bad=$(printf '%s\n' "$rows" | awk -F', *' '$2 ~ /^(1|Yes)/ { print $1; exit }')
if [ -n "$bad" ]; then unfit "$bad cannot remap memory"; fi

# The kernel's own times are seconds since the start, as those of /proc/uptime.
now=$(cut -d' ' -f1 "${UPTIME_FILE:-/proc/uptime}" 2>/dev/null)
bad=$(timeout -k 2 "$limit" dmesg 2>/dev/null | awk -v now="${now:-0}" -v back="${BACK_S:-900}" \
    -v xids=" $xids " '
    match($0, /NVRM: Xid \([^)]*\): [0-9]+/) {
        time = $0; sub(/^[^[]*\[ */, "", time); sub(/\].*/, "", time)
        code = substr($0, RSTART, RLENGTH); sub(/.*: /, "", code)
        if (time + 0 >= now - back && index(xids, " " code " ")) { print "Xid " code; exit }
    }')
if [ -n "$bad" ]; then unfit "$bad in the last ${BACK_S:-900} s"; fi

if [ "${INFINIBAND:-no}" = yes ]; then
    for port in "${PORTS_FOLDER:-/sys/class/infiniband}"/*/ports/*; do
        [ -r "$port/state" ] || continue
        case "$(cat "$port/phys_state" 2>/dev/null)" in *Disabled*) continue ;; esac
        case "$(cat "$port/state")" in
            *ACTIVE*) ;;
            *) unfit "port ${port#"${PORTS_FOLDER:-/sys/class/infiniband}"/} is $(cat "$port/state")" ;;
        esac
    done
fi

if [ "${BENCH:-no}" = yes ] && [ -z "${MW_NO_BENCH:-}" ]; then
    timeout -k 5 "${BENCH_S:-120}" mw bench --quick --health-check --quiet \
        --families "${BENCH_FAMILIES:-gemm,memory_copies}" >/dev/null 2>&1
    case $? in
        0) ;;
        1) unfit "slower than its kind (mw bench --health-check)" ;;
        124 | 137) unfit "mw bench did not end in ${BENCH_S:-120} s" ;;
        *)
            echo "cannot tell: mw bench did not run"
            exit 2
            ;;
    esac
fi
echo "fit: $count GPUs"
exit 0
