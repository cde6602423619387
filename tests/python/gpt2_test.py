"""Hugging Face's GPT-2 on 1 and 2 ranks at every stage against torch.optim.AdamW."""

import pathlib
import tempfile

import torch

import gpt2_script
import harness

STEPS = 20
SCRIPT = (harness.HERE / "gpt2_script.py")


class Gpt2(harness.DaemonCase):
    def reference(self, ranks):
        model = gpt2_script.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank in range(ranks):
                batch = gpt2_script.tokens(step, rank)
                (model(batch, labels=batch).loss / ranks).backward()
            optimizer.step()
        return model.state_dict()

    def check(self, ranks):
        expected = self.reference(ranks)
        code = SCRIPT.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as directory:
            harness.run_ranks(code, ranks, self.job(), STEPS, directory,
                              SHARDD_ADDRESS=self.daemon.address)
            for stage in range(4):
                found = torch.load(pathlib.Path(directory) / f"{stage}.pt", weights_only=True)
                self.assertEqual(list(found), list(expected))
                first = found if stage == 0 else first
                for name, values in expected.items():
                    difference = (found[name] - values).abs()
                    bound = 1e-6 + 2e-3 * 1e-3 * STEPS  # that of tests/golden
                    self.assertTrue(bool((difference <= bound).all()),
                                    f"stage {stage}, {name}: {difference.max().item()}")
                    self.assertTrue(torch.equal(found[name], first[name]), f"stage {stage} {name}")
                print(f"{ranks} ranks, stage {stage}: " + str(max(
                    (found[n] - v).abs().max().item() for n, v in expected.items())))

    def test_one_rank(self):
        self.check(1)

    def test_two_ranks(self):
        self.check(2)


if __name__ == "__main__":
    harness.main()
