#!/usr/bin/env bash
# The installed units are valid and cut the daemon off as they should; the daemon
# tells a service manager when it is ready and when it ends.
set -euo pipefail
source=$TEST_SRCDIR/shardd
work=$(mktemp -d /tmp/shardd-systemd-XXXXXX)
state=$(mktemp -d /dev/shm/shardd-systemd-XXXXXX)
trap 'rm -rf "$work" "$state"' EXIT
fail() { echo "FAILED: $1" >&2; exit 1; }

"$source/deploy/install" --prefix="$work/prefix" --built="$source" >/dev/null
units=$work/prefix/lib/systemd/system
# Warnings count: verify prints them and still ends with 0.
said=$(systemd-analyze verify --man=no "$units/shardd.service" "$units/run-shardd-state.mount" 2>&1) ||
  fail "systemd-analyze verify: $said"
[[ $said != *"$units"* && $said != *shardd.service* && $said != *run-shardd* ]] ||
  fail "systemd-analyze verify: $said"

exposure=$(systemd-analyze security --offline=true --no-pager "$units/shardd.service" |
  sed -n 's/.*Overall exposure level for shardd.service: \([0-9.]*\) .*/\1/p')
echo "exposure level: $exposure"
[[ -n $exposure ]] || fail "systemd-analyze security printed no level"
awk -v level="$exposure" 'BEGIN { exit !(level <= 2.0) }' || fail "exposure level $exposure is above 2.0"
for line in Type=notify LimitMEMLOCK=infinity RuntimeDirectory=shardd User=shardd; do
  grep -q "^$line\$" "$units/shardd.service" || fail "no $line"
done
if grep -Eq '^(PrivateUsers|RemoveIPC)=yes|^SystemCallFilter=~.*@resources' "$units/shardd.service"; then
  fail "a right that the daemon needs is taken away"
fi
grep -q 'huge=always' "$units/run-shardd-state.mount" || fail "the state directory has no huge pages"

mkfifo "$work/notes"
python3 "$source/deploy/testdata/notify_listener.py" "$work/notify" >"$work/notes" &
exec 3<"$work/notes"
# Waits for a line that begins so.
await() {
  local line
  while read -r -t 60 -u 3 line; do
    [[ $line != "$1"* ]] || return 0
  done
  fail "the service manager never saw $1"
}
await listening
NOTIFY_SOCKET=$work/notify "$work/prefix/bin/shardd" --listen.socket="$work/shardd.sock" \
  --store.directory="$state" &
daemon=$!
await READY=1
"$work/prefix/bin/shardctl" version --address="$work/shardd.sock" >"$work/version"
grep -q '^shardd    *[0-9]' "$work/version" || fail "ready, and does not answer: $(cat "$work/version")"
kill "$daemon"
await STOPPING=1
wait "$daemon" || fail "the daemon ended with $?"
