"""Models of transformers, diffusers and timm in a local directory, converted or not: loaded, built and saved again.

Nothing is downloaded, no code of the directory runs, and weights are safetensors. A library is imported when used.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from siamesenorm.errors import UserError, optional
from siamesenorm.interop.stored_model import StoredModel, safetensors_errors

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "preprocessor_config.json", "processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Files beside a model that remain valid whatever its residual path: tokenizers, processors, licences."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|npz|onnx|index\.json)")
"""Names of files of weights in any format; an index names others, which may be missing."""
OLD_CONSTANTS = r"\.attn\.masked_bias$"
"""Names of constants that old versions of transformers saved with GPT-2."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The floating dtypes of safetensors by its own names."""


class LibraryModel(StoredModel):
    """A model of another library; `mark` is the field of config.json that names it, `prefix` marks converted ones."""

    extra: ClassVar[str]
    """The extra of this package that installs the library."""
    mark: ClassVar[str]
    prefix: ClassVar[str]
    file: ClassVar[str] = "model.safetensors"
    """The file of weights that the library reads."""

    @classmethod
    def detect(cls, path: Path, record: dict[str, Any]) -> Self | None:
        """Return the model whose configuration has the library's mark."""
        name = record.get(cls.mark)
        return cls(path=path, record=record, name=name) if isinstance(name, str) else None

    @property
    def converted(self) -> bool:
        """Whether the configuration has the prefix of converted models."""
        return self.name.startswith(self.prefix)

    @property
    def weights(self) -> list[Path]:
        """The files of weights that the library reads: one, or its shards."""
        whole = self.path / self.file
        return [whole] if whole.is_file() else sorted(self.path.glob(f"{whole.stem}-*-of-*.safetensors"))

    def load(self, **options: Any) -> nn.Module:
        """Return the model with its weights; raises UserError unless all are there in safetensors, and no others."""
        if "output_loading_info" in options:
            raise UserError("output_loading_info: a model that loads has all its weights, and no others: leave it out")
        quantised = self.record.get("quantization_config")
        if quantised and not self.converted:
            method = quantised.get("quant_method", "unnamed method") if isinstance(quantised, dict) else quantised
            raise UserError(f"{self.path} holds quantised weights ({method}): name the model that they were made from")
        if not self.weights:
            raise UserError(self._remedy_for_weights())
        if self._arguments().get("siamesenorm") and not self.converted:
            raise UserError(f"{self.path} records conversions of an unconverted {self.name}: config.json is damaged")
        library = self.import_library()
        with library_errors(self.path), _quiet(library):
            model: nn.Module = self._load(library, options)
        return model.eval()

    def initialise(self, seed: int) -> nn.Module:
        """Return the model; where there is no file of weights at all, with its library's initial ones of this seed."""
        if self._files_of_weights():
            return self.load()
        library = self.import_library()
        torch.manual_seed(seed)
        with library_errors(self.path):
            model: nn.Module = self._build(library)
        return model.eval()

    def save(self, model: Any, target: Path) -> None:
        """Write the model to a directory, and beside it the tokenizer and the licence of this one."""
        with safetensors_errors(target), _quiet(self.import_library()):
            self._save(model, target)
        for file in (file for pattern in COMPANIONS for file in self.path.glob(pattern)):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)

    def import_library(self) -> Any:
        """Return the library; raises UserError, with the extra of this package that brings it, without it."""
        return optional(self.library, self.extra, str(self.path))

    def class_of(self, library: Any, name: str) -> Any:
        """Return a model's class of the library by its name; raises UserError if it has none."""
        found = getattr(library, name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
        remedy = "load it in Python" if "auto_map" in self.record else "install a version that has it"
        raise UserError(f"{self.path} is a {name}, no model of {self.library} {library.__version__}: {remedy}")

    def _arguments(self) -> dict[str, Any]:
        """Return the part of the configuration that holds the conversions."""
        return self.record

    def _files_of_weights(self) -> list[str]:
        """Return the names of files of weights in any format."""
        names = sorted(file.name for file in self.path.iterdir() if WEIGHTS.fullmatch(file.name))
        return [name for name in names if name != "training_args.bin"]

    def _remedy_for_weights(self) -> str:
        """Return what to do about weights that the library does not read."""
        found, stem = self._files_of_weights(), self.file.removesuffix(".safetensors")
        if not found:
            return f"{self.path} has no safetensors weights, nor others: fetch them, or start with rewire --scratch"
        if variants := [name for name in found if re.fullmatch(rf"{stem}\.[^.-]+\.safetensors", name)]:
            return f"{self.path} holds no {self.file}, but {variants[0]}: rename it to {self.file}"
        if safe := [name for name in found if name.endswith((".safetensors", ".safetensors.index.json"))]:
            return f"{self.path} holds no {self.file}, but {safe[0]}: fetch it whole, or save the model again"
        kind = "a pickle, which can run code" if found[0].endswith(PICKLES) else "of another format"
        return f"{self.path} has no safetensors weights: {found[0]} is {kind}: save the model as safetensors"

    def _require_whole(self, info: Mapping[str, Any], *, any_shape: bool = False) -> None:
        """Raise UserError unless all weights were found, in their shapes, and no others; `info` is the library's."""
        unexpected = [name for name in info.get("unexpected_keys", ()) if not re.search(OLD_CONSTANTS, name)]
        mismatched = [] if any_shape else [name for name, *_ in info.get("mismatched_keys", ())]
        found = {
            "lacks": info.get("missing_keys", ()),
            "has, with no place in the model,": unexpected,
            "has in another shape": mismatched,
        }
        for verb, names in found.items():
            if names:
                weights = "1 weight" if len(names) == 1 else f"{len(names)} weights"
                some = ", ".join([*sorted(names)[:3], *(["..."] if len(names) > 3 else [])])
                raise UserError(f"{self.path} {verb} {weights} ({some}): its files are not those of its config.json")

    @abstractmethod
    def _build(self, library: Any) -> Any: ...

    @abstractmethod
    def _load(self, library: Any, options: dict[str, Any]) -> Any: ...

    def _save(self, model: Any, target: Path) -> None:
        model.save_pretrained(target)


class TransformersModel(LibraryModel):
    """A model of Hugging Face transformers, of the class that its configuration names."""

    library = "transformers"
    extra = "hf"
    mark = "model_type"
    prefix = "siamesenorm-"

    def _build(self, library: Any) -> Any:
        return self._class(library)(self._configuration(library))

    def _load(self, library: Any, options: dict[str, Any]) -> Any:
        kind = self._class(library)
        defaults: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "ignore_mismatched_sizes": True}
        if not self.converted:  # the options of a converted model may change its configuration
            defaults["config"] = self._configuration(library)
        if "torch_dtype" not in options:  # the old name of dtype, which yields to the new one
            defaults["dtype"] = "auto"
        model, found = kind.from_pretrained(self.path, **{**defaults, **options}, output_loading_info=True)
        self._require_whole(found, any_shape=options.get("ignore_mismatched_sizes", False))
        return model

    def _configuration(self, library: Any) -> Any:
        return library.AutoConfig.from_pretrained(self.path, local_files_only=True)

    def _class(self, library: Any) -> Any:
        names = self.record.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
        if self.converted:
            from siamesenorm.interop.huggingface import converted

            return getattr(converted, name or self.name)
        if name is not None:
            return self.class_of(library, name)
        known = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        usual = known.get(self.name, "LlamaForCausalLM")
        raise UserError(
            f"{self.path} does not name the class of its model: write it to config.json, such as "
            f'"architectures": ["{usual}"]'
        )


