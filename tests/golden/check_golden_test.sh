#!/usr/bin/env bash
# Exit codes and last line of the checker that tests/golden/check runs.
set -uo pipefail
checker=tests/golden/check_golden
good=tests/golden/optimizer_adamw.safetensors
bad="$TEST_TMPDIR/bad.safetensors"
sed 's/"weight_decay":"0.01"/"weight_decay":"0.02"/' "$good" >"$bad"
cmp -s "$good" "$bad" && { echo "the altered file is the same"; exit 1; }
failures=0

# expect RC LAST_LINE FILE...
expect() {
  local rc=$1 last=$2 out got
  shift 2
  out=$("$checker" "$@" 2>&1)
  got=$?
  if [[ $got -ne $rc || $(tail -n 1 <<<"$out") != "$last" ]]; then
    printf 'check %s: exit %d, wanted %d and a last line "%s":\n%s\n' "$*" $got "$rc" "$last" "$out"
    failures=1
  fi
}
expect 0 "1 passed, 0 failed" "$good"
expect 1 "1 passed, 2 failed" "$bad" "$good" "$TEST_TMPDIR/absent"
expect 2 "usage: check FILE..."
exit "$failures"
