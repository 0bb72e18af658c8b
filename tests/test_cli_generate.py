"""`siamesenorm generate` on language models of transformers: their own tokens, and refusals of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from refusals import refusal
from siamesenorm.cli import main

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [f"w{number}" for number in range(30)]
LLAMA: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
    "bos_token_id": 30, "eos_token_id": 31, "max_position_embeddings": 16,
}  # fmt: skip


def save_tokenizer(directory: Path, **special: str) -> None:
    vocabulary = {word: index for index, word in enumerate([*WORDS, "<begin>", "<end>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture
def directory(llama: Any, tmp_path: Path) -> Path:
    llama.save_pretrained(tmp_path / "llama")
    save_tokenizer(tmp_path / "llama", bos_token="<begin>", eos_token="<end>")
    return tmp_path / "llama"


def generated(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["generate", str(directory), "--json", *options]) == 0, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


@torch.no_grad()
def likeliest(model: Any, ids: list[int], count: int) -> list[int]:
    """Return the likeliest next tokens, each from a pass over the whole text, until the end of the document."""
    found: list[int] = []
    while len(found) < count:
        found.append(int(model(torch.tensor([ids + found])).logits[0, -1].argmax()))
        if found[-1] == LLAMA["eos_token_id"]:
            break
    return found


@pytest.mark.parametrize("prompt", ["w3 w5", "w7 w7 w1", ""])
def test_a_rewired_model_continues_as_the_original(
    prompt: str, llama: Any, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewired = directory.parent / "rewired"
    assert main(["rewire", str(directory), "--topology", "siamese", "--out", str(rewired)]) == 0
    ids = [WORDS.index(word) for word in prompt.split()] or [LLAMA["bos_token_id"]]
    found = likeliest(llama, ids, 8)
    ended = found[-1] == LLAMA["eos_token_id"]
    text = " ".join(WORDS[token] for token in found if token < len(WORDS))
    expected = {"prompt": prompt, "text": text, "tokens": len(found) - ended, "ended": ended}
    for model in (directory, rewired):
        options = ["--prompt", prompt, "--tokens", "8", "--temperature", "0"]
        assert generated(capsys, model, *options) == expected
        assert main(["generate", str(model), *options]) == 0
        assert capsys.readouterr().out == f"{prompt}{text}\n"


def test_draws_are_those_of_their_seed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draws = [generated(capsys, directory, "--tokens", "8", "--seed", str(seed))["text"] for seed in (0, 0, 1, 2, 3)]
    assert draws[0] == draws[1] and len(set(draws)) > 2


def test_a_document_ends_where_the_model_ends_it(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    free = generated(capsys, directory, "--prompt", "w3", "--temperature", "0", "--tokens", "4")
    words = free["text"].split()
    assert free["tokens"] == 4 and words[-1] not in words[:1]
    model.generation_config.eos_token_id = [31, WORDS.index(words[-1])]
    model.save_pretrained(directory)
    found = generated(capsys, directory, "--prompt", "w3", "--temperature", "0", "--tokens", "4")
    assert found["ended"] and found["tokens"] == words.index(words[-1]) > 0


def test_what_cannot_be_continued_is_refused(llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    llama.save_pretrained(bare)
    assert "bare has no tokenizer: save it beside the model" in refusal(capsys, "generate", bare)
    save_tokenizer(bare)
    assert "no token that begins a text: give a --prompt" in refusal(capsys, "generate", bare)
    long = ["--prompt", "w1 w2", "--tokens", "15"]
    assert "the model reads 16, and the prompt has 2: generate at most 14" in refusal(capsys, "generate", bare, *long)
    long = ["--prompt", "w1 " * 18, "--tokens", "1"]
    assert "the model reads 16, and the prompt has 18: shorten the prompt" in refusal(capsys, "generate", bare, *long)
    (bare / "config.json").write_text(json.dumps({"_class_name": "DiTTransformer2DModel"}))
    assert "bare holds a DiTTransformer2DModel, which generates no text" in refusal(capsys, "generate", bare)
    llama.model.save_pretrained(bare)
    assert "bare holds a LlamaModel, which generates no text" in refusal(capsys, "generate", bare, "--prompt", "w1")


def test_a_prompt_that_is_no_text_and_a_temperature_that_overflows_are_refused(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--prompt 'w1 \\udcff': character 4 is no text: give UTF-8" in refusal(
        capsys, "generate", directory, "--prompt", "w1 \udcff"
    )
    assert "--temperature 1e-40: choose at least 1e-06, or 0" in refusal(
        capsys, "generate", directory, "--temperature", "1e-40"
    )
    for temperature in ("1e-6", "1e30"):
        assert generated(capsys, directory, "--prompt", "w1", "--tokens", "3", "--temperature", temperature)["tokens"]


def test_a_token_that_the_model_does_not_know_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = directory / "tokenizer.json"
    record = json.loads(file.read_text())
    record["model"]["vocab"]["w99"] = 32
    file.write_text(json.dumps(record))
    assert "its tokenizer gives token 32, and the model has 32" in refusal(
        capsys, "generate", directory, "--prompt", "w1 w99"
    )
    assert generated(capsys, directory, "--prompt", "w1", "--tokens", "3")["tokens"]


def test_weights_that_are_not_finite_are_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(directory)
    assert "model.norm.weight" in refusal(capsys, "generate", directory, "--prompt", "w1")


def test_an_encoder_and_decoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    save_tokenizer(tmp_path / "t5")
    line = refusal(capsys, "generate", tmp_path / "t5", "--prompt", "w1")
    assert "holds a T5ForConditionalGeneration, which has an encoder" in line
