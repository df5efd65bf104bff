"""The examples of this family: each runs, learns, and looks where it should."""

from __future__ import annotations

from tests.feature.test_examples import load


def test_transformer():
    found = load("transformer").main(steps=200)
    assert found["tokens right"] > 0.9
    assert found["whole, beam of 4"] > 0.6
    assert found["weight on what is written"] > 0.6


def test_bert4rec():
    found = load("bert4rec").main(steps=150)
    assert min(found["bert4rec"], found["lite"]) > 3 * found["chance"]
