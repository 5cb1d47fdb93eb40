"""`lz hub lock | install | verify | list | audit | sign | diff | versions | remove | prune`.

Exit codes: 0 all well, 1 something was refused, 2 usage.
"""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import STYLES, Answer, Block, Cell, Line, Table, progress_bar, show
from layerzero_cli.verbs import OK, PROBLEM, verb
from layerzero_hub import lockfile, signing
from layerzero_hub.errors import refuse
from layerzero_hub.installing import Finding, audit, install, prune, verify
from layerzero_hub.lockfile import Lock, expiry
from layerzero_hub.locking import lock_kernels, refuse_cheats, save, without
from layerzero_hub.names import check_repo_id
from layerzero_hub.policy import HubPolicy, discovered
from layerzero_hub.probe import Prober
from layerzero_hub.remote import connect
from layerzero_hub.signing import Change, Memory, changes
from layerzero_hub.store import Store


@click.group("hub")
def hub() -> None:
    """Kernels from the Kernel Hub: allowed by name, locked by content, verified at every load."""


def _verb(name: str) -> Callable[[Callable[..., Answer]], Any]:
    """A verb of `lz hub` that is given a policy: with `--policy FILE` that of the file, else the discovered one."""

    def declare(function: Callable[..., Answer]) -> Any:
        @verb(hub, name)
        @click.option(
            "--policy", "file", type=click.Path(path_type=Path), help="policy file instead of the discovered ones"
        )
        @functools.wraps(function)
        def run(file: Path | None, **given: Any) -> Answer:
            return function(policy=discovered(file), **given)

        return run

    return declare


@_verb("lock")
@click.argument("kernels", nargs=-1)
@click.option("--no-probe", is_flag=True, help="do not run the kernels' import in a process of its own")
@click.option("--allow-rollback", is_flag=True, help="accept a build that was locked before a newer one")
@click.option("--project", type=click.Path(path_type=Path), help="lock [tool.kernels.dependencies] of a pyproject.toml")
@click.option("--variant", "variants", multiple=True, help="lock these builds too, for other machines; '*' is all")
@click.option("--expires", help="days until the lock is over, or 'never'; without it the known lock's end is kept")
@click.option("--fresh", is_flag=True, help="keep nothing of the lock that is there")
def lock_command(
    kernels: tuple[str, ...],
    policy: HubPolicy,
    no_probe: bool,
    allow_rollback: bool,
    project: Path | None,
    variants: tuple[str, ...],
    expires: str | None,
    fresh: bool,
) -> Answer:
    """Check kernels from all sides and write the hash of every byte to the lock.

    KERNELS are owner/name@version; without any, those of --project, else everything locked now is locked again at the
    newest commit of its version. A kernels.lock for the library `kernels` is written beside the lock. Entries of a
    lock that is badly signed, or that nobody named, are not kept: the command stops, and --fresh begins anew.
    """
    known = None if fresh else signing.read_known(policy, allow_rollback=allow_rollback)
    until = None if expires is None else _expiry(expires)
    wanted = [_wanted(text) for text in kernels] or (dependencies(project) if project else [])
    if not wanted:
        wanted = [kernel.key for kernel in (known.kernels if known else ())]
    if not wanted:
        raise click.UsageError("name kernels as owner/name@version")
    with progress_bar("bytes") as progress, Prober() as prober:
        lock = lock_kernels(
            wanted,
            connect(policy),
            prober=None if no_probe else prober,
            known=known,
            allow_rollback=allow_rollback,
            variants=variants,
            expires=until,
            progress=progress,
        )
    save(lock, policy)
    notes = prober.notes if no_probe else (*prober.notes, *refuse_cheats(lock, policy))
    rows = [Finding.of(kernel, variant, "locked", notes=notes) for kernel, variant in lock.variants()]
    said = [Line(f"probe: {note}", STYLES["warn"]) for note in notes]
    return _answer(rows, [_written(lock, policy), *said])


@_verb("install")
@click.option("--frozen", is_flag=True, help="ask no hub: what is not in the store is an error")
@click.option("--allow-rollback", is_flag=True, help="accept a lock that is older than one seen here")
@click.option("--everywhere", is_flag=True, help="also the builds for other machines, to ship the store to them")
def install_command(policy: HubPolicy, frozen: bool, allow_rollback: bool, everywhere: bool) -> Answer:
    """Bring the store to what the lock says; what is there and right is not fetched again."""
    lock = signing.read_lock(policy, allow_rollback=allow_rollback)
    with progress_bar("bytes") as progress:
        found = install(
            lock,
            policy,
            connect=None if frozen else lambda: connect(policy, lock.endpoint),
            allow_rollback=allow_rollback,
            everywhere=everywhere,
            progress=progress,
        )
    return _answer(found)


