#!/usr/bin/env python3
"""Exported weights are a Hugging Face checkpoint.

Trains a small GPT-2 in fp32, exports it from the running job and from a checkpoint's
directory, loads both with transformers' GPT2LMHeadModel.from_pretrained, and compares the
loss on a held batch with the trainer's own (within 1e-4). The bf16 export loads too, and the
`safetensors` package reads every file of the checkpoint as the manifest says.

usage: from_pretrained.py --bin=DIR --data=PATH...
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile

import numpy
import safetensors
import torch
import transformers

LAYERS, WIDTH, HEADS, CONTEXT, STEPS = 2, 64, 2, 64, 30
HELD = b"A daemon that dies and the one that takes up what it left: 64 bytes, .."


def run(*command, env=None):
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, env=env, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def train(binaries, socket, data, held):
    """Returns the trainer's loss on the held batch."""
    env = dict(os.environ, SHARDD_ADDRESS=socket, RANK="0", WORLD_SIZE="1")
    text = run(binaries / "trainer/train", *(f"--data={path}" for path in data),
               f"--heldout={held}", "--job=gpt", f"--steps={STEPS}", "--dtype=fp32", "--threads=1",
               "--seed=7", f"--layers={LAYERS}", f"--d-model={WIDTH}", f"--heads={HEADS}",
               f"--context={CONTEXT}", "--batch=4", "--warmup=5", "--no-progress", env=env)
    found = re.search(r"loss_first=([0-9.]+) .*loss_heldout=([0-9.]+)", text)
    if not found:
        raise SystemExit(f"the trainer did not say its loss: {text}")
    first, heldout = float(found.group(1)), float(found.group(2))
    if not heldout < first - 0.5:
        raise SystemExit(f"nothing was learned: {first} to {heldout}")
    return heldout


def loss_of(weights, dtype):
    """The loss of the model that transformers makes of an exported file."""
    with tempfile.TemporaryDirectory(prefix="shardd-export-", dir="/tmp") as directory:
        shutil.copy(weights, os.path.join(directory, "model.safetensors"))
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
            activation_function="gelu_new", layer_norm_epsilon=1e-5, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
        config.save_pretrained(directory)
        model, info = transformers.GPT2LMHeadModel.from_pretrained(
            directory, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info[kind]:
            raise SystemExit(f"from_pretrained of {weights}: {kind}: {info[kind]}")
    if model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr():
        raise SystemExit("the output matrix is not tied to the embedding")
    model = model.to(dtype).float().eval()
    held = torch.tensor([list(HELD[:CONTEXT + 1])])
    with torch.no_grad():
        logits = model(held[:, :-1]).logits[0]
        return torch.nn.functional.cross_entropy(logits, held[0, 1:]).item()


def compare(name, loss, expected, tolerance):
    print(f"{name}: loss {loss:.6f}, the trainer's {expected:.4f}")
    if not abs(loss - expected) <= tolerance:
        raise SystemExit(f"{name}: {loss} is not {expected}")


def check_checkpoint(path):
    """Every tensor as the safetensors package sees it."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    if manifest["step"] != STEPS or manifest["set"] != {"member": 1, "members": 1}:
        raise SystemExit(f"the manifest says step {manifest['step']}, set {manifest['set']}")
    names = 0
    for file in manifest["files"]:
        with safetensors.safe_open(path / file["name"], "np") as tensors:
            if list(tensors.keys()) != sorted(t["name"] for t in file["tensors"]):
                raise SystemExit(f"{file['name']} has other tensors than its manifest")
            for tensor in file["tensors"]:
                shape = manifest["parameters"][tensor["parameter"]]["shape"]
                value = tensors.get_tensor(tensor["name"])
                if list(value.shape) != shape or value.dtype != numpy.float32:
                    raise SystemExit(f"{tensor['name']}: {value.dtype} {value.shape}")
                names += 1
    if names != 3 * len(manifest["parameters"]):
        raise SystemExit(f"{names} tensors for {len(manifest['parameters'])} parameters")


def check(binaries, data, root):
    held = root / "held.txt"
    held.write_bytes(HELD[:CONTEXT + 1])
    socket = str(root / "d.sock")
    with tempfile.TemporaryDirectory(prefix="shardd-export-", dir="/dev/shm") as state:
        daemon = subprocess.Popen(
            [binaries / "server/shardd", f"--listen.socket={socket}",
             f"--store.directory={state}/state", f"--checkpoint.directory={root}/ckpt"],
            stderr=subprocess.DEVNULL)
        try:
            shardctl = binaries / "client/cli/shardctl"
            at = [f"--address={socket}", "--connect-timeout=30"]
            run(shardctl, "status", *at)
            expected = train(binaries, socket, data, held)
            run(shardctl, "checkpoint", "export", "gpt", "--prefix=transformer.",
                "--name=live.safetensors", *at)
            run(shardctl, "checkpoint", "save", "gpt", *at)
        finally:
            daemon.send_signal(signal.SIGTERM)
            if daemon.wait() != 0:
                raise SystemExit(f"the daemon ended with {daemon.returncode}")
    step = root / f"ckpt/gpt/step-{STEPS:010d}"
    check_checkpoint(step)
    compare("from the running job", loss_of(root / "ckpt/gpt/live.safetensors", torch.float32),
            expected, 1e-4)
    for dtype, tolerance in (("fp32", 1e-4), ("bf16", 0.05)):
        to = root / f"{dtype}.safetensors"
        run(shardctl, "checkpoint", "export", f"{step}/", "--prefix=transformer.",
            f"--dtype={dtype}", f"--to={to}")
        compare(f"from the directory, {dtype}",
                loss_of(to, torch.bfloat16 if dtype == "bf16" else torch.float32), expected,
                tolerance)
    if (root / "fp32.safetensors").read_bytes() != (
            root / "ckpt/gpt/live.safetensors").read_bytes():
        raise SystemExit("the export of the job and that of its checkpoint differ")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--data", action="append", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardd-export-", dir="/tmp") as directory:
        check(pathlib.Path(options.bin), options.data, pathlib.Path(directory))
    print("from_pretrained: equal")


if __name__ == "__main__":
    main()
