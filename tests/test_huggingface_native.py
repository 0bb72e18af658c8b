"""Law 7 in memory: a native model in transformers has the same logits, and all that transformers does with models."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache
from transformers.utils import logging

from huggingface_hosts import Wrapped
from siamesenorm import LanguageModel, available_norms, available_topologies, build_language_model
from siamesenorm.errors import UserError
from siamesenorm.interop.huggingface import SiameseNormConfig, SiameseNormForCausalLM, SiameseNormModel
from siamesenorm.models.language import language_model_config
from siamesenorm.sublayers.sublayer import Context
from siamesenorm.topologies import build_topology

# peft asks for a property of transformers by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
logging.disable_progress_bar()

TINY: dict[str, Any] = {"depth": 2, "dim": 16, "heads": 4, "hidden": 24, "vocabulary": 13, "context": 32}
PAD = 12


def native_model(topology: str = "siamese", norm: str | None = None, **fields: Any) -> LanguageModel:
    """Return a model whose every parameter is random, gains and gates included."""
    model = build_language_model("nano", topology=topology, norm=norm, **{**TINY, **fields})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()


def foreign(name: str) -> str:
    """Return the name in a model of transformers of a native parameter."""
    return "lm_head.weight" if name == "head.weight" else f"model.{name}"


def causal_model(topology: str = "siamese", norm: str | None = None, **fields: Any) -> SiameseNormForCausalLM:
    """Return a model of transformers of its own, with the weights of `native_model`."""
    native = native_model(topology, norm, **fields)
    model = SiameseNormForCausalLM(SiameseNormConfig.from_native(native.config))
    model.load_state_dict(
        {foreign(name): tensor for name, tensor in native.state_dict().items()}, strict=not native.config.tied
    )
    return model.eval()


def tokens(batch: int = 2, count: int = 6, seed: int = 3) -> Tensor:
    return torch.randint(0, PAD, (batch, count), generator=torch.Generator().manual_seed(seed))


def continued(model: SiameseNormForCausalLM, prompt: Tensor, count: int = 5, **options: Any) -> Tensor:
    """Return what `generate` appends, greedily by default; no token ends a text."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(prompt), **options}
    found = model.generate(prompt, max_new_tokens=count, **options)
    return found[:, prompt.shape[1] :]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the loss on a batch, by name."""
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# --- law 7


@pytest.mark.one_of_each_family
@pytest.mark.parametrize(("topology", "norm"), [*product(available_topologies(), available_norms())])
def test_logits_are_the_native_ones_also_after_saving_and_loading(topology: str, norm: str, tmp_path: Path) -> None:
    native, model, batch = native_model(topology, norm), causal_model(topology, norm), tokens()
    assert torch.equal(model(batch).logits, native(batch).logits)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(batch).logits, native(batch).logits)
    assert loaded.state_dict().keys() == {foreign(name) for name in native.state_dict()}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == {f"model.{name}" for name in native.state_dict()}


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", available_topologies())
def test_generation_with_a_cache_is_generation_without_and_the_native_one(topology: str) -> None:
    model = causal_model(topology, kv_heads=2)
    cached = continued(model, tokens())
    assert torch.equal(cached, continued(model, tokens(), use_cache=False))
    assert torch.equal(cached, native_model(topology, kv_heads=2).generate(tokens(), 5)[:, 6:])


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_the_embedding(tied: bool, tmp_path: Path) -> None:
    native, model = native_model(tied=tied), causal_model(tied=tied)
    assert model.config.tie_word_embeddings == tied
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, native(tokens()).logits)


def test_a_native_model_is_held_not_copied() -> None:
    native = native_model()
    model = SiameseNormForCausalLM.from_native(native)
    assert model.model.blocks is native.blocks and model.lm_head is native.head and not model.training
    assert torch.equal(model(tokens()).logits, native(tokens()).logits)
    assert model.config.to_native().to_json() == native.config.to_json()


@pytest.mark.parametrize("way", ["held", "built", "loaded"])
def test_nothing_draws_the_weights_again(way: str, tmp_path: Path) -> None:
    native = native_model()
    model = SiameseNormForCausalLM.from_native(native) if way == "held" else causal_model()
    if way == "loaded":
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for inner in (model, copy.deepcopy(model)):
        Wrapped(inner)
        Wrapped(inner.model)
        inner.init_weights()
        assert torch.equal(inner(tokens()).logits, native(tokens()).logits)


def test_inside_another_model_it_is_built_and_loaded(tmp_path: Path) -> None:
    native = native_model()

    class Composite(Wrapped):
        def __init__(self, config: Any) -> None:
            super().__init__(SiameseNormForCausalLM(SiameseNormConfig.from_native(native.config)))

    whole = Composite(None)
    whole.inner.load_state_dict({foreign(name): tensor for name, tensor in native.state_dict().items()})
    whole.save_pretrained(tmp_path)
    loaded = Composite.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.inner(tokens()).logits, native(tokens()).logits)


def test_a_configuration_draws_the_native_weights_wherever_it_is_built() -> None:
    native = build_language_model("nano", topology="deepnorm", **TINY)
    native.reset_parameters(3)
    config = SiameseNormConfig.from_native(native.config, seed=3)
    with torch.device("meta"):
        empty = SiameseNormForCausalLM(config)
    empty.to_empty(device="cpu").init_weights()
    for model in (SiameseNormForCausalLM(config), empty):
        assert torch.equal(model(tokens()).logits, native(tokens()).logits)


# --- the configuration


def test_a_configuration_has_the_usual_names_and_ours() -> None:
    config = SiameseNormConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=50, max_position_embeddings=64, tie_word_embeddings=True, topology="dhc-2:streams=4",
        norm="seednorm:heads=4",
    )  # fmt: skip
    expected = language_model_config(
        "nano", dim=32, depth=3, heads=4, kv_heads=2, hidden=48, vocabulary=50, context=64, tied=True,
        topology="dhc-2:streams=4", norm="seednorm:heads=4",
    )  # fmt: skip
    assert config.to_native().to_json() == expected.to_json()
    assert SiameseNormConfig.from_native(expected) == config
    assert config != SiameseNormConfig.from_native(expected, seed=1)
    assert (config.dim, config.depth, config.num_hidden_layers, config.vocab_size) == (32, 3, 3, 50)


def test_without_arguments_it_is_the_native_default() -> None:
    assert SiameseNormConfig().to_native() == SiameseNormConfig(topology="siamese").to_native()
    assert SiameseNormConfig(heads=2).num_key_value_heads == 2


def test_a_saved_configuration_is_the_same_and_names_its_code(tmp_path: Path) -> None:
    config = SiameseNormConfig(topology="mixln", norm="dyt", seed=3, eos_token_id=5, **TINY)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is SiameseNormConfig and loaded.to_json_string() == config.to_json_string()
    assert loaded.to_native() == config.to_native() and (loaded.seed, loaded.eos_token_id) == (3, 5)
    assert AutoConfig.from_pretrained(tmp_path, depth=1).to_native().depth == 1
    record = json.loads((tmp_path / "config.json").read_text())
    code = {name.partition(".")[0] for name in record["auto_map"].values()}
    assert {f"{module}.py" for module in code} == {file.name for file in tmp_path.glob("*.py")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"topology": "siamse"}, "did you mean siamese"), ({"norm": "rms"}, "unknown norm"), ({"heads": 3}, "divide")],
)
def test_what_cannot_be_built_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SiameseNormConfig(**{**TINY, **fields})


# --- weights


@pytest.mark.parametrize("seed", [0, 5])
def test_a_new_model_has_the_native_initial_weights_of_its_seed(seed: int) -> None:
    config = SiameseNormConfig(topology="siamese-post-pre", seed=seed, **TINY)
    model = AutoModelForCausalLM.from_config(config)
    native = build_language_model(config.to_native(), seed=seed)
    for name, tensor in native.state_dict().items():
        assert torch.equal(model.state_dict()[foreign(name)], tensor), name
    other = build_language_model(config.to_native(), seed=seed + 1)
    assert not torch.equal(model.lm_head.weight, other.head.weight)


def test_loading_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_model("siamese-post-pre")
    model.save_pretrained(tmp_path)

    def draw(*_: Any) -> None:
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(LanguageModel, "reset_parameters", draw)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    # Constants are saved nowhere: depth scales must have come back from the configuration.
    for (name, buffer), (_, expected) in zip(loaded.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert len(dict(loaded.named_buffers())) > 0


def test_a_weight_that_is_missing_is_drawn_and_the_others_stay(tmp_path: Path) -> None:
    headless = SiameseNormModel(SiameseNormConfig.from_native(native_model().config, seed=4))
    headless.load_state_dict(native_model().state_dict(), strict=False)
    headless.save_pretrained(tmp_path)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert found["missing_keys"] == {"lm_head.weight"}
    drawn = build_language_model(loaded.config.to_native(), seed=4)
    expected = {**native_model().state_dict(), "head.weight": drawn.head.weight}
    for name, tensor in expected.items():
        assert torch.equal(loaded.state_dict()[foreign(name)], tensor), name


def test_the_model_without_head_gives_what_the_head_sees(tmp_path: Path) -> None:
    model = causal_model()
    model.save_pretrained(tmp_path)
    loaded, found = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is SiameseNormModel and not found["missing_keys"] and not found["unexpected_keys"]
    assert torch.equal(model.lm_head(loaded(tokens()).last_hidden_state), model(tokens()).logits)


def test_a_resized_vocabulary_saves_and_loads(tmp_path: Path) -> None:
    model = causal_model()
    before = model(tokens()).logits
    model.resize_token_embeddings(20, mean_resizing=False)
    torch.testing.assert_close(model(tokens()).logits[..., :13], before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == loaded.model.config.vocabulary == 20
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


# --- dtypes


def test_a_model_computes_in_the_dtype_of_its_weights_and_keeps_that_of_its_streams(tmp_path: Path) -> None:
    causal_model(residual_dtype="float32").save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = AutoModelForCausalLM.from_pretrained(tmp_path).to(torch.bfloat16)
    found = half(tokens(), output_streams=True, output_hidden_states=True)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert {stream.dtype for streams in found.streams for stream in streams.values()} == {torch.float32}
    assert found.hidden_states[-1].dtype == torch.bfloat16
    assert torch.equal(cast(tokens()).logits, found.logits)
    torch.testing.assert_close(half.float()(tokens()).logits, causal_model()(tokens()).logits, rtol=0.1, atol=0.1)


def test_a_run_in_bfloat16_gives_the_same_numbers_under_autocast_and_runs_without() -> None:
    native = native_model(residual_dtype="float32", compute_dtype="bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = native(tokens()).logits
    model = SiameseNormForCausalLM.from_native(native)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(tokens()).logits, expected)
    torch.testing.assert_close(model(tokens()).logits, native_model()(tokens()).logits)


# --- padding, packing, caches


@pytest.mark.parametrize("topology", ["siamese", "dhc-2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(topology: str, side: str) -> None:
    model, row = causal_model(topology), tokens(batch=1, count=4)
    padding = torch.full((1, 3), PAD)
    parts = [(padding, torch.zeros_like(padding)), (row, torch.ones_like(row))][:: 1 if side == "left" else -1]
    padded, mask = (torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
    found = model(padded, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(found, model(row).logits[0], rtol=0, atol=1e-5)
    other = torch.where(mask.bool(), padded, 0)
    assert torch.equal(model(other, attention_mask=mask).logits[mask.bool()], found), "what pads is never seen"
    assert model(padded, attention_mask=mask).logits.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_a_padded_batch_generates_what_each_row_does(options: dict[str, Any]) -> None:
    model, rows = causal_model(), [tokens(batch=1, count=count, seed=count) for count in (3, 5)]
    batch = torch.cat([F.pad(row, (5 - row.shape[1], 0), value=PAD) for row in rows])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = continued(model, batch, attention_mask=mask, **options)
    alone = {name: value for name, value in options.items() if name == "num_beams"}
    assert torch.equal(found, torch.cat([continued(model, row, **alone) for row in rows]))


def test_a_cache_of_fixed_size_hides_what_is_to_come() -> None:
    model, batch = causal_model(), tokens(count=9)
    cache = StaticCache(config=model.config, max_cache_len=16)
    pieces = [model(piece, past_key_values=cache).logits for piece in batch.split((4, 1, 3, 1), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(batch).logits, rtol=0, atol=1e-5)


def test_a_cache_continues_in_pieces_with_padding() -> None:
    model, row = causal_model(), tokens(batch=1, count=7)
    padded, mask = F.pad(row, (2, 0), value=PAD), F.pad(torch.ones_like(row), (2, 0))
    first = model(padded[:, :5], attention_mask=mask[:, :5], use_cache=True)
    assert first.past_key_values.get_seq_length() == 5
    rest = model(padded[:, 5:], attention_mask=mask, past_key_values=first.past_key_values)
    torch.testing.assert_close(rest.logits, model(row).logits[:, 3:], rtol=0, atol=1e-5)


def test_positions_that_start_again_separate_packed_documents() -> None:
    model, batch = causal_model(), tokens(batch=2, count=9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    expected = torch.cat([model(part).logits for part in batch.split((4, 5), dim=1)], dim=1)
    torch.testing.assert_close(model(batch, position_ids=positions).logits, expected, rtol=0, atol=1e-5)
    native = native_model(document_mask=True)
    documents = (positions == 0).cumsum(dim=1)
    torch.testing.assert_close(native(batch, documents=documents).logits, expected, rtol=0, atol=1e-5)


def test_a_mask_of_four_dimensions_is_taken_as_it_is() -> None:
    model, batch = causal_model(), tokens()
    changed = torch.cat((tokens(seed=4)[:, :1], batch[:, 1:]), dim=1)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., 1:, 0] = False
    found = [model(each, attention_mask=mask).logits[:, 1:] for each in (batch, changed)]
    assert torch.equal(*found)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "top_k": 5}])
def test_beams_and_samples_need_no_cache(options: dict[str, Any]) -> None:
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(continued(causal_model(), tokens(), use_cache=use_cache, **options))
    assert torch.equal(*found)


# --- losses


def test_the_loss_is_the_cross_entropy_of_the_next_token() -> None:
    model, batch = causal_model(), tokens()
    labels = batch.clone()
    labels[0, :3] = -100
    probabilities = model(batch).logits.log_softmax(-1)
    wanted = [(row, place) for row in range(2) for place in range(1, 6) if labels[row, place] != -100]
    terms = torch.stack([-probabilities[row, place - 1, batch[row, place]] for row, place in wanted])
    torch.testing.assert_close(model(batch, labels=labels).loss, terms.mean())
    torch.testing.assert_close(model(batch, labels=labels, num_items_in_batch=20).loss, terms.sum() / 20)


class BalancedMLP(nn.Module):
    """A sublayer with a loss of its own, as a mixture of experts has."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, h: Tensor, context: Context) -> tuple[Tensor, dict[str, Tensor]]:
        return self.mlp(h, context), {"balance": h.square().mean()}


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_losses_of_sublayers_are_added_and_reach_their_weights(reentrant: bool | None) -> None:
    model = causal_model().train()
    for block in model.model.blocks:
        block.mlp = BalancedMLP(block.mlp)
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model)
    model.zero_grad()
    base = model.model(tokens())
    logits, losses = model.lm_head(base.last_hidden_state), base.losses
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()) + losses["balance"]
    torch.testing.assert_close(model(tokens(), labels=tokens()).loss, expected)
    expected.backward()
    torch.testing.assert_close(found, {name: parameter.grad for name, parameter in model.named_parameters()})


