"""Hashed attention: what it sees, round by round, and that every execution computes the same of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import explain_dispatch
from regard.ops.buckets import HOLE, Buckets, HashedMask
from regard.ops.dispatch import choose
from regard.ops.hashed import HashedCall
from regard.transformer import Hashes
from tests.cases import assert_same, scrambled
from tests.transformer.common import EXECUTIONS, tokens

MASKS = {
    "none": None,
    "causal": rg.Causal(),
    "window": rg.Window(4),
    "before": rg.Directional("forward"),
    "padded": rg.Keys(torch.arange(13) < torch.tensor([[13], [6]])),
    "padded, causal": rg.Causal() & rg.Keys(torch.arange(13) < torch.tensor([[13], [6]])),
    "any pairs": torch.rand(2, 13, 13, generator=torch.Generator().manual_seed(5)) < 0.6,
}
every_mask = pytest.mark.parametrize("mask", MASKS)


def made(dim: int = 6, heads: int = 2, seed: int = 3, **options) -> rg.LSHAttention:
    torch.manual_seed(seed)
    return scrambled(rg.LSHAttention(dim, heads, **({"rounds": 3, "chunk": 3, "bias": True} | options))).eval()


def allowed_of(mask, b: int, n: int) -> list[list[list[bool]]]:
    """A mask written out, (B, N, N)."""
    if mask is None:
        return [[[True] * n] * n] * b
    bound = rg.general.masks.as_mask(mask).bind(rg.general.bound.Sizes((b,), n, n))
    return bound.tile(range(n), range(n), torch.device("cpu")).expand(b, n, n).tolist()


def hashed_one_by_one(x: Tensor, rotations: Tensor, real: list[bool], chunk: int) -> list[int | None]:
    """The bucket of each token of one head in one round, x (N, d) and rotations (d, columns)."""
    columns = math.ceil(sum(real) / chunk)
    found: list[int | None] = []
    for t in range(len(x)):
        sides = [float(x[t] @ rotations[:, c]) for c in range(columns)]
        both = sides + [-s for s in sides]
        found.append(max(range(2 * columns), key=both.__getitem__) if real[t] else None)
    return found


def seen_one_by_one(buckets: list[int | None], chunk: int, ahead: bool, across: bool) -> set[tuple[int, int]]:
    """Pairs (asking, shown) that one round sees."""
    line = sorted((t for t, bucket in enumerate(buckets) if bucket is not None), key=lambda t: (buckets[t], t))
    chunks = [line[k : k + chunk] for k in range(0, len(line), chunk)]
    pairs = set()
    for c, asking in enumerate(chunks):
        shown = [*(chunks[c - 1] if c else []), *asking, *(chunks[c + 1] if ahead and c + 1 < len(chunks) else [])]
        pairs |= {(i, j) for i in asking for j in shown if across or buckets[i] == buckets[j]}
    return pairs


def read_by_rounds(q: Tensor, v: Tensor, rounds: list[set[tuple[int, int]]], allowed: list[list[bool]]) -> Tensor:
    """The paper's way: each round by itself, scores less log N_ij, rounds weighed by their log-sum-exps."""
    n, result = len(q), torch.zeros_like(v)
    for i in range(n):
        outputs, sums = [], []
        for pairs in rounds:
            keys = [j for j in range(n) if (i, j) in pairs and allowed[i][j]]
            if not keys:
                continue
            # The token itself weighs next to nothing beside any other.
            scores = torch.stack(
                [
                    q[i] @ (q[j] / q[j].norm())
                    - math.log(sum((i, j) in other for other in rounds))
                    - (1e5 if i == j else 0.0)
                    for j in keys
                ]
            )
            outputs.append(torch.stack([w * v[j] for w, j in zip(scores.softmax(0), keys, strict=True)]).sum(0))
            sums.append(scores.logsumexp(0))
        if outputs:
            weights = torch.stack(sums).softmax(0)
            result[i] = sum(w * o for w, o in zip(weights, outputs, strict=True))
    return result


