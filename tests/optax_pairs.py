"""Every optimizer beside what optax has for it, with masks that make the two the same."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrenaissance as jr


class Pair(NamedTuple):
    """Functions of a learning rate; ours also takes further options.

    Attributes:
        ours: the factory here.
        theirs: optax's, or a chain that does the same.
    """

    ours: Callable[..., jr.Optimizer]
    theirs: Callable[[Any], optax.GradientTransformation]


def _ours(factory: Callable[..., jr.Optimizer], **options: Any) -> Callable[..., jr.Optimizer]:
    return lambda rate, **more: factory(rate, **options, **more)


def _l2(optimizer: Callable[[Any], optax.GradientTransformation]) -> Any:
    return lambda rate: optax.chain(optax.add_decayed_weights(0.1), optimizer(rate))


_MASKS = {"mask": True, "trust_ratio_mask": True}
_LARS = {"weight_decay_mask": True, "trust_ratio_mask": True, "optax_form": True}
_L2 = {"weight_decay": 0.1, "mask": True, "decoupled": False}
_ADAM = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "eps_root": 1e-8}

PAIRS = {
    "sgd": Pair(jr.sgd, optax.sgd),
    "momentum": Pair(_ours(jr.sgd, momentum=0.9), lambda rate: optax.sgd(rate, 0.9)),
    "nesterov": Pair(
        _ours(jr.sgd, momentum=0.9, nesterov=True), lambda rate: optax.sgd(rate, 0.9, True)
    ),
    "sgd_l2": Pair(_ours(jr.sgd, **_L2), _l2(optax.sgd)),
    "momentum_l2": Pair(_ours(jr.sgd, momentum=0.8, **_L2), _l2(lambda rate: optax.sgd(rate, 0.8))),
    "nesterov_l2": Pair(
        _ours(jr.sgd, momentum=0.8, nesterov=True, **_L2),
        _l2(lambda rate: optax.sgd(rate, 0.8, True)),
    ),
    "adam": Pair(_ours(jr.adam, **_ADAM), lambda rate: optax.adam(rate, **_ADAM)),
    "adam_l2": Pair(
        _ours(jr.adam, **_ADAM, weight_decay=0.1, mask=True),
        _l2(lambda rate: optax.adam(rate, **_ADAM)),
    ),
    "adamw": Pair(
        _ours(jr.adamw, b1=0.85, b2=0.99, eps=1e-7, weight_decay=0.1, mask=True),
        lambda rate: optax.adamw(rate, b1=0.85, b2=0.99, eps=1e-7, weight_decay=0.1),
    ),
    "lars": Pair(
        _ours(jr.lars, weight_decay=0.1, **_LARS), lambda rate: optax.lars(rate, weight_decay=0.1)
    ),
    "lars_nesterov": Pair(
        _ours(jr.lars, nesterov=True, **_LARS), lambda rate: optax.lars(rate, nesterov=True)
    ),
    "lamb": Pair(
        _ours(jr.lamb, weight_decay=0.1, **_MASKS), lambda rate: optax.lamb(rate, weight_decay=0.1)
    ),
    "lion": Pair(
        _ours(jr.lion, weight_decay=0.1, mask=True), lambda rate: optax.lion(rate, weight_decay=0.1)
    ),
}


def model(rng: np.random.Generator, dtype: Any = jnp.float32) -> dict[str, Any]:
    """A kernel, a bias and a norm's scale."""
    shapes = {"dense": {"kernel": (7, 9), "bias": (9,)}, "scale": (9,)}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def follow(
    transformation: Any, params: Any, gradients: Iterable[Any], **extra: Any
) -> tuple[Any, Any]:
    """The parameters and the state after updates with these gradients, under jit.

    The jitted update must be compiled once.
    """

    @jax.jit
    def update(params, state, grads):
        updates, state = transformation.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = transformation.init(params)
    for grads in gradients:
        params, state = update(params, state, grads)
    assert update._cache_size() == 1
    return params, state


def assert_close(got: Any, wanted: Any, rtol: float = 2e-5, atol: float = 4e-6) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol
        )
