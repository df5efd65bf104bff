"""Transformer-XL: segments, memory, distances, generation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.recipes.planted import InSegments, Recall, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.transformer.common import EXECUTIONS, tokens

D, H = 6, 2


def model(memory: int = 3, layers: int = 2, **options):
    return scrambled(rg.TransformerXL(D, H, layers, memory=memory, feedforward_dim=5, **options))


def streamed(m, x, sizes, mask=None):
    """The outputs of segments of these sizes, side by side, and the last memory."""
    outputs, memory = [], None
    masks = [None] * len(sizes) if mask is None else mask.split(sizes, -1)
    for part, real in zip(x.split(sizes, -2), masks, strict=True):
        output, memory = m(part, memory, real)
        outputs.append(output)
    return torch.cat(outputs, -2), memory


def loop(m, x, past, low=None):
    """The equations for one sequence (N, d) after states `past`, token by token and head by head."""
    N, d = x.shape[0], D // H
    states = []
    for layer, old in zip(m.layers, past, strict=True):
        states.append(x)
        a = layer.attention
        p = a.position
        every = torch.cat([old, x])
        M = len(old)
        pre = layer.norm == "pre"
        seen = layer.norm_attention(every) if pre else every
        rows = []
        for i in range(N):
            heads = []
            for h in range(H):
                q = a.W_Q[h] @ seen[M + i] + a.b_Q[h]
                e, v = [], []
                for j in range(M + i + 1):
                    distance = M + i - j
                    if low is not None and distance > low:
                        continue
                    delta = distance if p.clamp is None else min(distance, p.clamp)
                    angle = [delta / 10000 ** (2 * t / D) for t in range(D // 2)]
                    R = torch.tensor([math.sin(w) for w in angle] + [math.cos(w) for w in angle], dtype=x.dtype)
                    k = a.W_K[h] @ seen[j] + a.b_K[h]
                    e.append(((q + p.u[h]) @ k + (q + p.v[h]) @ (p.W_R[h] @ R)) / math.sqrt(d))
                    v.append(a.W_V[h] @ seen[j] + a.b_V[h])
                weights = torch.stack(e).softmax(0)
                heads.append(sum(w * y for w, y in zip(weights, v, strict=True)))
            rows.append(a.W_O @ torch.cat(heads) + a.b_O)
        x = x + torch.stack(rows)
        x = x if pre else layer.norm_attention(x)
        f = layer.feedforward
        x = x + F.linear(F.linear(layer.norm_feedforward(x) if pre else x, f.W1, f.b1).relu(), f.W2, f.b2)
        x = x if pre else layer.norm_feedforward(x)
    return (x if m.final_norm is None else m.final_norm(x)), states


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    "options",
    [{}, {"norm": "pre"}, {"clamp": 2}, {"same_length": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_two_segments_are_the_equations(options, execution):
    m, x = model(memory=3, **options), tokens(2, 7, D)
    with EXECUTIONS[execution]():
        found, memory = streamed(m, x, (4, 3))
    low = 3 if options.get("same_length") else None
    for b in range(2):
        first, states = loop(m, x[b, :4], [x.new_zeros(0, D)] * 2, low)
        past = [state[-3:].detach() for state in states]
        second, now = loop(m, x[b, 4:], past, low)
        assert_same(found[b], torch.cat([first, second]))
        for state, old, new in zip(memory.states, past, now, strict=True):
            assert_same(state[b], torch.cat([old, new])[-3:])


def test_shapes_of_any_segment():
    m, memory = model(memory=5), None
    for n, held in ((3, 3), (0, 3), (1, 4), (11, 5), (2, 5)):
        output, memory = m(tokens(2, n, D), memory)
        assert output.shape == (2, n, D)
        assert memory.length == held
        assert [state.shape for state in memory.states] == [(2, held, D)] * 2
    output, memory = model(memory=0)(tokens(7, D))
    assert output.shape == (7, D)
    assert memory.length == 0


def test_the_memory_is_no_part_of_the_graph():
    m, x = model(), tokens(1, 6, D).requires_grad_()
    first, memory = m(x[:, :4])
    assert not any(state.requires_grad for state in memory.states)
    second = m(x[:, 4:], memory).output
    (gradient,) = torch.autograd.grad(second.sum(), x)
    assert not gradient[:, :4].any()
    assert gradient[:, 4:].any()
    # What projects the memory does learn from it.
    key = m.layers[0].attention.W_K
    (with_memory,) = torch.autograd.grad(m(x[:, 4:], memory).output.square().sum(), key)
    (without,) = torch.autograd.grad(m(x[:, 4:]).output.square().sum(), key)
    assert not torch.allclose(with_memory, without)


def test_gradients_of_a_segment_with_a_memory():
    m, x = model(layers=1), tokens(1, 5, D)
    memory = m(x[:, :3]).memory
    x = x[:, 3:].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: m(x, memory).output, x, fast_mode=True)


def test_padding_in_either_segment_never_matters():
    m, x = model(memory=4), tokens(2, 9, D)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 2:4] = mask[0, 7] = False
    garbage = torch.where(mask.unsqueeze(-1), x, math.nan)
    found, memory = streamed(m, garbage, (4, 5), mask)
    expected, _ = streamed(m, torch.where(mask.unsqueeze(-1), x, 7.0), (4, 5), mask)
    assert torch.equal(found, expected)
    assert not found[~mask].any()
    assert torch.equal(memory.real, mask[:, 5:])
    # Alone and in the batch.
    alone, _ = streamed(m, garbage[1:], (4, 5), mask[1:])
    assert_same(found[1:], alone)


def test_a_mask_that_begins_later_finds_the_memory_real():
    m, x = model(memory=4), tokens(1, 6, D)
    memory = m(x[:, :3]).memory
    assert memory.real is None
    mask = torch.tensor([[True, True, False]])
    output, after = m(x[:, 3:], memory, mask)
    assert after.real.tolist() == [[True, True, True, False]]
    assert_same(output[:, :2], m(x[:, 3:5], memory).output)


def test_distances_count_and_places_do_not():
    """The same segment after the same memory, wherever both stand in the text: the memory holds no places."""
    m, x = model(memory=3, same_length=True), tokens(1, 8, D)
    late, _ = streamed(m, torch.cat([x[:, :5] + 1, x], 1), (5, 8))
    early = m(x).output
    # Past the reach of both layers, what stood before does not matter.
    assert_same(late[:, 5 + 6 :], early[:, 6:])


def test_recorded_and_changed_from_outside():
    m, x = model(memory=4, layers=1), tokens(2, 7, D)
    memory = m(x[:, :4]).memory
    with rg.record(m) as trace:
        output = m(x[:, 4:], memory).output
    weights = trace["layers.0.attention.attention"].weights
    assert weights.shape == (2, H, 3, 7)
    assert_same(weights.sum(-1), torch.ones(2, H, 3, dtype=weights.dtype))
    assert not weights.triu(5).any()
    assert weights.tril(4).ne(0).sum() == 2 * H * (5 + 6 + 7)
    with rg.intervene(m, "uniform", at="layers.0.attention.attention"):
        assert not torch.allclose(m(x[:, 4:], memory).output, output)


def test_a_model_of_tokens_streams_what_it_reads_whole():
    m = scrambled(rg.TransformerXLLanguageModel(11, D, H, 2, memory=20))
    text, memory = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0)), None
    whole, parts = m(text).output, []
    for part in text.split(4, -1):
        logits, memory = m(part, memory)
        parts.append(logits)
    assert_same(torch.cat(parts, 1), whole)
    assert whole.shape == (2, 9, 11)


@pytest.mark.parametrize("how", [rg.Greedy(), rg.Beam(3)], ids=["greedy", "beam"])
def test_generation_is_that_of_the_whole_text(how):
    m = scrambled(rg.TransformerXLLanguageModel(7, D, H, 1, memory=50))
    text = torch.randint(7, (2, 8), generator=torch.Generator().manual_seed(1))
    memory = m(text[:, :5]).memory
    found = m.generate(text[:, 5:], memory=memory, steps=4, how=how)
    log_p = m(torch.cat([text, found.tokens], 1)).output[:, 7:-1].log_softmax(-1)
    each = log_p.gather(-1, found.tokens.unsqueeze(-1)).squeeze(-1)
    assert_same(found.log_prob, each.sum(-1))
    if isinstance(how, rg.Greedy):
        assert torch.equal(found.tokens, log_p.argmax(-1))
    else:
        assert (found.log_prob >= m.generate(text[:, 5:], memory=memory, steps=4).log_prob - 1e-9).all()


def test_more_may_be_remembered_later():
    m, x = model(memory=2), tokens(1, 9, D)
    m.memory_length = 9
    assert_same(streamed(m, x, (4, 5))[0], m(x).output)


def test_context_beyond_the_segment():
    """Planted: what is asked for in the third segment stood in the first."""
    task = Recall()
    found = {}
    for memory in (10, 0):
        torch.manual_seed(0)
        language = rg.TransformerXLLanguageModel(task.vocabulary, 16, 2, 1, memory=memory)
        m = InSegments(language, task.segment, task.symbols)
        fit(m, task, steps=100)
        found[memory] = accuracy(m, task)
        if memory:
            batch = task.draw(512, torch.Generator().manual_seed(5))
            with rg.record(m) as trace:
                m(**batch.inputs)
            # The last call: the last query, and the memory and the segment as keys.
            weights = trace["model.decoder.layers.0.attention.attention"][-1].weights[..., -1, :]
            # Nothing asks for sharp weights: several times an even share is enough to read the symbol.
            place = weights.mean(1).gather(1, batch.truth["tokens"].unsqueeze(1)).mean()
            print(f"weight of the place {place:.3f}, of an even share {1 / weights.shape[-1]:.3f}")
            assert place > 3 / weights.shape[-1]
    print(f"Transformer-XL {found[10]:.3f}, without memory {found[0]:.3f}")
    assert found[10] > 0.95
    assert found[0] < 0.32


def test_refusals():
    with pytest.raises(ValueError, match="memory: got -1, expected a whole number >= 0"):
        rg.TransformerXL(D, H, 1, memory=-1)
    with pytest.raises(ValueError, match="an even number: half sines, half cosines"):
        rg.TransformerXL(9, 3, 1, memory=1)
    with pytest.raises(TypeError, match="attention: got .* expected none"):
        rg.TransformerXL(D, H, 1, memory=1, attention=rg.LinformerAttention)
    with pytest.raises(TypeError, match="position: got 'rotary', expected none: its own is part of the model. Fix"):
        rg.TransformerXL(D, H, 1, memory=1, position="rotary")
    m, x = model(), tokens(2, 5, D)
    with pytest.raises(ValueError, match=f"tokens: got width {D - 1}, expected {D}"):
        m(x[..., 1:])
    memory = m(x).memory
    with pytest.raises(TypeError, match="memory: got tuple, expected the memory that the call before gave"):
        m(x, tuple(memory))
    with pytest.raises(ValueError, match="memory: got one of 1 layers, expected one of 2"):
        m(x, rg.Memory(memory.states[:1]))
    with pytest.raises(ValueError, match=r"memory: got states of shape \(2, 3, 6\), expected \(1, 3, 6\)"):
        m(x[:1], memory)
    assert "memory=3" in repr(m)
