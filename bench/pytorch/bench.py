#!/usr/bin/env python3
"""Step time and host memory of one GPT-2 script on 2 ranks, with shardd and its peers.

usage: bench/run pytorch [--json] [--rounds=N] [--steps=N] [--layers=N] [--width=N]

Systems take turns, N rounds each; a figure is the median over all steps. Memory is what all ranks
and the daemon have above what they had before the model was made. A system that cannot run is
reported with its error.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SYSTEMS = ["shardd", "ddp", "fsdp2", "deepspeed"]
NAMES = {"shardd": "shardd, stage 2", "ddp": "DDP + AdamW", "fsdp2": "FSDP2 + AdamW",
         "deepspeed": "DeepSpeed ZeRO-2 (CPU)"}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def pss(pid):
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    return int(re.search(r"^Pss:\s+(\d+)", text, re.M).group(1)) * 1024


class Daemon:
    def __init__(self, binary):
        self.directory = tempfile.mkdtemp(prefix="shardd-bench-", dir="/tmp")
        self.state = tempfile.mkdtemp(prefix="shardd-bench-", dir="/dev/shm")
        self.address = f"{self.directory}/d.sock"
        self.process = subprocess.Popen(
            [binary, f"--listen.socket={self.address}", f"--store.directory={self.state}/state"],
            stderr=subprocess.DEVNULL)

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.state, ignore_errors=True)


def run_round(system, options, arguments, daemon, log):
    """One round of one system: {"seconds", "bytes", "parameters"}."""
    env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2",
               OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu",
               TRANSFORMERS_OFFLINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
               LOCAL_SIZE="2", SHARDD_ADDRESS=daemon.address)
    env["PYTHONPATH"] = arguments.package
    if system == "deepspeed":
        env["PYTHONPATH"] += ":" + arguments.deepspeed
        env["PATH"] = f"{arguments.deepspeed}/bin:{env['PATH']}"
    held = pss(daemon.process.pid)
    ranks = []
    for rank in range(2):
        ranks.append(subprocess.Popen(
            [sys.executable, "-u", HERE / "rank.py", system, str(arguments.steps),
             json.dumps(options)],
            env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank)), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log))
    result = None
    for line in ranks[0].stdout:
        if line.startswith("RESULT "):
            result = json.loads(line[len("RESULT "):])
            if system == "shardd":
                result["bytes"] += pss(daemon.process.pid) - held
            break
    for process in ranks:
        if result is None:
            process.kill()
        process.communicate("\n" if process is ranks[0] and result else None)
    return result


def measure(arguments, daemon):
    options = {"vocabulary": 16384, "context": 64, "batch": 4, "width": arguments.width,
               "layers": arguments.layers, "warmup": 3}
    results = {system: [] for system in SYSTEMS}
    errors = {}
    for number in range(arguments.rounds):
        for system in SYSTEMS:
            if system in errors:
                continue
            with tempfile.TemporaryFile("w+") as log:
                found = run_round(system, dict(options, job=f"bench-{number}"), arguments, daemon,
                                  log)
                if found is None:
                    log.seek(0)
                    lines = [re.sub(r"^\[rank\d+\]: ", "", line.strip()) for line in log]
                    lines = [line for line in lines if line]
                    said = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
                    errors[system] = (said or lines or ["it ended without a word"])[0][:300]
                else:
                    results[system].append(found)
    return results, errors


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    for name in ("daemon", "package", "deepspeed"):
        parser.add_argument(f"--{name}", required=True, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    daemon = Daemon(arguments.daemon)
    try:
        results, errors = measure(arguments, daemon)
    finally:
        daemon.close()
    for system in SYSTEMS:
        line = {"bench": "pytorch", "system": NAMES[system], "ranks": 2}
        if system in errors:
            line["error"] = errors[system]
        else:
            seconds = [s for r in results[system] for s in r["seconds"]]
            line.update(parameters=results[system][0]["parameters"],
                        step_seconds=round(statistics.median(seconds), 4),
                        step_seconds_least=round(min(seconds), 4),
                        host_bytes_per_parameter=round(statistics.median(
                            r["bytes"] / r["parameters"] for r in results[system]), 1))
        print(json.dumps(line) if arguments.json
              else "  ".join(f"{k}={v}" for k, v in line.items()), flush=True)
    return 1 if "shardd" in errors else 0


sys.exit(main())
