"""One rank of one system in bench/run pytorch: rank.py SYSTEM STEPS OPTIONS_JSON.

The script is the same for all but for what makes the optimizer and takes a step. Rank 0 prints one
line of JSON: seconds of each timed step; every rank its memory, in bytes per parameter, above what
it had when everything was imported.
"""

import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import transformers

LR, DECAY = 1e-4, 0.01


def memory():
    """Bytes of this process, shared pages counted by their part."""
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("no Pss in smaps_rollup")


def make_model(options):
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=options["vocabulary"], n_positions=options["context"],
        n_embd=options["width"], n_layer=options["layers"], n_head=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


class Shardd:
    def __init__(self, model, options):
        import shardd
        self.model = model
        self.optimizer = shardd.Optimizer(model, lr=LR, weight_decay=DECAY, stage=2,
                                          job=options["job"], durability="process")

    def step(self, tokens):
        self.optimizer.zero_grad()
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()

    def close(self):
        self.optimizer.close()


class Ddp:
    def __init__(self, model, options):
        self.model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)

    def step(self, tokens):
        self.optimizer.zero_grad()
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()

    def close(self):
        pass


class Fsdp2(Ddp):
    def __init__(self, model, options):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)


class DeepSpeed:
    def __init__(self, model, options):
        import deepspeed
        self.engine, *_ = deepspeed.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": options["batch"],
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}}})

    def step(self, tokens):
        self.engine.backward(self.engine(tokens, labels=tokens).loss)
        self.engine.step()

    def close(self):
        pass


SYSTEMS = {"shardd": Shardd, "deepspeed": DeepSpeed, "fsdp2": Fsdp2, "ddp": Ddp}


def main():
    system, steps, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    gc.collect()
    before = memory()
    model = make_model(options)
    parameters = sum(p.numel() for p in model.parameters())
    trainer = SYSTEMS[system](model, options)
    generator = torch.Generator().manual_seed(rank)
    seconds = []
    for step in range(steps + options["warmup"]):
        tokens = torch.randint(0, options["vocabulary"], (options["batch"], options["context"]),
                               generator=generator)
        dist.barrier()
        began = time.perf_counter()
        trainer.step(tokens)
        dist.barrier()
        if step >= options["warmup"]:
            seconds.append(time.perf_counter() - began)
    used = [None] * dist.get_world_size()
    dist.all_gather_object(used, memory() - before)
    if rank == 0:
        print("RESULT " + json.dumps({"seconds": seconds, "bytes": sum(used),
                                      "parameters": parameters}), flush=True)
        # The daemon's memory is read while it holds the job.
        sys.stdin.readline()
    dist.barrier()
    trainer.close()


main()
