#!/usr/bin/env python3
"""Fine-tunes GPT-2 with LoRA (peft): the base weights stay frozen, the daemon holds the adapters'
state alone.

    python lora.py --data=README.md [--base=DIR of a saved model]
"""

import argparse
import pathlib

import peft
import torch
import transformers

import shardd


def load_base(path: str) -> transformers.GPT2LMHeadModel:
    if path:
        return transformers.GPT2LMHeadModel.from_pretrained(path)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", required=True, help="a text file")
    parser.add_argument("--base", default="", help="directory of a saved GPT-2 over bytes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", default="", help="directory for the adapter")
    parser.add_argument("--stage", type=int, default=1, choices=range(3))
    parser.add_argument("--job", default=None)
    args = parser.parse_args()

    model = peft.get_peft_model(load_base(args.base), peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True,
        task_type="CAUSAL_LM", modules_to_save=["lm_head"]))
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    opt = shardd.Optimizer(trained, lr=1e-2, weight_decay=0.0, stage=args.stage, job=args.job)
    text = torch.tensor(list(pathlib.Path(args.data).read_bytes()))
    windows = text[:len(text) // 64 * 64].view(-1, 64)
    loader = opt.attach_state(shardd.ResumableLoader(windows, 8, seed=1))
    while opt.next_step <= args.steps:
        for tokens in loader:
            opt.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            opt.report(loss)
            opt.step()
            if opt.rank == 0 and (opt.last.step % 10 == 0 or opt.last.step == 1):
                print(f"step {opt.last.step}/{args.steps}  loss {opt.last.loss:.4f}", flush=True)
            if opt.next_step > args.steps:
                break
    if args.save and opt.rank == 0:
        model.save_pretrained(args.save)
    opt.close()


if __name__ == "__main__":
    main()
