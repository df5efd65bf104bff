"""Compiled, exported, mapped and differentiated by torch's own transforms."""

import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, vmap

import regard as rg
from regard.ops import forms
from tests.cases import assert_same
from tests.contract.cases import CASES, Case, Inputs, named

EXECUTIONS = {"auto": nullcontext, "panels": lambda: rg.execution("blockwise", panel=2)}
every_execution = pytest.mark.parametrize("execution", EXECUTIONS)
COMPILED = [
    ("additive", "auto"),
    ("additive", "panels"),
    ("soft, fused", "auto"),
    ("negative-l2", "panels"),
    ("hard, sampled", "panels"),
    ("local-predictive", "auto"),
    ("reinforced, sampled, with context", "auto"),
    ("multi-dimensional, sparsemax", "panels"),
    ("directional-self-attention, forward", "panels"),
    ("graph-attention, types of edges", "auto"),
]


class Called(nn.Module):
    """A case as one module, called with dictionaries."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.module = case, case.build()

    def forward(self, tensors, masks):
        return self.case.call(self.module, Inputs(tensors, masks))


def run(function, inputs: Inputs, parameters):
    """The result and all gradients, from the same random numbers."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors.items()}
    torch.manual_seed(2)
    result = function(leaves, inputs.masks)
    return [result, *torch.autograd.grad(result.square().sum(), [*leaves.values(), *parameters], allow_unused=True)]


def assert_compiles(name: str, backend: str) -> None:
    torch._dynamo.reset()
    model = Called(named(name))
    inputs, parameters = model.case.inputs(), list(model.parameters())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for found, expected in zip(run(compiled, inputs, parameters), run(model, inputs, parameters), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert_same(found, expected)


@pytest.mark.parametrize(("name", "execution"), COMPILED)
def test_compile_is_one_graph(name, execution):
    with EXECUTIONS[execution]():
        assert_compiles(name, "aot_eager")


@pytest.mark.slow
@every_execution
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compile_is_one_graph_for_everything(case, execution):
    with EXECUTIONS[execution]():
        assert_compiles(case.name, "aot_eager")


def test_compile_to_machine_code():
    with rg.execution("blockwise", panel=3):
        assert_compiles("additive", "inductor")


@every_execution
@pytest.mark.parametrize("name", ["additive", "scaled-dot", "local-predictive"])
def test_export_is_saved_loaded_and_takes_any_batch(name, execution):
    case = named(name)
    model, inputs = Called(case).eval(), case.inputs()
    batch = tuple({key: {0: torch.export.Dim.AUTO} for key in group} for group in (inputs.tensors, inputs.masks))
    with EXECUTIONS[execution]():
        program = torch.export.export(model, (inputs.tensors, inputs.masks), dynamic_shapes=batch)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
        for size in (3, 11):
            inputs = case.inputs(b=size)
            assert_same(loaded(inputs.tensors, inputs.masks), model(inputs.tensors, inputs.masks))


D = 4
QUERY_KEY = {"query_dim": D, "key_dim": D}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def pair(n: int, m: int | None = None, **given):
    return (normal(2, n, D), normal(2, n if m is None else m, D)), given


# A module, and what it is called with for a length.
ANY_LENGTH = {
    "additive": (lambda: rg.Attention("additive", **QUERY_KEY, hidden_dim=3), lambda n: pair(n, n + 5)),
    "padding": (lambda: rg.Attention("general", **QUERY_KEY), lambda n: pair(n, mask=rg.Padding(torch.tensor([n, 3])))),
    "pairs": (lambda: rg.Attention("dot"), lambda n: pair(n, mask=torch.rand(2, n, n) < 0.6)),
    "causal": (lambda: rg.Attention("activated-general", **QUERY_KEY), lambda n: pair(n, mask=rg.Causal())),
    "window": (lambda: rg.Attention("negative-l2"), lambda n: pair(n, mask=rg.Window(3))),
    "a function of places": (lambda: rg.Attention("cosine"), lambda n: pair(n, bias=lambda i, j: -(i - j).abs() / 2.0)),
    "sparsemax": (lambda: rg.Attention("dot", "sparsemax"), pair),
    "local": (lambda: rg.Attention("dot", rg.Local(3, "predictive", query_dim=D)), pair),
    "multi-dimensional": (lambda: rg.Attention(rg.Additive(D, D, 3, features=D)), pair),
    "dropout": (lambda: rg.Attention("dot", dropout=0.3), pair),
    "batches": (lambda: rg.Attention("additive", **QUERY_KEY, hidden_dim=3), lambda n: ((normal(n, 9, D),) * 2, {})),
    "encoder": (
        lambda: rg.TransformerEncoder(D, 2, 1, position="alibi"),
        lambda n: ((normal(2, n, D),), {"mask": torch.arange(n) < torch.tensor([[n], [5]])}),
    ),
}


@pytest.mark.parametrize("impl", ["auto", "dense"])
@pytest.mark.parametrize("name", ANY_LENGTH)
def test_a_compiled_module_takes_any_length(name, impl):
    make, given = ANY_LENGTH[name]
    torch._dynamo.reset()
    module, counted = make().double(), CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=counted, fullgraph=True)
    with rg.execution(impl):
        for n in (20, 23, 31, 22, 29):
            tensors, named = given(n)
            torch.manual_seed(n)
            found = compiled(*tensors, **named)
            torch.manual_seed(n)
            assert_same(found, module(*tensors, **named))
    # The first length, then one graph for all; another where the number of random numbers is a multiple of four or not.
    assert counted.frame_count <= (3 if name == "dropout" else 2)


