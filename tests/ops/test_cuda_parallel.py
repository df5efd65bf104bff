"""A shared sequence on a GPU: NCCL between the ranks, as far as one device can show, which is a ring of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import regard as rg

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU and NCCL"
)

WIDTH = 8


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("exchange", ["ring", "gather"])
@pytest.mark.parametrize(
    "score", [rg.Additive(WIDTH, WIDTH, WIDTH), rg.ScaledDot(), rg.ActivatedGeneral(WIDTH, WIDTH)], ids=repr
)
def test_ranks_find_what_one_process_finds(score: rg.Score, exchange: str, mesh: DeviceMesh) -> None:
    attend = rg.Attention(score).to("cuda", torch.float64)
    x = torch.randn(2, 37, WIDTH, device="cuda", dtype=torch.float64, requires_grad=True)
    wanted = [x, *attend.parameters()]
    alone = attend(x, x, mask=rg.Causal())
    with rg.parallel.context(mesh, exchange=exchange):
        shared = attend(x, x, mask=rg.Causal())
        found = torch.autograd.grad(shared.square().sum(), wanted)
    torch.testing.assert_close(shared, alone, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(found, torch.autograd.grad(alone.square().sum(), wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
