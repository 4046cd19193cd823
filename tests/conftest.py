"""Settings that must stand in the environment before any test module imports JAX."""

import os

# Tests run on the CPU unless the caller chose a platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Without these a compile for a TPU asks for the metadata server of a cloud machine, and a second
# process that loads libtpu aborts.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
