"""Solving: equal inputs give equal bytes, a table is obeyed without selecting, and what no longer holds is said."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.device.probe import probe_device
from layerzero.errors import ConfigurationError, DispatchTableError, InvalidInputError
from layerzero.model.enums import Platform
from layerzero.perfdb.store import PerfDB
from layerzero.reasons import ReasonCode
from layerzero.runtime.state import state
from layerzero.selection.engine import objections
from layerzero.tables.file import load_table, make_table, save_table
from layerzero.tables.signing import sign, verify
from layerzero_tune import tuning as public_tuning
from layerzero_tune.model_calls import ModelShape, model_traffic
from layerzero_tune.tables.solver import diff_tables
from layerzero_tune.trial import trial

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "intermediate_size": 96, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(lab):
    return lab


def decode(first=1, last=60):
    torch.manual_seed(0)
    q, cache, w = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 64, 16), torch.ones(16)
    with torch.no_grad():
        return [lz.rms_norm(lz.attention(q, cache[:, :, :n], cache[:, :, :n]), w) for n in range(first, last + 1)]


def solved(path=None, **options):
    with lz.record() as found:
        decode()
    return lz.solve(found, path, device="cpu", **options)


@pytest.mark.req("R-SOLV-01")
def test_calls_of_the_cpu_are_solved_for_the_cpu_also_beside_a_gpu(monkeypatch):
    """Not for the machine's first device: that would leave them all out, and the table would be empty."""
    gpu = replace(probe_device("cpu"), platform=Platform.CUDA, device_type="cuda", name="a GPU", index=0)
    monkeypatch.setattr(public_tuning, "probe_device", lambda word=None: probe_device(word) if word else gpu)
    with lz.record() as found:
        decode()
    table = lz.solve(found)
    assert {entry.op for entry in table.entries} == {"attention", "rms_norm"}
    assert table.find(next(ctx for ctx in found.traffic.contexts if ctx.op == "rms_norm")) is not None


@pytest.mark.req("R-SOLV-01")
def test_calls_of_a_device_that_is_not_here_are_refused_by_name():
    with lz.record() as found:
        decode()
    elsewhere = [
        replace(ctx, device=replace(ctx.device, platform=Platform.ROCM, device_type="rocm"))
        for ctx in found.traffic.contexts
    ]
    with pytest.raises(InvalidInputError, match="the calls are for rocm"):
        lz.solve(elsewhere)
    assert lz.solve([]).entries == ()


@pytest.mark.req("R-SOLV-04", "R-SOLV-01", "R-TUNE-07", "R-API-25")
def test_a_decode_loop_under_a_solved_table_selects_nothing_and_gives_the_same(tmp_path):
    before = decode()
    solved(tmp_path / "table.json")
    lz.use_table(tmp_path / "table.json")
    counters = state.counters
    selected, followed = counters.selections, counters.followed
    after = decode()
    assert counters.selections == selected and counters.followed > followed
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    lz.use_table(None)
    state.cache.invalidate_all()
    decode()
    assert counters.selections > selected


@pytest.mark.req("R-SOLV-01")
def test_equal_inputs_give_equal_bytes_in_whatever_order_they_come(tmp_path):
    with lz.record() as found:
        decode()
    lz.solve(found, tmp_path / "a.json", device="cpu")
    lz.solve(list(reversed(found.traffic.contexts)), tmp_path / "b.json", device="cpu")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["fallback"] == {"mode": "runtime_select"} and len(data["content_hash"]) == 64
    assert data["buckets"]["attention"]["seq_len_k"][-1] == 64
    assert all("measured_at" not in str(plan) for plan in data["plans"])


