"""Aspect: the target is where it stands, contexts may be empty, and what is said of one target is not said of another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

import regard as rg
from regard.model import collate
from regard.recipes.aspect import RECIPE
from regard.recipes.aspect.data import _SAID, _TARGETS, bracketed, made_up, read
from regard.recipes.aspect.parts import AroundTarget, TargetQuery
from regard.recipes.recipe import configured
from tests.recipes.checks import assert_learns, assert_no_split_shares, assert_reaches
from tests.recipes.text_data import write

SMALL = {"train_size": 40, "hidden_dim": 12, "embedding_dim": 8}


def raw(*rows: tuple[str, str, int], end: str = "\n") -> str:
    return "".join(f"{sentence}{end}{target}{end}{label}{end}" for sentence, target, label in rows)


def data(tmp_path: Path, train: str, test: str) -> str:
    stem = "semeval14_restaurant"
    return str(write(tmp_path, {f"{stem}.train.raw": train, f"{stem}.test.raw": test}))


def test_made_up_opinions_are_those_beside_the_target() -> None:
    words_of = {word: k for k, words in enumerate(_SAID) for word in words}
    for opinion in made_up(200, seed=0)["train"]:
        assert opinion.end == opinion.start + 1
        assert opinion.words[opinion.start] in _TARGETS
        cut = opinion.words.index("but")
        clause = opinion.words[:cut] if opinion.start < cut else opinion.words[cut:]
        (said,) = (words_of[word] for word in clause if word in words_of)
        assert said == opinion.polarity


def test_splits() -> None:
    assert_no_split_shares("aspect", train_size=300)


def test_training_on_files_goes_on_until_the_steps_are_small() -> None:
    task = configured("aspect", {"data": "somewhere"})
    assert task.patience * task.every >= task.steps
    assert task.rate(task.steps - 1) < 0.01 < task.rate(0)


def test_files(tmp_path: Path) -> None:
    train = raw(("The $T$ was n't good , $T$ !", "red Wine", -1), ("$T$", "food", 0), end="\r\n")
    parts = read(
        data(tmp_path, train + raw(("so $T$ here", "a", 1)), raw(("fine $T$", "bar", 1))), "semeval14_restaurant"
    )
    first = parts["validation"][0]
    assert first.words == ["the", "red", "wine", "was", "not", "good", ",", "red", "wine", "!"]
    assert (first.start, first.end, first.polarity) == (1, 3, 0)
    assert parts["train"][0][1:] == (0, 1, 1), "a target without any context"
    assert [len(parts[split]) for split in ("train", "validation", "test")] == [2, 1, 1]


def test_targets_of_one_sentence_stay_in_one_split(tmp_path: Path) -> None:
    rows = [(f"the $T$ and the view of s{k}", "bar", 1) for k in range(40)]
    rows += [(f"the bar and the $T$ of s{k}", "view", -1) for k in range(40)]
    parts = read(data(tmp_path, raw(*rows), raw(rows[0])), "semeval14_restaurant")
    train, validation = ({" ".join(o.words) for o in parts[split]} for split in ("train", "validation"))
    assert len(validation) == 4
    assert not train & validation


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("a $T$\nb\n", "2 lines"),
        ("a b\nb\n1\n", r"line 1: 'a b'"),
        ("a $T$\nb\n2\n", "'2'"),
        ("a $T$\n\n1\n", "''"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, train: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(data(tmp_path, train, raw(("fine $T$", "bar", 1))), "semeval14_restaurant")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"twitter_acl14\.train\.raw, twitter_acl14\.test\.raw"):
        configured("aspect", {"data": str(write(tmp_path, {})), "set": "twitter_acl14"}).examples("train")


def test_a_target_in_brackets() -> None:
    opinion = bracketed("the [red wine] isn cold")
    assert (opinion.words, opinion.start, opinion.end) == (["the", "red", "wine", "isn", "cold"], 1, 3)
    for text in ("no target", "the [ ] is", "an [open"):
        with pytest.raises(ValueError, match="target in brackets"):
            bracketed(text)


@pytest.mark.parametrize(
    "attention", [*RECIPE.alternatives, "multi-grained-co-attention", "multi-dimensional", "sparsemax"]
)
def test_every_alternative_learns(attention: str) -> None:
    assert_learns("aspect", attention=attention, **SMALL)


def test_parts_of_a_sentence_are_read_as_if_they_were_alone() -> None:
    torch.manual_seed(0)
    rotate, sentence = rg.RotatoryAttention(5, hops=2).double(), torch.randn(1, 11, 5, dtype=torch.float64)
    mask = torch.arange(11)[None] < 7
    found = AroundTarget(rotate)(sentence, torch.tensor([[3, 5]]), mask)
    alone = rotate(sentence[:, 3:5], sentence[:, :3], sentence[:, 5:7])
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=0)
    edge = AroundTarget(rotate)(sentence, torch.tensor([[0, 2]]), mask)
    nothing = rotate(sentence[:, :2], sentence[:, :0], sentence[:, 2:7])
    torch.testing.assert_close(edge, nothing, rtol=1e-10, atol=1e-15)


def test_a_pair_is_the_sentence_and_the_target() -> None:
    torch.manual_seed(0)
    both, sentence = rg.InteractiveCoAttention(5).double(), torch.randn(1, 7, 5, dtype=torch.float64)
    found = AroundTarget(both)(sentence, torch.tensor([[3, 5]]))
    torch.testing.assert_close(found, both(sentence, sentence[:, 3:5]), rtol=1e-10, atol=0)
    asked = TargetQuery()(sentence, torch.tensor([[3, 5]]))
    torch.testing.assert_close(asked, sentence[:, 3:5].mean(1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("attention", ["rotatory", "interactive-co-attention"])
def test_a_short_training_learns_it(tmp_path: Path, attention: str) -> None:
    small = {
        "steps": 150,
        "every": 50,
        "hidden_dim": 32,
        "embedding_dim": 16,
        "train_size": 500,
        "lr": 1e-2,
        "dropout": 0.1,
    }
    run = assert_reaches(tmp_path, "aspect", "accuracy", 0.85, attention=attention, **small)
    task = run.recipe()
    asked = [
        task.parse("the [food] was great but the awful wine"),
        task.parse("the food was great but the awful [wine]"),
    ]
    assert task.judge(run.model(), asked).answers == ["positive", "negative"]


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    """A pretrained encoder in small, as a folder."""
    transformers = pytest.importorskip("transformers")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "the",
        "but",
        "was",
        "is",
        "seems",
        *_TARGETS,
        *(w for s in _SAID for w in s),
        "##s",
    ]
    special = {token: {"id": token, "ids": [words.index(token)], "tokens": [token]} for token in ("[CLS]", "[SEP]")}
    around = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        "added_tokens": [],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*around, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [*around, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special,
        },
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: k for k, word in enumerate(words)},
        },
    }
    tokenizer["padding"]["pad_to_multiple_of"] = None
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **shape))
    model.save_pretrained(tmp_path / "encoder")
    return str(write(tmp_path / "encoder", {"tokenizer.json": json.dumps(tokenizer)}))


def test_a_pretrained_encoder_reads_words_in_pieces(encoder: str) -> None:
    task = configured("aspect", {"encoder": encoder, **SMALL})
    example = task.parse("the foods was [wines] 5")
    assert example.words["sentence"] == ["[CLS]", "the", "foods", "was", "wines", "5", "[SEP]"]
    assert example.variables["place"].tolist() == [4, 5]
    assert example.masks["sentence"].sum(-1).tolist() == [1, 1, 2, 1, 2, 1, 1]
    assert collate([example]).inputs["sentence"].shape == (1, 7, 2)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_pretrained_encoder_is_frozen_or_learns(encoder: str, freeze: bool) -> None:
    task = assert_learns("aspect", encoder=encoder, freeze=freeze, **SMALL)
    model = task.build()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    task.initialise(model)
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed
    assert all(".encoder." in name for name in changed)
    taught = sum(len(group["params"]) for group in task.groups(model) if group["lr"] == task.encoder_lr)
    assert (taught == 0) == freeze
    assert sum(len(group["params"]) for group in task.groups(model)) == sum(p.requires_grad for p in model.parameters())
    # A run needs the folder no more: what was learnt from it says how to build the model and to cut texts.
    again = configured("aspect", {"encoder": "/gone", "freeze": freeze, **SMALL})
    again.known = json.loads(json.dumps(task.known))
    again.build().load_state_dict(model.state_dict())
    assert again.parse("the [food] was great").inputs["sentence"].shape[0] == 6


def test_a_folder_without_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json, tokenizer\.json"):
        configured("aspect", {"encoder": str(write(tmp_path, {})), **SMALL}).build()
    with pytest.raises(ValueError, match="model_type"):
        configured("aspect", {"encoder": str(write(tmp_path, {"config.json": "{}", "tokenizer.json": "{}"}))}).build()
