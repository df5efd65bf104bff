"""`Attention`: any score, any alignment, either dimensionality, in one module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard import catalog
from regard._errors import nearest, refusal
from regard.general.alignments import Alignment, Soft
from regard.general.alignments.soft import softmax_of_allowed
from regard.general.bound import Bound, Sizes, broadcasts
from regard.general.inputs import refuse_nested
from regard.general.masks import Mask, as_mask
from regard.general.scores import Score
from regard.general.scores.base import before
from regard.ops import hooks
from regard.ops.call import Bias, Call, assuming
from regard.ops.dispatch import Dispatch, autocasting, check_impl, choose, execute, is_free
from regard.ops.fill import kept, kept_rows
from regard.ops.folds import tempered
from regard.ops.forms import WIDE, common_shape, product
from regard.ops.parallel.ranks import Shard, current, shard_of
from regard.ops.parallel.sharded import settings, sharded, with_columns
from regard.ops.random import draw_seed

_PAPER = "Brauwers & Frasincar, A General Survey on Attention Mechanisms in Deep Learning, TKDE 2023"


@catalog.register(
    name="attention",
    zh="注意力一般结构（注意力分布与期望）",
    path="framework",
    equation="c_i = Σ_j align(score(q_i, k_j)) v_j",
    paper=_PAPER,
    year=2023,
    time="that of the score",
    memory="linear (fused, blockwise)",
    choose="always: every mechanism here is this one with its parts filled in",
    avoid="nothing is to be selected: a mean is a constant score",
)
@catalog.register(
    name="single-dimensional",
    zh="单维注意力",
    path="general/dimensionality",
    equation="c_i = Σ_j a_ij v_j",
    paper=_PAPER,
    year=2015,
    time="N² d_v",
    memory="linear",
    choose="the standard case: one weight for each key",
    avoid="different features of the value should come from different keys",
)
@catalog.register(
    name="multi-dimensional",
    zh="多维注意力",
    path="general/dimensionality",
    equation="c_if = Σ_j a_ijf v_jf",
    paper="Shen et al., DiSAN: Directional Self-Attention Network for RNN/CNN-Free Language Understanding, AAAI 2018",
    year=2018,
    time="N² d_w (activations) + N² d_w d_v",
    memory="linear (blockwise); N² d_v dense",
    choose="one weight for each key and feature: different features from different keys",
    avoid="one weight says enough: d_v times the weights, and no dot-product kernel",
    example="""
    >>> attend = Attention("additive", query_dim=3, key_dim=5, hidden_dim=8, features=4)
    >>> query, key, value = torch.randn(2, 7, 3), torch.randn(2, 11, 5), torch.randn(2, 11, 4)
    >>> attend(query, key, value).shape  # `features` is the width of the value
    torch.Size([2, 7, 4])
    """,
)
class Attention(nn.Module):
    r"""The general attention (Brauwers & Frasincar 2023, https://arxiv.org/abs/2203.14263).

    $$e_{ij} = \mathrm{score}(q_i, k_j) + b_{ij}, \qquad a_i = \mathrm{align}(e_i), \qquad c_i = \sum_j a_{ij} v_j$$

    and, for a score with `features` (multi-dimensional), $c_{if} = \sum_j a_{ijf} v_{jf}$. Queries that may attend nothing get zeros;
    keys that nobody may attend never matter, whatever they hold.

    Args:
        score: a score, or its name with the widths beside it (`score="additive", query_dim=…, key_dim=…, hidden_dim=…`).
        align: an alignment, or its name.
        key_map: applied to the keys before scoring, such as `nn.Linear`.
        value_map: applied to the values before summing.
        dropout: probability of dropping a weight while training.
        impl: `auto`, `dense`, `blockwise` or `fused`; an explicit choice is obeyed or refused.
        **options: arguments of a score or alignment that is given by name.

    Example:
        >>> attend = Attention(score="additive", query_dim=3, key_dim=5, hidden_dim=8)
        >>> attend(torch.randn(2, 7, 3), torch.randn(2, 11, 5)).shape
        torch.Size([2, 7, 5])
        >>> attend(torch.randn(2, 3), torch.randn(2, 11, 5)).shape  # one query each
        torch.Size([2, 5])
    """

    # Whether a mechanism reads its scores alone: then its weights are only shown, and no other alignment changes anything.
    scores_alone = False

    def __init__(
        self,
        score: Score | str = "scaled-dot",
        align: Alignment | str | None = None,
        *,
        key_map: nn.Module | None = None,
        value_map: nn.Module | None = None,
        dropout: float = 0.0,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        self.score, self.align = _parts(score, Soft() if align is None else align, options)
        self.key_map, self.value_map = key_map, value_map
        for name, part in (("key_map", key_map), ("value_map", value_map)):
            if part is not None and not callable(part):
                raise TypeError(refusal(name, type(part).__name__, "a module, such as nn.Linear"))
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0.0 <= dropout <= 1.0:
            raise ValueError(refusal("dropout", repr(dropout), "a probability, from 0 to 1"))
        self.dropout, self.impl = float(dropout), check_impl(impl)

    def forward(
        self,
        query: Float[Tensor, "..."] | None,
        key: Float[Tensor, "*lead n dk"],
        value: Float[Tensor, "*_ n dv"] | None = None,
        *,
        mask: Tensor | Mask | None = None,
        bias: Tensor | Callable[[Tensor, Tensor], Tensor] | None = None,
        start: int = 0,
    ) -> Float[Tensor, "..."]:
        """Read the values.

        Args:
            query: (..., Nq, d_q), as many axes as the key; or one axis fewer, or (d_q,), for a single query; None for a
                score that needs none.
            key: (..., N, d_k).
            value: (..., N, d_v); the key when not given.
            mask: True where a query may attend a key: booleans that broadcast to (..., Nq, N), or to (..., N) for a single
                query; or a mask object such as `Causal() & Padding(lengths)`.
            bias: added to the scores: a tensor that broadcasts to (..., Nq, N), or to (..., N) for a single query, or a
                function of indices i (Nq, 1) and j (1, N).
            start: position of the first query, for monotonic local alignment and a bias given as a function.

        Returns:
            Contexts (..., Nq, d_v), or (..., d_v) for a single query.
        """
        if bias is None and start == 0 and not hooks.interventions and not hooks.observers:
            real = mask.real if isinstance(mask, Mask) else None
            context = self._at_once(query, key, value, real) if mask is None or real is not None else None
            if context is not None:
                return context
        call = self.call(query, key, value, mask=mask, bias=bias, start=start)
        call = hooks.asked(self, hooks.changed(self, call))
        context = execute(call, self.impl)
        hooks.seen(self, call)
        return context.squeeze(-2) if call.single else context

    def _at_once(
        self, query: Tensor | None, key: Tensor, value: Tensor | None, real: Tensor | None = None
    ) -> Tensor | None:
        """The equation itself for one query, where there is nothing to decide; None elsewhere. No NaN stands where a key is not `real`.

        What surrounds the products of such a call would otherwise cost a fifth of them. It is what `execute` runs for it: no
        library call has activated scores, and a single row needs no panels.
        """
        score, align = self._children()
        if not score.is_activated or score.features is not None or not is_free(self.impl):
            return None
        if self.key_map is not None or self.value_map is not None or (self.training and self.dropout > 0.0):
            return None
        temperature = align.temperature_of_softmax
        if temperature is None or not isinstance(key, Tensor) or key.dtype not in WIDE:
            return None
        device = key.device
        if device.type not in ("cpu", "cuda") or torch.is_autocast_enabled(device.type):
            return None
        if real is not None and (real.shape != key.shape[:-1] or real.device != device):
            return None
        if isinstance(query, Tensor) and query.dim() == key.dim():
            return None
        query, value, _, _ = _check_inputs(score, query, key, value)
        score.check_widths(query, key)
        if real is not None and query is not None:
            # A query with nothing to read may hold anything.
            query = kept(query, real.any()) if query.dim() == 2 else kept_rows(query, real.any(-1, keepdim=True))
        before(score, query, key)
        scores = tempered(score.reduce(query, key).scores(range(1)), temperature)
        if real is None:
            weights = scores.softmax(-1)
        else:
            weights = softmax_of_allowed(scores, real.unsqueeze(-2))
        return product(weights, value).squeeze(-2)

    def _children(self) -> tuple[Score, Alignment]:
        """Score and alignment: a module looks its children up by name in Python, at the price of a small product."""
        children = self._modules
        return children["score"], children["align"]  # type: ignore[return-value]

    def call(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None = None,
        *,
        mask: Tensor | Mask | None = None,
        bias: Bias | None = None,
        start: int = 0,
    ) -> Call:
        """Everything that decides the result, before anything is executed."""
        score, align = self._children()
        if type(start) is not int or start != 0:
            _check_start(start)
        query, value, lead, single = _check_inputs(score, query, key, value)
        nq, n = 1 if query is None else query.shape[-2], key.shape[-2]
        dropout = self.dropout if self.training else 0.0
        random = dropout > 0.0 or align.needs_seed(self.training)
        shard = None if current() is None else self._shard(nq, n, tuple(lead), key.device if random else None)
        bound = None
        if mask is not None or bias is not None:
            sizes = Sizes(tuple(lead), nq, n)
            bound = _bind(mask, sizes, single, key.device)
            if shard is not None:
                bias, sizes = with_columns(bias, shard, single), replace(sizes, n=shard.n)
            bias = _check_bias(bias, sizes, single and shard is None, key.device)
            query, key, value = _without_unread(bound, query, key, value)
        if self.key_map is not None or self.value_map is not None:
            key, value = self._mapped(key, value, bound)
        score.check_widths(query, key)
        if score.features is not None and value.shape[-1] != score.features:
            fix = "A multi-dimensional score has one weight for each feature of the value."
            raise ValueError(refusal("value", f"width {value.shape[-1]}", f"features={score.features}", fix))
        if value.dtype == torch.float32 and autocasting(value.device):
            value = value.to(torch.get_autocast_dtype(value.device.type))
        seed = shard.seed if shard is not None else draw_seed(value.device) if random else None
        before(score, query, key)
        before(align)
        call = Call(
            form=score.reduce(query, key),
            value=value,
            align=align,
            query=query,
            key=key,
            mask=bound,
            bias=bias,
            dropout=dropout,
            training=self.training,
            start=start,
            seed=seed,
            single=single,
        )
        call = call if shard is None else sharded(call, shard)
        prepared = align.prepare(call)
        return call.with_(prepared=prepared) if prepared else call

    def _shard(self, nq: int, n: int, lead: tuple[int, ...], drawn_on: torch.device | None) -> Shard | None:
        """This rank's slices among those of all ranks, once these have said that they do the same with them."""
        same = {
            "align": settings(self.align),
            "score": settings(self.score),
            "training": self.training,
            "dropout": self.dropout if self.training else 0.0,
        }
        return shard_of(nq, n, lead, what="comparing attentions", same=same, drawn_on=drawn_on)

    def _mapped(self, key: Tensor, value: Tensor, bound: Bound | None) -> tuple[Tensor, Tensor]:
        """Keys and values as they are compared and read."""
        mapped = key if self.key_map is None else self.key_map(key)
        value = value if self.value_map is None else self.value_map(value)
        # A map writes its bias into what nobody may read.
        keys = None if bound is None else bound.keys(key.device)
        return kept_rows(mapped, keys), kept_rows(value, keys)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, impl={self.impl!r}"


def dispatch_of(module: Attention, *args: Any, device: str | torch.device | None = None, **kwargs: Any) -> Dispatch:
    """The execution that a call would take, which is not run; on a type of device that need not be there, where one is given."""
    kind = kind_of(device)
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_cuda]
    # A call draws its seed when it is made, and this one is never run.
    with torch.random.fork_rng(devices=sorted({x.get_device() for x in inputs})):
        call = hooks.changed(module, module.call(*args, **kwargs))
        with nullcontext() if kind is None else assuming(kind):
            return choose(call, module.impl)


