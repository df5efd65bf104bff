"""What `tests/test_shapes.py` checks annotations with."""

from beartype import BeartypeConf, beartype

# A whole number is a number, as type checkers have it.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
