"""A sentence's latent tree: self-attention whose weights are the marginals of a dependency tree, and what its scores are made of.

Two words of a sentence belong together when one governs the other. Weights that are marginals of a tree say so: each word has one
head. Afterwards the scores are taken apart: how much is due to words that everybody looks at (saliency), how much to pairs (focus).
"""

import torch
from torch import nn

import regard as rg
from regard.recipes.recipe import configured


def main(steps: int = 120) -> dict[str, float]:
    torch.manual_seed(0)
    task = configured("sentiment", {"train_size": 400, "hidden_dim": 32, "embedding_dim": 32, "dropout": 0.0})
    attention = rg.SelfAttention(32, align=rg.DependencyTree())
    features = rg.model.Chain(task.embedding(), rg.RecurrentEncoder(32, 16))
    model = rg.TaskModel(features, None, attention, rg.model.Classifier(32, 2))
    examples, order = task.examples("train"), task.order(task.examples("train"))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = rg.model.collate([examples[k] for k in order.chosen(step)])
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    accuracy = task.judge(model.eval(), task.examples("test")).metrics["accuracy"]

    example = task.examples("test")[0]
    with rg.record(model) as trace, torch.no_grad():
        model(rg.model.collate([example]))
    (told,) = trace["attention.attention"]
    heads = [example.words["tokens"][k] for k in told.weights[0].argmax(-1)]
    shares = rg.focus_and_saliency(told)
    print(f"accuracy {accuracy:.3f}")
    print("  ".join(f"{word} < {head}" for word, head in zip(example.words["tokens"], heads, strict=True)))
    return {
        "accuracy": accuracy,
        "saliency": float(shares.saliency_share.mean()),
        "focus": float(shares.focus_share.mean()),
    }


if __name__ == "__main__":
    print(main())
