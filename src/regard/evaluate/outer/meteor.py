"""METEOR, by nltk, with the resources that are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from regard._errors import missing_extra, refusal
from regard.evaluate.outer.inputs import one_of, references, same_count, texts
from regard.evaluate.outer.result import Score

ALPHA, BETA, GAMMA = 0.9, 3.0, 0.5


class _NoSynonyms:
    """Stands for a WordNet in which no word has a synonym."""

    def synsets(self, word: str) -> list[Any]:
        return []


def meteor(
    predicted: Sequence[str],
    truth: Sequence[str | Sequence[str]],
    *,
    resources: Literal["exact+stem", "exact+stem+wordnet"] = "exact+stem",
) -> Score:
    r"""METEOR as of Lavie & Agarwal 2007 (https://aclanthology.org/W07-0734), the mean over the sentences.

    $$\mathrm{METEOR} = \Big(1 - \gamma \big(\tfrac{\text{chunks}}{\text{matches}}\big)^{\beta}\Big)
      \frac{P R}{\alpha P + (1 - \alpha) R}, \qquad \alpha = 0.9,\ \beta = 3,\ \gamma = 0.5$$

    with $P$ and $R$ the shares of words of prediction and reference that are matched: as they are, by Porter's stem and, where
    asked for, by a synonym of the stem. Matching is nltk's: from the last word to the first, each with the last that is left, which need
    not make the fewest chunks. This is not METEOR 1.5, whose weights differ and which knows paraphrases: their numbers are not
    comparable, nor are those with other resources. Of several references the best one counts.

    Args:
        predicted: one text a sentence, whose words are what blanks separate; punctuation is separated before.
        truth: for each, its reference, or a list of its references.
        resources: "exact+stem" needs nothing beside nltk. "exact+stem+wordnet" needs WordNet among nltk's data; it is never fetched.

    Example:
        >>> float(meteor(["the cat sits"], ["the cats sit"])) > 0.9  # by their stems
        True
    """
    found, known = texts("predicted", predicted), references(truth)
    same_count(found, known)
    one_of("resources", resources, ("exact+stem", "exact+stem+wordnet"))
    try:
        import nltk
        from nltk.translate.meteor_score import single_meteor_score
    except ImportError as error:
        raise ImportError(missing_extra("nltk", "train", "meteor")) from error
    synonyms, version = _wordnet() if resources.endswith("wordnet") else (_NoSynonyms(), "none")
    total = 0.0
    for text, alternatives in zip(found, known, strict=True):
        total += max(
            single_meteor_score(reference.split(), text.split(), wordnet=synonyms, alpha=ALPHA, beta=BETA, gamma=GAMMA)
            for reference in alternatives
        )
    signature = (
        f"nltk:{nltk.__version__}|formula:2007|alpha:{ALPHA}|beta:{BETA}|gamma:{GAMMA}|resources:{resources}"
        f"|wordnet:{version}|matching:nltk, from the end|stemmer:porter|case:lower|words:blanks|level:mean of sentences"
    )
    return Score("meteor", total / len(found), signature, details={"sentences": float(len(found))})


def _wordnet() -> tuple[Any, str]:
    from nltk.corpus import wordnet

    try:
        wordnet.ensure_loaded()
    except LookupError as error:
        fix = "Fix: python -m nltk.downloader wordnet; or resources='exact+stem', which is another number."
        raise LookupError(
            refusal("resources", "'exact+stem+wordnet'", "WordNet among nltk's data, and it is not there", fix)
        ) from error
    return wordnet, str(wordnet.get_version())
