"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import jaxrenaissance


def modules_with_examples():
    finder = doctest.DocTestFinder()
    names = [m.name for m in pkgutil.walk_packages(jaxrenaissance.__path__, "jaxrenaissance.")]
    for name in names:
        if name.endswith(("__main__", "torch_sides")):  # torch is not installed for the tests
            continue
        module = importlib.import_module(name)
        if any(test.examples for test in finder.find(module)):
            yield name


@pytest.mark.parametrize("name", sorted(modules_with_examples()))
def test_examples_in_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
