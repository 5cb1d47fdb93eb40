"""Somebody writes to the store after the lock: refused at the next load, before any code runs."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import py_compile
import shutil
import tempfile
import traceback
from pathlib import Path

import pytest

from layerzero_hub import contents, loading
from layerzero_hub.errors import HubError
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
build, compile_c = _kernels.build, _kernels.compile_c
stable_abi_variant, universal_kernel = _kernels.stable_abi_variant, _kernels.universal_kernel


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


@pytest.mark.req("R-HUB-05")
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


@pytest.mark.fault(13)
def test_a_module_imported_late_is_the_verified_one(bench):
    files = {"__init__.py": b"def late():\n    from . import more\n    return more.VALUE\n", "more.py": b"VALUE = 1\n"}
    bench.put("org/late", build(files, "torch-universal", id="_lz_late_1"))
    bench.lock("org/late")
    module = bench.load("org/late")
    (bench.build("org/late") / "more.py").write_bytes(b"VALUE = 2\n")
    assert module.late() == 1


def _after_the_check(monkeypatch, change):
    """Change the store at the worst moment: everything is verified, nothing has run."""
    checked = loading.check_names_free

    def then(variant):
        checked(variant)
        change()

    monkeypatch.setattr(loading, "check_names_free", then)


@pytest.mark.fault(13)
def test_sources_that_change_between_the_check_and_the_import(bench, monkeypatch):
    repo = bench.publish("raced", extra="SAID = 'verified'\n")
    bench.lock(repo)
    folder = bench.build(repo)

    def change():
        for name in ("__init__.py", "detail.py"):
            (folder / name).write_bytes(b"SAID = 'tampered'\ndef rms_norm(): pass\n")
        (folder / "torch.py").write_bytes(b"raise RuntimeError('planted')")

    _after_the_check(monkeypatch, change)
    module = bench.load(repo)
    assert (module.SAID, hasattr(module.detail, "SAID")) == ("verified", False)
    assert "detail.normalized" in inspect.getsource(module.rms_norm)  # what Triton would compile


EXTENSION = """
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
static struct PyModuleDef definition = { PyModuleDef_HEAD_INIT, "native", 0, -1, 0, 0, 0, 0, 0 };
PyMODINIT_FUNC PyInit_native(void) {
  PyObject *module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "VALUE", NUMBER);
  return module;
}
int go(void) { return NUMBER; }
"""
THREE_WAYS = """
import ctypes, pathlib, torch
from . import native
part = pathlib.Path(__file__).parent / "part.abi3.so"
def values():
    torch.ops.load_library(str(part))
    return native.VALUE, ctypes.CDLL(str(part)).go(), ctypes.CDLL(part).go()
