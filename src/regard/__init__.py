"""regard: every attention mechanism of the literature, from one equation.

score  e = score(q, k)        how well does each key answer the query
align  a = align(e)           how are scores turned into weights
sum    c = Σ a · v            what is read

The names are those of `regard._public`, each imported from its own file when it is first used: the command line, which imports
this package too, answers before torch is loaded, and a name costs what its family costs, not what all of them do.
"""

from __future__ import annotations

import ast
import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import get_data, iter_modules
from typing import TYPE_CHECKING

from regard._version import __version__ as __version__

if TYPE_CHECKING:
    from regard._public import *  # noqa: F403
else:

    def __getattr__(name):
        """A subpackage, or a public name."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        if name != "__all__" and find_spec(f"regard.{name}") is not None:
            return import_module(f"regard.{name}")
        sources = _sources()
        if name == "__all__":
            return list(sources)
        if name not in sources:
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        globals()[name] = getattr(import_module(sources[name]), name)
        return globals()[name]

    @cache
    def _sources():
        """The public names, and the module that each comes from, as `regard._public` says; read, not run."""
        text = get_data("regard", "_public.py") or b""
        found = {
            alias.name: node.module
            for node in ast.parse(text).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        return dict(sorted(found.items(), key=lambda pair: (pair[0].startswith("_"), pair[0][0].islower(), pair[0])))

    def __dir__():
        """What `regard.` completes to: public names and subpackages."""
        found = {
            module.name for module in iter_modules(import_module("regard").__path__) if not module.name.startswith("_")
        }
        dunders = {name for name in globals() if name.startswith("__")}
        return sorted({*found, *dunders, *_sources()})


logging.getLogger("regard").addHandler(logging.NullHandler())
