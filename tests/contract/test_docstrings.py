"""Every class of the catalog says what it is: its equation, where it comes from, and an example that runs."""

import doctest
import re
import sys

import pytest

from regard import catalog

CLASSES = sorted({entry.cls for entry in catalog.entries()}, key=lambda cls: cls.__name__)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
every_entry = pytest.mark.parametrize("entry", list(catalog.entries()), ids=lambda entry: entry.name)


@every_class
def test_the_docstring_has_its_equation_and_its_paper(cls):
    text = cls.__dict__.get("__doc__") or ""
    equations = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
    assert equations, "no equation between $$"
    assert all(equation.count("{") == equation.count("}") for equation in equations)
    assert re.search(r"https://\S+", text), "no link to the paper"


@every_class
def test_the_example_of_the_docstring_runs(cls):
    globs = dict(vars(sys.modules[cls.__module__]))
    (found,) = doctest.DocTestFinder(recurse=False).find(cls, cls.__name__, globs=globs)
    assert found.examples, "no example"
    result = doctest.DocTestRunner().run(found)
    assert result.failed == 0


@every_entry
def test_every_fact_of_an_entry_is_told(entry):
    facts = entry.as_dict()
    for name, fact in facts.items():
        assert fact, f"{entry.name} has no {name}"
    assert 1990 <= entry.year <= 2030
    assert entry.name == catalog.canonical(entry.name)
    assert re.search(r"[\u4e00-\u9fff]", entry.zh), "no Chinese name"
    assert catalog.find(entry.zh).name == entry.name


@every_entry
def test_the_class_is_public(entry):
    import regard

    assert getattr(regard, entry.cls.__name__) is entry.cls
