"""Hot reload: a change is noticed, a bad file keeps the old policy."""

from __future__ import annotations

import os

import pytest

from layerzero.errors import PolicyValidationError
from layerzero.policy import load
from layerzero.policy.load import FileWatch


def write(path, text):
    """Write and move the time on: two writes may fall into one tick of the file system's clock."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    moment = max(path.stat().st_mtime_ns, before + 1_000_000)
    os.utime(path, ns=(moment, moment))


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "layerzero.yaml"
    write(path, "prefer: [a]\n")
    return path


def test_an_untouched_file_is_no_change(policy_file):
    watch = FileWatch(policy_file)
    assert not watch.poll().changed and watch.poll().layer.prefer == ("a",)


def test_new_content_of_the_same_length_is_a_change(policy_file):
    watch = FileWatch(policy_file)
    write(policy_file, "prefer: [b]\n")
    assert watch.poll().changed


def test_a_rewrite_with_equal_content_is_no_change_and_is_read_once(policy_file, monkeypatch):
    reads = []
    parse = load.from_bytes
    monkeypatch.setattr(load, "from_bytes", lambda raw, name: reads.append(name) or parse(raw, name))
    watch = FileWatch(policy_file)
    write(policy_file, "prefer: [a]\n")
    assert not watch.poll().changed and not watch.poll().changed
    assert len(reads) == 1


def test_a_good_change_is_taken_once(policy_file):
    watch = FileWatch(policy_file)
    write(policy_file, "prefer: [b, c]\n")
    first, second = watch.poll(), watch.poll()
    assert first.changed and first.layer.prefer == ("b", "c") and first.error is None
    assert not second.changed and second.layer == first.layer


def test_a_comment_is_a_new_file_but_no_new_policy(policy_file):
    watch = FileWatch(policy_file)
    write(policy_file, "prefer: [a]\n# a note\n")
    assert not watch.poll().changed


def test_a_bad_change_keeps_the_old_policy_and_reports_once_with_line_and_key(policy_file):
    watch = FileWatch(policy_file)
    write(policy_file, "version: 1\nprefr: [b]\n")
    bad = watch.poll()
    assert not bad.changed and bad.layer.prefer == ("a",)
    assert isinstance(bad.error, PolicyValidationError) and (bad.error.line, bad.error.key) == (2, "prefr")
    assert watch.poll().error is None
    write(policy_file, "prefer: [d]\n")
    assert watch.poll().layer.prefer == ("d",)


def test_a_deleted_file_keeps_the_old_policy_and_its_return_is_noticed(policy_file):
    watch = FileWatch(policy_file)
    policy_file.unlink()
    gone = watch.poll()
    assert gone.layer.prefer == ("a",) and gone.error is not None and gone.error.code == "CONFIG_FILE_MISSING"
    assert watch.poll().error is None
    write(policy_file, "prefer: [e]\n")
    assert watch.poll().layer.prefer == ("e",)


def test_the_first_load_of_a_bad_file_raises(policy_file):
    write(policy_file, "prefer: {\n")
    with pytest.raises(PolicyValidationError):
        FileWatch(policy_file)