@_verb("verify")
@click.option("--offline", is_flag=True, help="accepted for clarity: verify never asks the hub")
def verify_command(policy: HubPolicy, offline: bool) -> Answer:
    """Hash every locked build again and compare with lock and policy. Exit code 1 when one is refused."""
    return _answer(verify(signing.read_lock(policy), policy))


@_verb("list")
def list_command(policy: HubPolicy) -> Answer:
    """Show the locked kernels, whether they are in the store, and the kernels of LayerZero they give."""
    from layerzero_hub import bound  # what it needs of the core, no other verb does

    lock, store = signing.read_lock(policy), Store(policy.store_path)
    mapped, problems = bound.survey(policy, lock)
    data, rows = [], []
    for kernel, variant in lock.variants():
        given = [one for one in mapped.values() if one.digest == variant.digest]
        ids = sorted(one.kernel_id for one in given)
        state = "in store" if store.installed(variant) else "not installed"
        entry = Finding.of(kernel, variant, state, given[0].refused if given else ())
        data.append({**entry.to_json(), "commit": kernel.commit, "kernels": ids})
        rows.append((str(kernel), variant.name, state, variant.digest[:19], "\n".join(ids)))
    blocks: list[Block] = [Table(("kernel", "build", "state", "digest", "gives"), rows)]
    blocks += [Line(f"{item.code.value}: {item.message}", STYLES["fail"]) for item in problems]
    return Answer(data, blocks if rows else [Line("nothing is locked", "dim")])


@_verb("audit")
def audit_command(policy: HubPolicy) -> Answer:
    """Verify, and ask the hub: publisher still trusted, branch at the locked commit, repository still the same."""
    lock = signing.read_lock(policy)
    return _answer(audit(lock, connect(policy, lock.endpoint)))


@_verb("sign")
@click.option("--key", required=True, type=click.Path(path_type=Path), help="private EC key (PEM)")
@click.option("--password-file", type=click.Path(path_type=Path), help="file that holds the password of the key")
@click.option("--yes", is_flag=True, help="do not ask")
def sign_command(policy: HubPolicy, key: Path, password_file: Path | None, yes: bool) -> Answer:
    """Show what changed since the last signed lock, then sign it, offline, with OpenSSF model-signing.

    Only a lock that is whole and allowed by the policy is signed. Policy's signing_keys then ask for the signature at
    every load. In a terminal the command asks before it signs.
    """
    raw = lockfile.read_bytes(policy.lock_path)
    lock = signing.checked_for_signing(lockfile.parse(raw), policy)
    found, blocks = _changed(Memory(policy).last_signed(), lock, "the last signed lock")
    if sys.stdin.isatty() and not yes:
        show(blocks, sys.stderr)
        click.confirm("sign this lock?", abort=True, err=True)
    target = signing.sign_lock(policy, key, raw=raw, password=_password(password_file))
    data = {"signature": str(target), "serial": lock.serial, "changes": [asdict(one) for one in found]}
    return Answer(data, [*blocks, Line(f"wrote {target.name}", STYLES["ok"])])


@_verb("diff")
@click.argument("older", required=False, type=click.Path(path_type=Path))
def diff_command(policy: HubPolicy, older: Path | None) -> Answer:
    """Show what the lock changes: against the lock file OLDER, else against the one last signed on this machine."""
    old = lockfile.read(older) if older else Memory(policy).last_signed()
    name = older.name if older else "the last signed lock"
    found, blocks = _changed(old, lockfile.read(policy.lock_path), name)
    return Answer([asdict(one) for one in found], blocks)


@_verb("versions")
@click.argument("repo_id")
def versions_command(policy: HubPolicy, repo_id: str) -> Answer:
    """List the versions the hub offers of an allowed kernel, and which of them the lock holds."""
    policy.check_allowed(repo_id)
    known = signing.read_known(policy)
    locked = {kernel.version: kernel.commit for kernel in (known.kernels if known else ()) if kernel.repo_id == repo_id}
    data, rows = [], []
    for version, commit in connect(policy).versions(repo_id).items():
        held = locked.get(version, "")
        state = "locked" if held == commit else "locked at an older commit" if held else ""
        data.append({"version": version, "commit": commit, "locked": held or None})
        rows.append((f"{repo_id}@{version}", commit[:12], state))
    blocks: list[Block] = [Table(("kernel", "commit", ""), rows)]
    return Answer(data, blocks if rows else [Line("the hub offers no version", "dim")])


@_verb("remove")
@click.argument("kernels", nargs=-1, required=True)
def remove_command(policy: HubPolicy, kernels: tuple[str, ...]) -> Answer:
    """Take KERNELS (owner/name or owner/name@version) out of the lock; their builds stay until `lz hub prune`."""
    known = signing.read_known(policy)
    if known is None:
        raise refuse("HUB_LOCK_MISSING", policy.lock_path.name)
    lock = without(known, [_wanted(text) if "@" in text else (text, None) for text in kernels], policy)
    save(lock, policy)
    found, blocks = _changed(known, lock, "the lock before")
    return Answer([asdict(one) for one in found], [*blocks, _written(lock, policy)])


