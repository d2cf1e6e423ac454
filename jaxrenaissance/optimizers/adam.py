"""Adam."""

from typing import Any

from ..hyperparams import Number, ScheduleFunction
from ..transform import Optimizer, make_optimizer
from .options import check_moment_dtype, check_no_nadam


def adam(
    learning_rate: Number | ScheduleFunction,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    weight_decay: Number | ScheduleFunction = 0.0,
    mask: Any = None,
    skip_nonfinite: bool = True,
    backend: str | None = None,
) -> Optimizer:
    r"""Adam; its `weight_decay` is L2, which passes through the moments: see `adamw`.

    **Unlike** ``optax.chain(optax.add_decayed_weights(…), optax.adam(…))``, weight decay leaves
    biases and norm scales alone unless a `mask` is given; ``mask=True`` gives what that chain
    gives. Without weight decay it is ``optax.adam``.

    With g the gradient, t the updates made with this one, in float32 (float64 for float64 leaves):

    .. math::
        g &\leftarrow g + wd\, w \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w - \eta \frac{m / (1 - \beta_1^t)}
            {\sqrt{v / (1 - \beta_2^t) + \bar\varepsilon} + \varepsilon}

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> state = jr.TrainState.create({"w": jnp.ones(2)}, jr.adam(0.5))
        >>> state = state.apply_gradients({"w": jnp.full(2, 3.0)})
        >>> state.params["w"].round(4).tolist()
        [0.5, 0.5]

    Args:
        learning_rate: η ≥ 0, or a schedule from the updates made so far to it.
        b1, b2: β₁ and β₂ in [0, 1).
        eps: ε ≥ 0. With 0, an element whose gradient has always been 0 does not move.
        eps_root: ε̄ ≥ 0, inside the root.
        mu_dtype: as in optax; moments are float32 at least, so None or float32.
        nesterov: not supported.
        weight_decay: wd ≥ 0, or a schedule.
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
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2014.
    """
    check_moment_dtype("mu_dtype", mu_dtype)
    check_no_nadam(nesterov)
    values = {
        "learning_rate": learning_rate,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "eps_root": eps_root,
        "weight_decay": weight_decay,
    }
    return make_optimizer(
        "adam",
        "adam",
        values,
        mask=mask,
        decoupled=False,
        skip_nonfinite=skip_nonfinite,
        backend=backend,
    )
