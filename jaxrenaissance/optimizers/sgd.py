"""SGD, with momentum and with Nesterov momentum."""

from collections.abc import Sequence
from typing import Any

from ..accumulation import Accumulate
from ..groups import Group
from ..hyperparams import Value
from ..loss_scale import LossScale
from ..options import Options
from ..transform import Optimizer, make_optimizer
from .unsupported import check_moment_dtype


def sgd(
    learning_rate: Value,
    momentum: Value | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
    *,
    weight_decay: Value | None = None,
    decoupled: bool = True,
    mask: Any = None,
    skip_nonfinite: bool = True,
    backend: str | None = None,
    max_norm: Value | None = None,
    max_value: Value | None = None,
    ema_decay: Value | None = None,
    ema_debias: bool = False,
    loss_scale: LossScale | None = None,
    accumulate: Accumulate | None = None,
    groups: Sequence[Group] = (),
    metrics: str | Sequence[str] = (),
) -> Optimizer:
    r"""Stochastic gradient descent, with momentum where one is given.

    **Unlike** ``optax.chain(optax.add_decayed_weights(…), optax.sgd(…))``, weight decay leaves
    biases and norm scales alone unless a `mask` is given, and it is decoupled: it does not pass
    through the momentum. ``mask=True, decoupled=False`` gives what that chain gives.

    With g the gradient, unscaled and clipped as `max_norm` and `max_value` say, and wd the weight
    decay, in float32 (float64 for float64 leaves):

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
        learning_rate: η ≥ 0.
        momentum: β in [0, 1]; None: no momentum, and no array for it.
        nesterov: Nesterov's form of the momentum.
        accumulator_dtype: as in optax; the momentum is float32 at least, so None or float32.
        weight_decay: wd ≥ 0; None: 0, and `optax.inject_hyperparams` does not see it.
        decoupled: whether the decay shrinks the weights; False: it adds to the gradient (L2).
        mask: which leaves are decayed. None or "weights": those in weight regions (None says so
            once through the logger). True, False, a tree of bools or a function from the parameters
            to one: as in optax.
        skip_nonfinite: a call whose gradients have a NaN or an infinity changes nothing but
            counters.
        backend: "auto", "cpu", "cuda" or "xla"; None: JAXRENAISSANCE_BACKEND, else "auto".
        max_norm: N > 0: where the norm of all gradients together is more, they are multiplied by
            N / norm. It is the norm of the unscaled gradients (their mean with `accumulate`).
        max_value: M > 0: each element is then clamped to [−M, M].
        ema_decay: d in [0, 1): an average of the weights that follows each update,
            e ← e + (1 − d)(w − e), and starts as a copy of them; see `TrainState.ema_params`.
        ema_debias: the average starts at zero instead, and is divided by 1 − ∏ d when it is read.
        loss_scale: a `DynamicLossScale` or `StaticLossScale`. `TrainState.scale_loss` multiplies
            the loss by it, and the update divides the gradients.
        accumulate: `Accumulate(n)`: every n-th call updates, with the mean of the gradients.
        groups: a list of `Group`s: leaves with hyperparameters of their own.
        metrics: what `TrainState.metrics` has besides: "grad_norm", "param_norm", "update_norm",
            "leaves" (the gradient's norm of each leaf), or a list of these.

    Returns:
        The optimizer. Every number may be a Python number, a device scalar, a traced value or a
        schedule: a function from the updates made so far (int32) to the number, as in optax.

    Raises:
        TypeError: an argument is not what it should be.
        ValueError: a number is out of range, or an option is not supported. Under optax's contract
            ema_decay, loss_scale, accumulate and metrics, which only work in place, raise one too.

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
    values = {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "weight_decay": 0.0 if weight_decay is None else weight_decay,
    }
    if momentum is None:
        del values["momentum"]
    kind = "sgd" if momentum is None else "nesterov" if nesterov else "momentum"
    options = Options(
        mask=mask,
        skip_nonfinite=skip_nonfinite,
        backend=backend,
        max_norm=max_norm,
        max_value=max_value,
        ema_decay=ema_decay,
        ema_debias=ema_debias,
        loss_scale=loss_scale,
        accumulate=accumulate,
        groups=groups,
        metrics=metrics,
    )
    return make_optimizer(kind, kind, values, options, decoupled=decoupled)
