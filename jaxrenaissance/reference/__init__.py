"""The xla backend: the ops in jax.numpy, over the same arenas.

Differentiable, and what runs without compiled modules. Each function has the signature of the
primitive it stands for: operands first, then the static parameters. Norms pass through a workspace
of integers, so a clipping factor counts as a constant in a derivative.
"""

from .accumulate import accumulate as accumulate
from .finish import finish as finish
from .finish import finish_update as finish_update
from .lerp import lerp as lerp
from .norms import norms as norms
from .packing import pack as pack
from .packing import unpack as unpack
from .prologue import prologue as prologue
from .statistics import statistics as statistics
from .update import update as update
from .update import update_norms as update_norms
