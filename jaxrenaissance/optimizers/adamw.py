"""AdamW: Adam with decoupled weight decay."""

from typing import Any

from ..hyperparams import Number, ScheduleFunction
from ..transform import Optimizer, make_optimizer
from .options import check_moment_dtype, check_no_nadam


def adamw(
    learning_rate: Number | ScheduleFunction,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: Any = None,
    weight_decay: Number | ScheduleFunction = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    skip_nonfinite: bool = True,
    backend: str | None = None,
) -> Optimizer:
    r"""Adam with decoupled weight decay.

    **Unlike optax.adamw**, weight decay leaves biases and norm scales alone unless a `mask` is
    given; ``mask=True`` gives what ``optax.adamw`` gives by default.

    With g the gradient, t the updates made with this one, in float32 (float64 for float64 leaves):

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w (1 - \eta\, wd) - \eta \frac{m / (1 - \beta_1^t)}
            {\sqrt{v / (1 - \beta_2^t) + \bar\varepsilon} + \varepsilon}

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> params = {"kernel": jnp.ones((1, 2)), "bias": jnp.ones(2)}
        >>> grads = {"kernel": jnp.full((1, 2), 3.0), "bias": jnp.full(2, 3.0)}
        >>> optimizer = jr.adamw(0.5, weight_decay=0.5, mask="weights")
        >>> state = jr.TrainState.create(params, optimizer)
        >>> state = state.apply_gradients(grads)
        >>> state.params["kernel"].round(4).tolist(), state.params["bias"].round(4).tolist()
        ([[0.25, 0.25]], [0.5, 0.5])

    Args:
        learning_rate: η ≥ 0, or a schedule from the updates made so far to it.
        b1, b2: β₁ and β₂ in [0, 1).
        eps: ε ≥ 0. With 0, an element whose gradient has always been 0 does not move.
        eps_root: ε̄ ≥ 0, inside the root.
        mu_dtype: as in optax; moments are float32 at least, so None or float32.
        weight_decay: wd ≥ 0, or a schedule.
        mask: which leaves are decayed. None or "weights": those in weight regions (None says so
            once through the logger). True, False, a tree of bools or a function from the parameters
            to one: as in optax.
        nesterov: not supported.
        skip_nonfinite: a call whose gradients have a NaN or an infinity changes nothing but
            counters.
        backend: "auto", "cpu", "cuda" or "xla"; None: JAXRENAISSANCE_BACKEND, else "auto".

    Returns:
        The optimizer. All numbers may be device scalars or traced values.

    Raises:
        TypeError: an argument is not what it should be.
        ValueError: a number is negative, not finite or out of range; an option is not supported.

    References:
        Loshchilov and Hutter, `Decoupled Weight Decay Regularization
        <https://arxiv.org/abs/1711.05101>`_, 2019.
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
        "adamw",
        "adam",
        values,
        mask=mask,
        decoupled=True,
        skip_nonfinite=skip_nonfinite,
        backend=backend,
    )
