"""The examples, as a reader runs them."""

import pathlib
import re
import subprocess
import sys
import tempfile

import harness

EXAMPLES = harness.PACKAGE / "examples"
TEXT = harness.ROOT / "docs/numerics.md"


class Examples(harness.DaemonCase):
    def run_example(self, name, *arguments, ranks=1):
        command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
        if ranks > 1:
            command = [str(harness.SHARDCTL), "run", f"--address={self.daemon.address}",
                       f"--ranks={ranks}", "--", *command]
        done = subprocess.run(command, env=harness.environment(SHARDD_ADDRESS=self.daemon.address),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=250, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def losses(self, text):
        return [float(v) for v in re.findall(r"loss ([0-9.]+)", text)]

    def test_gpt2_on_text(self):
        out = self.run_example("gpt2_text.py", f"--data={TEXT}", "--steps=40", "--layers=2",
                               "--width=64", "--stage=2", f"--job={self.job()}", ranks=2)
        losses = self.losses(out)
        self.assertEqual(len(losses), 3, out)
        self.assertLess(losses[-1], losses[0] - 2, out)

    def test_digits_at_every_stage(self):
        last = []
        for stage in range(4):
            out = self.run_example("digits.py", f"--stage={stage}", "--epochs=6",
                                   f"--job={self.job()}-{stage}", ranks=1 + stage % 2)
            self.assertGreater(float(re.findall(r"accuracy ([0-9.]+)", out)[-1]), 0.9, out)
            last.append(self.losses(out)[-1])
        # Stages differ in who holds what, not in what is computed.
        self.assertEqual(last[0], last[2])
        self.assertEqual(last[1], last[3])

    def test_lora_with_frozen_base_weights(self):
        with tempfile.TemporaryDirectory() as directory:
            out = self.run_example("lora.py", f"--data={TEXT}", "--steps=60",
                                   f"--save={directory}/adapter", f"--job={self.job()}")
            losses = self.losses(out)
            self.assertLess(losses[-1], losses[0] - 1, out)
            saved = pathlib.Path(directory) / "adapter/adapter_model.safetensors"
            self.assertTrue(saved.exists())
        listed = self.daemon.shardctl("jobs", "--output=json")
        self.assertIn(self.job(), listed)


if __name__ == "__main__":
    harness.main()
