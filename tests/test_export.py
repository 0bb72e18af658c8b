"""`siamesenorm export` and back: the same logits for every topology and operator, and a directory that stands alone."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, pipeline
from transformers.utils import logging

import siamesenorm
import siamesenorm.interop.huggingface  # noqa: F401  registers the classes
from exported_models import CONTEXT, prepare, run, train, with_model
from refusals import refusal
from siamesenorm import available_norms, available_topologies, from_pretrained
from siamesenorm.data.tokenizer import load_tokenizer
from siamesenorm.errors import UserError
from siamesenorm.interop.stored import export
from training_runs import edit_json, records

logging.disable_progress_bar()

TEXTS = ["7 and 8 are", "Ünïcode ☃ 漢字", "  two  blanks\n\n", "<|endoftext|> is text", ""]
FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_siamesenorm.py",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("runs") / "sums")


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "sums"
    run("export", trained, "--out", out)
    return out


def tokens(vocabulary: int = 257) -> torch.Tensor:
    return torch.randint(vocabulary, (2, 9), generator=torch.Generator().manual_seed(3))


def offline(code: str, *arguments: Any, home: Path) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, that has no network and caches nothing elsewhere."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)


# --- law 7: there and back


@pytest.mark.parametrize(("topology", "norm"), [*product(available_topologies(), available_norms())])
def test_every_model_has_the_same_logits_there_and_back(
    topology: str, norm: str, trained: Path, tmp_path: Path
) -> None:
    source, native = with_model(trained, tmp_path / "run", topology=topology, norm=norm)
    export(source, tmp_path / "there")
    expected = native(tokens()).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "there")(tokens()).logits, expected)
    back = from_pretrained(tmp_path / "there")
    assert torch.equal(back(tokens()).logits, expected)
    assert back.config.to_json() == native.config.to_json()
    assert back.state_dict().keys() == native.state_dict().keys()


OTHERS: dict[str, dict[str, Any]] = {
    "options": {"topology": "dhc-2:streams=3", "norm": "seednorm:heads=4"},
    "tied": {"topology": "siamese", "tied": True},
    "deepnorm tied": {"topology": "deepnorm", "tied": True},
    "biases": {"bias": True, "norm": "layernorm", "activation": "gelu", "context_norm": True},
    "theta": {"rope_theta": 500.0, "attention_norm": "none", "topology": "pre"},
    "one head": {"kv_heads": 1, "topology": "mhc-4"},
    "as a run in bfloat16": {"compute_dtype": "bfloat16"},
    "streams in bfloat16": {"residual_dtype": "bfloat16"},
}


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS)
def test_every_field_of_the_model_goes_along(fields: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    source, native = with_model(trained, tmp_path / "run", **fields)
    for_use = dataclasses.replace(native.config, compute_dtype="inherit")
    # What sublayers see has the dtype of their weights, whatever the dtype of the streams.
    plain = siamesenorm.build_language_model(dataclasses.replace(for_use, compute_dtype="float32"))
    plain.load_state_dict(native.state_dict())
    export(source, tmp_path / "there")
    export(tmp_path / "there", tmp_path / "back")
    expected = plain.eval()(tokens()).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "there")(tokens()).logits, expected)
    assert from_pretrained(tmp_path / "back").config.to_json() == for_use.to_json()
    for path in (source, tmp_path / "there", tmp_path / "back"):
        assert torch.equal(siamesenorm.from_pretrained(path)(tokens()).logits, expected), path


def test_a_tied_head_is_stored_once(trained: Path, tmp_path: Path) -> None:
    source, native = with_model(trained, tmp_path / "run", tied=True)
    export(source, tmp_path / "there")
    stored = load_file(tmp_path / "there" / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in native.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert loaded.config.tie_word_embeddings


def test_a_trained_run_its_checkpoint_and_its_export_are_one_model(trained: Path, exported: Path) -> None:
    last = trained / "checkpoints" / "step-00000020"
    expected = load_file(last / "model.safetensors")
    for path in (trained, last, exported):
        found = from_pretrained(path).state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    earlier = from_pretrained(trained / "checkpoints" / "step-00000010").state_dict()
    assert any(not torch.equal(earlier[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("place", "name"), [("checkpoints", "step-00000010"), ("checkpoints/step-00000010", ".")])
def test_a_checkpoint_by_a_relative_name(
    place: str, name: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = from_pretrained(trained / "checkpoints" / "step-00000010").state_dict()
    monkeypatch.chdir(trained / place)
    found = from_pretrained(name).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    run("generate", name, "--prompt", "7", "--tokens", 2)
    assert capsys.readouterr().out.startswith("7")


def test_a_checkpoint_by_a_link_and_among_linked_ones(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints/step-00000010"
    expected = from_pretrained(checkpoint).state_dict()
    (tmp_path / "link").symlink_to(checkpoint)
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run/checkpoints").rename(tmp_path / "large")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "large")
    for path in (tmp_path / "link", tmp_path / "run/checkpoints/step-00000010"):
        found = from_pretrained(path).state_dict()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_exporting_twice_gives_the_same_bytes(trained: Path, exported: Path, tmp_path: Path) -> None:
    run("export", trained, "--out", tmp_path / "again")
    assert {file.name: file.read_bytes() for file in exported.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()
    }


# --- after fine-tuning


def test_what_transformers_saves_comes_back(exported: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "tuned", max_shard_size="20KB")
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "tuned")
    assert len([*(tmp_path / "tuned").glob("model-*.safetensors")]) > 1
    run("export", tmp_path / "tuned", "--out", tmp_path / "back")
    assert torch.equal(from_pretrained(tmp_path / "back")(tokens()).logits, model(tokens()).logits)
    run("export", tmp_path / "back", "--out", tmp_path / "there")
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "there")(tokens()).logits, model(tokens()).logits
    )
    assert from_pretrained(tmp_path / "there").config == from_pretrained(exported).config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_keep_their_dtype_there_and_back(dtype: torch.dtype, exported: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=dtype)
    model.save_pretrained(tmp_path / "cast")
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "cast")
    export(tmp_path / "cast", tmp_path / "back")
    export(tmp_path / "back", tmp_path / "there")
    assert {tensor.dtype for tensor in load_file(tmp_path / "there" / "model.safetensors").values()} == {dtype}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "there", dtype="auto")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    native, wide = from_pretrained(tmp_path / "back"), torch.promote_types(dtype, torch.float32)
    assert native(tokens()).logits.dtype == wide
    torch.testing.assert_close(native(tokens()).logits, model.to(wide)(tokens()).logits)


# --- what is in the directory


def test_the_directory_holds_safetensors_json_text_and_the_one_file_of_code(exported: Path) -> None:
    assert {file.name for file in exported.iterdir()} == FILES
    assert not list(exported.parent.glob(".*")), "nothing is left beside it"
    with safe_open(exported / "model.safetensors", framework="pt") as weights:
        assert weights.metadata() == {"format": "pt"}
    code = (exported / "modeling_siamesenorm.py").read_text()
    assert len(code.splitlines()) < 20 and "from siamesenorm.interop.huggingface import" in code
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1, "readable by whom the others are"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_tokenizer_gives_the_ids_of_training_and_the_texts_back(tokenizer: str, tmp_path: Path) -> None:
    data = prepare(tmp_path, tokenizer=tokenizer)
    export(train(data, tmp_path / "run", "--steps", 4), tmp_path / "exported")
    ours, theirs = load_tokenizer(data), AutoTokenizer.from_pretrained(tmp_path / "exported")
    native = load_tokenizer(tmp_path / "exported")
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert theirs(text).input_ids == ids.tolist() == native.encode_batch([text])[0].tolist(), text
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert theirs.eos_token_id == native.end_of_text == ours.end_of_text
    assert (theirs.model_max_length, theirs.padding_side) == (CONTEXT, "left")
    record = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    assert record == dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ours.end_of_text)


@pytest.mark.parametrize("prompts", [["7 and"], ["7 and", "390 and 391 are 7"], [""]])
def test_pipelines_say_what_the_native_model_says(prompts: list[str], exported: Path) -> None:
    pipe = pipeline("text-generation", model=str(exported))
    pipe.tokenizer.pad_token = pipe.tokenizer.eos_token  # unset, or who fine-tunes would leave the ends of texts out
    options = {"do_sample": False, "max_new_tokens": 6, "max_length": None, "return_full_text": False}
    found = [answer["generated_text"] for (answer,) in pipe(prompts, batch_size=len(prompts), **options)]
    native, tokenizer = from_pretrained(exported), load_tokenizer(exported)
    for prompt, answer in zip(prompts, found, strict=True):
        ids = tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.end_of_text]
        new = native.generate(torch.tensor([ids]), 6)[0, len(ids) :].tolist()
        length = new.index(tokenizer.end_of_text) if tokenizer.end_of_text in new else 6
        assert answer == tokenizer.decode(new[:length])


def test_a_rewired_run_is_reported_the_same_of_generation(data: Path, tmp_path: Path) -> None:
    source = train(data, tmp_path / "run", "--steps", 4, "--model.topology", "pre")
    run("export", source, "--out", tmp_path / "exported")
    for name in ("run", "exported"):
        run("rewire", tmp_path / name, "--topology", "siamese-post-pre", "--out", tmp_path / f"rewired-{name}")
        found = json.loads((tmp_path / f"rewired-{name}" / "generation_config.json").read_text())
        assert found.items() >= json.loads((tmp_path / "exported" / "generation_config.json").read_text()).items()
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / f"rewired-{name}") for name in ("run", "exported")]
    assert torch.equal(loaded[0](tokens()).logits, loaded[1](tokens()).logits)
    # Embeddings of this size are near the eps of the norm that is applied twice.
    torch.testing.assert_close(loaded[0](tokens()).logits, from_pretrained(source)(tokens()).logits, rtol=0, atol=1e-3)


# --- the model card


def card_of(path: Path) -> dict[str, str]:
    """Return the facts of a model card by name."""
    rows = [line.strip("| ").split(" | ", 1) for line in (path / "README.md").read_text().splitlines() if " | " in line]
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[0]}


def test_the_card_says_what_the_record_says(trained: Path, exported: Path) -> None:
    facts, card = card_of(exported), (exported / "README.md").read_text()
    (introduction,), verdict = records(trained, "model"), json.loads((trained / "verdict.json").read_text())
    losses = [record["loss"] for record in records(trained, "train")]
    held_out = records(trained, "validation")[-1]
    config = json.loads((trained / "config.json").read_text())
    native = from_pretrained(trained)
    parameters = sum(parameter.numel() for parameter in native.parameters())
    assert introduction["parameters"] == parameters
    assert facts["Parameters"].startswith(f"{parameters:,}, of which {parameters - native.embedding.weight.numel():,}")
    assert facts["Training loss"] == f"{(losses[-1] + losses[-2]) / 2:.4f} nats per token, mean of the last 2 steps"
    assert facts["Held-out loss"].startswith(
        f"{held_out['loss']:.4f} nats per token (perplexity {math.exp(held_out['loss']):.4g}), step 20"
    )
    assert facts["Verdict"].startswith(verdict["label"]) and facts["Steps"] == "20 of 20, 128 tokens each"
    manifest = json.loads((Path(config["task"]["data"]) / "manifest.json").read_text())
    share = 2560 / manifest["splits"]["train"]["tokens"]
    assert facts["Tokens seen"] == f"2,560, {share:.2f} times the data"
    assert "sums.txt" in facts["Data"] and facts["Tokenizer"] == "bpe:300, 300 ids"
    assert card.startswith("---\nlibrary_name: transformers\n") and "siamese" in facts["Topology"]
    assert str(trained.parent) not in card, "a card is public: it has no path of this machine"


def test_the_card_of_an_earlier_checkpoint_tells_its_own_numbers(trained: Path, tmp_path: Path) -> None:
    export(trained / "checkpoints" / "step-00000010", tmp_path / "earlier")
    facts = card_of(tmp_path / "earlier")
    (loss,) = [record["loss"] for record in records(trained, "validation") if record["step"] == 10]
    (last,) = [record["loss"] for record in records(trained, "train") if record["step"] == 10]
    assert facts["Held-out loss"].startswith(f"{loss:.4f} nats per token") and "step 10" in facts["Held-out loss"]
    assert facts["Training loss"].startswith(f"{last:.4f} nats per token")
    assert facts["Steps"].startswith("10 of 20") and facts["Tokens seen"].startswith("1,280")
    assert "these weights are those of step 10" in facts["Verdict"]


def test_the_card_of_a_continued_run_tells_what_it_started_from(trained: Path, data: Path, tmp_path: Path) -> None:
    options = ["--steps", 4, "--batch", 128 // CONTEXT, "--optimizer.warmup-steps", 1, "--execution.compile", "off"]
    run("train", "mini", "--data", data, "--out", tmp_path / "on", "--start", trained,
        "--model.topology", "siamese", *options)  # fmt: skip
    export(tmp_path / "on", tmp_path / "exported")
    source = siamesenorm.training.run_directory.RunDirectory(trained).read_config()
    assert source.identity[:12] in card_of(tmp_path / "exported")["Started from"]
    assert "nothing else" not in (tmp_path / "exported" / "README.md").read_text()


def test_an_export_of_an_export_is_the_same(exported: Path, tmp_path: Path) -> None:
    export(exported, tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes(), name


# --- it stands alone


def test_it_loads_and_saves_by_remote_code_where_the_package_was_not_imported(exported: Path, tmp_path: Path) -> None:
    code = """
        import sys
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

        path = sys.argv[1]
        try:
            AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)
        except ValueError as error:
            assert "trust_remote_code" in str(error), error
        else:
            raise SystemExit("loaded without trust")
        assert not any(name.startswith("siamesenorm") for name in sys.modules)

        config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.pad_token = tokenizer.eos_token
        tokens = tokenizer(["7 and 8 are", "9"], return_tensors="pt", padding=True)
        hidden = AutoModel.from_pretrained(path, trust_remote_code=True)(**tokens).last_hidden_state
        assert hidden.shape == (*tokens.input_ids.shape, config.hidden_size)
        text = pipeline("text-generation", model=model, tokenizer=tokenizer)("7 and", max_new_tokens=5, max_length=None)
        assert text[0]["generated_text"].startswith("7 and")
        ids = torch.tensor([[5, 6, 7, 8]])
        save_file({"ids": ids, "logits": model(ids).logits}, "found.safetensors")
        model.save_pretrained("saved")
        again = AutoModelForCausalLM.from_pretrained("saved", trust_remote_code=True)
        assert torch.equal(again(ids).logits, model(ids).logits)
    """
    done = offline(code, exported, home=tmp_path)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "found.safetensors")
    assert torch.equal(found["logits"], from_pretrained(exported)(found["ids"]).logits)
    saved = tmp_path / "saved"
    assert {file.name for file in saved.glob("*.py")} == {"modeling_siamesenorm.py"}
    assert torch.equal(from_pretrained(saved)(tokens()).logits, from_pretrained(exported)(tokens()).logits)


def test_remote_code_without_the_package_says_what_to_install(exported: Path, tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["siamesenorm"] = None
        from transformers import AutoModelForCausalLM
        try:
            AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
        except ImportError as error:
            assert "pip install" in str(error) and "siamesenorm" in str(error), error
        else:
            raise SystemExit("loaded")
    """
    done = offline(code, exported, home=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_native_model_loads_without_transformers(exported: Path, tmp_path: Path) -> None:
    code = """
        import sys
        for name in ("transformers", "tokenizers", "numpy", "tyro", "pyarrow"):
            sys.modules[name] = None
        import torch
        import siamesenorm
        assert siamesenorm.from_pretrained(sys.argv[1])(torch.tensor([[5, 6]])).logits.shape == (1, 2, 300)
    """
    done = offline(code, exported, home=tmp_path)
    assert done.returncode == 0, done.stderr


# --- generate


def test_a_long_text_is_noted_before_the_prompt_is_shown(exported: Path) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        run("generate", exported, "--prompt", "7 and", "--tokens", CONTEXT)
    note, text = shown.getvalue().split("\n", maxsplit=1)
    assert note.startswith(f"siamesenorm: note: the model was trained on {CONTEXT} tokens") and text.startswith("7 and")


def test_a_tokenizer_of_another_model_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(exported, tmp_path / "other")
    tokenizer = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    tokenizer.add_tokens(["ZZZ"])
    tokenizer.save(str(tmp_path / "other/tokenizer.json"))
    line = refusal(capsys, "generate", tmp_path / "other", "--prompt", "ZZZ")
    assert "its tokenizer gives token 300, and the model has 300" in line


# --- bad input: one line, and nothing half-written


def _cut_weights(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def _pickled_weights(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def _other_weights(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights.pop("model.head.weight")
    save_file(weights, path / "model.safetensors")


def _foreign(path: Path) -> None:
    LlamaConfig().save_pretrained(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (_cut_weights, "the weights cannot be read"),
    "pickled weights": (_pickled_weights, "no model.safetensors"),
    "a weight is missing": (_other_weights, "the weights have changed"),
    "another shape": (lambda path: edit_json(path / "config.json", dim=32), "are not those of its configuration"),
    "an unknown topology": (lambda path: edit_json(path / "config.json", topology={"family": "X"}), "config.json"),
    "a field of another type": (lambda path: edit_json(path / "config.json", depth="two"), "config.json"),
    "no configuration": (lambda path: (path / "config.json").write_text("[]"), "holds a list"),
    "cut configuration": (lambda path: (path / "config.json").write_text("{"), "cannot be read"),
    "another library's": (_foreign, "a model of transformers, 'llama'"),
    "a card in another encoding": (lambda path: (path / "README.md").write_bytes(b"\xff"), "save it as UTF-8"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "cut tokenizer": (lambda path: (path / "tokenizer.json").write_text("{"), "tokenizer"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_export_is_refused_in_one_line(
    kind: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGE[kind]
    shutil.copytree(exported, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    line = refusal(capsys, "export", tmp_path / "damaged", "--out", tmp_path / "out" / "there")
    assert message in line
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"], "nothing is written"


def _without_checkpoints(path: Path) -> None:
    shutil.rmtree(path / "checkpoints")


def _moved_data(path: Path) -> None:
    record = json.loads((path / "config.json").read_text())
    edit_json(path / "config.json", task={**record["task"], "data": str(path / "moved")})


DAMAGED_RUNS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no checkpoint": (_without_checkpoints, "no checkpoint: use the directory in which"),
    "moved data": (_moved_data, "name their place with --data"),
    "no record": (lambda path: (path / "metrics.jsonl").unlink(), "metrics.jsonl"),
    "an empty record": (lambda path: (path / "metrics.jsonl").write_text(""), "metrics.jsonl"),
    "cut verdict": (lambda path: (path / "verdict.json").write_text("{"), "verdict.json"),
    "no run": (lambda path: (path / "config.json").unlink(), "has no config.json"),
}


@pytest.mark.parametrize("kind", DAMAGED_RUNS)
def test_a_damaged_run_is_refused_in_one_line(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGED_RUNS[kind]
    shutil.copytree(trained, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    assert message in refusal(capsys, "export", tmp_path / "damaged", "--out", tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"], "nothing is written"


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    _cut_weights(tmp_path / "run" / "checkpoints" / "step-00000020")
    with pytest.warns(UserWarning, match="step-00000020.* the older one of step 10"):
        found = from_pretrained(tmp_path / "run")
    expected = from_pretrained(trained / "checkpoints" / "step-00000010")
    assert torch.equal(found(tokens()).logits, expected(tokens()).logits)
    export(tmp_path / "run", tmp_path / "there")
    assert card_of(tmp_path / "there")["Steps"].startswith("10 of 20")


def test_generate_names_the_damaged_checkpoint_before_it_uses_an_older_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    _cut_weights(tmp_path / "run" / "checkpoints" / "step-00000020")
    run("generate", tmp_path / "run", "--tokens", 2)
    (note,) = capsys.readouterr().err.splitlines()
    assert "step-00000020" in note and "step 10" in note
    run("generate", trained, "--tokens", 2)
    assert capsys.readouterr().err == ""


def _flip_a_byte(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def _not_a_number(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["model.head.weight"][0, 0] = math.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", weights_sha256=None)  # as transformers saves it


@pytest.mark.parametrize("damage", [_flip_a_byte, _not_a_number])
def test_generate_refuses_weights_that_changed_or_are_not_finite(
    damage: Callable[[Path], None], exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(exported, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    assert str(tmp_path / "damaged") in refusal(capsys, "generate", tmp_path / "damaged", "--tokens", 2)


def test_moved_data_are_named(trained: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    _moved_data(tmp_path / "run")
    shutil.copytree(data, tmp_path / "elsewhere")
    run("export", tmp_path / "run", "--data", tmp_path / "elsewhere", "--out", tmp_path / "there")
    assert AutoTokenizer.from_pretrained(tmp_path / "there").eos_token_id == load_tokenizer(data).end_of_text


def test_other_data_are_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = prepare(tmp_path / "other", tokenizer="bytes")
    line = refusal(capsys, "export", trained, "--data", other, "--out", tmp_path / "there")
    assert "holds other data than the run" in line
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("source", ["nowhere", "file", "empty"])
def test_what_is_no_model_is_refused(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    line = refusal(capsys, "export", tmp_path / source, "--out", tmp_path / "there")
    assert "name the directory of a model" in line
    assert not (tmp_path / "there").exists()


def test_nothing_is_written_over(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in ("full", "file", "link"):
        assert "choose another directory" in refusal(capsys, "export", exported, "--out", tmp_path / taken)
    assert "file" in refusal(capsys, "export", exported, "--out", tmp_path / "file" / "below")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "file", "link"}
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    run("export", exported, "--out", tmp_path / "empty")
    assert {file.name for file in (tmp_path / "empty").iterdir()} == FILES


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_export_that_is_stopped_leaves_nothing(
    error: BaseException, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise error

    monkeypatch.setattr("siamesenorm.interop.native_models.tokenizer_files", stop)  # the weights are written by then
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError):
        export(exported, tmp_path / "there")
    assert not list(tmp_path.iterdir())