"""


@pytest.mark.fault(13)
def test_binaries_that_change_between_the_check_and_their_use(bench, monkeypatch, tmp_path):
    honest, evil = (compile_c(tmp_path, EXTENSION.replace("NUMBER", number)) for number in ("1", "2"))
    files = {"__init__.py": THREE_WAYS.encode(), "native.abi3.so": honest, "part.abi3.so": honest}
    bench.put("org/three-ways", build(files, stable_abi_variant(), id="_lz_three_ways"))
    bench.lock("org/three-ways")
    folder = bench.build("org/three-ways")

    def change():
        for name in ("native.abi3.so", "part.abi3.so"):
            (folder / name).unlink()
            (folder / name).write_bytes(evil)

    _after_the_check(monkeypatch, change)
    module = bench.load("org/three-ways")
    assert module.values() == (1, 1, 1)
    (folder / "later.so").write_bytes(evil)
    with bench.refused("HUB_STORE_EXTRA_FILE"):
        ctypes.CDLL(str(folder / "later.so"))
    assert module.native.__file__ == str(folder / "native.abi3.so")


@pytest.mark.fault(13)
def test_a_verified_binary_cannot_be_written(bench, tmp_path):
    files = {"__init__.py": b"", "part.abi3.so": compile_c(tmp_path, EXTENSION.replace("NUMBER", "1"))}
    bench.put("org/sealed", build(files, stable_abi_variant(), id="_lz_sealed"))
    (variant,) = bench.lock("org/sealed").find("org/sealed").variants.values()
    contents = bench.store.open(variant)
    try:
        with pytest.raises(PermissionError), open(f"/proc/self/fd/{contents.objects['part.abi3.so']}", "r+b") as file:
            file.write(b"x")
    finally:
        contents.close()


@pytest.mark.fault(13)
@pytest.mark.parametrize("how", ["mode", "owner", "group", "link"])
def test_folders_above_the_store_that_others_may_change(bench, tmp_path, how):
    above = tmp_path / "srv" / "models"
    above.mkdir(parents=True)
    bench.settings["store"] = str(above / "hub")
    repo = bench.publish()
    bench.lock(repo)
    if how == "mode":
        os.chmod(tmp_path / "srv", 0o777)
    elif how == "link":
        (tmp_path / "open").mkdir()
        os.rename(above, tmp_path / "open" / "models")
        above.symlink_to(tmp_path / "open" / "models")
        os.chmod(tmp_path / "open", 0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    elif how == "owner":
        os.chown(above, 12345, -1)
    else:
        os.chown(above, 0, 12345)
        os.chmod(above, 0o775)
    with bench.refused("HUB_STORE_PARENT"):
        bench.load(repo)
    with bench.refused("HUB_STORE_PARENT"):
        bench.store.prepare()


@pytest.mark.fault(13)
@pytest.mark.slow
def test_a_sticky_folder_above_the_store_is_no_danger(bench, tmp_path):
    (tmp_path / "shared").mkdir()
    os.chmod(tmp_path / "shared", 0o1777)
    bench.settings["store"] = str(tmp_path / "shared" / "hub")
    repo = bench.publish()
    bench.lock(repo)
    assert bench.load(repo)


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


def test_history_that_is_damaged_is_set_aside(locked):
    bench, repo, _ = locked
    (bench.store.root / "history.json").write_text("{not json")
    bench.load(repo)
    assert len(list(bench.store.root.glob("*.corrupt-*"))) == 1


@pytest.mark.fault(21)
@pytest.mark.parametrize("how", ["unreadable", "damaged", "no mapping"])
def test_a_quarantine_that_cannot_be_read_is_not_an_empty_one(locked, how):
    bench, repo, _ = locked
    (variant,) = bench.read().find(repo).variants.values()
    path = bench.store.root / "quarantine.json"
    if how == "unreadable":
        path.mkdir()  # reading it is an error of the system, for root too
    else:
        path.write_text({"damaged": "{not json", "no mapping": "[]"}[how])
    with bench.refused("HUB_STORE_UNREADABLE"):
        bench.load(repo)
    assert path.exists()
    assert [reason.code.value for finding in bench.verify() for reason in finding.reasons] == ["HUB_STORE_UNREADABLE"]
    bench.store.quarantine(variant.digest, "harm")  # elsewhere: what is there is not written over
    assert path.is_dir() or path.read_text() in ("{not json", "[]")


@pytest.mark.fault(24)
def test_umask_002_makes_nothing_that_others_may_write(bench, tmp_path):
    files = {"__init__.py": b"from .deep.er import code\n", "deep/er/code.py": b"VALUE = 1\n"}
    bench.put("org/umask", build(files, "torch-universal", id="_lz_umask"))
    bench.settings["store"] = str(tmp_path / "new" / "place" / "hub")
    before = os.umask(0o002)
    try:
        bench.lock("org/umask")
        assert bench.load("org/umask").code.VALUE == 1
        bench.store.quarantine("sha256:" + "0" * 64, "a test")
    finally:
        os.umask(before)
    written = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(written) > 8 and not [path for path in written if path.stat().st_mode & 0o022]


@pytest.mark.fault(24)
def test_a_folder_of_umask_002_is_fine_while_its_group_is_its_owner_alone(bench, tmp_path, monkeypatch):
    import grp
    import pwd

    me = pwd.getpwuid(os.geteuid())
    monkeypatch.setattr(pwd, "getpwall", lambda: [me])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((me.pw_name, "x", gid, [])))
    contents._is_alone.cache_clear()
    (tmp_path / "own").mkdir()
    os.chmod(tmp_path / "own", 0o775)
    bench.settings["store"] = str(tmp_path / "own" / "hub")
    repo = bench.publish()
    try:
        bench.lock(repo)
        bench.load(repo)
        monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("team", "x", gid, ["somebody"])))
        contents._is_alone.cache_clear()
        with bench.refused("HUB_STORE_PARENT"):
            bench.load(repo)
    finally:
        contents._is_alone.cache_clear()


@pytest.mark.fault(24)
def test_a_store_filled_by_root_serves_a_user_who_may_write_nothing(bench):
    """Loading, and a quarantine, by a process of another user; without root, what such a user needs: to read."""
    shared = Path(tempfile.mkdtemp(prefix="lz-hub-", dir="/tmp"))
    try:
        os.chmod(shared, 0o755)
        bench.settings |= {"store": str(shared / "hub"), "lock": str(shared / "layerzero-hub.lock")}
        repo = bench.publish("served", extra="SERVED = True\n")
        before = os.umask(0o022)
        try:
            bench.lock(repo)
        finally:
            os.umask(before)
        (variant,) = bench.read().find(repo).variants.values()
        for path in (bench.store.build_path(variant.digest), *bench.store.build_path(variant.digest).rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)
        if os.geteuid() == 0:
            assert _as_nobody(bench, repo, variant.digest, shared) == 0
    finally:
        shutil.rmtree(shared)


def _as_nobody(bench, repo, digest, shared) -> int:
    state = shared / "state"
    state.mkdir()
    os.chown(state, 65534, 65534)
    child = os.fork()
    if child == 0:
        status = 9
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            os.environ["XDG_STATE_HOME"] = str(state)
            status = 1 if not bench.load(repo).SERVED else 0
            bench.store.quarantine(digest, "harm")
            status |= 2 if digest not in json.loads((state / "layerzero" / "hub-quarantine.json").read_text()) else 0
            try:
                bench.load(repo)
                status |= 4
            except HubError as error:
                status |= 0 if error.code.value == "HUB_REVOKED" else 8
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
