"""The operators of the specification, written out slowly: one token at a time, Python floats, no tensor arithmetic.

REFERENCES maps a registered name to `reference(token, parameters, settings) -> token`. A token is a list of floats;
parameters are lists by name, absent where the operator has none; settings are the operator's options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Token = list[float]
Reference = Callable[[Token, Mapping[str, Token], Mapping[str, Any]], Token]


def layer_norm(x: Token, parameters: Mapping[str, Token], settings: Mapping[str, Any]) -> Token:
    d = len(x)
    mean = math.fsum(x) / d
    variance = math.fsum((value - mean) ** 2 for value in x) / d
    gain, bias = parameters.get("gain", [1.0] * d), parameters.get("bias", [0.0] * d)
    return [gain[i] * (x[i] - mean) / math.sqrt(variance + settings["eps"]) + bias[i] for i in range(d)]


def rms(x: Token, eps: float) -> float:
    return math.sqrt(math.fsum(value * value for value in x) / len(x) + eps)


def rms_norm(x: Token, parameters: Mapping[str, Token], settings: Mapping[str, Any]) -> Token:
    d = len(x)
    gain = [settings["offset"] + g for g in parameters["gain"]] if "gain" in parameters else [1.0] * d
    return [gain[i] * x[i] / rms(x, settings["eps"]) for i in range(d)]


def scale_norm(x: Token, parameters: Mapping[str, Token], settings: Mapping[str, Any]) -> Token:
    gain = parameters["gain"][0] if "gain" in parameters else math.sqrt(len(x))
    length = math.sqrt(math.fsum(value * value for value in x))
    return [gain * value / max(length, settings["eps"]) for value in x]


def dyt(x: Token, parameters: Mapping[str, Token], settings: Mapping[str, Any]) -> Token:
    d = len(x)
    gain, bias = parameters.get("gain", [1.0] * d), parameters.get("bias", [0.0] * d)
    return [gain[i] * math.tanh(parameters["alpha"][0] * x[i]) + bias[i] for i in range(d)]


def derf(x: Token, parameters: Mapping[str, Token], settings: Mapping[str, Any]) -> Token:
    d = len(x)
    gain, bias = parameters.get("gain", [1.0] * d), parameters.get("bias", [0.0] * d)
    a, s = parameters["alpha"][0], parameters["shift"][0]
    return [gain[i] * math.erf(a * x[i] + s) + bias[i] for i in range(d)]


SIGMA: dict[str, Callable[[float], float]] = {
    "tanh": math.tanh,
    "sigmoid": lambda t: (1 + math.tanh(t / 2)) / 2,
    "hardtanh": lambda t: min(1.0, max(-1.0, t)),
    "gelu": lambda t: t * (1 + math.erf(t / math.sqrt(2))) / 2,
    "silu": lambda t: t * (1 + math.tanh(t / 2)) / 2,
}


def seed_norm(x: Token, parameters: Mapping[str, Token], settings: Mapping[str, Any]) -> Token:
    """In evaluation: dropout is the identity."""
    d = len(x)
    sigma, without = SIGMA[settings["activation"]], settings["without"]
    width = d // settings["heads"]
    factor = 1 / d if settings["scale"] == "1/d" else 1.0
    y = []
    for i in range(d):
        alpha = parameters["alpha"][i % len(parameters["alpha"])] if without != "alpha" else 1.0
        if without == "beta":
            dynamic = sigma(alpha * x[i])
        elif settings["elementwise"]:
            dynamic = sigma(x[i] * parameters["beta"][i]) * alpha
        else:
            head = range(i // width * width, (i // width + 1) * width)
            dynamic = sigma(factor * math.fsum(x[j] * parameters["beta"][j] for j in head)) * alpha
        gamma = settings["offset"] + parameters["gamma"][i] if "gamma" in parameters else 1.0
        y.append((dynamic + (gamma if without != "gamma" else 0.0)) * x[i] / rms(x, settings["eps"]))
    return y


REFERENCES: dict[str, Reference] = {
    "layernorm": layer_norm,
    "rmsnorm": rms_norm,
    "scalenorm": scale_norm,
    "dyt": dyt,
    "derf": derf,
    "seednorm": seed_norm,
}


def apply_reference(name: str, x: Tensor, parameters: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Tensor:
    """Apply the reference of a registered norm to every token of x [..., d]; returns fp64."""
    if name not in REFERENCES:
        raise LookupError(f"norm {name!r} is registered but has no reference: add it to REFERENCES in {__file__}")
    lists = {key: value.double().tolist() for key, value in parameters.items()}
    tokens = x.double().reshape(-1, x.shape[-1]).tolist()
    values = [REFERENCES[name](token, lists, settings) for token in tokens]
    return torch.tensor(values, dtype=torch.float64).reshape(x.shape)