# --- what can be seen


@pytest.mark.parametrize("topology", ["siamese", "post", "mhc-4", "pre-embednorm", "attnres"])
def test_hidden_states_are_closed_and_streams_stand_apart(topology: str) -> None:
    native, batch, after = native_model(topology), tokens(), []
    model = SiameseNormForCausalLM.from_native(native)
    hooks = [block.register_forward_hook(lambda _, __, result: after.append(result[0])) for block in native.blocks]
    found = model(batch, output_hidden_states=True, output_streams=True)
    for hook in hooks:
        hook.remove()
    for streams, expected in zip(found.streams, after, strict=True):
        assert tuple(streams) == native.config.topology.name_streams(len(expected))
        assert all(torch.equal(one, other) for one, other in zip(streams.values(), expected, strict=True))
    first, *states = found.hidden_states
    assert torch.equal(first, native.embedding(batch))
    assert all(torch.equal(state, native.closing(s)) for state, s in zip(states, after, strict=True))
    assert torch.equal(native.logits(states[-1]), found.logits)
    assert {tuple(state.shape) for state in found.hidden_states} == {(2, 6, 16)}
    plain = model(batch)
    assert plain.hidden_states is None and plain.streams is None


def test_the_last_of_some_logits() -> None:
    model, batch = causal_model(), tokens()
    logits = model(batch).logits
    torch.testing.assert_close(model(batch, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(batch, logits_to_keep=torch.tensor([0, 3])).logits, logits[:, [0, 3]])


def test_a_tuple_instead_of_names() -> None:
    model, batch = causal_model(), tokens()
    loss, logits = model(batch, labels=batch, use_cache=False, return_dict=False)
    found = model(batch, labels=batch)
    assert torch.equal(loss, found.loss) and torch.equal(logits, found.logits)


def test_embeddings_instead_of_tokens() -> None:
    model, batch = causal_model(norm="dyt"), tokens()  # whose recipe scales the embedding
    assert torch.equal(model(inputs_embeds=model.model.embedding(batch)).logits, model(batch).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs_embeds": torch.zeros(2, 6, 16)}, "give one of them"),
        ({"input_ids": None}, "give one of them"),
        ({"attention_mask": torch.ones(2, 6, 6)}, "has 3 dimensions"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        causal_model()(**{"input_ids": tokens(), **options})


def test_streams_of_fused_kernels_are_refused() -> None:
    assert build_topology("siamese").has_fused_kernels
    native = LanguageModel(causal_model().config.to_native(), kernels="fused")
    native.load_state_dict(native_model().state_dict())
    fused = SiameseNormForCausalLM.from_native(native.eval())
    torch.testing.assert_close(fused(tokens()).logits, causal_model()(tokens()).logits)
    with pytest.raises(UserError, match="kernels='plain'"):
        fused(tokens(), output_hidden_states=True)


# --- training


@pytest.mark.one_of_each_family
@pytest.mark.parametrize("topology", available_topologies())
def test_gradient_checkpointing_changes_no_gradient(topology: str) -> None:
    model = causal_model(topology).train()
    expected = gradients(model)
    for reentrant in (False, True):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        torch.testing.assert_close(gradients(model), expected)
    assert model(tokens()).past_key_values is None
    with pytest.raises(UserError, match="gradient checkpointing"):
        model(tokens(), past_key_values=StaticCache(config=model.config, max_cache_len=8))
    assert torch.equal(continued(model, tokens()), continued(model.eval(), tokens()))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.laws
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_step_is_the_step() -> None:
    model = causal_model(depth=1).train()
    expected = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(tokens(), attention_mask=torch.ones(2, 6), labels=tokens()).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, expected)


def test_lora_attaches_trains_and_comes_back(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = causal_model()
    expected = base(tokens()).logits
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert {name.rpartition(".")[2] for name in model.targeted_module_names} == {
        "query", "key", "value", "output", "up", "gate",
    }  # fmt: skip
    torch.testing.assert_close(model(input_ids=tokens()).logits, expected)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # the second factor of an adapter starts at 0
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == {
            name for name, p in model.named_parameters() if "lora_" in name
        }
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    tuned = model(input_ids=tokens()).logits
    assert not torch.allclose(tuned, expected)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(causal_model(), tmp_path)
    assert torch.equal(again(input_ids=tokens()).logits, tuned)
    assert torch.equal(continued(again, tokens(batch=1)), continued(model, tokens(batch=1)))


def test_a_head_that_peft_trains_is_the_one_that_is_used() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(causal_model(), config)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.zero_()
    assert not model(input_ids=tokens()).logits.any()


def test_trainer_takes_a_step_and_saves_what_loads(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model, rows = causal_model(), [{"input_ids": row, "labels": row} for row in tokens(batch=4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "runs"), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, weight_decay=0.0, seed=0,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", activation_checkpointing=True,
    )  # fmt: skip
    expected = causal_model().train()
    batch = tokens(batch=4)
    expected(batch, labels=batch).loss.backward()  # accumulated, it is the mean over all tokens, not over micro-batches
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    for (name, parameter), (_, start) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(parameter, start - 0.1 * start.grad, rtol=0, atol=1e-6, msg=name)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(batch).logits, model.eval()(batch).logits)


# --- a mixture of experts


def test_a_mixture_is_exported_generates_and_has_weighted_losses(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"experts": 4, "active_experts": 2, "renormalise_experts": True, "router_z_weight": 0.25}
    model, batch = causal_model("siamese", **fields), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.native_config == model.model.native_config and loaded.model.config.experts == 4
    assert torch.equal(loaded(batch).logits, model(batch).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cached, uncached = (loaded.generate(batch, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, uncached)
    logits, losses = native_model("siamese", **fields)(batch)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    expected = expected + 0.01 * losses["load_balancing_loss"] + 0.25 * losses["router_z_loss"]
    torch.testing.assert_close(loaded(batch, labels=batch).loss, expected)
