"""Additive attention along edges by the kernels against float64, within budgets that the same formula in float32 sets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops import edge_kernel, segment
from regard.ops.edges import EdgeCall, EdgeMask, Edges
from regard.ops.forms import AdditiveForm, BilinearForm, Form
from regard.ops.ready import kernel_problem
from regard.ops.triton import graph, graph_attend
from tests.ops.autograd_cases import check_gradients

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAMES = ("a", "u", "value", "weight")


@dataclass
class Case:
    act: str = "leaky_relu:0.2"
    dtype: torch.dtype = F32
    heads: int = 3
    width: int = 5
    value_width: int = 7
    nq: int = 11
    nodes: int = 7
    edges: int = 45
    shared: bool = False  # keys are values
    by_edge: bool = False
    mask: str = ""
    dropout: float = 0.0
    temperature: float = 1.0

    def edges_of(self) -> Edges:
        torch.manual_seed(self.edges)
        # The first queries have most of the edges, the last have none.
        target = (torch.rand(self.edges) ** 3 * (self.nq - 2)).long() if self.nq > 2 else torch.zeros(self.edges).long()
        return Edges.of(torch.randint(self.nodes, (self.edges,)), target, self.nq)

    def inputs(self) -> dict[str, Tensor]:
        torch.manual_seed(7)
        keys = self.edges if self.by_edge else self.nodes
        shapes = {"a": (self.nq, self.width), "u": (keys, self.width), "value": (self.nodes, self.value_width)}
        found = {name: torch.randn(self.heads, *shape).to(self.dtype) for name, shape in shapes.items()}
        if self.shared:
            del found["value"]
        return {**found, "weight": torch.randn(self.heads, self.width) / self.width**0.5}

    def call(self, edges: Edges, x: dict[str, Tensor]) -> EdgeCall:
        shape = {"": None, "edges": (self.edges,), "heads": (self.heads, self.edges)}[self.mask]
        torch.manual_seed(3)
        allowed = None if shape is None else torch.rand(shape) > 0.4
        from regard.ops.activations import activation

        if self.act == graph.PRODUCT:
            # Scores have no weights of their own: those of the case are in the queries.
            form: Form = BilinearForm(x["a"] * x["weight"].unsqueeze(-2), x["u"], scale=0.7)
        else:
            form = AdditiveForm(x["a"], x["u"], x["weight"], activation(self.act))
        return EdgeCall(
            form=form,
            value=x.get("value", x["u"]),
            align=rg.Soft(self.temperature),
            query=None,
            key=x["u"],
            mask=EdgeMask(allowed, edges),
            dropout=self.dropout,
            training=True,
            seed=torch.tensor([11]) if self.dropout else None,
            edges=edges,
            by_edge=self.by_edge,
        )


def with_gradients(function, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = function(leaves)
    found = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"context": out.detach(), **dict(zip(leaves, found, strict=True))}


def by_kernel(case: Case, edges: Edges, x: dict[str, Tensor]) -> Tensor:
    assert kernel_problem("graph_attend", case.act) == ""
    assert graph.PRODUCT == segment.PRODUCT
    return edge_kernel.edge_attention_by_kernel(case.call(edges, x))


def by_equation(case: Case, edges: Edges, x: dict[str, Tensor]) -> Tensor:
    call = case.call(edges, x)
    return call.read(call.weights())


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN."""

    def filled(make):
        def poisoned(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return poisoned

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))


