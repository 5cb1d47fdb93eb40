"""A definition with several outputs: each of them is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from layerzero._ops.signature import public_op
from layerzero_verify.definitions import Options, check, open_dataset
from layerzero_verify.definitions.trace import Status


@pytest.mark.req("R-DEF-07")
@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        (lambda stream: stream, Status.PASSED),
        (lambda stream: stream[:, :1], Status.INCORRECT_SHAPE),
        (lambda stream: stream.float(), Status.INCORRECT_DTYPE),
        (lambda stream: stream * 1.1, Status.INCORRECT_NUMERICAL),
    ],
    ids=["right", "shape", "dtype", "numbers"],
)
def test_a_second_output_that_is_wrong_fails_as_the_first_would(
    sets: Any, lab: Any, spoil: Callable[[Tensor], Tensor], status: Status
) -> None:
    plain = public_op("add_rms_norm").fallback_impl
    assert plain is not None

    def faulty(*args: Any) -> Any:
        out, stream = plain(*args)
        return out, spoil(stream)

    lab.use(lab.kernel("faulty.add_rms_norm.x", faulty))
    root = sets.only("fused_add_rmsnorm_h32")
    dataset = open_dataset(root)
    options = Options(trust=(str(root),), repeats=1, backends=("faulty",))
    report = check(dataset, dataset.select(everything=True), options, sizes=("small",))
    found = [outcome for outcome in report.outcomes if outcome.solution == "faulty.add_rms_norm.x"]
    assert found and all(outcome.status is status for outcome in found), [outcome.log for outcome in found]
    assert status is Status.PASSED or all("new_residual" in outcome.log for outcome in found)
