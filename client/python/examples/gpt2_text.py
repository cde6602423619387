#!/usr/bin/env python3
"""Trains Hugging Face's GPT-2, from its config, on the bytes of text files.

    python gpt2_text.py --data=/usr/share/common-licenses
    shardctl run --ranks 2 --max-restarts 3 -- python gpt2_text.py --data=DIR --stage=2

Kill a rank, or the daemon, whenever you like: it goes on at the step after the last committed one.
"""

import argparse
import pathlib

import torch
import transformers

import shardd


class Bytes(torch.utils.data.Dataset):
    """Windows of `context` bytes of all files below a path."""

    def __init__(self, path: str, context: int) -> None:
        root = pathlib.Path(path)
        files = sorted(f for f in root.rglob("*") if f.is_file()) if root.is_dir() else [root]
        text = b"".join(f.read_bytes() for f in files)
        if len(text) <= context:
            raise SystemExit(f"--data={path}: {len(text)} bytes of text are less than a window")
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index * self.context:(index + 1) * self.context].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", required=True, help="a text file, or a directory of them")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="windows of a rank's step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--stage", type=int, default=1, choices=range(4))
    parser.add_argument("--job", default=None)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=256, n_positions=args.context, n_embd=args.width, n_layer=args.layers,
        n_head=4, bos_token_id=0, eos_token_id=0))
    opt = shardd.Optimizer(model, lr=args.lr, weight_decay=0.1, betas=(0.9, 0.95), max_norm=1.0,
                           stage=args.stage, job=args.job)
    sched = opt.attach_state(torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, args.steps + 1))
    loader = opt.attach_state(shardd.ResumableLoader(Bytes(args.data, args.context), args.batch))
    opt.attach_state(shardd.Rng(0))  # dropout

    while opt.next_step <= args.steps:
        try:
            for tokens in loader:
                opt.zero_grad()
                loss = model(tokens, labels=tokens).loss
                loss.backward()
                opt.report(loss, tokens.numel())
                opt.step()
                sched.step()
                if opt.rank == 0 and (opt.last.step % 20 == 0 or opt.last.step == 1):
                    print(f"step {opt.last.step}/{args.steps}  loss {opt.last.loss:.4f}  "
                          f"norm {opt.last.grad_norm:.3f}", flush=True)
                if opt.next_step > args.steps:
                    break
        except shardd.Regrouped:
            continue  # loader, schedule and weights are those of the last committed step
    opt.close()


if __name__ == "__main__":
    main()
