"""A hub that lies, a repository that is not what it seems: refused with a code of its own, before any code runs.

Where the bare library takes the bait, the test shows that first.
"""

from __future__ import annotations

import json

import pytest

from layerzero_hub.names import check_path, check_paths, check_repo_id
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
build, universal_kernel = _kernels.build, _kernels.universal_kernel

BARE = "value = kernels.get_kernel({repo!r}, version=1, trust_remote_code={trust}).__name__"


def bare(repo: str, trust: bool = True) -> str:
    return BARE.format(repo=repo, trust=trust)


@pytest.mark.req("R-HUB-01")
def test_a_repository_that_nobody_allowed(bench, victim):
    repo = bench.publish()
    assert "error" not in str(victim.run(bare(repo, trust=False)))  # any trusted publisher will do
    bench.settings["allow"] = []
    with bench.refused("HUB_NOT_ALLOWED"):
        bench.lock(repo)


@pytest.mark.req("R-HUB-01")
def test_deny_beats_allow(bench):
    repo = bench.publish()
    bench.settings["deny"] = [repo.split("/")[0] + "/*"]
    with bench.refused("HUB_DENIED"):
        bench.lock(repo)


@pytest.mark.req("R-HUB-01")
@pytest.mark.parametrize("step", ["load", "install", "lock"])
def test_a_lock_of_a_repository_that_is_allowed_no_more_serves_nobody(bench, step):
    repo = bench.publish()
    bench.lock(repo)
    bench.settings["allow"] = [repo + "-other", repo.upper()]  # allowed is a name, letter by letter
    run = {"load": lambda: bench.load(repo), "install": bench.install, "lock": lambda: bench.lock(repo)}
    with bench.refused("HUB_NOT_ALLOWED"):
        run[step]()


@pytest.mark.req("R-HUB-01")
def test_deny_comes_too_late_for_a_lock_and_still_stops_the_load(bench):
    repo = bench.publish()
    bench.lock(repo)
    bench.settings["deny"] = [repo.upper()]  # case does not help
    with bench.refused("HUB_DENIED"):
        bench.load(repo)


@pytest.mark.req("R-HUB-04")
@pytest.mark.parametrize(
    "repo",
    ["../evil", "org/../../etc", "org/na\u043ce", "org", "org/a/b", "/abs/x", "org/name\n", "org/.hidden", 7, "o--g/x"],
)
def test_ids_that_are_none(bench, repo):
    with bench.refused("HUB_ID_INVALID"):
        check_repo_id(repo)
    bench.lock(bench.publish())
    asked, before = len(bench.hub.asked), bench.policy.lock_path.read_bytes()
    for step in (bench.lock, bench.load):
        with bench.refused("HUB_ID_INVALID"):
            step(repo)
    assert len(bench.hub.asked) == asked, "the hub is not asked for such a name"
    assert bench.policy.lock_path.read_bytes() == before


def test_another_endpoint(bench, monkeypatch):
    repo = bench.publish()
    bench.settings["endpoints"] = ["https://hub.example"]
    with bench.refused("HUB_ENDPOINT_REFUSED"):
        bench.lock(repo)


def test_an_untrusted_publisher(bench, victim):
    repo = bench.publish(org="stranger")
    bench.hub.trusted["stranger"] = False
    assert "not from a trusted publisher" in victim.run(bare(repo, trust=False))["error"]
    with bench.refused("HUB_PUBLISHER_UNTRUSTED"):
        bench.lock(repo)


def test_a_dependency_that_nobody_allowed(bench):
    rogue = bench.publish("rogue")
    repo = bench.publish(**{"kernel-depends": [{"repo-id": rogue, "version": 1}]})
    bench.settings["allow"].remove(rogue)
    with bench.refused("HUB_DEPENDENCY_NOT_ALLOWED"):
        bench.lock(repo)


def test_a_dependency_of_a_dependency_of_itself(bench):
    repo = "ring/one"
    bench.put(repo, universal_kernel(id="_lz_ring", **{"kernel-depends": [{"repo-id": repo, "version": 1}]}))
    with bench.refused("HUB_METADATA_INVALID"):
        bench.lock(repo)


def test_a_repository_that_is_redirected(bench, victim):
    other, repo = bench.publish("other", org="elsewhere"), "moved/norm"
    bench.hub.trusted["moved"], bench.hub.trusted["elsewhere"] = True, False
    bench.settings["allow"] = [repo]
    bench.hub.attack.redirect = {"kernels/moved/norm": f"kernels/{other}"}
    assert "error" not in str(victim.run(bare(repo, trust=False)))  # the trust of the old name covers the new one
    with bench.refused("HUB_REPO_REDIRECTED"):
        bench.lock(repo)


def test_a_hub_that_answers_for_another_repository(bench):
    repo = bench.publish()
    bench.hub.attack.identity = {repo: "other/name"}
    with bench.refused("HUB_REPO_REDIRECTED"):
        bench.lock(repo)


