"""lm-evaluation-harness on a run and on its export: the same numbers, and those of a direct computation."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import siamesenorm.interop.huggingface  # noqa: F401  registers the classes
from exported_models import CONTEXT, prepare, run, train
from siamesenorm import LanguageModel, from_pretrained
from siamesenorm.data.tokenizer import Tokenizer, load_tokenizer
from siamesenorm.errors import UserError
from siamesenorm.interop.lm_eval import SiameseNormLM, evaluate, local_task

logging.disable_progress_bar()

PAIRS = [("7 and 8", " are 15."), ("7 and 8 ", "are"), ("", "12 and"), ("390 and 391 are", " 781. Ü"), ("1", "\n\n")]
LONG = "1 and 2 are 3.\n\n" * 30
"""More tokens than the context has."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("runs") / "sums", "--steps", 80)


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "sums"
    run("export", trained, "--out", out)
    return out


@pytest.fixture(scope="module")
def native(trained: Path) -> LanguageModel:
    return from_pretrained(trained)


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Tokenizer:
    return load_tokenizer(data)


def harness_model(path: Path, **options: Any) -> SiameseNormLM:
    return SiameseNormLM(path, device="cpu", **options)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("test", index, 1))
        for index, each in enumerate(arguments)
    ]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    (ids,) = tokenizer.encode_batch([text])
    return ids.tolist()


def scored(native: LanguageModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log-probability in fp64 of a continuation, and whether every token of it is the likeliest."""
    tokens = (context + continuation)[-(CONTEXT + 1) :]
    with torch.no_grad():
        logits = native(torch.tensor([tokens[:-1]])).logits[0, -len(continuation) :].double()
    found = logits.log_softmax(-1)[torch.arange(len(continuation)), torch.tensor(continuation)]
    return found.sum().item(), logits.argmax(-1).tolist() == continuation


def direct(native: LanguageModel, tokenizer: Tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Return what the harness defines: both are encoded together, and whitespace before the gap belongs behind it."""
    if not context:
        return scored(native, [tokenizer.end_of_text], encode(tokenizer, continuation))
    before = encode(tokenizer, context.rstrip())
    return scored(native, before, encode(tokenizer, context + continuation)[len(before) :])


# --- what the harness asks of a model


@pytest.mark.parametrize("batch_size", [1, 3])
def test_loglikelihoods_are_those_of_a_direct_computation(
    batch_size: int, trained: Path, native: LanguageModel, tokenizer: Tokenizer
) -> None:
    greedy = greedily(native, tokenizer, "7 and 8", 3)
    pairs = [*PAIRS, ("7 and 8", greedy), (LONG, " 4 and"), (LONG[:20], LONG[20:60])]
    model = harness_model(trained, batch_size=batch_size)
    found = model.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    expected = [direct(native, tokenizer, *pair) for pair in pairs]
    np.testing.assert_allclose([each[0] for each in found], [each[0] for each in expected], atol=1e-4)
    assert [each[1] for each in found] == [each[1] for each in expected]
    assert expected[len(PAIRS)][1] and not expected[0][1], "both answers occur"


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rolling_loglikelihoods_count_every_token_once_in_windows_of_the_context(
    batch_size: int, trained: Path, native: LanguageModel, tokenizer: Tokenizer
) -> None:
    texts = ["7 and 8 are 15.", LONG, LONG[:33], "1"]
    expected = []
    for text in texts:
        ids, parts = [tokenizer.end_of_text, *encode(tokenizer, text)], []
        for start in range(1, len(ids), CONTEXT):
            window = ids[start : start + CONTEXT]
            # A last window that is not full looks back as far as the context allows.
            parts.append(scored(native, ids[max(0, start + len(window) - CONTEXT - 1) : start], window)[0])
        expected.append(sum(parts))
    assert len(encode(tokenizer, LONG)) > 2 * CONTEXT and len(encode(tokenizer, LONG)) % CONTEXT
    model = harness_model(trained, batch_size=batch_size)
    found = model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts]), True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-4)


