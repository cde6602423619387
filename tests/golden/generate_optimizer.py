#!/usr/bin/env python3
"""Writes or checks tests/golden/optimizer_NAME.safetensors in float64.

  generate_optimizer.py adamw OUT.safetensors [--set KEY=VALUE]... [--elements=N]
                        [--steps=N] [--seed=N]          fresh inputs
  generate_optimizer.py adamw OUT.safetensors --inputs=OLD.safetensors
                                                        param0 and grads of OLD
  generate_optimizer.py --check FILE.safetensors        recomputes params_f64

A file holds param0 [elements] f32, grads [steps, elements] f32 and params_f64
[steps, elements]: the parameters after each step, in IEEE binary64. The
metadata holds the optimizer and every hyper-parameter. Nothing but the standard
library is used.
"""

import argparse
import json
import math
import random
import struct
import sys

# Optimizers in float64: name -> function(param0, grads, hyper) -> params per step.


def adam_like(param0, grads, hyper, decoupled, amsgrad):
    """PyTorch's Adam and AdamW: bias corrections, eps outside the root."""
    lr, eps, decay = hyper["lr"], hyper["eps"], hyper["weight_decay"]
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    param = list(param0)
    exp_avg = [0.0] * len(param)
    exp_avg_sq = [0.0] * len(param)
    largest = [0.0] * len(param)
    history = []
    for step, grad in enumerate(grads, start=1):
        correction1 = 1.0 - beta1**step
        root_correction2 = math.sqrt(1.0 - beta2**step)
        for i, g in enumerate(grad):
            if decoupled:
                param[i] *= 1.0 - lr * decay
            else:
                g += decay * param[i]
            exp_avg[i] = exp_avg[i] * beta1 + g * (1.0 - beta1)
            exp_avg_sq[i] = exp_avg_sq[i] * beta2 + g * g * (1.0 - beta2)
            largest[i] = max(largest[i], exp_avg_sq[i])
            second = largest[i] if amsgrad else exp_avg_sq[i]
            denominator = math.sqrt(second) / root_correction2 + eps
            param[i] -= lr / correction1 * exp_avg[i] / denominator
        history.append(list(param))
    return history


def adamw(param0, grads, hyper):
    return adam_like(param0, grads, hyper, True, False)


def adamw_amsgrad(param0, grads, hyper):
    return adam_like(param0, grads, hyper, True, True)


def adam(param0, grads, hyper):
    return adam_like(param0, grads, hyper, False, False)


def adam_amsgrad(param0, grads, hyper):
    return adam_like(param0, grads, hyper, False, True)


def sgd(param0, grads, hyper):
    """PyTorch's SGD: the buffer begins as the first gradient, without dampening."""
    lr, decay, momentum = hyper["lr"], hyper["weight_decay"], hyper["momentum"]
    param, buffer = list(param0), [0.0] * len(param0)
    history = []
    for step, grad in enumerate(grads, start=1):
        for i, g in enumerate(grad):
            g += decay * param[i]
            share = 1.0 if step == 1 else 1.0 - hyper["dampening"]
            buffer[i] = momentum * buffer[i] + share * g
            param[i] -= lr * (g + momentum * buffer[i] if hyper["nesterov"] else buffer[i])
        history.append(list(param))
    return history


def adagrad(param0, grads, hyper):
    """PyTorch's Adagrad with initial_accumulator_value 0."""
    param, total = list(param0), [0.0] * len(param0)
    history = []
    for step, grad in enumerate(grads, start=1):
        lr = hyper["lr"] / (1.0 + (step - 1) * hyper["lr_decay"])
        for i, g in enumerate(grad):
            g += hyper["weight_decay"] * param[i]
            total[i] += g * g
            param[i] -= lr * g / (math.sqrt(total[i]) + hyper["eps"])
        history.append(list(param))
    return history


def rmsprop(param0, grads, hyper):
    """PyTorch's RMSprop, not centered; beta2 is its alpha."""
    lr, alpha, momentum = hyper["lr"], hyper["beta2"], hyper["momentum"]
    param, square, buffer = list(param0), [0.0] * len(param0), [0.0] * len(param0)
    history = []
    for grad in grads:
        for i, g in enumerate(grad):
            g += hyper["weight_decay"] * param[i]
            square[i] = alpha * square[i] + (1.0 - alpha) * g * g
            buffer[i] = momentum * buffer[i] + g / (math.sqrt(square[i]) + hyper["eps"])
            param[i] -= lr * buffer[i]
        history.append(list(param))
    return history


def lion(param0, grads, hyper):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""
    lr, beta1, beta2 = hyper["lr"], hyper["beta1"], hyper["beta2"]
    param, exp_avg = list(param0), [0.0] * len(param0)
    history = []
    for grad in grads:
        for i, g in enumerate(grad):
            mix = beta1 * exp_avg[i] + (1.0 - beta1) * g
            sign = (mix > 0) - (mix < 0)
            param[i] -= lr * (sign + hyper["weight_decay"] * param[i])
            exp_avg[i] = beta2 * exp_avg[i] + (1.0 - beta2) * g
        history.append(list(param))
    return history


