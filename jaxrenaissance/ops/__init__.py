"""The ops on arenas.

Each is one JAX primitive with a lowering per platform; ``backend="xla"`` is plain jax.numpy.
"""

from .pack import pack as pack
from .prologue import prologue as prologue
from .statistics import statistics as statistics
from .unpack import unpack as unpack
from .update import update as update
