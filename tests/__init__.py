"""Tests of regard, path by path as in `src/regard`."""


def __getattr__(name: str) -> object:
    """`tests.checked`, which `test_shapes.py` checks annotations with; beartype is imported only for it."""
    if name != "checked":
        raise AttributeError(name)
    from beartype import BeartypeConf, beartype

    # A whole number is a number, as type checkers have it.
    return beartype(conf=BeartypeConf(is_pep484_tower=True))
