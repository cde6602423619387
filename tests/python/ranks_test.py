"""Ranks that are killed: the curve and the weights are those of a run that nobody disturbed."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import harness

SCRIPT = '''
import os, signal, sys, time
import torch, shardd

job, out, deaths = sys.argv[1], sys.argv[2], sys.argv[3].split(",") if sys.argv[3] else []
stage = int(sys.argv[4])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2),
                            torch.nn.Linear(32, 4))
generator = torch.Generator().manual_seed(5)
data = torch.utils.data.TensorDataset(torch.randn(96, 8, generator=generator),
                                      torch.randn(96, 4, generator=generator))
opt = shardd.Optimizer(model, lr=1e-2, job=job, stage=stage)
sched = opt.attach_state(torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=40))
loader = opt.attach_state(shardd.ResumableLoader(data, 8, seed=3))
opt.attach_state(shardd.Rng(11))

def die(where):
    """Once, at that place: RANK:STEP:WHERE."""
    if f"{opt.rank}:{opt._step}:{where}" in deaths:
        mark = f"{out}.{opt.rank}.{opt._step}"
        if not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

model[3].weight.register_post_accumulate_grad_hook(lambda _p: die("backward"))

def steps():
    while loader.epoch < 4:
        for x, y in loader:
            die("forward")
            opt.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            opt.report(loss)
            opt.step()
            sched.step()
            die("after")

while True:
    try:
        steps()
        break
    except shardd.Regrouped:
        continue
if opt.rank == 0:
    records = opt.step_records()
    state = opt.state_dict()["state"]
    import json, hashlib
    with opt.gathered():
        bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    json.dump({"losses": [r.loss for r in records], "lr": [r.lr for r in records],
               "bits": bits.hexdigest(), "generation": records[-1].generation}, open(out, "w"))
'''


class Killed(harness.DaemonCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.script = self.directory / "train.py"
        self.script.write_text(SCRIPT, encoding="utf-8")

    def run_under(self, command, job, deaths, stage=1):
        out = self.directory / f"{job}.json"
        done = subprocess.run([*command, str(self.script), job, str(out), ",".join(deaths),
                               str(stage)],
                              env=harness.environment(SHARDD_ADDRESS=self.daemon.address),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=280, check=False)
        self.assertEqual(done.returncode, 0, done.stdout[-6000:])
        self.assertEqual(len(list(self.directory.glob(f"{job}.json.*"))), len(deaths))
        return json.loads(out.read_text(encoding="utf-8"))

    def compare(self, calm, storm):
        self.assertEqual(len(calm["losses"]), 24)
        self.assertEqual(storm["losses"], calm["losses"])
        self.assertEqual(storm["lr"], calm["lr"])
        self.assertEqual(storm["bits"], calm["bits"])
        self.assertGreater(storm["generation"], calm["generation"])
        self.assertLess(calm["losses"][-1], calm["losses"][0])

    def test_three_times_under_torchrun(self):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1"]
        calm = self.run_under(command, "torchrun-calm", [])
        storm = self.run_under(command, "torchrun-storm",
                               ["1:5:backward", "0:11:after", "1:17:forward"])
        self.compare(calm, storm)

    def test_one_rank_alone_under_shardctl_run(self):
        """The survivor sends its gradients again (stage 1), or computes them again (2 and 3)."""
        command = [str(harness.SHARDCTL), "run", f"--address={self.daemon.address}", "--ranks=2",
                   "--max-restarts=5", "--", sys.executable]
        for stage in (1, 3):
            calm = self.run_under(command, f"ctl-calm-{stage}", [], stage)
            storm = self.run_under(command, f"ctl-storm-{stage}",
                                   ["1:4:backward", "0:9:forward", "1:15:after"], stage)
            self.compare(calm, storm)


if __name__ == "__main__":
    harness.main()