@pytest.mark.req("R-SOLV-01")
def test_a_table_branches_by_the_buckets_of_length_and_of_batch_each_for_itself(tmp_path):
    """Times of four corners, swapped so that neither the length nor the batch alone tells who is the fastest."""
    fast, slow = "sdpa.attention.flash_cpu", "sdpa.attention.math"
    wanted = {(1, 8): slow, (1, 100): fast, (4, 8): fast, (4, 100): slow}

    def tensors(batch, length):
        gen = torch.Generator().manual_seed(length)
        return [torch.randn(batch, 2, n, 16, generator=gen) for n in (1, length, length)]

    db = PerfDB(tmp_path / "perf.db")
    with lz.record() as found, torch.no_grad():
        for (batch, length), winner in wanted.items():
            ctx = lz.select("attention", *tensors(batch, length)).context
            rows = {row.kernel_id: row for row in trial(ctx, seconds=0.02, jit="off").rows}
            for name in (fast, slow):
                db.put([replace(rows[name], median_us=10.0 if name == winner else 90.0, variance=0.0)])
            lz.attention(*tensors(batch, length))
    path = tmp_path / "table.json"
    table = lz.solve(found, path, database=db.path, device="cpu")
    assert len(table.entries) == 4 and {"batch", "seq_len_k"} <= set(table.buckets["attention"])
    lz.use_table(path)  # no measurements are configured here: only the table can tell the corners apart
    taken = lambda batch, length: lz.which("attention", *tensors(batch, length))  # noqa: E731
    with torch.no_grad():
        assert {corner: taken(*corner) for corner in wanted} == wanted
        # A bucket has room: sizes that never occurred go where the others of their bucket go.
        inside = {(1, 7): slow, (1, 70): fast, (1, 128): fast, (3, 8): fast, (3, 120): slow, (4, 65): slow}
        assert {corner: taken(*corner) for corner in inside} == inside
        for batch, length in ((1, 129), (5, 8)):
            notes = lz.explain("attention", *tensors(batch, length)).decision.notes
            assert [note.code for note in notes] == [ReasonCode.PLAN_BUCKET_MISS]
        for corner, winner in wanted.items():
            assert torch.equal(lz.attention(*tensors(*corner)), lz.attention(*tensors(*corner), backend=winner))


@pytest.mark.req("R-SOLV-05")
def test_a_call_the_table_does_not_cover_is_selected_and_says_so(tmp_path):
    solved(tmp_path / "table.json")
    lz.use_table(tmp_path / "table.json")
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 65, 16)
    report = lz.explain("attention", q, k, k)
    assert report.chosen and [note.code for note in report.decision.notes] == [ReasonCode.PLAN_BUCKET_MISS]
    with lz.scoped(strict_mode=True):
        # another policy: the table does not hold, and strict mode is honoured by the selection that follows
        notes = lz.explain("attention", q, k, k).decision.notes
        assert notes[0].code is ReasonCode.PLAN_POLICY_MISMATCH


def test_sizes_between_the_recorded_ones_are_not_guessed(tmp_path):
    """Calls of 1 to 16 and of 1024 keys occurred: 100 keys are another bucket, and nobody has looked at it."""
    q, cache = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 2048, 16)
    with lz.record() as found, torch.no_grad():
        for n in (3, 9, 1000):
            lz.attention(q, cache[:, :, :n], cache[:, :, :n])
    lz.solve(found, tmp_path / "t.json", device="cpu")
    lz.use_table(tmp_path / "t.json")

    def codes(n):
        return [note.code for note in lz.explain("attention", q, cache[:, :, :n], cache[:, :, :n]).decision.notes]

    assert codes(10) == codes(999) == [ReasonCode.PLAN_FOLLOWED]
    assert codes(100) == codes(1500) == [ReasonCode.PLAN_BUCKET_MISS]


