"""Compiled programs of a step: exported, and found again by another process."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from scripts import run_script
from states import assert_trees_equal, mlp, train_step
from states import batch as make_batch

import jaxrenaissance as jr

SCRIPT = """
import sys

import jax
import jax.numpy as jnp
import optax

import jaxrenaissance as jr

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **details: events.append(event))

params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
optimizer = jr.adamw(optax.cosine_decay_schedule(0.1, 10), max_norm=1.0, mask=True)
state, moments = jr.TrainState.create(params, optimizer), optimizer.init(params)
events.clear()
jax.jit(lambda state, grads: state.apply_gradients(grads))(state, params)
jax.jit(optimizer.update)(params, moments, params)
print(*(sum(e.endswith(name) for e in events) for name in ("cache_hits", "cache_misses")))
"""


def test_a_second_process_finds_the_compiled_steps(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    counts = []
    for _ in range(2):
        result = run_script(str(script), str(tmp_path / "cache"), cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        counts.append(tuple(map(int, result.stdout.split())))
    (hits, misses), (hits_again, misses_again) = counts
    assert hits == misses_again == 0
    assert misses == hits_again >= 2


def exported(function, *arguments):
    """The exported function; whoever exports one has to name our calls, which it depends on."""
    jitted = jax.jit(function)
    # The xla backend calls nothing of ours.
    names = set(re.findall(r"jaxrenaissance_\w+_v\d+", jitted.lower(*arguments).as_text()))
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    return jax.export.export(jitted, disabled_checks=checks)(*arguments)


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_a_train_step_can_be_exported(backend):
    state, x = jr.TrainState.create(mlp(), jr.adam(0.1, backend=backend)), make_batch()
    again = exported(train_step, state, x)
    assert_trees_equal(again.call(state, x), jax.jit(train_step)(state, x))


def test_an_update_can_be_exported():
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    tx = optax.chain(optax.clip(0.5), jr.adamw(0.1, mask=True))
    state = tx.init(params)
    again = exported(tx.update, params, state, params)
    assert_trees_equal(again.call(params, state, params), jax.jit(tx.update)(params, state, params))