# -- names of files -------------------------------------------------------------------------------------------------
@pytest.mark.req("R-HUB-04")
@pytest.mark.parametrize(
    "path",
    [
        "build/torch-universal/../../../evil.py",
        "/etc/passwd",
        "build/torch-universal/a\\b.py",
        "C:/windows",
        "build/torch-universal/a\u202eyp.py",
        "build/torch-universal/\u0430.py",
        "build/torch-universal/__pycache__/x.py",
        "build/torch-universal/./a.py",
        "build/torch-universal//a.py",
        "build/torch-universal/nul.py",
        "build/torch-universal/a.py.",
        "build/torch-universal/a\0b",
    ],
)
def test_paths_that_lead_elsewhere(bench, path):
    repo = bench.publish()
    bench.hub.attack.tree = lambda files: [*files, {**files[0], "path": path}]
    with bench.refused("HUB_PATH_UNSAFE"):
        bench.lock(repo)
    assert not (bench.folder.parent / "evil.py").exists()


@pytest.mark.parametrize("name", ["a.pyc", "sub/b.PYC", "site.pth", "c.pyo"])
def test_bytecode_and_path_files(bench, name):
    files = universal_kernel()
    bench.put("org/bytecode", {**files, f"build/torch-universal/{name}": b"x"})
    with bench.refused("HUB_FILE_KIND_REFUSED"):
        bench.lock("org/bytecode")


@pytest.mark.parametrize("pair", [("A.py", "a.py"), ("Sub/x.py", "sub/y.py"), ("one", "one/two"), ("x.PY", "X.py")])
def test_paths_that_are_one_file_on_some_machines(bench, pair):
    with bench.refused("HUB_PATH_COLLISION"):
        check_paths(pair)


def test_ordinary_paths_pass():
    check_paths(["__init__.py", "sub/__init__.py", "sub/kernel_cpu-1.0.abi3.so", "metadata.json", "a b.txt"])
    assert check_path("sub/x.py") == "sub/x.py"


# -- bytes ----------------------------------------------------------------------------------------------------------
@pytest.mark.req("R-HUB-05")
def test_a_file_that_the_digest_does_not_cover(bench, victim):
    files = universal_kernel(id="_lz_uncovered", extra="def go():\n    from . import late\n    return late.VALUE\n")
    bench.put("org/uncovered", {**files, "build/torch-universal/late.py": b"VALUE = 'unsigned'"})
    assert victim.run("value = kernels.get_kernel('org/uncovered', version=1).go()") == "unsigned"
    with bench.refused("HUB_DIGEST_INCOMPLETE"):
        bench.lock("org/uncovered")


@pytest.mark.req("R-HUB-05")
def test_another_body_of_the_same_size(bench, victim):
    repo = bench.publish()
    bench.hub.attack.body = lambda path, data: (
        data.replace(b"scaled", b"scalex") if path.endswith("init__.py") else data
    )
    assert victim.run(f"value = hasattr(kernels.get_kernel({repo!r}, version=1), 'scalex')") is True
    with bench.refused("HUB_HASH_MISMATCH"):
        bench.lock(repo)


def test_a_body_that_is_cut(bench):
    repo = bench.publish()
    bench.hub.attack.truncate = True
    with bench.refused("HUB_SIZE_MISMATCH"):
        bench.lock(repo)


def test_a_body_without_an_end(bench):
    repo = bench.publish()
    bench.hub.attack.endless = True
    with bench.refused("HUB_TOO_LARGE"):
        bench.lock(repo)


def test_a_kernel_larger_than_allowed(bench):
    repo = bench.publish()
    bench.settings["max_bytes"] = 100
    with bench.refused("HUB_TOO_LARGE"):
        bench.lock(repo)


def test_a_head_that_lies_about_the_size(bench):
    repo = bench.publish()
    bench.hub.attack.size = 5
    with bench.refused("HUB_SIZE_MISMATCH"):
        bench.lock(repo)


def test_a_server_that_says_nothing(bench):
    repo = bench.publish()
    bench.settings["timeout"] = 0.3
    bench.hub.attack.hang = True
    with bench.refused("HUB_TIMEOUT"):
        bench.lock(repo)


def test_a_server_that_sends_a_byte_at_a_time(bench):
    repo = bench.publish()
    bench.settings["timeout"] = 0.5
    bench.hub.attack.drip = True
    with bench.refused("HUB_TIMEOUT"):
        bench.lock(repo)


def test_a_hub_that_is_not_there(bench):
    bench.settings["endpoints"] = ["http://127.0.0.1:9"]
    bench.settings["allow"] = ["org/norm"]
    from layerzero_hub.locking import lock_kernels
    from layerzero_hub.remote import connect

    with bench.refused("HUB_UNREACHABLE"):
        lock_kernels([("org/norm", 1)], connect(bench.policy), prober=bench.prober)


