"""Planted tasks: small problems whose answer is known, learned in seconds by the mechanism that is made for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg

Batch = dict[str, Tensor]


def train(
    model: nn.Module, make: Callable[[], Batch], loss: Callable[[Batch], Tensor], steps: int, rate: float
) -> None:
    """Adam on a fresh batch a step."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        loss(make()).backward()
        optimiser.step()
    model.eval()


# Different features from different keys


FEATURES = 5


def scattered(batch: int) -> Batch:
    """Each key says which one feature of the answer it holds; the answer takes every feature from its own key."""
    owner = torch.stack([torch.randperm(FEATURES) for _ in range(batch)])
    key, value = F.one_hot(owner, FEATURES).float(), torch.randn(batch, FEATURES, FEATURES)
    return {"key": key, "value": value, "target": (key * value).sum(1)}


@pytest.mark.parametrize("multi", [True, False], ids=["multi", "single"])
def test_only_multi_dimensional_attention_takes_features_from_different_keys(multi: bool) -> None:
    """A single weight for each key cannot do better than an error of 1 - 1/F: it averages keys of which one is right."""
    attend = rg.Attention(rg.QueryFree(FEATURES, 16, features=FEATURES if multi else None))

    def loss(x: Batch) -> Tensor:
        return F.mse_loss(attend(None, x["key"], x["value"]), x["target"])

    train(attend, lambda: scattered(128), loss, steps=200, rate=0.03)
    error, irreducible = float(loss(scattered(4096)).detach()), 1 - 1 / FEATURES
    print(
        f"{'multi' if multi else 'single'}-dimensional: error {error:.3f}, irreducible for a single weight {irreducible:.3f}"
    )
    if multi:
        assert error < 0.1 * irreducible
    else:
        assert error > 0.95 * irreducible


# A noisy monotone position


LENGTH, WINDOW = 41, 4


def place(t: Tensor) -> Tensor:
    """Where step t in (0, 1) should look: monotone, slow at first."""
    return (LENGTH - 1) * t**1.5


def monotone(batch: int) -> Batch:
    t = torch.rand(batch, 1)
    near = (place(t) + torch.randn(batch, 1)).clamp(0, LENGTH - 1)
    query = torch.cat([t, t.square(), torch.ones_like(t)], -1)
    j = torch.arange(LENGTH) / LENGTH
    # Values vary smoothly along the sequence, as contexts do, beneath noise of their own.
    code = torch.stack([j, torch.sin(3 * j), torch.cos(3 * j)], -1)
    value = code + 0.1 * torch.randn(batch, LENGTH, 3)
    at = near / LENGTH
    target = torch.cat([at, torch.sin(3 * at), torch.cos(3 * at)], -1)
    return {"query": query, "key": value, "target": target, "place": place(t)}


def test_predictive_local_alignment_recovers_a_noisy_monotone_position() -> None:
    align = rg.Local(WINDOW, "predictive", renormalize=True, query_dim=3, position_dim=16)
    attend = rg.Attention(rg.General(3, 3), align)

    def loss(x: Batch) -> Tensor:
        return F.mse_loss(attend(x["query"], x["key"]), x["target"])

    def distance() -> float:
        x = monotone(1024)
        with torch.no_grad():
            p = attend.call(x["query"], x["key"]).prepared["position"]
        assert p.shape == (1024, 1)
        return float((p - x["place"]).abs().mean())

    before = distance()
    train(attend, lambda: monotone(128), loss, steps=300, rate=0.02)
    after = distance()
    print(f"mean |p - truth|: {before:.2f} before, {after:.2f} after, window {WINDOW}")
    assert before > WINDOW
    assert after < WINDOW / 2


# The marked item


ITEMS, CLASSES, WIDTH = 7, 3, 6


def marked(batch: int) -> Batch:
    """Items of three classes among distractors; the class of the marked one is asked for."""
    label = torch.randint(CLASSES, (batch, ITEMS))
    mark = torch.randint(ITEMS, (batch,))
    key = torch.randn(batch, ITEMS, WIDTH)
    key[..., 0] = F.one_hot(mark, ITEMS) * 2.0 - 1.0
    return {
        "key": key,
        "value": F.one_hot(label, CLASSES).float(),
        "target": label.gather(1, mark[:, None]).squeeze(1),
        "mark": mark,
    }


class Reader(nn.Module):
    """Attention without a query, and a classifier of what it reads."""

    def __init__(self, align: rg.Alignment) -> None:
        super().__init__()
        self.attend = rg.Attention(rg.QueryFree(WIDTH, 8), align)
        self.classify = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Batch) -> Tensor:
        return self.classify(self.attend(None, x["key"], x["value"]))

    def on_the_mark(self, x: Batch) -> float:
        """Weight of the marked item, in the mean."""
        with torch.no_grad(), rg.record(self) as trace:
            self(x)
        return float(trace["attend"].weights.detach().gather(1, x["mark"][:, None]).mean())


