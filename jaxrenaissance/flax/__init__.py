"""Train states and an optimizer for Flax: `import jaxrenaissance.flax`."""

from .linen import TrainState as TrainState
from .nnx_optimizer import Optimizer as Optimizer
from .nnx_state import NNXState as NNXState
