"""Tests of regard, path by path as in `src/regard`."""

from beartype import BeartypeConf, beartype

# What `tests/test_shapes.py` checks annotations with; a whole number is a number, as type checkers have it.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
