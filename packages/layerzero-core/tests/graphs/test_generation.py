"""SM versions to generations, tensor-core generations and instruction families."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.errors import CapabilitiesError
from layerzero.model.device import DEFAULT_GENERATIONS, DeviceSpec, GenerationMap
from layerzero.model.enums import GPUGeneration, InstructionFamily
from layerzero.registry.capabilities import load_capabilities

G = GPUGeneration
MMA, WGMMA, TCGEN05 = InstructionFamily.MMA, InstructionFamily.WGMMA, InstructionFamily.TCGEN05


@pytest.mark.req("R-CORE-07")
def test_generations_are_ordered_by_age() -> None:
    assert G.TURING < G.AMPERE < G.ADA_LOVELACE < G.HOPPER < G.BLACKWELL
    assert {"TURING", "AMPERE", "ADA_LOVELACE", "HOPPER", "BLACKWELL"} <= set(G.__members__)


@pytest.mark.req("R-DEV-01")
@pytest.mark.parametrize(
    ("sm", "generation"),
    [(75, G.TURING), (80, G.AMPERE), (86, G.AMPERE), (89, G.ADA_LOVELACE), (90, G.HOPPER), (100, G.BLACKWELL)],
)
def test_sm_version_gives_its_generation(sm: int, generation: GPUGeneration) -> None:
    assert DEFAULT_GENERATIONS.lookup(sm).generation is generation
    assert DeviceSpec.for_sm(sm).gpu_generation is generation


@pytest.mark.req("R-GEN-04")
@pytest.mark.parametrize(
    ("low", "high", "generation"),
    [
        (75, 79, G.TURING), (80, 87, G.AMPERE), (89, 89, G.ADA_LOVELACE), (90, 99, G.HOPPER), (100, 130, G.BLACKWELL),
    ],
)  # fmt: skip
def test_every_sm_of_a_range_has_the_same_generation(low: int, high: int, generation: GPUGeneration) -> None:
    found = {DEFAULT_GENERATIONS.lookup(sm).generation for sm in range(low, high + 1)}
    assert found == {generation}
    assert DEFAULT_GENERATIONS.lookup(low - 1).generation is not generation


@pytest.mark.req("R-GEN-01")
@pytest.mark.parametrize("sm", [100, 101, 103, 110, 120, 121])
def test_sm100_and_newer_are_blackwell(sm: int) -> None:
    assert DEFAULT_GENERATIONS.lookup(sm).generation is G.BLACKWELL


@pytest.mark.req("R-DEV-02")
@pytest.mark.parametrize("sm", [None, 0, -1, 35, 70, 72, 88])
def test_unknown_sm_is_unknown_and_raises_nothing(sm: int | None) -> None:
    assert DEFAULT_GENERATIONS.lookup(sm).generation is G.UNKNOWN


@pytest.mark.req("R-DEV-02", "R-CORE-20")
@given(st.one_of(st.none(), st.integers()))
def test_any_integer_has_a_row(sm: int | None) -> None:
    row = DEFAULT_GENERATIONS.lookup(sm)
    assert 0 <= row.tensor_core_generation <= 5


@pytest.mark.req("R-DEV-03")
@pytest.mark.parametrize(("sm", "generation"), [(75, 3), (80, 3), (86, 3), (89, 3), (90, 4), (100, 5), (120, 5)])
def test_default_tensor_core_generation_is_the_specified_one(sm: int, generation: int) -> None:
    assert DEFAULT_GENERATIONS.lookup(sm).tensor_core_generation == generation


@pytest.mark.parametrize(
    ("sm", "families"),
    [
        (80, {MMA}), (89, {MMA}), (90, {MMA, WGMMA}), (100, {MMA, TCGEN05}), (103, {MMA, TCGEN05}),
        (110, {MMA, TCGEN05}), (120, {MMA}), (121, {MMA}), (70, set()), (88, set()),
    ],
)  # fmt: skip
def test_instruction_families_follow_the_hardware_not_the_number(sm: int, families: set[InstructionFamily]) -> None:
    assert DEFAULT_GENERATIONS.lookup(sm).families == families


@pytest.mark.req("R-DEV-08", "R-DEV-03")
def test_descriptor_overrides_a_range_and_leaves_the_rest() -> None:
    real = DEFAULT_GENERATIONS.override({"75-79": {"tensor_core_generation": 2}, "89": {"tensor_core_generation": 4}})
    assert real.lookup(75).tensor_core_generation == 2
    assert real.lookup(75).generation is G.TURING
    assert real.lookup(75).families == {MMA}
    assert real.lookup(89).tensor_core_generation == 4
    assert real.lookup(80) == DEFAULT_GENERATIONS.lookup(80)
    assert DEFAULT_GENERATIONS.lookup(75).tensor_core_generation == 3


@pytest.mark.req("R-DEV-08")
def test_descriptor_can_name_an_unknown_sm() -> None:
    extended = DEFAULT_GENERATIONS.override(
        {"88": {"generation": "ampere", "tensor_core_generation": 3, "instruction_families": ["mma"]},
         "130+": {"instruction_families": ["mma", "tcgen05"]}}
    )  # fmt: skip
    assert extended.lookup(88).generation is G.AMPERE
    assert extended.lookup(999).families == {MMA, TCGEN05}
    assert DeviceSpec.for_sm(88, generations=extended).gpu_generation is G.AMPERE


def test_the_last_override_wins_over_earlier_ones() -> None:
    first = DEFAULT_GENERATIONS.override({"90": {"tensor_core_generation": 1}})
    assert first.override({"90": {"tensor_core_generation": 2}}).lookup(90).tensor_core_generation == 2


@pytest.mark.req("R-DEV-08", "R-CORE-20")
@pytest.mark.parametrize(
    ("descriptor", "key"),
    [
        ({"nine": {}}, "generation_map"),
        ({"90-80": {}}, "generation_map.90-80"),
        ({"90": {"generation": "PASCAL2"}}, "generation_map.90.generation"),
        ({"90": {"tensor_core_generation": 6}}, "generation_map.90.tensor_core_generation"),
        ({"90": {"tensor_core_generation": True}}, "generation_map.90.tensor_core_generation"),
        ({"90": {"instruction_families": ["wmma"]}}, "generation_map.90.instruction_families[0]"),
        ({"90": {"instruction_families": "mma"}}, "generation_map.90.instruction_families"),
        ({"90": {"famlies": []}}, "generation_map.90.famlies"),
        ({"90": [1]}, "generation_map.90"),
    ],
)
def test_a_wrong_descriptor_is_refused_with_its_key(descriptor: dict[str, object], key: str) -> None:
    with pytest.raises(CapabilitiesError) as caught:
        load_capabilities({"schema_version": "1.0", "backend": "mine", "ops": {}, "generation_map": descriptor})
    assert caught.value.key == key


@pytest.mark.req("R-DEV-08")
@pytest.mark.parametrize("key", ["nine", "90-80"])
def test_a_wrong_range_is_refused_with_its_key(key: str) -> None:
    with pytest.raises(CapabilitiesError) as caught:
        GenerationMap().override({key: {}})
    assert caught.value.key == f"generations.{key}"


@pytest.mark.req("R-DEV-07", "R-ENV-01")
@pytest.mark.parametrize(
    ("sm", "fp16", "bf16", "tf32", "fp8"),
    [
        (70, True, False, False, False), (75, True, False, False, False), (80, True, True, True, False),
        (86, True, True, True, False), (89, True, True, True, True), (90, True, True, True, True),
        (100, True, True, True, True), (120, True, True, True, True),
    ],
)  # fmt: skip
def test_dtype_support_follows_from_the_sm(sm: int, fp16: bool, bf16: bool, tf32: bool, fp8: bool) -> None:
    spec = DeviceSpec.for_sm(sm)
    found = (spec.supports_fp16, spec.supports_bf16, spec.supports_tf32, spec.supports_fp8)
    assert found == (fp16, bf16, tf32, fp8)
