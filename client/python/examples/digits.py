#!/usr/bin/env python3
"""Classifies scikit-learn's handwritten digits: 1797 images of 8 x 8, ten classes.

    python digits.py --stage=0
    shardctl run --ranks 2 -- python digits.py --stage=3
"""

import argparse

import torch
from sklearn.datasets import load_digits

import shardd


def load() -> tuple:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    held = torch.arange(len(x)) % 5 == 0
    return x[~held], y[~held], x[held], y[held]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--stage", type=int, default=1, choices=range(4))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--job", default=None)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    x, y, held_x, held_y = load()
    opt = shardd.Optimizer(model, lr=3e-3, stage=args.stage, job=args.job)
    loader = opt.attach_state(
        shardd.ResumableLoader(torch.utils.data.TensorDataset(x, y), args.batch, seed=1))
    while loader.epoch < args.epochs:
        try:
            for images, labels in loader:
                opt.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                opt.report(loss)
                opt.step()
        except shardd.Regrouped:
            continue
        with torch.no_grad():
            right = (model(held_x).argmax(1) == held_y).float().mean().item()
        if opt.rank == 0:
            print(f"epoch {loader.epoch}  loss {opt.last.loss:.4f}  held-out accuracy {right:.4f}",
                  flush=True)
    opt.close()


if __name__ == "__main__":
    main()
