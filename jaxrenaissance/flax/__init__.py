"""Train states and an optimizer for Flax: `import jaxrenaissance.flax`."""

from .nnx_state import NNXState as NNXState
