"""Somebody writes to the store after the lock: refused at the next load, before any code runs."""

from __future__ import annotations

import os
import py_compile
import shutil

import pytest

from layerzero_hub.testing import universal_kernel
from layerzero_hub.testing.kernels import build


@pytest.fixture
def locked(bench):
    """A locked kernel and the folder of its build."""
    repo = bench.publish()
    bench.lock(repo)
    return bench, repo, bench.build(repo)


def _cached(victim, bench, name="init"):
    """A kernel in the bare library's cache, and the path of its code there."""
    repo = bench.publish(name)
    victim.run(f"kernels.install_kernel({repo!r}, version=1)")
    (link,) = victim.home.glob(f"**/kernels--{repo.replace('/', '--')}/snapshots/*/build/torch-universal/__init__.py")
    return repo, link


@pytest.mark.req("R-HUB-05")
def test_a_changed_source(locked, victim):
    bench, repo, folder = locked
    other, cached = _cached(victim, bench, "tampered")
    real = cached.resolve()
    real.write_text(real.read_text() + "\nTAMPERED = True\n")
    assert victim.run(f"value = kernels.get_kernel({other!r}, version=1).TAMPERED") is True
    source = folder / "__init__.py"
    source.write_bytes(source.read_bytes().replace(b"torch", b"tOrch", 1))
    with bench.refused("HUB_STORE_TAMPERED"):
        bench.load(repo)


def test_a_flipped_byte_in_a_binary(bench, compiled):
    bench.put("org/binary", compiled)
    bench.lock("org/binary")
    (target,) = bench.build("org/binary").glob("*.so")
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(bytes(data))
    with bench.refused("HUB_STORE_TAMPERED"):
        bench.load("org/binary")


def test_a_file_more(locked, victim):
    bench, repo, folder = locked
    other, cached = _cached(victim, bench, "shadowed")
    (cached.parent / "detail.so.py").write_text("")
    package = cached.parent / "detail"
    package.mkdir()
    (package / "__init__.py").write_text("def normalized(x, eps):\n    return 'shadowed'")
    code = f"value = kernels.get_kernel({other!r}, version=1).detail.normalized(None, 0)"
    assert victim.run(code) == "shadowed"  # a package goes before a module of the same name
    (folder / "extra.py").write_text("print('hello')")
    with bench.refused("HUB_STORE_EXTRA_FILE"):
        bench.load(repo)


def test_a_folder_more_beside_the_build(locked):
    bench, repo, folder = locked
    (folder.parent / "torch-cpu").mkdir()
    with bench.refused("HUB_STORE_EXTRA_FILE"):
        bench.load(repo)


def test_a_file_less(locked):
    bench, repo, folder = locked
    (folder / "detail.py").unlink()
    with bench.refused("HUB_STORE_MISSING_FILE"):
        bench.load(repo)


def test_a_link_to_a_file(locked, tmp_path):
    bench, repo, folder = locked
    shutil.copy(folder / "detail.py", tmp_path / "same.py")
    (folder / "detail.py").unlink()
    (folder / "detail.py").symlink_to(tmp_path / "same.py")
    with bench.refused("HUB_STORE_LINK"):
        bench.load(repo)


def test_a_link_to_a_folder(locked, tmp_path, victim):
    bench, repo, folder = locked
    other, cached = _cached(victim, bench, "linked")
    moved = tmp_path / "moved"
    shutil.copytree(cached.parent, moved)
    (moved / "__init__.py").write_text("LINKED = True")
    variant = cached.parent
    shutil.rmtree(variant)
    variant.symlink_to(moved)
    assert victim.run(f"value = kernels.get_kernel({other!r}, version=1).LINKED") is True
    shutil.move(folder, tmp_path / "away")
    folder.symlink_to(tmp_path / "away")
    with bench.refused("HUB_STORE_LINK"):
        bench.load(repo)


def test_a_second_name_for_a_file(locked, tmp_path):
    bench, repo, folder = locked
    os.link(folder / "detail.py", tmp_path / "handle")
    with bench.refused("HUB_STORE_LINK"):
        bench.load(repo)


