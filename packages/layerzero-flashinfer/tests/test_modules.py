"""Which modules a warm-up has compiled; the generators are stand-ins that write down what they were asked for."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from layerzero_cli.calls import context
from layerzero_flashinfer import modules


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """(generator, arguments) of every module; those for a head_dim of 128 are compiled already."""
    found, built = [], []

    def generator(module, name):
        def make(*given):
            found.append((name, given))
            home = tmp_path / f"module{len(found)}"
            return SimpleNamespace(
                name=f"{name}{given}", is_compiled=128 in given, build_dir=home, lock_path=tmp_path / "module.lock"
            )

        return make

    jit = SimpleNamespace(build_jit_specs=lambda specs, verbose: built.extend(spec.name for spec in specs))
    monkeypatch.setattr(modules, "_generator", generator)
    monkeypatch.setattr(modules, "lib", lambda: SimpleNamespace(jit=jit))
    monkeypatch.setattr(modules, "_templates", lambda cache: ("fa2", "fa3"))
    return SimpleNamespace(found=found, built=built)


def shapes(*calls):
    return [modules.shape_of({**context(op, {**options, "device": "cpu"}).to_json()}) for op, options in calls]


def test_a_warm_up_compiles_the_modules_of_its_calls_sizes_and_features_included(asked):
    paged = {"q": (16, 32, 64), "k": (512, 16, 8, 64), "context": 500}
    alone = {"q": (1, 300, 8, 256), "k": (1, 300, 2, 256), "layout": "BSHD", "causal": True, "window": (127, 0)}
    several = {"q": (4, 1, 32, 64), "k": (4, 96, 8, 64), "layout": "BSHD"}
    given = shapes(("paged_attention", paged), ("attention", alone), ("attention", several))
    built = modules.compile_for(given)
    told = {name: [item for kind, item in asked.found if kind == name] for name in {kind for kind, _ in asked.found}}
    single = told["gen_single_prefill_module"]
    assert [item[0] for item in single] == ["fa2", "fa3"] and all(
        item[4:9] == (256, 256, 0, True, False) for item in single
    )
    assert "gen_single_decode_module" not in told  # 300 queries are no decode
    assert all(item[5:10] == (64, 64, 0, False, False) for item in told["gen_batch_prefill_module"])
    assert all(item[4:9] == (64, 64, 0, False, False) for item in told["gen_batch_decode_module"])
    assert sorted(asked.built) == sorted(built) and len(built) == 2 + 2 + 1  # each once


def test_what_no_kernel_takes_is_left_out(asked):
    wide = {"q": (2, 8, 4, 512), "k": (2, 8, 4, 512), "layout": "BSHD"}
    single = {"q": (2, 8, 4, 128), "k": (2, 8, 4, 128), "layout": "BSHD", "dtype": "float32"}
    assert modules.compile_for(shapes(("attention", wide), ("attention", single))) == () and asked.found == []


def test_the_formula_of_an_activation_counts(asked):
    needs = {"op": "gelu_and_mul", "dtype": "bfloat16", "dims": {"rows": 4}, "needs": ["gelu_tanh"]}
    modules.compile_for([modules.shape_of(needs), modules.shape_of({**needs, "needs": ["gelu_none"]})])
    assert [given for _, given in asked.found] == [("gelu_tanh",), ("gelu",)]


@pytest.mark.req("R-BK-FI-05")
@pytest.mark.needs_tool("ninja")
def test_what_was_built_together_is_not_built_again_when_it_is_loaded(asked, monkeypatch, tmp_path):
    """Ninja itself, with cp for a compiler, run as FlashInfer 0.6.6 runs it: above all modules, then inside of one."""
    ran, source = tmp_path / "ran", tmp_path / "kernel.cu"
    source.write_text("kernel")

    def generator(module, name):
        home = tmp_path / "cached_ops" / name
        return lambda *given: SimpleNamespace(
            name=name, is_compiled=False, build_dir=home, ninja_path=home / "build.ninja", lock_path=tmp_path / "lock"
        )

    def run(folder, file):
        subprocess.run(["ninja", "-C", str(folder), "-f", str(file)], check=True, capture_output=True)

    def together(specs, verbose):
        for spec in specs:
            made = spec.build_dir / "kernel.o"
            spec.build_dir.mkdir(parents=True)
            spec.ninja_path.write_text(
                f"rule nvcc\n  command = cp $in $out && echo $out: $in > $out.d && echo {spec.name} >> {ran}\n"
                f"  depfile = $out.d\n  deps = gcc\nbuild {made}: nvcc {source}\ndefault {made}\n"
            )
        whole = tmp_path / "all.ninja"
        whole.write_text("".join(f"subninja {spec.ninja_path}\n" for spec in specs))
        run(tmp_path / "cached_ops", whole)

    monkeypatch.setattr(modules, "_generator", generator)
    monkeypatch.setattr(modules, "lib", lambda: SimpleNamespace(jit=SimpleNamespace(build_jit_specs=together)))
    (tmp_path / "cached_ops").mkdir()
    built = modules.compile_for([{"op": "rms_norm"}, {"op": "rope"}])
    assert built == ("gen_norm_module", "gen_rope_module") and sorted(ran.read_text().split()) == list(built)
    for name in built:
        run(tmp_path / "cached_ops" / name, tmp_path / "cached_ops" / name / "build.ninja")
    assert sorted(ran.read_text().split()) == list(built)  # nothing ran twice
    source.write_text("another kernel")
    run(tmp_path / "cached_ops" / built[0], tmp_path / "cached_ops" / built[0] / "build.ninja")
    assert len(ran.read_text().split()) == 3  # what did change is compiled
