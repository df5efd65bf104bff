"""What the mechanisms of this family are given: scores and alignments for their steps, masks for their inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from regard import catalog
from regard._errors import nearest, refusal
from regard.general.alignments import Alignment
from regard.general.attention import Attention
from regard.general.inputs import check_together
from regard.general.inputs import masked_input as masked_input
from regard.general.masks import Keys
from regard.general.scores import Score

# A name, a class, a ready-made part, or a function of the widths of query (None where there is no query) and key.
ScoreLike: TypeAlias = str | type[Score] | Score | Attention | Callable[[Any, int], Score | Attention]
AlignLike: TypeAlias = str | type[Alignment] | Alignment | Callable[[], Alignment] | None
# The same for all steps, or one for each.
Scores: TypeAlias = ScoreLike | tuple[ScoreLike, ...] | list[Any]
Aligns: TypeAlias = AlignLike | tuple[AlignLike, ...] | list[Any]

_OF_ATTENTION = ("dropout", "impl")


def attentions(
    steps: Mapping[str, tuple[int | None, int]],
    score: Scores,
    align: Aligns,
    options: Mapping[str, Any],
    **defaults: Any,
) -> dict[str, Attention]:
    """One attention a step, each with parameters of its own.

    Args:
        steps: widths of query and key of each step, by name; None for a step without a query.
        score: what scores, the same for all steps or one for each: a name, a class, a function of the two widths, or a
            ready-made score or attention.
        align: what aligns, likewise; softmax when None.
        options: arguments of the parts given by name or class, and `dropout` and `impl`. The widths are filled in,
            `hidden_dim` is the key's width when not given, and `features=True` asks for one weight for each feature.
        **defaults: options that nobody need take.
    """
    used: set[str] = set()
    built: dict[str, Attention] = {}
    scores, aligns = _each(score, "score", steps), _each(align, "align", steps)
    for (name, (query_dim, key_dim)), s, a in zip(steps.items(), scores, aligns, strict=True):
        widths = {"query_dim": query_dim, "key_dim": key_dim, "dim": key_dim, "hidden_dim": key_dim}
        offered = widths | defaults | dict(options)
        if offered.get("features") is True:
            offered["features"] = key_dim
        part, taken = _score(s, query_dim, key_dim, offered)
        used |= taken
        if isinstance(part, Attention):
            built[name] = part
        else:
            alignment, taken = _align(a, offered)
            used |= taken | set(_OF_ATTENTION)
            rest = {key: options[key] for key in _OF_ATTENTION if key in options}
            built[name] = Attention(part, alignment, **rest)
        if query_dim is None and built[name].score.needs_query:
            got = type(built[name].score).__name__
            raise ValueError(refusal("score", got, f"a score that needs no query for the step {name!r}"))
    for key in options:
        if key not in used:
            expected = "an argument of a score or alignment that is given by name"
            known = _arguments()
            fix = "The parts that were chosen do not take it." if key in known else nearest(key, known)
            raise TypeError(refusal(key, repr(options[key]), expected, fix))
    for name, (query_dim, key_dim) in steps.items():
        _check_widths(built[name], name, query_dim, key_dim)
    return built


def _check_widths(attend: Attention, step: str, query_dim: int | None, key_dim: int) -> None:
    """Refuse a score that takes queries as wide as keys alone, where they are known to be of unlike widths."""
    score = attend.score
    # A score of one's own may say itself which widths it takes.
    says_itself = type(score).check_widths is not Score.check_widths
    takes_alike = score.needs_query and score.query_dim is None and attend.key_map is None and not says_itself
    if takes_alike and query_dim is not None and query_dim != (score.key_dim or key_dim):
        got = (
            f"{type(score).__name__} for the step {step!r}, of queries of width {query_dim} and keys of width {key_dim}"
        )
        fix = "Fix: use General or Additive, which take different widths."
        raise ValueError(refusal("score", got, "a score that compares unlike widths", fix))


def _each(given: Any, argument: str, steps: Mapping[str, Any]) -> list[Any]:
    """One entry a step."""
    if isinstance(given, list | tuple):
        if len(given) != len(steps):
            order = ", ".join(steps)
            raise ValueError(refusal(argument, f"{len(given)} of them", f"one for each step: {order}"))
        return list(given)
    owns = isinstance(given, nn.Module) and (isinstance(given, Attention) or next(given.parameters(), None) is not None)
    if owns and len(steps) > 1:
        fix = f"Fix: pass its name, its class or a function that makes one; or a list, one for each of {', '.join(steps)}."
        raise ValueError(refusal(argument, f"one {type(given).__name__}", f"parameters for {len(steps)} steps", fix))
    return [given] * len(steps)


def _score(
    score: ScoreLike, query_dim: int | None, key_dim: int, offered: Mapping[str, Any]
) -> tuple[Score | Attention, set[str]]:
    if isinstance(score, Score | Attention):
        return score, set()
    if isinstance(score, str):
        return catalog.build(score, "general/scoring", "score", offered)
    if isinstance(score, type) and issubclass(score, Score):
        return _instance(score, "score", offered)
    if not callable(score) or isinstance(score, type | nn.Module):
        got = score.__name__ if isinstance(score, type) else type(score).__name__
        raise TypeError(refusal("score", got, "a score, its name, its class, or a function of the widths"))
    made = score(query_dim, key_dim)
    if not isinstance(made, Score | Attention):
        raise TypeError(refusal("score", f"a function that gives {type(made).__name__}", "a score or an attention"))
    return made, set()


def _align(align: AlignLike, offered: Mapping[str, Any]) -> tuple[Alignment, set[str]]:
    if isinstance(align, Alignment):
        return align, set()
    if align is None or isinstance(align, str):
        return catalog.build("soft" if align is None else align, "general/alignment", "align", offered)
    if isinstance(align, type) and issubclass(align, Alignment):
        return _instance(align, "align", offered)
    if not callable(align) or isinstance(align, type | nn.Module):
        got = align.__name__ if isinstance(align, type) else type(align).__name__
        raise TypeError(refusal("align", got, "an alignment, its name, its class, or a function without arguments"))
    made = align()
    if not isinstance(made, Alignment):
        raise TypeError(refusal("align", f"a function that gives {type(made).__name__}", "an alignment"))
    return made, set()


def _instance(cls: type[Any], argument: str, offered: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """Make an instance of a class from those options that its constructor knows."""
    # A class without a constructor of its own has torch's, of any arguments.
    parameters = {
        key: p
        for key, p in inspect.signature(cls).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    taken = {key for key in offered if key in parameters}
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in taken]
    if missing:
        raise TypeError(refusal(argument, cls.__name__, f"also {', '.join(f'{key}=…' for key in missing)}"))
    return cls(**{key: offered[key] for key in taken}), taken


def _arguments() -> set[str]:
    names = set(_OF_ATTENTION)
    for category in ("general/scoring", "general/alignment"):
        for entry in catalog.entries(category):
            names |= set(catalog.arguments(entry))
    return names


def pair_of_widths(dim: int | tuple[int, int]) -> tuple[int, int]:
    """Widths of two inputs, from one number for both or one for each."""
    pair = (dim, dim) if isinstance(dim, int) else tuple(dim)
    if len(pair) != 2 or not all(isinstance(d, int) and not isinstance(d, bool) and d >= 1 for d in pair):
        raise ValueError(refusal("dim", repr(dim), "a whole number >= 1, or two of them"))
    return pair[0], pair[1]


def real(mask: Tensor | None) -> Keys | None:
    """What to pass to an attention that reads a filled input."""
    return None if mask is None else Keys(mask, filled=True)


def masked_inputs(
    inputs: Mapping[str, Tensor], masks: Sequence[Tensor | None] | None, widths: Sequence[int] | None = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Inputs with zeros where their masks are False, and the masks, one for each input, shaped like its tokens."""
    nothing = [None] * len(inputs)
    if masks is not None and (not isinstance(masks, list | tuple) or len(masks) != len(inputs)):
        got = f"{len(masks)} masks" if isinstance(masks, list | tuple) else type(masks).__name__
        raise ValueError(refusal("masks", got, f"one mask, or None, for each of {', '.join(inputs)}"))
    filled, known = [], []
    for (name, x), mask, width in zip(inputs.items(), masks or nothing, widths or nothing, strict=True):
        x, mask = masked_input(x, mask, name, width)
        filled.append(x)
        known.append(mask)
    lead = check_together(dict(zip(inputs, filled, strict=True)))
    if any(x.shape[:-2] != lead for x in filled):
        filled = [x.expand(*lead, *x.shape[-2:]) for x in filled]
        known = [None if mask is None else mask.expand(*lead, mask.shape[-1]) for mask in known]
    return filled, known


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the real tokens of an input that is zero elsewhere, (..., N, d) to (..., d); zero where there are none."""
    if mask is None:
        return x.mean(-2) if x.shape[-2] else x.sum(-2)
    # As in a mean, half precision is summed in float32: a long input's sum may exceed what float16 holds.
    total = x.sum(-2, dtype=torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x.sum(-2)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).to(x.dtype)


def is_empty(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Whether an input (..., N, d) has no real token, (...); None where every one has some."""
    if mask is None:
        return None if x.shape[-2] > 0 else torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device)
    return ~mask.any(-1)
