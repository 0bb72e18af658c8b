"""The files of an exported language model: what transformers loads, and torch and safetensors alone can read."""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from siamesenorm.interop.libraries import safetensors_errors
from siamesenorm.models.language import LanguageModelConfig

if TYPE_CHECKING:
    from siamesenorm.data.tokenizer import Tokenizer

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CARD_FILE = "config.json", "model.safetensors", "tokenizer.json", "README.md"
MODEL_TYPE = "siamesenorm"
"""The `model_type` of an export."""
ARCHITECTURE = "SiameseNormForCausalLM"
PREFIX = "model."
"""Precedes the native name of every parameter in an export."""
DIGEST = "weights_sha256"
"""The field of config.json with the digest of the weights, which transformers drops when it saves other ones."""
REMOTE_CODE_FILE = "modeling_siamesenorm.py"
REMOTE_CODE = '''\
"""The classes of this model are those of the package siamesenorm, which has to be installed."""

try:
    from siamesenorm.interop.huggingface import SiameseNormConfig, SiameseNormForCausalLM, SiameseNormModel
except ImportError as error:
    raise ImportError(
        f"this model needs the package siamesenorm with its extra 'hf' ({error}): pip install 'siamesenorm[hf]'"
    ) from error

__all__ = ["SiameseNormConfig", "SiameseNormForCausalLM", "SiameseNormModel"]
'''
"""Code that transformers runs under `trust_remote_code`; it imports this package, so that no code is copied."""
AUTO_MAP = {
    "AutoConfig": "modeling_siamesenorm.SiameseNormConfig",
    "AutoModel": "modeling_siamesenorm.SiameseNormModel",
    "AutoModelForCausalLM": "modeling_siamesenorm.SiameseNormForCausalLM",
}


def write_export(
    directory: Path,
    *,
    config: LanguageModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    seed: int,
    card: str,
) -> None:
    """Write everything that transformers, `from_pretrained` and `siamesenorm generate` read; raises OSError."""
    from safetensors.torch import save_file

    from siamesenorm.interop.tokenizer import generation_config, tokenizer_config, tokenizer_file

    file, end_of_text = tokenizer_file(tokenizer), tokenizer.end_of_text
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    record = {name: value for name, value in config.to_json().items() if name != "family"}
    record |= {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "auto_map": AUTO_MAP, "dtype": dtype}
    stored = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    record |= {"eos_token_id": end_of_text, "seed": seed, DIGEST: digest(stored)}
    _write_json(directory / CONFIG_FILE, record)
    with safetensors_errors(directory):
        save_file(stored, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors creates files that their owner alone can read.
    shutil.copymode(directory / CONFIG_FILE, directory / WEIGHTS_FILE)
    _write_json(directory / "generation_config.json", generation_config(end_of_text))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(file, end_of_text, config.context))
    (directory / TOKENIZER_FILE).write_bytes(file)
    (directory / REMOTE_CODE_FILE).write_text(REMOTE_CODE)
    (directory / CARD_FILE).write_text(card, encoding="utf-8")


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # ctypes reads a tensor without a copy in every dtype, and needs no numpy.
        found.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return found.hexdigest()
