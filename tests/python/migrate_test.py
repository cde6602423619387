"""The snippets of docs/migrate are run as they stand: each page's in order, in one process."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import harness

DOCS = harness.ROOT / "docs/migrate"

# What the pages take for granted.
PRELUDE = """
import os, torch
torch.manual_seed(0)
def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
loader = torch.utils.data.DataLoader(dataset, batch_size=8)
"""
TEXTS = """
import gpt2_script
make_gpt2 = gpt2_script.make_model
class Texts(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, index):
        row = gpt2_script.tokens(index, 0)[0]
        return {"input_ids": row, "labels": row}
texts = Texts()
"""


def blocks(page, kind):
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


class Migrate(harness.DaemonCase):
    def run_page(self, page, kind, ranks, prelude=PRELUDE):
        found = blocks(page, f"python {kind}")
        self.assertTrue(found, f"{page} has no {kind}")
        with tempfile.TemporaryDirectory() as directory:
            for name, content in re.findall(r"^```json (\S+)\n(.*?)^```",
                                            (DOCS / page).read_text(encoding="utf-8"), re.M | re.S):
                (pathlib.Path(directory) / name).write_text(content, encoding="utf-8")
            code = f"import os\nos.chdir({directory!r})\n" + prelude + "\n".join(found)
            code += "\nimport sys\nprint(getattr(globals().get('opt'), 'last', None) and 'ours')"
            outputs = harness.run_ranks(code, ranks, SHARDD_ADDRESS=self.daemon.address,
                                        MASTER_ADDR="127.0.0.1", MASTER_PORT=harness.free_port())
            commands = blocks(page, "sh after") if kind == "after" else []
            for command in commands:
                env = dict(os.environ, PATH=f"{harness.SHARDCTL.parent}:{os.environ['PATH']}")
                done = subprocess.run(command, shell=True, cwd=directory, env=env, text=True,
                                      stdout=subprocess.PIPE, check=True)
                self.assertIn("honoured", done.stdout)
        return outputs

    def test_from_ddp(self):
        self.run_page("from_ddp.md", "before", 2)
        self.assertIn("ours", self.run_page("from_ddp.md", "after", 2)[0])

    def test_from_fsdp(self):
        self.assertIn("ours", self.run_page("from_fsdp.md", "after", 2)[0])
        compile(blocks("from_fsdp.md", "python before-gpu")[0], "before", "exec")

    def test_from_deepspeed(self):
        self.assertIn("ours", self.run_page("from_deepspeed.md", "after", 1)[0])
        compile(blocks("from_deepspeed.md", "python before-deepspeed")[0], "before", "exec")

    def test_from_hf_trainer(self):
        self.run_page("from_hf_trainer.md", "before", 1, PRELUDE + TEXTS)
        self.run_page("from_hf_trainer.md", "after", 1, PRELUDE + TEXTS)

    def test_no_python_snippet_is_left_out(self):
        kinds = {"before", "after", "before-gpu", "before-deepspeed"}
        for page in sorted(DOCS.glob("*.md")):
            text = page.read_text(encoding="utf-8")
            for head in re.findall(r"^```python(.*)$", text, re.M):
                self.assertIn(head.strip(), kinds, page)


class Readme(harness.DaemonCase):
    def test_the_three_lines(self):
        """The first screen's script, with its three lines changed, trains."""
        text = (harness.ROOT / "README.md").read_text(encoding="utf-8")
        (diff,) = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)
        changed = [line for line in diff.splitlines() if line.startswith("+")]
        self.assertLessEqual(len(changed), 3)
        for sign in "-+":
            kept = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)]
            code = "import torch\n" + PRELUDE + "\n".join(kept) + "\nprint(loss.item())"
            code = code.replace("model = GPT2(config)", TEXTS + "model = make_gpt2()").replace(
                "for batch in loader", "for batch in torch.utils.data.DataLoader(texts, 8)")
            done = harness.run_python(code, SHARDD_ADDRESS=self.daemon.address)
            self.assertLess(float(done.stdout), 6)


if __name__ == "__main__":
    harness.main()
