"""LAMB."""

import math
from collections.abc import Sequence
from typing import Any

from ..accumulation import Accumulate
from ..groups import Group
from ..hyperparams import Value
from ..loss_scale import LossScale
from ..options import Options
from ..transform import Optimizer, make_optimizer


def lamb(
    learning_rate: Value,
    b1: Value = 0.9,
    b2: Value = 0.999,
    eps: Value = 1e-6,
    eps_root: Value = 0.0,
    weight_decay: Value = 0.0,
    mask: Any = None,
    *,
    trust_ratio_mask: Any = None,
    max_ratio: Value | None = None,
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
    r"""LAMB: AdamW whose learning rate is scaled by a trust ratio for each weight tensor.

    **Unlike optax.lamb**, weight decay and trust ratio leave biases and norm scales alone unless
    masks are given; ``mask=True, trust_ratio_mask=True`` gives what ``optax.lamb`` gives by
    default.

    With g the gradient, unscaled and clipped as `max_norm` and `max_value` say, t the updates made
    with this one and ‖·‖ over a tensor (over each slice of a stacked one, see `MemoryPlan.build`),
    in float32 (float64 for float64 leaves):

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        u &= \frac{m / (1 - \beta_1^t)}
            {\sqrt{v / (1 - \beta_2^t) + \bar\varepsilon} + \varepsilon} + wd\, w \\
        r &= \min\left(\frac{\lVert w \rVert}{\lVert u \rVert}, \text{max\_ratio}\right),
            \quad r = 1 \text{ where } \lVert w \rVert \text{ or } \lVert u \rVert
            \text{ is 0, or there is no trust ratio} \\
        w &\leftarrow w - \eta\, r\, u

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> params = {"kernel": jnp.full((1, 2), 2.0), "bias": jnp.ones(2)}
        >>> grads = {"kernel": jnp.full((1, 2), 3.0), "bias": jnp.full(2, 3.0)}
        >>> state = jr.TrainState.create(params, jr.lamb(0.25, trust_ratio_mask="weights"))
        >>> state = state.apply_gradients(grads)
        >>> state.params["kernel"].round(4).tolist(), state.params["bias"].round(4).tolist()
        ([[1.5, 1.5]], [0.75, 0.75])

    Args:
        learning_rate: η ≥ 0.
        b1, b2: β₁ and β₂ in [0, 1).
        eps: ε ≥ 0. With 0, an element whose gradient has always been 0 has only the decay.
        eps_root: ε̄ ≥ 0, inside the root.
        weight_decay: wd ≥ 0.
        mask: which leaves are decayed. None or "weights": those in weight regions (None says so
            once through the logger). True, False, a tree of bools or a function from the parameters
            to one: as in optax.
        trust_ratio_mask: which leaves have a trust ratio, as `mask`.
        max_ratio: a bound > 0 of the trust ratio; None or `math.inf`: no bound.
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
        You et al., `Large Batch Optimization for Deep Learning: Training BERT in 76 minutes
        <https://arxiv.org/abs/1904.00962>`_, 2020.
    """
    values = {
        "learning_rate": learning_rate,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "eps_root": eps_root,
        "weight_decay": weight_decay,
        "max_ratio": math.inf if max_ratio is None else max_ratio,
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
    return make_optimizer(
        "lamb",
        "adam",
        values,
        options,
        decoupled=True,
        trust="lamb",
        trust_ratio_mask=trust_ratio_mask,
    )
