"""lm-evaluation-harness on our models: a run, a checkpoint or an exported directory by path, and tasks of local files.

Importing this module registers the model "siamesenorm"; where a harness reads no entry points (0.4.13), run
`python -c "import siamesenorm.interop.lm_eval; from lm_eval.__main__ import cli_evaluate; cli_evaluate()" run ...`.

    task = local_task("arc_easy.jsonl")
    results = evaluate("runs/x", [task])["arc_easy"]["acc,none"]
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from siamesenorm.data.sources import read_json_lines
from siamesenorm.errors import UserError
from siamesenorm.files import disk_errors
from siamesenorm.interop.huggingface import SiameseNormForCausalLM
from siamesenorm.interop.native_models import tokenizer_for
from siamesenorm.interop.stored import open_native
from siamesenorm.training.execution import find_device

PROMPT = "Question: {{question}}\nAnswer:"
FIELDS = "question, choices and label"


@register_model("siamesenorm")
class SiameseNormLM(HFLM):
    """The harness's Hugging Face model, which reads our directories too.

    `pretrained` is a path (a run, a checkpoint, an exported directory), whose tokenizer is used, or a model of
    transformers with its `tokenizer`, which is not changed; `data` is the prepared data of a run, where they were
    moved; `dtype` and `device` are where and in what the model computes: fp32 and the GPU, if there is one. Other
    options are those of HFLM. Raises UserError for what cannot be scored.
    """

    def __init__(
        self,
        pretrained: str | Path | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        data: str | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        _require_counts(options)
        place = _place(device, dtype)
        if isinstance(pretrained, (str, Path)):
            stored = open_native(pretrained, data=Path(data) if data else None)
            native = stored.load()
            own = tokenizer_for(stored.tokenizer(), native.config.context)
            tokenizer = tokenizer or own
            pretrained = SiameseNormForCausalLM.from_native(native, eos_token_id=own.eos_token_id)
        elif isinstance(pretrained, nn.Module) and hasattr(pretrained, "merge_and_unload"):
            raise UserError(f"a {type(pretrained).__name__} holds adapters of PEFT: give model.merge_and_unload()")
        elif not isinstance(pretrained, PreTrainedModel):
            raise UserError(f"a {type(pretrained).__name__} is no model of transformers: name its directory instead")
        elif tokenizer is None and not (pretrained.name_or_path and Path(pretrained.name_or_path).is_dir()):
            raise UserError(f"{type(pretrained).__name__} is not from a directory with a tokenizer: give its tokenizer")
        elif pretrained.training or any(
            (one.device, one.dtype) != place
            for one in chain(pretrained.parameters(), pretrained.buffers())
            if one.is_floating_point()
        ):
            pretrained = copy.deepcopy(pretrained)  # the caller's is not changed
        nn.Module.to(pretrained, *place)
        super().__init__(pretrained=pretrained, tokenizer=tokenizer, **{"backend": "causal", **options})

    @property
    def max_gen_toks(self) -> int:
        """Most tokens of an answer where a task sets no limit: the harness's, or half of a context of no more."""
        usual: int = super().max_gen_toks
        return usual if usual < self.max_length else self.max_length // 2

    def _loglikelihood_tokens(self, requests: Sequence[Any], *args: Any, **options: Any) -> list[tuple[float, bool]]:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise UserError(f"a choice has {longest} tokens, the model's context {self.max_length}: drop its question")
        found: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **options)
        return found


def local_task(
    path: str | Path, *, name: str | None = None, prompt: str = PROMPT, cache: str | Path | None = None, **options: Any
) -> ConfigurableTask:
    """Return the multiple-choice task of a local file of JSON lines, gzipped or not.

    A line has `question`, `choices` (texts) and `label` (the index of the right one). `prompt` is a Jinja template of
    what stands before a choice; a blank comes in between. `name` is the file's if not given; `cache` is where
    `datasets` keeps its copy; `options` are fields of the harness's TaskConfig, which replace those given here. Raises
    UserError for a file that is not there, and for a line that is no question.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such file: give one of JSON lines with {FIELDS}")
    with disk_errors(file):
        _require_questions(file, prompt, options)
    config: dict[str, Any] = {
        "task": name or file.name.partition(".")[0],
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(file.resolve())},
            **({} if cache is None else {"cache_dir": str(cache)}),
        },
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": prompt,
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")
        ],
        "metadata": {"version": 1.0},
    }
    return ConfigurableTask(config={**config, **options})


def evaluate(
    model: str | Path | lm_eval.api.model.LM, tasks: Sequence[ConfigurableTask], **options: Any
) -> dict[str, dict[str, Any]]:
    """Return the harness's numbers by task: "acc,none", "acc_norm,none" and their standard errors.

    `model` is a path that `SiameseNormLM` reads, or a model of the harness; `options` are those of `lm_eval.evaluate`,
    such as `limit`. Raises UserError for two tasks of one name.
    """
    model = SiameseNormLM(model) if isinstance(model, (str, Path)) else model
    task_dict: dict[str, ConfigurableTask] = {}
    for task in tasks:
        if task.config.task in task_dict:
            raise UserError(f"two tasks are called {task.config.task}: give one of them another name")
        task_dict[task.config.task] = task
    found = lm_eval.evaluate(lm=model, task_dict=task_dict, **options)
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def _require_questions(file: Path, prompt: str, options: Mapping[str, Any]) -> None:
    """Raise UserError, naming the line, unless every line has the fields that the task is going to read."""
    place = ""
    for place, question, _ in read_json_lines(file):
        if "question" in prompt and "doc_to_text" not in options and "question" not in question:
            raise UserError(f"{place}: no question, which the prompt is made of: add it")
        if "doc_to_choice" in options:
            continue
        choices, label = question.get("choices"), question.get("label")
        if not (isinstance(choices, list) and choices and all(one and isinstance(one, str) for one in choices)):
            raise UserError(f"{place}: choices are {choices!r}: give a list of texts")
        if "doc_to_target" not in options and not (type(label) is int and 0 <= label < len(choices)):
            raise UserError(f"{place}: label is {label!r}: give the index of the right one of {len(choices)} choices")
    if not place:
        raise UserError(f"{file} holds no question: give lines with {FIELDS}")


def _require_counts(options: Mapping[str, Any]) -> None:
    """Raise UserError for a size of a batch or of a context that is none."""
    batch_size, max_length = options.get("batch_size"), options.get("max_length")
    kind, _, times = str(batch_size).partition(":")
    number = times or "1" if kind == "auto" else kind
    if batch_size is not None and not (number.isdecimal() and int(number) > 0):
        raise UserError(f"batch_size is {batch_size!r}: choose a whole number of at least 1, or 'auto'")
    if max_length is not None and not (type(max_length) is int and max_length > 0):
        raise UserError(f"max_length is {max_length!r}: choose a whole number of tokens, or leave it out")


def _place(device: str | None, dtype: str | torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype of the names; raises UserError for one that is not available."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or torch.float32
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise UserError(f"dtype is {dtype!r}: choose float32, bfloat16 or float16")
    place = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.empty(0, device=place).device, found  # with its index
