#!/usr/bin/env python3
"""One curve: the same job gives the same bits however it is run.

Trains a small GPT on text files with four slots, one thread a rank, bf16, for 30
steps, in many configurations, and compares the loss and grad_norm columns of the
metrics and the exported masters byte for byte. Then again with three SIGKILLs of
ranks, each where a failpoint holds the daemon: publishing, deciding, updating. And
with the same three SIGKILLs of the daemon, which is started again on its state while
the ranks wait for it.

usage: one_curve.py --bin=DIR --data=PATH... [--all]
  --bin    holds server/shardd, client/cli/shardctl, trainer/train
  --all    every stage x ranks x weights mode instead of eight of them
Needs nothing but Python's standard library.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

STEPS = 30
SLOTS = 4

# (stage, ranks, weights): each stage, each number of ranks and each mode at least twice.
EIGHT = [
    (0, 1, "shared"), (1, 2, "shared"), (2, 3, "shared"), (3, 4, "shared"),
    (0, 4, "private"), (1, 3, "private"), (2, 2, "private"), (3, 2, "private"),
]
ALL = [(s, r, w) for s in range(4) for r in range(1, 5) for w in ("shared", "private")]

# Ranks that die, and where the daemon is held when they do. `skip` counts from the job's
# start with 3 ranks: the failpoint is passed that often before it holds.
KILLS = [
    ("publishing", "step.publish.after_descriptor", 1),
    ("deciding", "step.decide.before", 2),
    ("updating", "step.update.after_chunk", 0),
]


class Run:
    """A daemon of its own and the directory that goes with it."""

    def __init__(self, binaries, data):
        self.bin = pathlib.Path(binaries)
        self.data = data
        self.dir = tempfile.TemporaryDirectory(prefix="shardd-one-curve-", dir="/tmp")
        self.state = tempfile.TemporaryDirectory(prefix="shardd-one-curve-", dir="/dev/shm")
        self.socket = os.path.join(self.dir.name, "d.sock")
        self.log = open(os.path.join(self.dir.name, "daemon.log"), "w+")
        self.start_daemon()

    def start_daemon(self, *flags):
        self.daemon = subprocess.Popen(
            [self.bin / "server/shardd", f"--listen.socket={self.socket}",
             f"--store.directory={self.state.name}/state", "--failpoints=true", *flags],
            stdout=self.log, stderr=self.log)

    def kill_daemon(self):
        self.daemon.kill()
        self.daemon.wait()

    def close(self):
        self.daemon.send_signal(signal.SIGTERM)
        code = self.daemon.wait()
        if code != 0:
            self.log.seek(0)
            raise SystemExit(f"the daemon ended with {code}:\n{self.log.read()}")
        self.dir.cleanup()
        self.state.cleanup()

    def shardctl(self, *arguments):
        done = subprocess.run(
            [self.bin / "client/cli/shardctl", *arguments, f"--address={self.socket}",
             "--output=json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"shardctl {' '.join(arguments)}: {done.stderr}")
        return json.loads(done.stdout or "{}")

    def start(self, job, stage, ranks, weights, restarts=0):
        """Starts the training; returns the process and its outputs' paths."""
        metrics = os.path.join(self.dir.name, f"{job}.jsonl")
        master = os.path.join(self.dir.name, f"{job}.safetensors")
        command = [
            self.bin / "client/cli/shardctl", "run", f"--ranks={ranks}",
            f"--max-restarts={restarts}", f"--address={self.socket}", "--connect-timeout=30", "--",
            self.bin / "trainer/train", *(f"--data={path}" for path in self.data), f"--job={job}", f"--steps={STEPS}",
            f"--slots={SLOTS}", f"--stage={stage}", f"--weights={weights}", "--dtype=bf16",
            "--threads=1", "--seed=7", "--layers=2", "--d-model=64", "--heads=2", "--context=64",
            "--batch=2", "--warmup=5", f"--metrics={metrics}", f"--export-master={master}",
            "--no-progress"]
        out = open(os.path.join(self.dir.name, f"{job}.out"), "w+")
        return subprocess.Popen(command, stdout=out, stderr=out), metrics, master, out

    def finish(self, started):
        """Waits, and returns (curve, masters): what must be equal."""
        process, metrics, master, out = started
        code = process.wait()
        if code != 0:
            out.seek(0)
            self.log.seek(0)
            raise SystemExit(f"training ended with {code}:\n{out.read()}\n{self.log.read()}")
        curve = []
        with open(metrics, encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                curve.append((row["step"], row["loss_hex"], row["grad_norm_hex"]))
        with open(master, "rb") as file:
            masters = file.read()
        return curve, masters

    def pid_of(self, job, rank):
        status = self.shardctl("status", job)
        for entry in status["jobs"]:
            for session in entry.get("sessions", []):
                if session.get("rank", 0) == rank:
                    return int(session["pid"])
        raise SystemExit(f"rank {rank} of {job} is not there: {status}")

    def job(self, name):
        return self.shardctl("status", name)["jobs"][0]


def check_curve(name, curve, masters, reference):
    if [row[0] for row in curve] != list(range(1, STEPS + 1)):
        raise SystemExit(f"{name}: the metrics do not hold every step once: "
                         f"{[row[0] for row in curve]}")
    if reference is None:
        return
    for ours, theirs in zip(curve, reference[0]):
        if ours != theirs:
            raise SystemExit(f"{name}: step {ours[0]} differs: {ours} against {theirs}")
    if masters != reference[1]:
        raise SystemExit(f"{name}: the exported masters differ")


def undisturbed(run, configurations):
    reference = None
    for stage, ranks, weights in configurations:
        name = f"stage{stage}-ranks{ranks}-{weights}"
        curve, masters = run.finish(run.start(name, stage, ranks, weights))
        check_curve(name, curve, masters, reference)
        reference = reference or (curve, masters)
        job = run.job(name)
        if int(job.get("committed_step", 0)) != STEPS:
            raise SystemExit(f"{name}: committed step {job.get('committed_step')}")
        run.shardctl("job", "delete", name, "--yes")
        print(f"ok {name}: {STEPS} steps, last loss {float.fromhex(curve[-1][1]):.6f}", flush=True)
    return reference


def with_kills(run, stage, weights, reference):
    name = f"kills-stage{stage}-{weights}"
    # The first hold comes in the first steps; each next one is armed while the daemon
    # is held at the one before, so that none can be missed.
    phase, point, victim = KILLS[0]
    run.shardctl("failpoint", "arm", point, "--action=wait", "--skip=40")
    started = run.start(name, stage, 3, weights, restarts=3)
    for index, (phase, point, victim) in enumerate(KILLS):
        run.shardctl("failpoint", "wait", point, "--deadline=60")
        before = int(run.job(name).get("committed_step", 0))
        pid = run.pid_of(name, victim)
        os.kill(pid, signal.SIGKILL)
        if index + 1 < len(KILLS):
            run.shardctl("failpoint", "arm", KILLS[index + 1][1], "--action=wait", "--skip=5")
        run.shardctl("failpoint", "release", point)
        print(f"   {phase}: rank {victim} (pid {pid}) killed at committed step {before}",
              flush=True)
    curve, masters = run.finish(started)
    check_curve(name, curve, masters, reference)
    job = run.job(name)
    recomputed = int(job.get("recomputed_steps", 0))
    regroups = int(job.get("regroups", 0))
    if int(job.get("committed_step", 0)) != STEPS or int(job.get("applied", 0)) != STEPS:
        raise SystemExit(f"{name}: {job}")
    if recomputed > len(KILLS):
        raise SystemExit(f"{name}: {recomputed} steps were computed again for {len(KILLS)} kills")
    if regroups < len(KILLS):
        raise SystemExit(f"{name}: only {regroups} regroups for {len(KILLS)} kills")
    run.shardctl("job", "delete", name, "--yes")
    print(f"ok {name}: {len(KILLS)} kills, {recomputed} steps computed again", flush=True)


def with_daemon_kills(run, stage, weights, reference):
    """The daemon dies three times; nobody starts a rank again."""
    name = f"daemon-kills-stage{stage}-{weights}"
    run.shardctl("failpoint", "arm", KILLS[0][1], "--action=wait", "--skip=40")
    started = run.start(name, stage, 3, weights)
    for index, (phase, point, _) in enumerate(KILLS):
        run.shardctl("failpoint", "wait", point, "--deadline=60", "--connect-timeout=30")
        before = int(run.job(name).get("committed_step", 0))
        run.kill_daemon()
        # The next one is armed before anybody can attach.
        run.start_daemon(*(f"--arm_failpoint={point}:wait"
                           for _, point, _ in KILLS[index + 1:index + 2]))
        print(f"   {phase}: daemon killed at committed step {before}", flush=True)
    curve, masters = run.finish(started)
    check_curve(name, curve, masters, reference)
    job = run.job(name)
    if int(job.get("committed_step", 0)) != STEPS or int(job.get("applied", 0)) != STEPS:
        raise SystemExit(f"{name}: {job}")
    started[3].seek(0)
    reattached = started[3].read().count("re-attached to the daemon")
    if reattached != 3 * len(KILLS):
        raise SystemExit(f"{name}: 3 ranks re-attached {reattached} times in {len(KILLS)} deaths")
    run.shardctl("job", "delete", name, "--yes")
    print(f"ok {name}: {len(KILLS)} deaths of the daemon", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--data", required=True, action="append")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    run = Run(options.bin, options.data)
    try:
        reference = undisturbed(run, ALL if options.all else EIGHT)
        kills = [(s, w) for s in range(4) for w in ("shared", "private")] if options.all else \
            [(2, "shared"), (3, "private")]
        for stage, weights in kills:
            with_kills(run, stage, weights, reference)
        for stage, weights in kills if options.all else [(1, "shared"), (3, "private")]:
            with_daemon_kills(run, stage, weights, reference)
    finally:
        run.daemon.poll() is None and run.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
