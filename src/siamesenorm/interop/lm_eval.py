"""lm-evaluation-harness on our models: a run, a checkpoint or an exported directory by path, and tasks of local files.

Importing this module registers the model "siamesenorm"; a harness that knows entry points does it by itself:

    lm_eval --model siamesenorm --model_args pretrained=runs/x --tasks arc_easy

In Python, and without a network:

    task = local_task("arc_easy.jsonl")
    results = evaluate("runs/x", [task])["arc_easy"]["acc,none"]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from siamesenorm.errors import UserError
from siamesenorm.interop.huggingface import SiameseNormForCausalLM
from siamesenorm.interop.huggingface.tokenizer import tokenizer_for
from siamesenorm.interop.stored_model import build, open_stored

PROMPT = "Question: {{question}}\nAnswer:"


@register_model("siamesenorm")
class SiameseNormLM(HFLM):  # type: ignore[misc]
    """The harness's Hugging Face model, which reads our directories too.

    `pretrained` is a path (a run, a checkpoint, an exported directory), whose tokenizer is used, or a model of
    transformers with its `tokenizer`; `data` is the prepared data of a run, where they were moved; `dtype` and `device`
    are where and in what the model computes: fp32 and the GPU, if there is one. Other options are those of HFLM.
    """

    def __init__(
        self,
        pretrained: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        data: str | None = None,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(pretrained, (str, Path)):
            stored = open_stored(pretrained, data=Path(data) if data else None)
            native = build(stored)
            tokenizer = tokenizer or tokenizer_for(stored.tokenizer(), native.config.context)
            pretrained = SiameseNormForCausalLM.from_native(native, eos_token_id=tokenizer.eos_token_id)
        nn.Module.to(pretrained, device or ("cuda" if torch.cuda.is_available() else "cpu"), _dtype(dtype))
        super().__init__(pretrained=pretrained, tokenizer=tokenizer, **{"backend": "causal", **options})


def local_task(
    path: str | Path, *, name: str | None = None, prompt: str = PROMPT, cache: str | Path | None = None, **options: Any
) -> ConfigurableTask:
    """Return the multiple-choice task of a local file of JSON lines, gzipped or not.

    A line has `question`, `choices` (texts) and `label` (the index of the right one). `prompt` is a Jinja template of
    what stands before a choice; a blank comes in between. `name` is the file's if not given; `cache` is where
    `datasets` keeps its copy; `options` are fields of the harness's TaskConfig, which replace those given here. Raises
    UserError for a file that is not there.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such file: give one of JSON lines with question, choices and label")
    place = {} if cache is None else {"cache_dir": str(cache)}
    config: dict[str, Any] = {
        "task": name or file.name.partition(".")[0],
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}, **place},
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
    such as `limit`.
    """
    model = SiameseNormLM(model) if isinstance(model, (str, Path)) else model
    task_dict = {task.config.task: task for task in tasks}
    found = lm_eval.evaluate(lm=model, task_dict=task_dict, **options)
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def _dtype(name: str | torch.dtype | None) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else name or torch.float32
    if not isinstance(found, torch.dtype):
        raise UserError(f"dtype is {name!r}: choose float32, bfloat16 or float16")
    return found
