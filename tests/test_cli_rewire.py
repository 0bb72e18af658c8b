"""`siamesenorm rewire`: a directory becomes another one, whole or not at all, and every refusal is one line."""

from __future__ import annotations

import copy
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import siamesenorm
from huggingface_hosts import build_host
from refusals import refusal
from siamesenorm.cli import main
from siamesenorm.interop import wiring

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

LLAMA: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip
DIT: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 8, "out_channels": 8, "num_layers": 2, "sample_size": 4,
    "num_embeds_ada_norm": 10,
}  # fmt: skip
TOKENS = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(0))
LATENTS = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(1))
CONDITION = {"timestep": torch.tensor([3, 700]), "class_labels": torch.tensor([1, 9])}


def moved(model: Any) -> Any:
    """Move all parameters at random: at the initial values much is zero or one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model.eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return moved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))


@pytest.fixture
def llama_directory(llama: Any, tmp_path: Path) -> Path:
    llama.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def dit_directory(tmp_path: Path) -> Path:
    moved(diffusers.DiTTransformer2DModel(**DIT)).save_pretrained(tmp_path / "dit")
    return tmp_path / "dit"


def output(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> str:
    """Rewire to the directory `out` beside `directory` and return what is printed."""
    capsys.readouterr()
    assert main(["rewire", str(directory), "--out", str(directory.parent / "out"), *options]) == 0, capsys.readouterr()
    return capsys.readouterr().out


def refused_rewiring(capsys: pytest.CaptureFixture[str], directory: Path | str, out: Path, *options: str) -> str:
    """Return the one line with which the command refuses, and see that it wrote nothing."""
    before = sorted(out.parent.rglob("*"))
    line = refusal(capsys, "rewire", directory, "--out", out, *options)
    assert sorted(out.parent.rglob("*")) == before
    return line


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


@torch.no_grad()
def denoised(model: Any) -> torch.Tensor:
    return model(LATENTS, **CONDITION).sample


# --- what it writes --------------------------------------------------------------------------------------------------


def test_a_llama_keeps_its_function(llama: Any, llama_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = output(capsys, llama_directory, "--topology", "siamese")
    assert said.startswith("model.layers rewired to siamese:exact_eps=True: function kept\n")
    assert "model.layers.1.input_layernorm" in said
    loaded = siamesenorm.from_pretrained(llama_directory.parent / "out")
    torch.testing.assert_close(logits(loaded), logits(llama), rtol=0, atol=1e-4)
    assert "siamese" in json.loads((llama_directory.parent / "out/config.json").read_text())["model_type"]


def test_a_dit_keeps_its_function(dit_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = denoised(diffusers.DiTTransformer2DModel.from_pretrained(dit_directory))
    output(capsys, dit_directory, "--topology", "siamese-post-pre:normalized_input=false")
    loaded = siamesenorm.from_pretrained(dit_directory.parent / "out")
    torch.testing.assert_close(denoised(loaded), before, rtol=0, atol=1e-4)


def test_the_command_does_what_the_function_does(
    llama: Any, llama_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output(capsys, llama_directory, "--topology", "siamese-post-pre", "--norm", "seednorm")
    expected = copy.deepcopy(llama)
    siamesenorm.rewire(expected, "siamese-post-pre", norm="seednorm")
    written = siamesenorm.from_pretrained(llama_directory.parent / "out").state_dict()
    assert written.keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in written.items())


def test_a_model_with_swapped_norms_is_rewired(llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swapped = copy.deepcopy(llama)
    siamesenorm.swap_norms(swapped, "seednorm")
    swapped.save_pretrained(tmp_path / "swapped")
    output(capsys, tmp_path / "swapped", "--topology", "dhc-2")
    loaded = siamesenorm.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(llama), rtol=0, atol=1e-4)
    assert "SeeDNorm" in {type(module).__name__ for module in loaded.modules()}


def test_the_report_for_machines(llama_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(output(capsys, llama_directory, "--topology", "dhc-2:streams=3", "--json"))
    assert report["topology"]["name"] == "dhc-2" and report["topology"]["streams"] == 3
    assert (report["function_kept"], report["blocks"]) == (True, "model.layers")
    assert report["differences"] == [] and report["bound"] == 0
    moved_norms = [norm["name"] for norm in report["norms"] if norm["outcome"] == "moved"]
    assert len(moved_norms) == 2 * LLAMA["num_hidden_layers"] + 1
    assert report["out"] == str(llama_directory.parent / "out")


def test_the_report_for_machines_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms that stay in parallel sublayers are exact with an eps of their own, and have a bound without."""
    build_host("gpt-neox").save_pretrained(tmp_path / "neox")
    report = json.loads(output(capsys, tmp_path / "neox", "--topology", "siamese-post-pre", "--json"))
    assert report["function_kept"] is True and report["bound"] == 0 and report["differences"] == []
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(wiring, "_kept_eps", lambda norms, reader: {})
    report = json.loads(output(capsys, tmp_path / "neox", "--topology", "siamese-post-pre", "--json"))
    assert report["function_kept"] is False and report["bound"] > 0
    assert {one["kind"] for one in report["differences"]} == {"norm_of_norm"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_stay_in_their_dtype(
    dtype: torch.dtype, llama: Any, dit_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy.deepcopy(llama).to(dtype).save_pretrained(tmp_path / "llama")
    diffusers.DiTTransformer2DModel.from_pretrained(dit_directory).to(dtype).save_pretrained(dit_directory)
    for directory in (tmp_path / "llama", dit_directory):
        output(capsys, directory, "--topology", "siamese")
        loaded = siamesenorm.from_pretrained(tmp_path / "out")
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        shutil.rmtree(tmp_path / "out")


def test_tokenizer_and_licence_come_along_and_other_files_stay(
    llama_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "tokenizer.model", "LICENSE", "README.md"):
        (llama_directory / name).write_text(name)
    output(capsys, llama_directory, "--topology", "pre")
    out = llama_directory.parent / "out"
    kept = {file.name for file in out.iterdir() if file.read_bytes() == file.name.encode()}
    assert kept == {"tokenizer.json", "tokenizer_config.json", "merges.txt", "tokenizer.model", "LICENSE"}
    assert (out / "generation_config.json").is_file() and not (out / "README.md").exists()


def test_an_empty_directory_may_be_named(llama_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llama_directory.parent / "out").mkdir()
    output(capsys, llama_directory, "--topology", "siamese")
    assert siamesenorm.from_pretrained(llama_directory.parent / "out")


def test_from_scratch_the_attention_gets_its_norm(llama_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(output(capsys, llama_directory, "--topology", "siamese", "--scratch", "--json"))
    assert report["function_kept"] is False
    loaded = siamesenorm.from_pretrained(llama_directory.parent / "out")
    gains = {name: value for name, value in loaded.named_parameters() if name.endswith("gain")}
    assert any("v_proj" in name for name in gains) and all((gain == 1).all() for gain in gains.values())


def test_from_scratch_a_configuration_is_enough(llama_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llama_directory / "model.safetensors").unlink()
    drawn = []
    for seed in ("1", "1", "2"):
        output(capsys, llama_directory, "--topology", "post", "--scratch", "--seed", seed)
        drawn.append(logits(siamesenorm.from_pretrained(llama_directory.parent / "out")))
        shutil.rmtree(llama_directory.parent / "out")
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_a_name_of_the_hub_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused_rewiring(capsys, "meta-llama/Llama-3.2-1B", tmp_path / "out", "--topology", "siamese")
    assert "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B" in line


def spoil_configuration(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def only(directory: Path, name: str) -> None:
    """Leave nothing in a directory but one new file."""
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / name).write_text("{}")


def pickle_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def pickled_shards(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model-00001-of-00001.bin")
    (directory / "pytorch_model.bin.index.json").write_text("{}")


def lose_a_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def add_a_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = {**load_file(directory / "model.safetensors"), "model.layers.2.mlp.up_proj.weight": torch.ones(24, 16)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "no such directory"),
    "empty": (lambda directory: only(directory, "notes.txt"), "has no config.json"),
    "damaged configuration": (lambda directory: (directory / "config.json").write_text("{"), "cannot be read"),
    "no configuration of a model": (lambda directory: only(directory, "config.json"), "model_type (transformers)"),
    "list": (lambda directory: (directory / "config.json").write_text("[]"), "holds a list"),
    "pipeline": (lambda directory: only(directory, "model_index.json"), "transformer"),
    "adapter": (lambda directory: only(directory, "adapter_config.json"), "merge it into its model first"),
    "GGUF": (lambda directory: only(directory, "model-q4.gguf"), "GGUF"),
    "quantised": (
        lambda directory: spoil_configuration(directory, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantised weights (gptq)",
    ),
    "a record of another kind": (
        lambda directory: spoil_configuration(directory, siamesenorm="x"),
        "config.json is damaged",
    ),
    "a record of other steps": (
        lambda directory: spoil_configuration(directory, siamesenorm=["rewire"]),
        "config.json is damaged",
    ),
    "a record cut short": (
        lambda directory: spoil_configuration(directory, siamesenorm=[{"operation": "rewire"}]),
        "config.json is damaged",
    ),
    "pickles": (pickle_weights, "pytorch_model.bin is a pickle, which can run code"),
    "pickles in shards": (pickled_shards, "pytorch_model-00001-of-00001.bin is a pickle, which can run code"),
    "weights of a variant": (
        lambda directory: (directory / "model.safetensors").rename(directory / "model.fp16.safetensors"),
        "model.fp16.safetensors: rename it to model.safetensors",
    ),
    "weights of another name": (
        lambda directory: (directory / "model.safetensors").rename(directory / "consolidated.safetensors"),
        "holds no model.safetensors, but consolidated.safetensors",
    ),
    "weights of another format": (
        lambda directory: (directory / "model.safetensors").rename(directory / "flax_model.msgpack"),
        "flax_model.msgpack is of another format",
    ),
    "no weights": (lambda directory: (directory / "model.safetensors").unlink(), "no safetensors weights"),
    "a weight short": (lose_a_weight, "lacks 1 weight (model.layers.1.mlp.up_proj.weight)"),
    "a weight too many": (add_a_weight, "no place in the model, 1 weight (model.layers.2.mlp.up_proj.weight)"),
    "damaged weights": (
        lambda directory: (directory / "model.safetensors").write_bytes(b"weights"),
        "cannot be loaded",
    ),
    "unknown type": (lambda directory: spoil_configuration(directory, model_type="lama"), "model type `lama`"),
    "unknown class": (
        lambda directory: spoil_configuration(directory, architectures=["LamaForCausalLM"]),
        "is a LamaForCausalLM, no model of transformers",
    ),
    "class of a configuration": (
        lambda directory: spoil_configuration(directory, architectures=["LlamaConfig"]),
        "is a LlamaConfig, no model of transformers",
    ),
    "no class": (
        lambda directory: spoil_configuration(directory, architectures=None),
        'write it to config.json, such as "architectures": ["LlamaForCausalLM"]',
    ),
    "a class in no list": (
        lambda directory: spoil_configuration(directory, architectures="LlamaForCausalLM"),
        'write it to config.json, such as "architectures": ["LlamaForCausalLM"]',
    ),
    "code of its own": (
        lambda directory: spoil_configuration(directory, architectures=["MyForCausalLM"], auto_map={}),
        "load it in Python",
    ),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_directory_that_cannot_be_rewired_is_refused(
    spoil: str, llama_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = SPOILED[spoil]
    damage(llama_directory)
    line = refused_rewiring(capsys, llama_directory, llama_directory.parent / "out", "--topology", "siamese")
    assert words in line and str(llama_directory) in line


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.fp16.safetensors", "model.safetensors.index.json"])
def test_from_scratch_weights_that_cannot_be_loaded_are_not_passed_over(
    name: str, llama_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (llama_directory / "model.safetensors").rename(llama_directory / name)
    line = refused_rewiring(
        capsys, llama_directory, llama_directory.parent / "out", "--topology", "siamese", "--scratch"
    )
    assert name in line and str(llama_directory) in line


def test_a_remedy_is_none_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    for topology, remedy in {
        "hybridnorm": "use siamese-post-pre",
        "siamese": "use siamese-post-pre, or keep the function, which adds no norm to the attention",
    }.items():
        line = refused_rewiring(capsys, tmp_path / "gpt2", tmp_path / "out", "--topology", topology, "--scratch")
        assert line.endswith(remedy)
    output(capsys, tmp_path / "gpt2", "--topology", "siamese-post-pre", "--scratch")


def test_what_does_not_fit_is_reported_in_one_line(dit_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    file = dit_directory / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(file), "extra.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    capfd.readouterr()
    assert main(["rewire", str(dit_directory), "--topology", "pre", "--out", str(dit_directory.parent / "out")]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "no place in the model, 1 weight (extra.weight)" in said


def test_masks_that_old_versions_saved_are_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    file = tmp_path / "gpt2/model.safetensors"
    masks = {
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
    }
    save_file({**load_file(file), **masks}, file, metadata={"format": "pt"})
    said = output(capsys, tmp_path / "gpt2", "--topology", "pre")
    assert "written" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topology", "siamse"], "unknown topology 'siamse': did you mean siamese"),
        (["--topology", "dhc-2:streems=4"], "did you mean streams"),
        (["--topology", "siamese", "--norm", "rmsnrom"], "did you mean rmsnorm?"),
        (["--topology", "siamese", "--norm", "layernorm"], "layernorm"),
        (["--topology", "post"], "--scratch"),
        ([], "missing --topology"),
    ],
)
def test_a_bad_request_is_refused(
    options: list[str], words: str, llama_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused_rewiring(capsys, llama_directory, llama_directory.parent / "out", *options)


def test_an_unsupported_architecture_is_refused_with_its_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    line = refused_rewiring(capsys, tmp_path / "bert", tmp_path / "out", "--topology", "siamese")
    assert "encoder.layer has blocks of class BertLayer, which are Post-Norm" in line


def test_a_rewired_model_is_refused(
    llama_directory: Path, dit_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    libraries = {llama_directory: "transformers", dit_directory: "diffusers"}
    for directory, library in libraries.items():
        output(capsys, directory, "--topology", "siamese")
        line = refused_rewiring(capsys, tmp_path / "out", tmp_path / "again", "--topology", "pre")
        assert "rewired already" in line
        assert main(["export", str(tmp_path / "out"), "--out", str(tmp_path / "again")]) == 2
        line = capsys.readouterr().err
        assert f"in the format of {library} already" in line and "from_pretrained" in line
        spoil_configuration(tmp_path / "out", siamesenorm=[])
        assert "no model of" not in refused_rewiring(capsys, tmp_path / "out", tmp_path / "again", "--topology", "pre")
        shutil.rmtree(tmp_path / "out")


def test_nothing_is_written_over(llama_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (llama_directory / "model.safetensors").write_bytes(b"that is not looked at")
    for out, words in {
        llama_directory: "is not empty",
        llama_directory / "config.json": f"{llama_directory / 'config.json'} is a file",
        llama_directory / "config.json/out": f"{llama_directory / 'config.json'} is a file",
        tmp_path / "link": f"is a link: choose another directory, or name {tmp_path / 'empty'} itself",
        tmp_path / "dangling": f"is a link: choose another directory, or name {tmp_path / 'nowhere'} itself",
    }.items():
        line = refused_rewiring(capsys, llama_directory, out, "--topology", "siamese")
        assert line.startswith(f"{out} ") and words in line
        assert main(["export", str(tmp_path / "no model"), "--out", str(out)]) == 2
        assert capsys.readouterr().err == f"siamesenorm: {line}\n"


def test_a_full_disk_leaves_nothing(
    llama_directory: Path, dit_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for directory in (llama_directory, dit_directory):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        try:
            line = refused_rewiring(capsys, directory, tmp_path / "out", "--topology", "siamese")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "no room left to write" in line


def test_a_library_that_is_not_there_is_named(
    llama_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    line = refused_rewiring(capsys, llama_directory, llama_directory.parent / "out", "--topology", "siamese")
    assert "needs transformers" in line and "pip install 'siamesenorm[hf]'" in line


# --- models of this library ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a Pre-Norm model on bytes, with its checkpoint and its data."""
    root = tmp_path_factory.mktemp("native")
    (root / "text.txt").write_text("\n\n".join(f"{number} is {number}." for number in range(300)))
    prepare = ["prepare", "--source", str(root / "text.txt"), "--documents", "paragraphs", "--out", str(root / "data")]
    assert main([*prepare, "--validation-fraction", "0.2"]) == 0
    model = ["--model.size", "nano", "--model.depth", "2", "--model.dim", "16", "--model.hidden", "16"]
    train = ["train", "mini", "--data", str(root / "data"), "--out", str(root / "run"), "--model.topology", "pre"]
    train += [*model, "--steps", "4", "--batch", "2", "--optimizer.warmup-steps", "1", "--execution.compile", "off"]
    assert main(train) == 0
    return root / "run"


def exported(run: Path, directory: Path) -> Path:
    assert main(["export", str(run), "--out", str(directory)]) == 0
    return directory


@pytest.mark.parametrize("form", ["run", "checkpoint", "export"])
def test_a_model_of_this_library_is_written_for_hugging_face(
    form: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (newest,) = (run / "checkpoints").iterdir()
    sources = {"run": run, "checkpoint": newest}
    source = sources.get(form) or exported(run, tmp_path / "exported")
    out = tmp_path / "out"
    topology = "siamese-post-pre:normalized_input=false"
    assert main(["rewire", str(source), "--topology", topology, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {out}"
    native, model = siamesenorm.from_pretrained(run), transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("12 is 12.", return_tensors="pt").input_ids
    assert ids.tolist() == [list(b"12 is 12.")]
    assert model.config.topology["name"] == "siamese-post-pre"
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, native(ids).logits, rtol=0, atol=1e-5)


def test_what_a_model_of_this_library_cannot_become(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = {
        "needs attention norm 'qkv-head'": ["--topology", "siamese"],
        "siamesenorm train --model.topology hybridnorm, or choose a topology that can, such as siamese-post-pre": [
            *("--topology", "hybridnorm")
        ],
        "--scratch": ["--topology", "post", "--scratch"],
        "name their place with --data": ["--topology", "dhc-2", "--data", str(tmp_path)],
    }
    for words, options in requests.items():
        assert words in refused_rewiring(capsys, run, tmp_path / "out", *options)