@pytest.mark.req("R-HUB-04")
def test_an_etag_that_is_a_path(bench, victim):
    repo = bench.publish()
    bench.hub.attack.etag = '"../../../escaped"'
    victim.run(bare(repo))
    assert list(victim.home.glob("**/escaped*")), "the bare library writes where the server says"
    before = sorted(bench.folder.parent.glob("**/*"))
    with bench.refused("HUB_ETAG_INVALID"):
        bench.lock(repo)
    written = [path for path in bench.folder.parent.glob("**/*") if path not in before and "store" not in str(path)]
    assert not [path for path in written if "escaped" in path.name]


def test_a_lie_about_the_commit(bench, victim):
    repo = bench.publish()
    bench.hub.attack.commit = "a" * 40
    victim.run(bare(repo))
    assert list(victim.home.glob(f"**/snapshots/{'a' * 40}")), "the bare library files the body under the lie"
    with bench.refused("HUB_COMMIT_MISMATCH"):
        bench.lock(repo)


@pytest.mark.req("R-HUB-02")
def test_a_branch_that_moved_after_the_lock(bench, victim):
    repo = bench.publish()
    first = bench.lock(repo).find(repo)
    changed = universal_kernel(extra="\nVERSION = 'new'\n", id="_lz_moved")
    assert bench.put(repo, changed) != first.commit
    assert victim.run(f"value = kernels.get_kernel({repo!r}, version=1).VERSION") == "new"  # one version, other code
    import shutil

    shutil.rmtree(bench.store.root)
    (finding,) = bench.install()
    assert finding.digest == next(iter(first.variants.values())).digest  # the locked commit, not the new one
    from layerzero_hub.installing import audit
    from layerzero_hub.remote import connect

    (told,) = audit(bench.read(), connect(bench.policy))
    assert [reason.code.value for reason in told.reasons] == ["HUB_BRANCH_MOVED"]


def test_a_version_that_does_not_exist(bench):
    repo = bench.publish()
    with bench.refused("HUB_REVISION_MISSING"):
        bench.lock(repo, version=9)


def test_no_build_for_this_machine(bench):
    bench.put("org/other-machine", universal_kernel(variant="torch213-cxx11-cpu-riscv-linux"))
    with bench.refused("HUB_VARIANT_MISSING"):
        bench.lock("org/other-machine")


# -- what the kernel says of itself ---------------------------------------------------------------------------------
def test_a_kernel_that_calls_itself_json(bench, victim):
    repo = bench.publish(id="json")
    assert victim.run(bare(repo)) == "json"
    assert victim.run("import sys; value = hasattr(sys.modules['json'], 'dumps')") is False
    victim.run("import importlib, sys; del sys.modules['json']; import json")
    with bench.refused("HUB_ID_TAKEN"):
        bench.lock(repo)


@pytest.mark.parametrize("taken", ["torch", "layerzero", "numpy"])
def test_ids_of_installed_modules(bench, taken):
    repo = bench.publish(id=taken)
    with bench.refused("HUB_ID_TAKEN"):
        bench.lock(repo)


def test_one_id_in_two_repositories(bench, victim):
    one, two = bench.publish("one", id="_lz_twice", extra="X = 1"), bench.publish("two", id="_lz_twice", extra="X = 2")
    victim.run(f"one = kernels.get_kernel({one!r}, version=1); kernels.get_kernel({two!r}, version=1)")
    assert victim.run("import sys; value = sys.modules['_lz_twice'].X") == 2  # the second stands in for the first
    bench.lock(one)
    with bench.refused("HUB_ID_TAKEN"):
        bench.lock(two)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"id": "not a name"}, "id"),
        ({"version": None}, "version"),
        ({"name": "Wrong Name"}, ""),
        ({"digest": {"algorithm": "md5", "files": {}}}, ""),
    ],
)
def test_metadata_that_is_wrong(bench, change, word):
    repo = bench.publish(metadata=change)
    with bench.refused("HUB_METADATA_INVALID") as caught:
        bench.lock(repo)
    assert word in str(caught.value)


def test_metadata_with_a_key_twice(bench):
    files = build({"__init__.py": b""}, "torch-universal", id="_lz_double")
    path = "build/torch-universal/metadata.json"
    text = files[path].decode().replace('"id"', '"id": "json", "id"', 1)
    assert json.loads(text)["id"] == "_lz_double"  # the last one wins elsewhere
    bench.put("org/double", {**files, path: text.encode()})
    with bench.refused("HUB_METADATA_INVALID"):
        bench.lock("org/double")


@pytest.mark.parametrize(
    "answer", [[], "text", {"branches": 7}, {"branches": [{"name": "v1", "targetCommit": "main"}]}]
)
def test_answers_of_other_shapes(bench, answer, monkeypatch):
    from layerzero_hub.errors import HubError
    from layerzero_hub.remote import Web

    repo = bench.publish()
    honest = Web.json
    monkeypatch.setattr(
        Web, "json", lambda self, path: (answer, None) if path.endswith("/refs") else honest(self, path)
    )
    with pytest.raises(HubError):
        bench.lock(repo)
