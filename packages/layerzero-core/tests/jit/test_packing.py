"""Warm starts that travel: packed here, installed there whole or not at all, refused with the reason."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import layerzero as lz
from layerzero.errors import ConfigurationError, LayerZeroError
from layerzero.jit import cache as jit_cache
from layerzero.jit.index import Index
from layerzero.public.traffic import manifest as warmup_manifest
from layerzero.runtime.state import state
from layerzero.tables.signing import sign
from layerzero_cli.root import cli
from layerzero_tune import packing
from tools.pytest_fixtures import module_beside

HERE = Path(__file__).parent

_shared = module_beside(__file__, "compiled_lab")
cache, compiler = _shared.cache, _shared.compiler
Compiler, KERNEL, load_kernel, ready, use = (
    _shared.Compiler, _shared.KERNEL, _shared.load_kernel, _shared.ready, _shared.use,
)  # fmt: skip
X, W, EXPECTED = _shared.X, _shared.W, _shared.EXPECTED


@pytest.fixture
def packed(lab: Any, cache: Path, compiler: Compiler, tmp_path: Path) -> Path:
    """A pack of one kernel, with a file that names its own folder, as Triton's groups do."""
    use(lab)
    result = lz.warmup([lz.explain("rms_norm", X, W).decision.context], background=False)
    assert result.ok and compiler.runs == 1
    (cache / "quack").mkdir(exist_ok=True)
    (cache / "quack" / "group.json").write_text(json.dumps({"child": str(cache / "quack" / "x.bin")}))
    made = packing.pack(result, tmp_path / "warm.lzpack")
    assert [artifact[0] for artifact in made.artifacts] == [KERNEL] and made.files == 2 and not made.signed
    return tmp_path / "warm.lzpack"


