"""The one table of settings: what may be set, to what, by which variable or policy key, and who reads it.

Everything else that names settings is derived from it: the environment (`layerzero.env`), the policy file, its JSON
Schema, what `lz.configure` accepts, and docs/settings.md. A test fails for a setting that its reader does not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from layerzero.kinds import (
    EXPRESSIONS,
    FLAG,
    FOLDERS,
    JSON,
    KERNEL,
    PATH,
    PATTERN,
    PATTERNS,
    TEXT,
    Kind,
    either,
    items,
    maybe,
    number,
    pairs,
    table,
    text,
    words,
)


class Setting(NamedTuple):
    """One setting.

    key        in the policy, with a dot inside a group; "" for a variable that no policy sets
    reader     the room of the core, or the package, that acts on it
    variable   without LAYERZERO_; "" where there is none; <NAME> stands for an op or a pattern
    said       how the variable's text is read, where that is not how the key's value is
    """

    key: str
    kind: Kind
    default: Any
    doc: str
    reader: str
    variable: str = ""
    said: Kind | None = None

    @property
    def attribute(self) -> str:
        return self.variable.lower()

    @property
    def unset(self) -> Any:
        """What `Env` holds when the variable is not set: for a key of the policy, that the next source decides."""
        return self.default if not self.key or self.default == () else None


_SECONDS = number(0, unit="seconds")
_SOME_SECONDS = number(0, above=True, unit="seconds")
_COUNT = number(1, whole=True)
_POINTS = number()
_MODES = words("in_process", "subprocess", "auto")
_NAME = text("a variable's name", lambda name: name and "=" not in name)
_PROCESS = table(
    "How a backend's own process is set up; everything but the mode is for a file that may be trusted.",
    {
        "mode": (_MODES, "subprocess", "auto: only where it cannot live in this process"),
        "env": (pairs(_NAME, TEXT), {}, "variables of its process, e.g. LD_LIBRARY_PATH"),
        "path": (FOLDERS, (), "folders its process searches first, absolute"),
        "hide": (items(text("a module", bool), alone=False), (), "modules its process does not see"),
        "deadline_s": (number(0.001), 30.0, "a call without an answer by then is given up"),
        "start_s": (number(0.1), 120.0, "the same for starting it and importing the vendor"),
        "memory_mb": (number(64), 4096.0, "most shared memory of one call, host and each GPU"),
    },
)

GROUPS: Final[Mapping[str, str]] = {
    "breaker": "When a failing kernel is set aside.",
    "canary": "New kernels on trial: they run in shadow, next to the chosen kernel, whose result is used.",
    "cache": "Bounds of the selection cache.",
    "perfdb": "Measured kernel times.",
    "distributed": "How ranks agree.",
    "plugins": "Which installed plugins are loaded.",
}

SETTINGS: Final = (
    # what may be chosen
    Setting("enabled", FLAG, True, "false: only fallbacks run, as inside lz.disabled()", "selection", "DISABLED"),
    Setting(
        "fallback_enabled", FLAG, True, "whether the reference may run when nothing else fits", "selection", "FALLBACK"
    ),
    Setting(
        "locks", pairs(PATTERN, maybe(KERNEL)), {}, "op glob → kernel id, null lifts a lock", "policy", "LOCK_<NAME>",
        KERNEL,
    ),
    Setting("allow", PATTERNS, (), "only these kernels or backends; empty: all", "policy", "ALLOW"),
    Setting("deny", PATTERNS, (), "never these kernels or backends; adds up over all levels", "policy", "DENY"),
    Setting("prefer", PATTERNS, (), "kernels or backends that come before all others that fit", "policy", "PREFER"),
    Setting("avoid", PATTERNS, (), "kernels or backends that lose 50 points of their score", "policy", "AVOID"),
    Setting(
        "boosts", pairs(PATTERN, _POINTS), {}, "pattern → points added to the score", "policy", "BOOST_<NAME>",
        number(unit="score points"),
    ),
    Setting("strict_mode", FLAG, False, "refuse implicit layout and dtype transforms", "selection", "STRICT"),
    Setting(
        "allow_adaptation", FLAG, True, "allow transforms, their cost counted in the score", "selection",
        "ALLOW_ADAPTATION",
    ),
    Setting("deterministic", FLAG, False, "only deterministic kernels", "dispatch", "DETERMINISTIC"),
    Setting(
        "batch_invariant", FLAG, False, "only kernels whose bits of a row do not depend on the batch", "dispatch",
        "BATCH_INVARIANT",
    ),
    Setting(
        "graph_strict_mode", FLAG, False, "in a capture, only whitelisted kernels", "selection", "GRAPH_STRICT_MODE"
    ),
    Setting("graph_whitelist", PATTERNS, (), "kernels known to be safe in a capture", "selection"),
    Setting(
        "memory_headroom_mb", maybe(number(0, unit="MiB")), None, "MiB of device memory to keep free", "selection",
        "MEMORY_HEADROOM_MB",
    ),
    Setting(
        "on_first_use", words("check", "off"), "check",
        "a kernel without proof: hold its first answer against the baseline, or use it unchecked", "selection",
        "ON_FIRST_USE",
    ),
    Setting("dispatch_table", maybe(PATH), None, "table of lz solve to obey", "runtime", "DISPATCH_TABLE"),
    Setting(
        "plan_mode", FLAG, False, "lz.plan_block measures the ways through a block instead of estimating them",
        "layerzero_tune", "PLAN_MODE",
    ),
    # how it runs, and what happens when it fails
    Setting(
        "on_fault", words("raise", "fallback"), "raise", "what a locked kernel's failure does", "dispatch", "ON_FAULT"
    ),
    Setting(
        "isolation", either(_MODES, pairs(PATTERN, either(_MODES, _PROCESS))), {},
        "where backends run: one mode for all, backend → mode, or backend → mode and surroundings", "runtime",
        "ISOLATION",
    ),
    Setting(
        "jit", words("background", "block", "off"), "background",
        "a kernel that is not compiled yet: compile it in the background, make the call wait, or neither", "dispatch",
        "JIT",
    ),
    Setting("breaker.failures", _COUNT, 1, "failures that open the breaker", "health", "BREAKER_FAILURES"),
    Setting("breaker.cooldown_s", _SECONDS, 30.0, "seconds it stays open", "health", "BREAKER_COOLDOWN"),
    Setting("breaker.successes", _COUNT, 1, "good runs that close it again", "health"),
    Setting("breaker.enabled", FLAG, True, "false: nothing is set aside", "health"),
    Setting("breaker.backend_kernels", _COUNT, 3, "so many open breakers of kernels open their backend's", "health"),
    Setting("breaker.probe", FLAG, True, "run the backend's self test before it gets traffic again", "runtime"),
    Setting("breaker.probe_timeout_s", number(0.1), 60.0, "seconds that self test may take", "runtime"),
    Setting(
        "breaker.deadline_s", maybe(number(0.001)), None,
        "a call that runs longer is reported and its kernel set aside; null: none", "dispatch",
    ),
    Setting("canary.kernels", PATTERNS, (), "kernels or backends on trial", "selection"),
    Setting("canary.fraction", number(0, 1, above=True), 0.05, "share of calls on which they run as well", "dispatch"),
    Setting("canary.calls", _COUNT, 100, "good comparisons that promote one", "dispatch"),
    Setting("cache.max_entries", _COUNT, 10_000, "entries of the selection cache", "runtime", "CACHE_SIZE"),
    Setting(
        "cache.ttl_s", maybe(_SECONDS), None, "seconds an entry lives; null: for ever", "runtime", "CACHE_TTL",
        _SOME_SECONDS,
    ),
    # what was measured
    Setting("perfdb.enabled", FLAG, True, "false: no measured times, as LAYERZERO_PERFDB=off", "measurements"),
    Setting("perfdb.path", maybe(PATH), None, "file; default: in the user's cache directory", "measurements", "PERFDB"),
    Setting(
        "perfdb.shipped", FLAG, True, "false: measurements that came with packages do not rank", "measurements",
        "PERFDB_SHIPPED",
    ),
    Setting("perfdb.auto_tune", FLAG, False, "measure kernels without times in a background thread", "measurements"),
    Setting("perfdb.tune_samples", _COUNT, 20, "samples a kernel gets at least from auto_tune", "layerzero_tune"),
    Setting("perfdb.ttl_s", maybe(_SECONDS), None, "seconds a measurement is believed; null: for ever", "measurements"),
    Setting(
        "perfdb.drift_s", maybe(_SECONDS), None,
        "seconds between two checks that a measured kernel is still as fast; null: none", "measurements",
    ),
    # ranks, hub, plugins
    Setting(
        "distributed.mode", words("rank0_broadcast", "independent"), "rank0_broadcast",
        "whether ranks take the first rank's choice", "distributed",
    ),
    Setting(
        "distributed.tp_invariant", FLAG, False, "only kernels whose result does not depend on the TP size",
        "distributed",
    ),
    Setting("distributed.wait_s", _SECONDS, 1.0, "seconds a rank waits for the first rank's choice", "distributed"),
    Setting("hub", pairs(TEXT, JSON), {}, "settings of layerzero-hub, checked there", "layerzero_hub"),
    Setting(
        "plugins.allow", maybe(PATTERNS), None,
        "only these and the built-in backends; refused in a file found in the working directory", "runtime",
        "PLUGINS",
    ),
    Setting("plugins.deny", PATTERNS, (), "plugins that are never loaded", "runtime", "PLUGINS_DENY"),
    # variables alone
    Setting("", PATH, None, "policy file to use instead of the discovered ones", "policy", "CONFIG"),
    Setting("", _SOME_SECONDS, 60.0, "seconds a vendor probe may take in lz doctor", "public", "PROBE_TIMEOUT"),
    Setting(
        "", PATH, None, "file of quarantined kernels, crash markers next to it; off: none", "runtime",
        "QUARANTINE",
    ),
    Setting(
        "", _COUNT, None, "kernels compiled at a time; default: a quarter of the cores, at most 4", "dispatch",
        "JIT_WORKERS",
    ),
    Setting("", _SOME_SECONDS, 300.0, "seconds a background compile may take", "dispatch", "JIT_TIMEOUT"),
    Setting("", PATH, None, "directory of compiled kernels (made with 0700)", "plugin", "JIT_CACHE_DIR"),
    Setting("", PATH, None, "key file; only tables and packs signed with it are obeyed", "tables", "TABLE_KEY"),
    Setting("", FLAG, None, "layerzero-accel: off leaves it aside, on refuses to go without", "dispatch", "ACCEL"),
    Setting("", PATH, None, "file to write the calls of this process to, when it ends", "runtime", "RECORD"),
    Setting(
        "", FOLDERS, (), "folders or files whose definitions may run their reference code", "layerzero_verify",
        "TRUSTED_DEFINITIONS",
    ),
    Setting("", FLAG, False, "check plans at each call; the CLI shows tracebacks", "public", "DEBUG"),
    Setting("", FLAG, False, "log every selection", "runtime", "VERBOSE"),
    Setting("", PATH, None, "json or text: log to stderr in that form; else a file for JSON lines", "runtime", "LOG"),
    Setting(
        "", EXPRESSIONS, (), "leave secrets out of that log: 1, or regular expressions (separated by blanks)",
        "runtime", "REDACT",
    ),
    Setting("", PATH, None, "port or file by which lz top and Prometheus see the process", "runtime", "METRICS"),
    Setting("", PATH, None, "file for a Chrome trace of cold calls and compiles, written at end", "runtime", "TRACE"),
    Setting("", FLAG, False, "tests: the long counts of the prove lanes", "tests", "PROVE"),
    Setting("", PATH, None, "tests and benchmarks: the commit to write where git cannot tell", "tools", "COMMIT"),
    Setting("", FLAG, False, "tests: a missing tool fails instead of skipping", "tools", "REQUIRE"),
)  # fmt: skip

VARIABLES: Final = {item.variable: item for item in SETTINGS if item.variable}
_KEYED: Final = {item.key: item for item in SETTINGS if item.key}


def _top(key: str) -> tuple[Kind, Any, str]:
    if key not in GROUPS:
        return _KEYED[key].kind, _KEYED[key].default, _KEYED[key].doc
    inside = {name.partition(".")[2]: item for name, item in _KEYED.items() if name.startswith(f"{key}.")}
    rows = {name: (item.kind, item.default, item.doc) for name, item in inside.items()}
    return table(GROUPS[key], rows), {}, GROUPS[key]


POLICY: Final = {key: _top(key) for key in dict.fromkeys(key.partition(".")[0] for key in _KEYED)}
"""Top-level keys of the policy: kind, default, description. A group is one key with a table."""


def default(key: str) -> Any:
    """The default of a policy key: `canary.calls`."""
    return _KEYED[key].default
