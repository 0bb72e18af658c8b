"""A model in a local directory, in the format of transformers, diffusers or timm: built, loaded, and saved again.

Nothing is downloaded, no code of the directory runs, and weights are safetensors. A library is imported when a model of
its own is met.
"""

from __future__ import annotations

import importlib
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.library import (
    disk_errors_raised,
    import_library,
    progress_on_terminals_alone,
    require_whole,
    stored_dtype,
    told_in_one_line,
)
from siamesenorm.interop.loading import from_pretrained
from siamesenorm.interop.model_directory import ModelDirectory
from siamesenorm.interop.surgery import Step

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "preprocessor_config.json", "processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files beside a model that stay true of it whatever its residual path: tokenizers, processors, licences."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|npz|onnx|index\.json)")
"""Names of files of weights in any format; an index names others, which may not have been fetched."""
OLD_CONSTANTS = (r"\.attn\.masked_bias$",)
"""Names of what was saved with GPT-2 by old versions of transformers, and is no weight."""


class Source(Protocol):
    """A model on disk that can be rewired; everything raises UserError for files that are missing or damaged."""

    @property
    def directory(self) -> Path:
        """Where it is."""

    @property
    def steps(self) -> list[Step]:
        """What was done to the model before it was saved."""

    def load(self) -> nn.Module:
        """Return the model with its weights, in evaluation mode."""

    def start(self, seed: int) -> nn.Module:
        """Return the model to start from scratch with: where there are no weights at all, initial ones of this seed."""

    def save(self, model: nn.Module, target: Path) -> None:
        """Write the model to a directory, with its tokenizer; raises OSError where the disk refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A directory that holds a model of one library, and its configuration as it stands there: a `Source`."""

    library: ClassVar[str]
    extra: ClassVar[str]
    """The extra of this package that brings the library."""
    file: ClassVar[str] = "model.safetensors"
    """The file of weights that the library reads."""

    directory: Path
    config: dict[str, Any]
    operated: bool
    """Whether the configuration is of a model that was rewired or had its norms swapped, for which it needs steps."""

    @property
    def steps(self) -> list[Step]:
        """What was done to the model before it was saved: nothing, if it is one of the library's own.

        Raises UserError for a record of something else.
        """
        return self._read_steps(self.config)

    @property
    def weights(self) -> list[Path]:
        """The files of weights that the library reads: one, or its shards."""
        whole = self.directory / self.file
        return [whole] if whole.is_file() else sorted(self.directory.glob(f"{whole.stem}-*-of-*.safetensors"))

    def load(self) -> nn.Module:
        """Return the model with its weights; raises UserError unless they are there, whole, in safetensors."""
        if not self.weights:
            raise UserError(self._remedy_for_weights())
        library = imported(self)
        if self.operated or self.steps:  # the library alone would not know the model
            with warnings_left_out(self.library):
                return from_pretrained(self.directory)
        with told_in_one_line(self.directory), warnings_left_out(self.library):
            return self._load(library).eval()

    def start(self, seed: int) -> nn.Module:
        """Return the model with its weights; where there is no file of weights at all, with its library's initial ones.

        Raises UserError for weights that cannot be loaded.
        """
        if self._files_of_weights():
            return self.load()
        library = imported(self)
        torch.manual_seed(seed)
        with told_in_one_line(self.directory):
            return self._build(library).eval()

    def save(self, model: nn.Module, target: Path) -> None:
        """Write the model to a directory, and beside it the tokenizer and the licence of this one.

        Raises OSError where the disk refuses.
        """
        with disk_errors_raised(target):
            self._save(model, target)
        for file in (file for pattern in COMPANIONS for file in self.directory.glob(pattern)):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)

    def class_of(self, library: Any, name: str) -> Any:
        """Return a model's class of the library by its name; raises UserError if it has none."""
        found = getattr(library, name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
        own_code = "auto_map" in self.config
        remedy = "load it in Python and call siamesenorm.rewire" if own_code else "install a version that has it"
        raise UserError(
            f"{self.directory} is a {name}, no model of {self.library} {library.__version__}: {remedy}, or correct the "
            "name in config.json"
        )

    def _read_steps(self, fields: Any) -> list[Step]:
        steps = fields.get("siamesenorm") if isinstance(fields, dict) else None
        if isinstance(steps or [], list) and all(isinstance(step, dict) for step in steps or []):
            return steps or []
        raise UserError(
            f"{self.directory}: siamesenorm in config.json is no list of operations: the configuration is damaged, "
            "save the model again"
        )

    def _files_of_weights(self) -> list[str]:
        """Return the names of files of weights in any format."""
        names = sorted(file.name for file in self.directory.iterdir() if WEIGHTS.fullmatch(file.name))
        return [name for name in names if name != "training_args.bin"]

    def _remedy_for_weights(self) -> str:
        """Return what to do about weights that the library does not read."""
        found, stem = self._files_of_weights(), self.file.removesuffix(".safetensors")
        if not found:
            return (
                f"{self.directory} has no safetensors weights, nor others: fetch them, or start with rewire --scratch"
            )
        if variants := [name for name in found if re.fullmatch(rf"{stem}\.[^.-]+\.safetensors", name)]:
            return f"{self.directory} holds no {self.file}, but {variants[0]}: rename it to {self.file}"
        if safe := [name for name in found if name.endswith((".safetensors", ".safetensors.index.json"))]:
            return f"{self.directory} holds no {self.file}, but {safe[0]}: fetch it whole, or save the model again"
        kind = "a pickle, which can run code" if found[0].endswith(PICKLES) else "of another format"
        return f"{self.directory} has no safetensors weights: {found[0]} is {kind}: save the model as safetensors"

    def _build(self, library: Any) -> nn.Module:
        raise NotImplementedError

    def _load(self, library: Any) -> nn.Module:
        raise NotImplementedError

    def _save(self, model: Any, target: Path) -> None:
        model.save_pretrained(target)


class TransformersModel(LocalModel):
    """A model of Hugging Face transformers, of the class that its configuration names."""

    library = "transformers"
    extra = "hf"

    def _build(self, library: Any) -> nn.Module:
        model: nn.Module = self._class(library)(self._configuration(library))
        return model

    def _load(self, library: Any) -> nn.Module:
        with progress_on_terminals_alone(library):
            model, found = self._class(library).from_pretrained(
                self.directory,
                config=self._configuration(library),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                dtype="auto",
            )
        require_whole(self.directory, found, ignored=OLD_CONSTANTS)
        loaded: nn.Module = model
        return loaded

    def _save(self, model: Any, target: Path) -> None:
        with progress_on_terminals_alone(imported(self)):
            model.save_pretrained(target)

    def _configuration(self, library: Any) -> Any:
        return library.AutoConfig.from_pretrained(self.directory, local_files_only=True)

    def _class(self, library: Any) -> Any:
        names = self.config.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return self.class_of(library, names[0])
        known = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        usual = known.get(self.config["model_type"], "LlamaForCausalLM")
        raise UserError(
            f"{self.directory} does not say of which class its model is: write it to config.json, such as "
            f'"architectures": ["{usual}"]'
        )


class DiffusersModel(LocalModel):
    """A model of diffusers: what a pipeline keeps in its folder `transformer`."""

    library = "diffusers"
    extra = "diffusion"
    file = "diffusion_pytorch_model.safetensors"

    def _build(self, library: Any) -> nn.Module:
        model: nn.Module = self.class_of(library, self.config["_class_name"]).from_config(self.config)
        return model

    def _load(self, library: Any) -> nn.Module:
        model, found = self.class_of(library, self.config["_class_name"]).from_pretrained(
            self.directory,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            torch_dtype=stored_dtype(self.weights[0]),
        )
        require_whole(self.directory, found)
        loaded: nn.Module = model
        return loaded


class TimmModel(LocalModel):
    """A model of timm, as `timm.models.save_for_hf` writes it; timm loads its weights in fp32."""

    library = "timm"
    extra = "vision"

    @property
    def steps(self) -> list[Step]:
        """What was done to the model before it was saved: timm keeps it among the arguments."""
        return self._read_steps(self.config.get("model_args"))

    def _build(self, library: Any) -> nn.Module:
        model: nn.Module = library.create_model(f"local-dir:{self.directory}", pretrained=False)
        return model

    def _load(self, library: Any) -> nn.Module:
        model: nn.Module = library.create_model(f"local-dir:{self.directory}", pretrained=True)
        return model

    def _save(self, model: Any, target: Path) -> None:
        importlib.import_module("siamesenorm.interop.timm").save_pretrained(model, target)


KINDS: dict[str, type[LocalModel]] = {kind.library: kind for kind in (TransformersModel, DiffusersModel, TimmModel)}


def model_of_library(found: ModelDirectory) -> LocalModel:
    """Return the model of a library that was found; raises UserError, with the remedy, for quantised weights."""
    if quantised := found.config.get("quantization_config"):
        method = quantised.get("quant_method", "unnamed method") if isinstance(quantised, dict) else quantised
        raise UserError(f"{found.path} holds quantised weights ({method}): name the model that they were made from")
    return KINDS[found.library](directory=found.path, config=found.config, operated=found.operated)


@contextmanager
def warnings_left_out(library: str) -> Iterator[None]:
    """Keep back what a library says of weights that do not fit: that is refused here, in one line."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def imported(model: LocalModel) -> Any:
    """Return a model's library; raises UserError if it cannot be imported."""
    return import_library(model.library, model.extra, model.directory)
