"""Hierarchical attention: attend inside each segment, then over the segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import Aligns, Scores, attentions, masked_input, real
from regard.general.attention import Attention
from regard.general.inputs import check_together
from regard.general.scores.base import vector, width


@runtime_checkable
class TraceLike(Protocol):
    """What was recorded, by path."""

    def __getitem__(self, path: str) -> Any: ...

    def __iter__(self) -> Iterator[str]: ...


@register(
    name="multi-level-applications",
    zh="多层级应用",
    path="feature/levels",
    equation="compositions: SHAN, segments of a video, HATN, HRAN, HA-CCN",
    paper="Ying et al., Sequential Recommender System based on Hierarchical Attention Networks, IJCAI 2018; Wang et al. 2016; "
    "Li et al., AAAI 2018; Xing et al., AAAI 2018; Sindagi & Patel, TIP 2019",
    year=2018,
    time="that of the levels",
    memory="linear",
    choose="recommendation, video, transfer between domains, dialogue, counting: the examples compose each from these parts",
    avoid="a plain document will do: hierarchical attention itself",
)
@register(
    name="hierarchical",
    zh="层级注意力",
    path="feature/levels",
    equation="c_s = Attn(words of s),  c = Attn(c_1, …, c_S)",
    paper="Yang et al., Hierarchical Attention Networks for Document Classification, NAACL 2016",
    year=2016,
    time="N d_w d at the leaves, less above",
    memory="linear",
    choose="input that comes in segments: documents, sessions, videos; weights are wanted for words and for sentences",
    avoid="segments without meaning of their own: flat attention sees every pair of positions",
)
class HierarchicalAttention(nn.Module):
    r"""Read a document from the bottom up (Yang et al. 2016, https://aclanthology.org/N16-1174).

    Features lie at the leaves of $L$ levels (word, sentence, …). Level $t$ encodes the features of each segment and reads them
    into one feature of the level above:

    $$h^{(t)} = \mathrm{encode}_t\big(c^{(t-1)}\big), \qquad
      c^{(t)}_s = \sum_{j \in s} \mathrm{align}\big(\mathrm{score}(q^{(t)}, h^{(t)})\big)_j\, h^{(t)}_j$$

    HAN's score is query-free, $u \cdot \tanh(W h_j + b)$; a score that compares has a learned query $q^{(t)}$, or one that is given. A
    masked feature weighs nothing; a segment with nothing in it is zero and weighs nothing above. The weight of a leaf in the
    whole is the product of the weights on its path (`leaf_weights`). `regard.pad_levels` makes features and mask of ragged
    documents.

    Args:
        dim: width of the leaves.
        levels: names of the levels from the leaves up, or one attention a level, by name or in order. An attention of level
            `word` is at `levels.word`.
        score: of all levels, or one for each, where the attentions are not given: a name, a class, a function of the widths,
            or a ready-made score.
        align: of all levels, or one for each; softmax when not given.
        encoders: one a level, or None for a level without: modules that take features (..., N, d) and a mask (..., N), such as
            `RecurrentEncoder`; the paper has one at each level.
        **options: arguments of scores and alignments given by name, such as `hidden_dim`; `dropout`, `impl`.

    Example:
        >>> attend = HierarchicalAttention(8, levels=("word", "sentence"))
        >>> attend(torch.randn(2, 3, 5, 8)).shape  # two documents of three sentences of five words
        torch.Size([2, 8])
        >>> words, sentences = (Attention("additive", query_dim=8, key_dim=8, hidden_dim=16) for _ in range(2))
        >>> HierarchicalAttention(dim=8, levels=[words, sentences])(torch.randn(2, 3, 5, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        dim: int,
        levels: Sequence[str] | Sequence[Attention] | Mapping[str, Attention] = ("word", "sentence"),
        *,
        score: Scores = "query-free",
        align: Aligns = None,
        encoders: Sequence[nn.Module | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        names = _names(levels)
        if encoders is not None and len(encoders) != len(names):
            raise ValueError(
                refusal("encoders", f"{len(encoders)} of them", f"one, or None, for each of {len(names)} levels")
            )
        self.encoders = nn.ModuleDict()
        self.dim = width("dim", dim)
        widths, d = {}, self.dim
        for name, encoder in zip(names, encoders or [None] * len(names), strict=True):
            if encoder is not None:
                self.encoders[name] = encoder
            d = getattr(encoder, "out_dim", d)
            widths[name] = d
        given = levels.values() if isinstance(levels, Mapping) else levels
        ready = [level for level in given if isinstance(level, Attention)]
        if ready and (len(ready) < len(names) or options):
            raise TypeError(refusal("levels", "attentions with names or options", "attentions alone, or names alone"))
        built = dict(zip(names, ready, strict=True)) if ready else _build(widths, score, align, options)
        self.levels = nn.ModuleDict(built)
        wanting = {name: level.score for name, level in built.items() if level.score.needs_query}
        self.queries = nn.ParameterDict({n: vector(s.query_dim or widths[n]) for n, s in wanting.items()})

    def forward(
        self,
        features: Float[Tensor, "*b d"],
        mask: Bool[Tensor, "*_"] | None = None,
        query: Float[Tensor, "*_q dq"] | None = None,
    ) -> Float[Tensor, "*c dv"]:
        """Read leaves (..., N_L, …, N_1, d) into (..., d_v).

        Args:
            features: the leaves; the last axes but one are those of the levels, the leaves' own innermost.
            mask: True for real leaves, (..., N_L, …, N_1).
            query: (..., d_q), one for each document, in place of the learned ones.
        """
        depth = len(self.levels)
        features, mask = masked_input(features, mask, "features", self.dim)
        if features.dim() <= depth:
            raise ValueError(refusal("features", f"{features.dim()} axes", f"at least {depth + 1}, for {depth} levels"))
        if query is not None and query.dim() > 1:
            check_together({"features": features, "query": query[(..., *(None,) * depth, slice(None))]})
        for above, (name, attend) in zip(reversed(range(depth)), self.levels.items(), strict=True):
            if name in self.encoders:
                features = self.encoders[name](features, mask)
            empty = features.shape[-2] == 0
            # A query that is given may hold anything where there is nothing to read.
            allowed = real(mask) if query is None else mask
            features = attend(self._query(name, query, above), features, mask=allowed)
            if mask is not None or empty:
                mask = features.new_zeros(features.shape[:-1], dtype=torch.bool) if mask is None else mask.any(-1)
        return features

    def leaf_weights(self, trace: TraceLike, at: str = "") -> Tensor:
        """Weights of the leaves in the whole, from the last recorded call: (..., N_L, …, N_1), features last if there are any.

        Args:
            trace: recorded while this module ran.
            at: path of this module in the model that was recorded: `model.reader` is at `"reader"`; empty when the module
                was recorded by itself.
        """
        whole: Tensor | None = None
        _check_place(trace, at, list(self.levels))
        for name, attend in reversed(list(self.levels.items())):
            path = f"{at}.levels.{name}" if at else f"levels.{name}"
            weights: Tensor = trace[path][-1].weights
            if whole is not None:
                assert isinstance(attend, Attention)
                weights = weights * whole.unsqueeze(-1 if attend.score.features is None else -2)
            whole = weights
        assert whole is not None
        return whole

    def _query(self, name: str, query: Tensor | None, above: int) -> Tensor | None:
        if name not in self.queries:
            return None
        if query is None:
            learned: Tensor = self.queries[name]
            return learned
        return query[(..., *(None,) * above, slice(None))] if query.dim() > 1 else query


def _check_place(trace: TraceLike, at: str, levels: Sequence[str]) -> None:
    """Say where hierarchies of these levels were recorded, where there is none at this path."""
    recorded, top = list(trace), f"levels.{levels[-1]}"
    places = [path.removesuffix(top).removesuffix(".") for path in recorded if f".{path}".endswith(f".{top}")]
    if places and at not in places:
        fix = f"Fix: {' or '.join(f'at={place!r}' for place in places)}."
        raise KeyError(refusal("at", repr(at), "the path of this module in the model that was recorded", fix))


def _names(levels: object) -> list[str]:
    """Names of the levels; attentions without names are numbered."""
    if isinstance(levels, str) or not isinstance(levels, Sequence | Mapping):
        raise ValueError(refusal("levels", repr(levels), "names of levels, or one attention a level"))
    names = [level if isinstance(level, str) else str(k) for k, level in enumerate(levels)]
    taken = nn.ModuleDict()
    for name in names:
        if not name or "." in name or hasattr(taken, name):
            raise ValueError(refusal("levels", repr(name), "a name that can stand in a path: 'word', 'sentence'"))
    if not names or len(set(names)) < len(names):
        raise ValueError(refusal("levels", repr(levels), "at least one level, each with a name of its own"))
    return names


def _build(widths: Mapping[str, int], score: Scores, align: Aligns, options: Mapping[str, Any]) -> dict[str, Attention]:
    return attentions({name: (d, d) for name, d in widths.items()}, score, align, options)


def pad_levels(nested: Sequence[Any], depth: int) -> tuple[Tensor, Tensor]:
    """Make one tensor, and its mask, of ragged leaves.

    Args:
        nested: lists of … of lists of tensors (N, d): for two levels, a list of documents, each a list of sentences.
        depth: number of levels.

    Returns:
        Features (B, N_L, …, N_1, d) and booleans (B, N_L, …, N_1). A list may be empty, as long as some leaf tells the width.

    Example:
        >>> documents = [[torch.ones(3, 4), torch.ones(5, 4)], [torch.ones(2, 4)]]
        >>> features, mask = pad_levels(documents, depth=2)
        >>> features.shape, mask.sum(-1).tolist()
        (torch.Size([2, 2, 5, 4]), [[3, 5], [2, 0]])
    """
    depth = width("depth", depth)
    leaves: dict[tuple[int, ...], Tensor] = {}
    sizes = [0] * depth
    _collect(nested, (), leaves, sizes)
    if not leaves:
        raise ValueError(refusal("nested", "lists without a single tensor", "at least one, which tells the width"))
    first = next(iter(leaves.values()))
    for x in leaves.values():
        if (x.shape[-1], x.dtype, x.device) != (first.shape[-1], first.dtype, first.device):
            got, expected = (f"width {y.shape[-1]}, {y.dtype}, on {y.device}" for y in (x, first))
            raise ValueError(refusal("nested", f"a tensor of {got}", f"all like the first: {expected}"))
    longest = max(len(x) for x in leaves.values())
    features = first.new_zeros(*sizes, longest, first.shape[-1])
    mask = torch.zeros(features.shape[:-1], dtype=torch.bool, device=first.device)
    for place, x in leaves.items():
        features[place][: len(x)] = x
        mask[place][: len(x)] = True
    return features, mask


def _collect(entry: Any, place: tuple[int, ...], leaves: dict[tuple[int, ...], Tensor], sizes: list[int]) -> None:
    """Tensors at the depth of the leaves, by their place in the lists, and the longest list of each level."""
    level, got = len(place), f"shape {tuple(entry.shape)}" if isinstance(entry, Tensor) else type(entry).__name__
    if level == len(sizes):
        if not isinstance(entry, Tensor) or entry.dim() != 2:
            raise ValueError(refusal("nested", got, f"tensors (N, d) inside {level} lists"))
        leaves[place] = entry
        return
    if isinstance(entry, str) or not isinstance(entry, Sequence | Tensor):
        raise ValueError(refusal("nested", got, f"tensors (N, d) inside {len(sizes)} lists"))
    sizes[level] = max(sizes[level], len(entry))
    for k, part in enumerate(entry):
        _collect(part, (*place, k), leaves, sizes)
