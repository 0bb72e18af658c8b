"""A model in a local directory, in the format of transformers, diffusers or timm: built, loaded, and saved again.

Nothing is downloaded, no code of the directory runs, and weights are safetensors. A library is imported when a model of
its own is met.
"""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from siamesenorm.errors import UserError
from siamesenorm.interop.library import (
    disk_errors_raised,
    import_library,
    progress_on_terminals_alone,
    read_config,
    stored_dtype,
    told_in_one_line,
)
from siamesenorm.interop.loading import from_pretrained
from siamesenorm.interop.surgery import Step

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "preprocessor_config.json", "processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files beside a model that stay true of it whatever its residual path: tokenizers, processors, licences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A directory that holds a model of one library, and its configuration as it stands there."""

    library: ClassVar[str]
    extra: ClassVar[str]
    """The extra of this package that brings the library."""
    mark: ClassVar[str]
    """The field of config.json by which the library's own are known."""

    directory: Path
    config: dict[str, Any]

    @property
    def steps(self) -> list[Step]:
        """What was done to the model before it was saved: nothing, if it is one of the library's own."""
        return list(self.config.get("siamesenorm") or ())

    @property
    def weights(self) -> list[Path]:
        """The files of weights in safetensors."""
        return sorted(self.directory.glob("*.safetensors"))

    def build(self) -> nn.Module:
        """Return the model of the configuration with the initial weights of its library."""
        library = imported(self)
        with told_in_one_line(self.directory):
            return self._build(library).eval()

    def load(self) -> nn.Module:
        """Return the model with its weights; raises UserError unless they are all there, in safetensors."""
        if not self.weights:
            raise UserError(f"{self.directory} has no safetensors weights: {_remedy_for_weights(self.directory)}")
        library = imported(self)
        if self.steps:  # norms were swapped before: the library alone would not know the model
            return from_pretrained(self.directory)
        with told_in_one_line(self.directory):
            return self._load(library).eval()

    def save(self, model: nn.Module, target: Path) -> None:
        """Write the model to a directory, and beside it the tokenizer and the licence of this one.

        Raises OSError where the disk refuses.
        """
        with disk_errors_raised(target):
            self._save(model, target)
        for file in (file for pattern in COMPANIONS for file in self.directory.glob(pattern)):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)

    def require_all(self, absent: Iterable[str]) -> None:
        """Raise UserError if weights are absent from the files: a library would draw them at random."""
        names = sorted(absent)
        if names:
            raise UserError(f"{self.directory} lacks {len(names)} weights, such as {names[0]}: fetch it again")

    def class_of(self, library: Any, name: str) -> Any:
        """Return a class of the library by its name; raises UserError if it has none."""
        if not hasattr(library, name):
            code = "load it in Python and call siamesenorm.rewire" if "auto_map" in self.config else "install another"
            raise UserError(f"{self.directory} is a {name}, unknown to {self.library} {library.__version__}: {code}")
        return getattr(library, name)

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
    mark = "model_type"

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
        self.require_all(found["missing_keys"])
        loaded: nn.Module = model
        return loaded

    def _save(self, model: Any, target: Path) -> None:
        with progress_on_terminals_alone(imported(self)):
            model.save_pretrained(target)

    def _configuration(self, library: Any) -> Any:
        return library.AutoConfig.from_pretrained(self.directory, local_files_only=True)

    def _class(self, library: Any) -> Any:
        return self.class_of(library, (self.config.get("architectures") or ["model of no named architecture"])[0])


class DiffusersModel(LocalModel):
    """A model of diffusers: what a pipeline keeps in its folder `transformer`."""

    library = "diffusers"
    extra = "diffusion"
    mark = "_class_name"

    def _build(self, library: Any) -> nn.Module:
        model: nn.Module = self.class_of(library, self.config[self.mark]).from_config(self.config)
        return model

    def _load(self, library: Any) -> nn.Module:
        model, found = self.class_of(library, self.config[self.mark]).from_pretrained(
            self.directory,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            torch_dtype=stored_dtype(self.weights[0]),
        )
        self.require_all(found["missing_keys"])
        loaded: nn.Module = model
        return loaded


class TimmModel(LocalModel):
    """A model of timm, as `timm.models.save_for_hf` writes it; timm loads its weights in fp32."""

    library = "timm"
    extra = "vision"
    mark = "architecture"

    @property
    def steps(self) -> list[Step]:
        """What was done to the model before it was saved: timm keeps it among the arguments."""
        return list(self.config.get("model_args", {}).get("siamesenorm") or ())

    def _build(self, library: Any) -> nn.Module:
        model: nn.Module = library.create_model(f"local-dir:{self.directory}", pretrained=False)
        return model

    def _load(self, library: Any) -> nn.Module:
        model: nn.Module = library.create_model(f"local-dir:{self.directory}", pretrained=True)
        return model

    def _save(self, model: Any, target: Path) -> None:
        importlib.import_module("siamesenorm.interop.timm").save_pretrained(model, target)


KINDS = (TransformersModel, DiffusersModel, TimmModel)


def model_of_library(directory: Path, config: dict[str, Any]) -> LocalModel:
    """Return the model of a library that a directory holds; raises UserError, with the remedy, for everything else."""
    kinds = [kind for kind in KINDS if isinstance(config.get(kind.mark), str)]
    if not kinds:
        marks = ", ".join(f"{kind.mark} ({kind.library})" for kind in KINDS)
        raise UserError(f"{directory} holds no model that can be rewired: config.json has none of {marks}")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unnamed method") if isinstance(quantised, dict) else quantised
        raise UserError(f"{directory} holds quantised weights ({method}): rewire the model that they were made from")
    return kinds[0](directory=directory, config=config)


def read_configuration(directory: Path) -> dict[str, Any]:
    """Return what config.json of a directory holds; raises UserError, with the remedy, where there is none."""
    if not directory.is_dir():
        raise UserError(_absent(directory))
    if not (directory / "config.json").is_file():
        raise UserError(_no_configuration(directory))
    return read_config(directory)


def imported(model: LocalModel) -> Any:
    """Return a model's library; raises UserError if it cannot be imported."""
    return import_library(model.library, model.extra, model.directory)


def _absent(directory: Path) -> str:
    if directory.exists():
        return f"{directory} is a file: name the directory of the model"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(directory)) and not directory.parent.exists():
        return (
            f"{directory} is no directory here, and nothing is downloaded: if it is a model of the Hub, run "
            f"hf download {directory} --local-dir {directory.name} first"
        )
    return f"{directory} does not exist: name the directory of a model"


def _no_configuration(directory: Path) -> str:
    if (directory / "model_index.json").is_file():
        return f"{directory} holds a pipeline of diffusers: rewire its model, {directory / 'transformer'}"
    if (directory / "adapter_config.json").is_file():
        return f"{directory} holds an adapter, and no model: merge it into its model first"
    if list(directory.glob("*.gguf")):
        return f"{directory} holds GGUF files: rewire the safetensors model that they were made from"
    return f"{directory} has no config.json: name the directory of a model"


def _remedy_for_weights(directory: Path) -> str:
    if any(file.suffix in (".bin", ".pt", ".pth", ".ckpt") for file in directory.iterdir()):
        return "those there are pickles, which can run code; save the model again as safetensors"
    return "fetch it again, or start from scratch"
