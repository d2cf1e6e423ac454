"""A GPT in Flax Linen: a decoder of blocks with causal attention, as GPT-2's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

KERNELS_IN_BFLOAT16 = {"*/kernel": jnp.bfloat16}
"""Compute dtypes for a network with dtype=bfloat16: gradients of the embeddings add up in float32,
since a batch has the same token many times."""


class Size(NamedTuple):
    layers: int
    heads: int
    width: int
    context: int
    """The longest sequence."""


class Block(nn.Module):
    """Attention and a network of two layers, each added to x [batch, length, width]."""

    size: Size
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers, heads, width, _ = self.size
        normal = nn.initializers.normal
        # The residuals of all layers add up, so each starts smaller the more there are.
        into_residual = normal(0.02 / (2 * layers) ** 0.5)

        h = nn.LayerNorm(dtype=self.dtype, name="ln_1")(x)
        h = nn.Dense(3 * width, dtype=self.dtype, kernel_init=normal(0.02), name="attn_qkv")(h)
        q, k, v = jnp.split(h.reshape(*h.shape[:2], 3 * heads, width // heads), 3, axis=2)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        h = nn.Dense(width, dtype=self.dtype, kernel_init=into_residual, name="attn_out")(h)
        x = x + h

        h = nn.LayerNorm(dtype=self.dtype, name="ln_2")(x)
        h = nn.Dense(4 * width, dtype=self.dtype, kernel_init=normal(0.02), name="mlp_in")(h)
        h = nn.gelu(h)
        h = nn.Dense(width, dtype=self.dtype, kernel_init=into_residual, name="mlp_out")(h)
        return x + h


class GPT(nn.Module):
    """Tokens [batch, length] → logits [batch, length, vocabulary]; computes in `dtype`."""

    size: Size
    vocabulary: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        layers, _, width, context = self.size
        init = nn.initializers.normal(0.02)
        # Looked up first and rounded then: gradients add up in the dtype of the table.
        embed = nn.Embed(self.vocabulary, width, embedding_init=init, name="wte")
        positions = nn.Embed(context, width, embedding_init=init, name="wpe")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        x = x.astype(self.dtype)
        for i in range(layers):
            x = Block(self.size, self.dtype, name=f"h_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="ln_f")(x)
        return x @ embed.embedding.astype(self.dtype).T
