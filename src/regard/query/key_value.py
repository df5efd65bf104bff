"""Key-value memory: keys address, values are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import AlignLike, ScoreLike, attentions, masked_input
from regard.general.bound import broadcasts
from regard.general.inputs import checked_input
from regard.general.scores.base import matrix, width
from regard.ops.fill import kept_rows
from regard.query.parts import operand, widths


class Memory(NamedTuple):
    """What has been written: slots with a key, a value, and whether there is anything in them."""

    keys: Float[Tensor, "*b n dk"]
    values: Float[Tensor, "*b n dv"]
    mask: Bool[Tensor, "*b n"]


@register(
    name="key-value",
    zh="键值对注意力",
    path="query/reading",
    equation="att((K, V), q) = Σ_n softmax_n(s(k_n, q)) v_n,  q' = R (q + o)",
    paper="Miller et al., Key-Value Memory Networks for Directly Reading Documents, EMNLP 2016",
    year=2016,
    time="H N d",
    memory="linear",
    choose="what identifies a thing is not what is to be said of it: a fact and its object, a window and its centre",
    avoid="keys and values would be the same vectors: plain attention",
)
class KeyValueMemory(nn.Module):
    r"""A memory that is addressed by keys and read by values (Miller et al. 2016, https://arxiv.org/abs/1606.03126).

    $$o = \mathrm{att}((K, V), q) = \sum_n \mathrm{align}\big(\mathrm{score}(q, k_n)\big)\, v_n, \qquad q' = R\,(q + o)$$

    Nothing is counted: a key says where to look, a value what is found there. `write` appends slots to a memory, which is plain
    data; `read` is attention; `hop` makes the next query, with a matrix $R$ of its own for each hop. Calling the module writes, reads and
    hops, and gives the last $o$: with one hop, plain attention on keys and values.

    Args:
        dim: width of query, key and value, or of each of the three; hops need values as wide as the query.
        hops: how many times the memory is read.
        capacity: slots that are kept, the latest; all of them when None.
        score: a name, a class, a function of the widths of query and key, or a ready-made score or attention.
        align: likewise; softmax when not given.
        **options: arguments of a score and alignment given by name; `dropout`, `impl`.

    Example:
        >>> memory_network = KeyValueMemory((3, 3, 5))
        >>> memory = memory_network.write(None, torch.randn(2, 7, 3), torch.randn(2, 7, 5))
        >>> memory = memory_network.write(memory, torch.randn(2, 4, 3), torch.randn(2, 4, 5))
        >>> memory.keys.shape, memory_network.read(torch.randn(2, 3), memory).shape
        (torch.Size([2, 11, 3]), torch.Size([2, 5]))
    """

    def __init__(
        self,
        dim: int | tuple[int, int, int],
        hops: int = 1,
        *,
        capacity: int | None = None,
        score: ScoreLike = "dot",
        align: AlignLike = None,
        **options: Any,
    ) -> None:
        super().__init__()
        query_dim, key_dim, value_dim = widths("dim", dim, 3)
        self.hops, self.value_dim = width("hops", hops), value_dim
        self.capacity = None if capacity is None else width("capacity", capacity)
        if hops > 1 and value_dim != query_dim:
            got = f"{hops} with queries of width {query_dim} and values of width {value_dim}"
            raise ValueError(refusal("hops", got, "equal widths, since what was read is added to the query"))
        if options.get("features") is True:
            options["features"] = value_dim
        self.attention = attentions({"attention": (query_dim, key_dim)}, score, align, options)["attention"]
        self.R = nn.ParameterList(matrix(query_dim, query_dim) for _ in range(self.hops - 1))

    def write(
        self,
        memory: Memory | None,
        keys: Float[Tensor, "*b n dk"],
        values: Float[Tensor, "*b n dv"] | None = None,
        mask: Bool[Tensor, "*_ n"] | None = None,
    ) -> Memory:
        """A memory with these slots at its end, without the oldest where there are too many; `mask` is True for real ones."""
        values = keys if values is None else values
        if values.shape[:-1] != keys.shape[:-1]:
            raise ValueError(
                refusal("values", f"shape {tuple(values.shape)}", f"one for each key: {tuple(keys.shape[:-1])}")
            )
        keys, known = masked_input(keys, mask, "keys")
        values, _ = masked_input(values, mask, "values", self.value_dim)
        known = keys.new_ones(keys.shape[:-1], dtype=torch.bool) if known is None else known
        new = Memory(keys, values, known)
        if memory is not None:
            new = Memory(
                torch.cat([memory.keys, keys], -2),
                torch.cat([memory.values, values], -2),
                torch.cat([memory.mask, known], -1),
            )
        if self.capacity is None or new.keys.shape[-2] <= self.capacity:
            return new
        last = -self.capacity
        return Memory(new.keys[..., last:, :], new.values[..., last:, :], new.mask[..., last:])

    def read(self, query: Float[Tensor, "*q dq"], memory: Memory) -> Float[Tensor, "*q dv"]:
        """What the memory answers to queries (..., d_q) or (..., Nq, d_q); an empty one answers zero."""
        if not isinstance(memory, Memory):
            raise TypeError(refusal("memory", type(memory).__name__, "a Memory", "Fix: one that `write` gave."))
        mask = memory.mask if query.dim() == memory.keys.dim() - 1 else memory.mask.unsqueeze(-2)
        answer: Tensor = self.attention(query, memory.keys, memory.values, mask=mask)
        return answer

    def hop(
        self, query: Float[Tensor, "*q dq"], read: Float[Tensor, "*q dq"], number: int = 0
    ) -> Float[Tensor, "*q dq"]:
        """The query after a hop, R (q + o), with the matrix of that hop."""
        if not 0 <= number < len(self.R):
            raise ValueError(refusal("number", number, f"a hop that another follows, of {len(self.R)}"))
        following: Tensor = (query + read) @ self.R[number].mT
        return following

    def forward(
        self,
        query: Float[Tensor, "*q dq"],
        key: Float[Tensor, "*b n dk"],
        value: Float[Tensor, "*b n dv"] | None = None,
        mask: Bool[Tensor, "*_ n"] | None = None,
    ) -> Float[Tensor, "*q dv"]:
        """Write, then read and hop; `mask` is True for real slots."""
        checked_input(key, None, "key", self.value_dim if value is None else None)
        if value is not None:
            checked_input(value, None, "value", self.value_dim)
        if not isinstance(query, Tensor):
            raise TypeError(refusal("query", type(query).__name__, "a floating-point tensor, (..., d_q)"))
        if query.dim() == 0:
            raise ValueError(refusal("query", "shape ()", "a query or several, (..., d_q)"))
        memory = self.write(None, key, value, mask)
        for weight in self.R[:1]:
            operand("query", query, weight)
        alive = memory.mask.any(-1)
        if query.dim() == key.dim():
            alive = alive.unsqueeze(-1)
            if not broadcasts(tuple(alive.shape), tuple(query.shape[:-1])):
                got = f"shape {tuple(query.shape)} beside a key of shape {tuple(key.shape)}"
                raise ValueError(refusal("query", got, "the leading axes of the key"))
            alive = alive.expand(query.shape[:-1])
        query = kept_rows(query, alive)
        read = self.read(query, memory)
        for number in range(self.hops - 1):
            query = self.hop(query, read, number)
            read = self.read(query, memory)
        return read

    def extra_repr(self) -> str:
        return f"hops={self.hops}, capacity={self.capacity}"
