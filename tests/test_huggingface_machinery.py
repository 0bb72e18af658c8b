"""The machinery of transformers on the native class: base model, attention, heads, rotations, plans, export."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils import logging

from siamesenorm import LanguageModel, build_language_model, from_pretrained
from siamesenorm.errors import UserError
from siamesenorm.interop.huggingface import SiameseNormConfig, SiameseNormForCausalLM
from siamesenorm.interop.language_models import open_language_model
from siamesenorm.sublayers.attention import rotation

logging.disable_progress_bar()
ROOT = Path(__file__).parents[1]
TINY: dict[str, Any] = {"depth": 2, "dim": 16, "heads": 4, "kv_heads": 2, "hidden": 24, "vocabulary": 13, "context": 32}
PAD = 12


def native_model(topology: str = "siamese", **fields: Any) -> LanguageModel:
    """Return a model whose every parameter is random."""
    model = build_language_model("nano", topology=topology, **{**TINY, **fields})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def causal_model(topology: str = "siamese", **fields: Any) -> SiameseNormForCausalLM:
    return SiameseNormForCausalLM.from_native(native_model(topology, **fields), pad_token_id=PAD)


def tokens(batch: int = 2, count: int = 6) -> Tensor:
    return torch.randint(0, PAD, (batch, count), generator=torch.Generator().manual_seed(3))


# --- the base model


def test_the_base_model_gives_what_the_head_reads() -> None:
    model = causal_model()
    assert model.base_model is model.model
    state = model.model(input_ids=tokens()).last_hidden_state
    assert state.shape == (2, 6, 16)
    assert torch.equal(model.lm_head(state), model(input_ids=tokens()).logits)


# --- attention


def test_eager_attention_has_weights_and_the_same_logits() -> None:
    model = causal_model()
    expected = model(tokens())
    assert expected.attentions is None
    model.set_attn_implementation("eager")
    found = model(tokens(), output_attentions=True)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
    assert [weights.shape for weights in found.attentions] == [(2, 4, 6, 6)] * 2
    for weights in found.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
        assert not weights.triu(1).any() and (weights.tril() > 0).sum() == 2 * 4 * 21
    # Without the first key, its share goes to the others.
    hidden = model(tokens(), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]] * 2), output_attentions=True)
    assert not hidden.attentions[0][:, :, 1:, 0].any()


def test_weights_that_an_implementation_does_not_compute_are_absent() -> None:
    assert causal_model()(tokens(), output_attentions=True).attentions == ()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_right_padding_is_the_same_with_every_cache(implementation: str) -> None:
    model, row = causal_model(), tokens(batch=1, count=4)
    model.set_attn_implementation(implementation)
    batch = torch.cat((F.pad(row, (0, 3), value=PAD), tokens(batch=1, count=7)))
    mask = (batch != PAD).long()
    alone = model(row, use_cache=False).logits
    caches: tuple[Any, ...] = (None, transformers.DynamicCache(), StaticCache(config=model.config, max_cache_len=16))
    outputs = [model(batch, attention_mask=mask, past_key_values=cache).logits for cache in caches]
    # Of padding, too: it sees the tokens before it, and no padding, itself included.
    for found in outputs[1:]:
        torch.testing.assert_close(found, outputs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs[0][:1, :4], alone, rtol=0, atol=1e-5)
    other = torch.where(mask.bool(), batch, 0)
    seen = model(other, attention_mask=mask).logits
    torch.testing.assert_close(seen[mask.bool()], outputs[0][mask.bool()], rtol=0, atol=0)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(
        model.generate(batch, **options), model.generate(batch, cache_implementation="static", **options)
    )


def test_attention_weights_hide_padding_from_itself() -> None:
    model = causal_model()
    model.set_attn_implementation("eager")
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    for weights in model(tokens(batch=1), attention_mask=mask, output_attentions=True).attentions:
        assert not weights[..., 4:].any()


# --- heads


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_is_classified_by_its_last_token(side: str, tmp_path: Path) -> None:
    causal_model().save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    row, padding = tokens(batch=1, count=4), (0, 2) if side == "right" else (2, 0)
    batch = F.pad(row, padding, value=PAD)
    found = model(batch, attention_mask=(batch != PAD).long(), labels=torch.tensor([1]))
    expected = model.score(causal_model().model(row).last_hidden_state[:, -1])
    torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-5)
    found.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tokens_are_classified(tmp_path: Path) -> None:
    causal_model().save_pretrained(tmp_path)
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=3).eval()
    expected = model.score(causal_model().model(tokens()).last_hidden_state)
    assert torch.equal(model(tokens(), labels=torch.zeros(2, 6, dtype=torch.long)).logits, expected)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(tokens()).logits, expected)


# --- RoPE scaling


def test_scaled_positions(tmp_path: Path) -> None:
    native = native_model()
    model = SiameseNormForCausalLM.from_native(native, rope_parameters={"rope_type": "linear", "factor": 4.0})
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(8))
    expected = rotation(torch.arange(8) / 4, 4, native.config.rope_theta, torch.float32)
    torch.testing.assert_close((cos, sin), expected)
    logits = model(tokens()).logits
    assert not torch.allclose(logits, native(tokens()).logits, atol=1e-3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, logits)
    with pytest.raises(UserError, match=r"scaled \(linear\)"):
        from_pretrained(tmp_path)
    dynamic = SiameseNormForCausalLM.from_native(native, rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    torch.testing.assert_close(dynamic(tokens()).logits, native(tokens()).logits)
    long = tokens(batch=1, count=40)  # of a context of 32
    assert not torch.allclose(dynamic(long).logits, native(long).logits, atol=1e-3)


def test_the_base_of_the_rotation_has_one_value() -> None:
    config = SiameseNormConfig(**TINY, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert config.to_native().rope_theta == config.rope_parameters["rope_theta"] == 500.0
    assert SiameseNormConfig(**TINY, rope_theta=300.0).rope_parameters["rope_theta"] == 300.0


# --- several processes


def in_processes(rank: int, directory: str) -> None:
    """Load each model in `directory` divided by its plan, and compare loss and gradients with the whole one's."""
    from transformers.distributed.configuration_utils import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = Path(directory, "port").read_text()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for path in sorted(Path(directory).glob("*/*")):
        sizes = {"tp_size": 2} if path.parent.name == "tensor" else {"fsdp_size": 2}
        batch = tokens()
        whole = AutoModelForCausalLM.from_pretrained(path).train()
        whole(batch, labels=batch).loss.backward()
        divided = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**sizes)).train()
        loss = divided(batch, labels=batch).loss
        loss.backward()
        assert torch.allclose(loss, whole(batch, labels=batch).loss, atol=1e-5), path
        parts = 0
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in divided.named_parameters():
            gradient = parameter.grad
            if hasattr(gradient, "full_tensor"):
                parts += gradient.to_local().numel() < gradient.numel()
                gradient = gradient.full_tensor()
            assert torch.allclose(gradient, expected[name], atol=1e-5), (path, name)
        assert parts > 10, path
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "query"),
    [
        ({"topology": "pre", "attention_norm": "none", "activation": "gelu"}, "colwise"),
        ({"topology": "siamese-post-pre"}, "colwise_gather_output"),
        ({"topology": "siamese", "context_norm": True, "experts": 4}, "colwise"),
    ],
)
def test_plans_name_modules(options: dict[str, Any], query: str) -> None:
    with torch.device("meta"):
        model = SiameseNormForCausalLM(SiameseNormConfig(**TINY, **options))
    names = {re.sub(r"\d+", "*", name) for name, _ in model.named_modules()}
    assert model.tp_plan.keys() <= names and model.fsdp_plan.keys() <= names
    assert model.tp_plan["model.blocks.*.attention.query"] == query and "model.blocks.*" in model.fsdp_plan


