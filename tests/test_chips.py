"""The chips' limits against JAX's own table and their device kinds against JAX's topologies."""

import subprocess
import sys

import pytest
from jax.experimental.pallas import tpu as pltpu

from kdagen.chips import CHIPS, chip_for_device_kind, get_chip

JAX_VERSION = {"v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "v7x": "7x"}


def jax_info(chip):
    version = pltpu.ChipVersion(JAX_VERSION[chip.name])
    return pltpu.get_tpu_info_for_chip(version, chip.cores_per_device)


@pytest.mark.parametrize("name", CHIPS)
def test_limits_are_those_of_jax(name):
    chip = get_chip(name)
    info = jax_info(chip)
    assert chip.vmem_bytes == info.vmem_capacity_bytes
    assert chip.smem_bytes == info.smem_capacity_bytes
    assert chip.mxu_size == info.mxu_column_size
    assert chip.mxu_count == info.num_mxus
    assert chip.cores_per_chip == info.chip_version.num_physical_tensor_cores_per_chip
    assert (chip.cores_per_device > 1) == info.is_megacore
    assert chip.default_vmem_limit_bytes <= chip.usable_vmem_bytes <= chip.vmem_bytes


@pytest.mark.parametrize("name", CHIPS)
def test_nominal_parameters_follow_from_the_table(name):
    chip = get_chip(name)
    info = jax_info(chip)
    passes = 2 if chip.mxu_size == 256 else 1
    clock = info.bf16_ops_per_second / (2 * passes * chip.mxu_count * chip.mxu_size**2)
    assert chip.nominal.effective_hz == pytest.approx(clock, rel=0.01)
    assert chip.nominal.hbm_bytes_per_second == pytest.approx(
        info.mem_bw_bytes_per_second, rel=0.01
    )


@pytest.mark.parametrize("name", CHIPS)
def test_calibrated_rates_do_not_exceed_the_hardware(name):
    chip = get_chip(name)
    fitted = chip.parameters
    assert fitted.hbm_bytes_per_second <= chip.nominal.hbm_bytes_per_second
    assert fitted.effective_hz <= chip.nominal.effective_hz
    assert chip.is_calibrated == (name in ("v5p", "v6e", "v7x"))


def test_device_kinds_name_one_chip_each():
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    for chip in CHIPS.values():
        for kind in chip.device_kinds:
            assert chip_for_device_kind(kind) is chip
    assert chip_for_device_kind("cpu") is None
    assert chip_for_device_kind("TPU v3") is None


def test_unknown_chip_names_the_choices():
    with pytest.raises(ValueError, match=r"'v9'.*v4, v5e, v5p, v6e, v7x"):
        get_chip("v9")


def test_importing_chips_imports_no_jax():
    code = "import sys, kdagen.chips; sys.exit(any(m.split('.')[0] == 'jax' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
