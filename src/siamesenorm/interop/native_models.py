"""Language models of this library on disk: the exported format, and models that are built from it or from a run.

A model is loaded for use, not to continue its run: it computes in the dtype of its weights and by the plain formulas.
Reading an export needs torch and safetensors alone; writing one needs tokenizers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import shutil
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from siamesenorm.errors import UserError
from siamesenorm.interop.stored_model import StoredModel, safetensors_errors, write_json
from siamesenorm.models.language import LanguageModel, LanguageModelConfig, build_language_model
from siamesenorm.topologies.topology import Reader

if TYPE_CHECKING:
    from siamesenorm.data.tokenizer import Tokenizer

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CARD_FILE = "config.json", "model.safetensors", "tokenizer.json", "README.md"
MODEL_TYPE = "siamesenorm"
"""The `model_type` of an export."""
PREFIX = "model."
"""Precedes the native name of every parameter in an export."""
DIGEST = "weights_sha256"
"""The field of config.json with the digest of the weights, which transformers drops when it saves other ones."""
REMOTE_CODE_FILE = "modeling_siamesenorm.py"
REMOTE_CODE = '''\
"""The classes of this model are those of the package siamesenorm, which has to be installed."""

try:
    from siamesenorm.interop.huggingface import (
        SiameseNormConfig,
        SiameseNormForCausalLM,
        SiameseNormForSequenceClassification,
        SiameseNormForTokenClassification,
        SiameseNormModel,
    )
except ImportError as error:
    raise ImportError(
        f"this model needs the package siamesenorm with its extra 'hf' ({error}): pip install 'siamesenorm[hf]'"
    ) from error

__all__ = [name for name in dir() if name.startswith("SiameseNorm")]
'''
"""Code that transformers runs under `trust_remote_code`; it imports this package, so that no code is copied."""
AUTO_MAP = {
    "AutoConfig": "modeling_siamesenorm.SiameseNormConfig",
    "AutoModel": "modeling_siamesenorm.SiameseNormModel",
    "AutoModelForCausalLM": "modeling_siamesenorm.SiameseNormForCausalLM",
    "AutoModelForSequenceClassification": "modeling_siamesenorm.SiameseNormForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_siamesenorm.SiameseNormForTokenClassification",
}


class NativeModel(StoredModel):
    """A language model of this library."""

    library = "siamesenorm"

    @abstractmethod
    def contents(self) -> tuple[LanguageModelConfig, dict[str, Tensor]]:
        """Return the configuration, for use, and the weights by their native names."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model."""

    @abstractmethod
    def seed(self) -> int:
        """Return the seed of the initial weights."""

    @abstractmethod
    def card(self) -> str:
        """Return the model card."""

    def load(self, **options: Any) -> LanguageModel:
        """Return the model in evaluation mode, in at least fp32; raises UserError for wrong or non-finite weights."""
        if options:
            raise UserError(f"{next(iter(options))}: a native model takes no options, leave it out")
        config, weights = self.contents()
        model = build_language_model(config, device="meta").to_empty(device="cpu")
        expected, found = ({name: tuple(t.shape) for name, t in d.items()} for d in (model.state_dict(), weights))
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        if wrong:
            raise UserError(
                f"{self.path}: {len(wrong)} weights are not those of its configuration, such as {wrong[0]}: "
                f"{found.get(wrong[0], 'none')} there, {expected.get(wrong[0], 'none')} needed: export the model again"
            )
        require_finite(self.path, weights)
        if any(tensor.dtype == torch.float64 for tensor in weights.values()):
            model = model.double()
        model.load_state_dict(weights)
        if model.config.residual_dtype != "inherit":
            compute_in(model, model.embedding.weight.dtype)
        return model.eval()

    def save(self, model: LanguageModel, target: Path) -> None:
        """Write a model as an export; the model card stays behind, since it describes another model."""
        self.write(target, for_use(model.config), model.state_dict(), default_card(model.config))

    def write(self, target: Path, config: LanguageModelConfig, weights: Mapping[str, Tensor], card: str) -> None:
        """Write everything that transformers, `from_pretrained` and `siamesenorm generate` read; raises OSError."""
        from safetensors.torch import save_file

        tokenizer = self.tokenizer()
        file, options = tokenizer_files(tokenizer, config.context)
        stored = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        record = {
            **{name: value for name, value in config.to_json().items() if name != "family"},
            "model_type": MODEL_TYPE,
            "architectures": ["SiameseNormForCausalLM"],
            "auto_map": AUTO_MAP,
            "dtype": str(next(iter(stored.values())).dtype).removeprefix("torch."),
            "eos_token_id": tokenizer.end_of_text,
            "seed": self.seed(),
            DIGEST: digest(stored),
        }
        write_json(target / CONFIG_FILE, record)
        with safetensors_errors(target):
            save_file(stored, target / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors creates files that their owner alone can read.
        shutil.copymode(target / CONFIG_FILE, target / WEIGHTS_FILE)
        # A text ends, and a new one begins, as documents did in training.
        special = {f"{role}_token_id": tokenizer.end_of_text for role in ("bos", "eos", "pad")}
        write_json(target / "generation_config.json", special)
        write_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **options})
        (target / TOKENIZER_FILE).write_bytes(file)
        (target / REMOTE_CODE_FILE).write_text(REMOTE_CODE)
        (target / CARD_FILE).write_text(card, encoding="utf-8")


