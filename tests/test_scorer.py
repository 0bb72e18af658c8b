"""The scorer against a slow direct computation in fp64, and what it computes only once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from siamesenorm import LanguageModel, build_language_model
from siamesenorm.data.tokenizer import ByteTokenizer
from siamesenorm.errors import UserError
from siamesenorm.evaluation.causal_models import Batch, LibraryCausalModel, NativeCausalModel, model_digest
from siamesenorm.evaluation.perplexity import text_perplexity
from siamesenorm.evaluation.scorer import LanguageScorer, Request

CONTEXT = 24
TEXT = "Which of these is heavier than water? A stone falls, and cork swims on top of it."


def tiny(topology: str = "siamese", **options: Any) -> LanguageModel:
    model = build_language_model(
        "nano", topology=topology, depth=2, dim=16, heads=2, hidden=24, context=CONTEXT, vocabulary=257, **options
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # far from the symmetric initial weights
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def scorer_of(model: Any, **options: Any) -> LanguageScorer:
    tokenizer = ByteTokenizer()
    return LanguageScorer(
        model=NativeCausalModel(model) if isinstance(model, LanguageModel) else model,
        encode=lambda texts: [ids.tolist() for ids in tokenizer.encode_batch(texts)],
        start=tokenizer.end_of_text,
        identity="tiny",
        device=torch.device("cpu"),
        **options,
    )


def ids(text: str) -> list[int]:
    return list(text.encode())


def directly(model: LanguageModel, request: Request) -> float:
    """Return the log-probability token by token in fp64, each after the last `CONTEXT` tokens that a window keeps."""
    tokens, total = [*request.context, *request.continuation], 0.0
    end = len(tokens)
    while end > len(request.context):
        first = max(len(request.context), end - CONTEXT)
        window = tokens[max(0, end - CONTEXT - 1) : end]
        logits = model.double()(torch.tensor([window[:-1]])).logits[0].double()
        for place in range(first, end):
            at = len(window) - 1 - (end - place)
            total += float(logits[at].log_softmax(-1)[tokens[place]])
        end = first
    return total


GROUPS = [
    [Request(ids(TEXT[:9]), ids(each)) for each in (" stone", " cork", " stones", " s")],
    [Request(ids(TEXT[:15]), ids(" and more")), Request(ids(TEXT[:20]), ids(" and more"))],
    [Request(ids(TEXT), ids(" left"))],
    [Request(ids("A"), ids(TEXT)), Request(ids(TEXT), ids(TEXT))],
    [Request(ids("A"), ids("b"))],
]
"""Choices of a question, of a blank, a context that is cut, and continuations longer than the model reads."""


@pytest.mark.parametrize("topology", ["siamese", "attnres"])
@pytest.mark.parametrize("packs", [True, False])
def test_log_probabilities_are_those_of_a_direct_computation(topology: str, packs: bool) -> None:
    model = tiny(topology)
    scored = NativeCausalModel(model)
    scored.packs = packs  # type: ignore[misc]
    found = scorer_of(scored, tokens_at_once=60).score(GROUPS)
    with torch.no_grad():
        for group, values in zip(GROUPS, found, strict=True):
            assert values == pytest.approx([directly(model, request) for request in group], abs=2e-4)
            model.float()


def test_without_positions_rows_are_still_apart() -> None:
    model = tiny(positions="none")
    with torch.no_grad():
        (found,) = scorer_of(model).score(GROUPS[:1])
        assert found == pytest.approx([directly(model, request) for request in GROUPS[0]], abs=2e-4)


class Counting:
    """A model of equal logits that counts what it computes."""

    packs, context = True, CONTEXT

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def logits(self, batch: Batch, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
        self.calls.append((batch.tokens.numel(), len(rows)))
        yield torch.zeros(len(rows), 257)


def test_a_uniform_model_has_the_logarithm_of_the_vocabulary() -> None:
    for group, values in zip(GROUPS, scorer_of(Counting()).score(GROUPS), strict=True):
        assert values == pytest.approx([-len(each.continuation) * math.log(257) for each in group])


def test_equal_requests_and_common_beginnings_are_computed_once() -> None:
    model = Counting()
    question = [Request(ids("What"), ids(" a")), Request(ids("What"), ids(" b")), Request(ids("What"), ids(" a"))]
    found = scorer_of(model).score([question, question])
    assert found[0] == found[1] and len(set(found[0])) == 1
    assert model.calls == [(5, 4)], "the tokens 'What ', and two places for each of two continuations"


class Killed(Exception):
    pass


def test_a_killed_evaluation_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    model = tiny()
    whole = scorer_of(model, tokens_at_once=30).score(GROUPS)
    calls: list[int] = []

    class Dying(NativeCausalModel):
        def logits(self, batch: Batch, rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
            calls.append(len(rows))
            if len(calls) == 3:
                raise Killed
            yield from super().logits(batch, rows, columns)

    scorer = scorer_of(Dying(model), tokens_at_once=30, cache=tmp_path / "scores")
    with pytest.raises(Killed):
        scorer.score(GROUPS)
    (file,) = (tmp_path / "scores").glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 2
    with file.open("a") as half:
        half.write('{"ab')
    assert scorer.score(GROUPS) == whole
    batches = len(calls) - 1
    assert scorer.score(GROUPS) == whole and len(calls) - 1 == batches, "the second time nothing is computed"
    other = dataclasses.replace(scorer, identity="another")
    assert other.score(GROUPS) == whole and len(calls) - 1 > batches, "another model has a cache of its own"


def test_the_digest_is_that_of_weights_and_configuration() -> None:
    model = tiny()
    before = model_digest(model, device="cpu")
    assert model_digest(tiny(), device="cpu") == before != model_digest(model, device="cuda")
    assert model_digest(tiny(rope_theta=50.0), device="cpu") != before
    model.embedding.weight.data[0, 0] += 1e-3
    assert model_digest(model, device="cpu") != before


def test_a_text_is_predicted_once_token_by_token() -> None:
    model, text = tiny(), TEXT * 2 + "ü"
    scorer = scorer_of(model)
    found = text_perplexity(scorer, text)
    tokens = [256, *ids(text)]
    windows = [Request(tokens[at - 1 : at], tokens[at : at + CONTEXT]) for at in range(1, len(tokens), CONTEXT)]
    with torch.no_grad():
        total = -sum(directly(model, each) for each in windows)
    assert (found["tokens"], found["bytes"]) == (len(tokens) - 1, len(text.encode()))
    assert found["loss"] == pytest.approx(total / found["tokens"], rel=1e-5)
    assert found["ppl"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / found["bytes"], rel=1e-5)
    model.float()
    silent = text_perplexity(dataclasses.replace(scorer, start=None), text)
    assert silent["tokens"] == found["tokens"] - 1, "nothing before it predicts the first token"


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="no token"):
        scorer_of(tiny()).requests([("a", "")])


# --- models of transformers


def llama(kind: str = "Llama", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    ends = dict(bos_token_id=0, eos_token_id=0)
    sizes = dict(vocab_size=257, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **ends)
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def directly_by(model: Any, request: Request) -> float:
    tokens = [*request.context, *request.continuation][-(CONTEXT + 1) :]
    with torch.no_grad():
        values = model(torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)
    return float(sum(values[at - 1, tokens[at]] for at in range(len(tokens) - len(request.continuation), len(tokens))))


@pytest.mark.parametrize(
    ("kind", "options", "packs"),
    [
        ("Llama", {"intermediate_size": 24, "max_position_embeddings": CONTEXT}, True),
        ("GPT2", {"n_positions": CONTEXT}, True),
        (
            "Mistral",
            {
                "intermediate_size": 24,
                "num_key_value_heads": 1,
                "max_position_embeddings": CONTEXT,
                "sliding_window": 4,
            },
            False,
        ),
        ("Mpt", {"max_seq_len": CONTEXT}, False),
    ],
)
def test_models_of_transformers_are_scored_and_packed_where_that_is_exact(
    kind: str, options: dict[str, Any], packs: bool
) -> None:
    model = llama(kind, **options)
    scored = LibraryCausalModel(model)
    scored.context = min(scored.context, CONTEXT)
    assert scored.packs is packs
    found = scorer_of(scored, tokens_at_once=60).score(GROUPS[:3])
    for group, values in zip(GROUPS, found, strict=False):
        assert values == pytest.approx([directly_by(model, request) for request in group], abs=1e-4)


def test_a_model_that_ignores_masks_is_not_packed() -> None:
    model = llama(intermediate_size=24, max_position_embeddings=CONTEXT)
    forward = model.forward

    def deaf(input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **options: Any) -> Any:
        return forward(input_ids, **options)

    model.forward = deaf
    assert LibraryCausalModel(model).packs is False
    assert not model.get_output_embeddings()._forward_pre_hooks
