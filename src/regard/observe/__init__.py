"""Look at attention without touching the model, and change it without touching the model."""

from regard.observe.adopt import adopt, adopted, unadopt
from regard.observe.intervene import erase, given, intervene
from regard.observe.record import record
from regard.observe.reinforce import MovingBaseline, reinforce
from regard.observe.trace import Recorded, Trace, load_trace

__all__ = [
    "MovingBaseline",
    "Recorded",
    "Trace",
    "adopt",
    "adopted",
    "erase",
    "given",
    "intervene",
    "load_trace",
    "record",
    "reinforce",
    "unadopt",
]
