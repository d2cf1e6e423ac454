"""TrainState: parameters, moments and scalars as a few device buffers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu

from . import (
    averages,
    checkpoint,
    gradients,
    hyperparams,
    metrics,
    packed,
    replan,
    scalars,
    surgery,
    transform,
)
from .compute_dtypes import ComputeDtype, resolve
from .extra import check_like, copy, hold_back
from .foreign import check_optimizer
from .gradients import Gradients
from .groups import Match
from .ops.checks import check_arena, check_ints
from .packed import Dtypes
from .paths import path_string
from .plan import MemoryPlan, Rules, Stacked
from .spec import Spec
from .static import Static
from .step import Buffers, scalar_dtype, start, step
from .summary import describe
from .transform import Optimizer

_KEEP: Any = object()


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """A model being trained: its parameters, the optimizer's moments and scalars.

    A pytree of a few device buffers, however many parameters there are: a jitted, donated step
    costs the host tens of microseconds, and one launch updates everything in place. The leaves
    exist inside the step only. Make one by `create` or `init`; take gradients with respect to
    `compute_params`:

    >>> import jax, jax.numpy as jnp
    >>> import jaxrenaissance as jr
    >>> state = jr.TrainState.create({"w": jnp.zeros(3), "b": jnp.zeros(())}, jr.adam(0.1))
    >>> def loss_fn(params, x, y):
    ...     return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)
    >>> @jax.jit(donate_argnums=0)
    ... def train_step(state, x, y):
    ...     loss, grads = jax.value_and_grad(loss_fn)(state.compute_params, x, y)
    ...     state = state.apply_gradients(grads)
    ...     return state, {"loss": loss, **state.metrics}
    >>> state, metrics = train_step(state, jnp.eye(3), jnp.ones(3))
    >>> float(metrics["loss"]), int(state.step)
    (1.0, 1)

    Attributes:
        weights: one 1-D array an arena: [arena.size] in the arena's dtype.
        moments: for each arena its moments, arrays like the weights.
        ema: the averages of the weights, arrays like them; () without `ema_decay`.
        accumulator: sums of gradients, arrays like the weights; () without `accumulate`.
        norms: for each arena the gradients' norms by segment; () without the metric "leaves".
        ratios: for each arena the trust ratios by segment; () for optimizers without them.
        floats: the float scalars, see `scalars`.
        ints: the counters, int32.
        frozen: the leaves that are not trained, in the tree's order, as they were given.
        extra: whatever else the step carries, for example a `Packed` of batch statistics.
        ema_extra: the average of `extra`, or None.
        static: plan, spec and compute dtypes: no numbers, so that a new value compiles nothing.
    """

    weights: tuple[jax.Array, ...]
    moments: tuple[tuple[jax.Array, ...], ...]
    ema: tuple[jax.Array, ...]
    accumulator: tuple[jax.Array, ...]
    norms: tuple[jax.Array, ...]
    ratios: tuple[jax.Array, ...]
    floats: jax.Array
    ints: jax.Array
    frozen: tuple[Any, ...]
    extra: Any
    ema_extra: Any
    static: Static = dataclasses.field(metadata={"static": True})

    @staticmethod
    def create(
        params: Any,
        optimizer: Optimizer,
        *,
        compute_dtype: ComputeDtype = None,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
        trainable: Any = None,
        extra: Any = None,
        ema_extra: bool = False,
        shards: int = 1,
    ) -> "TrainState":
        """A state that starts from these parameters, which are copied: the caller's arrays stay.

        Args:
            params: a tree of float arrays, or with `trainable` of any arrays.
            optimizer: made by this package's factories.
            compute_dtype: of the leaves of `compute_params`. None: as in `params`. The strings
                "bfloat16" and "float16": that dtype, and norm scales and biases as in `params`. A
                dtype: all leaves. A mapping from `Region`s or path patterns to dtypes: the first
                key that fits a leaf decides, and the others are as in `params`. Leaves that are not
                trained are always as given.
            rules, stacked, trainable, shards: see `MemoryPlan.build`.
            extra: a pytree of arrays, kept as `state.extra`.
            ema_extra: whether the float arrays of `extra` are averaged as the weights are, for
                `with_ema`: batch statistics that fit the averaged weights. Others are taken as
                they are at the last update. The averages follow what `apply_gradients` is given.

        Raises:
            TypeError: if the optimizer is not one of this package's.
            ValueError: if a leaf cannot be trained, a pattern matches nothing, or arrays are
                sharded over devices; names the leaf's path and the argument. If there is to be
                an average of `extra`, and none of the weights.
        """
        check_optimizer(optimizer)
        _check_ema_extra(ema_extra, optimizer)
        packed.refuse_sharded(params, "params")
        params = packed.canonical(params)
        plan = transform.build_plan(
            params,
            optimizer.selection,
            rules=rules,
            stacked=stacked,
            trainable=trainable,
            shards=shards,
        )
        static = Static(plan, optimizer.spec, resolve(compute_dtype, plan))
        _check_frozen(plan, params, "params")
        floats, ints = _initial_scalars(plan, optimizer)
        return _create(static, ema_extra, jtu.tree_leaves(params), extra, floats, ints)

    @staticmethod
    def init(
        fn: Callable[[], Any],
        optimizer: Optimizer,
        *,
        has_extra: bool = False,
        ema_extra: bool = False,
        compute_dtype: ComputeDtype = None,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
        trainable: Any = None,
        shards: int = 1,
    ) -> "TrainState":
        """As `create(fn(), …)`, but made under jit, so that no second copy of the weights lives on.

        Args:
            fn: makes the parameters, `lambda: model.init(key, x)["params"]`.
            optimizer, compute_dtype, rules, stacked, trainable, ema_extra, shards: as in `create`.
            has_extra: whether fn returns a pair (params, extra).

        Raises:
            TypeError, ValueError: as `create`.
        """
        check_optimizer(optimizer)
        _check_ema_extra(ema_extra, optimizer)
        shapes = jax.eval_shape(fn)
        if has_extra:
            if not (isinstance(shapes, tuple | list) and len(shapes) == 2):
                raise ValueError("has_extra: fn must return a pair (params, extra)")
            shapes = shapes[0]
        plan = transform.build_plan(
            shapes,
            optimizer.selection,
            rules=rules,
            stacked=stacked,
            trainable=trainable,
            shards=shards,
        )
        static = Static(plan, optimizer.spec, resolve(compute_dtype, plan))

        def make(floats: jax.Array, ints: jax.Array) -> TrainState:
            made = fn()
            params, extra = made if has_extra else (made, None)
            return _create(static, ema_extra, jtu.tree_leaves(params), extra, floats, ints)

        return jax.jit(make)(*_initial_scalars(plan, optimizer))

    @property
    def plan(self) -> MemoryPlan:
        """Where each leaf lies; `print(state.plan)` shows it."""
        return self.static.plan

    @property
    def spec(self) -> Spec:
        """The optimizer without its numbers."""
        return self.static.spec

    @property
    def params(self) -> Any:
        """The parameters in full precision: the given tree, in the given dtypes.

        Outside of jit they are copies, which outlive the state's donation; also of leaves that are
        not trained.
        """
        return self._tree(self.weights, packed.given_dtypes(self.plan), self._frozen_copies())

    @property
    def compute_params(self) -> Any:
        """The parameters for the forward pass, in the compute dtypes: what to differentiate for.

        Gradients of bfloat16 leaves add up in bfloat16: a weight that a scan uses thousands of
        times needs a float32 leaf, see `compute_dtype` in `create`.
        """
        return self._tree(self.weights, self.static.compute_dtypes, self._frozen_copies())

    @property
    def trainable_params(self) -> Any:
        """`compute_params` with None for the leaves that are not trained.

        For a frozen base that cannot be differentiated (int8, keys), differentiate for these and
        put the rest back inside:
        `jax.grad(lambda p: loss(state.merge(p)))(state.trainable_params)`.
        """
        return self._tree(self.weights, self.static.compute_dtypes, (None,) * len(self.frozen))

    @property
    def ema_params(self) -> Any:
        """The moving average of the parameters, in full precision, debiased where it is to be.

        Before the first update it is the parameters. Leaves that are not trained are as they are.

        Raises:
            ValueError: if the optimizer has no `ema_decay`.
        """
        return self._tree(
            self._averages("ema_params"), packed.given_dtypes(self.plan), self._frozen_copies()
        )

    def with_ema(self) -> "TrainState":
        """The state whose parameters are their moving average: for evaluation as it is.

        `extra` is its average, too, where `create` was told `ema_extra=True`.

        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> optimizer = jr.sgd(1.0, ema_decay=0.75)
        >>> state = jr.TrainState.create({"w": jnp.ones(2)}, optimizer)
        >>> state = state.apply_gradients({"w": jnp.ones(2)})
        >>> state.params["w"].tolist(), state.with_ema().params["w"].tolist()
        ([0.0, 0.0], [0.75, 0.75])

        Raises:
            ValueError: if the optimizer has no `ema_decay`.
        """
        new = dataclasses.replace(self, weights=self._averages("with_ema"))
        if self.ema_extra is None:
            return new
        extra = averages.read_extra(self.spec, self.floats, self.ema_extra, self.extra)
        return dataclasses.replace(new, extra=extra)

    def merge(self, trainable: Any) -> Any:
        """The whole tree, from one like `trainable_params` and the leaves that are not trained.

        Raises:
            ValueError: if the structure is another, or a leaf's shape or dtype; names the paths.
        """
        leaves = packed.match(self.plan, trainable, "trainable")
        return packed.merge(self.plan, leaves, self._frozen_copies())

    @property
    def loss_scale(self) -> jax.Array:
        """What the loss is multiplied by: a scalar, 1 where the optimizer has no `loss_scale`."""
        return self.floats[..., scalars.LOSS_SCALE]

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the loss scale, for float16: differentiate this instead of the loss.

        `apply_gradients` divides by the scale again, inside the update.

        Args:
            loss: a float scalar, or an array.

        Returns:
            The scaled loss, in float32 at least; without `loss_scale` the loss as it is.
        """
        if not self.spec.loss_scale:
            return loss
        self._check_single("scale_loss")
        loss = averages.widened(jnp.asarray(loss))
        return loss * self.loss_scale.astype(loss.dtype)

    def apply_gradients(self, grads: Any, *, extra: Any = _KEEP) -> "TrainState":
        """The state after one step of the optimizer.

        With `skip_nonfinite`, where any trained leaf's gradient has a NaN or an infinity,
        everything stays bit for bit as it is, but for counters and the loss scale; nothing waits on
        the host, see `jr.check`. With `accumulate`, only the last call of a cycle updates, with the
        mean of the cycle's gradients, and one bad call is enough to skip the cycle's update.

        Args:
            grads: gradients like `params`, `compute_params` or `trainable_params`; float32,
                bfloat16 or float16 in any mixture (float64 too for float64 leaves). Those of leaves
                that are not trained are ignored, whatever they are. Or the `Gradients` of several
                micro-batches, whose mean is taken; if there were none, nothing is updated.
            extra: what `extra` becomes where this call's gradients are finite, a tree like it: the
                batch statistics of a bad step go with its gradients.

        Raises:
            ValueError: if the tree does not match; names the paths that are missing, extra,
                misshapen or of a wrong dtype. If `Gradients` are of another plan, or meet an
                optimizer with `accumulate`.
        """
        self._check_single("apply_gradients")
        if isinstance(grads, Gradients):
            self._check_sums(grads, "grads")
            buffers = self._buffers._replace(ints=gradients.counters(self.ints, grads))
            buffers = step(self.spec, self.plan, buffers, grads.arenas, from_arena=True)
        else:
            leaves = packed.match(self.plan, packed.canonical(grads), "grads")
            buffers = step(self.spec, self.plan, self._buffers, leaves)
        new = dataclasses.replace(self, **buffers._asdict())
        if extra is not _KEEP:
            check_like(self.extra, extra)
            bad = new.has_nan
            if isinstance(grads, Gradients):
                bad |= grads.count == 0
            new = dataclasses.replace(new, extra=hold_back(self.extra, extra, bad))
        if self.ema_extra is not None:
            average = averages.follow_extra(new.floats, self.ema_extra, new.extra)
            new = dataclasses.replace(new, ema_extra=average)
        return new

    def zero_gradients(self) -> Gradients:
        """The sum of no gradients, for `accumulate`.

        For micro-batches inside of one step, as `jax.lax.scan` runs through them:

        >>> import jax, jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> state = jr.TrainState.create({"w": jnp.ones(2)}, jr.sgd(1.0))
        >>> @jax.jit(donate_argnums=0)
        ... def train_step(state, batches):
        ...     def micro_step(sums, batch):
        ...         return state.accumulate(sums, {"w": batch}), None
        ...     sums, _ = jax.lax.scan(micro_step, state.zero_gradients(), batches)
        ...     return state.apply_gradients(sums)
        >>> state = train_step(state, jnp.asarray([[1.0, 2.0], [3.0, 4.0]]))
        >>> state.params["w"].tolist()
        [-1.0, -2.0]

        Raises:
            ValueError: if the optimizer has `accumulate`: use one of the two.
        """
        self._check_single("zero_gradients")
        self._check_not_accumulating("zero_gradients")
        return gradients.zero(self.plan, self.weights, self.ints)

    def accumulate(self, sums: Gradients, grads: Any) -> Gradients:
        """The sums with one micro-batch's gradients more, by one launch an arena.

        A non-finite gradient is remembered, and `apply_gradients` then skips the update.

        Args:
            sums: from `zero_gradients`, or from here.
            grads: as in `apply_gradients`.

        Raises:
            TypeError: if the sums are not `Gradients`.
            ValueError: as `apply_gradients`.
        """
        self._check_single("accumulate")
        if not isinstance(sums, Gradients):
            raise TypeError(
                f"sums: expected what zero_gradients gives, got a {type(sums).__name__}"
            )
        self._check_sums(sums, "sums")
        leaves = packed.match(self.plan, packed.canonical(grads), "grads")
        return gradients.add(self.spec, sums, leaves)

    def replace(self, *, params: Any = _KEEP, extra: Any = _KEEP) -> "TrainState":
        """The state with other parameters or another extra; all else stays, averages included.

        Args:
            params: like the parameters; leaves that are not trained keep their dtype and shape, or
                are None to stay as they are.
            extra: any pytree of arrays; one like `extra` where the state has an average of it.

        Raises:
            ValueError: as `apply_gradients`.
        """
        new: dict[str, Any] = {}
        if params is not _KEEP:
            self._check_single("replace")
            packed.refuse_sharded(params, "params")
            params = packed.canonical(params)
            leaves = packed.match(self.plan, params, "params")
            new["weights"] = packed.pack(self.plan, leaves, backend=self.spec.backend)
            new["frozen"] = self._new_frozen(params)
        if extra is not _KEEP:
            if self.ema_extra is not None:
                check_like(self.extra, extra)
            new["extra"] = copy(extra)
        return dataclasses.replace(self, **new)

    def replace_hyperparams(
        self,
        *,
        groups: Mapping[str, Mapping[str, hyperparams.Number]] | None = None,
        **numbers: hyperparams.Number,
    ) -> "TrainState":
        """The state with other values of hyperparameters, which compiles nothing anew.

        Args:
            groups: for groups by name, the values by name: `groups={"head/*": {"scale": 2.0}}`.
            **numbers: by the names of the optimizer's arguments. They go to all groups that have
                none of their own. A loss scale stays within its bounds, and a running cycle of
                `accumulate` goes on in the new one; the sums of `zero_gradients` do not. What a
                traced number is, nobody can check.

        Raises:
            TypeError, ValueError: if there is no such hyperparameter or group, it follows a
                schedule, or the value is not allowed.
        """
        floats = hyperparams.replace(
            self.spec, self.floats, numbers, {} if groups is None else groups
        )
        if "loss_scale" not in numbers:
            return dataclasses.replace(self, floats=floats)
        old = self._buffers
        buffers = surgery.follow_loss_scale(old._replace(floats=floats), old.floats)
        return dataclasses.replace(self, **buffers._asdict())

    def map_params(
        self, fn: Callable[[jax.Array], jax.Array], match: Match | None = None
    ) -> "TrainState":
        """The state with a function applied to its trained parameters, leaf by leaf.

        Moments, averages and counters stay. Nothing is rounded: a bfloat16 or float16 leaf comes
        in float32, as it is kept.

        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> state = jr.TrainState.create({"w": jnp.full(2, 3.0), "b": jnp.ones(2)}, jr.adam(0.1))
        >>> state = state.map_params(lambda x: jnp.clip(x, -2, 2), match="w")
        >>> state.params["w"].tolist()
        [2.0, 2.0]

        Args:
            fn: from a leaf, in its shape, to one of the same shape.
            match: which leaves: a pattern, a `Region`, a list of these or a function (path,
                `jax.ShapeDtypeStruct`) → bool. None: all.

        Raises:
            TypeError: if match is none of these.
            ValueError: if it matches no leaf, or a result has another shape or no float dtype;
                names the path.
        """
        self._check_single("map_params")
        chosen = surgery.selected(self.plan, match)
        backend = self.spec.backend
        weights = surgery.map_params(self.plan, self.weights, fn, chosen, backend=backend)
        return dataclasses.replace(self, weights=weights)

    def reset_moments(self, match: Match | None = None) -> "TrainState":
        """The state with moments that start anew at zero.

        Counters stay, the step of Adam's bias correction among them: it is the state's, not a
        leaf's, so that after a late reset the first updates of the leaf are small ones.

        Args:
            match: which leaves, as in `map_params`. None: all.

        Raises:
            TypeError, ValueError: as `map_params`, for match.
        """
        self._check_single("reset_moments")
        chosen = surgery.selected(self.plan, match)
        if not self.spec.config.moments:
            return self
        moments = surgery.reset_moments(
            self.moments, plan=self.plan, chosen=chosen, backend=self.spec.backend
        )
        return dataclasses.replace(self, moments=moments)

    def replan(
        self,
        new_tree: Any,
        optimizer: Optimizer | None = None,
        *,
        rules: Rules | None = None,
        stacked: Stacked | None = None,
        trainable: Any = None,
        compute_dtype: ComputeDtype = None,
    ) -> "TrainState":
        """The state for a changed tree of parameters: a new head, another vocabulary, more layers.

        Leaves of the same path and shape keep their moments and averages; others start with zero
        moments, and an average that is the weight. The paths of leaves that are no longer trained,
        or have another shape, are told in one warning through the package's logger. Hyperparameters
        and counters stay; a running cycle of `accumulate` starts anew.

        Args:
            new_tree: all parameters, as in `create`, those that stay included. Elements of bfloat16
                and float16 leaves that are what `params` gave keep their full precision.
            optimizer: to take mask and groups from, for all leaves, not its numbers; of the state's
                spec. None:
                leaves known by path keep their group, others are in that without hyperparameters
                of its own, decayed where the region is.
            rules: as in `create`; where it says None, known leaves keep their region.
            stacked: as in `create`. None: known leaves are stacked as before, others are not.
            trainable: as in `create`. None: as before for known leaves; others are trained where
                an arena can hold them.
            compute_dtype: as in `create`. None: as before for known leaves, others as given.

        Raises:
            TypeError: if the optimizer is not one of this package's.
            ValueError: if it is of another spec, or as `create`.
        """
        self._check_single("replan")
        if optimizer is not None:
            check_optimizer(optimizer)
            if optimizer.spec != self.spec:
                raise ValueError(
                    f"optimizer: expected one of the state's spec, {self.spec}, got "
                    f"{optimizer.spec}"
                )
        packed.refuse_sharded(new_tree, "new_tree")
        tree = packed.canonical(new_tree)
        static = replan.plan_again(
            self.static,
            tree,
            optimizer,
            rules=rules,
            stacked=stacked,
            trainable=trainable,
            compute_dtype=compute_dtype,
        )
        _check_frozen(static.plan, tree, "new_tree")
        replan.note_lost(self.plan, static.plan)
        trained, frozen = _split(static.plan, jtu.tree_leaves(tree))
        buffers = replan.move(self.static, static, self._buffers, trained)
        return dataclasses.replace(
            self, **buffers._asdict(), frozen=tuple(copy(frozen)), static=static
        )

    @property
    def step(self) -> jax.Array:
        """Updates made: an int32 scalar."""
        return self.ints[..., scalars.STEP]

    @property
    def calls(self) -> jax.Array:
        """Calls of `apply_gradients`, skipped ones included: an int32 scalar."""
        return self.ints[..., scalars.CALLS]

    @property
    def skipped(self) -> jax.Array:
        """Updates that were skipped: an int32 scalar."""
        return self.ints[..., scalars.SKIPPED]

    @property
    def consecutive_skips(self) -> jax.Array:
        """Updates that were skipped since the last one that was not: an int32 scalar."""
        return self.ints[..., scalars.CONSECUTIVE_SKIPS]

    @property
    def has_nan(self) -> jax.Array:
        """Whether the last call's gradients had a NaN or an infinity: a bool scalar."""
        return self.ints[..., scalars.HAS_NAN] != 0

    @property
    def metrics(self) -> dict[str, jax.Array]:
        """Every hyperparameter as the last call used it, what was measured, and the counters.

        They are arrays of their own: they can be read after the state was donated. Each that leaves
        a jitted step is one more array, 3 µs of host time: pick what you log.

        Returns:
            By name, scalars of float32 (or float64) but for the counters:

            - the optimizer's hyperparameters, and each group's own as "group/name";
            - `loss_scale`, where there is one: what the next call uses;
            - `grad_norm`, with `max_norm`, LARS or the metric "grad_norm" or "leaves": the global
              norm of the gradients, unscaled and unclipped; with accumulation that of the mean, of
              the last whole cycle. Infinite in float32 from 3.4e38 on, where clipping is still
              right;
            - `clip_factor`, with `max_norm`: what the gradients were multiplied by, at most 1;
            - `param_norm`, where asked for: of the trained parameters, before the call;
            - `update_norm`, where asked for: of their change, 0 where the call updated nothing;
            - `leaf_grad_norm`, with the metric "leaves": [leaves], by the order of `plan.leaves`,
              see `plan.by_path`;
            - step, calls, skipped and consecutive_skips (int32), and has_nan (bool).
        """
        return metrics.read(self.spec, self.plan, self._buffers)

    def trust_ratios(self) -> dict[str, Any]:
        """The trust ratios of the last call, by the path of each trained leaf.

        They are 1 before the first call, where a call updated nothing, and for leaves without a
        trust ratio or without elements. The step has computed them: reading them launches nothing.

        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> params = {"w": jnp.asarray([[3.0, 4.0]]), "b": jnp.ones(2)}
        >>> optimizer = jr.lars(0.5, trust_coefficient=0.5, trust_ratio_mask="weights")
        >>> state = jr.TrainState.create(params, optimizer)
        >>> state = state.apply_gradients({"w": jnp.asarray([[6.0, 8.0]]), "b": jnp.ones(2)})
        >>> {path: float(ratio) for path, ratio in state.trust_ratios().items()}
        {'b': 1.0, 'w': 0.25}

        Returns:
            By path a scalar, or for a stacked leaf an array of the shape of its stacked axes;
            NumPy's, or traced under jit.

        Raises:
            ValueError: if the optimizer has no trust ratios.
        """
        if not self.spec.trust:
            raise ValueError(f"trust_ratios: {self.spec.kind} has none; jr.lars and jr.lamb have")
        return metrics.trust_ratios(self.plan, self.ratios)

    def to_leaves(self, *, host: bool = False) -> dict[str, Any]:
        """What a checkpoint holds: every leaf by itself, by path, whatever the plan.

        Nested dicts with strings for keys and arrays for leaves, which Orbax takes, and npz and
        safetensors files once they are flat, with "/" between the keys. They can be read without
        this package, and are copies: the state may be donated afterwards.

        >>> import jax.numpy as jnp
        >>> import jaxrenaissance as jr
        >>> optimizer = jr.sgd(0.5, momentum=0.5)
        >>> state = jr.TrainState.create({"w": jnp.ones(2)}, optimizer)
        >>> state = state.apply_gradients({"w": jnp.ones(2)})
        >>> leaves = state.to_leaves()
        >>> leaves["params"]["w"].tolist(), leaves["mu"]["w"].tolist()
        ([0.5, 0.5], [1.0, 1.0])
        >>> int(leaves["counters"]["step"]), float(leaves["hyperparams"]["momentum"])
        (1, 0.5)
        >>> again = jr.TrainState.from_leaves(leaves, like=state)
        >>> again.params["w"].tolist()
        [0.5, 0.5]

        Args:
            host: whether the arrays are NumPy's. Then each buffer of the state is transferred
                once, and cut into leaves on the host. Not under jit.

        Returns:
            A dict of

            - `format`: the version of this format, an int32 scalar; `optimizer`: a key that names
              it;
            - `params`: the parameters as in `params`, in the containers and dtypes that were
              given, with leaves that are not trained, and the data of PRNG keys; None for what
              has no elements, here and in `extra`, since Orbax cannot write it;
            - `master`: of bfloat16 and float16 parameters the float32 that are kept of them;
            - `mu`, `nu`, `ema`, `accumulator`: what the optimizer keeps of moments, averages and
              sums, each a dict from the leaf's path (or, where the parameters are one array, that
              alone), in float32 or float64, but for leaves without elements. An average with
              `ema_debias` is not divided yet;
            - `counters`: step, calls, skips and their like, and where gradients are accumulated
              or the loss is scaled what these count; leaves are named by number in the tree's
              order;
            - `scalars`: the loss scale with its bounds, and what was measured of the last call;
            - `hyperparams`: the numbers that do not follow a schedule, each group's in
              `groups`. "one_minus_b1" is 1 − b1, which is what float32 holds to seven digits;
            - `extra`, `ema_extra`: where there are any, with the tree in place of each `Packed`,
              in float32 or float64.

        Raises:
            ValueError: if the state holds several members, two leaves have one path, or a leaf
                cannot be named, since its name is "".
        """
        self._check_single("to_leaves")
        return checkpoint.to_leaves(self._contents, host=host)

    @staticmethod
    def from_leaves(leaves: Any, like: "TrainState") -> "TrainState":
        """The state that `to_leaves` was called on, under the plan of another.

        It goes on bit for bit as the one that was saved. Until the next call, `metrics` has 0 for
        what follows a schedule, and norms and trust ratios by leaf are those of a new state; with
        `accumulate`, "leaf_grad_norm" is 0 until the cycle ends. The plan may differ: regions,
        masks, groups, `shards`, compute dtypes, the backend.

        The checkpoint's numbers win. Where those of `like` differ, one warning through the
        package's logger says which, and `replace_hyperparams` sets them; what the checkpoint has no
        number for, such as a new group, is as in `like`.

        Args:
            leaves: from `to_leaves`, or read back: by path, in whatever containers, also as one
                mapping from paths ("params/head/kernel") to arrays.
            like: a state for the same parameters and extra, concrete, or abstract as
                `jax.eval_shape(lambda: TrainState.create(…))`, or one that was donated, to go back
                after a failure. What it holds is not looked at, but for hyperparameters of a
                concrete one; where it is committed to devices, the new state is, too.

        Raises:
            TypeError: if like is not a state, or something is traced.
            ValueError: if a leaf is missing, unknown, of another shape or dtype, or sharded over
                devices; names the paths. If the format has another version, or the moments are
                another optimizer's.
        """
        if not isinstance(like, TrainState):
            is_around = isinstance(getattr(like, "core", None), TrainState)
            raise TypeError(
                f"like: expected a TrainState, or jax.eval_shape(lambda: TrainState.create(…)), "
                f"got a {type(like).__name__}"
                + (" of jaxrenaissance.flax: like.restore(leaves) gives one" if is_around else "")
            )
        if like.ints.ndim != 1:
            raise ValueError(
                f"like: it holds {like.ints.shape[:-1]} members, made by jax.vmap. Restore one at "
                "a time, from jax.tree.map(lambda x: x[0], leaves)"
            )
        new = checkpoint.from_leaves(leaves, like._contents)
        return dataclasses.replace(
            like,
            **new.buffers._asdict(),
            frozen=new.frozen,
            extra=new.extra,
            ema_extra=new.ema_extra,
        )

    @property
    def _contents(self) -> checkpoint.Contents:
        return checkpoint.Contents(
            self.static, self._buffers, self.frozen, self.extra, self.ema_extra
        )

    @property
    def _buffers(self) -> Buffers:
        return Buffers(*(getattr(self, name) for name in Buffers._fields))

    def _check_single(self, method: str) -> None:
        refuse_members(self.ints, method, f"state.{method}(…)")

    def _check_sums(self, sums: Gradients, argument: str) -> None:
        self._check_not_accumulating(argument)
        if sums.plan != self.plan:
            raise ValueError(
                f"{argument}: the Gradients are those of another plan, {sums.plan!r}, wanted "
                f"{self.plan!r}"
            )
        try:
            check_ints(sums.ints)
            for layout, arena in zip(self.plan.arenas, sums.arenas, strict=True):
                check_arena("arenas", arena, layout)
        except ValueError as error:
            raise ValueError(
                f"{argument}: {error}. Gradients are added up by state.accumulate, and over "
                "devices by their own psum"
            ) from None

    def _check_not_accumulating(self, what: str) -> None:
        if self.spec.accumulate:
            raise ValueError(
                f"{what}: the optimizer was made with accumulate=, which adds up gradients over "
                "calls of apply_gradients. Use one of the two"
            )

    def _averages(self, method: str) -> tuple[jax.Array, ...]:
        if not self.spec.ema:
            raise ValueError(
                f"{method}: the optimizer keeps no average of the weights; make it with ema_decay="
            )
        refuse_members(self.ints, method, f"state.{method}")
        return averages.read(self.spec, self.floats, self.ema, self.weights)

    def _tree(self, weights: tuple[jax.Array, ...], dtypes: Dtypes, frozen: tuple[Any, ...]) -> Any:
        leaves = packed.unpack(self.plan, weights, dtypes, backend=self.spec.backend)
        return packed.merge(self.plan, leaves, frozen)

    def _frozen_copies(self) -> tuple[Any, ...]:
        if any(isinstance(x, jax.core.Tracer) for x in self.frozen):
            return self.frozen
        return copy(self.frozen)

    def _new_frozen(self, params: Any) -> tuple[Any, ...]:
        _, given = _split(self.plan, packed.entries_of(self.plan, params, "params"))
        _, paths = _split(self.plan, packed.all_paths(self.plan))
        for path, old, new in zip(paths, self.frozen, given, strict=True):
            kind = getattr(new, "shape", None), getattr(new, "dtype", None)
            if new is not None and kind != (old.shape, old.dtype):
                raise ValueError(
                    f"params: {path!r} has shape {kind[0]} and dtype {kind[1]}, "
                    f"wanted {old.shape} and {old.dtype}"
                )
        return tuple(
            old if new is None else copy(new) for old, new in zip(self.frozen, given, strict=True)
        )

    def __repr__(self) -> str:
        return describe(self.static, self.ints, self.frozen, self.extra)


