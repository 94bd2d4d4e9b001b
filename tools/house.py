"""The house as it is: rooms, imports, circles, sizes, and who reads another's private members.

    python tools/house.py              the figures
    python tools/house.py draw PNG     the rooms and the imports between them, floor by floor (matplotlib)
    python tools/house.py walk [ROOT]  files that a request passes, from `run()` to its first token, for each level
    python tools/house.py index        every file and what it is
    python tools/house.py table [ROOT] counts, one a line; of another checkout where ROOT names one (hatchling)

tests/test_house.py holds the walls with what is here, and the counts within [tool.house] of pyproject.toml.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import threading
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGES = ("hibachi", "hibachi_torch", "hibachi_jax", "hibachi_mlx", "conformance")
SELF = {"self", "cls"}
PUBLIC_NAMES = {"_replace", "_asdict", "_make", "_fields"}  # of named tuples, whose names begin so


@dataclass(frozen=True)
class File:
    path: str  # from the root, with slashes
    tree: ast.Module
    source: str

    @property
    def module(self) -> str:
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """hibachi/engine, hibachi_torch/native; files at the top are rooms of their own."""
        parts = Path(self.path).parts
        return "/".join(parts[:2]) if parts[0] == "hibachi" else parts[0]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of its tree: a walk takes far longer than what is asked on it."""
        return list(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> list[tuple[int, int, int]]:
        """(type, first line, last line) of its names, numbers, strings (docstrings, too) and operators."""
        nothing = {
            tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
        }  # fmt: skip
        found = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return [(token.type, token.start[0], token.end[0]) for token in found if token.type not in nothing]

    @cached_property
    def code(self) -> set[int]:
        """The numbers of its lines that hold code: no blank ones, comments and docstrings."""
        lines = {line for _, first, last in self.tokens for line in range(first, last + 1)}
        for node in self.nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0] if node.body else None
                if (
                    isinstance(first, ast.Expr)
                    and isinstance(first.value, ast.Constant)
                    and isinstance(first.value.value, str)
                ):
                    lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        return lines

    @property
    def code_lines(self) -> int:
        return len(self.code)


def files(root: Path = ROOT) -> list[File]:
    """Of the four packages and the conformance suite; what builds or tests them apart."""
    out = []
    for top in PACKAGES:
        for path in sorted((root / top).rglob("*.py")):
            if "build" not in path.relative_to(root).parts and path.name != "hatch_build.py":
                out.append(read(root, path))
    return out


def read(root: Path, path: Path) -> File:
    source = path.read_text()
    return File(path.relative_to(root).as_posix(), ast.parse(source), source)


def classes(file: File) -> Iterator[tuple[str, int]]:
    """(name, lines of code) of each class of a file."""
    for node in file.nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name, len(file.code.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


# ---- imports ---------------------------------------------------------------------------------------------------------


def imports(file: File, modules: set[str]) -> set[str]:
    """Our modules that a file imports, wherever the import stands: within functions and for type checkers, too."""
    found: set[str] = set()
    for node in file.nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(file, node)
            found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names)
    return {name for name in found if name in modules and name != file.module}


