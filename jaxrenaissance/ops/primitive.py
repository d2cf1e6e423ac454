"""What every op shares: a primitive, lowerings, batching, and an error when differentiated."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import PartitionSpec

from .. import native
from ..arena_layout import ARENA_DTYPES
from .tables import layout_attribute

BACKENDS = ("auto", "cpu", "cuda", "xla")

ResultTypes = Sequence[tuple[tuple[int, ...], np.dtype]]


class Op:
    """One op on arenas, as a JAX primitive.

    The primitive's operands have the op's own shapes, or these behind leading batch dimensions:
    ``batch`` are those dimensions, ``batched[i]`` says whether operand i has them. An operand that
    has none is shared by all members.

    Args:
      name: the op's name; its FFI target is ``jaxrenaissance_<name>_v1``.
      result_types: static parameters -> shapes and dtypes of the results, without batch dimensions.
      reference: the op in jax.numpy, called with the operands and the static parameters.
      lowered: the reference with the primitive's types, where it has others: what is lowered where
        there is no native backend.
      aliases: static parameters -> {operand index: result index}, for the buffers updated in place.
      attributes: static parameters -> the handler's attributes: integers, or sequences of them.
      unshared: operands that members of a batch never share, beside those updated in place.
      merged: static parameters -> whether the layout may have slices of a stacked leaf merged; not
        where an op has an operand or a result for each segment.
      narrow: whether arenas may also be bfloat16 or float16.
    """

    def __init__(
        self,
        name: str,
        *,
        result_types: Callable[..., ResultTypes],
        reference: Callable[..., Sequence[jax.Array]],
        lowered: Callable[..., Sequence[jax.Array]] | None = None,
        aliases: Callable[..., Mapping[int, int]] = lambda **static: {},
        attributes: Callable[..., Mapping[str, int | Sequence[int]]] = lambda **static: {},
        unshared: Collection[int] = (),
        merged: Callable[..., bool] = lambda **static: True,
        narrow: bool = False,
    ) -> None:
        self.name = name
        self.target = f"jaxrenaissance_{name}_v1"
        self._result_types = result_types
        self._reference = reference
        self._lowered = lowered or reference
        self._aliases = aliases
        self._attributes = attributes
        self._unshared = unshared
        self._merged = merged
        self._narrow = narrow

        self._primitive = primitive = jax.extend.core.Primitive(f"jaxrenaissance_{name}")
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        primitive.def_abstract_eval(self._abstract_eval)
        batching.primitive_batchers[primitive] = self._batch
        ad.primitive_jvps[primitive] = self._differentiate
        mlir.register_lowering(primitive, self._lower_reference)
        for platform in ("cpu", "cuda"):
            mlir.register_lowering(
                primitive, functools.partial(self._lower, platform), platform=platform
            )

    def __call__(self, *operands: Any, backend: str, **static: Any) -> list[jax.Array]:
        """Applies the op; ``static`` are hashable parameters that become part of the program."""
        if backend not in BACKENDS:
            raise ValueError(f"backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")
        layout = static.get("layout")
        if layout is not None and not self._narrow and layout.dtype not in ARENA_DTYPES:
            raise ValueError(
                f"layout: got an arena of {layout.dtype}, wanted float32 or float64; only pack and "
                "unpack work with others"
            )
        if backend == "xla":
            return list(self._reference(*operands, **static))
        return self._primitive.bind(
            *same_manual_axes(operands),
            backend=backend,
            batch=(),
            batched=(False,) * len(operands),
            **static,
        )

    def _abstract_eval(
        self, *avals: Any, backend: str, batch: tuple[int, ...], batched: Any, **static: Any
    ) -> list[Any]:
        # Made from an operand's aval, so that results have its manual axes (shard_map's checks).
        # On a mesh, nothing of ours is partitioned: no axis of an operand or a result is sharded.
        like = avals[0]
        for aval in avals:
            if any(axes is not None for axes in aval.sharding.spec):
                raise ValueError(
                    f"{self.name}: an operand, {aval.str_short()}, is sharded as "
                    f"{aval.sharding.spec}, and would silently be gathered. A state of "
                    "TrainState.create(…, mesh=mesh, sharding=…) works on sharded arrays"
                )
        results = []
        for own_shape, dtype in self._result_types(**static):
            shape = (*batch, *own_shape)
            sharding = like.sharding.update(spec=PartitionSpec(*(None,) * len(shape)))
            results.append(
                like.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)
            )
        return results

    def _batch(
        self,
        operands: Sequence[jax.Array],
        dims: Sequence[int | None],
        *,
        batch: tuple[int, ...],
        batched: tuple[bool, ...],
        **static: Any,
    ) -> tuple[list[jax.Array], list[int]]:
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        op_static = {k: v for k, v in static.items() if k != "backend"}
        unshared = {*self._aliases(**op_static), *self._unshared}
        new_operands, new_batched = [], []
        for i, (x, d, has_batch) in enumerate(zip(operands, dims, batched, strict=True)):
            shared = d is None and not has_batch and i not in unshared
            if not shared:
                own = x.ndim - (d is not None) - (len(batch) if has_batch else 0)
                x = jax.numpy.moveaxis(x, d, 0) if d is not None else x[None]
                inner = x.shape[1:] if has_batch else (*batch, *x.shape[x.ndim - own :])
                if not has_batch:
                    x = x.reshape(x.shape[:1] + (1,) * len(batch) + x.shape[1:])
                x = jax.numpy.broadcast_to(x, (size, *inner))
            new_operands.append(x)
            new_batched.append(not shared)
        results = self._primitive.bind(
            *same_manual_axes(new_operands),
            batch=(size, *batch),
            batched=tuple(new_batched),
            **static,
        )
        return results, [0] * len(results)

    def _differentiate(self, primals: Any, tangents: Any, **params: Any) -> Any:
        raise TypeError(
            f"jaxrenaissance's {self.name} cannot be differentiated. Differentiate with respect to "
            "the leaves, `jax.value_and_grad(loss_fn)(state.compute_params, batch)`, not with "
            "respect to the state or an arena. What a loss function returns beside the loss, such "
            "as batch statistics, is packed after it, not in it. Where a derivative through the "
            'update itself is wanted, make the optimizer with backend="xla".'
        )

    def _lower_reference(
        self,
        ctx: Any,
        *operands: Any,
        backend: str,
        batch: tuple[int, ...],
        batched: tuple[bool, ...],
        **static: Any,
    ) -> Any:
        if backend != "auto":
            raise ValueError(
                f"backend: {backend!r} was asked for, but this computation runs on a platform "
                'that it does not serve; use backend="auto" or "xla"'
            )

        def reference(*args: jax.Array) -> Sequence[jax.Array]:
            fn = functools.partial(self._lowered, **static)
            for _ in batch:
                fn = jax.vmap(fn, in_axes=tuple(0 if b else None for b in batched))
            return fn(*args)

        return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands)

    def _lower(
        self,
        platform: str,
        ctx: Any,
        *operands: Any,
        backend: str,
        batch: tuple[int, ...],
        batched: tuple[bool, ...],
        **static: Any,
    ) -> Any:
        if backend == "auto" and not native.available(platform):
            native.warn_fallback_once(platform)
            return self._lower_reference(
                ctx, *operands, backend=backend, batch=batch, batched=batched, **static
            )
        if backend not in ("auto", platform):
            raise ValueError(
                f"backend: {backend!r} was asked for, but this computation runs on {platform}; "
                f'use backend="auto", "{platform}" or "xla", or place the arrays on a {backend} '
                "device, if JAX sees one (python -m jaxrenaissance info)"
            )
        native.require(platform)
        attributes = {k: np.array(v, np.int64)[()] for k, v in self._attributes(**static).items()}
        if "layout" in static:
            attributes["layout"] = layout_attribute(static["layout"], self._merged(**static))
        # Operands without batch dimensions, behind a -1 that keeps the attribute from being empty.
        shared = [-1, *(i for i, b in enumerate(batched) if batch and not b)]
        rule = jax.ffi.ffi_lowering(
            self.target, operand_output_aliases=dict(self._aliases(**static))
        )
        return rule(
            ctx,
            *operands,
            members=np.prod(batch, dtype=np.int64),
            shared=np.array(shared, np.int64),
            **attributes,
        )


def same_manual_axes(operands: Sequence[Any]) -> list[Any]:
    """Inside shard_map, all operands are marked as varying over every axis that one varies over."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*axes)
    if not union:
        return list(operands)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    ]