def kind_of(device: str | torch.device | None) -> str | None:
    """The type of a device that an execution may be chosen for."""
    try:
        kind = None if device is None else torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in (None, "cpu", "cuda"):
        raise ValueError(refusal("device", repr(device), "'cpu' or 'cuda'"))
    return kind


def _parts(score: Score | str, align: Alignment | str, options: dict[str, Any]) -> tuple[Score, Alignment]:
    """Resolve names, and refuse options that no named part takes."""
    used: set[str] = set()
    named = [part for part in (score, align) if isinstance(part, str)]
    if isinstance(score, str):
        if options.get("features") is not None and not _takes(score, "features"):
            fix = "Fix: use a score with parameters, such as 'additive' or 'general'."
            raise ValueError(
                refusal("features", options["features"], f"nothing, since {score!r} has no parameters", fix)
            )
        built_score, taken = catalog.build(score, "general/scoring", "score", options)
        used |= taken
    elif isinstance(score, Score):
        built_score = score
    else:
        raise TypeError(_no_part("score", score, Score, "a Score or the name of one"))
    if isinstance(align, str):
        built_align, taken = catalog.build(align, "general/alignment", "align", options)
        used |= taken
    elif isinstance(align, Alignment):
        built_align = align
    else:
        raise TypeError(_no_part("align", align, Alignment, "an Alignment or the name of one"))
    for name in options:
        if name not in used:
            whose = " and ".join(repr(part) for part in named)
            fix = _way_out(name, whose, sorted(_taken_by(score, align)))
            expected = f"an argument of {whose or 'an Attention of ready-made parts'}"
            raise TypeError(refusal(name, repr(options[name]), expected, fix))
    return built_score, built_align