def loss_of(reader: Reader, baseline: rg.MovingBaseline | float = 0.0, price: float = 0.0) -> Callable[[Batch], Tensor]:
    """Cross entropy; for what samples without a gradient, REINFORCE with its negative as the reward."""
    align = reader.attend.align
    samples = isinstance(align, rg.Reinforced) or (isinstance(align, rg.Hard) and align.gradient == "reinforce")

    def loss(x: Batch) -> Tensor:
        with rg.record(reader) as trace:
            cost = F.cross_entropy(reader(x), x["target"], reduction="none")
        if not samples:
            return cost.mean()
        reward = -cost.detach()
        if price:
            reward = reward - price * trace["attend"].call.prepared["selected"].float().mean(-1)
        return cost.mean() + rg.reinforce(trace, reward, baseline, entropy=0.01)

    return loss


ESTIMATORS: dict[str, Callable[[], rg.Alignment]] = {
    "straight-through": lambda: rg.Hard("straight-through"),
    "reinforce": lambda: rg.Hard("reinforce"),
    "gumbel": lambda: rg.Hard("gumbel", temperature=0.5),
    "gumbel-straight-through": lambda: rg.Hard("gumbel-straight-through", temperature=0.5),
    "reinforced": lambda: rg.Reinforced(WIDTH, 8),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_finds_the_marked_item(name: str) -> None:
    reader = Reader(ESTIMATORS[name]())
    before = reader.on_the_mark(marked(1024))
    loss = loss_of(reader, rg.MovingBaseline(), price=0.5 if name == "reinforced" else 0.0)
    train(reader, lambda: marked(256), loss, steps=250, rate=0.02)
    x = marked(1024)
    after, right = reader.on_the_mark(x), float((reader(x).argmax(-1) == x["target"]).float().mean())
    print(f"{name}: {before:.2f} of the weight on the marked item before, {after:.2f} after; {right:.2f} answered")
    assert before < 0.5
    assert after > 0.9
    assert right > 0.9
    if name == "reinforced":
        chance = reader.attend.align.policy(x["key"], None).sigmoid().detach()
        on_it = F.one_hot(x["mark"], ITEMS).bool()
        print(f"selected: the marked item {chance[on_it].mean():.2f}, the others {chance[~on_it].mean():.2f}")
        assert float(chance[on_it].mean()) > 0.9
        assert float(chance[~on_it].mean()) < 0.5


def gradient(reader: Reader, x: Batch, loss: Callable[[Batch], Tensor]) -> Tensor:
    """With respect to the score, flat."""
    parameters = list(reader.attend.score.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss(x), parameters)])


def test_reinforce_is_unbiased_and_noisy_and_straight_through_is_neither() -> None:
    draws = 300
    torch.manual_seed(0)
    reader = Reader(rg.Hard("reinforce"))
    x = marked(64)
    with rg.record(reader) as trace:
        reader(x)

    def cost(context: Tensor) -> Tensor:
        return F.cross_entropy(reader.classify(context), x["target"], reduction="none")

    exact = gradient(reader, x, lambda _: trace["attend"].expected_loss(cost).mean())
    typical = float(cost(x["value"].mean(1)).mean().detach())
    variances, biases = {}, {}
    for name, baseline in (
        ("straight-through", 0.0),
        ("gumbel", 0.0),
        ("gumbel-straight-through", 0.0),
        ("reinforce", 0.0),
        ("reinforce, baseline", -typical),
    ):
        reader.attend.align = ESTIMATORS[name.partition(",")[0]]()
        loss = loss_of(reader, baseline)
        if name.startswith("reinforce"):

            def loss(x: Batch, baseline: float = baseline) -> Tensor:
                with rg.record(reader) as trace:
                    each = F.cross_entropy(reader(x), x["target"], reduction="none")
                return rg.reinforce(trace, -each.detach(), baseline)

        drawn = torch.stack([gradient(reader, x, loss) for _ in range(draws)])
        error = (drawn.var(0) / draws).sum().sqrt()
        variances[name] = float(drawn.var(0).sum() / exact.square().sum())
        biases[name] = float((drawn.mean(0) - exact).norm() / error)
        print(f"{name:26} variance {variances[name]:8.2f} |g|^2   bias {biases[name]:6.1f} standard errors")
    assert biases["straight-through"] > 4
    assert variances["straight-through"] < 0.1 * variances["reinforce, baseline"]
    assert biases["reinforce"] < 2
    assert biases["reinforce, baseline"] < 2
    assert variances["reinforce, baseline"] < 0.5 * variances["reinforce"]
