"""What several ranks must find, each on its own slice: run in real processes by tests/ops/parallel_worker.py.

A case is a function of `Ranks`; every rank calls it, and what it raises on any of them is a failure of that case.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from regard import parallel
from regard.feature.affinity import Sides
from regard.ops.parallel.ranks import current
from tests.cases import scrambled

B, DQ, DK, DV = 2, 3, 5, 7


@dataclass
class Ranks:
    """One rank among others, and how a sequence is cut."""

    mesh: DeviceMesh
    rank: int
    size: int

    def cut(self, x: Tensor, lengths: tuple[int, ...], axis: int = -2) -> Tensor:
        """This rank's slice, a tensor of its own."""
        first = sum(lengths[: self.rank])
        return x.detach().narrow(axis, first, lengths[self.rank]).clone()

    def summed(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total


CASES: dict[str, tuple[int, Callable[[Ranks], None]]] = {}


def case(name: str, size: int = 3) -> Callable[[Callable[[Ranks], None]], Callable[[Ranks], None]]:
    def register(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
        assert name not in CASES
        CASES[name] = (size, function)
        return function

    return register


def close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}")


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as error:
        yield
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in {error.value}"


@dataclass
class Whole:
    """Inputs of a whole call, and what of them goes to a rank."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    width: int | None = None  # of tokens that read themselves

    def inputs(self) -> dict[str, Tensor]:
        nq, n = sum(self.queries), sum(self.keys)
        x = {"query": torch.randn(B, nq, DQ), "key": torch.randn(B, n, DK), "value": torch.randn(B, n, DV)}
        return x if self.width is None else {"query": torch.randn(B, n, self.width)}

    def slices(self, ranks: Ranks, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: ranks.cut(t, self.queries if name == "query" else self.keys) for name, t in x.items()}


def one_rank() -> AbstractContextManager[None]:
    """A context in which this rank is alone."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return parallel.context(DeviceMesh.from_group(group, "cpu"))


def same_as_one_process(
    ranks: Ranks,
    module: nn.Module,
    whole: Whole,
    arguments: Callable[[bool], dict[str, Any]] = lambda whole: {},
    *,
    exchange: str = "ring",
    seed: int = 5,
    shared: bool = False,
) -> None:
    """Outputs, gradients of the inputs and summed gradients of the parameters are those of the whole sequence.

    Args:
        ranks: who is asking.
        module: called with the inputs and the arguments.
        whole: the sizes.
        arguments: keyword arguments, from whether they are for the whole sequence or for this rank. Tensors that learn are compared
            by their gradient, if this rank's have a function `whole_grad` that gives the expected one from the whole's.
        exchange: of the context.
        seed: of what is random.
        shared: whether the whole is computed in a context too, of one rank.
    """
    torch.manual_seed(seed)
    x = whole.inputs()
    expected_x = {name: t.clone().requires_grad_() for name, t in x.items()}
    own_x = {name: t.requires_grad_() for name, t in whole.slices(ranks, x).items()}
    of_whole, of_rank = arguments(True), arguments(False)
    torch.manual_seed(seed)
    with one_rank() if shared else nullcontext():
        expected = module(*expected_x.values(), **of_whole)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    parameters = {name: (p, p.grad.clone() if p.grad is not None else None) for name, p in module.named_parameters()}
    module.zero_grad()
    torch.manual_seed(seed + 0 if ranks.rank == 0 else seed + 100 + ranks.rank)
    with parallel.context(ranks.mesh, exchange=exchange):
        found = module(*own_x.values(), **of_rank)
    (found * ranks.cut(weight, whole.queries)).sum().backward()
    close(found, ranks.cut(expected, whole.queries), "context")
    for name, t in own_x.items():
        lengths = whole.queries if name == "query" else whole.keys
        grad = expected_x[name].grad
        if grad is None:
            assert t.grad is None or not t.grad.any(), f"{name} learns from nothing"
        else:
            close(t.grad, ranks.cut(grad, lengths), f"gradient of {name}")
    for name, (p, grad) in parameters.items():
        if grad is not None:
            assert p.grad is not None, f"{name} has no gradient"
            close(ranks.summed(p.grad), grad, f"gradient of {name}")
    module.zero_grad()
    for name, t in of_rank.items():
        if isinstance(t, Tensor) and t.requires_grad:
            close(t.grad, t.of_whole(of_whole[name].grad), f"gradient of {name}")
    # What follows is drawn alike on all ranks again.
    torch.manual_seed(seed)


SCORES: dict[str, Callable[[], rg.Score]] = {
    "general": lambda: rg.General(DQ, DK),
    "activated": lambda: rg.ActivatedGeneral(DQ, DK),
    "low-rank, features": lambda: rg.LowRankGeneral(DQ, DK, 2, features=DV),
    "additive": lambda: rg.Additive(DQ, DK, 4),
    "additive, any callable": lambda: rg.Additive(DQ, DK, 4, activation=torch.sin),
    "additive, features": lambda: rg.Additive(DQ, DK, 4, features=DV),
    "additive, heads": lambda: rg.Additive(DQ, DK, 4, heads=B),
    "query-free": lambda: rg.QueryFree(DK, 4),
}
FOLDING: dict[str, Callable[[], rg.Alignment]] = {
    "soft": lambda: rg.Soft(0.7),
    "learned temperature": lambda: rg.Soft(1.3, learnable=True),
    "hard": lambda: rg.Hard(),
    "reinforce": lambda: rg.Hard("reinforce"),
    "gumbel": lambda: rg.Hard("gumbel", temperature=0.8),
    "gumbel-straight-through": lambda: rg.Hard("gumbel-straight-through", temperature=0.8),
    "local": lambda: rg.Local(1.5),
    "predictive": lambda: rg.Local(2, "predictive", query_dim=DQ),
    "renormalized": lambda: rg.Local(1, "predictive", query_dim=DQ, renormalize=True),
    "reinforced": lambda: rg.Reinforced(DK),
}
ROWS: dict[str, Callable[[], rg.Alignment]] = {
    "sparsemax": lambda: rg.Sparsemax(),
    "entmax": lambda: rg.Entmax(1.5),
    "learned entmax": lambda: rg.Entmax(1.4, learnable=True),
    "chain": lambda: rg.LinearChain(),
}
LENGTHS = {
    3: [((4, 2, 5), (3, 5, 2)), ((1, 6, 3), (4, 0, 3)), ((0, 5, 2), (2, 4, 1)), ((3, 3, 3), (1, 1, 1))],
    2: [((5, 3), (2, 6)), ((4, 7), (7, 4))],
    4: [((2, 0, 5, 3), (1, 4, 0, 6)), ((3, 1, 4, 2), (3, 1, 4, 2))],
}


def masks(ranks: Ranks, whole: Whole) -> dict[str, Callable[[bool], Any]]:
    """Masks of a whole call, and what this rank gives for the same."""
    nq, n = sum(whole.queries), sum(whole.keys)
    real = torch.rand(B, n) < 0.7
    pairs = torch.rand(B, nq, n) < 0.6
    lengths = torch.tensor([n, max(n - 3, 0)])

    def keys(of_whole: bool) -> Tensor:
        return real if of_whole else ranks.cut(real, whole.keys, -1)

    def rows(of_whole: bool) -> Tensor:
        return pairs if of_whole else ranks.cut(pairs, whole.queries)

    def apart(i: Tensor, j: Tensor) -> Tensor:
        return (i + 2 * j) % 3 > 0

    return {
        "nothing": lambda _: None,
        "causal": lambda _: rg.Causal(),
        "window": lambda _: rg.Window(2),
        "forward": lambda _: rg.Directional("forward"),
        "padding": lambda _: rg.Padding(lengths),
        "keys": lambda of_whole: rg.Keys(keys(of_whole)),
        "keys, as booleans": lambda of_whole: keys(of_whole).unsqueeze(-2),
        "pairs": rows,
        "where": lambda _: rg.Where(apart),
        "causal and keys": lambda of_whole: rg.Causal() & rg.Keys(keys(of_whole)),
        "window or keys": lambda of_whole: rg.Window(1) | rg.Keys(keys(of_whole)),
        "where and pairs": lambda of_whole: rg.Where(apart) & rows(of_whole),
        "others": lambda _: rg.query.Others(),
        "packed": lambda _: rg.Packed((1, n - 1), (nq // 2, nq - nq // 2)),
        "packed, by both": lambda _: rg.Packed((1, n - 1), (nq // 2, nq - nq // 2)) & rg.Causal(),
        "nobody": lambda _: rg.Where(lambda i, j: i + j < 0),
        "window and padding": lambda _: rg.Window(2) & rg.Padding(lengths),
        "prefix": lambda _: rg.Causal() | rg.Padding(torch.tensor([min(3, n), 0])),
        "two bands": lambda _: rg.Band(-4, -3) | rg.Band(2, 2),
    }


def _grid() -> None:
    """Each score with each alignment, masks and lengths taken in turn; each mask with both forms, and by both exchanges."""
    names = [
        "nothing", "causal", "keys", "window", "pairs", "causal and keys", "padding", "where", "forward", "window or keys",
        "where and pairs", "others", "keys, as booleans", "nobody", "packed", "packed, by both",
        "window and padding", "prefix", "two bands",
    ]  # fmt: skip
    turn = itertools.count()

    def add(score: str, align: str, mask: str, exchange: str, size: int) -> None:
        k = next(turn)
        queries, keys = LENGTHS[size][k % len(LENGTHS[size])]
        whole = Whole(queries, keys)

        @case(f"{score} | {align} | {mask} | {exchange} | {queries} x {keys}", size)
        def run(ranks: Ranks) -> None:
            made = {**FOLDING, **ROWS}[align]()
            attend = scrambled(rg.Attention(SCORES[score](), made))
            mask_of = masks(ranks, whole)[mask]
            with rg.execution("auto" if exchange == "gather" else "blockwise", panel=2):
                same_as_one_process(
                    ranks, attend, whole, lambda of_whole: {"mask": mask_of(of_whole)}, exchange=exchange
                )

    for k, (score, align) in enumerate(itertools.product(SCORES, FOLDING)):
        if score == "query-free" and align in ("predictive", "renormalized"):
            continue
        add(score, align, names[k % len(names)], "ring", 2 if k % 5 == 0 else 3)
    for k, (score, align) in enumerate(itertools.product(("general", "additive, features"), ROWS)):
        add(score, align, names[3 * k % len(names)], "gather", 2 if k % 5 == 0 else 3)
    for mask in ("window", "causal", "window and padding", "prefix", "packed", "packed, by both", "two bands"):
        for exchange in ("ring", "gather"):
            add("additive", "soft", mask, exchange, 2)
    for mask in names:
        add("general", "soft", mask, "ring", 3)
        add("additive", "soft", mask, "ring", 3)
        add("general", "soft", mask, "gather", 3)
    for align in FOLDING:
        add("additive", align, "causal and keys", "ring", 4)
    for align in ROWS:
        add("general", align, "window or keys", "gather", 4)


_grid()


def _module(
    name: str, make: Callable[[], nn.Module], arguments: Callable[[Ranks], Any] | None = None, width: int = DK
) -> None:
    """A mechanism that reads itself, with the padding that each rank knows of its own tokens."""

    @case(name)
    def run(ranks: Ranks) -> None:
        whole = Whole((4, 2, 5), (4, 2, 5), width)
        real = torch.rand(B, 11) < 0.8

        def given(of_whole: bool) -> dict[str, Any]:
            own = real if of_whole else ranks.cut(real, whole.keys, -1)
            return {"mask": own} if arguments is None else arguments(ranks)(own)

        same_as_one_process(ranks, scrambled(make()), whole, given)


_module("SelfAttention", lambda: rg.SelfAttention(DK, score="additive", hidden_dim=4, pairs=rg.Causal()))
_module("SelfAttention, residual", lambda: rg.SelfAttention(DK, update="residual"))
_module(
    "MultiHeadAttention",
    lambda: rg.MultiHeadAttention(DK, 2, head_dim=4, bias=True),
    lambda ranks: lambda own: {"mask": rg.Keys(own) & rg.Window(3)},
)
_module(
    "MultiHeadAttention, a score each",
    lambda: rg.MultiHeadAttention(DK, 2, head_dim=4, score=["additive", "scaled-dot"], hidden_dim=3),
    lambda ranks: lambda own: {"mask": rg.Keys(own)},
)
for _position in ("sinusoidal", "learned", "rotary", "alibi", "relative", "transformer-xl", "directional"):
    _module(
        f"TransformerEncoder, {_position}",
        lambda position=_position: rg.TransformerEncoder(
            6, 2, 2, position=position, head_dim=4, norm="pre", feedforward_dim=6
        ),
        width=6,
    )


@case("LanguageModel")
def language_model(ranks: Ranks) -> None:
    lengths, model = (4, 2, 5), scrambled(rg.LanguageModel(13, 6, 2, 2, position="learned", feedforward_dim=6))
    tokens, weight = torch.randint(13, (B, 11)), torch.randn(B, 11, 13)
    expected = model(tokens)
    (expected * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with parallel.context(ranks.mesh):
        found = model(ranks.cut(tokens, lengths, -1))
    (found * ranks.cut(weight, lengths)).sum().backward()
    close(found, ranks.cut(expected, lengths), "logits")
    for name, p in model.named_parameters():
        close(ranks.summed(p.grad), grads[name], name)


def _reads_a_memory(name: str, make: Callable[[], nn.Module], memory_first: bool) -> None:
    """Tokens and what they read beside themselves are cut at different places."""

    @case(name)
    def run(ranks: Ranks) -> None:
        tokens, memory, module = (4, 2, 5), (3, 5, 2), scrambled(make())
        x, y, weight = torch.randn(B, 11, 6), torch.randn(B, 10, 6), torch.randn(B, 11, 6)
        whole = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        own = [ranks.cut(x, tokens).requires_grad_(), ranks.cut(y, memory).requires_grad_()]
        (module(*whole[:: -1 if memory_first else 1]) * weight).sum().backward()
        with parallel.context(ranks.mesh):
            (module(*own[:: -1 if memory_first else 1]) * ranks.cut(weight, tokens)).sum().backward()
        close(own[0].grad, ranks.cut(whole[0].grad, tokens), "gradient of the tokens")
        close(own[1].grad, ranks.cut(whole[1].grad, memory), "gradient of the memory")


_small = {"position": "sinusoidal", "feedforward_dim": 6}
_reads_a_memory("TransformerDecoder", lambda: rg.TransformerDecoder(6, 2, 2, **_small), memory_first=False)
_reads_a_memory("Transformer", lambda: rg.Transformer(6, 2, 1, **_small), memory_first=True)


def learned(x: Tensor, of_whole: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor that knows which part of the whole's gradient is its own."""
    x = x.detach().clone().requires_grad_()
    x.of_whole = of_whole  # type: ignore[attr-defined]
    return x


@case("bias of pairs, learned")
def bias_of_pairs(ranks: Ranks) -> None:
    whole = Whole((4, 2, 5), (3, 5, 2))
    bias = torch.randn(B, 11, 10)

    def given(of_whole: bool) -> dict[str, Any]:
        cut = lambda x: x if of_whole else ranks.cut(x, whole.queries)  # noqa: E731
        return {"bias": learned(cut(bias), cut)}

    for exchange in ("ring", "gather"):
        with rg.execution("blockwise", panel=2):
            same_as_one_process(ranks, scrambled(rg.Attention(rg.Additive(DQ, DK, 4))), whole, given, exchange=exchange)


@case("bias of keys, learned")
def bias_of_keys(ranks: Ranks) -> None:
    whole = Whole((4, 2, 5), (3, 5, 2))
    bias = torch.randn(B, 1, 10)

    def given(of_whole: bool) -> dict[str, Any]:
        cut = lambda x: x if of_whole else ranks.cut(x, whole.keys, -1)  # noqa: E731
        return {"bias": learned(cut(bias), cut)}

    for exchange in ("ring", "gather"):
        same_as_one_process(ranks, scrambled(rg.Attention(rg.General(DQ, DK))), whole, given, exchange=exchange)


@case("bias as a function, and a start")
def bias_of_places(ranks: Ranks) -> None:
    def given(of_whole: bool) -> dict[str, Any]:
        return {"bias": lambda i, j: torch.sin(3.0 * i - j), "start": 4}

    for align in (rg.Soft(), rg.Local(2)):
        same_as_one_process(
            ranks, scrambled(rg.Attention(rg.General(DQ, DK), align)), Whole((4, 2, 5), (3, 5, 2)), given
        )


@case("a learned function works by gathering")
def hidden_bias(ranks: Ranks) -> None:
    table = nn.Parameter(torch.randn(11, 10))
    attend = scrambled(rg.Attention(rg.General(DQ, DK)))
    attend.table = table  # a parameter of the module, so that its gradient is compared

    def given(of_whole: bool) -> dict[str, Any]:
        return {"bias": lambda i, j: table[i, j]}

    whole = Whole((4, 2, 5), (3, 5, 2))
    same_as_one_process(ranks, attend, whole, given, exchange="gather")
    own = whole.slices(ranks, whole.inputs())
    with parallel.context(ranks.mesh), refused(NotImplementedError, "bias: got a function that learns", "gather"):
        attend(*own.values(), **given(False))


@case("an activation with parameters is refused by the ring")
def hidden_activation(ranks: Ranks) -> None:
    attend = rg.Attention(rg.Additive(DQ, DK, 4, activation=nn.PReLU()))
    whole = Whole((4, 2, 5), (3, 5, 2))
    own = whole.slices(ranks, whole.inputs())
    with parallel.context(ranks.mesh), refused(NotImplementedError, "activation: got a function that learns"):
        attend(*own.values())
    same_as_one_process(ranks, attend, whole, exchange="gather")


@case("dropout is drawn by the places of the whole")
def dropout(ranks: Ranks) -> None:
    for align, exchange in itertools.product(("soft", "hard", "local", "reinforced"), ("ring", "gather")):
        attend = scrambled(rg.Attention(rg.Additive(DQ, DK, 4), FOLDING[align](), dropout=0.4))
        with rg.execution("blockwise", panel=2):
            same_as_one_process(ranks, attend, Whole((4, 2, 5), (3, 5, 2)), exchange=exchange)


@case("windows of alignments, and what is dropped in them")
def windows(ranks: Ranks) -> None:
    made = [rg.Local(1.5), rg.Local(1, gaussian=False), rg.Local(2, renormalize=True)]
    for align, mask, start, exchange in itertools.product(made, (None, rg.Causal()), (0, 2, -7), ("ring", "gather")):
        attend = scrambled(rg.Attention(rg.Additive(DQ, DK, 4), align, dropout=0.4))
        for lengths in ((4, 2, 5), (7, 0, 6)):
            with rg.execution("blockwise", panel=2):
                same_as_one_process(
                    ranks,
                    attend,
                    Whole(lengths, lengths),
                    lambda _, mask=mask, start=start: {"mask": mask, "start": start},
                    exchange=exchange,
                )
    for align, exchange in itertools.product((rg.Soft(), rg.Hard(), rg.Reinforced(DK)), ("ring", "gather")):
        attend = scrambled(rg.Attention(rg.General(DQ, DK), align, dropout=0.4))
        for mask in (rg.Window(2), rg.Causal() & rg.Window(3), rg.Band(-4, -3) | rg.Band(2, 2)):
            with rg.execution("blockwise", panel=2):
                same_as_one_process(
                    ranks, attend, Whole((4, 2, 5), (4, 2, 5)), lambda _, mask=mask: {"mask": mask}, exchange=exchange
                )


def _long(name: str, size: int, lengths: tuple[int, ...]) -> None:
    """Sequences of which blocks of queries and panels of several rows see a part."""

    @case(f"long sequences, {name}", size)
    def run(ranks: Ranks) -> None:
        whole, n = Whole(lengths, lengths), sum(lengths)
        real = torch.rand(B, n) < 0.8

        def both(of_whole: bool) -> rg.Mask:
            return rg.Window(5) & rg.Keys(real if of_whole else ranks.cut(real, whole.keys, -1))

        given = [
            lambda _: rg.Window(5),
            lambda _: rg.Window(5) & rg.Padding(torch.tensor([n, n - 300])),
            both,
            lambda _: rg.Band(-70, -2),
            lambda _: rg.Causal(),
            lambda _: rg.Packed([n - 500, 0, 200, 300]) & rg.Causal(),
        ]
        attend = scrambled(rg.Attention(rg.Additive(DQ, DK, 2)))
        dropping = scrambled(rg.Attention(rg.General(DQ, DK), dropout=0.3))
        for exchange, mask in itertools.product(("ring", "gather"), given):
            same_as_one_process(ranks, attend, whole, lambda which, mask=mask: {"mask": mask(which)}, exchange=exchange)
        for exchange, mask in itertools.product(("ring", "gather"), given[::2]):
            same_as_one_process(
                ranks, dropping, whole, lambda which, mask=mask: {"mask": mask(which)}, exchange=exchange
            )


_long("uneven", 3, (400, 130, 370))
_long("an empty slice", 3, (450, 0, 451))
_long("two ranks", 2, (333, 567))


@case("keys that no query of a rank reaches are passed on, and nothing more")
def spared(ranks: Ranks) -> None:
    from regard.ops import blockwise
    from regard.ops.banded import why_not_banded
    from regard.ops.parallel import ring

    n, attend, computed = 1024, rg.Attention("additive", query_dim=4, key_dim=4, hidden_dim=2, dropout=0.1), []
    x = torch.randn(1, n, 4, requires_grad=True)

    def pairs(mask: rg.Mask | None, exchange: str) -> int:
        computed.clear()
        with parallel.context(ranks.mesh, exchange=exchange):
            attend(x, x, mask=mask).sum().backward()
        return sum(computed)

    def of_ring(call: Any, given: Any, i: range, j: range) -> Any:
        computed.append(len(i) * len(j))
        return beside(call, given, i, j)

    def of_panel(call: Any, j: range) -> Any:
        computed.append(len(j))
        return near(call, j)

    beside, near = ring.beside, blockwise.beside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "beside", of_ring)
        patch.setattr(blockwise, "beside", of_panel)
        everything = pairs(None, "ring")
        assert everything == 2 * ranks.size * n * n
        # A block and what is left of its neighbours, computed twice.
        assert pairs(rg.Window(8), "ring") < 2 * n * 300
        causal = pairs(rg.Causal(), "ring")
        assert 2 * ranks.rank * n * n < causal < 2 * (ranks.rank + 0.8) * n * n
        assert max(computed, default=0) <= 1 << 20
        assert pairs(rg.Window(8), "gather") < 0.5 * pairs(None, "gather")
    plain = rg.Attention("dot")
    with parallel.context(ranks.mesh, exchange="gather"):
        assert why_not_banded(plain.call(x, x, mask=rg.Window(8)).whole()) is None


@case("a rank alone costs what no context costs", 1)
def alone(ranks: Ranks) -> None:
    x = torch.randn(1, 900, 4)
    attend = rg.Attention("additive", query_dim=4, key_dim=4, hidden_dim=2)
    for exchange, mask in itertools.product(("ring", "gather"), (None, rg.Causal(), rg.Window(4))):
        outside = str(rg.explain_dispatch(attend, x, x, mask=mask))
        expected = attend(x, x, mask=mask)
        with parallel.context(ranks.mesh, exchange=exchange):
            said = str(rg.explain_dispatch(attend, x, x, mask=mask))
            assert said == f"parallel: one rank, as without a context: {outside}"
            assert torch.equal(attend(x, x, mask=mask), expected)


@case("layers drop what tokens hold by the places of the whole")
def dropped_tokens(ranks: Ranks) -> None:
    options = {"position": "rotary", "head_dim": 4, "feedforward_dim": 6, "dropout": 0.5, "attention_dropout": 0.2}
    encoder = scrambled(rg.TransformerEncoder(6, 2, 2, **options))
    for lengths in ((4, 2, 5), (6, 0, 5)):
        same_as_one_process(ranks, encoder, Whole(lengths, lengths, 6), shared=True)
    # A panel of places at a time; one token without an axis of tokens is one of each rank.
    wide = rg.FeedForward(6, 60_000, dropout=0.5)
    same_as_one_process(ranks, wide, Whole((4, 2, 5), (4, 2, 5), 6), shared=True)
    with parallel.context(ranks.mesh):
        assert wide(torch.randn(6)).shape == (6,)
        with refused(ValueError, "dropout: got rank 0: 0.25; rank 1: 0.5; rank 2: 0.75"):
            rg.FeedForward(6, 6, dropout=0.25 * (1 + ranks.rank))(torch.randn(B, 3, 6))
        gone = rg.FeedForward(6, 6, dropout=1.0)
        assert torch.equal(gone(torch.randn(B, 3, 6)), gone.b2.expand(B, 3, 6))


@case("a single query of each rank")
def single(ranks: Ranks) -> None:
    """Given the same on every rank, it reads the same."""
    key, query = torch.randn(B, 10, DK), torch.randn(B, DQ)
    real = torch.rand(B, 10) < 0.7
    own, seen = ranks.cut(key, (3, 5, 2)), ranks.cut(real, (3, 5, 2), -1)
    pooled, asked = scrambled(rg.Attention(rg.QueryFree(DK, 4))), scrambled(rg.Attention(rg.Additive(DQ, DK, 4)))
    with parallel.context(ranks.mesh):
        close(pooled(None, own, mask=seen), _alone(ranks, lambda: pooled(None, key, mask=real)), "without a query")
        close(asked(query, own, mask=seen), _alone(ranks, lambda: asked(query, key, mask=real)), "with a query")
        close(asked(query, own), _alone(ranks, lambda: asked(query, key)), "without a mask")


def _alone(ranks: Ranks, run: Callable[[], Tensor]) -> Tensor:
    """The result of one process, asked for inside of a context."""
    from regard.ops.parallel import ranks as module

    held, module._contexts[:] = list(module._contexts), []
    try:
        return run().detach()
    finally:
        module._contexts[:] = held


@case("NaN that nobody may read never arrives")
def padding(ranks: Ranks) -> None:
    real = torch.tensor([[True] * 3 + [False] * 4 + [True] * 3, [False] * 5 + [True] * 5])
    whole = Whole((4, 2, 5), (3, 5, 2))
    x = whole.inputs()
    own = whole.slices(ranks, x)
    seen = ranks.cut(real, whole.keys, -1)
    dirty = {name: t.clone() for name, t in own.items()}
    for name in ("key", "value"):
        dirty[name][~seen] = float("nan")
        dirty[name].requires_grad_()
    for align in ("soft", "hard", "local"):
        attend = scrambled(rg.Attention(rg.Additive(DQ, DK, 4), FOLDING[align]())).eval()
        with parallel.context(ranks.mesh):
            clean = attend(*own.values(), mask=rg.Keys(seen))
            found = attend(*dirty.values(), mask=rg.Keys(seen))
        found.sum().backward()
        assert torch.equal(found, clean)
        assert dirty["key"].grad.isfinite().all()
        assert (dirty["value"].grad[~seen] == 0).all()


@case("record shows this rank's rows over all keys, and changes nothing")
def recorded(ranks: Ranks) -> None:
    whole = Whole((4, 2, 5), (3, 5, 2))
    for align in ("soft", "hard", "predictive", "reinforced"):
        attend = scrambled(rg.Attention(rg.Additive(DQ, DK, 4), FOLDING[align]())).eval()
        x = whole.inputs()
        own = whole.slices(ranks, x)
        with rg.record(attend) as expected:
            attend(*x.values(), mask=rg.Causal())
        with parallel.context(ranks.mesh):
            plain = attend(*own.values(), mask=rg.Causal())
            with rg.record(attend) as trace:
                context = attend(*own.values(), mask=rg.Causal())
            with rg.record(attend, "topk", "entropy") as named:
                attend(*own.values(), mask=rg.Causal())
        assert torch.equal(plain, context)
        close(trace.weights, ranks.cut(expected.weights, whole.queries), "weights")
        close(named.entropy(), ranks.cut(expected.entropy(), whole.queries, -1), "entropy")
        (found, place), theirs = named.topk(), ranks.cut(expected.topk()[1], whole.queries)
        # Among equals any key will do.
        sure = found[..., 0] > found[..., 1]
        assert torch.equal(place[..., 0][sure], theirs[..., 0][sure])
        close(ranks.summed(trace.mass_received()), expected.mass_received(), "mass received")


@case("log-probabilities of a selection add up over the ranks")
def selection(ranks: Ranks) -> None:
    whole = Whole((4, 2, 5), (3, 5, 2))
    attend = scrambled(rg.Attention(rg.General(DQ, DK), rg.Reinforced(DK)))
    x = whole.inputs()
    own = whole.slices(ranks, x)
    torch.manual_seed(5)
    with rg.record(attend) as expected:
        attend(*x.values())
    torch.manual_seed(5 + ranks.rank)
    with parallel.context(ranks.mesh), rg.record(attend) as trace:
        attend(*own.values())
    close(ranks.summed(trace.log_prob()), expected.log_prob(), "log-probability")


@case("interventions")
def intervened(ranks: Ranks) -> None:
    whole = Whole((4, 2, 5), (3, 5, 2))
    attend = scrambled(rg.Attention(rg.Additive(DQ, DK, 4)))
    x = whole.inputs()
    own = whole.slices(ranks, x)
    with rg.intervene(attend, "uniform"):
        expected = attend(*x.values(), mask=rg.Causal())
        with parallel.context(ranks.mesh, exchange="gather"):
            found = attend(*own.values(), mask=rg.Causal())
        with parallel.context(ranks.mesh), refused(NotImplementedError, "Uniform has no fold"):
            attend(*own.values(), mask=rg.Causal())
    close(found, ranks.cut(expected, whole.queries), "uniform")
    with (
        rg.intervene(attend, "random"),
        parallel.context(ranks.mesh, exchange="gather"),
        refused(NotImplementedError, "alignment Random"),
    ):
        attend(*own.values())


@case("the other executions by gathering; explain_dispatch")
def executions(ranks: Ranks) -> None:
    whole = Whole((4, 2, 5), (3, 5, 2))
    attend = scrambled(rg.Attention(rg.General(DQ, DK)))
    x = whole.inputs()
    own = whole.slices(ranks, x)
    expected = ranks.cut(attend(*x.values()), whole.queries)
    for impl in ("dense", "fused", "blockwise"):
        with rg.execution(impl), parallel.context(ranks.mesh, exchange="gather"):
            close(attend(*own.values()), expected, impl)
    for impl in ("dense", "fused"):
        with rg.execution(impl), parallel.context(ranks.mesh), refused(NotImplementedError, f"impl='{impl}'"):
            attend(*own.values())
    with parallel.context(ranks.mesh):
        assert str(rg.explain_dispatch(attend, *own.values())).startswith("parallel: keys go round 3 ranks")
    with parallel.context(ranks.mesh, exchange="gather"):
        assert rg.explain_dispatch(attend, *own.values()).path == "parallel"


@case("half precision")
def half(ranks: Ranks) -> None:
    """No less exact than one process in the same dtype; contexts and gradients return to it."""
    whole = Whole((40, 20, 50), (30, 50, 20))
    attend = scrambled(rg.Attention(rg.Additive(DQ, DK, 4)))
    x = {name: t.to(torch.bfloat16).double() for name, t in whole.inputs().items()}
    exact = attend(*x.values())
    rough = copy.deepcopy(attend).to(torch.bfloat16)
    alone = rough(*(t.to(torch.bfloat16) for t in x.values()))
    own = {name: t.to(torch.bfloat16).requires_grad_() for name, t in whole.slices(ranks, x).items()}
    with parallel.context(ranks.mesh):
        found = rough(*own.values())
        with torch.autocast("cpu", torch.bfloat16):
            cast = copy.deepcopy(attend).float()(*(t.detach().float() for t in own.values()))
    assert found.dtype == cast.dtype == torch.bfloat16
    budget = 2 * (alone.double() - exact).norm() + 2**-8 * exact.norm()
    assert (found.double() - ranks.cut(exact, whole.queries)).norm() <= budget
    assert (cast.double() - ranks.cut(exact, whole.queries)).norm() <= 2 * budget
    found.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in own.values())


class Largest(TorchDispatchMode):
    """The largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@case("no rank writes its queries x all keys, nor holds all keys")
def memory(ranks: Ranks) -> None:
    n, panel = 240, 8
    x = torch.randn(1, n, DK).requires_grad_()
    for score in (rg.ScaledDot(), rg.Additive(DK, DK, 2)):
        attend = rg.Attention(score)
        with rg.execution("blockwise", panel=panel), parallel.context(ranks.mesh), Largest() as largest:
            attend(x, x, mask=rg.Causal()).sum().backward()
        # Notes aside, a panel beside the keys of one rank is the largest thing; all keys would be 3 n DK.
        assert largest.elements <= max(2048, panel * n), largest.elements
        assert 2048 < 3 * n * DK < n * 3 * n


def _added_up(ranks: Ranks, wrapped: Callable[[nn.Module], nn.Module], whole_grad: Callable[[Any], Tensor]) -> None:
    lengths = (4, 2, 5)
    encoder = scrambled(rg.TransformerEncoder(DK, 2, 2, position="rotary", head_dim=4, feedforward_dim=6))
    x, weight = torch.randn(B, 11, DK), torch.randn(B, 11, DK)
    (encoder(x) * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in encoder.named_parameters()}
    encoder.zero_grad()
    model = wrapped(encoder)
    with parallel.context(ranks.mesh):
        context = model(ranks.cut(x, lengths))
    (context * ranks.cut(weight, lengths)).sum().backward()
    for name, p in encoder.named_parameters():
        # Both take the mean over the ranks.
        close(whole_grad(p.grad) * ranks.size, expected[name], name)


@case("DistributedDataParallel adds the parameters' gradients up")
def ddp(ranks: Ranks) -> None:
    group = ranks.mesh.get_group()
    _added_up(ranks, lambda x: nn.parallel.DistributedDataParallel(x, process_group=group), lambda grad: grad)


@case("FSDP adds the parameters' gradients up")
def fsdp(ranks: Ranks) -> None:
    from torch.distributed.fsdp import fully_shard

    def wrapped(encoder: nn.Module) -> nn.Module:
        for layer in encoder.layers:
            fully_shard(layer, mesh=ranks.mesh)
        return fully_shard(encoder, mesh=ranks.mesh)

    _added_up(ranks, wrapped, lambda grad: grad.full_tensor())


@case("one axis of a mesh")
def axes(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("data", "context"))
    whole, attend = Whole((4, 2, 5), (3, 5, 2)), scrambled(rg.Attention(rg.General(DQ, DK)))
    same_as_one_process(Ranks(mesh["context"], ranks.rank, ranks.size), attend, whole)
    with refused(ValueError, "mesh: got 2 axes (data, context)", "mesh['context']"), parallel.context(mesh):
        pass


@case("ranks that hold something else are told so")
def mismatches(ranks: Ranks) -> None:
    odd = ranks.rank == 1
    attend = rg.Attention("dot")

    def x(width: int = 4, lead: int = B, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(lead, 3, width, dtype=dtype)

    with parallel.context(ranks.mesh):
        with refused(ValueError, "key: got rank 0: [[2, 'N', 4]", "rank 1: [[2, 'N', 5]", "the same on every rank"):
            attend(*[x(5 if odd else 4)] * 2)
        with refused(ValueError, "float32", "float64"):
            attend(*[x(dtype=torch.float32 if odd else torch.float64)] * 2)
        with refused(ValueError, "leading axes: got rank 0: [2]; rank 1: [3]"):
            attend(*[x(lead=3 if odd else B)] * 2)
        parts = {
            "align: got rank 0: Soft(temperature=1.0); rank 1: Hard(": (
                "dot",
                rg.Hard("reinforce") if odd else rg.Soft(),
            ),
            "temperature=1.0); rank 1: Soft(temperature=2.0); rank 2": ("dot", rg.Soft(2.0 if odd else 1.0)),
            "align: got rank 0: Local(window=1, ": ("dot", rg.Local(2 if odd else 1)),
            "policy=Selector(dim=4, context=False)": (
                "dot",
                rg.Reinforced(4, evaluation="sample" if odd else "threshold"),
            ),
            "score: got rank 0: ScaledDot(); rank 1: Dot(); rank 2": (rg.Dot() if odd else rg.ScaledDot(), "soft"),
            "activation='tanh'); rank 1: Additive(": (rg.Additive(4, 4, 3, "relu" if odd else "tanh"), "soft"),
            "beta=1.0); rank 1: Cosine(beta=2.0)": (rg.Cosine(2.0 if odd else 1.0), "soft"),
        }
        for words, (score, align) in parts.items():
            with refused(ValueError, words):
                rg.Attention(score, align).eval()(*[x()] * 2)
        with refused(ValueError, "align: got", "Soft(temperature=1.0)", "Soft(temperature=2.0)"):
            with rg.intervene(attend, rg.Soft(2.0 if odd else 1.0)):
                attend(*[x()] * 2)
        with refused(ValueError, "dropout: got rank 0: 0.0; rank 1: 0.1; rank 2: 0.2"):
            rg.Attention("dot", dropout=0.1 * ranks.rank)(*[x()] * 2)
        for given in ({"dropout": 0.5}, {"align": "hard"}):
            with refused(ValueError, "training: got rank 0: False; rank 1: True; rank 2: False"):
                rg.Attention("dot", **given).train(odd)(*[x()] * 2)
        # What is learned may differ: whoever adds gradients up may also send the parameters round.
        learning = rg.Attention("dot", rg.Soft(learnable=True))
        torch.nn.init.constant_(learning.align.log_temperature, 0.1 * ranks.rank)
        learning(*[x()] * 2)
        with refused(ValueError, "value: got", "True", "False"):
            attend(x(), x(), x().requires_grad_(odd))
        with refused(RuntimeError, "rank 0: attending; rank 1: comparing lengths"):
            attend(*[x()] * 2, mask=rg.Causal() if odd else None)
        # Lengths are those of the whole sequence, not of a rank's slice.
        for words, mask in {
            "mask: got rank 0: Window(3); rank 1: Window(4); rank 2: Window(3)": rg.Window(3 + odd),
            "mask: got rank 0: Causal(); rank 1: Window(2)": rg.Window(2) if odd else rg.Causal(),
            "mask: got rank 0: (Causal() & Keys); rank 1: (Keys & Causal())": (
                rg.Keys(torch.ones(3, dtype=torch.bool)) & rg.Causal()
                if odd
                else rg.Causal() & rg.Keys(torch.ones(3, dtype=torch.bool))
            ),
            "mask: got rank 0: Padding(lengths=[5, 5]); rank 1: Padding(lengths=[6, 6])": rg.Padding(
                torch.tensor([5 + odd] * B)
            ),
            "mask: got rank 0: Packed([1, 1, 1, ": rg.Packed([1] * 50 + ([1, 0] if odd else [0, 1])),
        }.items():
            with refused(ValueError, words):
                attend(*[x()] * 2, mask=mask)
        with refused(ValueError, "mask: got rank 0: None; rank 1: [2, 1, 'keys']"):
            current().agree("sharing a mask", {"mask": [2, 1, "keys"]} if odd else {}, {})
    with parallel.context(ranks.mesh, exchange="ring" if odd else "gather"):
        with refused(ValueError, "exchange: got rank 0: gather; rank 1: ring; rank 2: gather, expected the same"):
            attend(*[x()] * 2)


@case("what cannot be shared is refused by name")
def refusals(ranks: Ranks) -> None:
    x = torch.randn(B, 4, 6)
    with parallel.context(ranks.mesh):
        with refused(NotImplementedError, "alignment Sparsemax has no fold", "exchange='gather'"):
            rg.Attention("dot", "sparsemax")(x, x)
        with refused(NotImplementedError, "alignment ReinforcedPairs"):
            rg.Attention("dot", rg.ReinforcedPairs(6))(x, x)
        with refused(NotImplementedError, "alignment Reinforced,"):
            rg.Attention("dot", rg.Reinforced(6, context=True))(x, x)
        with refused(NotImplementedError, "alignment Sinkhorn"):
            rg.Attention("dot", rg.Sinkhorn())(x, x)
        for module, inputs in (
            (rg.AttentionOverAttention(6), (x, x)),
            (rg.ParallelCoAttention(6), (x, x)),
            (rg.MultiHopAttention(6), (x, x)),
            (rg.GraphAttention(6, 2), (x[0], torch.tensor([[0, 1], [1, 2]]))),
            (rg.Linformer(6, 2, 1, length=9, rank=2), (x,)),
            (rg.SynthesizerAttention(6, 2, length=9), (x,)),
            (rg.TransformerXL(6, 2, 1, memory=3), (x,)),
            (rg.LSHAttention(6, 2), (x,)),
        ):
            with refused(NotImplementedError, f"parallel.context: got {type(module).__name__}"):
                module(*inputs)
        with refused(NotImplementedError, "looks at all weights"):
            rg.Attention("dot").call(x, x).weights()
        with refused(NotImplementedError, "a cache holds the keys of one rank"):
            decoder = rg.TransformerDecoder(6, 2, 1, cross=False)
            decoder(x, cache=decoder.cache())
        with refused(NotImplementedError, "torch.compile or torch.func"):
            torch.func.vmap(rg.Attention("dot"))(x, x)
        with refused(ValueError, "mask: got shapes", "over the keys of all ranks, (..., 4, 12)"):
            rg.Attention("dot")(x, x, mask=torch.ones(4, 4, dtype=torch.bool))
        with refused(ValueError, "bias: got", "(2, 4, 12)"):
            rg.Attention("dot")(x, x, bias=torch.ones(4, 4))
        with refused(ValueError, "lengths: got", "at most as many as there are keys, 12"):
            rg.Attention("dot")(x, x, mask=rg.Padding(torch.tensor([5, 13])))
        with refused(TypeError, "BoundSides, a mask of what one rank holds", "knows the places of all ranks"):
            rg.Attention("dot")(x, x, mask=Sides(None, torch.ones(B, 4, dtype=torch.bool)))
    with refused(TypeError, "mesh: got ProcessGroup"), parallel.context(ranks.mesh.get_group()):
        pass
    with refused(ValueError, "exchange: got 'rings'", "Did you mean 'ring'?"):
        with parallel.context(ranks.mesh, exchange="rings"):
            pass


@case("a record on one rank alone is told")
def lonely_record(ranks: Ranks) -> None:
    attend, x = rg.Attention("dot"), torch.randn(B, 4, 6)
    with parallel.context(ranks.mesh), refused(RuntimeError, "rank 0: recording; rank 1: comparing attentions"):
        if ranks.rank == 0:
            with rg.record(attend):
                attend(x, x)
        else:
            attend(x, x)
            attend(x, x)
