"""Decoders of tokens: told and alone, greedy and with a beam."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import regard as rg
from regard.model import (
    Batch,
    Embedding,
    Example,
    SequenceDecoder,
    TaskModel,
    TokenDecoder,
    TransformerSequenceDecoder,
    collate,
)
from regard.transformer import Beam, Greedy, Sample
from tests.model.outputs.common import at, gradients_flow, halves, losses_of_parts_average_to_that_of_the_whole

VOCABULARY, WIDTH, STATE = 23, 7, 6
DECODERS: dict[str, Callable[..., TokenDecoder]] = {
    "recurrent": lambda count, **more: SequenceDecoder(count, 5, STATE, WIDTH, **more),
    "feeding": lambda count, **more: SequenceDecoder(count, 5, STATE, WIDTH, feeding=True, **more),
    "deep": lambda count, **more: SequenceDecoder(count, 5, STATE, WIDTH, layers=3, **more),
    "deep-feeding": lambda count, **more: SequenceDecoder(count, 5, STATE, WIDTH, True, 2, **more),
    "transformer": lambda count, **more: TransformerSequenceDecoder(count, STATE, 2, 2, context_dim=WIDTH, **more),
    "rotary": lambda count, **more: TransformerSequenceDecoder(
        count, STATE, 3, 1, context_dim=WIDTH, position="rotary", norm="pre", **more
    ),
}
every = pytest.mark.parametrize("kind", DECODERS)


def task(kind: str, count: int, align: str = "soft", **more: object) -> TaskModel:
    options = {"window": 2} if align.startswith("local") else {}
    read = rg.Attention("additive", align, query_dim=STATE, key_dim=WIDTH, hidden_dim=3, **options)
    model = TaskModel(Embedding(VOCABULARY, WIDTH), None, read, DECODERS[kind](count, **more)).double()
    for parameter in model.parameters():
        # Far from uniform, and dependent on all that was written: paths must differ.
        if parameter.dim() > 1:
            nn.init.normal_(parameter)
    return model


def inputs(*lengths: int, target: torch.Tensor | None = None) -> Batch:
    return collate([Example({"tokens": torch.randint(VOCABULARY, (n,))}, target) for n in lengths])


def written(model: TaskModel, batch: Batch, steps: int, how: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    found = model.encode(batch)
    return model.output.generate(model.reader(found), found, steps, how)


def told(model: TaskModel, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability (B,) of sequences, of a decoder that is told them."""
    logits = model(Batch(batch.inputs, batch.masks, tokens))
    picked = logits.log_softmax(-1).gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.where(tokens >= 0, 0.0).sum(-1)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("feeding", [False, True])
def test_logits_are_those_of_the_formula(feeding: bool, layers: int) -> None:
    model = TaskModel(
        Embedding(VOCABULARY, WIDTH),
        None,
        rg.Attention("additive", query_dim=STATE, key_dim=WIDTH, hidden_dim=3),
        SequenceDecoder(5, 3, STATE, WIDTH, feeding, layers),
    ).double()
    decoder = model.output
    batch = collate([Example({"tokens": torch.randint(VOCABULARY, (n,))}, torch.tensor([2, 0, 4])) for n in (3, 8)])
    logits = model(batch)
    for b, (tokens, mask) in enumerate(zip(batch.inputs["tokens"], batch.masks["tokens"], strict=True)):
        features = model.features(tokens[mask])
        cells = []
        for layer in range(layers):
            weights = [
                getattr(decoder.network, f"{name}_l{layer}")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            cell = nn.GRUCell(weights[0].shape[1], STATE).double()
            cell.load_state_dict(dict(zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), weights, strict=True)))
            cells.append(cell)
        states = list(torch.tanh(decoder.begin(features.mean(0))).split(STATE))
        x, context = decoder.start, torch.zeros(WIDTH).double()
        for t, y in enumerate([2, 0, 4]):
            below = torch.cat([x, context]) if feeding else x
            for layer, cell in enumerate(cells):
                states[layer] = cell(below[None], states[layer][None])[0]
                below = states[layer]
            context = model.attention(below, features)
            expected = decoder.linear(torch.tanh(decoder.joined(torch.cat([context, below]))))
            torch.testing.assert_close(logits[b, t], expected)
            x = decoder.table.weight[y]


