#!/usr/bin/env bash
# RoCE settings of one server's NICs in fabric @{fabric}, from `bywash fabric emit`. mlx5 NICs; needs mlnx_qos
# (mlnx-tools), cma_roce_tos and, for the last step, mlxreg (mstflint). Changes only what differs.
#   nic.sh --dry-run   say what would change, change nothing
#   nic.sh             change it; what was there before is kept for --undo
#   nic.sh --undo      put back what was there before the first change
#   nic.sh --show      print the settings in the form that `bywash fabric audit` reads
set -euo pipefail

SYS=${BYWASH_SYS:-/sys}
KEPT=${BYWASH_KEPT:-/var/lib/bywash/nic-@{fabric}.undo}
MODE=apply
case "${1:-}" in
  "") ;;
  --dry-run) MODE=dry ;;
  --undo) MODE=undo ;;
  --show) MODE=show ;;
  *) echo "usage: $0 [--dry-run | --undo | --show]" >&2; exit 2 ;;
esac

# setting KEY WANTED: read it, compare, keep the old value, write. KEY is KIND:NIC[:ITEM]; see get and put.
setting() {
  local key=$1 wanted=$2 now
  if [[ $key == sys:* && ! -e $SYS/${key##*:} ]]; then
    echo "absent   $key: this driver has no such file"
    return
  fi
  now=$(get "$key")
  if [[ $now == "$wanted" ]]; then
    echo "ok       $key = $wanted"
    return
  fi
  echo "change   $key: ${now:-unknown} -> $wanted"
  [[ $MODE == dry ]] && return
  mkdir -p "$(dirname "$KEPT")"
  touch "$KEPT"
  grep -q "^$key " "$KEPT" || echo "$key $now" >> "$KEPT"
  put "$key" "$wanted"
}

get() {
  local kind nic item
  IFS=: read -r kind nic item <<< "$1"
  case $kind in
    trust) mlnx_qos -i "$nic" | sed -n 's/^Priority trust state: *//p' ;;
    pfc) mlnx_qos -i "$nic" | awk '/PFC configuration/ {on=1} on && $1 == "enabled" {$1=""; gsub(/^ +| +$/, ""); gsub(/ +/, ","); print; exit}' ;;
    dscp) mlnx_qos -i "$nic" | awk -v code="$item" '$1 ~ /^prio:[0-7]$/ && $2 ~ /^dscp:/ {
            split($1, prio, ":"); sub(/.*dscp:/, ""); n = split($0, codes, ",")
            for (i = 1; i <= n; i++) if (codes[i] != "" && codes[i] + 0 == code + 0) print prio[2] }' ;;
    sys) cat "$SYS/$item" 2>/dev/null || true ;;
    tclass) sed -n 's/^[^0-9]*\([0-9]*\).*/\1/p' "$SYS/class/infiniband/$nic/tc/1/traffic_class" 2>/dev/null | head -n 1 ;;
    tos) cma_roce_tos -d "$nic" 2>/dev/null | head -n 1 ;;
    mtu) cat "$SYS/class/net/$nic/mtu" ;;
    accl) mlxreg -d "$nic" --reg_name ROCE_ACCL --get 2>/dev/null |
            awk -F'|' -v name="$item" '{gsub(/ /, "")} $1 == name {print ($2 ~ /1$/) ? 1 : 0}' ;;
  esac
}

put() {
  local kind nic item
  IFS=: read -r kind nic item <<< "$1"
  case $kind in
    trust) mlnx_qos -i "$nic" --trust "$2" > /dev/null ;;
    pfc) mlnx_qos -i "$nic" --pfc "$2" > /dev/null ;;
    dscp) mlnx_qos -i "$nic" --dscp2prio "set,$item,$2" > /dev/null ;;
    sys) echo "$2" > "$SYS/$item" ;;
    tclass) echo "$2" > "$SYS/class/infiniband/$nic/tc/1/traffic_class" ;;
    tos) cma_roce_tos -d "$nic" -t "$2" > /dev/null ;;
    mtu) ip link set dev "$nic" mtu "$2" ;;
    accl) mlxreg -d "$nic" --reg_name ROCE_ACCL --set "$item=0x$2" --yes > /dev/null ;;
  esac
}

show() {
  local nic=$1 device=$2 net=$SYS/class/net/$1 ib=$SYS/class/infiniband/$2
  echo "interface=$nic"
  echo "device=$device"
  echo "mtu=$(cat "$net/mtu" 2>/dev/null)"
  mlnx_qos -i "$nic"
  echo "cnp_dscp=$(cat "$net/ecn/roce_np/cnp_dscp" 2>/dev/null)"
  echo "cnp_priority=$(cat "$net/ecn/roce_np/cnp_802p_prio" 2>/dev/null)"
  for p in @{priorities}; do
    echo "ecn_np_$p=$(cat "$net/ecn/roce_np/enable/$p" 2>/dev/null)"
    echo "ecn_rp_$p=$(cat "$net/ecn/roce_rp/enable/$p" 2>/dev/null)"
  done
  echo "traffic_class=$(get "tclass:$device")"
  echo "cma_roce_tos=$(cma_roce_tos -d "$device" 2>/dev/null | head -n 1)"
  echo "gid_index=@{gid_index}"
  echo "gid_type=$(cat "$ib/ports/1/gid_attrs/types/@{gid_index}" 2>/dev/null)"
  echo "gid=$(cat "$ib/ports/1/gids/@{gid_index}" 2>/dev/null)"
  echo "adaptive_retransmission=$(get "accl:$device:roce_adp_retrans_en")"
  echo "out_of_order=$(get "accl:$device:adaptive_routing_forced_en")"
  ethtool -S "$nic" 2>/dev/null | grep -E 'prio[0-7]_(pause|discards)' || true
}

if [[ $MODE == undo ]]; then
  [[ -f $KEPT ]] || { echo "nothing to undo: no $KEPT"; exit 0; }
  tac "$KEPT" | while read -r key old; do
    echo "undo     $key -> $old"
    [[ -n $old ]] && put "$key" "$old"
  done
  rm -f "$KEPT"
  exit 0
fi

if [[ $MODE == show ]]; then
@{shows}
  exit 0
fi

@{settings}