class DiffusersModel(LibraryModel):
    """A model of diffusers: what a pipeline keeps in its folder `transformer`."""

    library = "diffusers"
    extra = "diffusion"
    mark = "_class_name"
    prefix = "SiameseNorm"
    file = "diffusion_pytorch_model.safetensors"

    def _build(self, library: Any) -> Any:
        kind = self._class(library)
        return kind.from_config(kind.load_config(self.path, local_files_only=True))

    def _load(self, library: Any, options: dict[str, Any]) -> Any:
        defaults = {"local_files_only": True, "use_safetensors": True, "torch_dtype": _stored_dtype(self.weights[0])}
        model, found = self._class(library).from_pretrained(
            self.path, **{**defaults, **options}, output_loading_info=True
        )
        self._require_whole(found)
        return model

    def _class(self, library: Any) -> Any:
        if not self.converted:
            return self.class_of(library, self.name)
        from siamesenorm.interop import diffusers

        return getattr(diffusers, self.name)


class TimmModel(LibraryModel):
    """A model of timm, as `timm.models.save_for_hf` writes it; timm loads its weights in fp32."""

    library = "timm"
    extra = "vision"
    mark = "architecture"
    prefix = "siamesenorm_"

    def _arguments(self) -> dict[str, Any]:
        arguments = self.record.get("model_args")
        return arguments if isinstance(arguments, dict) else {}

    def _build(self, library: Any) -> Any:
        return self._create(library, {"pretrained": False})

    def _load(self, library: Any, options: dict[str, Any]) -> Any:
        return self._create(library, {**options, "pretrained": True})

    def _create(self, library: Any, options: dict[str, Any]) -> Any:
        if self.converted:
            import siamesenorm.interop.timm  # noqa: F401  registers the architecture
        return library.create_model(f"local-dir:{self.path}", **options)

    def _save(self, model: Any, target: Path) -> None:
        from siamesenorm.interop.timm import save_pretrained

        save_pretrained(model, target)


def _stored_dtype(file: Path) -> torch.dtype:
    """Return the dtype of most floating tensors in a file of safetensors; fp32 if there are none."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        found = [tensors.get_slice(name).get_dtype() for name in tensors.keys()]  # noqa: SIM118  not a mapping
    floating = [dtype for dtype in found if dtype in DTYPES] or ["F32"]
    return DTYPES[max(set(floating), key=floating.count)]


@contextmanager
def library_errors(directory: Path) -> Iterator[None]:
    """Turn any error of a library into a UserError of one line, which names the directory."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any class: libraries raise their own over damaged files
        text = str(error).strip() or type(error).__name__
        sentence = re.split(r"\n|(?<=[.!?]) ", text)[0]
        if sentence.endswith(":"):  # it only announces what follows
            sentence = textwrap.shorten(text, 240, placeholder=" ...")
        raise UserError(f"{directory} cannot be loaded: {sentence}") from error


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Silence a library's warnings about weights, which are refused here, and its progress bars in files and pipes."""
    logger = logging.getLogger(library.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    bars: Any = library.utils.logging if library.__name__ == "transformers" else None
    hide = bars is not None and bars.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hide:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if hide:
            bars.enable_progress_bar()
