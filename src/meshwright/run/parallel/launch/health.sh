# Runs on each node; every failed check prints the node and the reason.
bad=0
unfit() { echo "meshwright: node ${SLURMD_NODENAME:-$(hostname)}: $*" >&2; bad=1; }
note() { echo "meshwright: node ${SLURMD_NODENAME:-$(hostname)}: note: $*" >&2; }
query() { nvidia-smi --query-gpu="index,$1" --format=csv,noheader,nounits 2>/dev/null; }
if [ @GPUS@ -gt 0 ]; then
  if ! command -v nvidia-smi >/dev/null; then
    unfit "there is no nvidia-smi, so no driver"
  elif ! listed=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>&1); then
    unfit "nvidia-smi fails: $(echo "$listed" | head -n 1)"
  else
    count=$(echo "$listed" | grep -c .)
    # Where jobs are not kept apart, a node shows the GPUs of others too.
    [ "$count" -lt @GPUS@ ] && unfit "$count GPUs answer, @GPUS@ were asked for"
    while IFS=', ' read -r gpu errors; do
      [[ "$errors" =~ ^[1-9] ]] && unfit "GPU $gpu has $errors uncorrected memory errors"
    done < <(query ecc.errors.uncorrected.volatile.total)
    while IFS=', ' read -r gpu slow; do
      [ "$slow" = Active ] && unfit "GPU $gpu is slowed down by its heat or power supply"
    done < <(query clocks_throttle_reasons.hw_slowdown)
    # They may be older than a reset, so that they alone refuse no node.
    faults=$(dmesg 2>/dev/null | grep -oE 'NVRM: Xid .*' | tail -n 3)
    [ -n "$faults" ] && note "the driver has reported $faults"
  fi
fi
if [ @DISK_KIB@ -gt 0 ]; then
  place=@FOLDER@
  while [ ! -e "$place" ]; do place=$(dirname "$place"); done
  free=$(df -Pk "$place" | awk 'NR == 2 { print $4 }')
  [ "${free:-0}" -lt @DISK_KIB@ ] && unfit "$place has $((${free:-0} / 1048576)) GiB free, checkpoints need $((@DISK_KIB@ / 1048576)) GiB"
fi
exit $bad