def looped(attend: rg.LSHAttention, x: Tensor, mask) -> Tensor:
    """The whole module, sequence by sequence and head by head."""
    b, n, _ = x.shape
    allowed, heads = allowed_of(mask, b, n), attend.heads
    empty = torch.zeros(heads, n, attend.W_V.shape[1])
    rotations = attend._rotations(empty, attend._directions(empty, None)).transpose(1, 2).double()
    ahead = not isinstance(mask, rg.Band) or mask.high > 0
    ahead = ahead and not (isinstance(mask, rg.general.masks.And))
    results = []
    for s in range(b):
        if isinstance(mask, rg.Band) or mask is None:
            real = [True] * n
        else:
            real = [any(allowed[s][i][j] for i in range(n)) for j in range(n)]
        contexts = []
        for h in range(heads):
            q = x[s] @ attend.W_QK[h].T + attend.b_QK[h]
            v = x[s] @ attend.W_V[h].T + attend.b_V[h]
            rounds = []
            for r in range(attend.rounds):
                if attend.buckets == 1:
                    buckets = [0 if real[t] else None for t in range(n)]
                else:
                    buckets = hashed_one_by_one(q, rotations[h, r], real, attend.chunk)
                rounds.append(seen_one_by_one(buckets, attend.chunk, ahead, attend.across_buckets))
            contexts.append(read_by_rounds(q, v, rounds, allowed[s]))
        joined = torch.cat(contexts, -1) @ attend.W_O.T + attend.b_O
        alive = torch.tensor([real[i] and any(allowed[s][i]) for i in range(n)])
        results.append(torch.where(alive[:, None], joined, 0.0))
    return torch.stack(results)


@every_mask
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_it_is_the_equations_of_the_paper_round_by_round(mask, across, execution):
    attend, x = made(across_buckets=across), tokens(2, 13, 6)
    with torch.no_grad(), EXECUTIONS[execution]():
        assert_same(attend(x, mask=MASKS[mask]), looped(attend, x, MASKS[mask]))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 12, 29])
@pytest.mark.parametrize("causal", [False, True])
def test_any_length(n, causal):
    """Shorter than a chunk, whole chunks, and anything between."""
    attend, x, mask = made(chunk=4), tokens(1, n, 6), rg.Causal() if causal else None
    with torch.no_grad():
        assert_same(attend(x, mask=mask), looped(attend, x, mask))


def test_shapes():
    assert rg.LSHAttention(6, 3, head_dim=5)(torch.randn(2, 3, 7, 6)).shape == (2, 3, 7, 6)
    assert rg.LSHAttention(6, 3)(torch.randn(7, 6)).shape == (7, 6)
    assert rg.LSHAttention(6, 3)(torch.randn(2, 0, 6)).shape == (2, 0, 6)


