"""Tokens at every position: the next, or the hidden."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.model import Batch, Embedding, Example, LanguageHead, TaskModel, collate, hide_tokens, next_tokens
from regard.model.naming import Available
from tests.model.outputs.common import NOTHING, gradients_flow, halves, losses_of_parts_average_to_that_of_the_whole

COUNT, WIDTH = 11, 5


def test_logits_and_loss_are_those_of_the_formula() -> None:
    head = LanguageHead(WIDTH, COUNT, smoothing=0.1)
    torch.nn.init.normal_(head.b)
    context, target = torch.randn(3, 4, WIDTH), torch.randint(-1, COUNT, (3, 4))
    batch = Batch({"x": torch.zeros(3, 4)}, target=target)
    logits = head(context, NOTHING)
    each = []
    for row, known in zip(context, target, strict=True):
        for c, y in zip(row, known.tolist(), strict=True):
            log_p = (head.E @ c + head.b).log_softmax(0)
            if y >= 0:
                each.append(-0.9 * log_p[y] - 0.1 * log_p.mean())
    torch.testing.assert_close(head.loss(logits, batch), torch.stack(each).mean())
    losses_of_parts_average_to_that_of_the_whole(head, (logits, batch), halves(logits, batch, 1))
    assert torch.equal(head.decide(logits), logits.argmax(-1))
    gradients_flow(head, head.loss(logits, batch))


def test_one_context_may_ask_for_one_token() -> None:
    head = LanguageHead(WIDTH, COUNT)
    logits = head(torch.randn(3, WIDTH), NOTHING)
    assert head.loss(logits, Batch({"x": torch.zeros(3)}, target=torch.tensor([1, 2, 10]))).isfinite()


def test_tied_vectors_are_one_parameter() -> None:
    table = Embedding(COUNT, WIDTH)
    head = LanguageHead(WIDTH, table=table)
    model = TaskModel(table, None, rg.SelfAttention(WIDTH), head)
    assert head.E is table.table.weight
    assert sum(p is table.table.weight for p in model.parameters()) == 1
    batch = Batch({"tokens": torch.randint(COUNT, (2, 7))}, target=torch.randint(COUNT, (2, 7)))
    gradients_flow(model, model.loss(model(batch), batch))
    again = TaskModel(table, None, rg.SelfAttention(WIDTH), LanguageHead(WIDTH, table=table))
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(batch), model.eval()(batch))


def test_padding_never_matters() -> None:
    model = TaskModel(Embedding(COUNT, WIDTH), None, rg.SelfAttention(WIDTH), LanguageHead(WIDTH, COUNT)).eval()
    texts = [torch.randint(COUNT, (n,)) for n in (3, 8, 1)]
    examples = [Example({"tokens": text}, next_tokens(text)) for text in texts]
    batch = collate(examples)
    found = model(batch)
    losses, counts = [], []
    for row, text, example in zip(found, texts, examples, strict=True):
        one = collate([example])
        torch.testing.assert_close(row[: len(text)], model(one)[0])
        if len(text) > 1:
            losses.append(model.loss(model(one), one))
            counts.append(len(text) - 1)
    mean = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(model.loss(found, batch), mean)
    head, mask = LanguageHead(WIDTH, COUNT), torch.tensor([[True, False]])
    context = torch.tensor([[[1.0] * WIDTH, [float("nan")] * WIDTH]])
    assert head(context, Available({}, {"x": mask}, {})).isfinite().all()


def test_what_follows() -> None:
    tokens, mask = torch.tensor([[3, 1, 4, 9], [5, 9, 9, 9]]), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    assert next_tokens(tokens, mask).tolist() == [[1, 4, -1, -1], [-1, -1, -1, -1]]
    assert next_tokens(tokens).tolist() == [[1, 4, 9, -1], [9, 9, 9, -1]]


def test_what_is_hidden() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, mask = torch.randint(9, (500, 20), generator=generator), torch.arange(20) < 15
    mask = mask.expand(500, 20).clone()
    mask[7] = False
    found = hide_tokens(tokens, by=10, share=0.3, mask=mask, generator=generator)
    hidden = found.target >= 0
    assert torch.equal(found.tokens == 10, hidden)
    assert torch.equal(found.target[hidden], tokens[hidden])
    assert torch.equal(found.tokens[~hidden], tokens[~hidden])
    assert not hidden[~mask].any()
    assert hidden.any(-1).sum() == 499, "at least one of every sequence that has any"
    assert float(hidden[mask].float().mean()) == pytest.approx(0.3, abs=0.02)
    again = hide_tokens(tokens, 10, 0.3, mask, torch.Generator().manual_seed(5))
    assert torch.equal(again.tokens, hide_tokens(tokens, 10, 0.3, mask, torch.Generator().manual_seed(5)).tokens)


def test_bad_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="count: got None, expected a number of tokens, or a table"):
        LanguageHead(WIDTH)
    with pytest.raises(ValueError, match=r"table: got vectors \(11, 4\), expected vectors \(V, 5\)"):
        LanguageHead(WIDTH, table=Embedding(COUNT, 4))
    with pytest.raises(ValueError, match=r"batch: got target of shape \(2,\), expected a token for each of \(2, 3\)"):
        LanguageHead(WIDTH, COUNT).loss(
            torch.zeros(2, 3, COUNT), Batch({"x": torch.zeros(2)}, target=torch.zeros(2).long())
        )
    with pytest.raises(ValueError, match="share: got 1.5"):
        hide_tokens(torch.zeros(3).long(), 1, 1.5)