CASES = {
    "usual": Case(),
    "keys are values": Case(shared=True, act="relu"),
    "a key of each edge": Case(by_edge=True, act="tanh", edges=31),
    "mask": Case(mask="edges", act="sigmoid", shared=True),
    "mask of each head": Case(mask="heads", act="gelu"),
    "dropout and a mask": Case(dropout=0.3, mask="edges"),
    "dropout, a key of each edge": Case(dropout=0.5, by_edge=True, edges=31),
    "temperature": Case(temperature=0.4, act="identity"),
    "one edge": Case(edges=1, heads=1, width=1, value_width=1),
    "one query of many edges": Case(nq=1, edges=150, heads=2),
    "more heads than a tile holds": Case(heads=5, width=600, value_width=513, edges=20, nq=5, nodes=3),
    "dot products": Case(act="product"),
    "dot products, keys are values, dropout": Case(act="product", shared=True, dropout=0.3),
    "dot products, a key of each edge, a mask": Case(
        act="product", by_edge=True, edges=31, mask="heads", temperature=0.6
    ),
    "dot products, bfloat16": Case(act="product", dtype=BF16),
    "float16": Case(dtype=F16, shared=True),
    "bfloat16": Case(dtype=BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_exact_as_the_formula(name: str) -> None:
    case = CASES[name]
    edges, inputs = case.edges_of(), case.inputs()
    grad = torch.randn(case.heads, case.nq, case.value_width if not case.shared else case.width)
    exact = with_gradients(lambda x: by_equation(case, edges, x), {k: x.double() for k, x in inputs.items()}, grad)
    plain = with_gradients(lambda x: by_equation(case, edges, x), inputs, grad)
    ours, again = (with_gradients(lambda x: by_kernel(case, edges, x), inputs, grad) for _ in range(2))
    eps = torch.finfo(case.dtype).eps
    # What a score learns is a difference of do · v and do · c, in float32: the rounding of these stays, whatever cancels in it.
    longest = inputs.get("value", inputs["u"]).double().norm(dim=-1).max()
    rounding = torch.finfo(F32).eps * grad.double().norm(dim=-1).norm() * longest
    # Weights are e^(s - L): what float32 rounds of L, about the logarithm of the degree, is relative in them.
    depth = torch.finfo(F32).eps * math.log(case.edges)
    noise = {"a": rounding, "u": rounding, "weight": rounding * (case.width * case.nq) ** 0.5}
    for what, x in ours.items():
        assert torch.equal(x, again[what]), f"{what}: two runs differ"
        reference = exact[what]
        distance = float((x.double() - reference).norm())
        budget = float(
            2 * ((plain[what].double() - reference).norm() + (eps + depth) * reference.norm() + noise.get(what, 0.0))
        )
        assert distance <= budget, f"{what}: distance {distance:.2e}, budget {budget:.2e}"
    if case.nq > 2:
        assert (ours["context"][:, -1] == 0).all()
        assert (ours["a"][:, -1] == 0).all()


def test_what_may_not_be_read_may_hold_anything() -> None:
    case = Case(mask="edges", by_edge=True, edges=31)
    edges, x = case.edges_of(), case.inputs()
    expected = with_gradients(lambda x: by_kernel(case, edges, x), x, torch.ones(3, 11, 7))
    forbidden = ~case.call(edges, x).mask.allowed
    x["u"] = x["u"].clone()
    x["u"][:, forbidden] = torch.nan
    got = with_gradients(lambda x: by_kernel(case, edges, x), x, torch.ones(3, 11, 7))
    for name, y in expected.items():
        assert torch.equal(got[name], y), name


def test_nan_is_seen() -> None:
    case = Case(shared=True)
    edges, x = case.edges_of(), case.inputs()
    x["a"] = x["a"].clone()
    x["a"][1, 0, 0] = torch.nan
    context = by_kernel(case, edges, x)
    assert context[1, 0].isnan().all()
    assert context[0].isfinite().all()


def operands(case: Case) -> tuple[object, ...]:
    edges = case.edges_of()
    x = {name: t.movedim(-2, 0) if t.dim() == 3 else t for name, t in case.inputs().items()}
    leaves = [x[name].clone().requires_grad_() if name in x else None for name in NAMES]
    source, target = edges.ends
    return (
        *leaves,
        source,
        None,
        target,
        edges.bounds,
        *edges.readers(case.nodes),
        None,
        None,
        None,
        None,
        0.0,
        case.act,
    )


@pytest.mark.parametrize("shared", [False, True])
def test_the_operator_is_registered_as_torch_asks(shared: bool) -> None:
    given = operands(replace(Case(), shared=shared, edges=17))
    assert kernel_problem("graph_attend", "tanh") == ""
    torch.library.opcheck(torch.ops.regard.edge_kernel, given)


@pytest.mark.parametrize("registered", [False, True])
def test_second_derivatives_are_refused_by_name(registered: bool) -> None:
    given = operands(Case(edges=17))
    context = torch.ops.regard.edge_kernel(*given)[0] if registered else graph_attend.edge_kernel(*given)
    (da,) = torch.autograd.grad(context.sum(), given[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives.*impl='dense'"):
        da.sum().backward()


def test_several_gradients_at_once_and_none() -> None:
    given = operands(Case(edges=17))
    check_gradients(graph_attend.edge_kernel(*given), given[:4])


def test_known_activations() -> None:
    assert kernel_problem("graph_attend", "leaky_relu:0.2") == ""
    assert kernel_problem("graph_attend", "tanh:5.0") == "activation 'tanh:5.0' has no kernel"
    assert kernel_problem("graph_attend", "sin") == "activation 'sin' has no kernel"


@pytest.mark.parametrize("by_edge", [False, True])
def test_edges_are_sorted_once(by_edge: bool) -> None:
    case = Case(by_edge=by_edge, edges=17)
    edges, inputs, grad = case.edges_of(), case.inputs(), torch.ones(case.heads, case.nq, case.value_width)

    def sorts() -> int:
        with torch.profiler.profile() as seen:
            with_gradients(lambda x: by_kernel(case, edges, x), inputs, grad)
        return sum(event.name in ("aten::sort", "aten::argsort") for event in seen.events())

    assert sorts() > 0
    assert sorts() == 0
