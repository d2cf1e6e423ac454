"""Teaches 40 policies at once to balance a pole: 5 learning rates, 8 seeds of each.

    python examples/rl_seeds.py
    python examples/rl_seeds.py --seeds 32 --learning-rates 0.001 0.003 0.01 --plot rl_seeds.png

Cart-pole (Barto, Sutton and Anderson, 1983) and an actor with a critic, all in one jitted program:
`lax.scan` over steps and updates, `vmap` over seeds and learning rates, which are traced: the
optimizer is made inside. However many members there are, one launch updates all of them. At the
largest rate some policies settle for pushing one way, and never learn.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from digits_options import image_file, integer

import jaxrenaissance as jr

ENVIRONMENTS, STEPS, HIDDEN = 16, 32, 32  # of one member: at once, in each update, of the network
DISCOUNT, TRACE, CRITIC_WEIGHT, ENTROPY_WEIGHT = 0.99, 0.95, 0.5, 0.01
LONGEST = 200  # an episode, whose return is its length
FEWEST_UPDATES = 10 * -(-LONGEST // STEPS)  # so that in each tenth of them an episode ends

Params = dict[str, dict[str, jax.Array]]


class CartPole(NamedTuple):
    """Position and angle with their velocities, [4], and the steps of the episode so far."""

    state: jax.Array
    steps: jax.Array


def reset(key: jax.Array) -> CartPole:
    return CartPole(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.int32(0))


def advance(cart: CartPole, action: jax.Array) -> tuple[CartPole, jax.Array]:
    """The cart pushed to the left or to the right for 20 ms; and whether the pole has fallen."""
    _, velocity, angle, turning = cart.state
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    # A cart of 1 kg, and a pole of 0.1 kg whose centre is half a metre from the joint.
    pushed = (force + 0.05 * turning**2 * sine) / 1.1
    turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    accelerated = pushed - 0.05 * turned * cosine / 1.1
    state = cart.state + 0.02 * jnp.stack([velocity, accelerated, turning, turned])
    fallen = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 0.2095)
    return CartPole(state, cart.steps + 1), fallen


def init(key: jax.Array) -> Params:
    """One hidden layer; the last has two logits and a value, which start near zero."""
    scales = {"in": (4, HIDDEN, 0.5), "hidden": (HIDDEN, HIDDEN, 0.2), "out": (HIDDEN, 3, 0.01)}
    return {
        name: {
            "kernel": scale * jax.random.normal(key, (inputs, outputs)),
            "bias": jnp.zeros(outputs),
        }
        for (name, (inputs, outputs, scale)), key in zip(
            scales.items(), jax.random.split(key, 3), strict=True
        )
    }


def predict(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [..., 2] and value [...] of a state [..., 4]."""
    for name in ("in", "hidden"):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    out = x @ params["out"]["kernel"] + params["out"]["bias"]
    return out[..., :2], out[..., 2]


class Seen(NamedTuple):
    """What happened in each step of each environment, [steps, environments]."""

    state: jax.Array
    action: jax.Array
    value: jax.Array
    next_value: jax.Array
    """0 where the pole has fallen."""
    ended: jax.Array
    length: jax.Array
    """Of the episode that ended, else 0."""


def play(params: Params, carts: CartPole, key: jax.Array) -> tuple[CartPole, Seen]:
    """Plays some steps in all environments; an episode that ended starts anew."""

    def step(carts: CartPole, key: jax.Array) -> tuple[CartPole, Seen]:
        logits, value = predict(params, carts.state)
        action_key, reset_key = jax.random.split(key)
        action = jax.random.categorical(action_key, logits)
        moved, fallen = jax.vmap(advance)(carts, action)
        ended = fallen | (moved.steps >= LONGEST)
        next_value = jnp.where(fallen, 0.0, predict(params, moved.state)[1])
        fresh = jax.vmap(reset)(jax.random.split(reset_key, ENVIRONMENTS))
        carts_after = CartPole(
            jnp.where(ended[:, None], fresh.state, moved.state),
            jnp.where(ended, fresh.steps, moved.steps),
        )
        length = jnp.where(ended, moved.steps, 0)
        return carts_after, Seen(carts.state, action, value, next_value, ended, length)

    return jax.lax.scan(step, carts, jax.random.split(key, STEPS))