@pytest.mark.req("R-SOLV-03", "R-SOLV-06")
def test_another_machine_policy_or_version_invalidates_with_the_reason(tmp_path):
    table = solved()
    world, device = state.world, probe_device("cpu")
    assert objections(table, world, device) == []
    elsewhere = replace(device, torch_version="9.9")
    assert [why.code for why in objections(table, world, elsewhere)] == [ReasonCode.PLAN_HARDWARE_MISMATCH]
    lz.configure(strict_mode=True)
    assert [why.code for why in objections(table, state.world, device)] == [ReasonCode.PLAN_POLICY_MISMATCH]
    kernels = {name: "0.0" for name in table.kernels}
    older = make_table(table.hardware, table.policy_hash, kernels, table.buckets, table.entries)
    found = [why.code for why in objections(older, world, device)]
    assert found and set(found) == {ReasonCode.PLAN_KERNEL_CHANGED}


@pytest.mark.req("R-SOLV-06")
def test_a_table_of_another_policy_is_solved_again_and_then_holds_under_this_one(tmp_path):
    path, q, cache = tmp_path / "table.json", torch.randn(1, 2, 1, 16), torch.randn(1, 2, 64, 16)[:, :, :20]
    old = solved(path)
    before = lz.which("attention", q, cache, cache)
    lz.configure(deny=[before])
    with pytest.raises(DispatchTableError, match="solve again under this policy") as caught:
        lz.use_table(path)
    assert caught.value.code is ReasonCode.PLAN_POLICY_MISMATCH
    new = solved(path)
    assert old.policy_hash != new.policy_hash and new.policy_hash == state.world.policy.policy_hash
    assert before in {entry.kernel_id for entry in old.entries} - {entry.kernel_id for entry in new.entries}
    lz.use_table(path)
    report = lz.explain("attention", q, cache, cache)
    assert report.chosen != before and [note.code for note in report.decision.notes] == [ReasonCode.PLAN_FOLLOWED]


def test_where_the_database_lies_is_no_part_of_the_policy_a_table_is_bound_to():
    table = solved()
    lz.configure(perfdb={"enabled": False}, dispatch_table=None)
    assert objections(table, state.world, probe_device("cpu")) == []


def test_the_policy_may_name_the_table(tmp_path):
    solved(tmp_path / "table.json")
    lz.configure(dispatch_table=str(tmp_path / "table.json"))
    before = state.counters.followed
    decode()
    assert state.counters.followed > before and state.world.table is not None
    lz.configure(dispatch_table=None)
    assert state.world.table is None


@pytest.mark.req("R-TUNE-04")
def test_entries_carry_the_measured_time_and_error_and_diff_says_why(tmp_path):
    q = torch.randn(1, 2, 8, 16)
    with torch.no_grad():
        ctx = lz.select("attention", q, q, q).context
    found = trial(ctx, seconds=0.02, jit="off")
    db, swapped = PerfDB(tmp_path / "a.db"), PerfDB(tmp_path / "b.db")
    fast, slow = "sdpa.attention.flash_cpu", "sdpa.attention.math"
    rows = {row.kernel_id: row for row in found.rows}
    db.put([replace(rows[fast], median_us=10.0, variance=0.0), replace(rows[slow], median_us=30.0, variance=0.0)])
    swapped.put([replace(rows[fast], median_us=40.0, variance=0.0), replace(rows[slow], median_us=30.0, variance=0.0)])
    old = lz.solve([found.context], tmp_path / "old.json", database=db.path, device="cpu")
    new = lz.solve([found.context], tmp_path / "new.json", database=swapped.path, device="cpu")
    assert (old.entries[0].kernel_id, old.entries[0].median_us) == (fast, 10.0)
    assert old.entries[0].error == rows[fast].max_error
    assert new.entries[0].kernel_id == slow
    from layerzero_tune.tuning import times_in

    diff = diff_tables(load_table(tmp_path / "old.json"), load_table(tmp_path / "new.json"), times_in(swapped.path))
    (change,) = diff.changes
    assert (change.old, change.new) == (fast, slow) and "40 µs" in change.why and "1.33×" in change.why
    assert diff_tables(old, old).equal and not diff.equal


