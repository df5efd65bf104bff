"""Generation: the cache changes nothing, a wide beam finds the best, and samples follow their distribution."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.transformer.common import POSITIONS, REAL

END = 1


def seq2seq(position="sinusoidal", **options):
    return scrambled(rg.SequenceToSequence(11, 8, 2, 2, position=position, feedforward_dim=5, **options)).eval()


def source(seed=0):
    return torch.randint(2, 11, (2, 7), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("score", ["scaled-dot", "general"])
def test_cached_decoding_is_full_decoding_token_for_token(position, score):
    m, x = seq2seq(position, score=score), source()
    found = m.generate(x, REAL, begin=0, steps=9)
    target = torch.zeros(2, 1, dtype=torch.long)
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(9):
            log_p = m(x, target, REAL)[:, -1].log_softmax(-1)
            best, chosen = log_p.max(-1)
            total, target = total + best, torch.cat([target, chosen[:, None]], 1)
    assert torch.equal(found.tokens, target[:, 1:])
    assert_same(found.log_prob, total)


@pytest.mark.parametrize("position", ["rotary", "relative"])
def test_a_beam_reports_what_the_model_says_of_its_tokens(position):
    """Were the cache not reordered with the paths, it would not."""
    moved = 0
    for seed in range(12):
        m, x = scrambled(seq2seq(position), seed=seed), source()
        found = m.generate(x, REAL, begin=0, end=END, steps=8, how=rg.Beam(4))
        given = torch.cat([torch.zeros(2, 1, dtype=torch.long), found.tokens], 1)
        log_p = m(x, given[:, :-1], REAL).log_softmax(-1).gather(-1, found.tokens[..., None]).squeeze(-1)
        after = (found.tokens == END).cumsum(-1) - (found.tokens == END).long() > 0
        assert_same(found.log_prob, log_p.masked_fill(after, 0.0).sum(-1))
        assert (found.tokens[after] == END).all()
        greedy = m.generate(x, REAL, begin=0, end=END, steps=8)
        assert (found.log_prob >= greedy.log_prob - 1e-12).all()
        moved += int((found.log_prob > greedy.log_prob + 1e-12).sum())
    assert moved >= 3  # otherwise every path was the first one


@pytest.mark.parametrize("seed", [20, 35])
def test_a_beam_of_everything_finds_the_likeliest_whole(seed):
    m = scrambled(rg.LanguageModel(4, 8, 2, 1, position="alibi"), seed=seed)
    prompt = torch.tensor([[0, 2], [3, 3]])
    found = m.generate(prompt, steps=4, how=rg.Beam(256))
    for b in range(2):
        every = torch.tensor(list(itertools.product(range(4), repeat=4)))
        whole = torch.cat([prompt[b].expand(256, 2), every], 1)
        log_p = m(whole[:, :-1]).log_softmax(-1)[:, 1:].gather(-1, every[..., None]).sum((1, 2))
        assert torch.equal(found.tokens[b], every[log_p.argmax()])
        assert_same(found.log_prob[b], log_p.max())
    assert not torch.equal(found.tokens, m.generate(prompt, steps=4).tokens)


class Table:
    """A distribution for every beginning, drawn once."""

    def __init__(self, vocabulary, seed):
        self.vocabulary, self.seed, self.written = vocabulary, seed, None

    def after(self, beginning):
        place = sum((token + 1) * 7**k for k, token in enumerate(beginning)) + 1000 * self.seed
        generator = torch.Generator().manual_seed(place)
        return (2 * torch.randn(self.vocabulary, generator=generator, dtype=torch.float64)).log_softmax(-1)

    def step(self, tokens):
        self.written = tokens if self.written is None else torch.cat([self.written, tokens], 1)
        return torch.stack([self.after(row) for row in self.written.tolist()])

    def spread(self, times):
        self.written = self.written.repeat_interleave(times, 0)

    def reorder(self, rows):
        self.written = self.written[rows]


@pytest.mark.parametrize("penalty", [0.0, 2.0])
@pytest.mark.parametrize("seed", [0, 27, 32, 51])
def test_a_beam_finds_the_best_among_those_that_end_and_those_that_go_on(seed, penalty):
    def probability(tokens):
        total = 0.0
        for t, token in enumerate(tokens):
            if END in tokens[:t]:
                total += 0.0 if token == END else -math.inf
            else:
                total += float(table.after([0, *tokens[:t]])[token])
        return total

    table = Table(3, seed)

    def score(tokens):
        length = tokens.index(END) + 1 if END in tokens else 4
        return every[tokens] / ((5 + length) / 6) ** penalty

    every = {tokens: probability(tokens) for tokens in itertools.product(range(3), repeat=4)}
    best = max(every, key=score)
    how = rg.Beam(81, penalty)
    found = rg.transformer.generate(table, torch.zeros(1, 1, dtype=torch.long), steps=4, end=END, how=how)
    padded = found.tokens[0].tolist() + [END] * (4 - found.tokens.shape[1])
    assert tuple(padded) == best
    assert float(found.log_prob) == pytest.approx(every[best], rel=1e-12)


def test_a_beam_of_one_is_greedy():
    m, x = seq2seq(), source()
    for end in (None, 4):
        greedy, beam = (m.generate(x, begin=0, end=end, steps=8, how=how) for how in (rg.Greedy(), rg.Beam(1)))
        assert torch.equal(greedy.tokens, beam.tokens)
        assert_same(greedy.log_prob, beam.log_prob)


def test_the_score_of_a_whole():
    total, lengths = torch.tensor([-3.0, -4.0]).double(), torch.tensor([7, 13])
    assert_same(rg.Beam(4, 0.5).score(total, lengths), torch.tensor([-3 / 2**0.5, -4 / 3**0.5], dtype=torch.float64))
    assert_same(rg.Beam(4).score(total, lengths), total)


def test_a_penalty_favours_the_long():
    class Choice:
        """Ends at once with probability 0.5, or after four more tokens of 0.85 each."""

        def __init__(self):
            self.written = torch.zeros(1, 0, dtype=torch.long)

        def step(self, tokens):
            self.written = torch.cat([self.written, tokens], 1)
            p = torch.full((len(tokens), 3), 1e-9, dtype=torch.float64)
            n = self.written.shape[1]
            p[:, END], p[:, 2] = (0.5, 0.5) if n == 1 else (0.15, 0.85) if n < 5 else (1.0, 1e-9)
            return p.log()

        def spread(self, times):
            self.written = self.written.repeat_interleave(times, 0)

        def reorder(self, rows):
            self.written = self.written[rows]

    begin = torch.zeros(1, 1, dtype=torch.long)
    short = rg.transformer.generate(Choice(), begin, steps=6, end=END, how=rg.Beam(4))
    long = rg.transformer.generate(Choice(), begin, steps=6, end=END, how=rg.Beam(4, penalty=2.0))
    assert short.tokens[0, 0] == END
    assert long.tokens[0, :5].tolist() == [2, 2, 2, 2, END]


def test_what_has_ended_stays_ended():
    m, x = seq2seq(), source()
    for how in (rg.Greedy(), rg.Beam(3), rg.Sample()):
        tokens = m.generate(x, begin=0, end=END, steps=30, how=how).tokens
        for row in tokens.tolist():
            if END in row:
                assert set(row[row.index(END) :]) == {END}


def test_samples_follow_the_distribution_they_say():
    torch.manual_seed(0)
    log_p = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03], dtype=torch.float64).log()
    count = 20000
    for how in (rg.Sample(), rg.Sample(0.5), rg.Sample(2.0, top_k=3), rg.Sample(top_p=0.65), rg.Sample(0.7, 4, 0.9)):
        p = how.distribution(log_p)
        picked = how.pick(log_p.expand(count, 5), torch.zeros(count, dtype=torch.float64))
        frequency = torch.bincount(picked.chosen, minlength=5) / count
        assert ((frequency - p).abs() <= 4 * (p * (1 - p) / count).sqrt() + 1e-12).all()
        assert_same(picked.total, log_p[picked.chosen])


def test_what_is_kept_of_a_distribution():
    p = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]], dtype=torch.float64)
    assert_same(rg.Sample(top_k=1).distribution(p.log()), torch.tensor([[0.0, 1, 0], [0, 0, 1]], dtype=torch.float64))
    kept = rg.Sample(top_p=0.75).distribution(p.log())
    assert_same(kept, torch.tensor([[0, 5 / 8, 3 / 8], [0, 0, 1]], dtype=torch.float64))
    assert_same(
        rg.Sample(top_p=1e-9).distribution(p.log()), torch.tensor([[0.0, 1, 0], [0, 0, 1]], dtype=torch.float64)
    )
    assert_same(rg.Sample(0.5).distribution(p.log()), p.square() / p.square().sum(-1, keepdim=True))
    assert_same(rg.Sample(top_k=9, top_p=1.0).distribution(p.log()), p)


def test_embeddings_are_scaled_below_and_tied_above():
    m = scrambled(rg.SequenceToSequence((5, 11), 8, 2, 1))
    assert_same(m.source(torch.tensor([3])), m.source.E[[3]] * math.sqrt(8))
    assert (m.source.E.shape, m.target.E.shape) == ((5, 8), (11, 8))
    assert m(torch.tensor([[1, 4]]), torch.tensor([[10]])).shape == (1, 1, 11)
    one = rg.SequenceToSequence(11, 8, 2, 1)
    assert one.source is one.target


def test_an_empty_batch():
    m = seq2seq()
    for how in (rg.Greedy(), rg.Beam(3)):
        assert m.generate(torch.zeros(0, 7, dtype=torch.long), begin=0, steps=2, how=how).tokens.shape[0] == 0


def test_paths_of_the_trace():
    m = seq2seq()
    with rg.record(m) as trace:
        m(source(), torch.zeros(2, 5, dtype=torch.long))
    assert list(trace) == [
        "transformer.encoder.layers.0.attention.attention",
        "transformer.encoder.layers.1.attention.attention",
        "transformer.decoder.layers.0.attention.attention",
        "transformer.decoder.layers.0.cross.attention",
        "transformer.decoder.layers.1.attention.attention",
        "transformer.decoder.layers.1.cross.attention",
    ]
    assert trace["transformer.decoder.layers.1.cross.attention"].weights.shape == (2, 2, 5, 7)


def test_refusals():
    m = rg.LanguageModel(11, 8, 2, 1)
    prompt = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(TypeError, match="how: got str, expected Greedy"):
        m.generate(prompt, steps=2, how="beam")
    with pytest.raises(ValueError, match="prompt: got shape"):
        m.generate(prompt[:, :0], steps=2)
    with pytest.raises(ValueError, match="steps: got 0"):
        m.generate(prompt, steps=0)
    with pytest.raises(ValueError, match="temperature: got 0.*Greedy"):
        rg.Sample(0)
    with pytest.raises(ValueError, match="top_p: got 1.5"):
        rg.Sample(top_p=1.5)
    with pytest.raises(ValueError, match="top_k: got 0"):
        rg.Sample(top_k=0)
    with pytest.raises(ValueError, match="paths: got 0"):
        rg.Beam(0)
    with pytest.raises(TypeError, match="tokens: got a tensor of torch.float32, expected integers"):
        m(torch.randn(2, 3))


@pytest.mark.parametrize("how", [rg.Greedy(), rg.Beam(3)])
def test_a_mask_that_all_sources_share(how):
    model = scrambled(rg.SequenceToSequence(11, 8, 2, 1)).eval()
    source, real = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([True, True, False])
    one = model.generate(source, real, begin=0, end=1, steps=4, how=how)
    each = model.generate(source, real.expand(2, 3), begin=0, end=1, steps=4, how=how)
    assert one.tokens.equal(each.tokens)
    assert one.log_prob.equal(each.log_prob)


def test_tokens_that_are_none_are_refused():
    model, prompt = rg.LanguageModel(11, 8, 2, 1), torch.tensor([[3, 4]])
    for end in (11, -1, 1.0, "1", True):
        with pytest.raises(ValueError, match="end: got .*, expected a token, from 0 to 10"):
            model.generate(prompt, end=end, steps=2)
    assert model.generate(prompt, end=torch.tensor(10), steps=1).tokens.shape == (1, 1)
    with pytest.raises(TypeError, match="prompt: got list, expected a tensor of integers"):
        model.generate([[3, 4]], steps=2)
    both = rg.SequenceToSequence((7, 11), 8, 2, 1)
    with pytest.raises(ValueError, match="begin: got 11, expected a token, from 0 to 10"):
        both.generate(prompt, begin=11, steps=2)
    with pytest.raises(ValueError, match=r"source: got shape \(2,\), expected \(batch, N\)"):
        both.generate(prompt[0], begin=0, steps=2)


def test_numbers_that_are_none_are_refused():
    for penalty in (math.nan, math.inf, "0.6"):
        with pytest.raises(ValueError, match="penalty: got .*, expected a finite number"):
            rg.Beam(2, penalty=penalty)
    with pytest.raises(ValueError, match="temperature: got '1', expected a number > 0"):
        rg.Sample("1")
    with pytest.raises(ValueError, match="top_p: got '1', expected a probability"):
        rg.Sample(top_p="1")


def test_a_reformer_reads_its_whole_text_again_for_every_token():
    model = scrambled(rg.ReformerLanguageModel(11, 8, 2, 2, chunk=3)).eval()
    prompt = torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(0))
    found = model.generate(prompt, steps=6)
    text, total = prompt, torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(6):
            best, chosen = model(text)[:, -1].log_softmax(-1).max(-1)
            total, text = total + best, torch.cat([text, chosen[:, None]], 1)
    assert torch.equal(found.tokens, text[:, 4:])
    assert_same(found.log_prob, total)


def test_a_beam_of_a_reformer_follows_its_paths():
    """Were the texts not reordered with the paths, the probabilities would be those of others."""
    moved = 0
    for seed in range(6):
        model = scrambled(rg.ReformerLanguageModel(7, 8, 2, 1, chunk=3), seed=seed).eval()
        prompt = torch.tensor([[2, 3], [4, 5]])
        found, total = model.generate(prompt, steps=5, how=rg.Beam(3)), torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for t in range(5):
                log_p = model(torch.cat([prompt, found.tokens[:, :t]], 1))[:, -1].log_softmax(-1)
                total += log_p.gather(-1, found.tokens[:, t : t + 1]).squeeze(-1)
        assert_same(found.log_prob, total)
        moved += int((found.log_prob > model.generate(prompt, steps=5).log_prob + 1e-12).sum())
    assert moved
