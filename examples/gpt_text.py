"""The text of train_gpt.py: Python's own help on its language, character by character."""

from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

VALIDATION = 0.1  # of the text, at its end


class Text(NamedTuple):
    """Characters as numbers.

    Attributes:
        alphabet: the characters; a token is an index into them.
        training, validation: tokens, int32.
    """

    alphabet: str
    training: np.ndarray
    validation: np.ndarray

    def decode(self, tokens: np.ndarray) -> str:
        return "".join(self.alphabet[token] for token in tokens)


def load_text() -> Text:
    """What `help("topics")` lists, about 460,000 characters: it comes with every Python."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    text = "".join(character for character in text if character.isascii())
    alphabet = "".join(sorted(set(text)))
    numbers = {character: i for i, character in enumerate(alphabet)}
    tokens = np.asarray([numbers[character] for character in text], np.int32)
    cut = int(len(tokens) * (1 - VALIDATION))
    return Text(alphabet, tokens[:cut], tokens[cut:])


def random_windows(
    tokens: np.ndarray, number: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Pieces of a text, [number, length]."""
    starts = rng.integers(len(tokens) - length + 1, size=number)
    return tokens[starts[:, None] + np.arange(length)]


def frequency_loss(text: Text) -> float:
    """The loss on the validation text of guessing by the characters' frequencies alone."""
    size = len(text.alphabet)
    counts = np.bincount(text.training, minlength=size) + 1
    return float(-np.log(counts / counts.sum())[text.validation].mean())
