"""The optimizers: optax's argument names, order and defaults."""

from .adam import adam as adam
from .adamw import adamw as adamw
from .lamb import lamb as lamb
from .lars import lars as lars
from .lion import lion as lion
from .sgd import sgd as sgd