def _way_out(option: str, named: str, taken: list[str]) -> str:
    """What to say of an option that no part takes: the one that was meant, or those that the parts take."""
    known = _arguments()
    if option in known and not named:
        return "Fix: give it to the part itself, such as Additive(query_dim=…, …), or name the part."
    # One that is spelt as it should be was not meant for another, however alike they look.
    near = "" if option in known else nearest(option, known, listed=True)
    verb = "take" if " and " in named or not named else "takes"
    return near or f"{named or 'Ready-made parts'} {verb} {', '.join(taken) or 'none'}."


def _taken_by(score: Score | str, align: Alignment | str) -> set[str]:
    """The options of the parts that were given by name."""
    found: set[str] = set()
    for part, category in ((score, "general/scoring"), (align, "general/alignment")):
        if isinstance(part, str):
            entry = catalog.find(part, category)
            found |= set(catalog.arguments(entry)) - set(entry.preset)
    return found


def _no_part(argument: str, given: object, kind: type, expected: str) -> str:
    """Refuse what is no part; a class of parts is one step from it."""
    if isinstance(given, type):
        fix = f"Fix: make one, {given.__name__}(…)." if issubclass(given, kind) else ""
        return refusal(argument, f"the class {given.__name__}", expected, fix)
    return refusal(argument, type(given).__name__, expected)


