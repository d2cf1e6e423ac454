"""The ops on arenas.

Each is one JAX primitive with a lowering per platform; ``backend="xla"`` is plain jax.numpy.
"""

from .accumulate import accumulate as accumulate
from .changes import changes as changes
from .finish import finish as finish
from .finish_ratios import finish_ratios as finish_ratios
from .finish_update import finish_update as finish_update
from .lerp import lerp as lerp
from .norms import norms as norms
from .pack import pack as pack
from .pack_piece import pack_piece as pack_piece
from .prologue import prologue as prologue
from .statistics import statistics as statistics
from .unpack import unpack as unpack
from .update import update as update
from .update_norms import update_norms as update_norms
