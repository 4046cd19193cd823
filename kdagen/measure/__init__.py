"""One candidate's numbers: time by the compiler's schedule or on a device, and numerical error."""
