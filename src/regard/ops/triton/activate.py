"""Activations of scores inside a kernel: value and derivative, by the special-function unit where the device has one."""

from __future__ import annotations

import functools

import triton
import triton.language as tl

TANH, SIGMOID, RELU, LEAKY, GELU, IDENTITY = range(6)
CODES = {"tanh": TANH, "sigmoid": SIGMOID, "relu": RELU, "leaky_relu": LEAKY, "gelu": GELU, "identity": IDENTITY}


@functools.cache
def code_of(act: str) -> tuple[int, float, float]:
    """The code of an activation, its slope below zero, and the c of c tanh(z / c); KeyError where no kernel knows it."""
    name, _, parameter = act.partition(":")
    slope = float(parameter or 0.2) if name == "leaky_relu" else 0.0
    return CODES[name], slope, float(parameter or 1.0) if name == "tanh" else 1.0


def supports(act: str) -> bool:
    """Whether kernels know an activation."""
    return act.partition(":")[0] in CODES


@triton.jit
def reciprocal(x, DEVICE: tl.constexpr):
    """1/x within one unit in the last place; the interpreter divides."""
    if DEVICE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def exp2(x, DEVICE: tl.constexpr):
    """2^x by the special-function unit, zero below 2^-126, without the detour around such results."""
    if DEVICE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def value(z, ACT: tl.constexpr, slope, APPROXIMATE: tl.constexpr, DEVICE: tl.constexpr):
    """The activation; `APPROXIMATE` takes the hardware's tanh, wrong by 5e-4."""
    if ACT == 0:
        if APPROXIMATE and DEVICE:
            h = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            # 1 - 2 / (1 + e^2z), which neither end overflows.
            h = 1.0 - 2.0 * reciprocal(1.0 + exp2(2.8853900817779268 * z, DEVICE), DEVICE)
    elif ACT == 1:
        h = reciprocal(1.0 + exp2(-1.4426950408889634 * z, DEVICE), DEVICE)
    elif ACT == 2:
        h = tl.where(z < 0, 0.0, z)
    elif ACT == 3:
        h = tl.where(z < 0, slope * z, z)
    elif ACT == 4:
        h = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    else:
        h = z
    return h


@triton.jit
def value_and_slope(z, ACT: tl.constexpr, slope, DEVICE: tl.constexpr, APPROXIMATE: tl.constexpr = False):
    """The activation and its derivative; `APPROXIMATE` takes the hardware's tanh, whose derivative is wrong by 1e-3."""
    if ACT == 0 and APPROXIMATE and DEVICE:
        h = value(z, ACT, slope, True, DEVICE)
        g = 1.0 - h * h
    elif ACT == 0:
        # From e^-2|z|, so that neither saturated side loses its derivative to cancellation.
        e = exp2(-2.8853900817779268 * tl.abs(z), DEVICE)
        r = reciprocal(1.0 + e, DEVICE)
        h = (1.0 - e) * r
        h = tl.where(z < 0, -h, h)
        g = 4.0 * e * r * r
    elif ACT == 1:
        e = exp2(-1.4426950408889634 * tl.abs(z), DEVICE)
        r = reciprocal(1.0 + e, DEVICE)
        h = tl.where(z < 0, e, 1.0) * r
        g = e * r * r
    elif ACT == 2:
        h = tl.where(z < 0, 0.0, z)
        g = tl.where(z > 0, 1.0, 0.0)
    elif ACT == 3:
        h = tl.where(z < 0, slope * z, z)
        g = tl.where(z > 0, 1.0, slope)
    elif ACT == 4:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        h = z * cdf
        g = cdf + z * exp2(-0.7213475204444817 * z * z, DEVICE) * 0.3989422804014327
    else:
        h = z
        g = z * 0.0 + 1.0
    return h, g
