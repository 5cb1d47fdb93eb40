"""The file form of a dispatch table, as one declarative table. Imported when a table is read."""

from __future__ import annotations

from layerzero.registry.containers import Field, Record, either, list_of, map_of
from layerzero.registry.kinds import FLAG, Kind, choice, number, text, whole

SCHEMA_VERSION = "1.0"
_MAX_PLANS = 1 << 20
_TEXT, _ANY_TEXT, _HASH = text(), text(empty=True), text(r"^.{8,}\Z", "a hash")
_ANYTHING = Kind(lambda value, where: value, dict)


def _maybe(kind: Kind) -> Kind:
    return either(lambda value: value is None, Kind(lambda value, where: None, lambda: {"type": "null"}), kind)


_MACHINE = Record(
    "machine",
    (
        Field("signature", _HASH, "decides whether the table holds", required=True),
        Field("device", _ANY_TEXT, "where it was solved", required=True),
        Field("driver", _maybe(_ANY_TEXT), "of the device"),
        Field("torch", _maybe(_ANY_TEXT), "its version"),
        Field("backends", map_of(_ANY_TEXT, _ANY_TEXT), "vendor libraries and their versions", default={}),
        Field("threads", _maybe(whole(1)), "of torch, for times on a CPU"),
    ),
)
_BUCKET = Record(
    "bucket",
    (
        Field("op", _TEXT, "the op", required=True),
        Field("when", map_of(_ANYTHING, _ANY_TEXT), "properties of the call that are not defaults", default={}),
        Field("sizes", map_of(whole(), _ANY_TEXT), "axis to the end of its bucket, or the exact size", required=True),
    ),
)
_OP = Record(
    "op",
    (
        Field("op", _TEXT, "the op", required=True),
        Field("kernel_id", _TEXT, "the kernel that serves it", required=True),
        Field("median_us", _maybe(number(0.0)), "its time"),
        Field("error", _maybe(number(0.0)), "its largest error"),
        Field("busy", FLAG, "others used the machine while the time was taken", default=False),
    ),
)
_PLAN = Record(
    "plan",
    (
        Field("bucket", _BUCKET, "the calls it speaks of", required=True),
        Field("ops", list_of(_OP, 1, to=list, unique=False, most=1), "the kernel of its op", required=True),
        Field("jit_artifacts", list_of(_ANY_TEXT, to=list, unique=False), "what its kernel has compiled", default=()),
    ),
)
_FALLBACK = Record("fallback", (Field("mode", choice(frozenset({"runtime_select"})), "calls without a plan"),))
TABLE = Record(
    "dispatch_table.json",
    (
        Field("schema_version", choice(frozenset({SCHEMA_VERSION})), "version of this format", required=True),
        Field("model_id", _ANY_TEXT, "the model it was solved for", default=""),
        Field("hardware_signature", _MACHINE, "the machine it holds for", required=True),
        Field("policy_hash", _HASH, "the policy it was solved under", required=True),
        Field("kernels", map_of(_ANY_TEXT, _ANY_TEXT), "kernels and their versions", required=True),
        Field("buckets", map_of(map_of(list_of(whole(), to=tuple, unique=False), _ANY_TEXT), _ANY_TEXT),
              "op to axis to the ends of its buckets", required=True),
        Field("plans", list_of(_PLAN, to=list, unique=False, most=_MAX_PLANS), "one for each bucket", required=True),
        Field("fallback", _FALLBACK, "what happens to a call that no plan covers"),
        Field("content_hash", text(r"^.{64}\Z", "a sha256"), "over everything else", required=True),
        Field("signature", _maybe(_ANY_TEXT), "of the hash"),
    ),
)  # fmt: skip
