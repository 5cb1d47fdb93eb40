"""`lz hub lock | install | verify | list | audit | sign`. Exit codes: 0 all well, 1 something was refused, 2 usage."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from layerzero.cli.output import STYLES, Answer, Block, Cell, Line, Table, is_plain
from layerzero.cli.verbs import OK, PROBLEM, verb
from layerzero_hub.errors import refuse
from layerzero_hub.installing import Finding
from layerzero_hub.locking import Progress

__all__ = ["hub"]


@click.group("hub")
def hub() -> None:
    """Kernels from the Kernel Hub: allowed by name, locked by content, verified at every load."""


def _policy_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--policy", "policy_file", type=click.Path(path_type=Path), help="policy file instead of the discovered ones"
    )(function)


@verb(hub, "lock")
@click.argument("kernels", nargs=-1)
@_policy_option
@click.option("--no-probe", is_flag=True, help="do not run the kernels' import in a process of its own")
@click.option("--allow-rollback", is_flag=True, help="accept a build that was locked before a newer one")
@click.option("--project", type=click.Path(path_type=Path), help="lock [tool.kernels.dependencies] of a pyproject.toml")
def lock_command(
    kernels: tuple[str, ...], policy_file: Path | None, no_probe: bool, allow_rollback: bool, project: Path | None
) -> Answer:
    """Check kernels from all sides and write the hash of every byte to the lock.

    KERNELS are owner/name@version; without any, those of --project, else everything locked now is locked again at the
    newest commit of its version. A kernels.lock for the library `kernels` is written beside the lock.
    """
    from layerzero_hub import lockfile
    from layerzero_hub.compat import dependencies, write_kernels_lock
    from layerzero_hub.locking import lock_kernels
    from layerzero_hub.policy import discovered
    from layerzero_hub.remote import connect
    from layerzero_hub.store import Store

    policy = discovered(policy_file)
    known = lockfile.read(policy.lock_path) if policy.lock_path.is_file() else None
    wanted = [_wanted(text) for text in kernels] or (dependencies(project) if project else [])
    if not wanted:
        wanted = [(kernel.repo_id, kernel.version) for kernel in (known.kernels if known else ())]
    if not wanted:
        raise click.UsageError("name kernels as owner/name@version")
    with _progress() as progress:
        lock = lock_kernels(
            wanted,
            remote=connect(policy),
            policy=policy,
            store=Store(policy.store_path),
            known=known,
            probe=not no_probe,
            allow_rollback=allow_rollback,
            progress=progress,
        )
    lockfile.write(lock, policy.lock_path)
    write_kernels_lock(lock, policy.lock_path.with_name("kernels.lock"))
    rows = [
        Finding(kernel.repo_id, kernel.version, variant.name, variant.digest, "locked")
        for kernel, variant in lock.variants()
    ]
    return _answer(rows, [Line(f"wrote {policy.lock_path.name}", STYLES["ok"])])


@verb(hub, "install")
@_policy_option
@click.option("--frozen", is_flag=True, help="ask no hub: what is not in the store is an error")
@click.option("--allow-rollback", is_flag=True, help="accept a build that was locked before a newer one")
def install_command(policy_file: Path | None, frozen: bool, allow_rollback: bool) -> Answer:
    """Bring the store to what the lock says; what is there and right is not fetched again."""
    from layerzero_hub import lockfile
    from layerzero_hub.installing import install
    from layerzero_hub.policy import discovered
    from layerzero_hub.remote import connect
    from layerzero_hub.store import Store

    policy = discovered(policy_file)
    lock = lockfile.read(policy.lock_path)
    with _progress() as progress:
        found = install(
            lock,
            policy=policy,
            store=Store(policy.store_path),
            connect=None if frozen else lambda: connect(policy, lock.endpoint),
            allow_rollback=allow_rollback,
            progress=progress,
        )
    return _answer(found)


@verb(hub, "verify")
@_policy_option
@click.option("--offline", is_flag=True, help="accepted for clarity: verify never asks the hub")
def verify_command(policy_file: Path | None, offline: bool) -> Answer:
    """Hash every locked build again and compare with lock and policy. Exit code 1 when one is refused."""
    from layerzero_hub import lockfile, signing
    from layerzero_hub.installing import verify
    from layerzero_hub.policy import discovered
    from layerzero_hub.store import Store

    policy = discovered(policy_file)
    signing.check_lock(policy)
    return _answer(verify(lockfile.read(policy.lock_path), policy=policy, store=Store(policy.store_path)))


@verb(hub, "list")
@_policy_option
def list_command(policy_file: Path | None) -> Answer:
    """Show the locked kernels, whether they are in the store, and the kernels of LayerZero they give."""
    from layerzero_hub import lockfile, specs
    from layerzero_hub.policy import discovered
    from layerzero_hub.store import Store

    policy = discovered(policy_file)
    lock, store, mapped = lockfile.read(policy.lock_path), Store(policy.store_path), specs.table(policy)
    data, rows = [], []
    for kernel, variant in lock.variants():
        ids = sorted(one.kernel_id for one in mapped.values() if one.digest == variant.digest)
        state = "in store" if store.installed(variant) else "not installed"
        refused = next((one.refused for one in mapped.values() if one.digest == variant.digest), ())
        entry = Finding(kernel.repo_id, kernel.version, variant.name, variant.digest, state, refused)
        data.append({**entry.to_json(), "commit": kernel.commit, "kernels": ids})
        rows.append((f"{kernel.repo_id}@{kernel.version}", variant.name, state, variant.digest[:19], "\n".join(ids)))
    blocks: list[Block] = [Table(("kernel", "build", "state", "digest", "gives"), rows)]
    return Answer(data, blocks if rows else [Line("nothing is locked", "dim")])


@verb(hub, "audit")
@_policy_option
def audit_command(policy_file: Path | None) -> Answer:
    """Verify, and ask the hub: publisher still trusted, branch at the locked commit, repository still the same."""
    from layerzero_hub import lockfile
    from layerzero_hub.installing import audit
    from layerzero_hub.policy import discovered
    from layerzero_hub.remote import connect
    from layerzero_hub.store import Store

    policy = discovered(policy_file)
    lock = lockfile.read(policy.lock_path)
    remote = connect(policy, lock.endpoint)
    return _answer(audit(lock, policy=policy, store=Store(policy.store_path), remote=remote))


@verb(hub, "sign")
@_policy_option
@click.option("--key", required=True, type=click.Path(path_type=Path), help="private EC key (PEM)")
def sign_command(policy_file: Path | None, key: Path) -> Answer:
    """Sign the lock, offline, with OpenSSF model-signing; policy's signing_keys then ask for it at every load."""
    from layerzero_hub.policy import discovered
    from layerzero_hub.signing import sign_lock

    policy = discovered(policy_file)
    target = sign_lock(policy.lock_path, key)
    return Answer({"signature": str(target)}, [Line(f"wrote {target.name}", STYLES["ok"])])


# -- words ----------------------------------------------------------------------------------------------------------
def _wanted(text: str) -> tuple[str, int]:
    repo_id, _, version = text.partition("@")
    if not version.isascii() or not version.isdigit():
        raise refuse("HUB_ID_INVALID", text, detail="owner/name@version, for example org/fast-norm@1")
    return repo_id, int(version)


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


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on standard error for somebody who watches; nothing when piped."""
    if is_plain(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(name: str, came: int, total: int) -> None:
            bar.update(task, description=name, completed=came, total=total)

        yield update
