"""A small GPT-2 of Hugging Face on fixed tokens: gpt2_script.py JOB STEPS DIRECTORY.

Every rank takes its part of each batch; rank 0 saves the weights, of every
stage, to DIRECTORY/STAGE.pt.
"""

import os
import sys

import torch
import transformers

import shardd


def make_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=128, n_positions=32, n_embd=48, n_layer=2, n_head=4,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                     bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def tokens(step, part):
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randint(0, 128, (4, 32), generator=generator)


def train(job, stage, steps, out):
    rank = int(os.environ.get("RANK", "0"))
    model = make_model()
    opt = shardd.Optimizer(model, lr=1e-3, weight_decay=0.01, job=job, stage=stage)
    for step in range(steps):
        opt.zero_grad()
        batch = tokens(step, rank)
        model(batch, labels=batch).loss.backward()
        opt.step()
    with opt.gathered():
        if rank == 0:
            torch.save(model.state_dict(), out)
    opt.close()


if __name__ == "__main__":
    for number in range(4):
        train(f"{sys.argv[1]}-{number}", number, int(sys.argv[2]), f"{sys.argv[3]}/{number}.pt")
