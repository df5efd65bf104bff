"""Look at attention without touching the model, and change it without touching the model."""

from regard.observe.adopt import adopt, adopted, unadopt
from regard.observe.explain import Dispatches, explain_dispatch
from regard.observe.intervene import erase, given, intervene
from regard.observe.record import record
from regard.observe.reinforce import MovingBaseline, reinforce
from regard.observe.trace import Recorded, Trace, load_trace

__all__ = [
    "Dispatches",
    "MovingBaseline",
    "Recorded",
    "Trace",
    "adopt",
    "adopted",
    "erase",
    "explain_dispatch",
    "given",
    "intervene",
    "load_trace",
    "record",
    "reinforce",
    "unadopt",
]