def test_a_transformer_reads_once_after_its_layers() -> None:
    model, batch = task("transformer", 5).eval(), inputs(3, 8, target=torch.tensor([2, 0, 4]))
    decoder, features = model.output, model.features(batch.inputs["tokens"])
    logits = model(batch)
    for b, mask in enumerate(batch.masks["tokens"]):
        vectors = [decoder.start, *(math.sqrt(STATE) * decoder.table.E[y] for y in (2, 0))]
        states = decoder.decoder(torch.stack(vectors)[None])[0]
        for t in range(3):
            s = decoder.norm_read(states[t] + decoder.map(model.attention(states[t], features[b, mask])))
            s = decoder.norm_feedforward(s + decoder.feedforward(s))
            torch.testing.assert_close(logits[b, t], decoder.table.E @ s)


@every
@pytest.mark.parametrize("align", ["soft", "local-monotonic"])
@pytest.mark.parametrize("how", [None, Beam(1), Beam(3), Beam(5, penalty=0.7), Sample()])
def test_what_is_written_alone_is_as_likely_as_what_is_told(kind: str, align: str, how: object) -> None:
    model, batch = task(kind, 6, align).eval(), inputs(4, 9, 1)
    tokens, log_prob = written(model, batch, 7, how)
    assert tokens.shape == (3, 7)
    torch.testing.assert_close(told(model, batch, tokens), log_prob)
    for row in tokens.tolist():
        ends = row.index(5) if 5 in row else 6
        assert all(0 <= token < 5 for token in row[:ends])
        assert all(token == -1 for token in row[ends + 1 :])


@every
def test_what_comes_depends_on_all_that_was_written(kind: str) -> None:
    model, batch = task(kind, 6).eval(), inputs(4, 9)
    one, other = (Batch(batch.inputs, batch.masks, torch.tensor([[first, 1, 2, 5]] * 2)) for first in (0, 3))
    apart = (model(one) - model(other)).abs().amax((0, 2))
    assert apart[0] == 0
    assert (apart[1:] > 0.1).all()


@every
def test_a_beam_of_one_is_greedy(kind: str) -> None:
    model, batch = task(kind, 6).eval(), inputs(4, 9, 1, 6)
    greedy = written(model, batch, 8)
    assert torch.equal(greedy[0], written(model, batch, 8, Beam(1))[0])
    assert torch.equal(greedy[0], written(model, batch, 8, Greedy())[0])
    best = model(Batch(batch.inputs, batch.masks, greedy[0])).argmax(-1)
    assert torch.equal(best[greedy[0] >= 0], greedy[0][greedy[0] >= 0])


@every
@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_the_best_of_all(kind: str, penalty: float) -> None:
    end, steps = 3, 3
    model, batch = task(kind, end + 1).eval(), inputs(4, 7)
    sequences = set()
    for tokens in itertools.product(range(end + 1), repeat=steps):
        cut = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        sequences.add(cut + (-1,) * (steps - len(cut)))
    every_one = torch.tensor(sorted(sequences))
    found, log_prob = written(model, batch, steps, Beam(len(every_one), penalty))
    for b in range(2):
        one = at(batch, slice(b, b + 1))
        scores = torch.stack([told(model, one, sequence[None])[0] for sequence in every_one])
        lengths = (every_one >= 0).sum(-1)
        best = (scores / ((5 + lengths) / 6) ** penalty).argmax()
        assert found[b].tolist() == every_one[best].tolist()
        torch.testing.assert_close(log_prob[b], scores[best])