def test_a_signed_table_is_obeyed_and_any_other_is_refused(tmp_path, monkeypatch):
    secret, other = tmp_path / "secret", tmp_path / "other"
    secret.write_bytes(b"0123456789abcdef0123")
    other.write_bytes(b"another secret of enough bytes")
    table = solved(tmp_path / "t.json", key=secret)
    assert table.signature.startswith("hmac-sha256:")
    monkeypatch.setenv("LAYERZERO_TABLE_KEY", str(secret))
    lz.use_table(tmp_path / "t.json")
    monkeypatch.setenv("LAYERZERO_TABLE_KEY", str(other))
    with pytest.raises(DispatchTableError, match="not by this key") as caught:
        lz.use_table(tmp_path / "t.json")
    assert caught.value.code is ReasonCode.PLAN_SIGNATURE_INVALID
    save_table(replace(table, signature=None), tmp_path / "bare.json")
    with pytest.raises(DispatchTableError, match="not signed"):
        lz.use_table(tmp_path / "bare.json")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(DispatchTableError, match="too short"):
        sign("0" * 64, tmp_path / "short")


def test_ed25519_keys_work_where_the_package_is_there(tmp_path):
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    (tmp_path / "private").write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    )
    (tmp_path / "public").write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    signature = sign("a" * 64, tmp_path / "private")
    verify("a" * 64, signature, tmp_path / "public")
    with pytest.raises(DispatchTableError):
        verify("b" * 64, signature, tmp_path / "public")


@pytest.mark.fault(23)
def test_a_public_key_is_never_taken_as_a_shared_secret(tmp_path):
    """Whoever has the public key could otherwise sign with it: HMAC over its bytes, in whatever form the file is."""
    form = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    public, other = Ed25519PrivateKey.generate().public_key(), generate_private_key(SECP256R1()).public_key()
    spki, raw = form.PublicFormat.SubjectPublicKeyInfo, public.public_bytes_raw()
    pem, der = (public.public_bytes(kind, spki) for kind in (form.Encoding.PEM, form.Encoding.DER))
    ssh = public.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    refused = {
        "OpenSSH": ssh,
        "authorized_keys": b"# deploy\nrestrict " + ssh + b" somebody",
        "DER": der,
        "DER of another kind": other.public_bytes(form.Encoding.DER, spki),
        "PEM without its lines": b"".join(pem.splitlines()[1:-1]),
        "hexadecimal DER": der.hex().encode(),
        "JWK": b'{"kty": "OKP", "crv": "Ed25519", "x": "' + base64.urlsafe_b64encode(raw) + b'"}',
        "minisign": base64.b64encode(b"Ed" + bytes(8) + raw),
        "32 bytes": raw,
        "32 bytes in base64": base64.b64encode(raw),
        "UTF-16": pem.decode().encode("utf-16"),
    }
    for name, content in refused.items():
        file = tmp_path / name
        file.write_bytes(content)
        forged = hmac.new(content, b"layerzero dispatch table " + b"a" * 64, hashlib.sha256).hexdigest()
        with pytest.raises(DispatchTableError) as caught:
            verify("a" * 64, f"hmac-sha256:{forged}", file)
        expected = {"UTF-16": "PLAN_SIGNATURE_INVALID"}.get(name, "PLAN_KEY_PUBLIC")
        assert caught.value.code == expected, name
        with pytest.raises(DispatchTableError):
            sign("a" * 64, file)
    for name, content in {"bom": b"\xef\xbb\xbf" + pem, "comment": b"the key of the build\n" + pem}.items():
        file = tmp_path / name
        file.write_bytes(content)
        forged = hmac.new(content, b"layerzero dispatch table " + b"a" * 64, hashlib.sha256).hexdigest()
        with pytest.raises(DispatchTableError, match="the key is for ed25519"):
            verify("a" * 64, f"hmac-sha256:{forged}", file)
        with pytest.raises(DispatchTableError, match="expected an ed25519 private key"):
            sign("a" * 64, file)


