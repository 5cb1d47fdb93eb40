"""A double of FlashInfer for machines without a GPU: it holds every call to the recorded signatures of the real library
and computes what that library documents, base-2 logarithms, bottom-right causal masks and in-place outputs included.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

RECORDED = Path(__file__).with_name("signatures") / "flashinfer.json"
WIDTHS = (64, 128, 256)


def attend(q, k, v, causal, window, cap, scale):
    """[T, H, D] over [S, Hkv, D]: (out float32, log2-sum-exp2)."""
    assert not (causal and q.shape[0] > k.shape[0] > 0), "the real kernels raise, or give wrong rows"
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    rows, cols = q.shape[0], k.shape[0]
    at = torch.arange(rows)[:, None] + (cols - rows)
    key = torch.arange(cols)[None, :]
    hidden = torch.zeros(rows, cols, dtype=torch.bool)
    if causal:
        hidden |= key > at
    if window >= 0:
        hidden |= key < at - window
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1) / math.log(2.0)
    # The real kernels leave what they like in a row without keys; the adapter has to put it right.
    out = torch.einsum("hts,shd->thd", scores.softmax(-1), v) if cols else torch.full((rows, *v.shape[1:]), torch.nan)
    return out, lse.transpose(0, 1)


class Double:
    """The fake library, its recorded signatures and the calls it got."""

    def __init__(self, recorded):
        self.calls = []
        self.launch = [132, 1]  # what a plan says of its launch
        self.inner = True  # whether the functions that the public calls end in are those the adapters know
        self.recorded = recorded
        self.modules = {}
        for name in recorded["calls"]:
            self._put(name)

    def count(self, name):
        return sum(1 for found, *_ in self.calls if found == name)

    def signature(self, name):
        kinds = inspect.Parameter
        params = [
            kinds(p["name"], getattr(kinds, p["kind"]), default=kinds.empty if p["default"] is None else p["default"])
            for p in self.recorded["calls"][name]
        ]
        return inspect.Signature(params)

    def bind(self, name, *args, **kwargs):
        """Bind to the recorded signature; a call the library would refuse is a TypeError here."""
        bound = self.signature(name).bind(*args, **kwargs)
        self.calls.append((name, bound.arguments))
        return bound.arguments

    def module(self, name):
        if name not in self.modules:
            self.modules[name] = ModuleType(name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self.module(parent), child, self.modules[name])
        return self.modules[name]

    def _put(self, dotted):
        owner, _, name = dotted.rpartition(".")
        if owner.rpartition(".")[2][0].isupper():
            return  # a method of a wrapper
        if name[0].isupper():
            made = self._wrapper(dotted)
        else:
            behaviour = getattr(self, "do_" + name, None)
            made = self._function(dotted, behaviour)
        setattr(self.module(owner), name, made)
        if owner != "flashinfer" and name.startswith("Batch"):
            setattr(self.module("flashinfer"), name, made)

    def _function(self, dotted, behaviour):
        def call(*args, **kwargs):
            self.bind(dotted, *args, **kwargs)
            assert behaviour is not None, f"the double does not know {dotted}"
            return behaviour(*args, **kwargs)

        call.__signature__ = self.signature(dotted)
        return call

    # -- one sequence -----------------------------------------------------------------------------
    def do_get_single_prefill_module(self, backend, q, kv, o, width, width_v, pos, swa, cap, f16):
        assert (backend in ("fa2", "fa3"), width in WIDTHS, width_v == width, pos, f16) == (True, True, True, 0, False)

        def run(
            q, k, v, tmp, o, maybe_lse, mask_mode, layout, window_left, maybe_packed_custom_mask, maybe_alibi_slopes,
            logits_soft_cap, sm_scale, scale_q, scale_k, scale_v, rope_scale, rope_theta,
        ):  # fmt: skip
            assert (window_left >= 0, logits_soft_cap > 0, layout) == (swa, cap, 0)
            assert sm_scale > 0 and tmp.dtype is torch.uint8
            out, lse = attend(q, k, v, mask_mode == 1, window_left, logits_soft_cap, sm_scale)
            o.copy_(out)
            if maybe_lse is not None:
                maybe_lse.copy_(lse)

        return SimpleNamespace(run=run)

    def do_get_single_decode_module(self, q, kv, o, width, width_v, pos, swa, cap):
        assert width in WIDTHS and width_v == width and pos == 0

        def run(
            q, k, v, tmp, o, maybe_lse, alibi_slopes, kv_layout_code, window_left, logits_soft_cap, sm_scale,
            rope_scale, rope_theta,
        ):  # fmt: skip
            assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
            assert (window_left >= 0, logits_soft_cap > 0) == (swa, cap)
            if kv_layout_code == 1:
                k, v = k.transpose(0, 1), v.transpose(0, 1)
            assert q.shape[0] // k.shape[1] in (1, 2, 3, 4, 8)
            out, lse = attend(q.unsqueeze(0), k, v, False, window_left, logits_soft_cap, sm_scale)
            o.copy_(out[0])
            if maybe_lse is not None:
                maybe_lse.copy_(lse[0])

        return SimpleNamespace(run=run)

    # -- batches ----------------------------------------------------------------------------------
    def _wrapper(self, dotted):
        double, kind = self, dotted.rpartition(".")[2]

        class Wrapper:
            def __init__(self, *args, **kwargs):
                self.made = double.bind(dotted, *args, **kwargs)
                self.use_tensor_cores = self.made.get("use_tensor_cores", False)

            def plan(self, *args, **kwargs):
                self.planned = dict(double.bind(f"{dotted}.plan", self, *args, **kwargs))
                self._plan_info = list(double.launch)
                if kind == "BatchDecodeWithPagedKVCacheWrapper" and double.inner:
                    double._decode_module(self, dotted)
                fixed = self.made.get("paged_kv_indices_buffer", self.made.get("paged_kv_indices_buf"))
                if fixed is not None:  # a graph reads what lies in the buffers
                    pages = self.planned.get("indices", self.planned.get("paged_kv_indices"))
                    fixed[: len(pages)].copy_(pages)

            def run(self, *args, **kwargs):
                given = double.bind(f"{dotted}.run", self, *args, **kwargs)
                outs = double._latent(self, given) if "MLA" in kind else double._packed(self, given, kind)
                start = 0
                if given.get("out") is None:  # as the library does, where it is given no room
                    given["out"] = torch.empty_like(given["q"])
                for out, lse in outs:
                    given["out"][start : start + len(out)].copy_(out)
                    if given.get("lse") is not None:
                        given["lse"][start : start + len(out)].copy_(lse)
                    start += len(out)
                return given["out"]

        Wrapper.__name__ = kind
        return Wrapper

    def _decode_module(self, wrapper, dotted):
        """What a planned decode wrapper holds: the function its `run` ends in, and the buffers that takes."""
        made, plan = wrapper.made, wrapper.planned
        wrapper._float_workspace_buffer = made["float_workspace_buffer"]
        wrapper._int_workspace_buffer, wrapper._qo_indptr_buf = torch.empty(8), torch.empty(2)
        wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = plan["indptr"], plan["indices"]
        wrapper._paged_kv_last_page_len_buf = plan["last_page_len"]

        def launched(floats, ints, info, q, k, v, indptr, indices, last, o, lse, layout, window, pdl, cap, scale):
            given = (floats, ints, indptr, indices, last)
            held = ("float_workspace", "int_workspace", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
            for item, name in zip(given, held, strict=True):
                assert item is getattr(wrapper, f"_{name}_buf{'fer' if 'work' in name else ''}")
            assert info is wrapper._plan_info and o.is_contiguous() and o.shape == q.shape
            assert (layout, pdl) == (["NHD", "HND"].index(made["kv_layout"]), False)
            assert (window, cap, scale) == (plan["window_left"], plan["logits_soft_cap"], plan["sm_scale"])
            wrapper.run(q, (k, v), out=o, lse=lse, return_lse=lse is not None)

        def paged_run(
            float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache, paged_v_cache, qo_indptr,
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o, maybe_lse, mask_mode, layout, window_left,
            enable_pdl, maybe_custom_mask, maybe_mask_indptr, maybe_alibi_slopes, maybe_prefix_len_ptr,
            maybe_token_pos_in_items_ptr, maybe_max_item_len_ptr, logits_soft_cap, sm_scale, scale_q, scale_k, scale_v,
            rope_scale, rope_theta, token_pos_in_items_len, workspace_size, num_qo_heads=None,
        ):  # fmt: skip
            assert qo_indptr is wrapper._qo_indptr_buf and mask_mode == 0
            assert (rope_scale, rope_theta, token_pos_in_items_len) == (1.0, 1e4, 0)
            assert workspace_size == float_workspace_buffer.numel()
            nothing = (maybe_custom_mask, maybe_mask_indptr, maybe_alibi_slopes, maybe_prefix_len_ptr)
            nothing += (maybe_token_pos_in_items_ptr, maybe_max_item_len_ptr, scale_q, scale_k, scale_v)
            assert nothing == (None,) * 9
            launched(
                float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache, paged_v_cache,
                paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o, maybe_lse, layout, window_left,
                enable_pdl, logits_soft_cap, sm_scale,
            )  # fmt: skip

        def run(
            float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache, paged_v_cache,
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o, maybe_lse, kv_layout_code, window_left,
            enable_pdl, alibi_slopes, logits_soft_cap, sm_scale, rope_scale, rope_theta,
        ):  # fmt: skip
            assert (alibi_slopes, rope_scale, rope_theta) == (None, 1.0, 1e4)
            launched(
                float_workspace_buffer, int_workspace_buffer, plan_info_vec, q, paged_k_cache, paged_v_cache,
                paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o, maybe_lse, kv_layout_code, window_left,
                enable_pdl, logits_soft_cap, sm_scale,
            )  # fmt: skip

        wrapper._cached_module = SimpleNamespace(
            **{"paged_run": paged_run} if wrapper.use_tensor_cores else {"run": run}
        )

    def _packed(self, wrapper, given, kind):
        plan, made = wrapper.planned, wrapper.made
        width = plan.get("head_dim", plan.get("head_dim_qk"))
        assert width in WIDTHS and plan["num_qo_heads"] == given["q"].shape[1]
        if kind == "BatchDecodeWithPagedKVCacheWrapper" and not made["use_tensor_cores"]:
            assert plan["num_qo_heads"] // plan["num_kv_heads"] in (1, 2, 3, 4, 8)
        options = plan["window_left"], plan["logits_soft_cap"], plan["sm_scale"]
        queries = plan.get("qo_indptr", torch.arange(len(given["q"]) + 1))
        for row in range(len(queries) - 1):
            q = given["q"][queries[row] : queries[row + 1]]
            if "Ragged" in kind:
                first, last = plan["kv_indptr"][row : row + 2].tolist()
                k, v = given["k"][first:last], given["v"][first:last]
            else:
                k, v = self._pages(plan, given["paged_kv_cache"], made["kv_layout"], row)
            yield attend(q, k, v, plan.get("causal", False), *options)

    def _pages(self, plan, caches, layout, row):
        assert caches[0].stride() == caches[1].stride(), "the kernels read both caches with one set of strides"
        starts = plan.get("indptr", plan.get("paged_kv_indptr"))
        pages = plan.get("indices", plan.get("paged_kv_indices"))[starts[row] : starts[row + 1]].long()
        last = plan.get("last_page_len", plan.get("paged_kv_last_page_len"))[row]
        length = max(0, len(pages) - 1) * plan["page_size"] + int(last)
        found = []
        for cache in caches:
            blocks = cache[pages] if layout == "NHD" else cache[pages].transpose(1, 2)
            found.append(blocks.flatten(0, 1)[:length])
        return found

    def _latent(self, wrapper, given):
        plan = wrapper.planned
        assert (plan["head_dim_ckv"], plan["head_dim_kpe"]) == (512, 64)
        for row in range(len(plan["qo_indptr"]) - 1):
            first, last = plan["qo_indptr"][row : row + 2].tolist()
            pages = plan["kv_indices"][plan["kv_indptr"][row] : plan["kv_indptr"][row + 1]].long()
            length = int(plan["kv_len_arr"][row])
            latent = given["ckv_cache"][pages].flatten(0, 1)[:length].unsqueeze(1)
            rotated = given["kpe_cache"][pages].flatten(0, 1)[:length].unsqueeze(1)
            query = torch.cat((given["q_nope"][first:last], given["q_pe"][first:last]), -1)
            keys = torch.cat((latent, rotated), -1)
            out, lse = attend(query, keys, latent, plan["causal"], -1, 0.0, plan["sm_scale"])
            yield out, lse * (math.log(2.0) if given["return_lse_base_on_e"] else 1.0)

    # -- the rest ---------------------------------------------------------------------------------
    def do_rmsnorm(self, input, weight, eps=1e-6, out=None, enable_pdl=None, *, gemma=0.0):
        assert input.ndim in (2, 3) and weight.dtype == input.dtype and input.stride(-1) == 1
        wide = input.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (gemma + weight.float())).to(input.dtype)

    def do_gemma_rmsnorm(self, input, weight, eps=1e-6, out=None, enable_pdl=None):
        return self.do_rmsnorm(input, weight, eps, gemma=1.0)

    def do_silu_and_mul(self, input, out=None, enable_pdl=None):
        return self._gated(input, torch.nn.functional.silu)

    def do_gelu_and_mul(self, input, out=None, enable_pdl=None):
        return self._gated(input, torch.nn.functional.gelu)

    def do_gelu_tanh_and_mul(self, input, out=None, enable_pdl=None):
        return self._gated(input, lambda x: torch.nn.functional.gelu(x, approximate="tanh"))

    def _gated(self, input, act):
        half = input.shape[-1] // 2
        assert input.is_contiguous() and half % 8 == 0
        return (act(input[..., :half].float()) * input[..., half:].float()).to(input.dtype)

    def do_apply_rope_with_cos_sin_cache(self, positions, query, key, head_size, cos_sin_cache, is_neox=True):
        turned = torch.empty_like(query), torch.empty_like(key)
        heads = [x.view(x.shape[0], -1, head_size) for x in (query, key, *turned)]
        self.do__apply_rope_pos_ids_cos_sin_cache(*heads, cos_sin_cache, positions, not is_neox)
        return turned

    def do__apply_rope_pos_ids_cos_sin_cache(self, q, k, q_rope, k_rope, cos_sin_cache, pos_ids, interleave):
        assert cos_sin_cache.dtype is torch.float32 and q.shape[-1] in WIDTHS and pos_ids.is_contiguous()
        assert cos_sin_cache.is_contiguous()
        rotary = cos_sin_cache.shape[1]
        cos, sin = (x.unsqueeze(1) for x in cos_sin_cache[pos_ids.long()].chunk(2, dim=-1))
        for x, out in ((q, q_rope), (k, k_rope)):
            assert x.stride(-1) == out.stride(-1) == 1
            assert not any(n % 8 for n in (*x.stride()[:2], *out.stride()[:2])), "16 bytes are read at a time"
            heads = x[..., :rotary]
            pair = (heads[..., 0::2], heads[..., 1::2]) if interleave else heads.chunk(2, -1)
            one, two = (part.float() for part in pair)
            pair = one * cos - two * sin, two * cos + one * sin
            if out is not x:
                out.copy_(x)
            out[..., :rotary].copy_(torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1))

    def do_get_topk_module(self):
        def radix_topk(input, top_k, row_states_buffer, output_values):
            assert row_states_buffer.dtype is torch.uint8 and not row_states_buffer.any()
            assert input.is_contiguous() and output_values.shape == (len(input), top_k)
            values, ids = self.do_top_k(input, top_k)
            output_values.copy_(values)
            return ids.int()

        return SimpleNamespace(radix_topk=radix_topk)

    def do_top_k(self, input, k, sorted=False):
        found = input.topk(k, dim=-1)  # which of several equals is taken is nobody's promise: shuffle them all
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
        return found.values[:, order], found.indices[:, order]


@pytest.fixture(scope="session")
def recorded():
    """The signatures of the real library, made by tools/signatures.py where it runs."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.fixture
def vendor(recorded, monkeypatch, tmp_path):
    """The double in FlashInfer's place, and adapters that have not met another."""
    from layerzero_flashinfer import batched, plans, ragged, rope, sampling, single, workspace
    from layerzero_flashinfer import vendor as door

    double = Double(recorded)
    for name, module in double.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    for name in ("SINGLE", "BATCH"):
        monkeypatch.setattr(workspace, name, 1024)  # the double needs none
    kept = (single._calls, batched._plans, ragged._plans, plans._free, workspace._known)
    for found in kept:
        found.clear()
    found_once = (door.lib, rope._inner, sampling._inner, single._run)  # a test may put others in their place
    for once in found_once:
        once.cache_clear()
    yield double
    for found in kept:
        found.clear()
    for once in found_once:
        once.cache_clear()
