"""Situations of PyTorch scripts that must come out right."""

import copy
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import warnings

import torch

import harness
import shardd


def same(case, a, b, tolerance=2e-6):
    for (name, p), q in zip(a.named_parameters(), b.named_parameters()):
        difference = (p.float() - q[1].float()).abs().max().item() if p.numel() else 0.0
        case.assertLessEqual(difference, tolerance, name)


def step(model, optimizer, x, loss=lambda out: (out ** 2).mean()):
    optimizer.zero_grad()
    value = loss(model(x))
    value.backward()
    optimizer.step()
    return value.item()


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.mix = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class Parameters(harness.DaemonCase):
    def both(self, model, steps, make_groups=lambda m: m.parameters(), stages=(0, 2), **options):
        """Trains it with shardd and with torch's AdamW; steps(model, optimizer)."""
        for stage in stages:
            ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
            a = shardd.Optimizer(make_groups(ours), model=ours, job=f"{self.job()}-{stage}",
                                 stage=stage, lr=1e-2, **options)
            self.addCleanup(a.close)
            b = torch.optim.AdamW(make_groups(theirs), lr=1e-2)
            steps(ours, a)
            steps(theirs, b)
            same(self, ours, theirs)
        return ours, a

    def test_tied_weights(self):
        torch.manual_seed(0)
        tokens = torch.randint(0, 16, (4, 5))

        def steps(m, o):
            for _ in range(5):
                step(m, o, tokens, lambda out: out.logsumexp(-1).mean())
        model, _ = self.both(Tied(), steps, stages=(0, 2))
        self.assertIs(model.head.weight, model.embed.weight)
        names = self.daemon.shardctl("shards", "test-tied-weights-0")
        self.assertTrue(names)

    def test_frozen_parameters_that_are_unfrozen_later(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        x = torch.randn(8, 4)

        def steps(m, o):
            m[0].requires_grad_(False)
            for _ in range(3):
                step(m, o, x)
            m[0].requires_grad_(True)
            for _ in range(3):
                step(m, o, x)
        _, ours = self.both(model, steps)
        self.assertEqual(ours._session.parameter_applied(0), 3)  # it has its own step count
        self.assertEqual(ours._session.parameter_applied(2), 6)

    def test_groups_with_no_elements_keep_their_indices(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 12, bias=False)  # 192 elements
        model.empty = torch.nn.Parameter(torch.zeros(0))
        model.other = torch.nn.Linear(4, 3)
        x = torch.randn(8, 16)

        def groups(m):
            return [{"params": [m.weight], "lr": 3e-2}, {"params": [m.empty], "lr": 5.0},
                    {"params": list(m.other.parameters()), "weight_decay": 0.3}]

        def steps(m, o):
            for _ in range(4):
                step(m, o, x, lambda out: (out ** 2).mean() + m.other(out[:, :4]).sum())
        _, ours = self.both(model, steps, groups)
        state = ours.state_dict()
        self.assertEqual([g["params"] for g in state["param_groups"]], [[0], [1], [2, 3]])
        self.assertEqual(sorted(state["state"]), [0, 2, 3])
        self.assertEqual([g["lr"] for g in state["param_groups"]], [3e-2, 5.0, 1e-2])

    def test_a_parameter_that_is_not_used_in_a_step(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        x = torch.randn(8, 4)

        def steps(m, o):
            for i in range(6):
                o.zero_grad()
                (m(x) if i % 2 else m[0](x)).pow(2).mean().backward()
                o.step()
        self.both(model, steps)

    def test_sparse_gradients_are_refused_by_name(self):
        model = torch.nn.Embedding(8, 4, sparse=True)
        ours = shardd.Optimizer(model, job=self.job())
        self.addCleanup(ours.close)
        with self.assertRaisesRegex(TypeError, "'weight' is sparse.*sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()

    def test_changed_before_the_first_step_is_taken_over(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        x = torch.randn(8, 4)

        def steps(m, o):
            m.weight.data.copy_(torch.eye(4))
            for _ in range(3):
                step(m, o, x)
        self.both(model, steps)

    def test_changed_between_steps_is_said_by_name_and_then_taken(self):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
        reference = copy.deepcopy(model)
        ours = shardd.Optimizer(model, job=self.job())
        self.addCleanup(ours.close)
        theirs = torch.optim.AdamW(reference.parameters())
        for m, o in ((model, ours), (reference, theirs)):
            step(m, o, x)
            step(m, o, x)
            m.weight.data[1, 2] = 3.0
        with self.assertRaisesRegex(shardd.ParameterChanged, "'weight' was changed.*take_param"):
            step(model, ours, x)
        ours.take_parameters()
        for m, o in ((model, ours), (reference, theirs)):
            step(m, o, x)
            step(m, o, x)
        same(self, model, reference)
        self.assertEqual(ours._session.parameter_applied(0), 4)

    def test_strides_scalars_and_mixed_dtypes(self):
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.turned = torch.nn.Parameter(torch.randn(5, 3).t())
        model.scale = torch.nn.Parameter(torch.tensor(1.5))
        model.small = torch.nn.Parameter(torch.randn(3, 3).bfloat16())
        self.assertFalse(model.turned.is_contiguous())
        x = torch.randn(8, 3)

        def loss(m):
            return ((x @ m.small.float() @ m.turned) * m.scale).pow(2).mean()
        ours = shardd.Optimizer(model, job=self.job(), lr=1e-2)
        self.addCleanup(ours.close)
        # What mixed precision training does: fp32 masters, bf16 weights rounded from them.
        masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
        theirs = torch.optim.AdamW(masters, lr=1e-2)
        for _ in range(5):
            ours.zero_grad()
            loss(model).backward()
            for p, m in zip(model.parameters(), masters):
                m.grad = p.grad.float()
            ours.step()
            theirs.step()
            for p, m in zip(model.parameters(), masters):
                self.assertLessEqual((p.float() - m.to(p.dtype).float()).abs().max().item(), 1e-2
                                     if p.dtype is torch.bfloat16 else 2e-6)
        entry = ours.state_dict()["state"][2]
        self.assertLessEqual((entry["master"] - masters[2]).abs().max().item(), 2e-5)

    def test_bf16_parameters_have_fp32_masters(self):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).bfloat16()
        ours = shardd.Optimizer(model, job=self.job(), lr=1e-4, stage=2)
        self.addCleanup(ours.close)
        before = model.weight.detach().clone()
        x = torch.randn(16, 8).bfloat16()
        for _ in range(60):
            step(model, ours, x, lambda out: out.float().pow(2).mean())
        self.assertEqual(model.weight.dtype, torch.bfloat16)
        moved = ours.state_dict()["state"][0]["master"] - before.float()
        self.assertGreater(moved.abs().mean().item(), 1e-3)  # single steps are below bf16's
        self.assertTrue(torch.equal(model.weight, (before.float() + moved).bfloat16()))

    def test_two_optimizers_are_two_jobs_of_one_process(self):
        torch.manual_seed(0)
        models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        references = copy.deepcopy(models)
        x = torch.randn(8, 4)
        with shardd.Optimizer(models[0], job="one", lr=1e-2) as a, \
                shardd.Optimizer(models[1], job="two", lr=1e-3) as b:
            c = torch.optim.AdamW(references[0].parameters(), lr=1e-2)
            d = torch.optim.AdamW(references[1].parameters(), lr=1e-3)
            for (m, n), (o, p) in ((models, (a, b)), (references, (c, d))):
                for _ in range(4):  # as a GAN's, with gradients of both at once
                    o.zero_grad()
                    p.zero_grad()
                    n(m(x)).pow(2).mean().backward()
                    o.step()
                    p.step()
        for m, n in zip(models, references):
            same(self, m, n)

    def test_load_state_dict_of_torch_and_back(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
        x = torch.randn(8, 8)
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(7):
            step(model, theirs, x)
        for stage in range(4):
            ours_model, reference = copy.deepcopy(model), copy.deepcopy(model)
            b = torch.optim.AdamW(reference.parameters(), lr=1.0)
            b.load_state_dict(theirs.state_dict())
            with shardd.Optimizer(ours_model, job=f"{self.job()}-{stage}", stage=stage) as a:
                a.load_state_dict(theirs.state_dict())
                self.assertEqual(a.param_groups[0]["lr"], 1e-2)
                for _ in range(3):
                    step(ours_model, a, x)
                    step(reference, b, x)
                state = a.state_dict()["state"]
            for index, entry in b.state_dict()["state"].items():
                self.assertEqual(float(state[index]["step"]), float(entry["step"]))
                for key in ("exp_avg", "exp_avg_sq"):
                    self.assertLessEqual((state[index][key] - entry[key]).abs().max().item(), 1e-6)
            same(self, ours_model, reference)

    def test_load_state_dict_of_another_model_is_refused(self):
        model = torch.nn.Linear(4, 4)
        ours = shardd.Optimizer(model, job=self.job())
        self.addCleanup(ours.close)
        other = torch.optim.AdamW(torch.nn.Linear(5, 4).parameters())
        next(iter(other.param_groups[0]["params"])).grad = torch.zeros(4, 5)
        other.step()
        with self.assertRaisesRegex(ValueError, "'weight' has shape"):
            ours.load_state_dict(other.state_dict())
        with self.assertRaisesRegex(ValueError, "different number of parameter groups"):
            ours.load_state_dict({"state": {}, "param_groups": []})


class Stage3(harness.DaemonCase):
    def test_matches_adamw_with_layers_gathered_and_released(self):
        torch.manual_seed(0)
        model = Tied()
        reference = copy.deepcopy(model)
        tokens = torch.randint(0, 16, (4, 5))
        ours = shardd.Optimizer(model, job=self.job(), stage=3, lr=1e-2)
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        seen = []
        model.mix.register_forward_hook(
            lambda *_: seen.append((model.mix.weight.numel(), model.embed.weight.numel())))
        for _ in range(5):
            self.assertEqual([p.numel() for p in model.parameters()], [0, 0, 0])
            for m, o in ((model, ours), (reference, theirs)):
                step(m, o, tokens, lambda out: out.logsumexp(-1).mean())
        self.assertEqual(seen[1:], [(0, 0)] * 4)  # released before hooks of ours come later
        with ours.gathered():
            same(self, model, reference)
        with torch.no_grad():
            a, b = model(tokens), reference(tokens)
        self.assertLessEqual((a - b).abs().max().item(), 1e-5)
        ours.close()
        same(self, model, reference)  # the weights stay with the model

    def test_checkpointed_activations_and_modules_used_twice(self):
        torch.manual_seed(0)
        inner = torch.nn.Linear(6, 6)
        model = torch.nn.ModuleDict({"inner": inner, "out": torch.nn.Linear(6, 2)})
        reference = copy.deepcopy(model)
        x = torch.randn(4, 6)

        def run(m):
            from torch.utils.checkpoint import checkpoint
            h = checkpoint(lambda v: torch.tanh(m["inner"](torch.relu(m["inner"](v)))), x,
                           use_reentrant=False)
            return m["out"](h).pow(2).mean()
        ours = shardd.Optimizer(model, job=self.job(), stage=3, lr=1e-2)
        self.addCleanup(ours.close)
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        for _ in range(4):
            for m, o in ((model, ours), (reference, theirs)):
                o.zero_grad()
                run(m).backward()
                o.step()
        with ours.gathered():
            same(self, model, reference)

    def test_a_change_of_gathered_weights_is_said_by_name(self):
        model = torch.nn.Linear(4, 4)
        ours = shardd.Optimizer(model, job=self.job(), stage=3)
        self.addCleanup(ours.close)
        with self.assertRaisesRegex(shardd.ParameterChanged, "'weight'"):
            with ours.gathered():
                model.weight.data.zero_()

    def test_what_cannot_be_sharded_is_said(self):
        with self.assertRaisesRegex(ValueError, "give the module"):
            shardd.Optimizer(torch.nn.Linear(2, 2).parameters(), job=self.job(), stage=3)
        mixed = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16()])
        with self.assertRaisesRegex(TypeError, "one dtype"):
            shardd.Optimizer(mixed, job=self.job(), stage=3)


LOOP = """
import sys, torch, shardd
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
opt = shardd.Optimizer(model, job=sys.argv[1])
x = torch.randn(8, 4)
def step():
    opt.zero_grad()
    model(x).pow(2).mean().backward()
    opt.step()
"""


class Processes(harness.DaemonCase):
    def address(self):
        return {"SHARDD_ADDRESS": self.daemon.address}

    def test_fork_in_a_data_loader(self):
        done = harness.run_python(LOOP + """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        w = torch.randn(4, requires_grad=True)
        w.sum().backward()
        return x[i % 8] + 0 * w.grad
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2,
                                     multiprocessing_context="fork")
for epoch in range(2):
    for batch in loader:
        opt.zero_grad(); model(batch).pow(2).mean().backward(); opt.step()
print(opt.last.step)
""", self.job(), **self.address())
        self.assertEqual(done.stdout.strip(), "8")

    def test_a_forked_child_may_not_use_it(self):
        done = harness.run_python(LOOP + """
import os
step()
pid = os.fork()
if pid == 0:
    try:
        step()
    except shardd.Error as error:
        print(error, flush=True)
    del opt
    import gc; gc.collect()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
step(); print(opt.last.step)
""", self.job(), **self.address())
        self.assertIn("was forked", done.stdout)
        self.assertEqual(done.stdout.strip()[-1], "2")

    def test_spawned_ranks(self):
        script = """
import os, sys, torch, shardd
import torch.distributed as dist
def main(rank, job, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(rank)  # weights are rank 0's
    model = torch.nn.Linear(4, 1)
    opt = shardd.Optimizer(model, job=job)
    for s in range(3):
        opt.zero_grad(); model(torch.ones(2, 4) * (rank + 1)).pow(2).mean().backward(); opt.step()
    weights = [torch.zeros(1, 4) for _ in range(2)]
    dist.all_gather(weights, model.weight.detach())
    assert torch.equal(*weights)
    if rank == 0: print(opt.last.step, opt.world_size)
if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1], sys.argv[2]), nprocs=2)
"""
        import pathlib
        import tempfile
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "script.py"
            path.write_text(script, encoding="utf-8")
            done = harness.run_python(path, self.job(), harness.free_port(), **self.address())
        self.assertEqual(done.stdout.split(), ["3", "2"])

    def test_no_main_as_in_a_notebook(self):
        code = ("import torch, shardd\nmodel = torch.nn.Linear(2, 2)\n"
                "a = shardd.Optimizer(model)\nb = shardd.Optimizer(torch.nn.Linear(2, 2))\n"
                "model(torch.ones(1, 2)).sum().backward()\na.step()\nprint(a.job, b.job)\n")
        done = subprocess.run([sys.executable, "-"], input=code, text=True, check=True,
                              stdout=subprocess.PIPE, timeout=120,
                              env=harness.environment(**self.address()))
        self.assertEqual(done.stdout.split(), ["notebook", "notebook-2"])

    def test_ctrl_c_ends_a_wait_for_another_rank(self):
        child = harness.start_python(LOOP.replace("opt =", "print('there', flush=True)\nopt =")
                                     + "step()\n", self.job(), RANK=0, WORLD_SIZE=2,
                                     **self.address())
        self.addCleanup(child.kill)
        child.stdout.readline()
        # It joins a group whose other rank never comes.
        while "test-ctrl-c" not in self.daemon.shardctl("jobs"):
            pass
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
        self.assertIn("KeyboardInterrupt", error)
        self.assertLess(time.monotonic() - began, 5)

    def test_ctrl_c_in_step_and_on(self):
        """A step that was interrupted is seen to its end by the next call."""
        other = harness.start_python(
            LOOP + "step(); sys.stdin.readline(); step(); step(); print('done')",
            self.job(), RANK=1, WORLD_SIZE=2, **self.address())
        self.addCleanup(other.kill)
        child = harness.start_python(LOOP + """
import os, signal, threading
step()
def interrupt():
    while not opt._session.ending: pass
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    step()
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
step()
print(opt.last.step)
""", self.job(), RANK=0, WORLD_SIZE=2, **self.address())
        self.addCleanup(child.kill)
        self.assertEqual(child.stdout.readline().strip(), "interrupted")
        other.stdin.write("\n")
        other.stdin.flush()
        out, error = child.communicate("\n", timeout=60)
        self.assertEqual(child.returncode, 0, error)
        self.assertEqual(out.strip(), "3")
        out, error = other.communicate(timeout=60)
        self.assertEqual(out.strip(), "done", error)


class Deaths(unittest.TestCase):
    def setUp(self):
        self.daemon = harness.Daemon()
        self.addCleanup(self.daemon.close)

    def test_the_daemon_restarts_in_the_middle_of_backward(self):
        os.environ["SHARDD_ADDRESS"] = self.daemon.address
        self.addCleanup(os.environ.pop, "SHARDD_ADDRESS")
        for stage in (1, 3):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
            reference = copy.deepcopy(model)
            x = torch.randn(8, 8)
            ours = shardd.Optimizer(model, job=f"mid-{stage}", stage=stage, lr=1e-2)
            theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
            restart_at = []

            def hook(_grad):
                if restart_at:
                    restart_at.pop()
                    self.daemon.restart()
            model[2].register_forward_hook(lambda _m, _i, out: out.register_hook(hook) and None)
            for i in range(6):
                if i == 3:
                    restart_at.append(True)
                try:
                    step(model, ours, x)
                except shardd.Regrouped as regrouped:
                    self.assertEqual((stage, regrouped.next_step, i), (3, 4, 3))
                    step(model, ours, x)
                step(reference, theirs, x)
            self.assertEqual(restart_at, [])
            self.assertEqual(ours.last.applied, 6)
            ours.close()
            same(self, model, reference)

    def test_a_loaded_state_outlives_the_machine(self):
        with tempfile.TemporaryDirectory(dir="/tmp") as journal:
            daemon = harness.Daemon(f"--journal.directory={journal}")
            self.addCleanup(daemon.close)
            torch.manual_seed(0)
            model, x = torch.nn.Linear(8, 8), torch.randn(8, 8)
            theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(7):
                step(model, theirs, x)
            reference = copy.deepcopy(model)
            again = torch.optim.AdamW(reference.parameters(), lr=1e-2)
            again.load_state_dict(theirs.state_dict())
            ours = shardd.Optimizer(model, job="loaded", address=daemon.address,
                                    durability="node")
            ours.load_state_dict(theirs.state_dict())
            for i in range(4):
                if i in (1, 3):
                    daemon.lose_memory()
                step(model, ours, x)
                step(reference, again, x)
            state = ours.state_dict()["state"]
            ours.close()
        same(self, model, reference)
        for index, entry in again.state_dict()["state"].items():
            self.assertEqual(float(state[index]["step"]), 11.0)
            difference = (state[index]["exp_avg_sq"] - entry["exp_avg_sq"]).abs().max()
            self.assertLessEqual(difference.item(), 1e-7)

    def test_exit_with_a_dead_daemon_is_quick(self):
        child = harness.start_python(LOOP + """
import gc, time
step(); print("ready", flush=True); sys.stdin.readline()
began = time.monotonic()
import atexit
atexit._run_exitfuncs()
del opt; gc.collect()
print(time.monotonic() - began, flush=True)
""", "exits", SHARDD_ADDRESS=self.daemon.address)
        self.addCleanup(child.kill)
        self.assertEqual(child.stdout.readline().strip(), "ready")
        self.daemon.kill()
        began = time.monotonic()
        out, error = child.communicate("\n", timeout=60)
        self.assertEqual(child.returncode, 0, error)
        self.assertLess(float(out), 1.0)
        self.assertLess(time.monotonic() - began, 10)  # the interpreter's own end included

    def test_an_exception_keeps_a_private_daemons_state(self):
        script = LOOP + """
start = opt._step
for _ in range(3): step()
print(start, opt.last.step)
if start == 1: raise SystemError("a bug")
"""
        job = f"crash-{os.getpid()}"
        done = harness.run_python(script, job, check=False)
        self.assertEqual(done.stdout.split(), ["1", "3"])
        self.assertIn("a bug", done.stderr)
        done = harness.run_python(script, job)
        self.assertEqual(done.stdout.split(), ["4", "6"])
        self.assertIn(f"resuming {job} at step 4", done.stderr)


if __name__ == "__main__":
    harness.main()