@every_mask
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_executions_agree_in_every_gradient(mask, dropout):
    attend, x = made(dropout=dropout).train(dropout > 0), tokens(2, 13, 6).requires_grad_()
    found = {}
    for name, execution in EXECUTIONS.items():
        torch.manual_seed(7)
        with execution():
            result = attend(x, mask=MASKS[mask])
            gradients = torch.autograd.grad((result * tokens(2, 13, 6, seed=9)).sum(), [x, *attend.parameters()])
            found[name] = [result.detach(), *gradients]
    for name in ("auto", "blockwise"):
        for one, other in zip(found[name], found["dense"], strict=True):
            assert_same(one, other, name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck(causal, dropout):
    attend = made(4, 2, chunk=2, rounds=2, dropout=dropout).train(dropout > 0)
    x, kept = tokens(1, 7, 4).requires_grad_(), Hashes()
    mask = rg.Causal() if causal else None
    with torch.no_grad():
        attend(x, mask=mask, hashes=kept)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(0)
        names = [name for name, _ in attend.named_parameters()]
        state = dict(zip(names, parameters, strict=True))
        # The buckets are constants of the derivative.
        return torch.func.functional_call(attend, state, (x,), {"mask": mask, "hashes": kept})

    assert torch.autograd.gradcheck(run, (x, *attend.parameters()), fast_mode=True)


def test_it_is_computed_by_chunks_and_says_so():
    attend = made()
    with rg.record(attend) as trace:
        attend(tokens(2, 13, 6), mask=rg.Causal())
    call = trace["attention"].call
    assert isinstance(call, HashedCall)
    assert choose(call, "auto").path == "chunked"
    assert choose(call, "dense").path == "dense"
    with rg.record(attend) as trace:
        attend(tokens(2, 13, 6), mask=MASKS["any pairs"])
    assert "no band" in trace["attention"].call.why_not_chunked()
    assert explain_dispatch(rg.Attention("dot"), torch.randn(3, 2), torch.randn(3, 2)).path == "fused"


def test_weights_are_of_what_is_seen():
    attend, x = made(rounds=2), tokens(2, 13, 6)
    with rg.record(attend) as trace:
        attend(x, mask=rg.Causal())
    weights, mask = trace["attention"].weights, trace["attention"].call.mask
    seen = mask.tile(range(13), range(13), torch.device("cpu"))
    assert weights.shape == (2, 2, 13, 13)
    assert_same(weights.sum(-1), torch.ones(2, 2, 13, dtype=torch.float64))
    assert ((weights > 0) == seen).all()
    own = seen.diagonal(dim1=-2, dim2=-1)
    assert not (own & (seen.sum(-1) > 1)).any()
    assert own[..., 0].all()
    assert not own.all()


def test_interventions_reach_it():
    attend, x = made(), tokens(2, 13, 6)
    with rg.record(attend) as trace, rg.intervene(attend, "uniform"):
        attend(x)
    weights = trace["attention"].weights
    row = weights[0, 0, 5]
    assert_same(row[row > 0], torch.full_like(row[row > 0], 1 / int((row > 0).sum())))
    with rg.record(attend) as trace, rg.intervene(attend, "erased", keys=[4]):
        attend(x)
    assert not trace["attention"].weights[..., 4].any()


def test_padding_changes_nothing_whatever_it_holds():
    attend, x = made(), tokens(1, 9, 6)
    expected = attend(x)
    for n in (10, 13, 30):
        longer = torch.full((1, n, 6), math.nan, dtype=torch.float64)
        longer[:, :9] = x
        found = attend(longer, mask=rg.Keys(torch.arange(n)[None] < 9))
        assert_same(found[:, :9], expected)
        assert not found[:, 9:].any()


def test_evaluation_repeats_itself_and_training_does_not():
    attend, x = made(16, 2, chunk=2, rounds=1), tokens(1, 29, 16)
    assert torch.equal(attend(x), attend(x))
    attend.train()
    assert not torch.equal(attend(x), attend(x))
    copy = rg.LSHAttention(16, 2, chunk=2, rounds=1, bias=True).double().eval()
    copy.load_state_dict(attend.state_dict())
    assert torch.equal(copy(x), attend.eval()(x))


def test_a_hash_knows_directions_only():
    attend, q = made(), tokens(2, 2, 13, 3)
    ids = attend.hash(q)
    assert ids.shape == (2, 2, 3, 13)
    assert torch.equal(ids, attend.hash(7.0 * q))
    assert not torch.equal(ids, attend.hash(-q))
    assert torch.equal(attend.hash(q, torch.zeros(2, 13, dtype=torch.bool)), torch.full_like(ids, HOLE))
    assert len({tuple(row) for row in ids.flatten(0, 2).tolist()}) > 2


def test_kept_hashes_are_used_again():
    attend, x, kept = made(), tokens(2, 13, 6), Hashes()
    expected = attend(x, hashes=kept)
    assert_same(attend.train()(x, hashes=kept), expected)


def test_more_rounds_see_more():
    torch.manual_seed(0)
    x, counts = torch.randn(1, 60, 16), []
    for rounds in (1, 2, 4, 8):
        attend = rg.LSHAttention(16, 1, rounds=rounds, chunk=8).eval()
        with rg.record(attend) as trace:
            attend(x)
        counts.append(float((trace["attention"].weights > 0).float().mean()))
    assert counts == sorted(counts)
    assert counts[-1] > 3 * counts[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_wide_statistics(dtype):
    attend = made(8, 2, chunk=8).to(dtype)
    x = (4 * tokens(2, 61, 8)).to(dtype)
    kept = Hashes()
    with torch.no_grad(), rg.execution("auto"):
        found = attend(x, mask=rg.Causal(), hashes=kept)
    with torch.no_grad(), rg.execution("dense"):
        exact = attend.double()(x.double(), mask=rg.Causal(), hashes=kept)
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < 8 * torch.finfo(dtype).eps


def test_the_mask_knows_its_parts():
    ids = torch.tensor([[[0, 1, 0, HOLE, 1]]])
    mask = HashedMask(Buckets.of(ids, 2), high=0)
    whole = mask.tile(range(5), range(5), torch.device("cpu"))
    assert torch.equal(mask.tile(range(1, 4), range(2, 5), torch.device("cpu")), whole[..., 1:4, 2:5])
    assert mask.keys(torch.device("cpu")).tolist() == [[True, True, True, False, True]]
    assert torch.equal(mask.rows(torch.device("cpu")), whole.any(-1))
    before = HashedMask(Buckets.of(ids, 2), high=-1)
    assert torch.equal(before.rows(torch.device("cpu")), before.tile(range(5), range(5), torch.device("cpu")).any(-1))


def test_inside_an_ordinary_encoder():
    encode = rg.TransformerEncoder(6, 2, 2, attention=lambda dim, heads: rg.LSHAttention(dim, heads, chunk=3)).eval()
    x, real = torch.randn(2, 11, 6), torch.arange(11) < torch.tensor([[11], [5]])
    with rg.record(encode) as trace:
        found = encode(x, real)
    assert trace["layers.1.attention.attention"].weights.shape == (2, 2, 11, 11)
    assert torch.allclose(found[1, :5], encode(x[1:, :5])[0], atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match="buckets: got 3, expected 1, or an even number"):
        rg.LSHAttention(6, 2, buckets=3)
    with pytest.raises(ValueError, match="heads: got 4, expected a divisor of the width 6"):
        rg.LSHAttention(6, 4)
    with pytest.raises(ValueError, match="rounds: got 0"):
        rg.LSHAttention(6, 2, rounds=0)
    with pytest.raises(ValueError, match=r"tokens: got shape \(2, 5\), expected \(..., N, 6\)"):
        rg.LSHAttention(6, 2)(torch.randn(2, 5))
    with pytest.raises(ValueError, match="tokens: got 17000 of them in chunks of 1, expected at most 32767 buckets"):
        rg.LSHAttention(2, 1, chunk=1)(torch.randn(17000, 2))
    with pytest.raises(ValueError, match="mask: got shape"):
        rg.LSHAttention(6, 2)(torch.randn(2, 5, 6), mask=torch.ones(4, 4, dtype=torch.bool))
    for mask in (rg.Packed([2, 3]), rg.Causal() & rg.Packed([2, 3])):
        with pytest.raises(ValueError, match="mask: got Packed, several sequences, expected one sequence"):
            rg.LSHAttention(6, 2)(torch.randn(2, 5, 6), mask=mask)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mask", [None, rg.Causal()])
def test_what_is_not_finite_stays_in_its_sequence_and_is_not_hidden_there(bad, mask):
    """Chunks of all sequences stand side by side, and a weight of zero does not stop a NaN."""
    m, x = scrambled(rg.LSHAttention(6, 2, rounds=2, chunk=3)).eval(), tokens(3, 11, 6)
    expected = m(x, mask=mask)
    x[1] = bad
    x.requires_grad_()
    result = m(x, mask=mask)
    assert result[1].isnan().all()
    assert torch.equal(result[::2], expected[::2])
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert grad[::2].isfinite().all()
    assert grad[1].isnan().all()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_queries_that_are_not_finite_are_not_hidden_where_a_token_reads_itself(execution):
    """The first one sees nobody else, and reads a value that is finite."""
    attend, x = made(bias=False), tokens(1, 13, 6)
    with torch.no_grad(), EXECUTIONS[execution]():
        attend.W_QK.fill_(math.nan)
        assert attend(x, mask=rg.Causal()).isnan().all()
