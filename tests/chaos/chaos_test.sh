#!/usr/bin/env bash
# The chaos runner for a short time, with a seed of its own: one daemon, one with a journal, two.
set -euo pipefail
root=$TEST_SRCDIR/shardd
for kind in "" --journal --daemons=2; do
  "$root/tests/chaos/chaos" --shardd="$root/server/shardd" --shardctl="$root/client/cli/shardctl" \
    --rank="$root/tests/chaos/chaos_rank" --certs="$root/deploy/certs" --seconds=15 --seed=7 \
    --any-phases $kind
done