def advantages(seen: Seen) -> jax.Array:
    """How much better it went than the critic said (Schulman et al., arXiv:1506.02438)."""

    def back(later: jax.Array, now: Seen) -> tuple[jax.Array, jax.Array]:
        # A step's reward, such that the value of balancing for ever is 1.
        reward = 1 - DISCOUNT
        surprise = reward + DISCOUNT * now.next_value - now.value
        advantage = surprise + DISCOUNT * TRACE * jnp.where(now.ended, 0.0, later)
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros(ENVIRONMENTS), seen, reverse=True)[1]


def loss_fn(params: Params, seen: Seen, advantage: jax.Array) -> jax.Array:
    """Makes what went well likelier, corrects the critic, and keeps some randomness."""
    logits, value = predict(params, seen.state)
    log_probs = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(log_probs, seen.action[..., None], axis=-1)[..., 0]
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    normal = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    error = value - (seen.value + advantage)
    return (-normal * taken + CRITIC_WEIGHT * error**2 - ENTROPY_WEIGHT * entropy).mean()


def train(key: jax.Array, learning_rate: jax.Array, updates: int) -> jax.Array:
    """One member: the mean return of the episodes that ended before each update, [updates].

    NaN where none ended.
    """
    init_key, reset_key, key = jax.random.split(key, 3)
    optimizer = jr.adam(learning_rate, max_norm=0.5)
    state = jr.TrainState.create(init(init_key), optimizer)
    carts = jax.vmap(reset)(jax.random.split(reset_key, ENVIRONMENTS))

    def update(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        state, carts = carry
        params = state.compute_params
        carts, seen = play(params, carts, key)
        grads = jax.grad(loss_fn)(params, seen, advantages(seen))
        mean_return = seen.length.sum() / seen.ended.sum()
        return (state.apply_gradients(grads), carts), mean_return

    return jax.lax.scan(update, (state, carts), jax.random.split(key, updates))[1]


@functools.partial(jax.jit, static_argnums=2)
def train_all(keys: jax.Array, learning_rates: jax.Array, updates: int) -> jax.Array:
    """All members: returns [rates, seeds, updates]."""
    members = jax.vmap(functools.partial(train, updates=updates), in_axes=(0, None))
    return jax.vmap(members, in_axes=(None, 0))(keys, learning_rates)


def save_plot(path: Path, rates: list[float], returns: np.ndarray) -> None:
    """Returns by update, the mean over seeds; the band is from the worst to the best."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files and needs no display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    middles = (np.arange(returns.shape[-1]) + 0.5) / returns.shape[-1]
    for rate, of_rate in zip(rates, returns, strict=True):
        axes.plot(middles, of_rate.mean(0), label=f"{rate:g}")
        axes.fill_between(middles, of_rate.min(0), of_rate.max(0), alpha=0.15)
    axes.set(xlabel="part of the training", ylabel="return", xlim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(title="learning rate")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--updates", type=integer(FEWEST_UPDATES), default=500, metavar="N", help="of each policy")
    add("--seeds", type=integer(1), default=8, metavar="N", help="policies a learning rate")
    add(
        "--learning-rates",
        type=float,
        nargs="+",
        default=[3e-4, 1e-3, 3e-3, 1e-2, 3e-2],
        metavar="RATE",
        help="to compare",
    )
    add("--plot", type=image_file, metavar="FILE", help="where to draw (default: nowhere)")
    options = parser.parse_args()

    rates = options.learning_rates
    keys = jax.random.split(jax.random.key(0), options.seeds)
    start = time.perf_counter()
    returns = np.asarray(train_all(keys, jnp.asarray(rates), options.updates))
    seconds = time.perf_counter() - start
    members = len(rates) * options.seeds
    print(f"{members} policies, {options.updates} updates each: {seconds:.1f} s with compiling")

    # In each tenth of the training; an update in which no episode ended has no return.
    tenths = np.array_split(returns, 10, axis=-1)
    means = np.stack([np.nanmean(tenth, axis=-1) for tenth in tenths], axis=-1)
    print(f"mean return of the last tenth, at most {LONGEST}:")
    print("learning rate    mean   worst seed   best seed")
    for rate, last in zip(rates, means[..., -1], strict=True):
        print(f"{rate:13g}  {last.mean():6.1f}   {last.min():10.1f}   {last.max():9.1f}")
    if options.plot:
        save_plot(options.plot, rates, means)
        print(f"returns: {options.plot}")


if __name__ == "__main__":
    main()