def _base(file: File, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    inside = file.module if file.path.endswith("__init__.py") else file.module.rpartition(".")[0]
    for _ in range(node.level - 1):
        inside = inside.rpartition(".")[0]
    return f"{inside}.{node.module}" if node.module else inside


def graph(all_files: Iterable[File]) -> dict[str, set[str]]:
    """{module: modules that it imports}, without `hibachi` itself, through which everybody would import everything."""
    kept = [f for f in all_files if not f.path.endswith("hibachi/__init__.py")]
    modules = {f.module for f in kept}
    return {f.module: imports(f, modules) for f in kept}


def crossings(all_files: Iterable[File]) -> Counter[tuple[str, str]]:
    """{(room, another that it imports): how many imports of a file by a file that is}."""
    room_of = {f.module: f.room for f in all_files}
    pairs = ((room_of[a], room_of[b]) for a, others in graph(all_files).items() for b in others)
    return Counter((a, b) for a, b in pairs if a != b)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of more than one that reach each other (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    out: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                out.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return out


def heights(edges: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each module: one above the highest that it imports."""
    found: dict[str, int] = {}

    def height(node: str, above: tuple[str, ...] = ()) -> int:
        if node not in found:
            below = [height(other, (*above, node)) for other in edges[node] if other not in above and other in edges]
            found[node] = 1 + max(below, default=-1)
        return found[node]

    for node in edges:
        height(node)
    return found


# ---- private members -------------------------------------------------------------------------------------------------


def private_reads(file: File) -> Iterator[tuple[int, str]]:
    """(line, what) of every `x._y` where x is not self, cls or super(), and not a module of somebody else's; and of
    private names that are imported from another file."""
    foreign = _foreign(file)
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            value = node.value
            if isinstance(value, ast.Name) and value.id in SELF | foreign:
                continue
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
                continue
            if _root(value) in foreign:
                continue
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            ours = node.level or (node.module or "").split(".")[0] in PACKAGES
            for alias in node.names:
                if ours and _is_private(alias.name):
                    yield node.lineno, f"from {node.module} import {alias.name}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_NAMES


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _foreign(file: File) -> set[str]:
    """Names of modules and objects of the standard library and of other packages."""
    out: set[str] = set()
    for node in file.nodes:
        if isinstance(node, ast.Import):
            out.update((a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] not in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] not in PACKAGES:
            out.update(a.asname or a.name for a in node.names)
    return out


# ---- what it says ----------------------------------------------------------------------------------------------------


def figures() -> str:
    all_files = files()
    rooms: dict[str, list[int]] = defaultdict(list)
    for f in all_files:
        rooms[f.room].append(f.code_lines)
    lines = [
        f"{room:<24} {len(sizes):>3} files {sum(sizes):>6} lines, longest {max(sizes)}"
        for room, sizes in sorted(rooms.items())
    ]
    edges = graph(all_files)
    lines.append(f"circles: {circles(edges) or 'none'}")
    reads = [f"{f.path}:{line}: {what}" for f in all_files for line, what in private_reads(f)]
    lines.append(f"private members of others that are read: {len(reads)}")
    lines += [f"  {read}" for read in reads]
    big = [f"{f.path}: {name} {n}" for f in all_files for name, n in classes(f) if n > 300]
    lines += [f"classes over 300 lines: {big or 'none'}"]
    lines += [f"files over 450 lines: {[f.path for f in all_files if f.code_lines > 450] or 'none'}"]
    return "\n".join(lines)


def draw(path: str) -> None:
    """Rooms as boxes, each on the floor above those that it imports; an arrow for each pair, as thick as the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    all_files = files()
    sizes: dict[str, int] = defaultdict(int)
    for f in all_files:
        sizes[f.room] += f.code_lines
    weight = crossings(all_files)
    edges = {room: {b for a, b in weight if a == room} for room in sizes}
    floors: dict[int, list[str]] = defaultdict(list)
    for room, floor in heights(edges).items():
        floors[floor].append(room)
    figure, axes = plt.subplots(figsize=(15, 1.25 * len(floors) + 1))
    at: dict[str, tuple[float, float]] = {}
    for floor, some in floors.items():
        for n, room in enumerate(sorted(some)):
            at[room] = ((n + 0.5) / len(some), floor)
    for (a, b), n in sorted(weight.items()):
        (x, y), (u, v) = at[a], at[b]
        up = v >= y
        axes.annotate(
            "", (u, v + 0.2), (x, y - 0.2),
            arrowprops={"arrowstyle": "->", "lw": 0.4 + 0.08 * min(n, 30), "color": "#c02020" if up else "#7088a0",
                        "alpha": 0.7, "connectionstyle": "arc3,rad=0.06"},
        )  # fmt: skip
    for room, (x, y) in at.items():
        axes.text(x, y, f"{room.removeprefix('hibachi/')}\n{sizes[room]}", ha="center", va="center", fontsize=9,
                  bbox={"boxstyle": "round", "fc": "#fff8e8", "ec": "#806020"})  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(floors) - 0.4)
    axes.axis("off")
    axes.set_title("Rooms, with their lines of code; arrows go down to what a room imports (red: up)")
    plain = {"metadata": {"Date": None}} if path.endswith(".svg") else {}  # the same house is the same file
    with matplotlib.rc_context({"svg.hashsalt": "house"}):
        figure.savefig(path, dpi=110, bbox_inches="tight", **plain)


def walk(root: Path) -> str:
    """Profiles one request each; counts our files that it enters. Once in a process, as it imports root's hibachi."""
    sys.path.insert(0, str(root))
    import hibachi
    from hibachi.testing.toys import SumLogits, SumPaged, SumTokens

    out = []
    for level, model in ((0, SumTokens), (1, SumLogits), (2, SumPaged)):
        seen: dict[str, set[str]] = defaultdict(set)
        noting = False

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            if noting and event == "call" and code.co_filename.startswith(str(root / "hibachi")):  # noqa: B023
                seen[Path(code.co_filename).relative_to(root).as_posix()].add(code.co_qualname)  # noqa: B023

        threading.setprofile(note)  # the engine's thread begins with the first request
        engine = hibachi.AutoregressiveBatchInference(model(hibachi.NumpyBackend()), max_model_len=64, backend="numpy")
        engine.run([1, 2], max_tokens=1).collect()  # what is made once
        time.sleep(0.1)
        noting = True
        sys.setprofile(note)
        next(iter(engine.run([3, 4, 5], max_tokens=1)))
        sys.setprofile(None)
        noting = False
        threading.setprofile(None)
        engine.close()
        seen.pop("hibachi/testing/toys.py", None)
        functions = sum(map(len, seen.values()))
        lines = sum(read(root, root / path).code_lines for path in seen)
        out.append(
            f"level {level}: {len(seen)} files of {lines} lines, {functions} functions\n  " + "\n  ".join(sorted(seen))
        )
    return "\n".join(out)


# ---- counts ----------------------------------------------------------------------------------------------------------


def shipped(root: Path, known: Iterable[File] = ()) -> list[File]:
    """What hatchling puts into our wheels by their pyproject.toml, except the conformance suite that goes along. known:
    files that were read before."""
    from hatchling.builders.wheel import WheelBuilder

    out, read_before = [], {root / f.path: f for f in known}
    for folder in (root, *(root / top for top in PACKAGES)):
        if (folder / "pyproject.toml").exists():
            for included in WheelBuilder(str(folder)).recurse_included_files():
                path = Path(included.path)
                if path.suffix == ".py" and root / "conformance" not in path.parents:
                    out.append(read_before.get(path) or read(root, path))
    return out


def entries(root: Path) -> int:
    """Files and folders right in hibachi/. Folders without a file of ours are left over from other commits."""
    paths = [path.relative_to(root / "hibachi") for path in (root / "hibachi").rglob("*") if path.is_file()]
    return len({p.parts[0] for p in paths if "__pycache__" not in p.parts and not p.parts[0].startswith(".")})


def tokens(file: File) -> int:
    """An f-string is one token, as it was before Python 3.12."""
    found = inside = 0
    for number, line, _ in file.tokens:
        kind = tokenize.tok_name[number]
        inside -= kind == "FSTRING_END"
        found += not inside and kind != "FSTRING_END" and line in file.code
        inside += kind == "FSTRING_START"
    return found


def keyword_arguments(file: File) -> Iterator[str]:
    """For each `name=value` in a call: "same" or "other" where it only hands on a name or an attribute of one (`x`,
    `self.x`, `a.b.x`), with a last name that is the argument's own, an underscore before it aside, or another name;
    "made" for any other value."""
    for node in file.nodes:
        for argument in node.keywords if isinstance(node, ast.Call) else ():
            if argument.arg is not None:
                value = argument.value
                last = value.attr if isinstance(value, ast.Attribute) else _root(value)
                same = last.lstrip("_") == argument.arg
                yield ("same" if same else "other") if _root(value) else "made"


def functions(file: File) -> Iterator[tuple[str, int, int]]:
    """(name, parameters, lines of code) of each function and method; self, cls, *args and **kwargs are not counted."""
    for node in file.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            lines = file.code.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            yield node.name, sum(parameter.arg not in SELF for parameter in given), len(lines)


def repeated_classes(some: Iterable[File]) -> list[str]:
    times = Counter(name for f in some for name, _ in classes(f))
    return sorted(name for name, n in times.items() if n > 1)


def files_to_the_first_token(root: Path) -> dict[int, int]:
    """{level: files that `walk` counts}, in a process of its own."""
    said = subprocess.check_output([sys.executable, __file__, "walk", root], text=True)
    return {int(level): int(n) for level, n in re.findall(r"^level (\d): (\d+) files", said, re.MULTILINE)}


def table(root: Path, known: list[File] | None = None) -> dict[str, int]:
    """known: `files(root)`, where these were read before."""
    all_files = files(root) if known is None else known
    product = [f for f in all_files if f.room != "conformance"]
    crossed = crossings(all_files)
    within = [pair for pair in crossed if all(room.startswith("hibachi/") for room in pair)]
    arguments = Counter(kind for f in product for kind in keyword_arguments(f))
    made = [function for f in product for function in functions(f)]
    tests, reads = 0, []
    for path in (root / "tests").rglob("*.py"):  # (their trees are not kept: there are many)
        test = read(root, path)
        tests += test.code_lines
        reads += [test.path for _ in private_reads(test)]
    return {
        "product: lines of code": sum(f.code_lines for f in product),
        "product: tokens": sum(map(tokens, product)),
        "in wheels: lines of code": sum(f.code_lines for f in shipped(root, all_files)),
        "tests: lines of code": tests,
        "conformance: lines of code": sum(f.code_lines for f in all_files if f.room == "conformance"),
        "entries in hibachi/": entries(root),
        "pairs of rooms, one importing the other": len(crossed),
        "pairs of rooms within hibachi/": len(within),
        "imports across rooms": crossed.total(),
        "longest chain of imports, in files": 1 + max(heights(graph(all_files)).values()),
        **{f"files to the first token, level {level}": n for level, n in files_to_the_first_token(root).items()},
        "keyword arguments": arguments.total(),
        "keyword arguments handed on by the same name": arguments["same"],
        "keyword arguments handed on by another name": arguments["other"],
        "functions": len(made),
        "functions of 8 or more parameters": sum(parameters >= 8 for _, parameters, _ in made),
        "functions that are private": sum(_is_private(name) for name, _, _ in made),
        "lines of code of a function, 95th percentile": sorted(lines for *_, lines in made)[len(made) * 95 // 100],
        "names of more than one class": len(repeated_classes(product)),
        "private reads in tests": len(reads),
        "test files with private reads": len(set(reads)),
    }


def index() -> str:
    """The first sentence of each file, room by room."""
    lines = []
    for f in sorted(files(), key=lambda f: (str(Path(f.path).parent), f.path)):
        said = (ast.get_docstring(f.tree) or "").split("\n")[0]
        lines.append(
            f"\n{Path(f.path).parent}/  {said}"
            if f.path.endswith("__init__.py")
            else f"  {Path(f.path).name:<24}{said}"
        )
    return "\n".join(lines)


def checkout(path: Path | str = ROOT) -> Path:
    root = Path(path).resolve()
    if not (root / "hibachi").is_dir():
        sys.exit(f"expected a checkout, with a folder hibachi/ in it; {root} has none")
    return root


def main() -> None:
    match sys.argv[1:]:
        case []:
            print(figures())
        case ["draw", path]:
            draw(path)
        case ["index"]:
            print(index())
        case ["walk", *root] if len(root) < 2:
            print(walk(checkout(*root)))
        case ["table", *root] if len(root) < 2:
            print("\n".join(f"{name:<48}{value:>8}" for name, value in table(checkout(*root)).items()))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
