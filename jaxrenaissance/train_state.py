"""TrainState: parameters, moments and scalars as a few device buffers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh

from . import (
    averages,
    checkpoint,
    creation,
    frozen_leaves,
    gradients,
    hyperparams,
    packed,
    replan,
    surgery,
)
from .compute_dtypes import ComputeDtype
from .extra import check_like, copy, hold_back
from .gradients import Gradients
from .groups import Match
from .planning import Rules, Stacked
from .readable import ReadableState
from .step import step
from .transform import Optimizer

_KEEP: Any = object()


@jtu.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState(ReadableState):
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
        weights: one 1-D array an arena: [arena.size] in the arena's dtype; on a mesh with "zero1"
            or "leaves" those of all devices, one after the other.
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
        mesh: Mesh | None = None,
        data_axis: str | Sequence[str] = "data",
        sharding: str = "replicated",
        reduce_dtype: Any = None,
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
            rules, stacked, trainable: see `MemoryPlan.build`.
            extra: a pytree of arrays, kept as `state.extra`.
            ema_extra: whether the float arrays of `extra` are averaged as the weights are, for
                `with_ema`: batch statistics that fit the averaged weights. Others are taken as
                they are at the last update. The averages follow what `apply_gradients` is given.
            mesh: the devices of a training on several. None: one device. `docs/scaling.md` says
                which form to choose. A step is then either a plain jitted one over a sharded batch,
                whose gradients XLA adds up over the devices; or runs in a `jax.shard_map` of yours
                over the data axis, see `partition_specs`: there `apply_gradients` takes each
                device's own gradients and updates with their mean.
            data_axis: the axis, or axes, of the mesh over which the batch is sharded.
            sharding: "replicated": every device holds the whole state. "zero1": each holds a part
                of the weights, moments and averages, and updates it; gradients are reduced to that
                part, and the new weights gathered in the compute dtype, when they are read.
                "leaves": each holds, of every leaf, what the leaf's own NamedSharding on the mesh
                gives it (FSDP, tensor parallel), and only norms cross the links; gradients inside
                of a `jax.shard_map` are then yours to reduce. Arrays that lie elsewhere are put on
                the mesh once, here.
            reduce_dtype: in which gradients that devices have of their own are added up. None:
                float32, or float64; bfloat16 halves the bytes on the links, and rounds the sums;
                in float16 they overflow sooner than their mean.

        Raises:
            TypeError: if the optimizer is not one of this package's.
            ValueError: if a leaf cannot be trained, a pattern matches nothing, or arrays are
                sharded over devices; names the leaf's path and the argument. If there is to be
                an average of `extra`, and none of the weights.
        """
        options = {"rules": rules, "stacked": stacked, "trainable": trainable}
        over = {
            "mesh": mesh,
            "data_axis": data_axis,
            "sharding": sharding,
            "reduce_dtype": reduce_dtype,
        }
        contents = creation.from_params(
            params,
            extra,
            optimizer,
            ema_extra,
            compute_dtype,
            over,
            options,
        )
        return TrainState(**contents.fields())

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
        mesh: Mesh | None = None,
        data_axis: str | Sequence[str] = "data",
        sharding: str = "replicated",
        reduce_dtype: Any = None,
    ) -> "TrainState":
        """As `create(fn(), …)`, but made under jit, so that no second copy of the weights lives on.

        Args:
            fn: makes the parameters, `lambda: model.init(key, x)["params"]`.
            optimizer, compute_dtype, rules, stacked, trainable, ema_extra: as in `create`.
            mesh, data_axis, sharding, reduce_dtype: as in `create`.
            has_extra: whether fn returns a pair (params, extra).

        Raises:
            TypeError, ValueError: as `create`.
        """
        options = {"rules": rules, "stacked": stacked, "trainable": trainable}
        over = {
            "mesh": mesh,
            "data_axis": data_axis,
            "sharding": sharding,
            "reduce_dtype": reduce_dtype,
        }
        contents = creation.from_function(
            fn,
            optimizer,
            has_extra,
            ema_extra,
            compute_dtype,
            over,
            options,
        )
        return TrainState(**contents.fields())

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
            gradients.check_sums(self.spec, self.plan, grads, "grads")
            buffers = step(self.spec, self.plan, self._buffers, grads.arenas, grads.ints)
        else:
            if self.plan.placement is None:
                packed.refuse_sharded(grads, "grads")
            leaves = packed.match(self.plan, packed.canonical(grads), "grads")
            buffers = step(self.spec, self.plan, self._buffers, leaves)
        new = dataclasses.replace(self, **buffers._asdict())
        if extra is not _KEEP:
            check_like(self.extra, extra)
            bad = new.has_nan
            if isinstance(grads, Gradients):
                bad |= new.step == self.step  # Sums of nothing update nothing.
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
        gradients.refuse_accumulate(self.spec, "zero_gradients")
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
        gradients.check_sums(self.spec, self.plan, sums, "sums")
        if self.plan.placement is None:
            packed.refuse_sharded(grads, "grads")
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
            params = packed.placed(self.plan, packed.canonical(params), "params")
            leaves = packed.match(self.plan, params, "params")
            new["weights"] = packed.pack(self.plan, leaves, backend=self.spec.backend)
            new["frozen"] = frozen_leaves.renewed(self.plan, self.frozen, params)
        if extra is not _KEEP:
            if self.ema_extra is not None:
                check_like(self.extra, extra)
            if self.plan.placement is not None:
                extra = self.plan.placement.put(extra)
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
        options = {"rules": rules, "stacked": stacked, "trainable": trainable}
        contents = replan.change(self._contents, new_tree, optimizer, compute_dtype, options)
        return dataclasses.replace(self, **contents.fields())

    @staticmethod
    def from_leaves(leaves: Any, like: "TrainState") -> "TrainState":
        """The state that `to_leaves` was called on, under the plan of another.

        It goes on bit for bit as the one that was saved. Until the next call, `metrics` has 0 for
        what follows a schedule, and norms and trust ratios by leaf are those of a new state; with
        `accumulate`, "leaf_grad_norm" is 0 until the cycle ends. The plan may differ: regions,
        masks, groups, devices, compute dtypes, the backend.

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
                devices where `like` has no mesh (there, take `to_leaves(host=True)`); names the
                paths. If the format has another version, or the moments are another optimizer's.
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
        contents = checkpoint.from_leaves(leaves, like._contents)
        return dataclasses.replace(like, **contents.fields())
