"""The laws of CONTRIBUTING.md that a test can say, each also shown to fail on a planted violation.

A rule is a function from a path (relative to the repository) and a source text to a list of complaints.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("peft_core", "transformer", "adapters", "scripts")
MAY_IMPORT = {
    "peft_core": {"peft_core"},
    "transformer": {"peft_core", "transformer"},
    "adapters": {"peft_core", "adapters"},
    "scripts": {"peft_core", "transformer", "adapters", "run"},
}
LIBRARIES = {  # what each package may use besides the standard library
    "peft_core": {"numpy", "ml_dtypes", "numba", "llvmlite", "cupy", "safetensors", "threadpoolctl"},
    "transformer": {"numpy", "ml_dtypes", "tokenizers", "jinja2", "pyarrow"},
    "adapters": {"numpy"},
    "scripts": {"numpy", "pydantic", "tqdm", "tokenizers"},
}
NUMBA_MODULES = {  # kernels on the register tile; nobody else imports one of them at its top
    "peft_core/tiles.py",
    "peft_core/tile_code.py",
    "peft_core/tile_parts.py",
    "peft_core/packing_tiles.py",
    "peft_core/tile_team.py",
    "peft_core/ops/projection_tiles.py",
    "peft_core/ops/projection_rows_tiles.py",
    "peft_core/ops/projection_ranks_tiles.py",
    "peft_core/ops/projection_few_tiles.py",
    "peft_core/ops/attention_tiles.py",
    "peft_core/ops/attention_tiles_back.py",
    "peft_core/ops/loss_tiles.py",
    "peft_core/ops/decode_tiles.py",
}
PEER = {"scripts/run/bench_peer.py": {"torch", "transformers", "peft"}}  # what is measured against; imported on demand
OURS = set(MAY_IMPORT) | {"run"}


def _package(path: str) -> str:
    return path.split("/")[0]


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def imports_point_down(path: str, source: str) -> list[str]:
    """Law 1."""
    allowed = MAY_IMPORT[_package(path)]
    roots = [(line, name.split(".")[0]) for line, name in _imports(ast.parse(source))]
    return [f"{path}:{line} imports {root}" for line, root in roots if root in OURS - allowed]


def outside_libraries_are_the_declared_ones(path: str, source: str) -> list[str]:
    """No PyTorch, and nothing that pyproject.toml does not list."""
    import sys

    allowed = LIBRARIES[_package(path)] | PEER.get(path, set()) | OURS | set(sys.stdlib_module_names)
    roots = [(line, name.split(".")[0]) for line, name in _imports(ast.parse(source))]
    return [f"{path}:{line} imports {root}" for line, root in roots if root not in allowed]


def only_the_backend_imports_cupy(path: str, source: str) -> list[str]:
    """Law 3."""
    if path == "peft_core/backend.py":
        return []
    return [f"{path}:{n} imports cupy" for n, name in _imports(ast.parse(source)) if name.split(".")[0] == "cupy"]


def numba_is_imported_late(path: str, source: str) -> list[str]:
    """Importing the packages stays quick: numba costs 0.3 s, so only functions may import it, and NUMBA_MODULES."""
    if path in NUMBA_MODULES:
        return []
    slow = {Path(module).stem for module in NUMBA_MODULES}
    complaints = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            words = {word for name in names for word in name.split(".")}
            if words & (slow | {"numba", "llvmlite"}):
                complaints.append(f"{path}:{node.lineno} imports {', '.join(names)} at the top")
    return complaints


def a_vjp_never_writes_into_gy(path: str, source: str) -> list[str]:
    """Law 4."""
    complaints = []
    for node in ast.walk(ast.parse(source)):
        targets = (
            [node.target] if isinstance(node, ast.AugAssign) else node.targets if isinstance(node, ast.Assign) else []
        )
        for target in targets:
            plain_name = isinstance(target, ast.Name) and isinstance(node, ast.Assign)  # rebinding a name is fine
            while isinstance(target, ast.Subscript | ast.Attribute):
                target = target.value
            if isinstance(target, ast.Name) and target.id == "gy" and not plain_name:
                complaints.append(f"{path}:{node.lineno} writes into gy")
    return complaints


def only_the_model_face_knows_padding(path: str, source: str) -> list[str]:
    """Law 5: inside the stack there is one flat stream; masks and padding end at the call in model.py."""
    inside = {"attention.py", "mlp.py", "block.py", "cache.py", "batch.py"}
    if _package(path) != "transformer" or not (Path(path).name in inside or "/families/" in path):
        return []
    names = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name | ast.arg)]
    word = [(n.lineno, n.id if isinstance(n, ast.Name) else n.arg) for n in names]
    return [f"{path}:{line} mentions {w}" for line, w in word if w in {"attention_mask", "padding_mask", "pad_mask"}]


def a_file_fits_in_a_head(path: str, source: str) -> list[str]:
    """Law 6."""
    long_file = [f"{path} has {n} lines, more than 400"] if (n := source.count("\n")) > 400 else []
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(f, f.end_lineno - f.lineno + 1) for f in functions if f.end_lineno]
    return long_file + [f"{path}:{f.lineno} {f.name} has {n} lines, more than 60" for f, n in lengths if n > 60]


def trainability_is_never_decided_by_name(path: str, source: str) -> list[str]:
    """What trains is decided by type: no test of a name for "lora" in the library's code."""
    complaints = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            left = node.left
            if (
                isinstance(left, ast.Constant)
                and isinstance(left.value, str)
                and left.value.lower().strip("_.") == "lora"
            ):
                complaints.append(f'{path}:{node.lineno} asks "{left.value}" in a name')
    return complaints