def lamb(param0, grads, hyper):
    """You et al., Large Batch Optimization for Deep Learning, 2019, version 3."""
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    param = list(param0)
    exp_avg, exp_avg_sq = [0.0] * len(param), [0.0] * len(param)
    history = []
    for step, grad in enumerate(grads, start=1):
        direction = []
        for i, g in enumerate(grad):
            exp_avg[i] = beta1 * exp_avg[i] + (1.0 - beta1) * g
            exp_avg_sq[i] = beta2 * exp_avg_sq[i] + (1.0 - beta2) * g * g
            m = exp_avg[i] / (1.0 - beta1**step)
            v = exp_avg_sq[i] / (1.0 - beta2**step)
            direction.append(m / (math.sqrt(v) + hyper["eps"]) + hyper["weight_decay"] * param[i])
        of_param = math.sqrt(math.fsum(p * p for p in param))
        of_direction = math.sqrt(math.fsum(r * r for r in direction))
        trust = 1.0
        if of_param > 0 and of_direction > 0:
            trust = min(max(of_param / of_direction, hyper["min_trust"]), hyper["max_trust"])
        param = [p - hyper["lr"] * trust * r for p, r in zip(param, direction)]
        history.append(list(param))
    return history


ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
OPTIMIZERS = {
    "adamw": (adamw, ADAM),
    "adamw_amsgrad": (adamw_amsgrad, ADAM),
    "adam": (adam, ADAM),
    "adam_amsgrad": (adam_amsgrad, ADAM),
    "sgd": (sgd, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "nesterov": 0.0,
                  "weight_decay": 1e-4}),
    "adagrad": (adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 1e-3, "lr_decay": 0.0}),
    "rmsprop": (rmsprop, {"lr": 1e-3, "beta2": 0.99, "eps": 1e-8, "weight_decay": 1e-3,
                          "momentum": 0.0}),
    "lion": (lion, {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
    "lamb": (lamb, {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01,
                    "min_trust": 0.01, "max_trust": 10.0}),
}


def round_to_f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def number(text):
    return {"False": 0.0, "True": 1.0}.get(text) if text in ("False", "True") else float(text)


def fresh_inputs(elements, steps, seed):
    """Parameters of 0.05, gradients tiny, zero and large.

    A float32 parameter is rounded in every step, by up to 6e-8 of itself: with
    parameters about 1 a dozen steps would use up the checks' tolerance.
    """
    rng = random.Random(seed)
    scales = [10.0 ** rng.uniform(-4, 1) for _ in range(elements)]
    param0 = [round_to_f32(rng.gauss(0, 0.05)) for _ in range(elements)]
    grads = [[round_to_f32(0.0 if rng.random() < 0.05 else rng.gauss(0, scale))
              for scale in scales] for _ in range(steps)]
    return param0, grads


def write_safetensors(path, metadata, tensors):
    """tensors: list of (name, dtype, shape, bytes)."""
    header = {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, data in tensors:
            out.write(data)


def read_safetensors(path):
    """Returns metadata and {name: (shape, flat list of floats)}."""
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + o for o in entry["data_offsets"])
        code, size = {"F32": ("f", 4), "F64": ("d", 8)}[entry["dtype"]]
        values = struct.unpack("<%d%s" % ((end - begin) // size, code), data[begin:end])
        tensors[name] = (entry["shape"], list(values))
    return metadata, tensors


def inputs_of(path):
    metadata, tensors = read_safetensors(path)
    (steps, elements), flat = tensors["grads"]
    grads = [flat[s * elements:(s + 1) * elements] for s in range(steps)]
    return metadata, tensors["param0"][1], grads, tensors["params_f64"][1]


def write(path, name, settings, param0, grads):
    function, hyper = OPTIMIZERS[name]
    hyper = {**hyper, **settings}
    history = function(param0, grads, hyper)
    metadata = {"optimizer": name, **{key: repr(value) for key, value in hyper.items()}}
    count, steps = len(param0), len(grads)
    flat_grads = [g for grad in grads for g in grad]
    flat_history = [p for params in history for p in params]
    write_safetensors(path, metadata, [
        ("param0", "F32", [count], struct.pack("<%df" % count, *param0)),
        ("grads", "F32", [steps, count], struct.pack("<%df" % len(flat_grads), *flat_grads)),
        ("params_f64", "F64", [steps, count],
         struct.pack("<%dd" % len(flat_history), *flat_history)),
    ])


def check(path):
    """True if params_f64 are what this script computes, to a few roundings of float64."""
    metadata, param0, grads, stored = inputs_of(path)
    function, defaults = OPTIMIZERS[metadata["optimizer"]]
    hyper = {key: number(metadata.get(key, default)) for key, default in defaults.items()}
    computed = [p for params in function(param0, grads, hyper) for p in params]
    worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(computed, stored))
    good = len(computed) == len(stored) and worst < 1e-13
    print("%s: worst relative difference %.3g: %s" % (path, worst, "pass" if good else "FAIL"))
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("optimizer", nargs="?", choices=sorted(OPTIMIZERS))
    parser.add_argument("out", nargs="?")
    parser.add_argument("--inputs", help="take param0 and grads from this file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="another hyper-parameter")
    parser.add_argument("--elements", type=int, default=257)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if check(arguments.check) else 1)
    if not arguments.out:
        parser.error("OPTIMIZER and OUT are needed")
    settings = {}
    for setting in arguments.set:
        key, _, value = setting.partition("=")
        if key not in OPTIMIZERS[arguments.optimizer][1]:
            parser.error("--set %s: %s has no such hyper-parameter" % (setting, arguments.optimizer))
        settings[key] = float(value)
    if arguments.inputs:
        _, param0, grads, _ = inputs_of(arguments.inputs)
    else:
        param0, grads = fresh_inputs(arguments.elements, arguments.steps, arguments.seed)
    write(arguments.out, arguments.optimizer, settings, param0, grads)


if __name__ == "__main__":
    main()
