"""`fully_shard` in two processes: parameters in halves, the same outputs and the same gradients."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import regard as rg
from tests.cases import assert_same

BATCH, NQ, N = 4, 3, 5


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.additive = rg.Attention("additive", query_dim=7, key_dim=11, hidden_dim=13, impl="blockwise")
        self.general = rg.Attention("general", "entmax", query_dim=11, key_dim=11)
        self.output = nn.Linear(11, 2)

    def forward(self, query, key, mask):
        first = self.additive(query, key, mask=mask)
        return self.output(self.general(first, key, mask=mask))


def model_and_batch():
    generator = torch.Generator().manual_seed(0)
    model = Reader().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    query = torch.randn(BATCH, NQ, 7, generator=generator, dtype=torch.float64)
    key = torch.randn(BATCH, N, 11, generator=generator, dtype=torch.float64)
    mask = torch.rand(BATCH, NQ, N, generator=generator) < 0.7
    return model, (query, key, mask)


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        model, batch = model_and_batch()
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.additive, mesh=mesh)
        fully_shard(model.general, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert model.additive.score.W1.to_local().shape[0] < 13
        with rg.record(model, "weights") as trace:
            output = model(*(x.chunk(world)[rank] for x in batch))
        (output.square().sum() / BATCH).backward()
        # Gradients are averages over the processes.
        grads = {name: p.grad.full_tensor() * world for name, p in model.named_parameters()}
        torch.save((output.detach(), trace["additive"].weights, grads), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_fully_shard(tmp_path):
    mp.spawn(worker, (2, str(tmp_path)), nprocs=2)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    model, batch = model_and_batch()
    with rg.record(model, "weights") as trace:
        output = model(*batch)
    (output.square().sum() / BATCH).backward()
    assert_same(torch.cat([part[0] for part in parts]), output)
    assert_same(torch.cat([part[1] for part in parts]), trace["additive"].weights)
    for name, parameter in model.named_parameters():
        for part in parts:
            assert_same(part[2][name], parameter.grad, name)