class ExportedModel(NativeModel):
    """A directory that `siamesenorm export` wrote, or transformers for one of our classes."""

    @classmethod
    def detect(cls, path: Path, record: dict[str, Any]) -> Self | None:
        """Return the export whose configuration has our `model_type`."""
        return cls(path=path, record=record, name=MODEL_TYPE) if record.get("model_type") == MODEL_TYPE else None

    def contents(self) -> tuple[LanguageModelConfig, dict[str, Tensor]]:
        """Return the configuration, for use, and the weights by their native names, of one file or several."""
        config = self._config()
        files = sorted(self.path.glob("model*.safetensors"))
        if not files:
            raise UserError(f"{self.path}: no {WEIGHTS_FILE}: export the model again")
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.path}: the weights cannot be read ({error}): export the model again") from error
        if self.record.get(DIGEST) not in (None, digest(weights)):
            raise UserError(f"{self.path}: the weights have changed since they were written: copy or export them again")
        return config, {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}

    def _config(self) -> LanguageModelConfig:
        scaling = (self.record.get("rope_parameters") or {}).get("rope_type", "default")
        if scaling != "default":
            raise UserError(f"{self.path}: its rotation is scaled ({scaling}): load it with transformers")
        names = {field.name for field in dataclasses.fields(LanguageModelConfig)} & self.record.keys()
        try:
            return for_use(LanguageModelConfig.from_json({name: self.record[name] for name in names}))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{self.path / CONFIG_FILE}: not the configuration of a model: {error}") from error

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer beside the weights."""
        from siamesenorm.data.tokenizer import LibraryTokenizer

        file = self.path / TOKENIZER_FILE
        if not file.is_file():
            raise UserError(f"{file}: missing: save the tokenizer beside the model")
        end_of_text = self.record.get("eos_token_id")
        return LibraryTokenizer(self.path.name, file.read_bytes(), end_of_text if type(end_of_text) is int else None)

    def seed(self) -> int:
        """Return the seed of the initial weights."""
        seed = self.record.get("seed", 0)
        return seed if type(seed) is int else 0

    def card(self) -> str:
        """Return the model card; a line where there is none."""
        file = self.path / CARD_FILE
        if not file.is_file():
            return default_card(self._config())
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read ({error}): save it as UTF-8, or remove it") from error


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # ctypes reads a tensor without a copy in every dtype, and needs no numpy.
        found.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return found.hexdigest()


def default_card(config: LanguageModelConfig) -> str:
    """Return the card of a model without a record of its training."""
    return f"# {config.label}\n\nA language model of siamesenorm.\n"


def require_finite(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise UserError for weights that are NaN or infinite."""
    wrong = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if wrong:
        raise UserError(f"{directory}: {len(wrong)} weights are not finite, such as {wrong[0]}: use another checkpoint")


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype that sublayers and head compute in, whatever the dtype of the streams."""
    for module in model.modules():
        if isinstance(module, Reader):
            module.compute_dtype = dtype


def for_use(config: LanguageModelConfig) -> LanguageModelConfig:
    """Return the configuration without what belongs to the execution of a run."""
    return dataclasses.replace(config, compute_dtype="inherit")


# --- our tokenizers as files that `AutoTokenizer` loads: the same ids for every text, and the same text for all ids


def tokenizer_files(tokenizer: Tokenizer, context: int) -> tuple[bytes, dict[str, Any]]:
    """Return tokenizer.json and the options of a tokenizer of transformers; it adds no special tokens, as ours."""
    import tokenizers

    from siamesenorm.data.tokenizer import END_OF_TEXT_NAMES

    if tokenizer.content is None:
        # Ids 0..255 are the bytes. The library writes a byte as a printable character: itself where it is one, else one
        # from 256 upwards, in order.
        alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        others = iter(sorted(character for character in alphabet if ord(character) > 255))
        vocabulary = {chr(byte) if chr(byte) in alphabet else next(others): byte for byte in range(256)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT_NAMES[0], special=True, normalized=False)])
    else:
        backend = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    backend.no_truncation()
    backend.no_padding()
    if backend.encode("a").ids != backend.encode("a", add_special_tokens=False).ids:
        backend.post_processor = None
    options = {
        "eos_token": backend.id_to_token(tokenizer.end_of_text),
        "model_max_length": context,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        # A text that spells a special token is ordinary text, as it was in training.
        "split_special_tokens": True,
    }
    return backend.to_str().encode(), options


def tokenizer_for(tokenizer: Tokenizer, context: int) -> Any:
    """Return the tokenizer that `AutoTokenizer` would load from an export; `context` is the model's, in tokens."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    file, options = tokenizer_files(tokenizer, context)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(file.decode()), **options)