@pytest.mark.laws  # imports transformers in two processes
def test_plans_of_tensor_parallelism_and_sharding_give_the_same_gradients(tmp_path: Path) -> None:
    for kind, name, options in (
        ("tensor", "none", {"topology": "pre", "attention_norm": "none", "activation": "gelu", "bias": True}),
        ("tensor", "qk", {"topology": "siamese-post-pre"}),
        ("tensor", "qkv-head", {"topology": "siamese", "context_norm": True}),
        ("sharded", "siamese", {"topology": "siamese"}),
    ):
        causal_model(**options).save_pretrained(tmp_path / kind / name)
    (tmp_path / "port").write_text(str(20000 + os.getpid() % 20000))
    torch.multiprocessing.spawn(in_processes, (str(tmp_path),), nprocs=2)


# --- export, offload, initial weights


def test_a_program_of_any_length_is_exported() -> None:
    model, length = causal_model(depth=1), torch.export.Dim("length", min=2, max=32)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}, "use_cache": None}
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones(2, 6, dtype=torch.long), "use_cache": False}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    for count in (4, 9):
        batch, mask = tokens(count=count), torch.ones(2, count, dtype=torch.long)
        mask[0, :2] = 0
        found = program(input_ids=batch, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(found[mask.bool()], model(batch, attention_mask=mask).logits[mask.bool()])


@pytest.mark.parametrize("topology", ["siamese", "dhc-2", "mhc-4"])
def test_blocks_on_disk_find_their_parameters(topology: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = causal_model(topology)
    model.save_pretrained(tmp_path)
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "blocks"}
    places |= {"model.blocks.0": "cpu", "model.blocks.1": "disk", "lm_head": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
    for _ in range(2):
        assert all(parameter.is_meta for parameter in loaded.model.blocks[1].parameters())
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_weights_without_a_seed_are_those_of_torch() -> None:
    def drawn(**options: Any) -> Tensor:
        model = SiameseNormForCausalLM(SiameseNormConfig(**TINY, **options))
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    torch.manual_seed(1)
    first, second = drawn(), drawn()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(drawn(), first)
    torch.manual_seed(2)
    assert not torch.equal(drawn(), first)
    assert torch.equal(drawn(seed=3), drawn(seed=3))


def test_no_common_test_of_transformers_fails() -> None:
    rows = json.loads((ROOT / "benchmarks/transformers_tests.json").read_text())["rows"]
    assert not any(row["failures"] for row in rows if row["code"] == "now")


def test_a_model_of_the_hub_is_loaded_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        bos_token_id, eos_token_id = None, 2

        def __call__(self, texts: list[str], **options: Any) -> Any:
            return SimpleNamespace(input_ids=[[5]])

    asked = []

    def load(name: str, **options: Any) -> Any:
        asked.append((name, options))
        return causal_model()

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: Tokenizer())
    opened = open_language_model("owner/name", device=torch.device("cpu"))
    assert (opened.name, opened.start, opened.encode(["a"])) == ("owner/name", 2, [[5]])
    assert asked == [("owner/name", {"use_safetensors": True})] and not opened.model.training


def test_a_model_that_the_hub_does_not_give_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **options: Any) -> Any:
        raise OSError("no connection\nand more lines")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(UserError, match=r"owner/name: .*no connection\): name the directory"):
        open_language_model("owner/name", device=torch.device("cpu"))
