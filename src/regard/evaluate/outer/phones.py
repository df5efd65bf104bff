"""The 61 phones of TIMIT, folded into 39 (Lee & Hon 1989, https://doi.org/10.1109/29.46546).

Allophones become one phone, closures and pauses become silence, and the glottal stop is dropped. Silences that come to lie side by
side stay as many as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard._errors import nearest, refusal

_MERGED = {
    "aa": "aa ao",
    "ah": "ah ax ax-h",
    "er": "er axr",
    "hh": "hh hv",
    "ih": "ih ix",
    "l": "l el",
    "m": "m em",
    "n": "n en nx",
    "ng": "ng eng",
    "sh": "sh zh",
    "uw": "uw ux",
    "sil": "sil h# pau epi pcl tcl kcl bcl dcl gcl",
}
_KEPT = "ae ay aw b ch d dh dx eh ey f g iy jh k ow oy p r s t th uh v w y z"
DROPPED = "q"
TIMIT39 = {phone: one for one, merged in _MERGED.items() for phone in merged.split()} | {p: p for p in _KEPT.split()}


def folded(phones: Sequence[str]) -> list[str]:
    """The same utterance in 39 phones.

    Example:
        >>> folded(["h#", "q", "ao", "l"])
        ['sil', 'aa', 'l']
    """
    for phone in phones:
        if phone not in TIMIT39 and phone != DROPPED:
            raise ValueError(refusal("phone", repr(phone), "one of TIMIT's 61", nearest(phone, TIMIT39)))
    return [TIMIT39[phone] for phone in phones if phone != DROPPED]