def _takes(score: str, argument: str) -> bool:
    return argument in catalog.arguments(catalog.find(score, "general/scoring", "score"))


def _arguments() -> set[str]:
    names = {"key_map", "value_map", "dropout", "impl"}
    for entry in catalog.entries():
        if issubclass(entry.cls, Score | Alignment):
            names |= set(catalog.arguments(entry))
    return names


def _check_start(start: Any) -> None:
    if isinstance(start, bool) or not isinstance(start, int | torch.SymInt) or not -(1 << 62) < start < 1 << 62:
        raise TypeError(refusal("start", repr(start), "a position, a whole number"))


def _check_inputs(
    score: Score, query: Tensor | None, key: Tensor, value: Tensor | None
) -> tuple[Tensor | None, Tensor, tuple[int, ...], bool]:
    """The query with its axis, the value, the leading axes, and whether there was a single query; or a refusal."""
    # Its own first: walking the modules costs as much as a small product.
    parameter = next(iter(score._parameters.values()), None)
    if parameter is None and score._modules:
        parameter = next(score.parameters(), None)
    alike = isinstance(key, Tensor) and key.dtype.is_floating_point and not key.is_nested
    if alike:
        dtype, device = key.dtype, key.device
        for x in (query, value, parameter):
            if x is None:
                continue
            if not (isinstance(x, Tensor) and x.dtype == dtype and x.device == device) or x.is_nested:
                alike = False
    if not alike:
        _check_kinds(query, key, value, parameter)
    value = key if value is None else value
    shape: tuple[int, ...] = key.shape
    axes, lead = len(shape), shape[:-2]
    if axes < 2 or shape[-1] == 0:
        expected = "at least two axes, (..., N, d_k)" if axes < 2 else "at least one feature, (..., N, d_k)"
        raise ValueError(refusal("key", f"shape {tuple(shape)}", expected))
    if value is not key and (value.dim() < 2 or value.shape[-2] != shape[-2]):
        raise ValueError(
            refusal("value", f"shape {tuple(value.shape)}", f"as many rows as the key: (..., {shape[-2]}, d_v)")
        )
    if query is None:
        if score.needs_query:
            raise ValueError(refusal("query", None, f"a tensor: {type(score).__name__} compares queries with keys"))
        single, of_query = True, lead
    else:
        given: tuple[int, ...] = query.shape
        single = len(given) != axes
        if single and len(given) != 1 and len(given) != axes - 1:
            raise ValueError(
                refusal(
                    "query",
                    f"shape {tuple(given)} beside a key of shape {tuple(shape)}",
                    "as many axes as the key (many queries), one fewer, or one (a single query)",
                )
            )
        query = query.unsqueeze(-2) if single else query
        of_query = given[:-1] if single else given[:-2]
    if value is not key or (of_query and of_query != lead) or score.head_shape:
        lead = _common_lead(of_query, lead, value.shape[:-2], score.head_shape)
    return query, value, lead, single


