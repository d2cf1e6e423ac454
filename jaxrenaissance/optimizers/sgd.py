"""SGD, with momentum and with Nesterov momentum."""

from typing import Any

from ..hyperparams import Number, ScheduleFunction
from ..transform import Optimizer, make_optimizer
from .options import check_moment_dtype


def sgd(
    learning_rate: Number | ScheduleFunction,
    momentum: Number | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
    *,
    weight_decay: Number | ScheduleFunction = 0.0,
    decoupled: bool = True,
    mask: Any = None,
    skip_nonfinite: bool = True,
    backend: str | None = None,
) -> Optimizer:
    r"""Stochastic gradient descent, with momentum where one is given.

    **Unlike** ``optax.chain(optax.add_decayed_weights(…), optax.sgd(…))``, weight decay leaves
    biases and norm scales alone unless a `mask` is given, and it is decoupled: it does not pass
    through the momentum. ``mask=True, decoupled=False`` gives what that chain gives.

    With g the gradient and wd the weight decay, in float32 (float64 for float64 leaves):

    .. math::
        \text{SGD:}\quad & w \leftarrow w (1 - \eta\, wd) - \eta g \\
        \text{momentum:}\quad & m \leftarrow \beta m + g,\quad
            w \leftarrow w (1 - \eta\, wd) - \eta m \\
        \text{Nesterov:}\quad & m \leftarrow \beta m + g,\quad
            w \leftarrow w (1 - \eta\, wd) - \eta (\beta m + g)

    and with ``decoupled=False`` instead :math:`g \leftarrow g + wd\, w` first and no other decay.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(0.5, momentum=0.9))
        >>> state = state.apply_gradients({"w": jnp.ones(2)})
        >>> state.params["w"].tolist()
        [0.5, 0.5]

    Args:
        learning_rate: η ≥ 0, or a schedule from the updates made so far to it.
        momentum: β in [0, 1]; None: no momentum, and no array for it.
        nesterov: Nesterov's form of the momentum.
        accumulator_dtype: as in optax; the momentum is float32 at least, so None or float32.
        weight_decay: wd ≥ 0, or a schedule.
        decoupled: whether the decay shrinks the weights; False: it adds to the gradient (L2).
        mask: which leaves are decayed. None or "weights": those in weight regions (None says so
            once through the logger). True, False, a tree of bools or a function from the parameters
            to one: as in optax.
        skip_nonfinite: a call whose gradients have a NaN or an infinity changes nothing but
            counters.
        backend: "auto", "cpu", "cuda" or "xla"; None: JAXRENAISSANCE_BACKEND, else "auto".

    Returns:
        The optimizer. All numbers may be device scalars or traced values.

    Raises:
        TypeError: an argument is not what it should be.
        ValueError: a number is negative, not finite or out of range; an option is not supported.

    References:
        Sutskever et al., `On the importance of initialization and momentum in deep learning
        <https://proceedings.mlr.press/v28/sutskever13.pdf>`_, 2013; Loshchilov and Hutter,
        `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, 2019.
    """
    check_moment_dtype("accumulator_dtype", accumulator_dtype)
    if not isinstance(nesterov, bool):
        raise TypeError(f"nesterov: expected a bool, got {nesterov!r}")
    if nesterov and momentum is None:
        raise ValueError("nesterov: needs a momentum, for example momentum=0.9")
    values = {"learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
    if momentum is None:
        del values["momentum"]
    kind = "sgd" if momentum is None else "nesterov" if nesterov else "momentum"
    return make_optimizer(
        kind,
        kind,
        values,
        mask=mask,
        decoupled=decoupled,
        skip_nonfinite=skip_nonfinite,
        backend=backend,
    )