def greedily(native: LanguageModel, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """Return the likeliest continuation, one token at a time, without a cache, until the end of the text."""
    tokens = encode(tokenizer, prompt)[-(CONTEXT - count) :]
    found: list[int] = []
    while len(found) < count:
        token = int(native(torch.tensor([tokens + found])).logits[0, -1].argmax())
        if token == tokenizer.end_of_text:
            break
        found.append(token)
    return tokenizer.decode(found)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generation_is_greedy_stops_and_keeps_the_end_of_a_long_prompt(
    batch_size: int, trained: Path, native: LanguageModel, tokenizer: Tokenizer
) -> None:
    prompts, count = ["7 and 8", "390 and 391 are", LONG, "1"], 8
    model = harness_model(trained, batch_size=batch_size)
    ask = requests("generate_until", [(prompt, {"until": [], "max_gen_toks": count}) for prompt in prompts])
    expected = [greedily(native, tokenizer, prompt, count) for prompt in prompts]
    assert model.generate_until(ask, disable_tqdm=True) == expected
    stop = expected[1][2]
    ask = requests("generate_until", [(prompt, {"until": [stop], "max_gen_toks": count}) for prompt in prompts])
    found = model.generate_until(ask, disable_tqdm=True)
    assert found == [text.split(stop)[0] for text in expected] and found[1] != expected[1]


def test_a_short_context_leaves_room_for_an_answer(trained: Path) -> None:
    model = harness_model(trained)
    (answer,) = model.generate_until(requests("generate_until", [("7 and 8", {"until": ["."]})]), disable_tqdm=True)
    assert len(model.tok_encode(answer)) <= CONTEXT // 2
    assert model.max_gen_toks == CONTEXT // 2
    assert harness_model(trained, max_length=600).max_gen_toks == HFLM.max_gen_toks.fget(model)


def test_the_context_is_the_model_s_and_the_tokenizer_the_run_s(trained: Path, tokenizer: Tokenizer) -> None:
    model = harness_model(trained)
    assert model.max_length == CONTEXT and model.eot_token_id == tokenizer.end_of_text == model.prefix_token_id
    for text in ("7 and 8", "<|endoftext|>", "Ü\n"):
        assert model.tok_encode(text) == encode(tokenizer, text)


# --- a run, its export, and transformers


def test_a_run_and_its_export_give_the_same_numbers_however_they_are_loaded(
    trained: Path, exported: Path, tmp_path: Path
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    models = {
        "run": harness_model(trained),
        "checkpoint": harness_model(trained / "checkpoints" / "step-00000080"),
        "exported": harness_model(exported),
        "path in a text": SiameseNormLM(str(exported), device="cpu"),
        "loaded": SiameseNormLM(*loaded, device="cpu"),
        "loaded alone": SiameseNormLM(loaded[0], device="cpu"),
        "tokenizer by path": SiameseNormLM(trained, str(exported), device="cpu"),
        "the harness's own": HFLM(str(exported), device="cpu", dtype="float32"),
    }
    pairs, rolling = requests("loglikelihood", PAIRS), requests("loglikelihood_rolling", [(LONG,)])
    until = requests("generate_until", [("7 and 8", {"until": ["."], "max_gen_toks": 6})])
    found = {
        name: (
            model.loglikelihood(pairs, disable_tqdm=True),
            model.loglikelihood_rolling(rolling, disable_tqdm=True),
            model.generate_until(until, disable_tqdm=True),
        )
        for name, model in models.items()
    }
    for name, numbers in found.items():
        assert numbers == found["run"], name
    earlier = harness_model(trained / "checkpoints" / "step-00000070")
    assert earlier.loglikelihood(pairs, disable_tqdm=True) != found["run"][0], "another model has other numbers"


def test_a_run_whose_streams_are_narrower_than_its_weights_is_scored(data: Path, tmp_path: Path) -> None:
    source = train(data, tmp_path / "run", "--steps", 4, "--model.residual-dtype", "bfloat16")
    run("export", source, "--out", tmp_path / "exported")
    numbers = [
        harness_model(path).loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
        for path in (source, tmp_path / "exported")
    ]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_another_dtype(dtype: str | torch.dtype, trained: Path, native: LanguageModel, tokenizer: Tokenizer) -> None:
    model = harness_model(trained, dtype=dtype)
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    ((found, _),) = model.loglikelihood(requests("loglikelihood", PAIRS[:1]), disable_tqdm=True)
    exact, _ = direct(native, tokenizer, *PAIRS[0])
    assert found != exact and found == pytest.approx(exact, rel=0.05)


# --- tasks in local files

QUESTIONS = [
    {
        "id": str(number),
        "question": f"{number} and {number + 1}",
        "choices": [f"are {2 * number + 1 + wrong}." for wrong in (0, 1, 20)][: 2 + number % 2],
        "label": number // 4 % 2,
    }
    for number in range(3, 43, 4)
]


def write_task(path: Path, questions: list[Any] = QUESTIONS) -> Path:
    text = "\n".join(json.dumps(question) for question in questions)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.jsonl.gz"])
def test_a_task_in_a_file_has_the_accuracies_of_a_direct_computation(
    name: str, trained: Path, exported: Path, native: LanguageModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file, right, right_by_length = write_task(tmp_path / name), [], []
    for question in QUESTIONS:
        prompt = f"Question: {question['question']}\nAnswer:"
        scores = [direct(native, tokenizer, prompt, f" {choice}")[0] for choice in question["choices"]]
        by_length = [score / len(choice) for score, choice in zip(scores, question["choices"], strict=True)]
        right.append(int(np.argmax(scores)) == question["label"])
        right_by_length.append(int(np.argmax(by_length)) == question["label"])
    assert 0 < sum(right) < len(right), "a number that could be wrong"
    results = []
    for path in (trained, exported):
        task = local_task(file, cache=tmp_path / "cache")
        results.append(evaluate(harness_model(path, batch_size=4), [task])["sums"])
    for result in results:
        assert result["acc,none"] == pytest.approx(np.mean(right))
        assert result["acc_norm,none"] == pytest.approx(np.mean(right_by_length))
    assert results[0] == results[1]


def test_prompt_name_and_options_of_the_harness(trained: Path, tmp_path: Path) -> None:
    file = write_task(tmp_path / "sums.jsonl")
    task = local_task(file, name="short", prompt="{{question}}", cache=tmp_path / "cache", num_fewshot=0)
    found = evaluate(trained, [task], limit=4)
    assert found.keys() == {"short"} and found["short"]["sample_len"] == 4
    assert task.doc_to_text(QUESTIONS[0]) == QUESTIONS[0]["question"]


OFFLINE = """
    import socket
    import sys

    def refuse(*_, **__):
        raise AssertionError("a network was asked for")

    socket.socket.connect = socket.getaddrinfo = refuse
    sys.argv[0] = "lm_eval"
    import siamesenorm.interop.lm_eval
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.tasks import TaskManager

    # To read the thousands of tasks of the harness takes longer than all other tests here.
    manager = TaskManager.__init__
    TaskManager.__init__ = lambda self, *args, **options: manager(self, *args, **options, include_defaults=False)
    cli_evaluate()
"""
TASK = """
    task: sums
    dataset_path: json
    dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
    test_split: test
    output_type: multiple_choice
    doc_to_text: "{{{{question}}}}"
    doc_to_choice: choices
    doc_to_target: label
    metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.laws
def test_the_command_line_of_the_harness_scores_a_run_without_a_network(trained: Path, tmp_path: Path) -> None:
    file = write_task(tmp_path / "sums.jsonl")
    (tmp_path / "tasks").mkdir()
    cache = tmp_path / "cache"
    (tmp_path / "tasks" / "sums.yaml").write_text(textwrap.dedent(TASK).format(file=file, cache=cache))
    command = [
        sys.executable, "-c", textwrap.dedent(OFFLINE), "run", "--model", "siamesenorm", "--device", "cpu",
        "--model_args", f"pretrained={trained},dtype=float32", "--batch_size", "4", "--tasks", "sums",
        "--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "found.json"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.rglob("found*.json")
    expected = evaluate(harness_model(trained), [local_task(file, prompt="{{question}}", cache=cache)])
    assert json.loads(results.read_text())["results"]["sums"]["acc,none"] == expected["sums"]["acc,none"]


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int32"}, "dtype is 'int32': choose float32"),
        ({"dtype": "float31"}, "dtype is 'float31': choose float32, bfloat16 or float16"),
        ({"device": "tpux"}, "device 'tpux' is not available: choose cpu"),
        ({"data": "nowhere"}, "name their place with --data"),
        ({"batch_size": 0}, "batch_size is 0: choose"),
        ({"batch_size": "auto:x"}, "batch_size is 'auto:x': choose"),
        ({"batch_size": "many"}, "batch_size is 'many': choose"),
        ({"max_length": CONTEXT * -1}, "max_length is -32: choose"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str, trained: Path) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        SiameseNormLM(trained, **options)
    assert "\n" not in str(refusal.value)


def test_what_is_no_model_is_refused(tmp_path: Path, native: LanguageModel) -> None:
    with pytest.raises(UserError, match="no such directory"):
        SiameseNormLM(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no config.json"):
        evaluate(tmp_path, [])
    alone = siamesenorm.interop.huggingface.SiameseNormForCausalLM.from_native(native)
    with pytest.raises(UserError, match="give its tokenizer"):
        SiameseNormLM(alone, device="cpu")
    with pytest.raises(UserError, match="a LanguageModel .* name its directory"):
        SiameseNormLM(native, device="cpu")


def test_the_caller_s_model_is_left_as_it_is(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scored = SiameseNormLM(model, tokenizer, device="cpu")
    assert next(scored.model.parameters()).dtype == torch.float32
    assert model.training and model.state_dict().keys() == before.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])
    model = model.float().eval()
    assert SiameseNormLM(model, tokenizer, device="cpu").model is model, "nothing is copied that need not be"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers
def test_a_model_with_adapters_is_refused_with_what_merges_them(exported: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(exported)
    (projection,) = {name.rpartition(".")[2] for name, part in model.named_modules() if name.endswith(".query")}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[projection]))
    with pytest.raises(UserError, match=r"a PeftModel holds adapters of PEFT: give model.merge_and_unload\(\)"):
        SiameseNormLM(adapted, AutoTokenizer.from_pretrained(exported), device="cpu")
    SiameseNormLM(adapted.merge_and_unload(), AutoTokenizer.from_pretrained(exported), device="cpu")


def test_a_choice_longer_than_the_context_is_refused(trained: Path) -> None:
    with pytest.raises(UserError, match=f"the model's context {CONTEXT}"):
        harness_model(trained).loglikelihood(requests("loglikelihood", [("1", LONG)]), disable_tqdm=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no question"),
        ([QUESTIONS[0], {"question": "1", "choices": ["a", "b"]}], "line 2: label is None"),
        ([{"choices": ["a", "b"], "label": 0}], "line 1: no question"),
        ([{"question": "1", "choices": [], "label": 0}], "line 1: choices"),
        ([{"question": "1", "choices": ["a", 2], "label": 0}], "line 1: choices"),
        ([{"question": "1", "choices": ["a", "b"], "label": 2}], "line 1: label is 2"),
        ([{"question": "1", "choices": ["a", "b"], "label": "a"}], "line 1: label is 'a'"),
        (["1"], "line 1: a JSON str"),
    ],
)
def test_a_file_that_holds_no_task_is_refused(lines: list[Any], message: str, tmp_path: Path) -> None:
    file = write_task(tmp_path / "task.jsonl", lines)
    with pytest.raises(UserError, match=message):
        local_task(file, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        local_task(tmp_path / "nowhere.jsonl")
    (tmp_path / "cut.jsonl").write_text('{"question": ')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}" * 100)[:20])
    for name in ("cut.jsonl", "cut.jsonl.gz"):
        with pytest.raises(UserError, match=name):
            local_task(tmp_path / name)


def test_lines_of_other_fields_are_what_the_options_say(tmp_path: Path) -> None:
    file = write_task(tmp_path / "other.jsonl", [{"text": "1 and", "right": "2", "wrong": "3"}])
    options = {"doc_to_choice": "{{[right, wrong]}}", "doc_to_target": "{{0}}"}
    task = local_task(file, prompt="{{text}}", cache=tmp_path / "cache", **options)
    (document,) = task.test_docs()
    assert task.doc_to_text(document) == "1 and" and list(task.doc_to_choice(document)) == ["2", "3"]


def test_two_tasks_of_one_name_are_refused(trained: Path, tmp_path: Path) -> None:
    tasks = [local_task(write_task(tmp_path / "sums.jsonl"), cache=tmp_path / "cache") for _ in range(2)]
    with pytest.raises(UserError, match="two tasks are called sums"):
        evaluate(trained, tasks)
