"""The type stub of the engine names what the module has, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import ridgeline._C
from ridgeline._C import engine

STUB = Path(__file__).parent.parent / "python" / "ridgeline" / "_C.pyi"
OF_THE_ENUM = {"name", "value"}


def members(node: ast.ClassDef) -> set[str]:
    names = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef):
            names.add(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
    return names


def public(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_stub_matches_the_module() -> None:
    module = ast.parse(STUB.read_text())
    (stub,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "engine")
    assert public(members(stub)) == public(set(vars(engine)))
    assert public(members_of_module(module)) <= public(set(vars(ridgeline._C)))
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            runtime = public(set(vars(getattr(engine, node.name))))
            assert public(members(node)) - OF_THE_ENUM == runtime - OF_THE_ENUM, node.name


def members_of_module(module: ast.Module) -> set[str]:
    return {n.name for n in module.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
