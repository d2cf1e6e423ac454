"""The xla backend: the ops in jax.numpy, over the same arenas.

Differentiable, and what runs without compiled modules. Each function has the signature of the
primitive it stands for: operands first, then the static parameters.
"""

from .packing import pack as pack
from .packing import unpack as unpack
from .prologue import prologue as prologue
from .statistics import statistics as statistics
from .update import update as update
