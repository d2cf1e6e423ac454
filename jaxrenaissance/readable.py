"""ReadableState: the arrays of a state, and everything that is read of them."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from . import averages, checkpoint, frozen_leaves, metrics, packed, scalars
from .contents import Contents, refuse_members
from .packed import Dtypes
from .placement import spec_of
from .plan import MemoryPlan
from .spec import Spec
from .static import Static
from .step import Arenas, Buffers
from .summary import describe


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ReadableState:
    """What a `TrainState` holds, see there, and what is read of it; what changes it is there."""

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

    @property
    def plan(self) -> MemoryPlan:
        """Where each leaf lies; `print(state.plan)` shows it."""
        return self.static.plan

    @property
    def spec(self) -> Spec:
        """The optimizer without its numbers."""
        return self.static.spec

    @property
    def partition_specs(self) -> Self:
        """How the state lies on its mesh: a state of `PartitionSpec`s in place of arrays.

        For a step that runs in a `jax.shard_map` of yours, where each device takes the gradients of
        its own part of the batch, and `apply_gradients` their mean over all of them:

        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> import jaxrenaissance as jr
        >>> mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
        >>> optimizer = jr.sgd(0.5)
        >>> state = jr.TrainState.create({"w": jnp.ones(2)}, optimizer, mesh=mesh, sharding="zero1")
        >>> def local_step(state, batch):
        ...     grads = jax.grad(lambda p: jnp.mean(batch @ p["w"]))(state.compute_params)
        ...     return state.apply_gradients(grads)
        >>> specs = state.partition_specs
        >>> in_specs = (specs, P("data"))
        >>> step = jax.jit(jax.shard_map(local_step, mesh=mesh, in_specs=in_specs, out_specs=specs))
        >>> step(state, jnp.ones((4, 2))).params["w"].tolist()
        [0.5, 0.5]

        Differentiate each device's own loss, for `compute_params`, `params` or `trainable_params`:
        a mean of the losses over the devices is for logging, after the gradient. In the loss that
        is differentiated, `jax.lax.pmean` would make the gradients smaller, by the number of
        devices. What the step returns beside the state is yours to reduce, batch statistics too;
        read `params` outside.

        Leaves that are not trained, and `extra`, are as they lie on the mesh.
        """
        placement = self.plan.placement
        members = (None,) * (self.ints.ndim - 1)
        cut = PartitionSpec(*members, *(() if placement is None else placement.arena_spec))
        series = {"weights", "moments", "ema", "accumulator"}
        specs = {
            field.name: jtu.tree_map(
                (lambda x: cut) if field.name in series else spec_of, getattr(self, field.name)
            )
            for field in dataclasses.fields(self)
            if field.name != "static"
        }
        return dataclasses.replace(self, **specs)

    @property
    def params(self) -> Any:
        """The parameters in full precision: the given tree, in the given dtypes.

        Outside of jit they are copies, which outlive the state's donation; also of leaves that are
        not trained.
        """
        given = packed.given_dtypes(self.plan)
        return self._for_gradients(given, frozen_leaves.copies(self.frozen))

    @property
    def compute_params(self) -> Any:
        """The parameters for the forward pass, in the compute dtypes: what to differentiate for.

        Gradients of bfloat16 leaves add up in bfloat16: a weight that a scan uses thousands of
        times needs a float32 leaf, see `compute_dtype` in `create`.
        """
        return self._for_gradients(self.static.compute_dtypes, frozen_leaves.copies(self.frozen))

    @property
    def trainable_params(self) -> Any:
        """`compute_params` with None for the leaves that are not trained.

        For a frozen base that cannot be differentiated (int8, keys), differentiate for these and
        put the rest back inside:
        `jax.grad(lambda p: loss(state.merge(p)))(state.trainable_params)`.
        """
        return self._for_gradients(self.static.compute_dtypes, (None,) * len(self.frozen))

    @property
    def ema_params(self) -> Any:
        """The moving average of the parameters, in full precision, debiased where it is to be.

        Before the first update it is the parameters. Leaves that are not trained are as they are.

        Raises:
            ValueError: if the optimizer has no `ema_decay`.
        """
        return self._tree(
            self._averages("ema_params"),
            packed.given_dtypes(self.plan),
            frozen_leaves.copies(self.frozen),
        )

    def with_ema(self) -> Self:
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
        return packed.merge(self.plan, leaves, frozen_leaves.copies(self.frozen))

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
                cannot be named, since its name is "". With host, if the state is one of
                `sharding="leaves"` over devices of several processes.
        """
        self._check_single("to_leaves")
        return checkpoint.to_leaves(self._contents, host=host)

    @property
    def _contents(self) -> Contents:
        return Contents(self.static, self._buffers, self.frozen, self.extra, self.ema_extra)

    @property
    def _buffers(self) -> Buffers:
        return Buffers(*(getattr(self, name) for name in Buffers._fields))

    def _check_single(self, method: str) -> None:
        refuse_members(self.ints, method, f"state.{method}(…)")
        self._check_whole(method)

    def _check_whole(self, method: str) -> None:
        if self.plan.placement is None:
            packed.refuse_sharded(
                {"weights": self.weights, "moments": self.moments}, f"{method}: the state"
            )

    def _averages(self, method: str) -> Arenas:
        if not self.spec.ema:
            raise ValueError(
                f"{method}: the optimizer keeps no average of the weights; make it with ema_decay="
            )
        refuse_members(self.ints, method, f"state.{method}")
        return averages.read(self.spec, self.floats, self.ema, self.weights)

    def _tree(self, weights: Arenas, dtypes: Dtypes, frozen: tuple[Any, ...]) -> Any:
        self._check_whole("params")
        leaves = packed.unpack(self.plan, weights, dtypes, backend=self.spec.backend)
        return packed.merge(self.plan, leaves, frozen)

    def _for_gradients(self, dtypes: Dtypes, frozen: tuple[Any, ...]) -> Any:
        tree = self._tree(self.weights, dtypes, frozen)
        placement = self.plan.placement
        return tree if placement is None else placement.varying(tree)

    def __repr__(self) -> str:
        return describe(self.static, self.ints, self.frozen, self.extra)
