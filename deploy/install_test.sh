#!/usr/bin/env bash
# deploy/install into a prefix: everything is there, a program outside of the
# workspace builds with pkg-config and trains through the installed daemon.
set -euo pipefail
source=$TEST_SRCDIR/shardd
work=$(mktemp -d /tmp/shardd-install-XXXXXX)
state=$(mktemp -d /dev/shm/shardd-install-XXXXXX)
daemon=''
cleanup() {
  [[ -z $daemon ]] || kill "$daemon" 2>/dev/null || true
  wait
  rm -rf "$work" "$state"
}
trap cleanup EXIT
fail() { echo "FAILED: $1" >&2; exit 1; }

prefix=$work/prefix
"$source/deploy/install" --prefix="$prefix" --built="$source"
for file in bin/shardd bin/shardctl bin/shardd-train lib/libshardd_client.so lib/libshardd_client.so.0 \
  include/shardd/client.h lib/pkgconfig/shardd-client.pc lib/systemd/system/shardd.service \
  lib/systemd/system/run-shardd-state.mount lib/sysusers.d/shardd.conf etc/shardd/shardd.json; do
  [[ -e $prefix/$file ]] || fail "no $file"
done
grep -rIl '@[A-Z]*@' "$prefix/lib" && fail "unfilled templates"
"$prefix/bin/shardd" --check-config --config="$prefix/etc/shardd/shardd.json" >"$work/config"
grep -q '"socket_mode": "0660"' "$work/config" || fail "the sample configuration was not read"

# Again: a changed configuration stays.
echo '{"step": {"threads": 3}}' >"$prefix/etc/shardd/shardd.json"
said=$("$source/deploy/install" --prefix="$prefix" --built="$source")
[[ $said == *"stays as it is"* ]] ||
  fail "says nothing of the configuration that is there"
grep -q '"threads": 3' "$prefix/etc/shardd/shardd.json" || fail "the configuration was replaced"

# For packaging: paths without, files with the stage before them.
"$source/deploy/install" --prefix=/usr --destdir="$work/stage" --built="$source"
grep -q '^ExecStart=/usr/bin/shardd --config=/etc/shardd/shardd.json$' \
  "$work/stage/usr/lib/systemd/system/shardd.service" || fail "the staged unit has other paths"
[[ -f $work/stage/etc/shardd/shardd.json ]] || fail "no staged configuration"
if "$source/deploy/install" --built="$source" 2>/dev/null; then fail "no --prefix, and no error"; fi

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
[[ $(pkg-config --modversion shardd-client) == $("$prefix/bin/shardd" --version | cut -d' ' -f2) ]] ||
  fail "pkg-config and shardd name different versions"
cp "$source/deploy/testdata/one_step.cc" "$work"
(cd "$work" && g++ -std=c++20 -O1 one_step.cc -o one_step $(pkg-config --cflags --libs shardd-client))

"$prefix/bin/shardd" --listen.socket="$work/shardd.sock" --store.directory="$state" &
daemon=$!
said=$("$prefix/bin/shardctl" run --connect-timeout=60 --address="$work/shardd.sock" -- "$work/one_step")
# 1 - 0.5 of the step - 0.5 * 0.01 of decay.
[[ $said == "[0] step 1 weight 0.495" ]] || fail "the program printed '$said'"
said=$("$prefix/bin/shardctl" jobs --address="$work/shardd.sock")
[[ $said == *$'\n'"one-step "* ]] || fail "the daemon does not know the job: $said"
kill "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
daemon=''
