"""Imports point one way, and only `native` knows the compiled modules."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrenaissance

PACKAGE = Path(jaxrenaissance.__file__).parent

NEVER = {
    "regions": {"arena_layout", "plan", "ops", "native", "reference"},
    "arena_layout": {"planning", "plan"},
    "plan": {"ops", "native", "reference"},
    "native": {"ops", "reference", "arena_layout", "plan", "scalars"},
    "reference": {"ops", "native", "plan"},
    "ops": {"optimizers", "train_state", "transform", "packed", "spec", "plan"},
    "readable": {"train_state", "creation", "replan", "surgery"},
    "creation": {"train_state", "readable"},
    "replan": {"train_state", "readable", "creation"},
}
"""A part → what it does not reach, not even by way of others."""


def parts():
    """The package's parts: top-level modules and folders, by name."""
    files = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE) != Path("__init__.py")]
    result: dict[str, list[Path]] = {}
    for path in files:
        first = path.relative_to(PACKAGE).parts[0]
        result.setdefault(first.removesuffix(".py"), []).append(path)
    return result


def imported_parts(path):
    """The parts that a file imports, also inside functions."""
    package = ["jaxrenaissance", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *(node.module or "").split(".")] if node.module else above
            names = [[*module, alias.name] for alias in node.names]
        for name in names:
            if name[0] == "jaxrenaissance" and len(name) > 1 and name[1] in PARTS:
                yield name[1]


PARTS = parts()
IMPORTS = {
    part: {i for path in PARTS[part] for i in imported_parts(path)} - {part} for part in PARTS
}


def reached(part):
    seen, new = set(), {part}
    while new:
        seen |= new
        new = set().union(*(IMPORTS[i] for i in new)) - seen
    return seen - {part}


def test_the_imports_are_found():
    assert {"native", "reference", "arena_layout", "scalars"} <= IMPORTS["ops"]
    assert "ops" in reached("train_state")
    assert "optimizers" in PARTS


@pytest.mark.parametrize("part", NEVER)
def test_arrows_of_the_design(part):
    assert reached(part) & NEVER[part] == set()


def test_no_part_reaches_itself():
    cycles = [part for part in PARTS if any(part in reached(i) for i in IMPORTS[part])]
    assert cycles == []


def test_only_ops_import_the_backends():
    for part in PARTS:
        if "reference" in IMPORTS[part]:
            assert part == "ops"
    # Beside the ops, only what tells the user about the machine.
    assert {part for part in PARTS if "native" in IMPORTS[part]} <= {"ops", "__main__", "bench"}


def test_only_native_names_the_compiled_modules():
    for part, paths in PARTS.items():
        for path in paths:
            if part != "native":
                assert "_jaxrenaissance_" not in path.read_text(encoding="utf-8"), path


def test_the_package_only_exports_again():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        assert isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.Assign), ast.dump(node)


def run_python(code, **environment):
    """Runs a new Python that sees no GPU and treats warnings as errors; its output."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=PACKAGE.parent,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_starts_no_platform_and_loads_nothing_of_the_optional_packages():
    code = """
import sys
import jaxrenaissance
import jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
optional = {"flax", "sklearn", "matplotlib", "tqdm", "orbax", "_jaxrenaissance_cpu",
            "_jaxrenaissance_cuda"}
print(sorted(optional & set(sys.modules)))
"""
    assert run_python(code).strip() == "[]"


def test_without_compiled_modules_and_without_cuda_everything_runs_on_xla():
    code = """
import sys
for name in "_jaxrenaissance_cpu", "_jaxrenaissance_cuda", "_jaxrenaissance_build":
    sys.modules[name] = None
import jax
import jax.numpy as jnp
import jaxrenaissance as jr

state = jr.TrainState.create({"w": jnp.ones(3)}, jr.sgd(0.5))
step = jax.jit(lambda s: s.apply_gradients(s.compute_params), donate_argnums=0)
text = step.lower(state).as_text()
assert "custom_call @jaxrenaissance" not in text
print(step(step(state)).params["w"])
"""
    assert run_python(code).strip() == "[0.25 0.25 0.25]"
