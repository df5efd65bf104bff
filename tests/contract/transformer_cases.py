"""Cases of the Transformer family: tokens that read themselves, or another input, under masks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import regard as rg
from tests.contract.cases import Case

DIM = 4  # two heads of an even width


def encoder(entry: str, make: Callable[[], nn.Module], name: str | None = None, width: int = DIM) -> Case:
    return Case(
        name=name or entry,
        entry=entry,
        make=make,
        tensors={"tokens": ("b", "n", width)},
        masks={"mask": ("b", "n")},
        result=("b", "n", width),
        call=lambda module, inputs: module(inputs.tensors["tokens"], inputs.masks["mask"]),
    )


def small(cls: Callable[..., nn.Module] = rg.TransformerEncoder, **options: Any) -> nn.Module:
    return cls(DIM, 2, options.pop("layers", 1), feedforward_dim=3, activation="gelu", **options)


def _positions() -> Iterator[Case]:
    for entry in ("positional-encoding", "learned-position", "alibi-position", "directional-position"):
        yield encoder(entry, lambda entry=entry: small(position=entry))
    yield encoder("rotary-position", lambda: small(position="rotary", score="general"))
    for entry, score in (("relative-position", "scaled-dot"), ("transformer-xl-position", "additive")):
        yield encoder(entry, lambda entry=entry, score=score: small(position=entry, score=score))


def _two_inputs(entry: str, make: Callable[[], nn.Module], order: tuple[str, str], name: str | None = None) -> Case:
    """Source and target of the same length under one mask."""

    def call(module: nn.Module, inputs: Any) -> Any:
        mask = inputs.masks["mask"]
        return module(*(inputs.tensors[name] for name in order), mask, mask)

    return Case(
        name=name or entry,
        entry=entry,
        make=make,
        tensors={"source": ("b", "n", DIM), "target": ("b", "n", DIM)},
        masks={"mask": ("b", "n")},
        result=("b", "n", DIM),
        call=call,
    )


def _stacks() -> Iterator[Case]:
    yield encoder("transformer-encoder", lambda: small(layers=2))
    yield encoder(
        "transformer-encoder",
        lambda: small(norm="pre", score="additive", align="entmax", bias=False),
        "transformer-encoder, pre, additive, entmax",
    )
    yield _two_inputs("transformer-decoder", lambda: small(rg.TransformerDecoder), ("target", "source"))
    yield _two_inputs("transformer", lambda: small(rg.Transformer, norm="pre", position="rotary"), ("source", "target"))


def _models() -> Iterator[Case]:
    yield encoder("lite-transformer", lambda: rg.TransformerEncoder(8, 2, 1, attention=rg.LongShortAttention), width=8)
    yield replace(
        encoder("bert4rec", lambda: rg.BERT4Rec(5, DIM, 2, 1, length=11, feedforward_dim=3)),
        result=("b", "n", 5),
        call=lambda module, inputs: module.read(inputs.tensors["tokens"], inputs.masks["mask"]),
    )


def _long() -> Iterator[Case]:
    """Models of long inputs; the longest here is ten tokens."""
    for share in ("layerwise", "none"):
        name = "linformer" if share == "layerwise" else f"linformer, {share}"
        yield encoder("linformer", lambda share=share: small(rg.Linformer, length=11, rank=5, share=share), name)

    def synthesizer(synthesis: Any) -> nn.Module:
        return small(attention=lambda dim, heads: rg.SynthesizerAttention(dim, heads, 12, synthesis))

    for synthesis in ("dense", "fixed-random"):
        name = "synthesizer" if synthesis == "dense" else f"synthesizer, {synthesis}"
        yield encoder("synthesizer", lambda synthesis=synthesis: synthesizer(synthesis), name)
    mixture = ["factorized-random", "dot", "random", "factorized-dense"]
    yield encoder("synthesizer", lambda: synthesizer(mixture), "synthesizer, mixture")
    yield replace(
        encoder("transformer-xl", lambda: small(rg.TransformerXL, memory=3, layers=2)),
        call=lambda module, inputs: module(inputs.tensors["tokens"], None, inputs.masks["mask"]).output,
    )
    yield replace(
        encoder(
            "transformer-xl",
            lambda: small(rg.TransformerXL, memory=3, same_length=True, norm="pre"),
            "transformer-xl, in portions",
        ),
        call=_in_portions,
    )


def _in_portions(module: nn.Module, inputs: Any) -> Any:
    """Two segments, the first of which is a memory of the second: only that of the second is differentiated."""
    outputs, memory = [], None
    for part, mask in zip(inputs.tensors["tokens"].split(4, -2), inputs.masks["mask"].split(4, -1), strict=True):
        output, memory = module(part, memory, mask)
        outputs.append(output)
    return torch.cat(outputs, -2)


def _hashed() -> Iterator[Case]:
    """Chunks of two: seven tokens are four chunks, and the last is not full."""
    yield encoder(
        "lsh-attention",
        lambda: small(attention=lambda dim, heads: rg.LSHAttention(dim, heads, rounds=3, chunk=2, bias=True)),
    )
    yield encoder(
        "reformer", lambda: rg.Reformer(DIM, 2, 2, chunk=2, feedforward_dim=3, feedforward_chunk=3, activation="gelu")
    )
    yield encoder(
        "reformer",
        lambda: rg.Reformer(DIM, 2, 1, chunk=2, causal=True, across_buckets=True, feedforward_dim=3, activation="gelu"),
        "reformer, causal, across buckets",
    )


CASES = [*_positions(), *_stacks(), *_models(), *_long(), *_hashed()]
