"""XLA captures a step's launches in a command buffer and replays them without our handlers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from states import batch, count_compilations, mlp, train_step

import jaxrenaissance as jr
from jaxrenaissance import native

pytestmark = [pytest.mark.gpu, pytest.mark.native]

WARM_UP = 4  # executions after which XLA has recorded what it records


def executions(run, count):
    """What `run` gives after so many calls, and how often handlers ran meanwhile."""
    before = native.cuda_executions()
    for _ in range(count):
        result = run()
    jax.block_until_ready(result)
    return result, native.cuda_executions() - before


class Training:
    def __init__(self, **options):
        optimizer = jr.adamw(1e-3, mask="weights", **options)
        self.state = jr.TrainState.create(mlp(width=64), optimizer)
        self.step = jax.jit(train_step, donate_argnums=0)

    def __call__(self):
        self.state, loss = self.step(self.state, batch())
        return loss


OPTIONS = {
    "plain": {},
    "clipped, averaged": {"max_norm": 1.0, "ema_decay": 0.9},
    "accumulated": {"accumulate": jr.Accumulate(2)},
    "loss scale": {"loss_scale": jr.DynamicLossScale()},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_all_launches_of_a_step_are_captured(options):
    run = Training(**OPTIONS[options])
    _, first = executions(run, WARM_UP)
    assert first > 0
    loss, again = executions(run, 10)
    assert again == 0
    assert jnp.isfinite(loss)
    assert int(run.state.calls) == WARM_UP + 10


def test_other_numbers_record_nothing_anew():
    run = Training(loss_scale=jr.DynamicLossScale(), max_norm=1.0)
    executions(run, WARM_UP)
    before = jax.tree.map(jnp.copy, run.state.params)
    with count_compilations() as compiled:
        run.state = run.state.replace_hyperparams(learning_rate=0.5, loss_scale=4.0, max_norm=0.5)
        changed = len(compiled)
        _, again = executions(run, 3)
    assert len(compiled) == changed
    # The state's scalars are in another buffer now, which XLA may have to be told once.
    assert again <= WARM_UP * 4
    _, again = executions(run, 5)
    assert again == 0
    moved = optax.tree.norm(optax.tree.sub(run.state.params, before))
    assert moved > 0.1


def test_the_first_execution_on_each_device_is_right():
    results = []
    for device in jax.devices("cuda"):
        with jax.default_device(device):
            run = Training()
            run()
            results.append(jax.device_get(run.state.params))
    for own in results:
        jax.tree.map(lambda x, y: jnp.array_equal(x, y) or pytest.fail("differs"), own, results[0])
