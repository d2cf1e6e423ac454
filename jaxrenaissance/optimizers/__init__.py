"""The optimizers: optax's argument names, order and defaults."""

from .adam import adam as adam
from .adamw import adamw as adamw
from .sgd import sgd as sgd
