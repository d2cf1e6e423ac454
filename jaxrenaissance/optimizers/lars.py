"""LARS, with momentum and with Nesterov momentum."""

import math
from collections.abc import Sequence
from typing import Any

from ..accumulation import Accumulate
from ..groups import Group
from ..hyperparams import Value
from ..loss_scale import LossScale
from ..options import Options
from ..transform import Optimizer, make_optimizer


def lars(
    learning_rate: Value,
    weight_decay: Value = 0.0,
    weight_decay_mask: Any = None,
    trust_coefficient: Value = 0.001,
    eps: Value = 0.0,
    trust_ratio_mask: Any = None,
    momentum: Value = 0.9,
    nesterov: bool = False,
    *,
    min_norm: Value | None = None,
    max_ratio: Value | None = None,
    optax_form: bool = False,
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
    r"""LARS: momentum whose learning rate is scaled by a trust ratio for each weight tensor.

    **Unlike optax.lars**, weight decay and trust ratio leave biases and norm scales alone unless
    masks are given, the norms of gradient and decay are added up, and the ratio is bounded.
    ``weight_decay_mask=True, trust_ratio_mask=True, optax_form=True`` gives what ``optax.lars``
    gives by default.

    With g the gradient, unscaled and clipped by norm as `max_norm` says, wd the weight decay and
    ‖·‖ over a tensor (over each slice of a stacked one, see `MemoryPlan.build`), in float32
    (float64 for float64 leaves):

    .. math::
        r &= \min\left(\frac{\tau \lVert w \rVert}
            {\lVert g \rVert + wd \lVert w \rVert + \varepsilon}, \text{max\_ratio}\right),
            \quad r = 1 \text{ where } \lVert w \rVert \text{ or } \lVert g \rVert
            \text{ is 0 or less than min\_norm} \\
        g' &= \text{clamp}(g, \pm\text{max\_value}) + wd\, w \\
        m &\leftarrow \beta m + \eta\, r\, g' \\
        \text{LARS:}\quad & w \leftarrow w - m \\
        \text{Nesterov:}\quad & w \leftarrow w - (\beta m + \eta\, r\, g')

    Leaves without a trust ratio are updated by momentum with L2 decay:
    :math:`m \leftarrow \beta m + g',\ w \leftarrow w - \eta m`, and with Nesterov's form
    :math:`w \leftarrow w - \eta (\beta m + g')`.

    With ``optax_form=True``

    .. math::
        r = \frac{\tau \lVert w \rVert}{\lVert g + wd\, w \rVert + \varepsilon}, \quad
            r = 1 \text{ where } \lVert w \rVert \text{ or } \lVert g + wd\, w \rVert
            \text{ is 0}

    where nothing bounds norms and ratios unless it is given, and η is in the momentum of all
    leaves, with r = 1 for those without a trust ratio.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> params = {"kernel": jnp.asarray([[3.0, 4.0]]), "bias": jnp.ones(2)}
        >>> grads = {"kernel": jnp.asarray([[6.0, 8.0]]), "bias": jnp.ones(2)}
        >>> optimizer = jr.lars(0.5, trust_coefficient=0.5, trust_ratio_mask="weights")
        >>> state = jr.TrainState.create(params, optimizer)
        >>> state = state.apply_gradients(grads)
        >>> state.params["kernel"].round(4).tolist(), state.params["bias"].round(4).tolist()
        ([[2.25, 3.0]], [0.5, 0.5])

    Args:
        learning_rate: η ≥ 0.
        weight_decay: wd ≥ 0.
        weight_decay_mask: which leaves are decayed. None or "weights": those in weight regions
            (None says so once through the logger). True, False, a tree of bools or a function from
            the parameters to one: as in optax.
        trust_coefficient: τ > 0.
        eps: ε ≥ 0.
        trust_ratio_mask: which leaves have a trust ratio, as `weight_decay_mask`.
        momentum: β in [0, 1].
        nesterov: Nesterov's form of the momentum.
        min_norm: ≥ 0. None: 1e-12, and 0 with `optax_form`.
        max_ratio: > 0; `math.inf` is no bound. None: 100, and no bound with `optax_form`.
        optax_form: optax's formula. All sums are of the same pass over the weights and gradients.
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
        You, Gitman and Ginsburg, `Large Batch Training of Convolutional Networks
        <https://arxiv.org/abs/1708.03888>`_, 2017.
    """
    for name, value in (("nesterov", nesterov), ("optax_form", optax_form)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
    if min_norm is None:
        min_norm = 0.0 if optax_form else 1e-12
    if max_ratio is None:
        max_ratio = math.inf if optax_form else 100.0
    values = {
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "trust_coefficient": trust_coefficient,
        "eps": eps,
        "momentum": momentum,
        "min_norm": min_norm,
        "max_ratio": max_ratio,
    }
    options = Options(
        mask=weight_decay_mask,
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
        "lars_nesterov" if nesterov else "lars",
        "nesterov" if nesterov else "momentum",
        values,
        options,
        decoupled=False,
        trust="lars_optax" if optax_form else "lars",
        trust_ratio_mask=trust_ratio_mask,
        mask_argument="weight_decay_mask",
    )