@pytest.fixture
def elsewhere(packed: Path, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine of the same kind: an empty cache, a new process."""
    folder = tmp_path / "other" / "jit"
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(folder))
    for name in {**jit_cache.VENDOR_FOLDERS, **jit_cache.DEEP_FOLDERS}:
        monkeypatch.setenv(name, "")
    load_kernel().forget()
    use(lab)
    assert not ready()
    return folder


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_an_unpacked_warm_start_compiles_nothing(packed: Path, elsewhere: Path, compiler: Compiler) -> None:
    found = packing.unpack(packed)
    assert found.artifacts[0][0] == KERNEL and ready()
    assert lz.explain("rms_norm", X, W).chosen == KERNEL
    for _ in range(1_000):
        lz.rms_norm(X, W, 1e-6)
    assert compiler.runs == 1
    grouped = json.loads((elsewhere / "quack" / "group.json").read_text())
    assert grouped == {"child": str(elsewhere / "quack" / "x.bin")}  # it names its new folder
    (entry,) = Index(elsewhere).entries()
    assert all(Path(name).is_relative_to(elsewhere) and Path(name).exists() for name in entry.evidence)
    assert all(path.stat().st_mode & 0o077 == 0 for path in elsewhere.rglob("*.so"))
    assert packing.unpack(packed).content_hash == found.content_hash  # again: what is there stays


def test_the_command_line_packs_signs_and_unpacks(
    lab: Any, cache: Path, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, manifest, out = tmp_path / "secret", tmp_path / "manifest.json", tmp_path / "warm.lzpack"
    secret.write_bytes(b"0123456789abcdef-not-a-public-key")
    secret.chmod(0o600)
    use(lab)
    warmup_manifest([lz.explain("rms_norm", X, W).decision.context]).save(manifest)
    runner = CliRunner()
    done = runner.invoke(cli, ["warmup", str(manifest), "--pack", str(out), "--key", str(secret), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["pack"]["signed"] is True
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(tmp_path / "other"))
    for name in {**jit_cache.VENDOR_FOLDERS, **jit_cache.DEEP_FOLDERS}:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("LAYERZERO_TABLE_KEY", str(secret))
    done = runner.invoke(cli, ["warmup", "--unpack", str(out)])
    assert done.exit_code == 0 and "1 artifacts" in done.output and "signed" in done.output
    assert len(Index(tmp_path / "other").ready()) == 1
    assert runner.invoke(cli, ["warmup"]).exit_code == 2
    assert runner.invoke(cli, ["warmup", str(manifest), "--unpack", str(out)]).exit_code == 2


# -- what is refused --------------------------------------------------------------------------------------------
Members = list[tuple[tarfile.TarInfo, bytes]]


def _members(path: Path) -> Members:
    with tarfile.open(path) as tar:
        return [(item, tar.extractfile(item).read()) for item in tar.getmembers()]  # type: ignore[union-attr]


def _written(path: Path, members: Members) -> None:
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _head(members: Members, edit: Callable[[dict[str, Any]], object], *, rehash: bool = True) -> Members:
    """The members with another pack.json, its hash made right again: whoever forges one can do that."""
    head = json.loads(members[0][1])
    edit(head)
    if rehash:
        kept = {name: head[name] for name in ("format", "hardware", "artifacts", "files")}
        text = json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()
        head["content_hash"] = hashlib.sha256(text).hexdigest()
    return [(members[0][0], json.dumps(head).encode()), *members[1:]]


def _machine(**fields: Any) -> Callable[[Members], Members]:
    return lambda members: _head(members, lambda head: head["hardware"].update(signature="other", **fields))


def _renamed(name: str) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        old = members[-1][0].name

        def edit(head: dict[str, Any]) -> None:
            head["files"][name] = head["files"].pop(old)

        found = _head(members, edit)
        found[-1][0].name = name
        return found

    return change


def _linked(kind: bytes) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        info = members[-1][0]
        info.type, info.linkname, info.size = kind, "/etc/passwd", 0
        return [*members[:-1], (info, b"")]

    return change


def _edited(members: Members) -> Members:
    info, data = members[-1]
    return [*members[:-1], (info, data[:-1] + bytes([data[-1] ^ 1]))]


def _longer(members: Members) -> Members:
    info, data = members[-1]
    return [*members[:-1], (info, data + b"x")]


def _extra(members: Members) -> Members:
    return [*members, (tarfile.TarInfo("triton/more.so"), b"code")]


REFUSED: dict[str, tuple[Callable[[Members], Members], str]] = {
    "another device": (_machine(device="NVIDIA H100"), "PACK_DEVICE_MISMATCH"),
    "another driver": (_machine(driver="1.2.3"), "PACK_DRIVER_MISMATCH"),
    "another torch": (_machine(torch="2.0.0"), "PACK_VERSIONS_MISMATCH"),
    "another vendor": (_machine(backends={"triton": "1.0"}), "PACK_VERSIONS_MISMATCH"),
    "other instructions": (_machine(), "PACK_DEVICE_MISMATCH"),
    "an edited head": (
        lambda m: _head(m, lambda h: h["artifacts"][0].update(kernel_id="a.b.c"), rehash=False), "PACK_HASH_MISMATCH",
    ),
    "an edited file": (_edited, "PACK_HASH_MISMATCH"),
    "a longer file": (_longer, "PACK_HASH_MISMATCH"),
    "a way out": (_renamed("triton/../../../evil.so"), "PACK_PATH_UNSAFE"),
    "an absolute path": (_renamed("/tmp/evil.so"), "PACK_PATH_UNSAFE"),
    "a folder of its own": (_renamed("elsewhere/evil.so"), "PACK_PATH_UNSAFE"),
    "the index itself": (_renamed("index.json"), "PACK_PATH_UNSAFE"),
    "a symbolic link": (_linked(tarfile.SYMTYPE), "PACK_LINK"),
    "a hard link": (_linked(tarfile.LNKTYPE), "PACK_LINK"),
    "a device": (_linked(tarfile.CHRTYPE), "PACK_LINK"),
    "a file nobody named": (_extra, "PACK_INVALID"),
    "a file twice": (lambda members: [*members, members[-1]], "PACK_INVALID"),
    "a file missing": (lambda members: members[:-1], "PACK_INVALID"),
    "no head": (lambda members: members[1:], "PACK_INVALID"),
    "a strange mode": (
        lambda m: _head(m, lambda h: next(iter(h["files"].values())).update(mode=0o4755)), "PACK_INVALID",
    ),
    "a field of the wrong type": (lambda m: _head(m, lambda h: h["artifacts"][0].update(values=[1])), "PACK_INVALID"),
    "a later format": (lambda m: _head(m, lambda h: h.update(format="layerzero/9")), "SCHEMA_VERSION_UNKNOWN"),
    "a huge file": (
        lambda m: _head(m, lambda h: next(iter(h["files"].values())).update(size=packing.MAX_BYTES + 1)),
        "PACK_TOO_LARGE",
    ),
}  # fmt: skip


def test_what_is_damaged_foreign_or_unsafe_is_refused_and_nothing_of_it_is_kept(
    packed: Path, elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for what, (change, code) in REFUSED.items():
        forged = tmp_path / "forged.lzpack"
        _written(forged, change(_members(packed)))
        with pytest.raises(ConfigurationError) as caught:
            packing.unpack(forged)
        assert caught.value.code == code, (what, str(caught.value))
        left = [name for name in _files(elsewhere) if not name.startswith("locks/")] if elsewhere.exists() else []
        assert not left and not ready(), (what, left)
    last = _members(packed)[-1][0]  # its end is cut off, and not only the zeros with which tar fills a record
    forged.write_bytes(packed.read_bytes()[: last.offset_data + last.size // 2])
    with pytest.raises(ConfigurationError) as caught:
        packing.unpack(forged)
    assert caught.value.code in ("PACK_INVALID", "PACK_HASH_MISMATCH")
    forged.write_bytes(b"not a tar file at all" * 1000)
    with pytest.raises(ConfigurationError, match="PACK_INVALID"):
        packing.unpack(forged)
    with pytest.raises(ConfigurationError, match="CONFIG_FILE_MISSING"):
        packing.unpack(tmp_path / "absent")
    monkeypatch.setattr(packing, "MAX_BYTES", 100)
    with pytest.raises(ConfigurationError, match="PACK_TOO_LARGE"):
        packing.unpack(packed)
    assert not [name for name in _files(elsewhere) if not name.startswith("locks/")]


def test_a_signature_counts_for_warm_starts_alone(packed: Path, elsewhere: Path, tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other_key"
    for name, path in (("ours", ours), ("other", other)):
        path.write_bytes(f"a shared secret of {name}, long enough".encode())
        path.chmod(0o600)
    forged = tmp_path / "forged.lzpack"
    digest = json.loads(_members(packed)[0][1])["content_hash"]
    for signature in (None, "hmac-sha256:00", sign(digest, ours), sign(digest, other, "warm start")):
        _written(forged, _head(_members(packed), partial(dict.update, signature=signature)))
        with pytest.raises(ConfigurationError, match="PACK_SIGNATURE_INVALID"):
            packing.unpack(forged, key=ours)
    _written(forged, _head(_members(packed), lambda head: head.update(signature=sign(digest, ours, "warm start"))))
    assert packing.unpack(forged, key=ours).signed and ready()


def test_an_installation_that_fails_halfway_is_taken_back(packed: Path, elsewhere: Path) -> None:
    jit_cache.prepare()
    (elsewhere / "triton").rmdir()
    (elsewhere / "triton").write_text("in the way")
    with pytest.raises(ConfigurationError, match="PACK_NOT_INSTALLED"):
        packing.unpack(packed)
    assert not list(elsewhere.rglob("*.so")) and not (elsewhere / "quack" / "group.json").exists()
    assert not Index(elsewhere).entries() and not ready()


def test_nothing_to_pack_is_said(lab: Any, cache: Path, tmp_path: Path) -> None:
    result = lz.warmup([lz.select("rms_norm", X, W).context])
    with pytest.raises(LayerZeroError, match="PACK_INVALID"):
        packing.pack(result, tmp_path / "warm.lzpack")
    assert not list(tmp_path.glob("*lzpack*")) and state.loaded
