"""The xla backend: the ops in jax.numpy, over the same arenas.

Differentiable, and what runs without compiled modules. Each function has the signature of the
primitive it stands for: operands first, then the static parameters. In place of a workspace it has
the norms of the segments, which `words` makes one of where a primitive is lowered.
"""

from .accumulate import accumulate as accumulate
from .finish import finish as finish
from .finish import finish_ratios as finish_ratios
from .finish import finish_update as finish_update
from .lerp import lerp as lerp
from .norms import norms as norms
from .packing import pack as pack
from .packing import pack_piece as pack_piece
from .packing import unpack as unpack
from .prologue import prologue as prologue
from .statistics import statistics as statistics
from .update import changes as changes
from .update import update as update
from .update import update_norms as update_norms