def _check_kinds(query: Tensor | None, key: Tensor, value: Tensor | None, parameter: Tensor | None) -> None:
    """Refuse what is no floating-point tensor, or of another dtype or device; under autocast dtypes may differ."""
    for name, x in (("key", key), ("query", query), ("value", value)):
        if name != "key" and (x is None or x is key):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(refusal(name, type(x).__name__, "a tensor"))
        if not x.dtype.is_floating_point:
            raise TypeError(refusal(name, f"a tensor of {x.dtype}", "a floating-point tensor"))
        refuse_nested(name, x)
        if x is not key and x.device != key.device:
            raise ValueError(refusal(name, f"a tensor on {x.device}", f"the device of the key, {key.device}"))
        if x.dtype != key.dtype and not autocasting(key.device):
            raise TypeError(refusal(name, f"a tensor of {x.dtype}", f"the dtype of the key, {key.dtype}"))
    if parameter is None:
        return
    if parameter.device != key.device:
        fix = f"Fix: module.to({str(key.device)!r})."
        raise ValueError(refusal("key", f"a tensor on {key.device}", f"the module's device, {parameter.device}", fix))
    if parameter.dtype != key.dtype and not autocasting(key.device):
        fix = "Fix: convert the module or the inputs, or use torch.autocast."
        raise TypeError(refusal("key", f"a tensor of {key.dtype}", f"the module's dtype, {parameter.dtype}", fix))


def _common_lead(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], heads: tuple[int, ...]
) -> tuple[int, ...]:
    """The leading axes of the result, to which all others broadcast."""
    try:
        lead = common_shape(key, value, query)
    except RuntimeError:
        got = ", ".join(str(tuple(shape)) for shape in (key, value, query))
        raise ValueError(
            refusal("key, value and query", f"leading axes {got}", "axes that broadcast together")
        ) from None
    try:
        return common_shape(lead, heads)
    except RuntimeError:
        fix = "Head axes are the last leading axes of the inputs: (batch, heads, N, d)."
        raise ValueError(
            refusal("key", f"leading axes {tuple(lead)}", f"axes that end in heads={heads}", fix)
        ) from None


def _bind(mask: Tensor | Mask | None, sizes: Sizes, single: bool, device: torch.device) -> Bound | None:
    if mask is None:
        return None
    if single and isinstance(mask, Tensor) and mask.dim() >= 1:
        whole = (*sizes.lead, sizes.n)
        if not broadcasts(tuple(mask.shape), whole):
            raise ValueError(refusal("mask", f"shape {tuple(mask.shape)}", f"a shape that broadcasts to {whole}"))
        mask = mask.unsqueeze(-2)
    mask = as_mask(mask)
    bound = mask.bind(sizes)
    if bound.is_filled:
        return bound
    probe = bound.tile(range(0), range(0), device)
    if probe.device != device:
        raise ValueError(refusal("mask", f"a mask on {probe.device}", f"the device of the key, {device}"))
    return bound


def _check_bias(bias: Bias | None, sizes: Sizes, single: bool, device: torch.device) -> Bias | None:
    if bias is None or (callable(bias) and not isinstance(bias, Tensor)):
        return bias
    if not isinstance(bias, Tensor) or not bias.dtype.is_floating_point:
        kind = f"a tensor of {bias.dtype}" if isinstance(bias, Tensor) else type(bias).__name__
        fix = "Fix: booleans go to `mask=`." if "bool" in kind else ""
        raise TypeError(refusal("bias", kind, "a floating-point tensor or a function of indices i and j", fix))
    if bias.device != device:
        raise ValueError(refusal("bias", f"a tensor on {bias.device}", f"the device of the key, {device}"))
    shown = tuple(bias.shape)
    bias = bias.unsqueeze(-2) if single and bias.dim() else bias
    whole = (*sizes.lead, sizes.nq, sizes.n)
    if not broadcasts(tuple(bias.shape), whole):
        expected = (*whole[:-2], whole[-1]) if single else whole
        raise ValueError(refusal("bias", f"shape {shown}", f"a shape that broadcasts to {expected}"))
    return bias if bias.dim() > 1 else bias.reshape(1, -1)


def _without_unread(
    mask: Bound | None, query: Tensor | None, key: Tensor, value: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Zero what nobody may read, and queries that may read nothing: 0 x NaN is NaN, so it must not reach a product."""
    if mask is None or mask.is_filled:
        return query, key, value
    keys, rows = None if mask.has_zeros else mask.keys(key.device), mask.rows(key.device)
    if keys is not None:
        shared = value is key
        key = kept_rows(key, keys)
        value = key if shared else kept_rows(value, keys)
    if query is not None and rows is not None:
        query = kept_rows(query, rows)
    return query, key, value
