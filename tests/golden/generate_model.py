#!/usr/bin/env python3
"""Writes or checks tests/golden/model_NAME.safetensors in float64 (needs numpy).

  generate_model.py gpt2 OUT.safetensors [--set KEY=VALUE]... [--masked=0.2] [--seed=N]
                                                    fresh weights and tokens
  generate_model.py --check FILE.safetensors        recomputes what is in FILE

A file holds param.NAME, the initial f32 weights with Hugging Face's names and
layouts; inputs and labels [steps,batch,seq] i32 (-100: not predicted); grad1.NAME,
the gradients of step 1 before clipping; grad_norms_f64 and losses_f64 [steps],
before each update; final.NAME, one tensor after the last step. Each step clips by
the global norm, factor min(1, clip / (norm + 1e-6)), then runs AdamW on every
parameter. The metadata holds sizes and hyper-parameters.
"""

import argparse
import ast
import json
import struct
import sys

import numpy as np

DEFAULTS = {
    "clip": "1.0", "steps": "40", "batch": "4", "seq": "24",
    "cfg.vocab": "256", "cfg.n_ctx": "32", "cfg.n_embd": "48", "cfg.n_layer": "2",
    "cfg.n_head": "4",
    "opt.lr": "0.003", "opt.betas": "(0.9, 0.95)", "opt.eps": "1e-08", "opt.weight_decay": "0.1",
}
FINAL = "wte.weight"
IGNORED = -100


def parameter_shapes(cfg):
    width = cfg["n_embd"]
    shapes = {"wte.weight": (cfg["vocab"], width), "wpe.weight": (cfg["n_ctx"], width)}
    for layer in range(cfg["n_layer"]):
        for name, shape in (("ln_1", (width,)), ("attn.c_attn", (width, 3 * width)),
                            ("attn.c_proj", (width, width)), ("ln_2", (width,)),
                            ("mlp.c_fc", (width, 4 * width)), ("mlp.c_proj", (4 * width, width))):
            shapes["h.%d.%s.weight" % (layer, name)] = shape
            shapes["h.%d.%s.bias" % (layer, name)] = shape[-1:]
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


# Each operation returns its value and a function from the value's gradient to its
# inputs'; gradients of parameters are added to `grads`.


def layer_norm(x, p, name, grads):
    gain, bias = p[name + ".weight"], p[name + ".bias"]
    centred = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    normal = centred * rstd

    def backward(dy):
        grads[name + ".weight"] += (dy * normal).reshape(-1, gain.size).sum(0)
        grads[name + ".bias"] += dy.reshape(-1, gain.size).sum(0)
        dn = dy * gain
        return rstd * (dn - dn.mean(-1, keepdims=True) -
                       normal * (dn * normal).mean(-1, keepdims=True))
    return normal * gain + bias, backward


def linear(x, p, name, grads):
    weight = p[name + ".weight"]

    def backward(dy):
        flat = dy.reshape(-1, dy.shape[-1])
        grads[name + ".weight"] += x.reshape(-1, x.shape[-1]).T @ flat
        grads[name + ".bias"] += flat.sum(0)
        return dy @ weight.T
    return x @ weight + p[name + ".bias"], backward


def gelu(x):
    root = np.sqrt(2 / np.pi)
    t = np.tanh(root * (x + 0.044715 * x**3))

    def backward(dy):
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * root * (1 + 3 * 0.044715 * x**2))
    return 0.5 * x * (1 + t), backward


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def causal_attention(qkv, heads):
    batch, seq, width3 = qkv.shape
    size = width3 // 3 // heads
    # [3,batch,heads,seq,size]
    q, k, v = qkv.reshape(batch, seq, 3, heads, size).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(size)
    weights = softmax(np.where(np.tri(seq, dtype=bool), scores, -np.inf))
    out = (weights @ v).transpose(0, 2, 1, 3).reshape(batch, seq, heads * size)

    def backward(dy):
        dy = dy.reshape(batch, seq, heads, size).transpose(0, 2, 1, 3)
        dw = dy @ v.swapaxes(-1, -2)
        ds = weights * (dw - (dw * weights).sum(-1, keepdims=True)) / np.sqrt(size)
        parts = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dy])
        return parts.transpose(1, 3, 0, 2, 4).reshape(batch, seq, width3)
    return out, backward


def gpt2(p, cfg, inputs, labels):
    """Mean loss over the labels that count, and the gradient of every parameter."""
    grads = {name: np.zeros_like(value) for name, value in p.items()}
    seq = inputs.shape[1]
    x = p["wte.weight"][inputs] + p["wpe.weight"][:seq]
    tape = []

    def branch(x, *operations):
        y, backwards = x, []
        for operation, *arguments in operations:
            y, backward = operation(y, *arguments)
            backwards.append(backward)
        tape.append(backwards)
        return y

    for layer in range(cfg["n_layer"]):
        h = "h.%d." % layer
        x = x + branch(x, (layer_norm, p, h + "ln_1", grads), (linear, p, h + "attn.c_attn", grads),
                       (causal_attention, cfg["n_head"]), (linear, p, h + "attn.c_proj", grads))
        x = x + branch(x, (layer_norm, p, h + "ln_2", grads), (linear, p, h + "mlp.c_fc", grads),
                       (gelu,), (linear, p, h + "mlp.c_proj", grads))
    x, final_backward = layer_norm(x, p, "ln_f", grads)
    probabilities = softmax(x @ p["wte.weight"].T)

    counted = labels != IGNORED
    rows, columns = np.nonzero(counted)
    targets = labels[counted]
    loss = -np.log(probabilities[rows, columns, targets]).mean()
    d_logits = probabilities * counted[..., None]
    d_logits[rows, columns, targets] -= 1
    d_logits /= counted.sum()

    grads["wte.weight"] += np.einsum("bsv,bsw->vw", d_logits, x)
    dx = final_backward(d_logits @ p["wte.weight"])
    for backwards in reversed(tape):
        d = dx
        for backward in reversed(backwards):
            d = backward(d)
        dx = dx + d
    grads["wpe.weight"][:seq] += dx.sum(0)
    np.add.at(grads["wte.weight"], inputs, dx)
    return loss, grads