class Read(nn.Module):
    """An attention or a stack under a mask, called with tensors alone, as a graph is."""

    def __init__(self, module: nn.Module, mask=None) -> None:
        super().__init__()
        self.module, self.mask = module.double(), mask

    def forward(self, x, lengths=None):
        mask = self.mask if lengths is None else rg.Padding(lengths) & self.mask
        return self.module(x, x, mask=mask) if isinstance(self.module, rg.Attention) else self.module(x, mask=mask)


class AlongEdges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = rg.GraphAttention(D, 2).double()

    def forward(self, nodes, edges):
        return self.module(nodes, edges)


def additive(**options) -> rg.Attention:
    return rg.Attention("additive", **QUERY_KEY, hidden_dim=3, **options)


def sequences(n: int):
    return (normal(2, n, D),)


def padded(n: int):
    return (*sequences(n), torch.tensor([n, n // 2]))


def along_edges(n: int):
    return normal(n, D), torch.randint(n, (2, 3 * n))


# What is computed by panels, by blocks, in the library or along edges as the length decides, where one may look at it.
BY_LENGTH = {
    "additive": (lambda: Read(additive()), sequences),
    "additive, causal": (lambda: Read(additive(), rg.Causal()), sequences),
    "additive, window": (lambda: Read(additive(), rg.Window(3)), sequences),
    "additive, a function": (lambda: Read(additive(), rg.Where(lambda i, j: (i - j) % 3 != 1)), sequences),
    "additive, padding and causal": (lambda: Read(additive(), rg.Causal()), padded),
    "additive, dropout": (lambda: Read(additive(dropout=0.3)), sequences),
    "multi-dimensional": (lambda: Read(rg.Attention(rg.Additive(D, D, 3, features=D))), sequences),
    "sparsemax": (lambda: Read(rg.Attention("dot", "sparsemax")), sequences),
    "scaled-dot, causal": (lambda: Read(rg.Attention(), rg.Causal()), sequences),
    "scaled-dot, window": (lambda: Read(rg.Attention(), rg.Window(1)), sequences),
    "encoder": (lambda: Read(rg.TransformerEncoder(D, 2, 1, position="alibi")), sequences),
    "additive encoder": (lambda: Read(rg.TransformerEncoder(D, 2, 1, position="alibi", score="additive")), sequences),
    "graph": (AlongEdges, along_edges),
}
LENGTHS = [2, 3, 5, 9, 16, 17, 24, 31, 45, 64, 77, 130]


@pytest.fixture
def small_budgets(monkeypatch):
    """Budgets under which short inputs are long ones."""
    monkeypatch.setattr("regard.ops.dispatch.SMALL_HIDDEN_ELEMENTS", 400)
    monkeypatch.setattr("regard.ops.blockwise.CPU_PANEL_ELEMENTS", 500)
    monkeypatch.setattr("regard.ops.fused.WRITTEN_MASK_ELEMENTS", 5000)
    monkeypatch.setattr("regard.ops.fused.WORTH_A_PANEL", 300)
    monkeypatch.setattr("regard.ops.fused.NARROW_ROWS", 2)
    monkeypatch.setattr("regard.ops.fill.LARGE_ELEMENTS", 100)


def learned(module: nn.Module, inputs, *, seed: int):
    """The result and the gradients of the input and of all parameters."""
    x = inputs[0].detach().requires_grad_()
    torch.manual_seed(seed)
    result = module(x, *inputs[1:])
    return [result, *torch.autograd.grad(result.square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]], ids=["growing", "shrinking"])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_two_graphs_serve_all_lengths(name, lengths, small_budgets):
    """One of the first length, one of all others."""
    make, given = BY_LENGTH[name]
    torch._dynamo.reset()
    module, counted = make(), CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=counted, fullgraph=True)
    for n in lengths:
        inputs = given(n)
        found, expected = (learned(one, inputs, seed=n) for one in (compiled, module))
        for x, y in zip(found, expected, strict=True):
            assert_same(x, y)
    assert counted.frame_count <= 2


@pytest.mark.parametrize("name", ["additive, causal", "sparsemax", "graph"])
def test_one_graph_serves_all_lengths_where_sizes_are_symbols(name, small_budgets):
    make, given = BY_LENGTH[name]
    torch._dynamo.reset()
    module, counted = make(), CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=counted, fullgraph=True, dynamic=True)
    for n in LENGTHS[::-3]:
        inputs = given(n)
        for x, y in zip(*(learned(one, inputs, seed=n) for one in (compiled, module)), strict=True):
            assert_same(x, y)
    assert counted.frame_count == 1