def test_a_pipe_for_a_file(locked):
    bench, repo, folder = locked
    (folder / "detail.py").unlink()
    os.mkfifo(folder / "detail.py")
    with bench.refused("HUB_STORE_KIND"):
        bench.load(repo)


@pytest.mark.parametrize("what", ["file", "folder", "root"])
def test_what_others_may_write(locked, what):
    bench, repo, folder = locked
    target = {"file": folder / "detail.py", "folder": folder, "root": bench.store.root}[what]
    os.chmod(target, 0o777)
    with bench.refused("HUB_STORE_MODE"):
        bench.load(repo)


def test_what_belongs_to_others(locked):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    bench, repo, folder = locked
    os.chown(folder / "detail.py", 12345, -1)
    with bench.refused("HUB_STORE_OWNER"):
        bench.load(repo)


def test_a_planted_bytecode_file(locked, victim, tmp_path):
    bench, repo, folder = locked
    other, cached = _cached(victim, bench, "planted")
    fake = tmp_path / "fake.py"
    honest = cached.stat()
    fake.write_text("PLANTED = True")
    target = victim.run("import importlib.util as u; value = u.cache_from_source(" + repr(str(cached)) + ")")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    py_compile.compile(str(fake), cfile=target, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert victim.run(f"value = kernels.get_kernel({other!r}, version=1).PLANTED") is True
    assert cached.stat().st_size == honest.st_size  # not a byte of the source was touched
    cache = folder / "__pycache__"
    cache.mkdir()
    shutil.copy(target, cache / "__init__.cpython-311.pyc")
    with bench.refused("HUB_STORE_EXTRA_FILE"):
        bench.load(repo)


def test_bytecode_is_neither_read_nor_left(locked):
    bench, repo, _ = locked
    before = sorted(str(path) for path in bench.store.root.rglob("*"))
    module = bench.load(repo)
    assert module.rms_norm and bench.mark.exists()
    assert sorted(str(path) for path in bench.store.root.rglob("*")) == before


def test_a_module_imported_late_is_checked_too(bench):
    files = {"__init__.py": b"def late():\n    from . import more\n    return more.VALUE\n", "more.py": b"VALUE = 1\n"}
    bench.put("org/late", build(files, "torch-universal", id="_lz_late_1"))
    bench.lock("org/late")
    module = bench.load("org/late")
    (bench.build("org/late") / "more.py").write_bytes(b"VALUE = 2\n")
    with bench.refused("HUB_STORE_TAMPERED"):
        module.late()


def test_local_kernels_in_the_environment(locked, victim, monkeypatch, tmp_path):
    bench, repo, _ = locked
    hijack = tmp_path / "hijack" / "torch-universal"
    hijack.mkdir(parents=True)
    for path, data in universal_kernel(extra="HIJACKED = True", id="_lz_hijack").items():
        (hijack / path.split("/")[-1]).write_bytes(data)
    code = f"import os; os.environ['LOCAL_KERNELS'] = '{repo}={tmp_path / 'hijack'}'\n"
    assert victim.run(code + f"value = kernels.get_kernel({repo!r}, version=1).HIJACKED") is True
    victim.run("import os; del os.environ['LOCAL_KERNELS']")
    monkeypatch.setenv("LOCAL_KERNELS", f"{repo}={tmp_path}")
    with bench.refused("HUB_LOCAL_OVERRIDE"):
        bench.load(repo)


def test_install_repairs_what_was_damaged(locked):
    bench, repo, folder = locked
    (folder / "detail.py").write_text("broken")
    with bench.refused("HUB_STORE_TAMPERED"):
        bench.install(frozen=True)
    (finding,) = bench.install()
    assert finding.state == "installed"
    bench.load(repo)
    assert not [path for path in bench.store.root.iterdir() if path.name.startswith(("staging-", "damaged-"))]


def test_memory_of_the_store_that_is_damaged_is_set_aside(locked):
    bench, repo, _ = locked
    (bench.store.root / "history.json").write_text("{not json")
    (bench.store.root / "quarantine.json").write_text("[]")
    bench.load(repo)
    assert len(list(bench.store.root.glob("*.corrupt-*"))) == 2
