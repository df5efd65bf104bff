"""regard: every attention mechanism of the literature, from one equation.

score  e = score(q, k)        how well does each key answer the query
align  a = align(e)           how are scores turned into weights
sum    c = Σ a · v            what is read

The names are those of `regard._public`, imported when one of them is first used: the command line, which imports this
package too, answers before torch is loaded.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
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
        public = import_module("regard._public")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        globals()[name] = getattr(public, name)
        return globals()[name]

    def __dir__():
        """What `regard.` completes to: public names and subpackages."""
        found = {
            module.name for module in iter_modules(import_module("regard").__path__) if not module.name.startswith("_")
        }
        dunders = {name for name in globals() if name.startswith("__")}
        return sorted({*found, *dunders, *import_module("regard._public").__all__})


logging.getLogger("regard").addHandler(logging.NullHandler())
