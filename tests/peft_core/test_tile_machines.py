"""The tiles as other CPUs get them: compiled for those by numba in a process of its own, or to assembly by LLVM."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding, ir

from peft_core import kernels

ROOT = Path(__file__).parents[2]
MACHINES = {  # name -> NUMBA_CPU_NAME, NUMBA_CPU_FEATURES, lanes and registers that should come of it, what is checked
    "avx512": ("skylake-avx512", "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl", (16, 32), ["tiles", "ops"]),
    "avx2": ("haswell", "+avx2,+fma", (8, 16), ["tiles", "ops"]),
    "sse2": ("x86-64", "", (4, 14), ["tiles"]),
}
NATIVE = pytest.mark.skipif(not kernels.tiles_supported(), reason="numba compiles no tiles here")


def runs_here(name):
    if "x86_64" not in binding.get_process_triple():
        return False
    host = binding.get_host_cpu_features()
    return all(host.get(feature[1:]) for feature in MACHINES[name][1].split(",") if feature)


def start(name):
    """A process in which numba compiles for the machine ``name`` and ``support.tile_checks`` checks that."""
    cpu, features, _, checks = MACHINES[name]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "support.tile_checks", *checks]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def processes():
    """All at once, for each compiles for seconds."""
    started = {name: start(name) for name in MACHINES if runs_here(name)}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", MACHINES)
def test_tiles_on_another_machine(name, processes):
    if name not in processes:
        pytest.skip(f"this CPU runs no {name} code")
    out, errors = processes[name].communicate()
    assert processes[name].returncode == 0, errors
    lanes, registers = MACHINES[name][2]
    assert f"Machine(lanes={lanes}, registers={registers}, bf16=False)" in out


@NATIVE
def test_tiles_on_this_machine():
    from support import tile_checks

    tile_checks.check_tiles()


@pytest.mark.parametrize(
    ("triple", "features", "machine"),
    [
        ("x86_64-unknown-linux-gnu", "+avx2,+avx512bf16,+avx512f,+fma", (16, 32, True)),
        ("x86_64-pc-windows-msvc", "+avx2,-avx512bf16,+avx512f,+fma", (16, 32, False)),
        ("x86_64-apple-darwin", "+avx,+avx2,-avx512f,+fma", (8, 16, False)),
        ("x86_64-unknown-linux-gnu", "+avx,-avx2,-fma", (4, 14, False)),
        ("x86_64-unknown-linux-gnu", "", (4, 14, False)),
        ("arm64-apple-darwin24", "", (4, 32, False)),
        ("aarch64-unknown-linux-gnu", "+neon,+bf16", (4, 32, False)),
        ("powerpc64le-unknown-linux-gnu", "+vsx", (4, 14, False)),
    ],
)
def test_a_machine_is_what_numba_compiles_for(triple, features, machine):
    from peft_core.tile_code import Machine, machine_of

    assert machine_of(triple, "any", features) == Machine(*machine)


@pytest.mark.parametrize(
    ("machine", "half", "blocks"),
    [
        ((16, 32, True), True, [(8, 48), (6, 64), (8, 16), (12, 32)]),
        ((16, 32, False), False, [(8, 48), (6, 64), (8, 16), (12, 32)]),
        ((16, 32, False), True, [(8, 48), (6, 32), (8, 16), (12, 32)]),
        ((8, 16, False), False, [(4, 24), (6, 16), (4, 16), (6, 16)]),
        ((8, 16, False), True, [(4, 16), (3, 16), (4, 16), (4, 16)]),
        ((4, 32, False), False, [(8, 12), (6, 16), (4, 16), (6, 16)]),
        ((4, 32, False), True, [(8, 12), (6, 8), (4, 16), (12, 8)]),
    ],
)
def test_a_block_fits_the_registers(machine, half, blocks):
    from peft_core.tile_code import Machine

    assert [Machine(*machine).block(*size, half) for size in [(8, 48), (6, 64), (8, 16), (12, 32)]] == blocks


@NATIVE
def test_the_cache_on_disk_tells_machines_apart():
    from numba.core.registry import cpu_target

    from peft_core import tiles

    codegen = cpu_target.target_context.codegen()
    key = tiles.probe._cache._index_key(tiles.probe.signatures[0], codegen)
    assert codegen.magic_tuple() in key  # from which alone the machine is read


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("cpu", ["apple-m1", "cortex-a76"])
def test_a_tile_for_neon_multiplies_in_registers(cpu, half):
    from peft_core.tile_code import machine_of, tile_function

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    try:
        target = binding.Target.from_triple(module.triple)
    except RuntimeError:
        pytest.skip("this llvmlite has no AArch64")
    tile_function(module, machine_of(module.triple, cpu, ""), half, 8, 48)
    machine = target.create_target_machine(cpu=cpu, features="", opt=3)
    assembly = machine.emit_assembly(binding.parse_assembly(str(module)))
    count = {block: len(re.findall(r"\bfmla\s+v\d+\.4s", block)) for block in re.split(r"\n(?=[\w.]+:)", assembly)}
    main = max(count, key=count.__getitem__)
    assert count[main] == 2 * 24 * (1 + half)  # two steps of an 8 x 12 block
    assert "[sp" not in main, "sums leave the registers in the main loop"