@every
def test_every_example_is_written_as_if_it_were_alone(kind: str) -> None:
    model, batch = task(kind, 6).eval(), inputs(4, 9, 2)
    together = written(model, batch, 6, Beam(3))
    for b, real in enumerate(batch.masks["tokens"]):
        tokens = batch.inputs["tokens"][b, real][None]
        alone = written(model, Batch({"tokens": tokens}), 6, Beam(3))
        assert torch.equal(alone[0][0], together[0][b])


@every
@pytest.mark.parametrize("paths", [1, 3])
def test_what_is_read_at_each_step_is_recorded(kind: str, paths: int) -> None:
    model, batch = task(kind, 6).eval(), inputs(4, 9)
    with rg.record(model) as trace:
        tokens, _ = written(model, batch, 5, Beam(paths))
    calls = dict(trace.items())["attention"]
    # The first step has one path.
    assert (len(calls) - 1) % paths == 0
    assert all(call.weights.shape == (2, 1, 9) for call in calls)
    if paths > 1:
        return
    with rg.record(model) as known:
        model(Batch(batch.inputs, batch.masks, tokens))
    whole = torch.cat([call.weights for call in dict(known.items())["attention"]], 1)
    for t, call in enumerate(calls):
        still = tokens[:, t] >= 0
        torch.testing.assert_close(call.weights[still, 0], whole[still, t])


@every
def test_the_loss_is_over_real_tokens(kind: str) -> None:
    targets = [torch.tensor([3, 5]), torch.tensor([1, 2, 4, 5]), torch.tensor([5])]
    batch = collate([Example({"tokens": torch.randint(VOCABULARY, (5,))}, target) for target in targets])
    model = task(kind, 6)
    logits = model(batch)
    losses_of_parts_average_to_that_of_the_whole(model.output, (logits, batch), halves(logits, batch, 1))
    longer = Batch(batch.inputs, batch.masks, nn.functional.pad(batch.target, (0, 2), value=-1))
    torch.testing.assert_close(model.loss(model(longer), longer), model.loss(logits, batch))
    gradients_flow(model, model.loss(logits, batch))


def test_a_smoothed_target_is_spread_over_all_tokens() -> None:
    targets = [torch.tensor([3, 5]), torch.tensor([1, 2, 4, 5])]
    batch = collate([Example({"tokens": torch.randint(VOCABULARY, (5,))}, target) for target in targets])
    model = task("recurrent", 6, smoothing=0.2)
    logits = model(batch)
    each = []
    for row, target in zip(logits, targets, strict=True):
        for step, y in zip(row, target, strict=False):
            spread = torch.full((6,), 0.2 / 6, dtype=torch.float64)
            spread[y] += 0.8
            each.append(-(spread * step.log_softmax(-1)).sum())
    torch.testing.assert_close(model.loss(logits, batch), torch.stack(each).mean())


@every
def test_dropout_is_for_training_alone(kind: str) -> None:
    model, batch = task(kind, 6, dropout=0.5), inputs(4, 9, target=torch.tensor([1, 2, 5]))
    assert not torch.equal(model(batch), model(batch))
    assert torch.equal(model.eval()(batch), model(batch))


def test_bad_decoders_are_refused() -> None:
    with pytest.raises(ValueError, match="smoothing: got 1, expected a number from 0 to below 1"):
        SequenceDecoder(5, 3, STATE, WIDTH, smoothing=1)
    with pytest.raises(ValueError, match="layers: got 0"):
        SequenceDecoder(5, 3, STATE, WIDTH, layers=0)
    with pytest.raises(ValueError, match=r"features: got width 7 of 'tokens', expected context_dim=9"):
        TaskModel(Embedding(VOCABULARY, WIDTH), None, rg.Attention("dot"), SequenceDecoder(5, 3, STATE, 9))(
            inputs(3, target=torch.tensor([4]))
        )
    with pytest.raises(TypeError, match="how: got str"):
        written(task("recurrent", 5), inputs(3), 2, "beam")
    with pytest.raises(ValueError, match="batch: got no target"):
        task("recurrent", 5)(inputs(3))
