r"""BLEU and chrF of a corpus, by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal

from regard._errors import missing_extra
from regard.evaluate.outer.inputs import one_of, references, same_count, texts, whole_number
from regard.evaluate.outer.result import Score

# The others of sacrebleu fetch a model, or need a package of their own.
TOKENIZERS = ("13a", "intl", "char", "zh", "none")


def bleu(
    predicted: Sequence[str],
    truth: Sequence[str | Sequence[str]],
    *,
    tokenize: Literal["13a", "intl", "char", "zh", "none"] = "13a",
    lowercase: bool = False,
    smoothing: Literal["exp", "floor", "add-k", "none"] = "exp",
    max_order: int = 4,
) -> Score:
    r"""BLEU (Papineni et al. 2002, https://aclanthology.org/P02-1040), in per cent.

    $$\mathrm{BLEU} = 100\, \min(1, e^{1 - r/c}) \exp\Big(\tfrac{1}{4} \sum_{n=1}^{4} \log p_n\Big)$$

    with $p_n$ the share of n-grams of the predictions that their references have, clipped and counted over the whole corpus, $c$ and
    $r$ the lengths of predictions and nearest references. It is a number of a corpus: the mean over sentences is another one.

    Args:
        predicted: one detokenised text a sentence.
        truth: for each, its reference, or a list of its references.
        tokenize: how words are told: "13a" as WMT does, "intl", "char", "zh", or "none" for texts that are tokenised already.
        lowercase: whether case is forgotten.
        smoothing: of orders without any match: "exp" halves an imaginary count for each of them, "none" makes the result zero.
        max_order: of the n-grams.

    Example:
        >>> print(f"{float(bleu(['the cat sat on the mat'], ['the cat sat on a mat'])):.2f}")
        53.73
    """
    found, known = texts("predicted", predicted), references(truth)
    same_count(found, known)
    fix = "Fix: tokenise before, and say 'none'." if tokenize not in TOKENIZERS else ""
    one_of("tokenize", tokenize, TOKENIZERS, fix)
    one_of("smoothing", smoothing, ("exp", "floor", "add-k", "none"))
    whole_number("max_order", max_order, 1)
    metric = _sacrebleu("bleu").BLEU(
        lowercase=lowercase,
        tokenize=tokenize,
        smooth_method=smoothing,
        max_ngram_order=max_order,
        # What was tokenised on purpose needs no warning that it looks tokenised.
        force=tokenize == "none",
    )
    result = metric.corpus_score(found, _streams(known))
    details = {
        "brevity_penalty": result.bp,
        **{f"precision_{n}": p for n, p in enumerate(result.precisions, 1)},
        "predicted_length": float(result.sys_len),
        "truth_length": float(result.ref_len),
    }
    return Score("bleu", float(result.score), _signature(metric, orders=max_order), details=details)


def chrf(
    predicted: Sequence[str],
    truth: Sequence[str | Sequence[str]],
    *,
    char_order: int = 6,
    word_order: int = 0,
    beta: int = 2,
    lowercase: bool = False,
) -> Score:
    r"""ChrF, the F-score of character n-grams (Popović 2015, https://aclanthology.org/W15-3049), in per cent.

    $$\mathrm{chrF}_\beta = 100\, (1 + \beta^2) \frac{P R}{\beta^2 P + R}$$

    with precision $P$ and recall $R$ averaged over the orders of n-grams, counted over the corpus. Blanks are left out.

    Args:
        predicted: one detokenised text a sentence.
        truth: for each, its reference, or a list of its references, of which the best one counts.
        char_order: of the character n-grams.
        word_order: of word n-grams beside them; 2 is chrF++.
        beta: how many times as much recall weighs.
        lowercase: whether case is forgotten.

    Example:
        >>> float(chrf(["the cat"], ["the cat"]))
        100.0
    """
    found, known = texts("predicted", predicted), references(truth)
    same_count(found, known)
    for argument, given, least in (("char_order", char_order, 1), ("word_order", word_order, 0), ("beta", beta, 1)):
        whole_number(argument, given, least)
    metric = _sacrebleu("chrf").CHRF(char_order=char_order, word_order=word_order, beta=beta, lowercase=lowercase)
    result = metric.corpus_score(found, _streams(known))
    return Score("chrf", float(result.score), _signature(metric, beta=beta))


def _streams(known: list[list[str]]) -> list[list[str | None]]:
    """Sacrebleu's order: the first reference of every sentence, then the second, with None where there is none."""
    return [list(stream) for stream in zip_longest(*known)]


def _signature(metric: Any, **more: object) -> str:
    beside = "".join(f"|{key}:{value}" for key, value in more.items())
    return f"sacrebleu|level:corpus|scale:100|{metric.get_signature().format(short=False)}{beside}"


def _sacrebleu(purpose: str) -> Any:
    try:
        import sacrebleu.metrics
    except ImportError as error:
        raise ImportError(missing_extra("sacrebleu", "train", purpose)) from error
    return sacrebleu.metrics