def train(metadata, params, inputs, labels):
    """Returns losses, norms, gradients of step 1, and the parameters at the end."""
    cfg = {key[4:]: int(value) for key, value in metadata.items() if key.startswith("cfg.")}
    lr, eps, decay, clip = (float(metadata[key]) for key in
                            ("opt.lr", "opt.eps", "opt.weight_decay", "clip"))
    beta1, beta2 = ast.literal_eval(metadata["opt.betas"])
    params = {name: value.astype(np.float64) for name, value in params.items()}
    moments = {name: [np.zeros_like(value)] * 2 for name, value in params.items()}
    losses, norms, first = [], [], None
    for step, (ids, due) in enumerate(zip(inputs, labels), start=1):
        loss, grads = gpt2(params, cfg, ids, due)
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        factor = min(1.0, clip / (norm + 1e-6))
        losses.append(loss)
        norms.append(norm)
        first = first or grads
        for name, value in params.items():
            g, (m, v) = grads[name] * factor, moments[name]
            m, v = m * beta1 + (1 - beta1) * g, v * beta2 + (1 - beta2) * g * g
            moments[name] = [m, v]
            update = m / (1 - beta1**step) / (np.sqrt(v / (1 - beta2**step)) + eps)
            params[name] = value * (1 - lr * decay) - lr * update
    return np.array(losses), np.array(norms), first, params


def fresh_inputs(metadata, masked, seed):
    """Weights about 0.05 and random tokens, each row's labels the tokens that follow."""
    rng = np.random.default_rng(seed)
    cfg = {key[4:]: int(value) for key, value in metadata.items() if key.startswith("cfg.")}
    params = {}
    for name, shape in parameter_shapes(cfg).items():
        centre = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        params[name] = (centre + 0.05 * rng.standard_normal(shape)).astype(np.float32)
    steps, batch, seq = (int(metadata[key]) for key in ("steps", "batch", "seq"))
    tokens = rng.integers(0, cfg["vocab"], (steps, batch, seq + 1), dtype=np.int32)
    labels = tokens[..., 1:].copy()
    labels[rng.random(labels.shape) < masked] = IGNORED
    labels[:, :, 0] = tokens[:, :, 1]  # every row predicts something
    return params, tokens[..., :-1].copy(), labels


DTYPES = {"F32": np.float32, "F64": np.float64, "I32": np.int32}


def write_safetensors(path, metadata, tensors):
    header, offset = {"__metadata__": metadata}, 0
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    for name, value in tensors.items():
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape),
                        "data_offsets": [offset, offset + value.nbytes]}
        offset += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for value in tensors.values():
            out.write(np.ascontiguousarray(value).tobytes())


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    metadata, tensors = header.pop("__metadata__"), {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(
            entry["shape"])
    return metadata, tensors


def write(path, metadata, params, inputs, labels):
    losses, norms, first, final = train(metadata, params, inputs, labels)
    tensors = {"param." + name: value for name, value in params.items()}
    tensors |= {"grad1." + name: value.astype(np.float32) for name, value in first.items()}
    tensors |= {"final." + FINAL: final[FINAL].astype(np.float32), "inputs": inputs,
                "labels": labels, "losses_f64": losses, "grad_norms_f64": norms}
    write_safetensors(path, metadata, tensors)


def check(path):
    """True if FILE holds what this script computes, to what its f32 tensors can hold."""
    metadata, stored = read_safetensors(path)
    params = {name[6:]: value for name, value in stored.items() if name.startswith("param.")}
    losses, norms, first, final = train(metadata, params, stored["inputs"], stored["labels"])
    worst = {
        "losses": np.abs(losses - stored["losses_f64"]).max() / 1e-10,
        "norms": np.abs(norms / stored["grad_norms_f64"] - 1).max() / 1e-10,
        "final": max(np.abs(final[name[6:]] - value).max() / 1e-7
                     for name, value in stored.items() if name.startswith("final.")),
        "grad1": max(np.abs(first[name[6:]] - value).max() / (1e-7 * np.abs(value).max() + 1e-10)
                     for name, value in stored.items() if name.startswith("grad1.")),
    }
    good = all(value <= 1 for value in worst.values())
    print("%s: in tolerances: %s: %s" % (
        path, ", ".join("%s %.2g" % item for item in worst.items()), "pass" if good else "FAIL"))
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=["gpt2"])
    parser.add_argument("out", nargs="?")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="metadata: %s" % ", ".join(DEFAULTS))
    parser.add_argument("--masked", type=float, default=0.0, help="part of the labels set to -100")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit(0 if check(arguments.check) else 1)
    if not arguments.out:
        parser.error("MODEL and OUT are needed")
    metadata = {"model": arguments.model, **DEFAULTS}
    for setting in arguments.set:
        key, _, value = setting.partition("=")
        if key not in DEFAULTS:
            parser.error("--set %s: the keys are %s" % (setting, ", ".join(DEFAULTS)))
        metadata[key] = value
    write(arguments.out, metadata, *fresh_inputs(metadata, arguments.masked, arguments.seed))


if __name__ == "__main__":
    main()