@pytest.mark.fault(23)
def test_a_secret_as_long_as_a_public_key_is_one_when_only_its_owner_can_read_it(tmp_path):
    file = tmp_path / "secret"
    for content in (bytes(range(32)), bytes(range(32)).hex().encode()):
        file.write_bytes(content)
        file.chmod(0o640)
        verify("a" * 64, sign("a" * 64, file), file)
        file.chmod(0o644)
        with pytest.raises(DispatchTableError, match="everybody can read it") as caught:
            sign("a" * 64, file)
        assert caught.value.code == "PLAN_KEY_PUBLIC" and "chmod 600" in caught.value.hint


# -- freezing a model ------------------------------------------------------------------------------------
@pytest.mark.req("R-API-23")
def test_a_frozen_model_selects_nothing_and_computes_the_same():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.weight = torch.nn.Parameter(torch.randn(32))
            self.proj = torch.nn.Parameter(torch.randn(64, 32))

        def forward(self, x):
            y = lz.rms_norm(x, self.weight)
            return lz.silu_and_mul(lz.linear(y, self.proj))

    model, x = Block().eval(), torch.randn(3, 32)
    with torch.no_grad():
        plain = model(x)
        frozen = lz.compile(model, x)
        before, followed = state.counters.selections, state.counters.followed
        again = [frozen(x) for _ in range(3)]
        assert state.counters.selections == before
        assert state.counters.followed == followed + 3  # each call once, by the table; then they are hot
        assert all(torch.equal(plain, out) for out in again)
        frozen(torch.randn(4000, 32))  # another bucket is selected as ever
        assert state.counters.selections > before
    assert isinstance(frozen, torch.nn.Module) and set(frozen.state_dict()) == {"original.weight", "original.proj"}
    assert {entry.op for entry in frozen.table.entries} == {"rms_norm", "linear", "silu_and_mul"}
    assert state.world.table is None


def test_a_function_can_be_frozen_inside_a_scope_and_keeps_its_hot_calls():
    x, w = torch.randn(2, 16), torch.randn(16)

    def step(y):
        with torch.no_grad():
            return lz.rms_norm(y, w)

    frozen = lz.compile(step, x)
    frozen(x)
    misses = state.counters.misses
    for _ in range(5):
        frozen(x)
    assert state.counters.misses == misses and frozen.original is step
    assert torch.equal(frozen(x), step(x))


# -- model configurations ----------------------------------------------------------------------------------
def test_a_configuration_gives_prefill_and_decode_of_every_op():
    traffic = model_traffic(CONFIG, device=probe_device("cpu"))
    ops = {item.context.op for item in traffic.calls}
    assert ops == {"attention", "rope", "rms_norm", "add_rms_norm", "linear", "silu_and_mul", "embedding", "sample"}
    lengths = {
        (item.context.seq_len_q, item.context.seq_len_k) for item in traffic.calls if item.context.op == "attention"
    }
    assert lengths == {(64, 64), (1, 64)}  # no longer than the model allows
    assert max(item.count for item in traffic.calls) > 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**CONFIG, "num_local_experts": 4, "num_experts_per_tok": 2}, {"moe"}),
        ({**CONFIG, "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0},
         {"gemma_rms_norm", "gemma_add_rms_norm", "gelu_and_mul"}),
        ({"model_type": "gpt2", "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 32,
          "torch_dtype": "float32"}, {"layer_norm"}),
        ({"text_config": CONFIG, "torch_dtype": "float32"}, {"rope"}),
    ],
)  # fmt: skip
def test_other_architectures_are_read(config, expected):
    ops = {item.context.op for item in model_traffic(config, device=probe_device("cpu")).calls}
    assert expected <= ops


def test_a_configuration_that_is_none_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigurationError, match="hidden_size"):
        model_traffic({"foo": 1})
    with pytest.raises(ConfigurationError, match="num_attention_heads is"):
        ModelShape.of({**CONFIG, "num_attention_heads": "many"})
    with pytest.raises(ConfigurationError):
        lz.tune(tmp_path / "missing.json", database=tmp_path / "p.db")
