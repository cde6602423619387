"""shardd.initialize with DeepSpeed's JSON."""

import copy
import json
import os
import pathlib
import subprocess
import tempfile
import types

import torch

import harness
import shardd
from shardd.deepspeed import config as ds_config

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 2, "overlap_comm": True, "contiguous_gradients": True,
        "reduce_bucket_size": "auto", "allgather_bucket_size": 2e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                              "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR",
                  "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                             "warmup_num_steps": "auto", "total_num_steps": "auto"}},
}
ARGUMENTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
             "max_grad_norm": 0.5, "learning_rate": 1e-2, "adam_beta1": 0.9, "adam_beta2": 0.95,
             "adam_epsilon": 1e-8, "weight_decay": 0.1, "warmup_steps": 3}


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(index, dtype=torch.float32):
    generator = torch.Generator().manual_seed(index)
    return (torch.randn(4, 8, generator=generator).to(dtype),
            torch.randn(4, 4, generator=generator).to(dtype))


class Initialize(harness.DaemonCase):
    def start(self, name="", config=None, **options):
        out = shardd.initialize(ARGUMENTS, make_model(), config=config or CONFIG,
                                num_training_steps=10, job=self.job() + name, **options)
        self.addCleanup(out[1].close)
        return out

    def train(self, engine, first, last, dtype=torch.float32):
        for index in range(2 * first, 2 * last):
            x, y = batch(index, dtype)
            loss = ((engine(x) - y) ** 2).float().mean()
            engine.backward(loss)
            engine.step()

    def reference(self, steps):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95),
                                      weight_decay=0.1)
        import math
        lrs = []
        for step in range(steps):
            k = step - 1  # DeepSpeed's first step() comes after the first step
            ratio = 0 if k < 0 else math.log(k + 1) / math.log(3) if k < 3 else (10 - k) / (10 - 3)
            optimizer.param_groups[0]["lr"] = 1e-2 * ratio
            lrs.append(1e-2 * ratio)
            optimizer.zero_grad()
            for index in (2 * step, 2 * step + 1):
                x, y = batch(index)
                (((model(x) - y) ** 2).mean() / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return model, lrs

    def assert_close(self, a, b, tolerance=3e-6):
        for p, q in zip(a.parameters(), b.parameters()):
            self.assertLessEqual((p - q).abs().max().item(), tolerance)

    def test_auto_accumulation_clipping_and_schedule(self):
        engine, optimizer, _, scheduler = self.start()
        self.assertEqual((engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(),
                          engine.gradient_accumulation_steps()), (8, 4, 2))
        self.train(engine, 0, 8)
        reference, lrs = self.reference(8)
        self.assert_close(engine.module, reference)
        records = optimizer.step_records()
        self.assertEqual([round(r.lr, 12) for r in records], [round(lr, 12) for lr in lrs])
        self.assertEqual(engine.global_steps, 8)
        self.assertGreater(engine.get_global_grad_norm(), 0)

    def test_every_stage_saves_and_loads(self):
        reference, _ = self.reference(8)
        for stage in range(4):
            config = copy.deepcopy(CONFIG)
            config["zero_optimization"]["stage"] = stage
            engine, *_ = self.start(f"a{stage}", config)
            self.train(engine, 0, 5)
            with tempfile.TemporaryDirectory() as directory:
                engine.save_checkpoint(directory, client_state={"epoch": 3})
                other, *_ = self.start(f"b{stage}", config)
                path, state = other.load_checkpoint(directory)
                self.assertEqual(other.load_checkpoint(directory + "/none"), (None, None))
            self.assertEqual(state, {"epoch": 3})
            self.assertTrue(path)
            self.train(other, 5, 8)
            with other.optimizer.gathered():
                self.assert_close(other.module, reference)
            self.assertEqual(other.global_steps, 8)

    def test_bf16(self):
        config = copy.deepcopy(CONFIG)
        config["bf16"]["enabled"] = True
        engine, optimizer, *_ = self.start(config=config)
        self.train(engine, 0, 3, torch.bfloat16)
        self.assertEqual(engine.module[0].weight.dtype, torch.bfloat16)
        self.assertEqual(optimizer.last.applied, 3)

    def test_fp16_with_the_jobs_loss_scale(self):
        config = copy.deepcopy(CONFIG)
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 20,
                          "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}
        engine, optimizer, *_ = self.start(config=config)
        self.assertEqual(optimizer.loss_scale, 2.0 ** 20)
        self.train(engine, 0, 8, torch.float16)  # 2^20 overflows fp16: it comes down
        self.assertLess(optimizer.loss_scale, 2.0 ** 20)
        self.assertGreater(engine.skipped_steps, 0)
        self.assertGreater(optimizer.last.applied, 0)

    def test_training_data(self):
        data = torch.utils.data.TensorDataset(*batch(0))
        _, _, loader, _ = self.start(training_data=data)
        self.assertEqual(sum(len(x) for x, _ in loader), 4)

    def test_what_is_refused_is_named_with_its_alternative(self):
        bad = dict(CONFIG, amp={"enabled": True}, tensorboard={"enabled": True},
                   gradient_acumulation_steps=2)
        bad["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
        with self.assertRaises(ds_config.ConfigError) as caught:
            self.start(config=bad)
        text = str(caught.exception)
        for part in ("amp.enabled = true: apex is not used; use bf16.enabled",
                     "tensorboard.enabled", "step_records()",
                     'offload_optimizer.device = "nvme": the daemon keeps state in host memory',
                     "gradient_acumulation_steps = 2: no key of DeepSpeed; did you mean "
                     "gradient_accumulation_steps?"):
            self.assertIn(part, text)

    def test_auto_without_arguments_and_batches_that_do_not_fit(self):
        with self.assertRaisesRegex(ds_config.ConfigError, '"auto": give.*args='):
            shardd.initialize(None, make_model(), config=CONFIG, job=self.job())
        with self.assertRaisesRegex(ds_config.ConfigError, "train_batch_size 7 is not.*4.*2.*1"):
            self.start(config=dict(CONFIG, train_batch_size=7))

    def test_both_explanations_are_one(self):
        """shardctl's and the package's, of every key and of values that matter."""
        config = {}
        for key in ds_config.load_keys():
            values = [v for v in (key.values or [])[:1] + (key.neutral or [])[:1] if v != {}]
            place, parts = config, key.key.replace("*", "some_option").split(".")
            for part in parts[:-1]:
                place = place.setdefault(part, {})
            place[parts[-1]] = values[0] if values else "x"
        for changed in (config, dict(config, amp={"enabled": False, "x": 1}),
                        {"zero_optimization": {"stage": 9, "stag": 1}, "bf16": {},
                         "gradient_clipping": "auto", "tensorboard": {}}):
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                json.dump(changed, file)
                file.flush()
                done = subprocess.run([harness.SHARDCTL, "config", "explain", file.name,
                                       "--output=json"], stdout=subprocess.PIPE, check=False)
            theirs = [(e["key"], e["value"], e["fate"], e["text"]) for e in json.loads(done.stdout)]
            ours = [tuple(line) for line in ds_config.explain(changed)]
            # What is near to an unknown key each finds in its own way.
            cut = [[(k, v, f, t if f != "unknown" else "") for k, v, f, t in lines]
                   for lines in (theirs, ours)]
            self.assertEqual(*cut)
            refused = any(f in ("refused", "unknown") for _, _, f, _ in ours)
            self.assertEqual(done.returncode, int(refused))


if __name__ == "__main__":
    harness.main()