@pytest.mark.parametrize("traced", [6, 90])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_export_at_one_length_runs_at_all(name, traced, small_budgets):
    make, given = BY_LENGTH[name]
    module, inputs = make().eval(), given(traced)
    n, edges = torch.export.Dim("n", min=2, max=100_000), torch.export.Dim.DYNAMIC
    sizes = ({0: n}, {1: edges}) if name == "graph" else ({1: n}, {})[: len(inputs)]
    program = torch.export.export(module, inputs, dynamic_shapes=sizes).module()
    for length in LENGTHS:
        inputs = given(length)
        assert_same(program(*inputs), module(*inputs))


@pytest.mark.parametrize("mask", [None, rg.Causal(), rg.Window(3)], ids=str)
@pytest.mark.parametrize("name", ["additive", "pairs", "sparsemax", "multi-dimensional"])
def test_export_takes_any_length(name, mask):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = ANY_LENGTH[name][0]().double()

        def forward(self, query, key):
            return self.attend(query, key, mask=mask)

    module, (batch, nq, n) = Masked(), (torch.export.Dim(axis, min=2, max=512) for axis in ("batch", "nq", "n"))
    sizes = {"query": {0: batch, 1: nq}, "key": {0: batch, 1: n}}
    program = torch.export.export(module, pair(20, 27)[0], dynamic_shapes=sizes).module()
    for size in ((5, 33, 41), (3, 2, 7), (2, 300, 4)):
        tensors = normal(size[0], size[1], D), normal(size[0], size[2], D)
        assert_same(program(*tensors), module(*tensors))


def losses(model: Called):
    """The loss of one batch entry as a function of the parameters."""

    def loss(parameters, tensors, masks):
        one = ({name: x[None] for name, x in group.items()} for group in (tensors, masks))
        return functional_call(model, parameters, tuple(one)).square().sum()

    return loss


@pytest.mark.parametrize("case", [case for case in CASES if not case.training], ids=str)
def test_per_example_gradients(case):
    if "vmap" in case.lacks:
        pytest.skip(case.lacks["vmap"])
    model, inputs = Called(case), case.inputs()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    loss = losses(model)
    with rg.execution("dense"):
        mapped = vmap(loss, (None, 0, 0))(parameters, inputs.tensors, inputs.masks)
        steepest = vmap(grad(loss), (None, 0, 0))(parameters, inputs.tensors, inputs.masks) if parameters else {}
        for b in range(len(mapped)):
            one = [{name: x[b] for name, x in group.items()} for group in (inputs.tensors, inputs.masks)]
            assert_same(mapped[b], loss(parameters, *one))
            if parameters:
                expected = grad(loss)(parameters, *one)
                assert_same(flat({name: x[b] for name, x in steepest.items()}), flat(expected))


def flat(tensors):
    """All numbers of a dictionary, so that a gradient which is zero but for rounding is measured against the others."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_the_tiled_additive_form_is_mapped_by_its_own_rule(monkeypatch):
    """One call of the operator for the whole batch, forward and backward, with the weights shared or not."""
    case = named("additive")
    model, inputs = Called(case), case.inputs()
    called = []
    original = forms.additive_scores
    monkeypatch.setattr(forms, "additive_scores", lambda *args: called.append(args[0].shape) or original(*args))
    parameters = {name: p.detach().expand(3, *p.shape).clone() for name, p in model.named_parameters()}
    loss = losses(model)
    with rg.execution("blockwise"):
        for shared in (True, False):
            given = {n: (p[0].clone() if shared else p).requires_grad_() for n, p in parameters.items()}
            called.clear()
            mapped = vmap(loss, (None if shared else 0, 0, 0))(given, inputs.tensors, inputs.masks)
            assert len(called) == 1
            found = torch.autograd.grad(mapped.sum(), list(given.values()))
            one_by_one = [
                loss(
                    {n: p if shared else p[b] for n, p in given.items()},
                    {n: x[b] for n, x in inputs.tensors.items()},
                    {n: x[b] for n, x in inputs.masks.items()},
                )
                for b in range(3)
            ]
            expected = torch.autograd.grad(sum(one_by_one), list(given.values()))
            assert_same(mapped, torch.stack(one_by_one))
            for first, second in zip(found, expected, strict=True):
                assert_same(first, second)


def test_blockwise_additive_refuses_second_derivatives_by_name():
    case = named("additive")
    inputs, module = case.inputs().map(lambda x: x.requires_grad_()), case.build()
    query = inputs.tensors["query"]
    with rg.execution("blockwise"):
        result = case.run(module, inputs)
        (first,) = torch.autograd.grad(result.square().sum(), query, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives of the additive form .* impl='dense'"):
            first.square().sum().backward()
