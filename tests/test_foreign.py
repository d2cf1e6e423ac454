"""What is said where an optimizer is not one of this package's."""

import jax.numpy as jnp
import optax
import pytest

import jaxrenaissance as jr


@pytest.mark.parametrize(
    ("transformation", "advice"),
    [
        (optax.adamw(1e-3), ["jr.adam or jr.adamw", "weight_decay="]),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
            ["optax.clip_by_global_norm: max_norm=", "jr.sgd"],
        ),
        (optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3)), ["weight_decay="]),
        (optax.adam(optax.cosine_decay_schedule(1e-3, 10)), ["learning_rate=, which takes"]),
        (optax.apply_if_finite(optax.sgd(0.1), 5), ["skip_nonfinite=True"]),
        (optax.masked(optax.sgd(0.1), {"w": True}), ["trainable="]),
        (optax.inject_hyperparams(optax.sgd)(0.1), ["replace_hyperparams"]),
        (optax.adabelief(1e-3), ["optax.scale_by_belief: the same transformation"]),
        (
            optax.lars(0.1),
            ["optax.scale_by_trust_ratio: jr.lars", "trust_ratio_mask=", "momentum="],
        ),
        (optax.lamb(1e-3), ["optax.scale_by_trust_ratio: jr.lars or jr.lamb"]),
        (optax.lion(1e-3), ["optax.scale_by_lion: jr.lion", "optax.add_decayed_weights: weight_d"]),
        (optax.chain(optax.clip(1.0), optax.sgd(0.1)), ["optax.clip: max_value="]),
        (optax.chain(optax.adam(1e-3), optax.ema(0.9)), ["optax.ema: ema_decay="]),
        (
            optax.MultiSteps(optax.adam(1e-3), 4),
            ["optax.MultiSteps: accumulate=jr.Accumulate(", "jr.adam"],
        ),
        (
            optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
            ["optax.MultiSteps: accumulate=jr.Accumulate(", "jr.adam"],
        ),
        (
            optax.partition({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, {"w": "a"}),
            ["optax.partition: groups= with jr.Group, TrainState.create(trainable="],
        ),
        (
            optax.chain(optax.clip_by_global_norm(1.0), jr.adamw(1e-3, mask=True)),
            ["clip_by_global"],
        ),
    ],
)
def test_an_optax_chain_is_refused_with_what_to_use_instead(transformation, advice):
    with pytest.raises(TypeError, match="optimizer: TrainState updates in place") as caught:
        jr.TrainState.create({"w": jnp.ones(2)}, transformation)
    for text in advice:
        assert text in str(caught.value)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"optimizer: expected one made by jr.adamw"):
        jr.TrainState.create({"w": jnp.ones(2)}, "adamw")
    with pytest.raises(TypeError, match=r"optimizer: expected one made by jr.adamw"):
        jr.TrainState.init(lambda: {"w": jnp.ones(2)}, None)