def refuse_members(ints: jax.Array, method: str, call: str) -> None:
    """Raises where a state has leading axes, as one that vmap made."""
    if ints.ndim != 1:
        raise ValueError(
            f"{method}: the state holds {ints.shape[:-1]} members, made by jax.vmap. Use it under "
            f"jax.vmap too: jax.vmap(lambda state, …: {call})(state, …)"
        )


def _initial_scalars(plan: MemoryPlan, optimizer: Optimizer) -> tuple[Any, Any]:
    spec, numbers = optimizer.spec, optimizer.numbers
    floats = hyperparams.initial_floats(spec, numbers, plan.num_groups, scalar_dtype(plan))
    return floats, hyperparams.initial_ints(numbers)


@jax.jit(static_argnums=(0, 1), inline=True)
def _create(
    static: Static,
    ema_extra: bool,
    leaves: list[Any],
    extra: Any,
    floats: jax.Array,
    ints: jax.Array,
) -> TrainState:
    spec, plan = static.spec, static.plan
    trained, frozen = _split(plan, leaves)
    weights = packed.pack(plan, trained, backend=spec.backend)
    buffers = start(spec, plan, weights, jnp.copy(floats), jnp.copy(ints))
    extra = copy(extra)
    average = averages.start_extra(spec, extra, buffers.floats) if ema_extra else None
    return TrainState(
        **buffers._asdict(),
        frozen=tuple(copy(frozen)),
        extra=extra,
        ema_extra=average,
        static=static,
    )


def _split(plan: MemoryPlan, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What stands for trained leaves, and for the others."""
    pairs = list(zip(values, plan.trained, strict=True))
    return [x for x, trained in pairs if trained], [x for x, trained in pairs if not trained]


def _check_ema_extra(ema_extra: Any, optimizer: Optimizer) -> None:
    if not isinstance(ema_extra, bool):
        raise TypeError(f"ema_extra: expected a bool, got {ema_extra!r}")
    if ema_extra and not optimizer.spec.ema:
        raise ValueError(
            "ema_extra: extra is averaged as the weights are, and the optimizer keeps no average; "
            "make it with ema_decay="
        )


def _check_frozen(plan: MemoryPlan, params: Any, argument: str) -> None:
    for (key_path, leaf), trained in zip(
        jtu.tree_leaves_with_path(params), plan.trained, strict=True
    ):
        if not trained and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(
                f"{argument}: the leaf {path_string(key_path)!r} is a {type(leaf).__name__}, and a "
                "state holds arrays. Take it out of the tree; for a model of Equinox with "
                "eqx.filter(model, eqx.is_array)"
            )
