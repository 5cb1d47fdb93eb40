"""Gradients and autocast as the library reads them by itself: what torch says, in every state and thread."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch

from layerzero.dispatch import accel as seam

Q, K = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)


def test_the_library_and_torch_agree_in_every_state(native: Any) -> None:
    assert native.modes() is not None, "this torch exports the names"
    for grad, cpu, cuda in itertools.product((True, False), repeat=3):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=cpu):
            before = torch.is_autocast_enabled("cuda")
            torch.set_autocast_enabled("cuda", cuda)
            try:
                assert native.modes() == (grad, cpu or cuda)
            finally:
                torch.set_autocast_enabled("cuda", before)
    with torch.inference_mode():
        assert native.modes() == (False, False)


def test_a_mode_of_one_thread_is_not_seen_by_another(native: Any) -> None:
    found: list[Any] = []
    with torch.no_grad(), torch.autocast("cpu"):
        thread = threading.Thread(target=lambda: found.append(native.modes()))
        thread.start()
        thread.join()
        assert native.modes() == (False, True)
    assert found == [(True, False)]


@pytest.mark.parametrize("trusted", [True, False], ids=["by itself", "as Python asks"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_autocast_leads_to_python_either_way(pair: Any, native: Any, trusted: bool, kind: str) -> None:
    both = pair("attention")
    native.trust(trusted)
    try:
        assert both.hits(Q, K, K) >= 2
        before = torch.is_autocast_enabled(kind)
        torch.set_autocast_enabled(kind, True)
        try:
            assert both.hits(Q, K, K) == 0
        finally:
            torch.set_autocast_enabled(kind, before)
        with torch.no_grad():
            assert both.hits(Q, K, K) >= 2
        asked = Q.clone().requires_grad_()
        assert both.hits(asked, K, K) == 0 and both.c(asked, K, K).requires_grad
    finally:
        native.trust(True)


@pytest.mark.parametrize(
    "wrong",
    [lambda: None, lambda: (True, False), lambda: (torch.is_grad_enabled(), False), lambda: (False, True)],
    ids=["no names", "always the same", "blind to autocast", "always casting"],
)
def test_other_answers_than_torchs_are_not_trusted(wrong: Any) -> None:
    kept = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    assert not seam._answers_as_torch(wrong)
    assert kept == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))


def test_right_answers_are_trusted(native: Any) -> None:
    assert seam._answers_as_torch(native.modes)
