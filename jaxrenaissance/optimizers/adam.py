"""Adam."""

from collections.abc import Sequence
from typing import Any

from ..accumulation import Accumulate
from ..groups import Group
from ..hyperparams import Value
from ..loss_scale import LossScale
from ..options import Options
from ..transform import Optimizer, make_optimizer
from .unsupported import check_moment_dtype, check_no_nadam


def adam(
    learning_rate: Value,
    b1: Value = 0.9,
    b2: Value = 0.999,
    eps: Value = 1e-8,
    eps_root: Value = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    weight_decay: Value | None = None,
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
    r"""Adam; its `weight_decay` is L2, which passes through the moments: see `adamw`.

    **Unlike** ``optax.chain(optax.add_decayed_weights(…), optax.adam(…))``, weight decay leaves
    biases and norm scales alone unless a `mask` is given; ``mask=True`` gives what that chain
    gives. Without weight decay it is ``optax.adam``.

    With g the gradient, unscaled and clipped as `max_norm` and `max_value` say, and t the updates
    made with this one, in float32 (float64 for float64 leaves):

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
        learning_rate: η ≥ 0.
        b1, b2: β₁ and β₂ in [0, 1).
        eps: ε ≥ 0. With 0, an element whose gradient has always been 0 does not move.
        eps_root: ε̄ ≥ 0, inside the root.
        mu_dtype: as in optax; moments are float32 at least, so None or float32.
        nesterov: not supported.
        weight_decay: wd ≥ 0; None: 0, and `optax.inject_hyperparams` does not see it.
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
        "weight_decay": 0.0 if weight_decay is None else weight_decay,
    }
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
    return make_optimizer("adam", "adam", values, options, decoupled=False)