def the_transformer_mentions_no_adapter(path: str, source: str) -> list[str]:
    """Law 1: the stack works the same whatever stands in for its Linears."""
    if _package(path) != "transformer":
        return []
    return [
        f"{path}:{i} mentions LoRA" for i, line in enumerate(source.splitlines(), 1) if re.search(r"lora", line, re.I)
    ]


def public_functions_have_docstrings(path: str, source: str) -> list[str]:
    """Every public function and class of a library package says what it does."""
    if _package(path) == "scripts":
        return []
    tree = ast.parse(source)
    public = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]
    return [f"{path}:{n.lineno} {n.name} has no docstring" for n in public if not ast.get_docstring(n)]


def nothing_names_one_machine(path: str, source: str) -> list[str]:
    """No absolute path of the machine it was written on."""
    found = re.compile(r"(?<![\w.])/(?:work|farm|home|root)/")
    return [f"{path}:{i} names a path" for i, line in enumerate(source.splitlines(), 1) if found.search(line)]


RULES = {  # rule -> a planted violation: (path, source)
    imports_point_down: ("adapters/x.py", "from transformer.model import CausalLM\n"),
    outside_libraries_are_the_declared_ones: ("peft_core/x.py", "import torch\n"),
    only_the_backend_imports_cupy: ("peft_core/ops/x.py", "def f():\n    import cupy\n"),
    numba_is_imported_late: ("peft_core/ops/x.py", "from numba import njit\n"),
    a_vjp_never_writes_into_gy: ("peft_core/ops/x.py", "def vjp(gy):\n    gy[0] += 1\n    return gy\n"),
    only_the_model_face_knows_padding: ("transformer/block.py", "def f(x, attention_mask):\n    return x\n"),
    a_file_fits_in_a_head: ("scripts/x.py", "def f():\n" + "    pass\n" * 60),
    trainability_is_never_decided_by_name: ("adapters/x.py", 'def f(name):\n    return "lora_" in name\n'),
    the_transformer_mentions_no_adapter: ("transformer/x.py", "# LoRA here\n"),
    public_functions_have_docstrings: ("peft_core/x.py", "def f():\n    return 1\n"),
    nothing_names_one_machine: ("scripts/x.py", "PATH = '/" + "work/main'\n"),
}


def _files() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_follows(rule):
    complaints = [c for path in _files() for c in rule(path, (ROOT / path).read_text())]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_planted_violation_is_found(rule):
    path, source = RULES[rule]
    assert rule(path, source)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_innocent_code_passes(rule):
    assert not rule("peft_core/ops/x.py", 'def f(gy):\n    """Doc."""\n    gy = gy * 2\n    return gy\n')


@pytest.mark.parametrize("line", ["from . import tiles", "from ..tiles import FAST", "import peft_core.tiles"])
def test_a_module_of_kernels_is_imported_late_too(line):
    assert numba_is_imported_late("peft_core/ops/x.py", line + "\n")
    assert not numba_is_imported_late("peft_core/ops/x.py", f"def f():\n    {line}\n")


def test_there_is_something_to_check():
    assert len(_files()) > 10


def test_no_script_hides_a_standard_library_module():
    import sys

    scripts = {p.stem for p in (ROOT / "scripts").glob("*.py")}
    assert not scripts & set(sys.stdlib_module_names)
