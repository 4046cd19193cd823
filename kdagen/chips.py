"""The TPU chips kernels are generated for: limits, compiler topology and the model's calibration.

Importing this module imports neither JAX nor Pallas, so the command line and the runtime may read
it for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

MIB = 1 << 20


@dataclass(frozen=True)
class ModelParameters:
    """What the time model needs to know of one core.

    Attributes:
      effective_hz: bundles issued per second. An effective rate, fitted, and not a clock where the
        chip is calibrated.
      hbm_bytes_per_second: what the DMA queue of one core sustains, both directions together.
      dma_latency_seconds: from the issue of a DMA to its completion, beyond the transfer itself.
    """

    effective_hz: float
    hbm_bytes_per_second: float
    dma_latency_seconds: float


@dataclass(frozen=True)
class Calibration:
    """Model parameters fitted to published times on the hardware, with the error that remains.

    Attributes:
      parameters: the fitted parameters.
      mean_error, max_error: absolute relative error of predicted against measured time, as a
        fraction (0.1 is 10%), on kernels the fit had not seen: each family of kernels was left out
        in turn.
      rms_log_error: root mean square of log(predicted / measured) over the fitted points.
      points: how many measurements were fitted.
      method: what was fitted to what, in words.
    """

    parameters: ModelParameters
    mean_error: float
    max_error: float
    rms_log_error: float
    points: int
    method: str


@dataclass(frozen=True)
class Chip:
    """One TPU generation as the compiler and the kernels see it. All sizes are of one core.

    Attributes:
      name: "v4", "v5e", "v5p", "v6e" or "v7x".
      topology: the name JAX's ahead-of-time topologies give a small slice of it.
      topology_options: further keywords of ``get_topology_desc``.
      device_kinds: values of ``jax.devices()[0].device_kind`` that mean this chip.
      cores_per_chip: TensorCores on a chip.
      cores_per_device: TensorCores behind one JAX device. 2 is a megacore: a grid axis marked
        "parallel" is divided between the two.
      vmem_bytes: capacity of VMEM.
      usable_vmem_bytes: the most a kernel may ask for with ``vmem_limit_bytes``; the compiler keeps
        the rest.
      default_vmem_limit_bytes: the limit where a kernel asks for none.
      smem_bytes: capacity of scalar memory.
      mxu_size: rows and columns of one matrix unit.
      mxu_count: matrix units of a core.
      dma_granule_bytes: unit of the DMA sizes in the compiler's listings.
      branch_delay_slots: bundles that still issue after a branch.
      nominal: model parameters read off data sheets. Not fitted to anything.
      calibration: fitted parameters and their error, or None where no measurement was fitted.
    """

    name: str
    topology: str
    device_kinds: tuple[str, ...]
    cores_per_chip: int
    cores_per_device: int
    vmem_bytes: int
    usable_vmem_bytes: int
    default_vmem_limit_bytes: int
    smem_bytes: int
    mxu_size: int
    mxu_count: int
    dma_granule_bytes: int
    branch_delay_slots: int
    nominal: ModelParameters
    calibration: Calibration | None = None
    topology_options: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> ModelParameters:
        """The fitted parameters, or the nominal ones of a chip that is not calibrated."""
        return self.calibration.parameters if self.calibration else self.nominal

    @property
    def is_calibrated(self) -> bool:
        return self.calibration is not None


CALIBRATED_WITH = "0.0.52"
"""The libtpu whose schedules the models were fitted to: python benchmarks/calibrate.py --fit."""

_FITTED = (
    "issue rate and bandwidth, by least squares of the log error, to published times of tokamax's "
    "KDA backward, softmax loss, attention and layer norm; latency assumed"
)
_FITTED_WITHOUT_KDA = (
    "issue rate and bandwidth, by least squares of the log error, to published times of tokamax's "
    "softmax loss, attention and layer norm, and no KDA kernel; latency assumed"
)

# Nominal rates: clock = peak bf16 FLOP/s over 2 * mxu_count * mxu_size^2 for the chips with
# 128-wide matrix units, and the HBM bandwidth of one core, both from JAX's own table. From v6e on
# the peak counts two passes a cycle. The DMA latency is v6e's fitted one.
_CHIPS = (
    Chip(
        name="v4",
        topology="v4:2x2x1",
        # Without it the compiler takes the two cores for two devices; JAX runs v4 as megacores.
        topology_options=(("chip_config_name", "megacore"),),
        device_kinds=("TPU v4",),
        cores_per_chip=2,
        cores_per_device=2,
        vmem_bytes=16 * MIB,
        usable_vmem_bytes=16 * MIB,
        default_vmem_limit_bytes=16 * MIB,
        smem_bytes=MIB,
        mxu_size=128,
        mxu_count=4,
        dma_granule_bytes=512,
        branch_delay_slots=1,
        nominal=ModelParameters(1.05e9, 0.615e12, 0.9e-6),
    ),
    Chip(
        name="v5e",
        topology="v5e:2x2",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        cores_per_chip=1,
        cores_per_device=1,
        vmem_bytes=128 * MIB,
        usable_vmem_bytes=128 * MIB,
        default_vmem_limit_bytes=16 * MIB,
        smem_bytes=MIB,
        mxu_size=128,
        mxu_count=4,
        dma_granule_bytes=32,
        branch_delay_slots=4,
        nominal=ModelParameters(1.50e9, 0.82e12, 0.9e-6),
    ),
    Chip(
        name="v5p",
        topology="v5p:2x2x1",
        device_kinds=("TPU v5", "TPU v5p"),
        cores_per_chip=2,
        cores_per_device=2,
        vmem_bytes=64 * MIB,
        usable_vmem_bytes=64 * MIB - 64 * 1024,
        default_vmem_limit_bytes=16 * MIB,
        smem_bytes=MIB,
        mxu_size=128,
        mxu_count=4,
        dma_granule_bytes=32,
        branch_delay_slots=4,
        nominal=ModelParameters(1.75e9, 1.23e12, 0.9e-6),
        calibration=Calibration(
            parameters=ModelParameters(1.72e9, 1.01e12, 0.9e-6),
            mean_error=0.041,
            max_error=0.091,
            rms_log_error=0.043,
            points=6,
            method=_FITTED_WITHOUT_KDA,
        ),
    ),
    Chip(
        name="v6e",
        topology="v6e:2x2",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        cores_per_chip=1,
        cores_per_device=1,
        vmem_bytes=128 * MIB,
        usable_vmem_bytes=128 * MIB - 64 * 1024,
        default_vmem_limit_bytes=32 * MIB,
        smem_bytes=MIB,
        mxu_size=256,
        mxu_count=2,
        dma_granule_bytes=32,
        branch_delay_slots=4,
        nominal=ModelParameters(1.75e9, 1.64e12, 0.9e-6),
        calibration=Calibration(
            parameters=ModelParameters(1.60e9, 1.48e12, 0.9e-6),
            mean_error=0.073,
            max_error=0.163,
            rms_log_error=0.069,
            points=9,
            method=_FITTED,
        ),
    ),
    Chip(
        name="v7x",
        topology="tpu7x:2x2x1",
        device_kinds=("TPU7x",),
        cores_per_chip=2,
        cores_per_device=1,
        vmem_bytes=64 * MIB,
        usable_vmem_bytes=64 * MIB - 64 * 1024,
        default_vmem_limit_bytes=32 * MIB,
        smem_bytes=MIB,
        mxu_size=256,
        mxu_count=2,
        dma_granule_bytes=32,
        branch_delay_slots=6,
        nominal=ModelParameters(2.2e9, 3.7e12, 0.7e-6),
        calibration=Calibration(
            parameters=ModelParameters(1.77e9, 2.215e12, 0.7e-6),
            mean_error=0.075,
            max_error=0.167,
            rms_log_error=0.074,
            points=9,
            method=_FITTED,
        ),
    ),
)

CHIPS: MappingProxyType[str, Chip] = MappingProxyType({chip.name: chip for chip in _CHIPS})


def get_chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
      ValueError: there is none; the message names the choices.
    """
    try:
        return CHIPS[name]
    except KeyError:
        raise ValueError(f"chip: got {name!r}, expected one of {', '.join(CHIPS)}") from None


def chip_for_device_kind(device_kind: str) -> Chip | None:
    """The chip whose devices report ``device_kind``, or None for any other kind (a CPU, say)."""
    return next((chip for chip in _CHIPS if device_kind in chip.device_kinds), None)
