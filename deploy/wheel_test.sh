#!/usr/bin/env bash
# The wheel in a fresh environment: it installs, its daemon and shardctl run, and a plain PyTorch
# script trains with it. PyTorch itself is that of tests/export/setup.
set -euo pipefail
home="$(getent passwd "$(id -u)" | cut -d: -f6)"
environment="$home/.cache/shardd/python"
directory=$(mktemp -d /tmp/shardd-wheel.XXXXXX)
trap 'rm -rf "$directory"' EXIT
deploy/wheel --built=. --output="$directory"
/usr/bin/python3 -m venv "$directory/venv"
echo "$environment/lib/python3.11/site-packages" \
  >"$directory/venv/lib/python3.11/site-packages/pytorch.pth"
"$directory/venv/bin/pip" --quiet --disable-pip-version-check install --no-index --no-deps \
  "$directory"/shardd-*.whl
unset PYTHONPATH SHARDD_DAEMON_BINARY SHARDD_ADDRESS
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
"$directory/venv/bin/shardctl" version
# Not the libraries that the machine happens to have.
loaded=$(ldd "$directory"/venv/lib/python3.11/site-packages/shardd/_native.so | grep -c "$directory")
[[ $loaded -gt 10 ]] || { echo "the module loads $loaded libraries of the wheel" >&2; exit 1; }
cd "$directory"
cat >train.py <<'PY'
import torch
import shardd
model = torch.nn.Linear(4, 1)
opt = shardd.Optimizer(model.parameters(), lr=0.1)
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)
losses = []
for _ in range(60):
    opt.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())
print(losses[0], losses[-1])
assert losses[-1] < losses[0] / 10
PY
"$directory/venv/bin/python" train.py
