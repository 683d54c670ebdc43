"""No public function or class is left that nothing a user starts from can reach.

Users start from the commands, Flower, the public names, the examples, the benchmarks and the pages
of the documentation (its list of the API does not count). Names are followed, not calls: what this
finds is surely dead, and a dead name that is also somebody else's may escape it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fedipw"
STARTS = ("cli", "flower", "lab/commands.py", "api.py", "__init__.py")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Definition:
    where: str
    name: str
    words: frozenset[str]  # names its body reads


def words_of(nodes: list[ast.AST]) -> frozenset[str]:
    """Return every name and attribute that nodes read, and words of strings that are names."""
    found: set[str] = set()
    for top in nodes:
        for node in ast.walk(top):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(WORD.findall(node.value)) if is_name(node.value) else set()
    return frozenset(found)


def is_name(text: str) -> bool:
    """Return whether a string is a dotted name, or a type written as one."""
    return re.fullmatch(r"[\w.:]+( \| [\w.:]+)*", text) is not None


def body_of(node: ast.FunctionDef | ast.ClassDef) -> list[ast.AST]:
    """Return a definition without its docstring."""
    doc = ast.get_docstring(node, clean=False) is not None
    rest: list[ast.AST] = [*node.decorator_list, *node.body[1 if doc else 0 :]]
    if isinstance(node, ast.FunctionDef):
        return [*rest, node.args, *([node.returns] if node.returns else [])]
    return [*rest, *node.bases]


def definitions(path: Path) -> tuple[list[Definition], frozenset[str]]:
    """Return what a module defines, and what its own statements read."""
    where, made, loose = str(path.relative_to(SOURCE)), [], []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            made.append(Definition(where, node.name, words_of(body_of(node))))
        elif isinstance(node, ast.ClassDef):
            made += class_definitions(where, node)
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.If) and not is_all(node):
            loose.append(node)
    return made, words_of(list(loose))


def is_all(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets)


def class_definitions(where: str, node: ast.ClassDef) -> Iterator[Definition]:
    """Yield a class with what it always needs, and each of its public methods."""
    methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
    public = [m for m in methods if not m.name.startswith("_")]
    rest: list[ast.AST] = [m for m in node.body if m not in public]
    yield Definition(where, node.name, words_of([*rest, *node.bases, *node.decorator_list]))
    protocol = any("Protocol" in ast.dump(base) for base in node.bases)
    for method in public:
        if not protocol:
            yield Definition(where, f"{node.name}.{method.name}", words_of(body_of(method)))


def test_every_public_name_can_be_reached() -> None:
    known: list[Definition] = []
    reached: set[str] = set()
    for path in sorted(SOURCE.rglob("*.py")):
        made, loose = definitions(path)
        known += made
        reached |= loose
        if any(path == SOURCE / start or SOURCE / start in path.parents for start in STARTS):
            for one in made:
                reached |= one.words | {one.name.rpartition(".")[2]}
    for folder in ("examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            reached |= words_of([ast.parse(path.read_text(encoding="utf-8"))])
    for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        reached |= set(WORD.findall(path.read_text(encoding="utf-8")))
    left = known
    while new := [d for d in left if d.name.rpartition(".")[2] in reached]:
        left = [d for d in left if d not in new]
        for one in new:
            reached |= one.words
    dead = [f"{d.where}: {d.name}" for d in left if not d.name.rpartition(".")[2].startswith("_")]
    assert not dead, "\n".join(dead)


def test_the_search_finds_what_is_dead() -> None:
    """The functions above tell a dead method from a live one."""
    tree = ast.parse("class A:\n    def live(self): return dead_too\n    def dead(self): ...\n")
    node = tree.body[0]
    assert isinstance(node, ast.ClassDef)
    made = {d.name: d.words for d in class_definitions("a.py", node)}
    assert set(made) == {"A", "A.live", "A.dead"}
    assert made["A.live"] == {"dead_too"}