@_verb("prune")
@click.option("--dry-run", is_flag=True, help="only say what would go")
def prune_command(policy: HubPolicy, dry_run: bool) -> Answer:
    """Remove builds from the store that neither this lock nor another one seen with this store names."""
    found = prune(signing.read_lock(policy), policy, dry_run=dry_run)
    rows = [(digest[:19], f"{size / 2**20:.1f} MiB") for digest, size in found]
    word = "would go" if dry_run else "gone"
    blocks: list[Block] = [Table(("digest", word), rows)] if rows else [Line("nothing to remove", "dim")]
    return Answer([{"digest": digest, "bytes": size, "removed": not dry_run} for digest, size in found], blocks)


@_verb("quarantine")
@click.option("--lift", "digest", metavar="DIGEST", help="take this digest out of quarantine")
def quarantine_command(policy: HubPolicy, digest: str | None) -> Answer:
    """Show the builds that did harm when loaded on this machine, or lift one after looking into it."""
    store = Store(policy.store_path)
    if digest is not None and not store.lift(digest):
        raise refuse("HUB_NOT_LOCKED", digest, detail="it is not in quarantine")
    known = store.quarantined()
    table = Table(("digest", "why"), sorted(known.items()))
    lifted: list[Block] = [Line(f"lifted {digest}", STYLES["ok"])] if digest else []
    return Answer({"quarantined": known}, [*lifted, table if known else Line("nothing is in quarantine", "dim")])


# -- words ----------------------------------------------------------------------------------------------------------
def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _wanted(text: str) -> tuple[str, int]:
    repo_id, _, version = text.partition("@")
    if not _is_number(version):
        raise refuse("HUB_ID_INVALID", text, detail="owner/name@version, for example org/fast-norm@1")
    return repo_id, int(version)


def dependencies(project: Path) -> list[tuple[str, int]]:
    """`[tool.kernels.dependencies]` of a pyproject.toml: repository → version."""
    try:
        data: Any = tomllib.loads(project.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse("HUB_POLICY_INVALID", "dependencies", f"{project.name}: {error}") from None
    table = data.get("tool", {}).get("kernels", {}).get("dependencies", {})
    found = []
    for repo_id, version in table.items():
        text = str(version.get("version") if isinstance(version, dict) else version)
        if not _is_number(text):
            raise refuse("HUB_POLICY_INVALID", "dependencies", f"{repo_id}: a version number, not {text}")
        found.append((check_repo_id(repo_id), int(text)))
    return found


def _expiry(text: str) -> str:
    if text == "never":
        return ""
    if not _is_number(text) or not 0 < int(text[:9]) <= 36500:
        raise click.BadParameter("a number of days, or 'never'", param_hint="--expires")
    return expiry(int(text))


def _password(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError):
        raise refuse("HUB_KEY_INVALID", path.name, "the password file cannot be read") from None


def _changed(old: Lock | None, new: Lock, name: str) -> tuple[tuple[Change, ...], list[Block]]:
    found = changes(old, new)
    if not found:
        return found, [Line(f"nothing changed since {name}", "dim")]
    above = f"changes since {name}:" if old else f"{name} is not known here; everything in the lock:"
    rows = [(one.what, one.before[:19] or "-", "→", one.after[:19] or "-") for one in found]
    return found, [Line(above), Table(("", "before", "", "after"), rows)]


def _written(lock: Lock, policy: HubPolicy) -> Line:
    text = f"wrote {policy.lock_path.name}, serial {lock.serial}"
    if policy.signing_keys:
        return Line(f"{text}; it counts once it is signed: lz hub sign", STYLES["warn"])
    if not policy.lock:
        return Line(f"{text}; it counts once hub.lock of a user-level policy file names it", STYLES["warn"])
    return Line(text, STYLES["ok"])


def _answer(found: Sequence[Finding], above: Sequence[Block] = ()) -> Answer:
    rows = []
    for finding in found:
        style = STYLES["ok" if finding.ok else "fail"]
        why = "\n".join(f"{item.code.value}: {item.message}\n→ {item.hint}" for item in finding.reasons)
        name = f"{finding.repo_id}@{finding.version}"
        rows.append((Cell(finding.state, style), name, finding.variant, finding.digest[:19], why))
    table = Table(("", "kernel", "build", "digest", ""), rows)
    code = OK if all(finding.ok for finding in found) else PROBLEM
    return Answer([finding.to_json() for finding in found], [*above, table], code)
