"""Refusals: each names the argument, says what came and what was expected, and the way out where there is one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.ops.activations import activation

Act = Callable[[], Any]


def message(argument: str, got: str, expected: str, fix: str = "") -> str:
    """The whole message, as a pattern."""
    text = f"{argument}: got {got}, expected {expected}."
    return "^" + re.escape(f"{text} {fix}" if fix else text)


def q(*shape: int, **more: Any) -> Tensor:
    return torch.zeros(*shape, **more)


GENERAL = rg.Attention(rg.General(3, 5))
QUERY, KEY = q(2, 7, 3), q(2, 11, 5)


def attend(*args: Any, **kwargs: Any) -> Act:
    """A call of general attention; queries are 3 wide, keys 5."""
    return lambda: GENERAL(*(args or (QUERY, KEY)), **kwargs)


WIDTHS: dict[str, tuple[Act, str]] = {
    "query": (attend(q(2, 7, 4), KEY), message("query", "width 4", "query_dim=3")),
    "key": (attend(QUERY, q(2, 11, 6)), message("key", "width 6", "key_dim=5")),
    "dot": (
        lambda: rg.Attention("dot")(QUERY, KEY),
        message("query", "width 3", "the width of the key, 5", "Fix: use General or Additive"),
    ),
    "scaled dot": (
        lambda: rg.Attention("scaled-dot")(QUERY, KEY),
        message("query", "width 3", "the width of the key, 5"),
    ),
    "cosine": (lambda: rg.Attention("cosine")(QUERY, KEY), message("query", "width 3", "the width of the key, 5")),
    "negative l2": (
        lambda: rg.Attention("negative-l2")(QUERY, KEY),
        message("query", "width 3", "the width of the key, 5"),
    ),
    "behind a key map": (
        lambda: rg.Attention(rg.General(3, 5), key_map=nn.Linear(5, 4))(QUERY, KEY),
        message("key", "width 4", "key_dim=5"),
    ),
    "features": (
        lambda: rg.Attention(rg.General(3, 5, features=4))(QUERY, KEY),
        message("value", "width 5", "features=4", "A multi-dimensional score has one weight for each feature"),
    ),
    "position": (
        lambda: rg.Attention("query-free", "local-predictive", key_dim=5, hidden_dim=2, query_dim=4, window=2)(
            QUERY, KEY
        ),
        message("query", "width 3", "query_dim=4 of the local alignment"),
    ),
    "policy": (
        lambda: rg.Attention(rg.General(3, 5), rg.Reinforced(6))(QUERY, KEY),
        message("key", "width 5", "key_dim=6 of the reinforced alignment"),
    ),
}


@pytest.mark.parametrize("case", WIDTHS)
def test_wrong_widths(case: str) -> None:
    act, pattern = WIDTHS[case]
    with pytest.raises(ValueError, match=pattern):
        act()


SHAPES: dict[str, tuple[Act, str]] = {
    "key": (attend(q(3), q(5)), message("key", "shape (5,)", "at least two axes, (..., N, d_k)")),
    "value": (
        attend(QUERY, KEY, q(2, 10, 4)),
        message("value", "shape (2, 10, 4)", "as many rows as the key: (..., 11, d_v)"),
    ),
    "value without rows": (
        attend(QUERY, KEY, q(11)),
        message("value", "shape (11,)", "as many rows as the key: (..., 11, d_v)"),
    ),
    "query": (
        attend(q(2, 2, 7, 3), KEY),
        message(
            "query",
            "shape (2, 2, 7, 3) beside a key of shape (2, 11, 5)",
            "as many axes as the key (many queries), one fewer, or one (a single query)",
        ),
    ),
    "leading axes": (
        attend(q(3, 7, 3), KEY),
        message("key, value and query", "leading axes (2,), (2,), (3,)", "axes that broadcast together"),
    ),
    "heads": (
        lambda: rg.Attention(rg.General(3, 5, heads=4))(QUERY, KEY),
        message("key", "leading axes (2,)", "axes that end in heads=(4,)", "Head axes are the last leading axes"),
    ),
    "mask": (
        attend(mask=torch.ones(2, 7, 12, dtype=torch.bool)),
        message("mask", "shape (2, 7, 12)", "a shape that broadcasts to (2, 7, 11)"),
    ),
    "mask of keys for many queries": (
        attend(mask=torch.ones(2, 11, dtype=torch.bool)),
        message(
            "mask", "shape (2, 11)", "a shape that broadcasts to (2, 7, 11)", "Fix: a mask of keys alone is regard.Keys"
        ),
    ),
    "mask with too many axes": (
        attend(mask=torch.ones(1, 2, 7, 11, dtype=torch.bool)),
        message("mask", "shape (1, 2, 7, 11)", "a shape that broadcasts to (2, 7, 11)"),
    ),
    "keys": (
        attend(mask=rg.Keys(torch.ones(2, 10, dtype=torch.bool))),
        message("mask", "Keys of shape (2, 10)", "booleans over the keys, (2, 11)"),
    ),
    "lengths": (
        attend(mask=rg.Padding(torch.tensor([3, 4, 5]))),
        message("lengths", "shape (3,)", "the first leading axes of the call, (2,): one length for each sequence"),
    ),
    "lengths beyond the keys": (
        attend(mask=rg.Padding(torch.tensor([12, 4]))),
        message("lengths", "[12, 4]", "at most as many as there are keys, 11"),
    ),
    "keys without an axis": (
        lambda: rg.Keys(torch.tensor(True)),
        message("allowed", "a tensor without axes", "booleans over the keys, (..., N)"),
    ),
    "mask by a function": (
        attend(mask=rg.Where(lambda i, j: torch.ones(3, 4, dtype=torch.bool))),
        message(
            "mask",
            "Where(...) that gives shape (3, 4) for 7 queries and 11 keys",
            "a shape that broadcasts to (2, 7, 11)",
            "Fix: compute it from i and j",
        ),
    ),
    "mask of a single query": (
        attend(q(2, 3), KEY, mask=torch.ones(2, 7, 11, dtype=torch.bool)),
        message("mask", "shape (2, 7, 11)", "a shape that broadcasts to (2, 11)"),
    ),
    "bias by a function": (
        attend(bias=lambda i, j: torch.zeros(3, 4)),
        message(
            "bias",
            "a function that gives shape (3, 4) for 7 queries and 11 keys",
            "a shape that broadcasts to (2, 7, 11)",
            "Fix: compute it from i and j",
        ),
    ),
    "no width": (
        lambda: rg.Attention("dot")(q(2, 7, 0), q(2, 11, 0)),
        message("key", "shape (2, 11, 0)", "at least one feature, (..., N, d_k)"),
    ),
    "bias": (attend(bias=q(2, 7, 12)), message("bias", "shape (2, 7, 12)", "a shape that broadcasts to (2, 7, 11)")),
    "bias of a single query": (
        attend(q(2, 3), KEY, bias=q(2, 12)),
        message("bias", "shape (2, 12)", "a shape that broadcasts to (2, 11)"),
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_wrong_shapes(case: str) -> None:
    act, pattern = SHAPES[case]
    with pytest.raises(ValueError, match=pattern):
        act()


TYPES: dict[str, tuple[Act, str]] = {
    "query": (attend([1.0], KEY), message("query", "list", "a tensor")),
    "key": (attend(QUERY, None), message("key", "NoneType", "a tensor")),
    "value": (attend(QUERY, KEY, "value"), message("value", "str", "a tensor")),
    "integers": (
        attend(QUERY, KEY.long()),
        message("key", "a tensor of torch.int64", "a floating-point tensor"),
    ),
    "integer queries": (
        attend(QUERY.long(), KEY),
        message("query", "a tensor of torch.int64", "a floating-point tensor"),
    ),
    "two dtypes": (
        attend(QUERY.double(), KEY),
        message("query", "a tensor of torch.float64", "the dtype of the key, torch.float32"),
    ),
    "value of another dtype": (
        attend(QUERY, KEY, KEY.half()),
        message("value", "a tensor of torch.float16", "the dtype of the key, torch.float32"),
    ),
    "module of another dtype": (
        attend(QUERY.double(), KEY.double()),
        message("key", "a tensor of torch.float64", "the module's dtype, torch.float32", "Fix: convert the module"),
    ),
    "mask": (attend(mask=[True]), message("mask", "list", "a boolean tensor or a mask object such as Causal()")),
    "mask of numbers": (
        attend(mask=q(2, 7, 11)),
        message(
            "mask",
            "a tensor of torch.float32",
            "torch.bool, True where a query may attend a key",
            "Fix: compare or cast",
        ),
    ),
    "mask of integers": (attend(mask=q(7, 11).int()), message("mask", "a tensor of torch.int32", "torch.bool")[:-2]),
    "keys": (lambda: rg.Keys(q(11)), message("mask", "a tensor of torch.float32", "torch.bool")[:-2]),
    "lengths": (
        lambda: rg.Padding(q(2)),
        message("lengths", "a tensor of torch.float32", "a tensor of integers, or a list of whole numbers"),
    ),
    "list of lengths": (
        lambda: rg.Padding([3, 5.0]),
        message("lengths", "[3, 5.0]", "a tensor of integers, or a list of whole numbers"),
    ),
    "function": (lambda: rg.Where(3), message("function", "int", "a function of indices i and j")),
    "function of numbers": (
        attend(mask=rg.Where(lambda i, j: i - j)),
        message("mask", "Where(...) that gives torch.int64", "a boolean tensor"),
    ),
    "bias": (attend(bias=3.0), message("bias", "float", "a floating-point tensor or a function of indices i and j")),
    "bias of booleans": (
        attend(bias=torch.ones(7, 11, dtype=torch.bool)),
        message(
            "bias",
            "a tensor of torch.bool",
            "a floating-point tensor or a function of indices i and j",
            "Fix: booleans go to `mask=`.",
        ),
    ),
    "score": (lambda: rg.Attention(nn.Linear(2, 2)), message("score", "Linear", "a Score or the name of one")),
    "align": (lambda: rg.Attention("dot", 3), message("align", "int", "an Alignment or the name of one")),
    "class of scores": (
        lambda: rg.Attention(rg.Dot),
        message("score", "the class Dot", "a Score or the name of one", "Fix: make one, Dot(…)."),
    ),
    "class of alignments": (
        lambda: rg.Attention("dot", rg.Soft),
        message("align", "the class Soft", "an Alignment or the name of one", "Fix: make one, Soft(…)."),
    ),
    "class of masks": (
        attend(mask=rg.Causal),
        message("mask", "the class Causal", "a boolean tensor or a mask object such as Causal()", "Fix: make one"),
    ),
    "key_map": (lambda: rg.Attention("dot", key_map="a"), message("key_map", "str", "a module, such as nn.Linear")),
    "start": (attend(start=1.5), message("start", "1.5", "a position, a whole number")),
    "start beyond any index": (attend(start=1 << 62), message("start", str(1 << 62), "a position, a whole number")),
    "activation": (lambda: rg.Additive(3, 5, 2, activation=3), message("activation", "int", "a name or a callable")),
    "explained module": (
        lambda: rg.explain_dispatch(nn.Linear(2, 2)),
        message("module", "Linear", "an Attention, or a module that holds some"),
    ),
}


@pytest.mark.parametrize("case", TYPES)
def test_wrong_types(case: str) -> None:
    act, pattern = TYPES[case]
    with pytest.raises(TypeError, match=pattern):
        act()


NAMES: dict[str, tuple[Act, str]] = {
    "score": (
        lambda: rg.Attention("aditive"),
        message("score", "'aditive'", "a mechanism of general/scoring", "Did you mean 'additive'"),
    ),
    "score in Chinese": (
        lambda: rg.Attention("点积"),
        message("score", "'点积'", "a mechanism of general/scoring", "Did you mean"),
    ),
    "a score that is an alignment": (
        lambda: rg.Attention("soft"),
        message(
            "score",
            "'soft'",
            "a mechanism of general/scoring",
            "Fix: 'soft' is a mechanism of general/alignment: pass it as align='soft'.",
        ),
    ),
    "a score that is an alignment elsewhere in the catalog": (
        lambda: rg.Attention("sinkhorn"),
        message(
            "score",
            "'sinkhorn'",
            "a mechanism of general/scoring",
            "Fix: 'sinkhorn' is a mechanism of query/structured: pass it as align='sinkhorn'.",
        ),
    ),
    "an alignment elsewhere in the catalog": (
        lambda: rg.Attention("dot", "sinkhron"),
        message("align", "'sinkhron'", "a mechanism of general/alignment", "Did you mean 'sinkhorn'?"),
    ),
    "a score that is a mechanism": (
        lambda: rg.Attention("rotatory"),
        message(
            "score",
            "'rotatory'",
            "a mechanism of general/scoring",
            "Fix: 'rotatory' is a mechanism of its own: use regard.RotatoryAttention.",
        ),
    ),
    "an option against its name": (
        lambda: rg.Attention("dot", "local-monotonic", window=2, position="predictive"),
        message(
            "position",
            "'predictive'",
            "'monotonic', which is what 'local-monotonic' is",
            "Fix: leave position out, or choose another align.",
        ),
    ),
    "align": (
        lambda: rg.Attention("dot", "sparsmax"),
        message("align", "'sparsmax'", "a mechanism of general/alignment", "Did you mean 'sparsemax'"),
    ),
    "anything else": (
        lambda: rg.Attention("dot", "qqqq"),
        message("align", "'qqqq'", "a mechanism of general/alignment", "Known: "),
    ),
    "activation": (
        lambda: activation("tanhh"),
        message(
            "activation",
            "'tanhh'",
            "a callable, or one of elu, gelu, identity, leaky_relu, relu, sigmoid, silu, tanh",
            "Did you mean 'tanh'",
        ),
    ),
    "activation like no other": (
        lambda: activation("qqqq"),
        message(
            "activation",
            "'qqqq'",
            "a callable, or one of elu, gelu, identity, leaky_relu, relu, sigmoid, silu, tanh",
        )
        + "$",
    ),
    "parameter of an activation": (
        lambda: activation("tanh:x"),
        message("activation", "'tanh:x'", "a number after 'tanh:'"),
    ),
    "activation without a parameter": (
        lambda: activation("relu:2"),
        message("activation", "'relu:2'", "nothing after 'relu'", "Fix: pass 'relu'."),
    ),
    "impl": (
        lambda: rg.Attention("dot", impl="fusd"),
        message("impl", "'fusd'", "one of auto, dense, blockwise, fused", "Did you mean 'fused'?"),
    ),
    "impl like no other": (
        lambda: rg.Attention("dot", impl="flash"),
        message("impl", "'flash'", "one of auto, dense, blockwise, fused") + "$",
    ),
    "execution": (
        lambda: rg.execution("densee").__enter__(),
        message("impl", "'densee'", "one of auto, dense, blockwise, fused", "Did you mean 'dense'?"),
    ),
    "gradient": (
        lambda: rg.Hard("straight"),
        message(
            "gradient",
            "'straight'",
            "one of straight-through, reinforce, gumbel, gumbel-straight-through",
            "Did you mean",
        ),
    ),
    "evaluation": (lambda: rg.Hard(evaluation="mean"), message("evaluation", "'mean'", "'argmax' or 'sample'")),
    "evaluation of a policy": (
        lambda: rg.Reinforced(3, evaluation="mean"),
        message("evaluation", "'mean'", "'threshold' or 'sample'"),
    ),
    "position": (
        lambda: rg.Local(2, "predicted"),
        message("position", "'predicted'", "'monotonic' or 'predictive'"),
    ),
    "direction": (lambda: rg.Directional("left"), message("direction", "'left'", "'forward' or 'backward'")),
}


@pytest.mark.parametrize("case", NAMES)
def test_unknown_names_are_answered_with_the_nearest(case: str) -> None:
    act, pattern = NAMES[case]
    with pytest.raises(ValueError, match=pattern):
        act()


NUMBERS: dict[str, tuple[Act, str]] = {
    "window": (lambda: rg.Local(-1), message("window", "-1", "a finite number >= 0")),
    "infinite window": (lambda: rg.Local(math.inf), message("window", "inf", "a finite number >= 0")),
    "window that is none": (lambda: rg.Local("2"), message("window", "'2'", "a finite number >= 0")),
    "window that is a flag": (lambda: rg.Local(True), message("window", "True", "a finite number >= 0")),
    "predictive without a width": (
        lambda: rg.Local(2, "predictive"),
        message("query_dim", "None", "a width, since the position is predicted from the query", "Fix: pass query_dim="),
    ),
    "width of a mask": (lambda: rg.Window(-1), message("width", "-1", "a whole number >= 0")),
    "width that is a flag": (lambda: rg.Window(True), message("width", "True", "a whole number >= 0")),
    "band": (lambda: rg.Band(None, 1), message("low", "None", "a number")),
    "band without a number": (lambda: rg.Band(0, math.nan), message("high", "nan", "a number")),
    "width of a mask with a fraction": (lambda: rg.Window(1.5), message("width", "1.5", "a whole number >= 0")),
    "temperature": (lambda: rg.Soft(0.0), message("temperature", "0.0", "a finite number > 0")),
    "infinite temperature": (lambda: rg.Soft(math.inf), message("temperature", "inf", "a finite number > 0")),
    "no temperature": (lambda: rg.Soft(math.nan), message("temperature", "nan", "a finite number > 0")),
    "temperature that is none": (lambda: rg.Soft("a"), message("temperature", "'a'", "a finite number > 0")),
    "temperature in a tensor": (
        lambda: rg.Soft(torch.tensor(0.5)),
        message("temperature", "a tensor of shape ()", "a number", "Fix: pass float(temperature)"),
    ),
    "temperatures in a tensor": (
        lambda: rg.Soft(torch.ones(3)),
        message("temperature", "a tensor of shape (3,)", "a number") + "$",
    ),
    "learned temperature": (
        lambda: rg.Soft(1e-20, learnable=True),
        message("temperature", "1e-20", "a number from 1e-13 to 1e13, since it is learned there"),
    ),
    "alpha that is none": (lambda: rg.Entmax("a"), message("alpha", "'a'", "a finite number >= 1")),
    "temperature of a choice": (lambda: rg.Hard("gumbel", -1.0), message("temperature", "-1.0", "a finite number > 0")),
    "temperature without a use": (
        lambda: rg.Hard("reinforce", 0.5),
        message("temperature", "0.5", "1 with gradient='reinforce'", "Fix: choose gradient='gumbel'"),
    ),
    "alpha": (lambda: rg.Entmax(0.9), message("alpha", "0.9", "a finite number >= 1")),
    "learned alpha": (
        lambda: rg.Entmax(2.0, learnable=True),
        message("alpha", "2.0", "a number strictly between 1 and 2, since it is learned there"),
    ),
    "beta": (lambda: rg.Cosine(0.0), message("beta", "0.0", "a number > 0")),
    "tau": (lambda: rg.NegativeL2(-1.0), message("tau", "-1.0", "a number > 0")),
    "query_dim": (lambda: rg.General(0, 5), message("query_dim", "0", "a whole number >= 1")),
    "key_dim": (lambda: rg.Additive(3, 2.5, 2), message("key_dim", "2.5", "a whole number >= 1")),
    "hidden_dim": (lambda: rg.QueryFree(5, -2), message("hidden_dim", "-2", "a whole number >= 1")),
    "rank": (lambda: rg.LowRankGeneral(3, 5, True), message("rank", "True", "a whole number >= 1")),
    "features": (lambda: rg.General(3, 5, features=0), message("features", "0", "a whole number >= 1")),
    "dim": (lambda: rg.TokenToToken(0), message("dim", "0", "a whole number >= 1")),
    "heads": (lambda: rg.General(3, 5, heads=(2, 0)), message("heads", "(2, 0)", "numbers >= 1")),
    "dropout": (lambda: rg.Attention("dot", dropout=1.5), message("dropout", "1.5", "a probability, from 0 to 1")),
    "dropout that is none": (
        lambda: rg.Attention("dot", dropout="a"),
        message("dropout", "'a'", "a probability, from 0 to 1"),
    ),
    "panel": (
        lambda: rg.execution("blockwise", panel=0).__enter__(),
        message("panel", "0", "a whole number of rows >= 1"),
    ),
    "panel with a fraction": (
        lambda: rg.execution("blockwise", panel=2.5).__enter__(),  # type: ignore[arg-type]
        message("panel", "2.5", "a whole number of rows >= 1"),
    ),
    "panel that is a flag": (
        lambda: rg.execution("blockwise", panel=True).__enter__(),
        message("panel", "True", "a whole number of rows >= 1"),
    ),
    "panel that is none": (
        lambda: rg.execution("blockwise", panel="16").__enter__(),  # type: ignore[arg-type]
        message("panel", "'16'", "a whole number of rows >= 1"),
    ),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_out_of_range(case: str) -> None:
    act, pattern = NUMBERS[case]
    with pytest.raises(ValueError, match=pattern):
        act()


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


DEVICES: dict[str, tuple[Act, str]] = {
    "query": (attend(meta(QUERY), KEY), message("query", "a tensor on meta", "the device of the key, cpu")),
    "value": (attend(QUERY, KEY, meta(KEY)), message("value", "a tensor on meta", "the device of the key, cpu")),
    "module": (
        attend(meta(QUERY), meta(KEY)),
        message("key", "a tensor on meta", "the module's device, cpu", "Fix: module.to('meta')."),
    ),
    "mask": (
        attend(mask=torch.ones(7, 11, dtype=torch.bool, device="meta")),
        message("mask", "booleans on meta", "the device of the key, cpu"),
    ),
    "part of a mask": (
        attend(mask=rg.Causal() & rg.Keys(torch.ones(2, 11, dtype=torch.bool, device="meta"))),
        message("mask", "booleans on meta", "the device of the key, cpu"),
    ),
    "bias": (attend(bias=q(7, 11, device="meta")), message("bias", "a tensor on meta", "the device of the key, cpu")),
}


@pytest.mark.parametrize("case", DEVICES)
def test_mixed_devices(case: str) -> None:
    act, pattern = DEVICES[case]
    with pytest.raises(ValueError, match=pattern):
        act()


OPTIONS: dict[str, tuple[Act, str]] = {
    "missing": (
        lambda: rg.Attention("additive", query_dim=3),
        message(
            "score", "'additive'", "also key_dim=…, hidden_dim=…", "Fix: pass key_dim=…, hidden_dim=… beside score="
        ),
    ),
    "missing for the alignment": (
        lambda: rg.Attention("dot", "local-monotonic"),
        message("align", "'local-monotonic'", "also window=…", "Fix: pass window=… beside align='local-monotonic'."),
    ),
    "unknown": (
        lambda: rg.Attention("general", query_dim=3, key_dim=5, hiden_dim=2),
        message("hiden_dim", "2", "an argument of 'general'", "Did you mean 'hidden_dim'"),
    ),
    "of another part": (
        lambda: rg.Attention("dot", "soft", window=2),
        message("window", "2", "an argument of 'dot' and 'soft'", "'dot' and 'soft' take learnable, temperature."),
    ),
    "of a part that takes none": (
        lambda: rg.Attention("dot", query_dim=3),
        message("query_dim", "3", "an argument of 'dot'", "'dot' takes none.") + "$",
    ),
    "of two parts that take none": (
        lambda: rg.Attention("dot", "sparsemax", temperature=0.5),
        message("temperature", "0.5", "an argument of 'dot' and 'sparsemax'", "'dot' and 'sparsemax' take none.") + "$",
    ),
    "of an alignment elsewhere in the catalog": (
        lambda: rg.Attention("dot", epsilon=0.5),
        message("epsilon", "0.5", "an argument of 'dot'", "'dot' takes none.") + "$",
    ),
    "like no other": (
        lambda: rg.Attention("dot", "local-monotonic", window=2, qqqq=3),
        message(
            "qqqq",
            "3",
            "an argument of 'dot' and 'local-monotonic'",
            "'dot' and 'local-monotonic' take gaussian, position_dim, query_dim, renormalize, window.",
        ),
    ),
    "like no other, beside ready-made parts": (
        lambda: rg.Attention(rg.Dot(), rg.Soft(), qqqq=3),
        message("qqqq", "3", "an argument of an Attention of ready-made parts", "Ready-made parts take none."),
    ),
    "beside ready-made parts": (
        lambda: rg.Attention(rg.Dot(), rg.Soft(), query_dim=3),
        message("query_dim", "3", "an argument of an Attention of ready-made parts", "Fix: give it to the part itself"),
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_a_part_given_by_name(case: str) -> None:
    act, pattern = OPTIONS[case]
    with pytest.raises(TypeError, match=pattern):
        act()


@pytest.mark.parametrize("name", ["dot", "scaled-dot", "cosine", "negative-l2"])
def test_features_of_a_score_without_parameters(name: str) -> None:
    fix = "Fix: use a score with parameters, such as 'additive' or 'general'."
    pattern = message("features", "5", f"nothing, since {name!r} has no parameters", fix)
    with pytest.raises(ValueError, match=pattern):
        rg.Attention(name, features=5)


def test_a_query_is_needed_where_it_is_compared() -> None:
    with pytest.raises(ValueError, match=message("query", "None", "a tensor: General compares queries with keys")):
        GENERAL(None, KEY)


def test_a_predicted_position_needs_a_query() -> None:
    attend = rg.Attention("query-free", "local-predictive", key_dim=5, hidden_dim=2, query_dim=3, window=2)
    fix = "Fix: give a query, or use position='monotonic'."
    pattern = message("query", "None", "a query, since the position is predicted from it", fix)
    with pytest.raises(ValueError, match=pattern):
        attend(None, KEY)


def test_a_refused_call_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError, match="query"), rg.execution("dense"), rg.record(GENERAL) as trace:
        GENERAL(q(2, 7, 4), KEY)
    assert len(trace) == 0


def test_what_is_explained_is_an_attention_on_a_known_device():
    x = torch.randn(5, 4)
    for device in ("cpu", torch.device("cpu"), "cuda:0"):
        rg.explain_dispatch(rg.Attention("dot"), x, x, device=device)
    for device in ("meta", "gpu"):
        with pytest.raises(ValueError, match=f"device: got '{device}', expected 'cpu' or 'cuda'"):
            rg.explain_dispatch(rg.Attention("dot"), x, x, device=device)
    layer = rg.TransformerEncoder(4, 2, 1)
    with pytest.raises(ValueError, match=r"device: got 'cuda', expected the model's own, 'cpu'\. Fix: move the model"):
        rg.explain_dispatch(layer, x, device="cuda")
    with pytest.raises(TypeError, match=r"module: got Linear, expected an Attention, or a module that holds some\."):
        rg.explain_dispatch(torch.nn.Linear(4, 4), x)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_refused_with_a_way_out(layout):
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    x, plain = torch.nested.nested_tensor(parts, layout=layout), torch.randn(2, 3, 4)
    attend = rg.Attention("dot")
    for name, given in {"key": (plain, x), "query": (x, plain), "value": (plain, plain, x)}.items():
        with pytest.raises(TypeError, match=rf"{name}: got a nested tensor, .* Fix: .* regard.Packed\(lengths\)"):
            attend(*given)
    for module in (rg.TransformerEncoder(4, 2, 1), rg.MultiHeadAttention(4, 2), rg.SelfAttention(4)):
        with pytest.raises(TypeError, match=r"got a nested tensor, .* Fix: .* regard.Packed\(lengths\)"):
            module(x)
    # The way out.
    packed = attend(torch.cat(parts), torch.cat(parts), mask=rg.Packed([2, 3]))
    assert torch.allclose(packed[:2], attend(parts[0], parts[0]), atol=1e-6)


@pytest.mark.parametrize("device", [3.4, [1], object, "moon"], ids=str)
def test_what_is_no_device_is_refused_by_name(device):
    x = torch.randn(5, 4)
    with pytest.raises(ValueError, match="device: got .*, expected 'cpu' or 'cuda'"):
        rg.explain_dispatch(rg.Attention("dot"), x, x, device=device)
